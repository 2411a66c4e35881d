"""Owns who reads what in a Relax function.

Knows nothing of what operators compute.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax


@dataclass
class Dataflow:
    """A function's bindings, and who reads each variable; None reads what the function returns."""

    values: dict[relax.Var, relax.Expr] = field(default_factory=dict)
    readers: dict[relax.Var, list[relax.Var | None]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, func: relax.Function) -> Dataflow:
        graph = cls()
        for block in func.body.blocks:
            for binding in block.bindings:
                if isinstance(binding, relax.VarBinding):
                    graph.values[binding.var] = binding.value
                for read in relax.analysis.free_vars(binding.value):
                    graph.readers[read] += [binding.var] * _count(binding.value, read)
        for read in relax.analysis.free_vars(func.body.body):
            graph.readers[read].append(None)
        return graph

    def call(self, var: Any) -> relax.Call | None:
        """Return the call of an operator that gives a variable."""
        value = self.values.get(var) if isinstance(var, relax.Var) else None
        return value if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) else None

    def operator(self, var: Any) -> str:
        call = self.call(var)
        return str(call.op.name) if call is not None else ""

    def only_reader(self, var: relax.Var) -> relax.Var | None:
        """Return the variable that alone reads another, once; None where there are more, or the function returns it."""
        readers = self.readers[var]
        return readers[0] if len(readers) == 1 else None


def _count(value: relax.Expr, var: relax.Var) -> int:
    args = value.args if isinstance(value, relax.Call) else []
    return max(1, sum(1 for arg in args if isinstance(arg, relax.Var) and arg.same_as(var)))
