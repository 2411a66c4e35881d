"""Owns the shortest way to "nothing to do": whether anything at all changed since the last complete build.

Knows nothing of declarations, plans or TVM, and imports next to nothing: a null build ends here.

The last complete build leaves a stamp, lines of text with five digests: of workloads.toml, of its lock, of what else a plan depends on
(contents of rules, policies, templates and archs, this package, the machine), of the times of the tuning records, and
of the listing of the artifacts. Where none differs, the plan is empty as before; otherwise a plan is made. A listing holds
each file's size and times: a file that was written to at all counts as changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from kerneldecl.store.regular import read_file

try:
    from _blake2 import blake2b  # hashlib loads OpenSSL first, which takes a tenth of a null build
except ImportError:
    from hashlib import blake2b

STAMP = "cache/stamp.txt"
_FIRST_LINE = "stamp 3"
_DECLARED = ("declared ", "entries ")
"""What the lines that depend on the text of workloads.toml begin with."""
_DIGEST_BYTES = 32
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PLUGINS = ("rules", "policies", "templates", "archs")
# For lower records, only their folder's time is compared: a call of stat() for each file would be most of a null build of ten
# thousand entries, and they cannot make the artifact wrong. Of an artifact, every file is listed: it has few.
_RECORDS = ("cache/record/tune", "cache/local/tune", "cache/local/rank")
_ARTIFACT = ("", "lib", "database", "database_intrinsics", "traceless")
_VARYING = (b"cpu MHz", b"bogomips", b"processor", b"core id", b"apicid", b"initial apicid")


def is_fresh(root: str) -> int | None:
    """Return the number of entries if everything is as the last complete build left it, else None."""
    try:
        lines = _read(root)
        [entries] = _values(lines, "entries ")
        now = _stamp(root, _values(lines, "extra "), _values(lines, "folder "), int(entries))
    except (OSError, ValueError):
        return None
    return int(entries) if lines == now else None


def write_stamp(root: str, extra: Iterable[str], folders: Iterable[str], entries: int, read: tuple[str, str] | None = None) -> None:
    """Leave the stamp of a complete build.

    `extra` are files outside the plug-in folders that keys depend on, `folders` those of the artifacts, both as paths
    from the workspace's root; `read` are the `digest` of workloads.toml and the `context` that the build has read.
    """
    _write(root, _stamp(root, sorted(extra), sorted(folders), entries, read))


def _write(root: str, stamp: list[str]) -> None:
    from pathlib import Path

    from kerneldecl.store.files import write_whole  # a null build needs neither

    write_whole(Path(root, STAMP), os.fsencode("\n".join(stamp)), durable=False)


def restamp(root: str, entries: int) -> int:
    """Renew the stamp where only the text of workloads.toml has changed, and return the number of entries; else 0.

    The caller knows that the new text declares the same.
    """
    try:
        old = _read(root)
        now = _stamp(root, _values(old, "extra "), _values(old, "folder "), entries)
    except (OSError, ValueError):
        return 0
    if [line for line in old if not line.startswith(_DECLARED)] != [line for line in now if not line.startswith(_DECLARED)]:
        return 0
    _write(root, now)
    return entries


def _read(root: str) -> list[str]:
    return os.fsdecode(read_file(os.path.join(root, STAMP))).split("\n")


def _values(lines: Iterable[str], name: str) -> list[str]:
    return [line.removeprefix(name) for line in lines if line.startswith(name)]


def _stamp(root: str, extra: list[str], folders: list[str], entries: int, read: tuple[str, str] | None = None) -> list[str]:
    declared, known_context = read or (digest(_content(os.path.join(root, "workloads.toml"))), context(root, extra))
    return [
        _FIRST_LINE,
        f"declared {declared}",
        f"lock {digest(_content(os.path.join(root, 'workloads.lock')))}",
        f"context {known_context}",
        f"artifacts {artifacts(root, folders)}",
        f"records {records(root)}",
        *(f"extra {name}" for name in extra),
        *(f"folder {name}" for name in folders),
        f"entries {entries}",
    ]


def context(root: str, extra: Iterable[str], sources: str = "", surroundings_digest: str = "") -> str:
    """Return a digest of what keys depend on besides workloads.toml: plug-ins, `extra` files, this package, the machine.

    Files of the workspace are read from `sources`, a snapshot, if it is given; `surroundings_digest` are the `surroundings` as they were.
    """
    sources = sources or root
    plugins = (path[len(sources) + 1 :] for folder in _PLUGINS for path in _sources(os.path.join(sources, folder)))
    state = blake2b((surroundings_digest or surroundings()).encode(), digest_size=_DIGEST_BYTES)
    for name in (*extra, *plugins):
        content = _content(os.path.join(root if name.startswith("..") else sources, name))
        state.update(os.fsencode(f"{name} {len(content)}\n") + content)
    return state.hexdigest()


def surroundings() -> str:
    """Return a digest of the listing of this package, and of the machine."""
    return digest(_machine() + os.fsencode("".join(sorted(_lines(_PACKAGE, is_deep=True)))))


def artifacts(root: str, folders: Iterable[str]) -> str:
    """Return a digest of the listing of the artifacts in these folders."""
    return _listing(root, [os.path.join(folder, below) for folder in folders for below in _ARTIFACT])


def records(root: str) -> str:
    """Return when the folders of tuning records were changed, how many files they hold, and the sum of the times when these were.

    A file that is added, removed or renamed changes its folder's time, one that is written to changes its own, which nobody can set.
    """
    return " ".join(_times(os.path.join(root, folder)) for folder in _RECORDS)


def _times(folder: str) -> str:
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return "none"
    try:
        # Relative to the open folder: the way to it would be a fifth of each call.
        with os.scandir(opened) as entries:
            changed_ns = [entry.stat().st_ctime_ns for entry in entries]
        return f"{os.fstat(opened).st_ctime_ns}/{len(changed_ns)}/{sum(changed_ns)}"
    finally:
        os.close(opened)


def digest(content: bytes) -> str:
    """Return a digest of content in hexadecimal. Stamps are compared with stamps alone."""
    return blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def _sources(folder: str) -> list[str]:
    """Return the plug-ins in a folder, with the neighbours in its subfolders."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    below = [path for entry in entries if entry.is_dir() and entry.name != "__pycache__" for path in _sources(entry.path)]
    return sorted([*(entry.path for entry in entries if entry.name.endswith((".py", ".toml"))), *below])


