"""Owns a bundle's folder: its files with their digests, the signature of these, and the writing of it whole.

Knows nothing of what the files mean.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneldecl.errors import ArtifactError, printable
from kerneldecl.store.inside import MOST_JSON_BYTES, Inside, UnsafeFileError, is_digest, read_regular
from kerneldecl.store.keys import digest
from kerneldecl.store.signing import Sign, Verify

SCHEMA = 4
FILE, SIGNATURE = "bundle.json", "bundle.sig"
AGAIN = "write the bundle again with `kerneldecl build --no-measure`"
_MOST_SIGNATURE_BYTES = 1 << 10

Content = bytes | str | Path
"""What a file of a bundle holds, or the file that it is copied from."""


def write_files(folder: Path, contents: Iterable[tuple[str, Content]], entries: Sequence[Any], sign: Sign | None) -> None:
    """Write a bundle whole, in place of what was there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left)  # of a build that was killed while it wrote
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for name, source in contents:
            place = fresh / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.encode() if isinstance(source, str) else source.read_bytes() if isinstance(source, Path) else source)
        files = {str(path.relative_to(fresh)): digest(path.read_bytes()) for path in sorted(fresh.rglob("*")) if path.is_file()}
        text = json.dumps({"schema": SCHEMA, "files": files, "entries": entries}, indent=1, sort_keys=True) + "\n"
        (fresh / FILE).write_text(text, encoding="utf-8")
        if sign:
            (fresh / SIGNATURE).write_text(sign(_signed_text(text.encode())) + "\n", encoding="utf-8")
        fresh.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        fresh.replace(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read_files(folder: Path, verify: Verify | None) -> dict[str, Any]:
    """Return what a bundle says of its files and entries, once each file was compared.

    Raise ArtifactError where it is none, any file is wrong or not listed, or nobody has signed it by whom it must be signed.
    """
    text = _text(folder)
    if verify and not verify(_signed_text(text), _signature(folder)):
        raise ArtifactError(f"{folder} is signed by nobody who is trusted; get it from where it was written, or name its key (--key)")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ArtifactError(f"{folder / FILE} is not JSON (cut off?); {AGAIN}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ArtifactError(f"{folder / FILE} is not of schema {SCHEMA}; write it with this version's `kerneldecl build --no-measure`")
    if defect := _wrong_files(folder, content.get("files")):
        raise ArtifactError(f"{folder}: {defect}; {AGAIN}")
    if not isinstance(content.get("entries"), list):
        raise ArtifactError(f"{folder / FILE} has no list of entries; {AGAIN}")
    return content


def _text(folder: Path) -> bytes:
    try:
        return read_regular(folder / FILE, MOST_JSON_BYTES)
    except UnsafeFileError as error:
        raise ArtifactError(f"{folder / FILE} {error}; {AGAIN}") from None
    except OSError as error:
        raise ArtifactError(f"{folder} is no bundle: {FILE}: {error.strerror}; `kerneldecl build --no-measure` writes one") from None


def _signature(folder: Path) -> str:
    """Return the line that signs a bundle; empty where there is none."""
    try:
        return read_regular(folder / SIGNATURE, _MOST_SIGNATURE_BYTES).decode(errors="replace").strip()
    except (OSError, UnsafeFileError):
        return ""


def _signed_text(text: bytes) -> bytes:
    """Return what is signed of a bundle: the text that has all digests."""
    return f"kerneldecl bundle 1\n{digest(text)}\n".encode()


def _wrong_files(folder: Path, files: object) -> str:
    """Return what is wrong with a bundle's files, as a phrase: each is listed with its digest, and nothing else lies there."""
    if not isinstance(files, dict) or not all(map(is_digest, files.values())):
        return f"{FILE} lists no files with their digests"
    with Inside(folder) as inside:
        defects = (inside.defect(name, expected, FILE) for name, expected in files.items())
        if wrong := next(filter(None, defects), ""):
            return wrong
    there = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    # A module beside the listed ones would be imported with them.
    known: Mapping[str, object] = {**files, FILE: "", SIGNATURE: ""}
    return next((f"{printable(name)} is not listed in {FILE}" for name in there if name not in known), "")
