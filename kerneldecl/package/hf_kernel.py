"""Owns a package as a kernel for Hugging Face's `kernels`: a repository with a variant for tvm-ffi, to be uploaded as it is.

Knows nothing of what a package holds. The layout is that which kernels 0.17 loads: build/VARIANT/__init__.py and metadata.json.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerneldecl.artifact.manifest import read_manifest
from kerneldecl.errors import ArtifactError
from kerneldecl.package.folder import ARTIFACT
from kerneldecl.package.wheel_file import module_files
from kerneldecl.toolchain.machines import here
from kerneldecl.toolchain.versions import PINS

_METADATA = "metadata.json"


def write_hf_kernel(package: Path, folder: Path, name: str) -> Path:
    """Write a kernel repository into a new folder and return it; raise ArtifactError where the folder is there."""
    manifest = read_manifest(package / ARTIFACT)
    assert not isinstance(manifest, str), "the package was checked"
    if folder.exists():
        raise ArtifactError(f"{folder} is there already; name another with -o")
    variant = folder / "build" / _variant(manifest)
    files = dict(module_files(package, manifest))
    for file, content in files.items():
        place = variant / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    hashes = {file: base64.b64encode(hashlib.sha256(content).digest()).decode() for file, content in sorted(files.items())}
    metadata = {
        "id": f"{name}_{manifest['key'][:12]}",
        "name": name.replace("_", "-"),
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": _backend(manifest),
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    (variant / _METADATA).write_text(json.dumps(metadata, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_readme(manifest, name), encoding="utf-8")
    return folder


def _variant(manifest: Mapping[str, Any]) -> str:
    ffi, cuda = ("".join(version.split(".")[:2]) for version in (PINS["tvm_ffi"], manifest["toolchain"].get("cuda", PINS["cuda"])))
    return f"tvm-ffi{ffi}-{f'cu{cuda}' if manifest['arch']['kind'] == 'cuda' else 'cpu'}-{here()}-linux"


def _backend(manifest: Mapping[str, Any]) -> dict[str, Any]:
    if manifest["arch"]["kind"] == "cpu":
        return {"type": "cpu"}
    return {"type": "cuda", "archs": [".".join(map(str, manifest["arch"]["gpu"]["compute_capability"]))]}


def _readme(manifest: Mapping[str, Any], name: str) -> str:
    entries = "\n".join(f"- `{entry['name']}`" for entry in manifest["entries"])
    head = "---\nlicense: apache-2.0\ntags:\n- kernels\n---\n"
    said = f"Kernels for {manifest['arch']['model']}, built, verified and measured by kerneldecl: {manifest['name']} {manifest['version']}."
    use = f'```python\nfrom kernels import get_kernel\n\nout = get_kernel("OWNER/{name.replace("_", "-")}").kernels["…"](a, b)\n```'
    return f"{head}\n# {name}\n\n{said}\n\n{use}\n\n{entries}\n"
