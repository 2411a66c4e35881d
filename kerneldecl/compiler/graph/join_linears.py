"""Owns the pass that computes linear layers of one input by one matmul.

Knows nothing of rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.named_constants import Array, array_of, constant, name_of
from kerneldecl.compiler.graph.places import joined, place_of_weight
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape

_READS_SLICES = frozenset({"relax.permute_dims", "relax.strided_slice", "relax.multiply", "relax.nn.silu", "relax.sigmoid", "relax.concat"})
"""Operators whose kernel can read a slice as well as a whole tensor, so that the slice is never written."""


@tvm.transform.module_pass(opt_level=0, name="JoinLinears")
class JoinLinears:
    """Makes one matmul of those that have one input and constant weights, such as query, key and value, or gate and up projection.

    Each result is a slice of the joint one. Layers are joined only where the kernels that read the results read slices as well: a
    transpose into heads, a rotary embedding, a gate. So there is one kernel less for each layer but the first, and never one more:
    the input is read once, and a GEMM of few rows fills more SMs. Run NormalizeViews before.
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        join = _JoinLinears(mod)
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function) and not (func.attrs or {}).get("Primitive"):
                join.plan(Dataflow.of(func))
                join.builder_.update_func(var, join.visit_expr(func))
        return relax.transform.DeadCodeElimination()(join.builder_.get())


@dataclass(frozen=True)
class _Linear:
    product: relax.Var
    last: relax.Var
    """The sum with the bias, or the product where there is none."""
    call: relax.Call
    bias: relax.Expr | None


def _linears(graph: Dataflow) -> Iterator[_Linear]:
    for var in graph.values:
        call = graph.call(var)
        if call is None or call.op.name != "relax.matmul" or not isinstance(call.args[0], relax.Var):
            continue
        if array_of(call.args[1]) is None or len(static_shape(call.args[1]) or ()) != 2 or len(static_shape(call) or ()) != 2:
            continue
        reader = graph.only_reader(var)
        total = graph.call(reader)
        others = [arg for arg in total.args if not arg.same_as(var)] if total is not None and total.op.name == "relax.add" else []
        has_bias = len(others) == 1 and array_of(others[0]) is not None and static_shape(others[0]) == (static_shape(call) or ())[-1:]
        linear = _Linear(var, reader, call, others[0]) if has_bias and reader is not None else _Linear(var, var, call, None)
        if _reads_slices(graph, linear.last):
            yield linear


def _reads_slices(graph: Dataflow, var: relax.Var) -> bool:
    """Say whether all readers of a value, in whatever shape, can read a slice."""
    for reader in graph.readers[var]:
        name = graph.operator(reader)
        if reader is None or not (name in _READS_SLICES or (name == "relax.reshape" and _reads_slices(graph, reader))):
            return False
    return True


@relax.expr_functor.mutator
class _JoinLinears(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._member: dict[relax.Var, tuple[list[_Linear], int]] = {}
        self._left_out: set[relax.Var] = set()
        self._results: dict[relax.Var, relax.Var] = {}

    def plan(self, graph: Dataflow) -> None:
        groups: dict[Any, list[_Linear]] = defaultdict(list)
        for linear in _linears(graph):
            groups[linear.call.args[0], dtype_of(linear.call), dtype_of(linear.call.args[1])].append(linear)
        together = [group for group in groups.values() if len(group) > 1]
        self._member = {linear.last: (group, at) for group in together for at, linear in enumerate(group)}
        self._left_out = {linear.product for group in together for linear in group if linear.product is not linear.last}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._member:
            if binding.var not in self._left_out:
                super().visit_var_binding_(binding)
            return
        group, at = self._member[binding.var]
        first = group[0].last
        if first not in self._results:
            self._results[first] = self._joint(group)
        widths = [(static_shape(each.call) or (0,))[-1] for each in group]
        start = sum(widths[:at])
        part = self.builder_.emit(op.strided_slice(self._results[first], [1], [start], [start + widths[at]]))
        self.set_var_remap(binding.var, part)

    def _joint(self, group: list[_Linear]) -> relax.Var:
        call, weights = group[0].call, [each.call.args[1] for each in group]
        place = joined([place_of_weight([name_of(each)]) for each in weights]) if all(map(name_of, weights)) else ""
        name = f"{place}.weight" if place else ""
        joint = constant(_together([array_of(each) for each in weights]), dtype_of(weights[0]), name)
        product = self.builder_.emit(op.matmul(self.visit_expr(call.args[0]), joint, out_dtype=call.attrs.out_dtype))
        biases = [each.bias for each in group]
        if not any(bias is not None for bias in biases):
            return product
        dtype = dtype_of(group[0].call)
        arrays = [
            array_of(bias) if bias is not None else np.zeros((static_shape(each.call) or (0,))[-1:], dtype)
            for bias, each in zip(biases, group, strict=True)
        ]
        return self.builder_.emit(op.add(product, constant(_together(arrays), dtype, f"{place}.bias" if place else "")))


def _together(arrays: list[Array | None]) -> Array:
    return np.concatenate([array for array in arrays if array is not None], axis=-1)
