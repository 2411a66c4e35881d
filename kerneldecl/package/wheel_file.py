"""Owns a package as a wheel that pip installs: the package, a module that calls its kernels, and TVM's runtime; and reading one.

Knows nothing of what a package holds. A wheel's bytes follow from its package, and one is read only if it has the bytes that would be
written of the package in it: so nothing of it is what kerneldecl has not written, its Python and its libraries included.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kerneldecl.artifact.archive import write_archive
from kerneldecl.artifact.manifest import machine_of, read_manifest
from kerneldecl.errors import ArtifactError, ToolchainError, printable
from kerneldecl.package.folder import ARTIFACT
from kerneldecl.package.tar import MOST_MEMBERS, files_below
from kerneldecl.store.inside import MOST_BYTES, UnsafeFileError, is_inner_name, opened_regular
from kerneldecl.toolchain.machines import here
from kerneldecl.toolchain.versions import PINS

WHEEL = ".whl"
_TAG = f"py3-none-linux_{here()}"
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?")
_FILE = re.compile(r"([A-Za-z][A-Za-z0-9_]*)-([^-]+)-" + re.escape(_TAG) + re.escape(WHEEL))
_RUNTIMES = {"cpu": ("libtvm_runtime.so",), "cuda": ("libtvm_runtime.so", "libtvm_runtime_cuda.so")}
_NEEDS = {"cpu": (), "cuda": ("nvidia-cuda-runtime>=13,<14",)}


def module_name(text: str) -> str:
    """Return a name in letters that Python and wheels allow: my-kernels is my_kernels."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").lower()
    return name if name[:1].isalpha() else f"kernels_{name}"


def write_wheel(package: Path, folder: Path, name: str) -> Path:
    """Write the wheel of a package into a folder and return its path; raise ArtifactError where its version is none of Python's."""
    manifest = read_manifest(package / ARTIFACT)
    assert not isinstance(manifest, str), "the package was checked"
    version, kind = manifest["version"], manifest["arch"]["kind"]
    if not _VERSION.fullmatch(version):
        raise ArtifactError(f"a wheel cannot have the version {version!r}: write it as 1.2.3, 1.2rc1 or 1.2.dev3 (PEP 440)")
    path = folder / f"{name}-{version}-{_TAG}{WHEEL}"
    members = [*((f"{name}/{file}", content) for file, content in module_files(package, manifest)), *_about(name, version, kind)]
    listed = f"{name}-{version}.dist-info/RECORD"
    write_archive(path, [*members, (listed, _record(members, listed))])
    return path


def module_files(package: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a Python module that calls a package's kernels: by itself, but for apache-tvm-ffi.

    Raise ToolchainError where TVM's runtime for the artifact's machine is not here.
    """
    if (machine := machine_of(manifest)) != here():
        raise ToolchainError(f"a wheel holds TVM's runtime, and that of {machine} is not here; pack the kernels there, or as a tar")
    yield "__init__.py", (Path(__file__).with_name("wheel_module.py")).read_bytes()
    yield from ((f"package/{file}", (package / file).read_bytes()) for file in files_below(package))
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise ToolchainError("a wheel holds TVM's runtime, and apache-tvm is not installed")
    yield from ((f"runtime/{file}", (Path(spec.origin).parent / "lib" / file).read_bytes()) for file in _RUNTIMES[manifest["arch"]["kind"]])


def _about(name: str, version: str, kind: str) -> list[tuple[str, bytes]]:
    needs = (f"apache-tvm-ffi=={PINS['tvm_ffi']}", *_NEEDS[kind])
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name.replace('_', '-')}",
        f"Version: {version}",
        "Summary: Tuned kernels for torch, JAX and NumPy, built by kerneldecl; with the runtime of Apache TVM (Apache-2.0)",
        "Requires-Python: >=3.9",
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: kerneldecl", "Root-Is-Purelib: false", f"Tag: {_TAG}"]
    folder = f"{name}-{version}.dist-info"
    return [(f"{folder}/{file}", "".join(f"{line}\n" for line in text).encode()) for file, text in (("METADATA", lines), ("WHEEL", wheel))]


def _record(members: list[tuple[str, bytes]], listed: str) -> bytes:
    rows = [f"{name},sha256={_hashed(content)},{len(content)}" for name, content in members]
    return "".join(f"{row}\n" for row in [*rows, f"{listed},,"]).encode()


def _hashed(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def unpack_wheel(path: Path, folder: Path) -> None:
    """Write the package of a wheel into a folder that is empty; raise ArtifactError where the wheel is not what kerneldecl writes of it."""
    found = _FILE.fullmatch(path.name)
    if found is None:
        raise ArtifactError(f"{path} is not named as kerneldecl names wheels, NAME-VERSION-{_TAG}{WHEEL}")
    try:
        with opened_regular(path) as file, zipfile.ZipFile(file) as archive:
            size = file.seek(0, 2)
            for info, name in list(_packed(archive, f"{found[1]}/package/", size)):
                place = folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(archive.read(info))
    except UnsafeFileError as error:
        raise ArtifactError(f"{path} {error}") from None
    except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError, EOFError) as error:
        raise ArtifactError(f"{path} is no sound wheel ({printable(str(error))[:100]})") from None
    _compare(path, folder, found[1])


def _packed(archive: zipfile.ZipFile, below: str, size: int) -> Iterator[tuple[zipfile.ZipInfo, str]]:
    """Yield the members of the package with their names in it, once all are known to be harmless; raise UnsafeFileError."""
    members = archive.infolist()
    names = {info.filename for info in members}
    if len(members) > MOST_MEMBERS:
        raise UnsafeFileError(f"holds more than {MOST_MEMBERS} files")
    if len(names) < len(members):
        raise UnsafeFileError("holds a file twice")
    for info in members:
        if not is_inner_name(info.filename):
            raise UnsafeFileError(f"holds {printable(info.filename)[:80]}, which is no path inside it")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 0x1:
            raise UnsafeFileError(f"holds {printable(info.filename)[:80]} compressed or encrypted, as no wheel of kerneldecl does")
        if info.external_attr != 0o644 << 16:
            raise UnsafeFileError(f"holds {printable(info.filename)[:80]}, which is no plain file")
    if sum(info.file_size for info in members) > min(size, MOST_BYTES):
        raise UnsafeFileError("says that it holds more than it has bytes")
    yield from ((info, info.filename.removeprefix(below)) for info in members if info.filename.startswith(below))


def _compare(path: Path, package: Path, name: str) -> None:
    """Raise ArtifactError unless a wheel is, byte for byte, what is written of its package."""
    if isinstance(manifest := read_manifest(package / ARTIFACT), str):
        raise ArtifactError(f"{path}: {manifest}")
    if not _VERSION.fullmatch(manifest["version"]):
        raise ArtifactError(f"{path}: {printable(manifest['version'])[:40]} is no version of a wheel")
    with tempfile.TemporaryDirectory(dir=package.parent) as beside:
        written = write_wheel(package, Path(beside), name)
        if written.name != path.name or written.stat().st_size != path.stat().st_size or written.read_bytes() != path.read_bytes():
            also = "or it was written by another version of kerneldecl or TVM"
            raise ArtifactError(f"{path} is not the wheel that is written of its package: other files were changed or added, {also}")
