"""Owns shape buckets of models with dynamic shape: a static copy of a function per bucket, and the dispatch among them at run time.

Knows nothing of kernels or workspaces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import relax

Buckets = Mapping[str, Sequence[int]]
"""The extents of each dynamic dimension that get a static copy of the function."""
COPY_OF, BUCKET = "kerneldecl.copy_of", "kerneldecl.sizes"
"""Attributes of a copy: the name of the original function, and the label of its bucket, such as n16."""
ANY = "any"
"""The label of the dynamic copy, which takes all shapes outside of the buckets."""
ONLY_SIZES = "kerneldecl.only_sizes"
"""The attribute of a function that has no dynamic copy: why it has none."""
_MAIN = "main"
MOST_COPIES = 64


def with_shape_buckets(mod: tvm.IRModule, buckets: Buckets) -> tvm.IRModule:
    """Return the module in which each public function with a bucketed dimension dispatches to copies of itself, one per bucket.

    The copies are private functions of static shape, and one of dynamic shape for all other extents. Private functions that a
    copy calls stay dynamic: run this before anything is lowered. Raise ValueError where no function has a dimension.
    """
    check_buckets(buckets, dynamic_dims(mod))
    builder = relax.BlockBuilder(mod.clone())
    for var, func in mod.functions_items():
        dims = _dims(func)
        if chosen := {dim: extents for dim, extents in buckets.items() if dim in dims}:
            builder.update_func(var, _with_bound_copies(builder, var.name_hint, func, chosen))
    return builder.get()


Copies = Sequence[tuple[Mapping[str, int], Any]]
"""The sizes that each copy of a function is for, and its variable."""


class Sized(NamedTuple):
    """A model that was read once for each combination of sizes of its dynamic dimensions: each with a function main."""

    whole: tvm.IRModule | None
    """The model for any sizes; None where it cannot be read so."""
    copies: tuple[tuple[Mapping[str, int], tvm.IRModule], ...]
    shapes: tuple[Sequence[Any], ...]
    """Those of the parameters for any sizes."""
    why_none: str = ""
    """Why there is no model for any sizes."""


def with_sized_copies(sized: Sized) -> tvm.IRModule:
    """Return one module whose main dispatches to the copies; without a model for any sizes, a call of other sizes fails."""
    builder = relax.BlockBuilder(tvm.IRModule() if sized.whole is None else sized.whole.clone())
    copies = [(sizes, _added(builder, mod, _label(sizes))) for sizes, mod in sized.copies]
    if sized.whole is None:
        own = sized.copies[-1][1][_MAIN].params
        types = (relax.TensorType(list(shape), var.ty.dtype.dtype) for var, shape in zip(own, sized.shapes, strict=True))
        params = [relax.Var(var.name, type_) for var, type_ in zip(own, types, strict=True)]
        main = _dispatcher(builder, params, copies).with_attrs({"global_symbol": _MAIN, ONLY_SIZES: sized.why_none})
        builder.add_func(main, _MAIN)
        return builder.get()
    func = sized.whole[_MAIN]
    copies.append(({}, builder.add_func(_as_copy(func, _MAIN, ANY), f"{_MAIN}_{ANY}")))
    builder.update_func(builder.get().get_global_var(_MAIN), _dispatcher_like(builder, func, copies))
    return builder.get()


def only_sizes(mod: tvm.IRModule) -> str:
    """Return why a module takes the sizes of its copies alone; empty where it takes others."""
    reasons = (str((func.attrs or {}).get(ONLY_SIZES, "")) for func in mod.functions.values())
    return next(filter(None, reasons), "")


def dynamic_dims(mod: tvm.IRModule) -> list[str]:
    """Return the names of the dynamic dimensions that public functions have, sorted."""
    return sorted({dim for _, func in mod.functions_items() for dim in _dims(func)})


def has_all_extents(mod: tvm.IRModule) -> bool:
    """Say whether the shape of every tensor is known as expressions of dimensions, and none is made of a tensor or becomes one."""
    found: list[bool] = []

    def note(expr: Any) -> None:
        type_ = getattr(expr, "ty", None)
        if isinstance(type_, relax.TensorType) and not isinstance(type_.shape, relax.ShapeExpr):
            found.append(False)
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            found.append(expr.op.name not in {"relax.shape_to_tensor", "relax.tensor_to_shape", "relax.dynamic_strided_slice"})

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, note)
    return all(found)


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


def check_buckets(buckets: Buckets, known: Sequence[str]) -> None:
    """Raise ValueError for buckets of other dimensions than those known, and for impossible sizes."""
    if unknown := [dim for dim in buckets if dim not in known]:
        there = f"its dynamic dimensions are {', '.join(known)}" if known else "all its shapes are static"
        raise ValueError(f"the model has no dynamic dimension {', '.join(unknown)}; {there}")
    for dim, extents in buckets.items():
        if not extents or any(type(extent) is not int or extent < 1 for extent in extents) or len(set(extents)) < len(extents):
            raise ValueError(f"the sizes of {dim} are {', '.join(map(str, extents)) or 'none'}; expected different integers above 0")
    if (count := math.prod(len(extents) for extents in buckets.values())) > MOST_COPIES:
        raise ValueError(f"these sizes make {count} copies of the model; at most {MOST_COPIES} are made")


def combinations(buckets: Buckets) -> Iterator[dict[str, int]]:
    """Yield each combination of the dimensions' sizes."""
    for extents in itertools.product(*buckets.values()):
        yield dict(zip(buckets, extents, strict=True))


