"""Owns packages in OCI registries: one blob, a package's tar, behind a manifest that names it by digest.

Knows nothing of what a package holds. The library `oras` speaks the protocol and finds credentials (those of `docker login`); it is
installed with `kerneldecl[oci]`. What a registry answers anybody may have written: sizes are bounded, each digest is compared, and
credentials go to the registry alone, whatever it redirects to.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneldecl.errors import ArtifactError, ToolchainError, printable
from kerneldecl.store.inside import MOST_BYTES, is_digest
from kerneldecl.store.keys import digest

if TYPE_CHECKING:
    from kerneldecl.package.registry_session import Client

SCHEME = "oci://"
TYPE = "application/vnd.kerneldecl.package.v1"
LAYER = f"{TYPE}.tar"
CONTENT = "urn.kerneldecl.content"
"""Annotation with the digest of a package's content, without what is said about it."""
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_EMPTY = b"{}"
_CONFIG = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": f"sha256:{digest(_EMPTY)}", "size": len(_EMPTY)}
_MOST_MANIFEST_BYTES = 1 << 20
_REFERENCE = re.compile(
    r"oci://(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+)(?P<port>:\d{1,5})?/(?P<name>[a-z0-9]+(?:[._/-]{1,2}[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@sha256:(?P<digest>[0-9a-f]{64}))?"
)


@dataclass(frozen=True)
class Reference:
    """Where a package is, or is to be."""

    registry: str
    """Host, and port where one is given."""
    name: str
    tag: str = ""
    digest: str = ""
    """Of the manifest."""

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{SCHEME}{self.registry}/{self.name}{tag}{f'@sha256:{self.digest}' if self.digest else ''}"


@dataclass(frozen=True)
class Published:
    """What a registry has under a reference."""

    digest: str
    layer: str
    size: int
    content: str


def reference_of(text: str) -> Reference:
    """Return the reference that a text is; raise ValueError for what is none."""
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ValueError(f"{printable(text)[:120]} is no oci://HOST/NAME:TAG or oci://HOST/NAME@sha256:DIGEST, in small letters")
    return Reference(found["host"] + (found["port"] or ""), found["name"], found["tag"] or "", found["digest"] or "")


def look_up(reference: Reference) -> Published | None:
    """Return what a registry has under a reference; None where there is nothing.

    Raise ArtifactError for what is no package, or another than its digest says, RegistryError where the registry does not answer.
    """
    with _client(reference) as client:
        return _look_up(client, reference)


def _look_up(client: Client, reference: Reference) -> Published | None:
    content = client.manifest(reference, _MANIFEST, _MOST_MANIFEST_BYTES)
    if content is None:
        return None
    found = digest(content)
    if reference.digest and found != reference.digest:
        raise ArtifactError(f"{reference}: the registry sends a manifest with the digest sha256:{found}")
    try:
        return _published(json.loads(content), found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArtifactError(f"{reference} is no package of kerneldecl: its manifest names no layer of {LAYER}") from None


def _published(manifest: Any, found: str) -> Published:
    (layer,) = manifest["layers"]
    algorithm, _, blob = layer["digest"].partition(":")
    size = layer["size"]
    if manifest["schemaVersion"] != 2 or manifest.get("mediaType", _MANIFEST) != _MANIFEST or layer["mediaType"] != LAYER:
        raise ValueError
    if algorithm != "sha256" or not is_digest(blob) or type(size) is not int or not 0 < size <= MOST_BYTES:
        raise ValueError
    content = manifest.get("annotations", {}).get(CONTENT, "")
    return Published(found, blob, size, content if is_digest(content) else "")


def pull(reference: Reference, path: Path) -> Reference:
    """Write the tar of a package into a file, and return the reference with the digest of what came.

    Raise ArtifactError where anything differs from what its digest says, or nothing is there.
    """
    state = hashlib.sha256()
    with _client(reference) as client, path.open("xb") as file:
        published = _look_up(client, reference)
        if published is None:
            raise ArtifactError(f"{reference}: the registry has no such package")
        for chunk in client.blob(reference, published.layer, published.size):
            state.update(chunk)
            file.write(chunk)
        size = file.tell()
    if size != published.size or state.hexdigest() != published.layer:
        path.unlink()
        raise ArtifactError(
            f"{reference}: the registry sends other content than the package's digest says ({size} of {published.size} bytes)"
        )
    return replace(reference, digest=published.digest)


def push(reference: Reference, tar: Path, content: str, annotations: Mapping[str, str], *, overwrite: bool) -> tuple[Reference, bool]:
    """Publish a tar under a tag; return the reference with the digest, and whether it was there already.

    Raise ArtifactError where the tag has other content and is not to be overwritten.
    """
    with _client(reference) as client:
        before = _look_up(client, reference)
        if before and before.content == content:
            return replace(reference, digest=before.digest), True
        if before and not overwrite:
            raise ArtifactError(f"{reference} is published with other content; raise the artifact's version, or give --overwrite")
        layer = {"mediaType": LAYER, "digest": f"sha256:{_file_digest(tar)}", "size": tar.stat().st_size}
        text = _manifest_text(layer, {**annotations, CONTENT: content})
        client.upload(reference, _CONFIG, _EMPTY)
        client.upload(reference, layer, tar)
        client.put_manifest(reference, _MANIFEST, text)
    return replace(reference, digest=digest(text)), False


def _manifest_text(layer: Mapping[str, object], annotations: Mapping[str, str]) -> bytes:
    head = {"schemaVersion": 2, "mediaType": _MANIFEST, "artifactType": TYPE}
    manifest = {**head, "config": _CONFIG, "layers": [layer], "annotations": annotations}
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def _file_digest(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


def _client(reference: Reference) -> Client:
    try:
        from kerneldecl.package.registry_session import Client
    except ImportError:
        raise ToolchainError("registries need the package oras: pip install 'kerneldecl[oci]'") from None
    return Client(reference.registry)
