"""Owns the passes that compute linear layers of one input by one matmul, and one layer whose result is cut by several.

Knows nothing of rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.linears import Linear, linears
from kerneldecl.compiler.graph.named_constants import array_of, name_of
from kerneldecl.compiler.graph.places import joined, place_of_weight
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape
from kerneldecl.compiler.graph.rotary import rotary_of
from kerneldecl.compiler.graph.view_rewriting import VIEWS, slice_of

_READS_SLICES = frozenset({"relax.strided_slice", "relax.sigmoid", "relax.concat"})
"""Operators whose kernel can read a slice as well as a whole tensor, so that the slice is never written."""


@graph_pass
class SplitLinears(Rewriter):
    """Makes several layers of a linear layer whose result is cut into columns, such as query, key and value, or gate and up projection.

    A GEMM reads no slice of a packed result, but it reads and writes interleaved heads: slices would have to be copied. So a layer is
    split where GEMMs alone read all its slices, and where it has two, one of which is a gate of the other: an epilogue computes that.
    """

    def begin(self, func: relax.Function) -> None:
        super().begin(func)
        graph = Dataflow.of(func)
        self._parts: dict[relax.Var, tuple[Linear, int, int]] = {}
        for linear in linears(graph):
            cuts = list(_cuts(graph, linear))
            is_cut = len(cuts) > 1 and len(cuts) == len(graph.readers[linear.last])
            if (
                is_cut
                and sum(stop - start for _, start, stop in cuts) <= linear.width
                and _is_for_gemms(graph, [var for var, _, _ in cuts])
            ):
                self._parts |= {var: (linear, start, stop) for var, start, stop in cuts}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._parts:
            super().visit_var_binding_(binding)
            return
        linear, start, stop = self._parts[binding.var]
        weights, bias = array_of(linear.weights), array_of(linear.bias)
        assert weights is not None, "linears() yields those of constant weights"
        given = None if bias is None else (bias[start:stop], name_of(linear.bias))
        x = self.visit_expr(linear.call.args[0])
        self.set_var_remap(binding.var, linear.emitted(self.builder_, x, (weights[:, start:stop], name_of(linear.weights)), given))


def _cuts(graph: Dataflow, linear: Linear) -> Iterator[tuple[relax.Var, int, int]]:
    """Yield the slices of columns that read a layer, with the first column and the one after the last."""
    for reader in graph.readers[linear.last]:
        call = graph.call(reader)
        found = slice_of(call) if call is not None and call.op.name == "relax.strided_slice" else None
        if reader is not None and found is not None and found[0] == 1:
            yield reader, found[1], found[2]


def _is_for_gemms(graph: Dataflow, slices: list[relax.Var]) -> bool:
    """Say whether GEMMs alone read all slices, or one of two slices is a gate that the other is multiplied by."""
    ends = [list(_ends(graph, each)) for each in slices]
    operators = [{graph.operator(end) for end in found} for found in ends]
    if all(found == {"relax.matmul"} for found in operators):
        return True
    products = [{end for end in found if graph.operator(end) == "relax.multiply"} for found in ends]
    return (
        len(slices) == 2
        and all(len(found) == 1 for found in ends)
        and any(graph.only_reader(ends[gate][0]) in products[1 - gate] for gate in (0, 1))
    )


def _ends(graph: Dataflow, var: relax.Var) -> Iterator[relax.Var | None]:
    """Yield what reads a value through views."""
    for reader in graph.readers[var]:
        if reader is not None and graph.operator(reader) in VIEWS:
            yield from _ends(graph, reader)
        else:
            yield reader


@graph_pass
class JoinLinears(Rewriter):
    """Makes one matmul of those that have one input and constant weights, such as the gates of a recurrent layer.

    Each result is a slice of the joint one. Layers are joined only where the kernels that read the results read slices as well. So there
    is one kernel less for each layer but the first, and never one more: the input is read once, and a GEMM of few rows fills more SMs.
    What GEMMs, epilogues or the rule of rotary embedding read stays apart. Run NormalizeViews before.
    """

    def begin(self, func: relax.Function) -> None:
        super().begin(func)
        graph = Dataflow.of(func)
        self._results: dict[relax.Var, relax.Var] = {}
        rotated = {found.x for var in graph.values if (found := rotary_of(graph, var)) is not None}
        groups: dict[Any, list[Linear]] = defaultdict(list)
        for linear in linears(graph):
            if _reads_slices(graph, linear.last, rotated):
                dtypes = tuple(dtype_of(step) for step in linear.steps)
                groups[linear.call.args[0], dtype_of(linear.weights), linear.operators, dtypes].append(linear)
        together = [group for group in groups.values() if len(group) > 1]
        self._member = {linear.last: (group, at) for group in together for at, linear in enumerate(group)}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._member:
            super().visit_var_binding_(binding)
            return
        group, at = self._member[binding.var]
        first = group[0].last
        if first not in self._results:
            self._results[first] = self._joint(group)
        start = sum(each.width for each in group[:at])
        part = self.builder_.emit(op.strided_slice(self._results[first], [1], [start], [start + group[at].width]))
        self.set_var_remap(binding.var, part)

    def _joint(self, group: list[Linear]) -> relax.Var:
        names = [name_of(each.weights) for each in group]
        place = joined([place_of_weight([name]) for name in names]) if all(names) else ""
        biases = [array for each in group if (array := array_of(each.bias)) is not None]
        weights = [array for each in group if (array := array_of(each.weights)) is not None]
        bias = (np.concatenate(biases), f"{place}.bias" if place else "") if biases else None
        packed = (np.concatenate(weights, axis=1), f"{place}.weight" if place else "")
        return group[0].emitted(self.builder_, self.visit_expr(group[0].call.args[0]), packed, bias)


def _reads_slices(graph: Dataflow, var: relax.Var, rotated: set[relax.Expr]) -> bool:
    """Say whether all readers of a value, in whatever shape, can read a slice."""
    if var in rotated:
        return False
    for reader in graph.readers[var]:
        call = graph.call(reader)
        if reader is None or call is None:
            return False
        is_scaled = call.op.name == "relax.multiply" and any(static_shape(arg) != static_shape(call) for arg in call.args)
        is_view = call.op.name in VIEWS and _reads_slices(graph, reader, rotated)
        is_copy = call.op.name == "relax.permute_dims" and "relax.matmul" not in {graph.operator(end) for end in _ends(graph, reader)}
        if not (call.op.name in _READS_SLICES or is_scaled or is_view or (is_copy and reader not in rotated)):
            return False
    return True
