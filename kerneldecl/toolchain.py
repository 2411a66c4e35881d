"""Owns the versions of the tools that kerneldecl is made for: what `[toolchain]` means where it says nothing.

Knows nothing of what is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PINS: Mapping[str, str] = MappingProxyType({"tvm": "0.27.0.post1", "tvm_ffi": "0.1.14.post1", "cuda": "13.0"})
