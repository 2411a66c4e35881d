"""Owns workspaces as CI has them: a fresh clone with the committed records, the same with artifact and blobs, this repository edited.

Knows nothing of what is timed in them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

COMMITTED = ("workloads.toml", "workloads.lock", "policies", "archs", "cache/record")
MADE = ("dist", "cache/blob")
LEFT = ("memo.json", "stamp.txt", "state.json")
"""What a build leaves in the cache for the next one, and a clone lacks."""
REPOSITORY = Path(__file__).resolve().parents[2]
POLICY = "kerneldecl/policies/gpu_matmul_tc.py"
"""A policy that `auto` asks for every GEMM on a GPU."""


def clone(root: Path, to: Path, *, with_artifact: bool) -> Path:
    """Copy what of a workspace is committed, and on request what a build has made of it; return the folder."""
    if not to.exists():
        for name in (*COMMITTED, *(MADE if with_artifact else ())):
            copy = shutil.copytree if (root / name).is_dir() else shutil.copy2
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            copy(root / name, to / name)
    return to


def forget(root: Path) -> None:
    """Remove what the last build has left for the next one."""
    for name in LEFT:
        (root / "cache" / name).unlink(missing_ok=True)


def repository(to: Path) -> Path:
    """Copy the files of this repository that git knows, as they stand; return the folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if not (to / name).exists() and (REPOSITORY / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, to / name)
    return to


def comment(root: Path, number: int) -> None:
    """Write a comment into a policy of a copy of this repository, each time another one."""
    text = (REPOSITORY / POLICY).read_text(encoding="utf-8")
    (root / POLICY).write_text(f"{text}# comment {number}\n", encoding="utf-8")
