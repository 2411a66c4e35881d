"""Owns allocating a kernel's outputs in the library that its first input is an array of.

Knows nothing of kernels, and imports no library that the caller has not imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kerneldecl.arrays import numpy_dtype
from kerneldecl.signature import Arg


def outputs_beside(given: Any, outputs: Sequence[Arg]) -> tuple[Any, ...]:
    """Return uninitialised arrays for outputs, of the library and in the memory of a given array.

    Raise TypeError where the library is none of NumPy, torch, CuPy and JAX.
    """
    kind = type(given)
    if (allocate := _ALLOCATORS.get(kind)) is None:
        allocate = _ALLOCATORS[kind] = _allocator(kind)
    return tuple([allocate(given, output) for output in outputs])


def _allocator(kind: type) -> Callable[[Any, Arg], Any]:
    for base in kind.__mro__:
        if allocate := _LIBRARIES.get(base.__module__.partition(".")[0]):
            return allocate
    found = f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(f"outputs cannot be allocated beside an array of {found}, only beside NumPy's, torch's, CuPy's and JAX's: pass them")


def _numpy(_given: Any, output: Arg) -> Any:
    import numpy as np

    return np.empty(output.shape, numpy_dtype(output.dtype))


def _torch(given: Any, output: Arg) -> Any:
    return given.new_empty(output.shape, dtype=_torch_dtype(output.dtype))


@functools.cache
def _torch_dtype(dtype: str) -> Any:
    return getattr(sys.modules["torch"], dtype)


def _cupy(_given: Any, output: Arg) -> Any:
    return sys.modules["cupy"].empty(output.shape, numpy_dtype(output.dtype))


def _jax(given: Any, output: Arg) -> Any:
    # Nobody else has seen the new array, so writing to it breaks no promise of JAX's; both must have been computed by then.
    jax = sys.modules["jax"]
    if any(device.platform != "cpu" for device in given.devices()):
        raise TypeError("JAX's streams on a GPU are its own: run the kernel on arrays of torch or CuPy, or call it through jax.ffi")
    given.block_until_ready()
    return jax.numpy.empty(output.shape, numpy_dtype(output.dtype)).block_until_ready()


_LIBRARIES: dict[str, Callable[[Any, Arg], Any]] = {"numpy": _numpy, "torch": _torch, "cupy": _cupy, "jaxlib": _jax, "jax": _jax}
_ALLOCATORS: dict[type, Callable[[Any, Arg], Any]] = {}
"""What was found for a type of arrays: looking through its bases takes longer than a small kernel."""
