"""Owns the tables `[import.NAME]` of workloads.toml: published packages whose records and kernels a workspace builds on.

Knows nothing of registries or of what packages hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kerneldecl.declare.toml_keys import Key

_URL = re.compile(r"oci://[^\s@]+(?:@sha256:[0-9a-f]{64})?|(?!-)(?!.*://)[^\s].*\.(?:tar|whl)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Import:
    """A package: where it is, and the digest of what has to be there."""

    name: str
    url: str
    digest: str = ""
    """Of the registry's manifest, or of the file; empty: of what was there first, which the lock holds."""


IMPORT: Mapping[str, Key] = {
    "url": Key(
        lambda value: isinstance(value, str) and value.isprintable() and _URL.fullmatch(value) is not None,
        'a package in a registry, "oci://HOST/NAME:TAG", or the path of a .tar or .whl',
        {"type": "string", "minLength": 1},
        "Where the package is: a registry's reference, or the path of a file that `kerneldecl export` wrote.",
    ),
    "digest": Key(
        lambda value: isinstance(value, str) and _DIGEST.fullmatch(value) is not None,
        '"sha256:…" with 64 hexadecimal digits',
        {"type": "string", "pattern": f"^{_DIGEST.pattern}$"},
        "Digest of what has to be there; without it workloads.lock holds that of what was there first.",
    ),
}


def imports_of(tables: Mapping[str, Any]) -> tuple[Import, ...]:
    """Return the imports of checked tables, in order of their names."""
    return tuple(Import(name, table["url"], table.get("digest", "").removeprefix("sha256:")) for name, table in sorted(tables.items()))
