"""Owns git in a test's workspace.

Knows nothing of what is committed.
"""

from __future__ import annotations

import subprocess

from support.spaces import Space


def git(space: Space, *arguments: str) -> None:
    """Run git in a workspace as an author of its own; raise CalledProcessError where it fails."""
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *arguments], cwd=space.root, check=True, capture_output=True)
