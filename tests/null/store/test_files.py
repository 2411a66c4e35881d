"""Owns the tests of writing files whole: many at once, and what is left where that fails.

Knows nothing of what the files are for.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import psutil
import pytest
from support.spaces import clean_environment

from kerneldecl.null_build.memo import MEMO, Memo, Row, load_memo, still_holding, write_memo
from kerneldecl.null_build.stamp import context, is_fresh, write_stamp
from kerneldecl.store.files import ignore_results, locked_file, remove_parts, write_whole

WRITERS = 8
ROUNDS = 20
# Each process writes one letter many times, and sees a whole file whenever it looks.
WRITE = """
import sys
from pathlib import Path
from kerneldecl.store.files import ignore_results, remove_parts, write_whole
path, letter = Path(sys.argv[1]), sys.argv[2]
for _ in range(50):
    write_whole(path, letter * 100_000, durable=False)
    content = path.read_text()
    assert len(content) == 100_000 and len(set(content)) == 1, "torn"
"""

# Writes a file and never gets further than the disk.
STUCK = """
import os, sys
from pathlib import Path
from kerneldecl.store.files import write_whole
def stuck(_):
    print("stuck", flush=True)
    sys.stdin.read()
os.fsync = stuck
write_whole(Path(sys.argv[1]), "content", durable=True)
"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def at_once(write: Callable[[int], None]) -> None:
    barrier = Barrier(WRITERS)

    def several(writer: int) -> None:
        for _ in range(ROUNDS):
            barrier.wait(60)
            write(writer)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(several, range(WRITERS)))


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("content", ["text é\n", b"\x00\xff"])
def test_a_file_is_made_with_its_folders_and_replaced(tmp_path: Path, content: bytes | str, durable: bool) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_whole(path, "before", durable=durable)
    write_whole(path, content, durable=durable)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert path.stat().st_mode & 0o777 == 0o644
    assert names_in(path.parent) == ["file"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, "before", durable=True)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "after", durable=True)
    assert path.read_text(encoding="utf-8") == "before"
    assert names_in(tmp_path) == ["file"]


def test_what_is_durable_is_handed_to_the_disk_whole_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "file", list[tuple[int, bool]]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_size, path.exists())))
    write_whole(path, "x" * 100, durable=True)
    assert synced == [(100, False)]


def test_parts_of_killed_writers_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    named, other = tmp_path / "cache" / "record" / "a.json", tmp_path / "other" / "b.json"
    keep = [tmp_path / "notes.part", tmp_path / "cache" / ".gitignore"]

    def started(path: Path) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", STUCK, str(path)], env=clean_environment(), text=True, **pipes)  # type: ignore[call-overload]
        assert process.stdout.readline() == "stuck\n"
        return process  # type: ignore[no-any-return]

    writers = [started(path) for path in (named, other, tmp_path / "c.json")]
    for path in keep:
        path.write_text("")
    remove_parts(tmp_path, {"cache"})
    assert len(list(tmp_path.rglob(".*.part"))) == 3
    for writer in writers:
        writer.kill()
        writer.communicate()
    remove_parts(tmp_path, {"cache"})
    assert [part.parent.name for part in tmp_path.rglob(".*.part")] == ["other"], "nobody said that parts lie there"
    assert all(path.exists() for path in keep)


def test_git_is_told_once_what_to_ignore_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    ignore = tmp_path / ".gitignore"
    ignore.write_text("# é\n", encoding="utf-8")
    assert ignore_results(tmp_path) == [ignore]
    text = ignore.read_text(encoding="utf-8")
    assert text.startswith("# é\n")
    assert {"/dist/", "*.part", "/cache/*", "!/cache/record/"} <= set(text.splitlines())
    assert ignore_results(tmp_path) == []
    assert ignore.read_text(encoding="utf-8") == text
    ignore.unlink()
    assert ignore_results(tmp_path) == [ignore]


def test_processes_that_write_one_file_at_once_leave_one_of_their_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    commands = [[sys.executable, "-c", WRITE, str(path), letter] for letter in "abcdefgh"]
    processes = [subprocess.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, text=True) for command in commands]
    assert [process.communicate(timeout=120)[1] for process in processes] == [""] * WRITERS
    assert [process.returncode for process in processes] == [0] * WRITERS
    assert names_in(tmp_path) == ["file"]


def test_builds_that_end_at_once_leave_a_memo_and_a_stamp(tmp_path: Path) -> None:
    document = {"workload": [{"name": "a"}]}
    row = Row(name="a", target="t", lower_key="l", propose_key="p", tune_key="t", build_key="b", link_digest="d", entry_digest="e")
    (tmp_path / "cache").mkdir()
    (tmp_path / "workloads.toml").write_text("", encoding="utf-8")

    def end(writer: int) -> None:
        write_memo(tmp_path, document, Memo({str(writer): [row]}, {}, {}), context(str(tmp_path), []), [], [])
        write_stamp(str(tmp_path), [], [], 1)

    at_once(end)
    fields = load_memo(tmp_path)
    assert fields is not None
    known = still_holding(tmp_path, fields, document)
    assert known is not None
    assert list(known.tables.values()) == [[row]]
    assert isinstance(known.tables[min(known.tables)][0], Row)
    assert is_fresh(str(tmp_path)) == 1
    assert names_in(tmp_path / "cache") == [Path(MEMO).name, "stamp.txt"]


def test_a_memo_of_another_form_does_not_hold(tmp_path: Path) -> None:
    document = {"workload": [{"name": "a"}]}
    write_memo(tmp_path, document, Memo({"table": [("too", "short")]}, {}, {}), context(str(tmp_path), []), [], [])  # type: ignore[dict-item]
    fields = load_memo(tmp_path)
    assert fields is None or still_holding(tmp_path, fields, document) is None


def test_a_lock_that_somebody_else_took_first_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sweeps what the dead have left may lock a new file before its maker does."""
    real, calls = fcntl.flock, list[int]()

    def flock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise BlockingIOError
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    before = psutil.Process().num_fds()
    descriptor, path = locked_file(tmp_path, "worker-", ".lock")
    assert path.exists()
    os.close(descriptor)
    assert len(calls) == 2
    assert psutil.Process().num_fds() == before
