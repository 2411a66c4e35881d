"""Owns the versions of the tools that kerneldecl is made for: what `[toolchain]` means where it says nothing, and what is installed.

Knows nothing of what is done about a tool that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PINS: Mapping[str, str] = MappingProxyType({"tvm": "0.27.0.post1", "tvm_ffi": "0.1.14.post1", "cuda": "13.0"})
PACKAGES: Mapping[str, str] = MappingProxyType({"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"})
"""The Python package of each tool that comes as one."""


def installed(package: str) -> str:
    """Return the version of an installed package, empty where it is not installed."""
    from importlib import metadata  # slow to import, and only a build asks

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
