"""Owns the tests of packages as wheels: the same bytes for the same package, and a wheel that has others is refused before it is loaded."""

from __future__ import annotations

import io
import json
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kerneldecl.artifact.manifest import with_digest
from kerneldecl.errors import ArtifactError
from kerneldecl.package.wheel_file import module_name, unpack_wheel, write_wheel

NAME = "fakes-1.0-py3-none-linux_x86_64.whl"
MANIFEST = {
    "schema": 5,
    "name": "fakes",
    "version": "1.0",
    "target": "box",
    "key": "0" * 64,
    "entries": [],
    "missing": {},
    "toolchain": {},
    "arch": {"kind": "cpu", "model": "a CPU", "target": {}, "cpu": {"cores": 2}},
    "library": "lib/fakes.so",
    "files": {
        **dict.fromkeys(("lib/fakes.so", "kernels.zip"), "0" * 64),
        **{f"database/database_{name}.json": "0" * 64 for name in ("workload", "tuning_record")},
    },
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Return the wheel of a small package, of which a wheel's reader needs the manifest alone."""
    folder = tmp_path / "package"
    (folder / "artifact/lib").mkdir(parents=True)
    (folder / "artifact/manifest.json").write_bytes(with_digest(MANIFEST))
    (folder / "artifact/lib/fakes.so").write_bytes(b"code")
    (folder / "provenance.json").write_text("{}")
    (tmp_path / "wheel").mkdir()
    return write_wheel(folder, tmp_path / "wheel", "fakes")


def test_a_wheel_is_its_package_a_module_and_the_runtime(wheel: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    assert write_wheel(tmp_path / "package", again, "fakes").read_bytes() == wheel.read_bytes()
    assert wheel.name == NAME
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read("fakes-1.0.dist-info/METADATA").decode()
        record = archive.read("fakes-1.0.dist-info/RECORD").decode()
    assert {"fakes/__init__.py", "fakes/runtime/libtvm_runtime.so", "fakes/package/artifact/lib/fakes.so"} < set(names)
    assert [line.partition(",")[0] for line in record.splitlines()] == names
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert [line.partition("==")[0] for line in needed] == ["Requires-Dist: apache-tvm-ffi"]
    out = tmp_path / "out"
    out.mkdir()
    unpack_wheel(wheel, out)
    assert (out / "artifact/lib/fakes.so").read_bytes() == b"code"


@pytest.mark.parametrize(
    ("text", "name"), [("my-kernels", "my_kernels"), ("3d.ops", "kernels_3d_ops"), ("Ärger", "rger"), ("--", "kernels_")]
)
def test_modules_have_names_that_python_allows(text: str, name: str) -> None:
    assert module_name(text) == name
    assert name.isidentifier()


def test_a_version_that_pip_does_not_know_is_refused(tmp_path: Path, wheel: Path) -> None:
    assert wheel
    (tmp_path / "package/artifact/manifest.json").write_bytes(with_digest({**MANIFEST, "version": "tuesday"}))
    with pytest.raises(ArtifactError, match="PEP 440"):
        write_wheel(tmp_path / "package", tmp_path, "fakes")


def rewritten(wheel: Path, edit: Callable[[list[tuple[zipfile.ZipInfo, bytes]]], object]) -> bytes:
    """Return the wheel with its members edited: a sound zip."""
    with zipfile.ZipFile(wheel) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    edit(members)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive, pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of names twice
        for info, content in members:
            archive.writestr(info, content, info.compress_type)
    return out.getvalue()


Members = list[tuple[zipfile.ZipInfo, bytes]]


def added(name: str, content: bytes = b"", mode: int = 0o644, compression: int = zipfile.ZIP_STORED) -> Callable[[Members], object]:
    def edit(members: Members) -> None:
        info = zipfile.ZipInfo(name)
        info.external_attr, info.compress_type = mode << 16, compression
        members.append((info, content))

    return edit


def replaced(name: str, content: bytes) -> Callable[[Members], object]:
    def edit(members: Members) -> None:
        at = next(at for at, (info, _) in enumerate(members) if info.filename == name)
        members[at] = (members[at][0], content)

    return edit


HOSTILE: Mapping[str, tuple[Callable[[Members], object], str]] = {
    "a module that does more": (replaced("fakes/__init__.py", b"import os; os.abort()\n"), "not the wheel that is written"),
    "another runtime": (replaced("fakes/runtime/libtvm_runtime.so", b"\x7fELF"), "not the wheel that is written"),
    "another record of files": (replaced("fakes-1.0.dist-info/RECORD", b""), "not the wheel that is written"),
    "scripts that pip installs": (added("fakes-1.0.data/scripts/ls", b"#!/bin/sh\n"), "not the wheel that is written"),
    "another package beside it": (added("numpy/__init__.py", b"import os"), "not the wheel that is written"),
    "code that every Python runs": (added("fakes.pth", b"import os"), "not the wheel that is written"),
    "more dependencies": (replaced("fakes-1.0.dist-info/METADATA", b"Requires-Dist: evil\n"), "not the wheel that is written"),
    "a path that leads out": (added("fakes/package/../../../owned"), "no path inside"),
    "an absolute path": (added("/tmp/owned"), "no path inside"),
    "a symbolic link": (added("fakes/package/link", b"/etc/passwd", 0o120777), "no plain file"),
    "a device": (added("fakes/package/null", b"", 0o020644), "no plain file"),
    "a program": (added("fakes/package/run", b"", 0o4755), "no plain file"),
    "a name twice": (added("fakes/package/provenance.json", b"[]"), "holds a file twice"),
    "a bomb": (added("fakes/package/bomb", bytes(1 << 24), compression=zipfile.ZIP_DEFLATED), "compressed or encrypted"),
    "no package": (lambda members: members.__delitem__(slice(1, None)), "there is no artifact"),
    "another version": (
        replaced("fakes/package/artifact/manifest.json", with_digest({**MANIFEST, "version": "2.0"})),
        "not the wheel that is written",
    ),
    "a version that is no file's name": (
        replaced("fakes/package/artifact/manifest.json", with_digest({**MANIFEST, "version": "../../owned"})),
        "no version of a wheel",
    ),
    "a manifest of nothing": (replaced("fakes/package/artifact/manifest.json", json.dumps([]).encode()), "lacks fields"),
}


def refused(content: bytes, tmp_path: Path, why: str, name: str = NAME) -> None:
    path, room = tmp_path / name, tmp_path / "room"
    path.write_bytes(content)
    (room / "out").mkdir(parents=True)
    before = set(sys.modules)
    with pytest.raises(ArtifactError, match=why):
        unpack_wheel(path, room / "out")
    assert not {module for module in set(sys.modules) - before if module.startswith("fakes")}, "nothing of it is loaded"
    assert [each.name for each in room.iterdir()] == ["out"], "nothing is written outside"
    assert not any(path.is_symlink() for path in room.rglob("*"))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_wheel_that_kerneldecl_does_not_write_is_refused(wheel: Path, tmp_path: Path, kind: str) -> None:
    edit, why = HOSTILE[kind]
    refused(rewritten(wheel, edit), tmp_path, why)


def _lying_size(content: bytes) -> bytes:
    """Return a zip whose directory says that a file has four gigabytes."""
    at = content.index(b"PK\x01\x02")
    return content[: at + 20] + struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0) + content[at + 28 :]


DAMAGED: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda content: content[: len(content) // 2], "no sound wheel"),
    "empty": (lambda _: b"", "no sound wheel"),
    "no zip": (lambda _: b"PK" * 1000, "no sound wheel"),
    "with a flipped bit": (lambda content: content.replace(b"code", b"cOde", 1), "not the wheel|no sound wheel"),
    "with something before it": (lambda content: b"#!/bin/sh\n" + content, "not the wheel|no sound wheel"),
    "with something behind it": (lambda content: content + b"more", "not the wheel|no sound wheel"),
    "with a size that lies": (_lying_size, "more than it has bytes|no sound wheel"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_wheel_is_refused(wheel: Path, tmp_path: Path, kind: str) -> None:
    edit, why = DAMAGED[kind]
    refused(edit(wheel.read_bytes()), tmp_path, why)


@pytest.mark.parametrize("name", ["other-1.0-py3-none-linux_x86_64.whl", "fakes-1.0-py3-none-any.whl", "x.whl"])
def test_a_wheel_has_the_name_of_its_package(wheel: Path, tmp_path: Path, name: str) -> None:
    refused(wheel.read_bytes(), tmp_path, "not named as|no artifact", name)