def _with_bound_copies(builder: Any, name: str, func: Any, buckets: Buckets) -> Any:
    """Return the function that calls the copy for its arguments' bucket; the copies are added to the builder's module."""
    copies = []
    for bound in (*combinations(buckets), {}):
        label = _label(bound) or ANY
        fresh = relax.utils.copy_with_new_vars(func).bind_symbolic_vars(dict(bound))
        copies.append((bound, builder.add_func(_as_copy(fresh, name, label), f"{name}_{label}")))
    return _dispatcher_like(builder, func, copies)


def _dispatcher_like(builder: Any, func: Any, copies: Copies) -> Any:
    """Return the function with the parameters, the result and the attributes of another one that calls its copies."""
    main = relax.utils.copy_with_new_vars(func)
    return _dispatcher(builder, list(main.params), copies, main.ret_ty, func.is_pure).with_attrs(func.attrs)


def _dispatcher(builder: Any, params: Sequence[Any], copies: Copies, result: Any = None, is_pure: bool = True) -> Any:
    """Return the function that calls the copy for its arguments' sizes, and the last of them for all others.

    `result` is the type of what it returns; None where the copies tell.
    """
    symbols = relax.analysis.defined_symbolic_vars(relax.Function(list(params), relax.Tuple([])))
    dims = {str(var.name): var for var in symbols}
    *bound, (_, last) = copies
    body = _called(builder, last, params, result)
    for sizes, var in reversed(bound):
        # A dimension that the model takes to be equal to another is none of its own.
        condition = tvm.tirx.all(*(dims[dim] == extent for dim, extent in sizes.items() if dim in dims))
        choice = builder.normalize(relax.If(condition, _called(builder, var, params, result), body))
        found = relax.Var("result", result or choice.ty)
        body = builder.normalize(relax.SeqExpr([relax.BindingBlock([relax.VarBinding(found, choice)])], found))
    return relax.Function(list(params), body, result or body.ty, is_pure)


def _as_copy(func: Any, name: str, label: str) -> Any:
    fresh = relax.utils.copy_with_new_vars(func).without_attr("global_symbol")
    return fresh.with_attrs({**dict(fresh.attrs or {}), COPY_OF: name, BUCKET: label})


def _added(builder: Any, mod: tvm.IRModule, label: str) -> Any:
    """Add a module's main to the builder's as a copy, and what it calls under names of their own; return the copy's variable."""
    given = {var.name_hint: func for var, func in mod.functions_items() if isinstance(func, tvm.tirx.PrimFunc)}
    names = {name: builder.add_func(func, f"{name}_{label}") for name, func in given.items()}
    renamed = _Renamed(builder.get(), names).visit_expr(mod[_MAIN])
    return builder.add_func(_as_copy(renamed, _MAIN, label), f"{_MAIN}_{label}")


@relax.expr_functor.mutator
class _Renamed(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Has a function call others by other variables."""

    def __init__(self, mod: tvm.IRModule, variables: Mapping[str, Any]) -> None:
        super().__init__(mod)
        self._variables = variables

    def visit_global_var_(self, var: Any) -> Any:
        return self._variables.get(str(var.name_hint), var)


def _label(bound: Mapping[str, int]) -> str:
    return "_".join(f"{dim}{extent}" for dim, extent in bound.items())


def _called(builder: Any, var: Any, params: Sequence[Any], wanted: Any) -> Any:
    call = builder.normalize(relax.Call(var, list(params)))
    result = relax.Var("result", call.ty)
    if wanted is None or tvm_ffi.structural_equal(call.ty, wanted):
        return builder.normalize(relax.SeqExpr([relax.BindingBlock([relax.VarBinding(result, call)])], result))
    known = relax.Var("known", wanted)  # MatchCast: 16 rows are n rows
    bindings = [relax.VarBinding(result, call), relax.MatchCast(known, result, wanted)]
    return builder.normalize(relax.SeqExpr([relax.BindingBlock(bindings)], known))
