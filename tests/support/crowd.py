"""Owns a build with fakes in a process of its own, of which several run at once.

Knows nothing of what is built.
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.fakes import FakeRunner
from support.spaces import Space


def build(root: str) -> None:
    """Build a workspace, and end with the command's exit code."""
    done = Space(Path(root)).command("build", runner=FakeRunner())
    sys.stderr.write(done.err)
    sys.exit(done.code)
