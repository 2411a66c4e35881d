"""Paths that are not what they have to be: each ends in one sentence that says what is there, at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.spaces import FAKES, Space

from kerneldecl.store.regular import read_file


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    found = Space(tmp_path_factory.mktemp("built") / "w").write(FAKES)
    assert found.command("build", runner=FakeRunner()).code == 0
    return found


@pytest.fixture
def space(built: Space, tmp_path: Path) -> Iterator[Space]:
    """Return a copy of a built workspace, in whose folder relative paths are short enough for sockets."""
    shutil.copytree(built.root, tmp_path / "w")
    with contextlib.chdir(tmp_path / "w"):
        yield Space(tmp_path / "w")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


MAKE: dict[str, Callable[[Path], object]] = {
    "a link to nowhere": lambda path: path.symlink_to("nowhere/at/all"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a socket": listening,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a file": Path.touch,
    "a folder": Path.mkdir,
}
WORDS = {
    "a link to nowhere": "a symbolic link to nowhere/at/all, where nothing is; make that, or remove the link",
    "a link to itself": "a symbolic link to {name}, which leads nowhere; remove it",
    "a device": "a device, by a symbolic link to /dev/zero; a {wanted} belongs there: move away what is there",
    **{each: f"{each}; a {{wanted}} belongs there: move away what is there" for each in ("a pipe", "a socket", "a file", "a folder")},
}


def put(path: Path, what: str) -> None:
    """Put something in the place of a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    MAKE[what](path)


@pytest.mark.parametrize("what", [each for each in MAKE if each != "a folder"])
@pytest.mark.parametrize("name", ["cache", "cache/record", "dist", "dist/fakes-1.0/box"])
def test_what_stands_in_the_place_of_a_folder_is_told(space: Space, name: str, what: str) -> None:
    put(space.root / name, what)
    done = space.command("build", runner=FakeRunner())
    told = WORDS[what].format(name=Path(name).name, wanted="folder")
    assert (done.code, done.err.splitlines()[-1]) == (10, f"error: {space.root / name} is {told}")


@pytest.mark.parametrize("what", MAKE)
@pytest.mark.parametrize("name", ["cache/stamp.txt", "cache/memo.json", "cache/state.json", "cache/events.jsonl", "workloads.lock"])
def test_what_stands_in_the_place_of_a_file_that_a_build_writes_is_told_or_replaced(space: Space, name: str, what: str) -> None:
    put(space.root / name, what)
    done = space.command("build", runner=FakeRunner())
    told = WORDS[what].format(name=Path(name).name, wanted="file")
    assert done.code == 0 or (done.code, done.err.splitlines()[-1]) == (10, f"error: {space.root / name} is {told}")
    assert not (space.root / "cache/nowhere").exists()


@pytest.mark.parametrize("what", ["a pipe", "a device", "a folder"])
def test_a_declaration_that_is_no_file_is_a_mistake(space: Space, what: str) -> None:
    put(space.root / "workloads.toml", what)
    done = space.command("plan")
    assert done.code == 2
    assert done.err.startswith("error: workloads.toml: cannot be read: ")


def test_only_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"found")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_file(tmp_path / "link") == b"found"
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match=r"it is no file|Is a directory"):
            read_file(path)


@pytest.mark.parametrize("what", ["a link to nowhere", "a pipe", "a device", "a folder"])
@pytest.mark.parametrize("name", ["rules/scale.py", "policies/plain.py", "archs/test-cpu.toml"])
def test_what_is_no_file_is_no_plug_in(space: Space, name: str, what: str) -> None:
    put(space.root / name, what)
    done = space.command("plan")
    assert done.code == 2
    assert f'"{Path(name).stem}"?' not in done.err, "what is not there is no suggestion"
