"""Owns what is read of git: files of a revision, and which files git keeps.

Knows nothing of what they hold. Where there is no git, or no repository, there are no such files.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_SECS = 60


def git_files(root: Path, revision: str, names: Iterable[str]) -> list[bytes | None]:
    """Return the files of a revision, None for each that it does not have, or where there is no such revision."""
    return _contents(root, [f"{revision}:./{name}" for name in names])


def file_in(root: Path, name: str, revisions: Iterable[str]) -> list[bytes | None]:
    """Return a file of each revision, None for each that does not have it."""
    return _contents(root, [f"{revision}:./{name}" for revision in revisions])


def _contents(root: Path, asked: Sequence[str]) -> list[bytes | None]:
    if not all(line.isprintable() for line in asked):
        return [None for _ in asked]
    found = list(_answers(_said(root, ["cat-file", "--batch"], "".join(f"{line}\n" for line in asked))))
    return found if len(found) == len(asked) else [None for _ in asked]


def _answers(output: bytes) -> Iterator[bytes | None]:
    """Yield the contents that `git cat-file --batch` gives: each behind a line of name, kind and size, and before a line end."""
    while output:
        line, _, output = output.partition(b"\n")
        fields = line.rsplit(b" ", 2)  # what is missing has "missing" for its size
        if fields[1:2] == [b"blob"] and fields[-1].isdigit():
            size = int(fields[-1])
            yield output[:size]
            output = output[size + 1 :]
        else:
            yield None


class FileRevision(NamedTuple):
    """A revision in which a file has changed."""

    digest: str
    """First letters of its hash."""
    date: str
    """Of the commit, as YYYY-MM-DD."""
    subject: str


def revisions_of(root: Path, name: str, most: int) -> list[FileRevision]:
    """Return the revisions, the newest first, in which a file has changed."""
    listed = _said(root, ["log", f"--max-count={most}", "--format=%h%x00%cs%x00%s", "--", name]).decode(errors="replace")
    return [FileRevision(*line.split("\0", 2)) for line in listed.splitlines() if line.count("\0") >= 2]


def tracked_files(root: Path, folder: str) -> frozenset[Path]:
    """Return the files below a folder that git keeps."""
    names = _said(root, ["ls-files", "-z", "--", folder]).split(b"\0")
    return frozenset(root / os.fsdecode(name) for name in names if name)


def _said(root: Path, arguments: Sequence[str], told: str = "") -> bytes:
    try:
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607  whichever git the user has
            cwd=root,
            input=told.encode(),
            capture_output=True,
            timeout=_SECS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout


def local_branches(root: Path) -> list[str]:
    """Return the branches of the repository that a folder is in, those with the newest commits first."""
    listed = _said(root, ["for-each-ref", "--sort=-committerdate", "--format=%(refname)", "refs/heads"]).decode(errors="replace")
    return [name for name in listed.splitlines() if name]


def clean_revision(root: Path) -> str:
    """Return the revision of the repository that a folder is in; empty where it is in none, or holds what is not committed."""
    revision = _said(root, ["rev-parse", "HEAD"]).decode(errors="replace").strip()
    is_clean = not _said(root, ["status", "--porcelain", "--", "."]).strip()
    return revision if is_clean and len(revision) in {40, 64} else ""
