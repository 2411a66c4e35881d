"""Owns which linker makes a library of objects, by kind of arch.

Knows nothing of what the objects hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kerneldecl.toolchain.cuda_objects import link_cuda_candidate, link_cuda_library
from kerneldecl.toolchain.cxx import link_shared_library

Linker = Callable[[Path, Sequence[Path]], None]
"""Links objects into the library at a path."""
LINKERS: Mapping[str, Linker] = MappingProxyType({"cpu": link_shared_library, "cuda": link_cuda_library})
CANDIDATE_LINKERS: Mapping[str, Linker] = MappingProxyType({"cpu": link_shared_library, "cuda": link_cuda_candidate})
"""Those for a library of one candidate, which is measured and is no part of an artifact."""
