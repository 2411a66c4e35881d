"""Owns shape buckets of models with dynamic shape: a static copy of a function per bucket, and the dispatch among them at run time.

Knows nothing of kernels or workspaces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

Buckets = Mapping[str, Sequence[int]]
"""The extents of each dynamic dimension that get a static copy of the function."""
COPY_OF, BUCKET = "kerneldecl.copy_of", "kerneldecl.sizes"
"""Attributes of a copy: the name of the original function, and the label of its bucket, such as n16."""
ANY = "any"
"""The label of the dynamic copy, which takes all shapes outside of the buckets."""
MOST_COPIES = 64


def with_shape_buckets(mod: tvm.IRModule, buckets: Buckets) -> tvm.IRModule:
    """Return the module in which each public function with a bucketed dimension dispatches to copies of itself, one per bucket.

    The copies are private functions of static shape, and one of dynamic shape for all other extents. Private functions that a
    copy calls stay dynamic: run this before anything is lowered. Raise ValueError where no function has a dimension.
    """
    _check(mod, buckets)
    builder = relax.BlockBuilder(mod.clone())
    for var, func in mod.functions_items():
        dims = _dims(func)
        if chosen := {dim: extents for dim, extents in buckets.items() if dim in dims}:
            builder.update_func(var, _dispatcher(builder, var.name_hint, func, chosen))
    return builder.get()


def dynamic_dims(mod: tvm.IRModule) -> list[str]:
    """Return the names of the dynamic dimensions that public functions have, sorted."""
    return sorted({dim for _, func in mod.functions_items() for dim in _dims(func)})


def callees(func: Any) -> list[str]:
    """Return the names of the PrimFuncs that a Relax function calls, once per call site."""
    found: list[str] = []

    def note(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name in {"relax.call_tir", "relax.call_tir_inplace"}:
            found.append(str(expr.args[0].name_hint))

    relax.analysis.post_order_visit(func, note)
    return found


def only_outside_buckets(mod: tvm.IRModule) -> set[str]:
    """Return the names of the PrimFuncs that only the dynamic copies call, for shapes outside of the buckets."""
    by_any: dict[bool, set[str]] = {True: set(), False: set()}
    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            by_any[(func.attrs or {}).get(BUCKET) == ANY] |= set(callees(func))
    return by_any[True] - by_any[False]


def _dims(func: Any) -> dict[str, Any]:
    """Return the variables of a public function's dynamic dimensions, by name."""
    if not isinstance(func, relax.Function) or "global_symbol" not in (func.attrs or {}):
        return {}
    return {str(var.name): var for var in relax.analysis.defined_symbolic_vars(func)}


def _check(mod: tvm.IRModule, buckets: Buckets) -> None:
    known = dynamic_dims(mod)
    if unknown := [dim for dim in buckets if dim not in known]:
        there = f"its dynamic dimensions are {', '.join(known)}" if known else "all its shapes are static"
        raise ValueError(f"the model has no dynamic dimension {', '.join(unknown)}; {there}")
    for dim, extents in buckets.items():
        if not extents or any(type(extent) is not int or extent < 1 for extent in extents) or len(set(extents)) < len(extents):
            raise ValueError(f"the sizes of {dim} are {', '.join(map(str, extents)) or 'none'}; expected different integers above 0")
    if (count := math.prod(len(extents) for extents in buckets.values())) > MOST_COPIES:
        raise ValueError(f"these sizes make {count} copies of the model; at most {MOST_COPIES} are made")


def _dispatcher(builder: Any, name: str, func: Any, buckets: Buckets) -> Any:
    """Return the function that calls the copy for its arguments' bucket; the copies are added to the builder's module."""
    main = relax.utils.copy_with_new_vars(func)
    dims = _dims(main)

    def copy(label: str, bound: Mapping[str, int]) -> Any:
        fresh = relax.utils.copy_with_new_vars(func).bind_symbolic_vars(dict(bound)).without_attr("global_symbol")
        attrs = {**dict(fresh.attrs or {}), COPY_OF: name, BUCKET: label}
        return _called(builder, builder.add_func(fresh.with_attrs(attrs), f"{name}_{label}"), main)

    body = copy(ANY, {})
    for bound in reversed(list(_combinations(buckets))):
        condition = tvm.tirx.all(*(dims[dim] == extent for dim, extent in bound.items()))
        choice = builder.normalize(relax.If(condition, copy(_label(bound), bound), body))
        result = relax.Var("result", main.ret_ty)
        body = builder.normalize(relax.SeqExpr([relax.BindingBlock([relax.VarBinding(result, choice)])], result))
    return relax.Function(main.params, body, main.ret_ty, func.is_pure, func.attrs)


def _combinations(buckets: Buckets) -> Iterator[dict[str, int]]:
    for extents in itertools.product(*buckets.values()):
        yield dict(zip(buckets, extents, strict=True))


def _label(bound: Mapping[str, int]) -> str:
    return "_".join(f"{dim}{extent}" for dim, extent in bound.items())


def _called(builder: Any, var: Any, main: Any) -> Any:
    call = builder.normalize(relax.Call(var, list(main.params)))
    result = relax.Var("result", call.ty)
    if tvm_ffi.structural_equal(call.ty, main.ret_ty):
        return builder.normalize(relax.SeqExpr([relax.BindingBlock([relax.VarBinding(result, call)])], result))
    known = relax.Var("known", main.ret_ty)  # MatchCast: 16 rows are n rows
    bindings = [relax.VarBinding(result, call), relax.MatchCast(known, result, main.ret_ty)]
    return builder.normalize(relax.SeqExpr([relax.BindingBlock(bindings)], known))
