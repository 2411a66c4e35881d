"""Owns a model's weights in a file of safetensors' format: writing them once, mapping them into memory.

Knows nothing of models. The format is a header (its length in 8 bytes, JSON) and the tensors' bytes without gaps. Here the
bytes begin at a multiple of 64, and tensors whose size is one come first: those are used where they are mapped.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from kerneldecl.arrays import ALIGNMENT_BYTES, Array, aligned, numpy_dtype
from kerneldecl.errors import ArtifactError

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "uint32": "U32",
        "int32": "I32",
        "uint64": "U64",
        "int64": "I64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
    }
)
_NAMES = {there: here for here, there in _DTYPES.items()}


@dataclass(frozen=True)
class Weight:
    """A tensor in this process's memory, which `owner` keeps."""

    dtype: str
    shape: tuple[int, ...]
    address: int
    owner: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    @property
    def content(self) -> memoryview:
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address))


def can_hold(dtype: str) -> bool:
    """Say whether the format has a name for a dtype."""
    return dtype in _DTYPES


def write_weights(path: Path, weights: Mapping[str, Weight], metadata: Mapping[str, str]) -> None:
    """Write weights into a file, whole or not at all, without a copy of them in memory."""
    ordered = sorted(weights.items(), key=lambda item: item[1].nbytes % ALIGNMENT_BYTES != 0)
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    at = 0
    for name, weight in ordered:
        header[name] = {"dtype": _DTYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": [at, at + weight.nbytes]}
        at += weight.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % ALIGNMENT_BYTES)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(_LENGTH.pack(len(text)) + text)
            for _, weight in ordered:
                file.write(weight.content)
        part.replace(path)  # a process that has mapped the old file keeps it
    finally:
        part.unlink(missing_ok=True)


def map_weights(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Return a file's tensors as arrays over the mapped file, and its metadata; raise ArtifactError where it is none.

    Pages are read when they are used first, and shared between processes until one writes to them.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: the model's weights cannot be read: {error}; they lie beside its library") from None
    try:
        (length,) = _LENGTH.unpack_from(mapped)
        header = json.loads(mapped[_LENGTH.size : _LENGTH.size + length])
        metadata = header.pop(_METADATA, {})
        start = _LENGTH.size + length
        return {name: _array(mapped, start, described) for name, described in header.items()}, metadata
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: not a file of weights, or not whole ({error}); export the model again") from None


def _array(mapped: mmap.mmap, start: int, described: Mapping[str, Any]) -> Array:
    begin, _ = described["data_offsets"]
    shape, dtype = described["shape"], numpy_dtype(_NAMES[described["dtype"]])
    return aligned(np.frombuffer(mapped, dtype, math.prod(shape), start + begin).reshape(shape))
