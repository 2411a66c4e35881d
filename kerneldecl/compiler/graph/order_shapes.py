"""Owns the pass that puts the bindings of a run-time shape before what has that shape.

Knows nothing of fusion, which brings them out of order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax


@tvm.transform.module_pass(opt_level=0, name="OrderShapes")
class OrderShapes:
    """Sorts the bindings of a dataflow block so that a symbolic extent is defined before it is used.

    TVM's FuseOps sorts by tensors alone. An arange of a length that the model computes reads no tensor, so that it is put before
    the match_cast that names the length, and the virtual machine cannot be compiled.
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        fresh = mod.clone()
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function) and any(_defined(each) for block in func.body.blocks for each in block.bindings):
                blocks = [type(block)(_sorted(block.bindings)) for block in func.body.blocks]
                body = relax.SeqExpr(blocks, func.body.body)
                fresh.update_func(var, relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs))
        return fresh


def _sorted(bindings: Sequence[Any]) -> list[Any]:
    """Return bindings in their order, each after those that define what it reads."""
    by_name = {each.var: each for each in bindings} | {extent: each for each in bindings for extent in _defined(each)}
    placed: dict[Any, Any] = {}
    for each in bindings:
        _place(each, by_name, placed)
    return list(placed.values())


def _place(binding: Any, by_name: dict[Any, Any], placed: dict[Any, Any]) -> None:
    waiting = [binding]
    while waiting:
        last = waiting[-1]
        wanted = [by_name[name] for name in _read(last) if name in by_name and by_name[name].var not in placed]
        wanted = [each for each in wanted if not any(each.var.same_as(other.var) for other in waiting)]
        if wanted:
            waiting.extend(wanted)
            continue
        placed.setdefault(waiting.pop().var, last)


def _defined(binding: Any) -> list[Any]:
    """Return the symbolic extents that a binding defines."""
    return list(relax.analysis.tir_vars_in_type(binding.ty)) if isinstance(binding, relax.MatchCast) else []


def _read(binding: Any) -> list[Any]:
    """Return the variables that a binding reads, of Relax and of extents."""
    if isinstance(binding, relax.MatchCast):
        return list(relax.analysis.free_vars(binding.value))
    arguments = binding.value.args if isinstance(binding.value, relax.Call) else []
    fields = [field for each in arguments for field in (each.fields if isinstance(each, relax.Tuple) else [each])]
    shapes = [field.values if isinstance(field, relax.ShapeExpr) else [field] for field in fields if _is_extent(field)]
    types = [binding.var.ty, *(relax.ShapeType(list(each)) for each in shapes)]
    return [*relax.analysis.free_vars(binding.value), *(var for each in types for var in relax.analysis.tir_vars_in_type(each))]


def _is_extent(argument: Any) -> bool:
    return isinstance(argument, relax.ShapeExpr) or (tvm.ir.is_prim_expr(argument) and str(argument.ty) == "int64")
