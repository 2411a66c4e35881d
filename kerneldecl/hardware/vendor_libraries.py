"""Owns where PyPI's packages keep vendors' libraries, and loading one from there.

Knows nothing of what is called in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

_PLACES: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "libscipy_openblas.so": (("scipy_openblas32", "lib"),),
        # NVIDIA's packages share one folder for each major release of CUDA.
        "libcublasLt.so.13": (("nvidia", "cu13/lib"), ("nvidia", "cublas/lib")),
        "libnvrtc.so.13": (("nvidia", "cu13/lib"), ("nvidia", "cuda_nvrtc/lib")),
        "libcudnn.so.9": (("nvidia", "cudnn/lib"), ("nvidia", "cu13/lib")),
    }
)
"""Package and folder in it, by the library's soname."""


_NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType({"libcudnn.so.9": ("libcublasLt.so.13", "libnvrtc.so.13")})
"""What a library looks for by soname only when it is called."""


def load_vendor_library(soname: str) -> bool:
    """Load a library from the installed package that holds it and return whether there is one; then its soname finds it."""
    for needed in _NEEDED.get(soname, ()):
        load_vendor_library(needed)
    for place in _places(soname):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(place))
            return True
    return False


def _places(soname: str) -> Iterator[Path]:
    for package, folder in _PLACES.get(soname, ()):
        spec = importlib.util.find_spec(package)
        for found in (spec and spec.submodule_search_locations) or ():
            yield Path(found) / folder / soname
