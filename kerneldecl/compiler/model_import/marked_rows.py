"""Owns a dynamic dimension of a model as rows that are known at run time: a number in its place while entries are found, and back.

Knows nothing of workspaces, nor of how kernels come to take any number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import tvm

from kerneldecl.compiler.dynamic_shapes import Buckets, dynamic_dims
from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.read_model import read_model, read_sized, with_shape_buckets

_FIRST = 10_007
"""The first number that is tried: a prime, so that multiples of it differ from other extents."""


def read(model: str, sizes: Buckets, rows: str, dtype: str) -> tuple[tvm.IRModule, int]:
    """Return a model with copies for sizes of its dynamic dimensions and the marker of the one that `rows` names, and the marker.

    It is 0 where no dimension is named.
    """
    if sizes and not rows:
        return read_sized(model, sizes, dtype), 0
    mod = read_model(model, dims=tuple(sizes) or ((rows,) if rows else ()), dtype=dtype)
    if not rows:
        return mod, 0
    mod, marker = with_marker(mod, rows)
    return with_shape_buckets(mod, sizes) if sizes else mod, marker


def with_marker(mod: tvm.IRModule, dim: str) -> tuple[tvm.IRModule, int]:
    """Return a model whose dynamic dimension is a prime that is nowhere else in it, and the prime; raise ModelError where it has none."""
    known = dynamic_dims(mod)
    if dim not in known:
        there = f"its dynamic dimensions are {', '.join(known)}" if known else "all its shapes are static"
        raise ModelError(f"the model has no dynamic dimension {dim}; {there}")
    text = mod.script()
    marker = next(number for number in _primes() if str(number) not in text)
    fresh = mod.clone()
    for var, func in mod.functions_items():
        if "global_symbol" in (func.attrs or {}) and dim in {str(each.name) for each in tvm.relax.analysis.defined_symbolic_vars(func)}:
            fresh.update_func(var, func.bind_symbolic_vars({dim: marker}))
    return fresh, marker


def why_not_any_rows(described: Mapping[str, Any], marker: int, dim: str) -> str:
    """Return why a function cannot be declared for any number of rows, as a phrase; empty where it can, or does not depend on them."""
    attrs = described.get("attrs", {})
    numbers = list(_numbers(attrs.values()))
    if described["rule"] == "tensor_ir":
        return f"no standard rule computes it for any {dim}; TVM's default schedule does" if str(marker) in described["ir"] else ""
    if any(number % marker == 0 and number != marker for number in numbers):
        return f"a size of it is a multiple of {dim}; TVM's default schedule takes any"
    if numbers.count(marker) > 1:
        return f"several sizes of it are {dim}; TVM's default schedule takes any"
    return ""


def _numbers(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _numbers(value)
        elif type(value) is int and value > 0:
            yield value


def _primes() -> Iterator[int]:
    return (number for number in itertools.count(_FIRST, 2) if all(number % least for least in range(3, int(number**0.5) + 1, 2)))
