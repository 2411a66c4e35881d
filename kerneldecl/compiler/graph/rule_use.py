"""Owns a standard rule in place of operators: its attributes and operands, and whether the rule takes them.

Knows nothing of which operators rules stand for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tvm import relax

from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.view_rewriting import ViewRewriter
from kerneldecl.compiler.graph.views import Shape, View
from kerneldecl.declare.rule_attributes import RuleAttributes, rule_attributes
from kerneldecl.plugins.find import STANDARD
from kerneldecl.rule import Rule

HALVES = frozenset({"float16", "bfloat16"})
FLOATS = HALVES | {"float32", "float64"}


Fuses = Callable[[Rule], bool]
"""Says whether the target has a kernel for a rule that does the work of several, or that reads weights in another order."""


def fuses_nothing(_: Rule) -> bool:
    return False


@dataclass(frozen=True)
class Made:
    """An operand that is made of a value: a view of it, or the value broadcast."""

    source: relax.Expr
    shape: Shape
    dtype: str
    make: Callable[[ViewRewriter, relax.Expr], relax.Expr]
    """Makes it of the source, rewritten."""
    name: str = ""
    """What is made, where several rules read it and it is made once; empty where each has its own."""


Operand: TypeAlias = relax.Expr | Made


@dataclass(frozen=True)
class Use:
    """A rule in place of the operators that end in a variable."""

    rule: str
    attrs: Mapping[str, Any]
    operands: tuple[Operand, ...]
    replaced: tuple[relax.Var, ...] = ()
    """Variables before the last one, which nothing else reads."""
    is_viewed: bool = False
    """Whether operands and result have other shapes in the model than in the rule: reshapes are between."""
    written: View | None = None
    """The view of the rule's result that the last variable is; None where it is that result, at most in another shape."""

    @property
    def sources(self) -> tuple[relax.Expr, ...]:
        """Return the values that operands are, or are made of."""
        return tuple(each.source if isinstance(each, Made) else each for each in self.operands)

    @property
    def instance(self) -> Rule:
        return _standard(self.rule).rule(**self.attrs)

    def is_accepted(self, last: relax.Var) -> bool:
        """Say whether the rule takes the attributes, with the arguments that the operators have."""
        standard = _standard(self.rule)
        if any(name not in standard.attributes or standard.attributes[name].read(value)[1] for name, value in self.attrs.items()):
            return False
        instance = self.instance
        if any(instance.problems()):
            return False
        got = [
            (each.shape, each.dtype) if isinstance(each, Made) else (static_shape(each), dtype_of(each)) for each in (*self.operands, last)
        ]
        wanted = [(arg.shape, arg.dtype) for arg in instance.signature().args]
        return _sizes(got) == _sizes(wanted) if self.is_viewed else got == wanted


def _sizes(args: list[tuple[Any, str]]) -> list[tuple[int, str]]:
    return [(math.prod(shape), dtype) for shape, dtype in args if shape is not None]


@dataclass
class Found:
    """A function, the rules found in it so far, by the last variable that each gives, and all variables that they give or replace."""

    graph: Dataflow
    uses: dict[relax.Var, Use]
    taken: set[relax.Var]
    fuses: Fuses = fuses_nothing
    refused: dict[relax.Var, str] = field(default_factory=dict)
    """Why what looks like a larger rule is none, by the last variable."""
    noted: dict[relax.Var, str] = field(default_factory=dict)
    """Why a rule was chosen of which another one is a faster form, by the last variable."""

    def add(self, last: relax.Var, use: Use) -> None:
        if use.is_accepted(last):
            self.uses[last] = use
            self.taken |= {last, *use.replaced}


def dtype_attr(dtype: str) -> dict[str, str]:
    """Return the attribute `dtype` unless it is the default."""
    return {} if dtype == "float32" else {"dtype": dtype}


def out_attr(attrs: Mapping[str, Any], dtype: str) -> dict[str, str]:
    """Return the attribute `out_dtype` unless it is the dtype of the operands."""
    return {} if dtype == attrs.get("dtype", "float32") else {"out_dtype": dtype}


@functools.cache
def _standard(rule: str) -> RuleAttributes:
    return rule_attributes(STANDARD, rule)