def _content(path: str) -> bytes:
    try:
        return read_file(path)
    except FileNotFoundError:
        return b""


def _listing(root: str, folders: Iterable[str]) -> str:
    """Return a digest of names, sizes and times of what lies directly in the folders."""
    lines = sorted(line for folder in folders for line in _lines(os.path.join(root, folder)))
    return digest(os.fsencode("".join(lines)))  # a path need not be UTF-8


def _lines(folder: str, *, is_deep: bool = False) -> Iterator[str]:
    """Yield a line for each entry of a folder, and with `is_deep` for all below it, however deep."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name == "__pycache__":
            continue
        if is_deep and entry.is_dir():
            # Its files say what changed in it. Its own times also change when a first build has Python put bytecode there.
            yield from _lines(entry.path, is_deep=True)
        else:
            status = entry.stat()
            # ctime, the time of the inode's last change, cannot be set back by those who set a file's own time.
            yield f"{folder}/{entry.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n"


def _machine() -> bytes:
    """Return what `host` is detected from, without what differs from one reading to the next."""
    lines = [line for line in _content("/proc/cpuinfo").splitlines() if not line.startswith(_VARYING)]
    rest = (str(sorted(os.sched_getaffinity(0))).encode(), _content("/sys/fs/cgroup/cpu.max"), str(os.uname().machine).encode())
    return b"\n".join((*dict.fromkeys(lines), *rest))
