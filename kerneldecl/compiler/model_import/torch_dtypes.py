"""Owns the dtypes of what an imported torch program computes: each value has the one that torch gives it.

Knows nothing of files, nor of what any operator computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm import relax

from kerneldecl.compiler.model_import.torch_contractions import HALF, dtype_of

WIDE = frozenset({"einsum", "grid_sampler_2d", "linalg_vector_norm"})
"""Operators, without their overload, that TVM's converters write as several, with half-precision sums among them."""
_PROMOTED = frozenset({"add", "cat", "clamp", "concat", "div", "div_", "maximum", "minimum", "mul", "stack", "sub", "where"})
"""Operators whose operands TVM's converters take to have one dtype, and torch promotes to that of the result."""


def with_torch_dtypes(importer: Any, name: str, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a converter of nodes whose results have the dtypes that torch gave them; `name` is that of the operator."""
    operator = name.partition(".")[0]

    def converted(node: Any) -> Any:
        dtype = _torch_dtype(node)
        given = {arg: importer.env[arg] for arg in node.all_input_nodes if is_tensor(importer.env.get(arg))}
        casts: dict[Any, str] = {}
        if operator in WIDE:
            casts = {arg: "float32" for arg, expr in given.items() if dtype_of(expr) in HALF}
        elif operator in _PROMOTED and dtype:
            condition = node.args[0] if operator == "where" else None
            casts = {arg: dtype for arg, expr in given.items() if arg is not condition and dtype_of(expr) != dtype}
        elif "float" in dtype and len(given) == 1:  # such as 1 / x of integers, which TVM computes in integers
            casts = {arg: dtype for arg, expr in given.items() if "float" not in dtype_of(expr)}
        with _cast(importer, {arg: (given[arg], to) for arg, to in casts.items()}):
            result = convert(node)
        if not dtype or not is_tensor(result) or dtype_of(result) == dtype:
            return result
        return importer.block_builder.emit(relax.op.astype(result, dtype))

    return converted


def is_tensor(expr: Any) -> bool:
    return isinstance(expr, relax.Expr) and isinstance(expr.ty, relax.TensorType)


def _torch_dtype(node: Any) -> str:
    """Return the dtype of a node's only tensor; empty for a node that has several, or none."""
    import torch

    value = node.meta.get("val")
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""


@contextmanager
def _cast(importer: Any, operands: dict[Any, tuple[Any, str]]) -> Iterator[None]:
    """Let nodes stand for their values as other dtypes meanwhile."""
    importer.env.update({arg: importer.block_builder.emit(relax.op.astype(expr, dtype)) for arg, (expr, dtype) in operands.items()})
    try:
        yield
    finally:
        importer.env.update({arg: expr for arg, (expr, _) in operands.items()})
