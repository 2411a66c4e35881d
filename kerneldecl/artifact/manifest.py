"""Owns an artifact's manifest: where artifacts lie, how a manifest is read and checked, the digest of itself in it.

Knows nothing of how artifacts are linked or loaded, and imports neither planner nor linker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerneldecl.store.keys import digest

SCHEMA = 5
MANIFEST = "manifest.json"
DATABASE, WITH_INTRINSICS = "database", "database_intrinsics"
"""Folders of the database that stock TVM opens, and of the one whose schedules name tensor intrinsics, which may be absent."""
_NO_DIGEST = "0" * 64


def artifact_folder(root: Path, name: str, version: str, target: str) -> Path:
    return root / "dist" / f"{name}-{version}" / target


def traceless_file(computation: str) -> str:
    """Return where an artifact keeps the function without a trace of a computation, by the digest of its canonical TensorIR."""
    return f"traceless/{computation}.json"


def artifact_defect(folder: Path, key: str = "") -> str:
    """Return what is wrong with an artifact, as a phrase; empty if it is whole and, where a key is given, has that key."""
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    if not _has_its_digest(folder, manifest):
        return f"{MANIFEST} of the artifact was changed after it was written"
    if key and manifest["key"] != key:
        return "the artifact holds other kernels"
    for name, expected in manifest["files"].items():
        try:
            content = (folder / name).read_bytes()
        except OSError:
            return f"{name} is missing from the artifact"
        if digest(content) != expected:
            return f"{name} of the artifact has other content than its manifest says"
    return ""


def read_manifest(folder: Path) -> dict[str, Any] | str:
    """Return an artifact's manifest, or what is wrong with it as a phrase."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return "there is no artifact yet"
    except (OSError, ValueError):
        return f"{MANIFEST} of the artifact cannot be read"
    if not isinstance(manifest, dict) or not {"schema", "digest", "key", "entries", "missing", "files", "library"} <= manifest.keys():
        return f"{MANIFEST} of the artifact lacks fields"
    if manifest["schema"] != SCHEMA:
        return f"the artifact has schema {manifest['schema']}; this kerneldecl reads {SCHEMA}"
    return manifest


def with_digest(manifest: Mapping[str, Any]) -> bytes:
    """Return the manifest's text with the digest of itself in it, taken while that is all zeros."""
    text = (json.dumps({**manifest, "digest": _NO_DIGEST}, indent=1, sort_keys=True) + "\n").encode()
    return text.replace(_NO_DIGEST.encode(), digest(text).encode(), 1)


def _has_its_digest(folder: Path, manifest: Mapping[str, Any]) -> bool:
    text = (folder / MANIFEST).read_bytes().replace(str(manifest["digest"]).encode(), _NO_DIGEST.encode(), 1)
    return digest(text) == str(manifest["digest"])
