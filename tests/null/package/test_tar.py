"""Owns the tests of packages as tars: the same bytes for the same files, and every tar that is another is refused with nothing written."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kerneldecl.errors import ArtifactError
from kerneldecl.package import tar as tars
from kerneldecl.package.tar import unpack_tar, write_tar

FILES = {"a.txt": b"first", "b/c.txt": b"x" * 1000, "b/d/e.bin": bytes(range(256)) * 2, "empty": b""}


def folder_of(tmp_path: Path, files: Mapping[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "folder"


def test_what_is_written_is_read_and_rights_and_dates_do_not_count(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    write_tar(folder, tmp_path / "one.tar")
    os.utime(folder / "a.txt", (1, 1))
    (folder / "a.txt").chmod(0o700)
    write_tar(folder, tmp_path / "two.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as read:  # it is a tar that others read
        assert read.getnames() == sorted(FILES)
    (tmp_path / "out").mkdir()
    unpack_tar(tmp_path / "one.tar", tmp_path / "out")
    assert {str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == FILES


@pytest.mark.parametrize("name", ["link", "folder link", "pipe"])
def test_what_is_no_file_is_not_packed(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    if name == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/etc" if name == "folder link" else "/etc/passwd")
    with pytest.raises(ArtifactError, match=f"{name} cannot be packed"):
        write_tar(folder, tmp_path / "one.tar")


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.USTAR_FORMAT)


def signed(block: bytes, at: int, change: bytes) -> bytes:
    """Return a header with other bytes in it and the checksum of these."""
    changed = bytearray(block)
    changed[at : at + len(change)] = change
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)


END = bytes(1024)
GOOD = header("a", 3) + b"abc" + bytes(509)


def in_format(form: int, **fields: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as made:
        info = tarfile.TarInfo("n" * 300 if form == tarfile.GNU_FORMAT else "name")
        for field, value in fields.items():
            setattr(info, field, value)
        made.addfile(info)
    return out.getvalue()


HOSTILE: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "an absolute path": (lambda: header("/tmp/owned") + END, "no path inside"),
    "a path that leads out": (lambda: header("../owned") + END, "no path inside"),
    "a path that leads out later": (lambda: header("a/../../owned") + END, "no path inside"),
    "a path with an empty part": (lambda: header("a//b") + END, "no path inside"),
    "control characters": (lambda: header("a\x1b[2J") + END, "no path inside"),
    "a symbolic link": (lambda: header("a", kind=tarfile.SYMTYPE, linkname="/etc") + END, "symbolic link"),
    "a hard link": (lambda: header("a", kind=tarfile.LNKTYPE, linkname="/etc/passwd") + END, "hard link"),
    "a character device": (lambda: header("a", kind=tarfile.CHRTYPE, devmajor=1, devminor=8) + END, "device"),
    "a block device": (lambda: header("a", kind=tarfile.BLKTYPE) + END, "device"),
    "a pipe": (lambda: header("a", kind=tarfile.FIFOTYPE) + END, "pipe"),
    "a folder": (lambda: header("a", kind=tarfile.DIRTYPE) + END, "folder"),
    "a sparse file": (lambda: header("a", kind=b"S") + END, "another header"),
    "an unknown kind": (lambda: header("a", kind=b"Z") + END, "another header"),
    "an extended header": (lambda: in_format(tarfile.PAX_FORMAT, pax_headers={"path": "../owned"}), "another header|no path"),
    "a long name of GNU": (lambda: in_format(tarfile.GNU_FORMAT), "another header|no path"),
    "a name twice": (lambda: GOOD + GOOD + END, "twice"),
    "names out of order": (lambda: header("b") + header("a") + END, "not in order"),
    "a file below a file": (lambda: header("a") + header("a!") + header("a/b") + END, "below a file"),
    "a file that runs as root": (lambda: header("a", mode=0o4755) + END, "another header"),
    "an owner": (lambda: header("a", uid=1000) + END, "another header"),
    "a date": (lambda: header("a", mtime=1) + END, "another header"),
    "a huge file": (lambda: header("a", 1 << 32) + END, "ends within|at most"),
    "a size of eight exabytes": (lambda: signed(header("a"), 124, b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7) + END, "bytes; at most"),
    "a negative size": (lambda: signed(header("a"), 124, b"\xff" * 12) + END, "bytes; at most|no tar"),
    "a wrong checksum": (lambda: GOOD[:148] + b"000000\0 " + GOOD[156:] + END, "no tar, or damaged"),
    "something behind a file": (lambda: GOOD[:-1] + b"!" + END, "behind a"),
    "something behind the end": (lambda: GOOD + END + b"!", "behind its end|end"),
    "no end": (lambda: GOOD, "ends within|cut off"),
    "an end of one block": (lambda: GOOD + END[:512], "ends within|end"),
    "half a header": (lambda: GOOD + header("b")[:200], "ends within|cut off"),
    "a file that is cut off": (lambda: header("a", 3000) + b"abc", "ends within"),
    "nothing": (lambda: b"", "cut off"),
    "a compressed tar": (lambda: gzip.compress(GOOD + END), "compressed|cut off"),
    "a bomb": (lambda: gzip.compress(bytes(1 << 24)), "compressed|no tar"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_tar_that_kerneldecl_does_not_write_is_refused_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    make, why = HOSTILE[kind]
    path, out = tmp_path / "package.tar", tmp_path / "out"
    path.write_bytes(make())
    out.mkdir()
    with pytest.raises(ArtifactError, match=why):
        unpack_tar(path, out)
    assert list(out.iterdir()) == []
    assert {each.name for each in tmp_path.iterdir()} == {"package.tar", "out"}


def test_more_files_than_a_package_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "MOST_MEMBERS", 3)
    (tmp_path / "package.tar").write_bytes(b"".join(header(f"f{n}") for n in range(5)) + END)
    (tmp_path / "out").mkdir()
    with pytest.raises(ArtifactError, match="more than 3 files"):
        unpack_tar(tmp_path / "package.tar", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["a pipe", "a link", "a folder"])
def test_only_a_regular_file_is_read_as_a_tar(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "package.tar"
    {"a pipe": lambda: os.mkfifo(path), "a link": lambda: path.symlink_to("/dev/zero"), "a folder": path.mkdir}[kind]()
    with pytest.raises(ArtifactError, match="no regular file"):
        unpack_tar(path, tmp_path)
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        unpack_tar(tmp_path / "absent.tar", tmp_path)
