"""Owns which values a function's inputs may have: indices of what is there, divisors that are not zero, shifts within a word, small powers.

Knows nothing of rules, of random numbers or of devices. What is allowed is found in the TensorIR: an index that depends on an input is
bounded with the input's values, and the widest range is taken that stays inside of what is indexed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.ir import Call, Range, TensorLoad
from tvm.ir.prim.expr import LShift, RShift
from tvm.s_tir import SBlock
from tvm.sym import Analyzer, ConstIntBound
from tvm_ffi import structural

from kerneldecl.compiler.iter_space import CHILDREN

DEFAULT = (-128, 127)
"""Integers that inputs have where nothing forbids it, as far as their dtypes go."""
_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
_SHIFTS = (LShift, RShift)
_EXPONENTS = 4
"""Whole exponents, from 0: of larger ones powers overflow, in one precision and not in another."""
_LEAST_DIVISORS = frozenset({0, -1})
"""Divisors that trap on a CPU: zero, and -1 under the least number of a dtype."""


@dataclass(frozen=True)
class Allowed:
    """The integers that an input may have."""

    low: int
    high: int
    """Inclusive."""
    without: frozenset[int] = frozenset()


def allowed_values(func: Any) -> dict[int, Allowed]:
    """Return the allowed integers of inputs, by position, where they are not all of `DEFAULT`.

    Raise ValueError for a function whose inputs say where it writes, and for one that no values are known for.
    """
    found = _Found(func)
    if not found.needs:
        return {}
    params = list(dict.fromkeys(param for need in found.needs for param in need.params()))
    chosen = dict.fromkeys(params, _Range(0, 0))  # of an index of several inputs, the first takes what it can
    for param in params:
        chosen[param] = _widest(param, chosen, [need for need in found.needs if param in need.params()])
    positions = {param: at for at, param in enumerate(func.params)}
    integers = ((positions[param], values) for param, values in chosen.items() if str(param.dtype).startswith(("int", "uint")))
    return {at: Allowed(values.low, values.high, values.without) for at, values in integers}


def rounds_to_integers(func: Any) -> bool:
    """Say whether a function makes integers of floating-point numbers, where NaN, infinities and huge numbers give anything."""
    found: list[bool] = []

    def note(node: Any) -> None:
        found.append(_is_integer(node) and not _is_integer(node.value) and str(node.value.ty.dtype) != "bool")

    structural.structural_walk(func.body, [(tirx.Cast, note)])
    return any(found)


def _widest(param: Any, chosen: Mapping[Any, _Range], needs: Sequence[_Need]) -> _Range:
    """Return the widest range of an input under which its needs hold, given those of other inputs."""
    for candidate in (_Range(*_of_dtype(param)), *_candidates(param, needs)):
        if all(need.holds({**chosen, param: candidate}) for need in needs):
            return candidate
    raise ValueError(f"no values of its input {param.name} are known that stay inside of what they index, divide by or shift by")


@dataclass(frozen=True)
class _Range:
    low: int
    high: int
    without: frozenset[int] = frozenset()


def _of_dtype(param: Any) -> tuple[int, int]:
    dtype = str(param.dtype)
    if not dtype.startswith(("int", "uint")):
        return 0, 1
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    return (0, min(2**bits - 1, DEFAULT[1])) if dtype.startswith("uint") else (max(-(2 ** (bits - 1)), DEFAULT[0]), DEFAULT[1])


def _candidates(param: Any, needs: Sequence[_Need]) -> Iterator[_Range]:
    """Yield narrower ranges for an input, the widest first."""
    low, high = _of_dtype(param)
    if any(need.is_divisor for need in needs):
        yield _Range(low, high, _LEAST_DIVISORS)
        yield _Range(1, high)
    for extent in sorted({need.end for need in needs if need.end > 1}, reverse=True):
        yield _Range(0, extent - 1)
    yield _Range(0, 0)


@dataclass(frozen=True)
class _Need:
    """An expression of inputs that must stay in [0, end), or a divisor that must not be one of those that trap."""

    expr: Any
    end: int
    loads: Mapping[Any, Any]
    """The input behind each variable of the expression that stands for one of its elements."""
    domains: Mapping[Any, Any]
    """The ranges of the axes and loops around it."""
    conditions: tuple[Any, ...] = ()
    is_divisor: bool = False

    def params(self) -> list[Any]:
        return list(dict.fromkeys(self.loads.values()))

    def holds(self, known: Mapping[Any, _Range]) -> bool:
        if self.is_divisor and any(self.expr.same_as(var) for var in self.loads):
            (values,) = (known[self.loads[var]] for var in self.loads if self.expr.same_as(var))
            return values.low > 0 or values.without >= _LEAST_DIVISORS
        analyzer = Analyzer()
        for var, domain in self.domains.items():
            analyzer.bind(var, domain)
        for var, param in self.loads.items():
            if _is_integer(var):
                analyzer.update(var, ConstIntBound(known[param].low, known[param].high))
        bound = analyzer.const_int_bound(analyzer.simplify(self.expr))
        if self.is_divisor:
            return bool(bound.min_value > 0)
        return bool(bound.min_value >= 0 and bound.max_value < self.end) or self._is_guarded(analyzer)

    def _is_guarded(self, analyzer: Analyzer) -> bool:
        """Say whether the conditions under which it is evaluated keep it inside."""
        if not self.conditions:
            return False
        with analyzer.constraint_scope(tirx.all(*self.conditions)):
            return bool(analyzer.can_prove(tirx.all(self.expr >= 0, self.expr < self.end)))


@dataclass
class _Found:
    """Collects the needs of a function."""

    func: Any
    needs: list[_Need] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stored: dict[Any, list[Any]] = {}
        self._bound: dict[Any, Any] = {}
        self._domains: dict[Any, Any] = {}
        self._params = [param for param in self.func.params if isinstance(param.ty, tirx.buffer.BufferType)]
        structural.structural_walk(
            self.func.body,
            [
                (tirx.BufferStore, lambda node: self._stored.setdefault(node.buffer, []).append(node.value)),
                (tirx.Bind, lambda node: self._bound.update({node.var: node.value})),
                (tirx.For, lambda node: self._domains.update({node.loop_var: Range.from_min_extent(node.min, node.extent)})),
                (SBlock, lambda node: self._domains.update({axis.var: axis.dom for axis in node.iter_vars})),
            ],
        )
        structural.structural_walk(self.func.body, [(tirx.BufferStore, self._store), (tirx.Bind, lambda node: self._expr(node.value, ()))])

    def _store(self, node: Any) -> None:
        if any(_reads_data(index) for index in node.indices):
            raise ValueError("its inputs say where it writes, where several values may meet in one element")
        self._expr(node.value, ())

    def _expr(self, expr: Any, conditions: tuple[Any, ...]) -> None:
        match expr:
            case TensorLoad():
                for index, extent in zip(expr.indices, expr.source.shape, strict=True):
                    if _reads_data(index):
                        self._need(index, int(extent), conditions)
                self._exprs(expr.indices, conditions)
            case Call() if getattr(expr.op, "name", "") == "prim.if_then_else":
                condition, then, otherwise = expr.args
                self._expr(condition, conditions)
                self._expr(then, (*conditions, condition))
                self._expr(otherwise, (*conditions, tirx.Not(condition)))
            case Call():
                if getattr(expr.op, "name", "").endswith(".pow"):
                    self._power(expr.args[1], conditions)
                self._exprs(expr.args, conditions)
            case _:
                self._operation(expr, conditions)
                self._exprs((child for name in CHILDREN if (child := getattr(expr, name, None)) is not None), conditions)

    def _exprs(self, exprs: Iterable[Any], conditions: tuple[Any, ...]) -> None:
        for expr in exprs:
            self._expr(expr, conditions)

    def _operation(self, expr: Any, conditions: tuple[Any, ...]) -> None:
        if isinstance(expr, _DIVISIONS) and _is_integer(expr) and _reads_data(expr.b):
            self._need(expr.b, 0, conditions, is_divisor=True)
        if isinstance(expr, _SHIFTS) and _reads_data(expr.b):
            self._need(expr.b, _bits(expr), conditions)

    def _power(self, exponent: Any, conditions: tuple[Any, ...]) -> None:
        whole = exponent.value if isinstance(exponent, tirx.Cast) else exponent
        if _is_integer(whole) and _reads_data(whole):
            self._need(whole, _EXPONENTS, conditions)

    def _need(self, expr: Any, end: int, conditions: tuple[Any, ...], *, is_divisor: bool = False) -> None:
        loads: dict[str, tuple[Any, Any]] = {}
        plain = [self._without_loads(each, loads, 0) for each in (expr, *conditions)]
        while is_divisor and isinstance(plain[0], tirx.Cast):
            plain[0] = plain[0].value
        by_var = dict(loads.values())
        self.needs.append(_Need(plain[0], end, by_var, self._domains, tuple(plain[1:]), is_divisor))

    def _without_loads(self, expr: Any, loads: dict[str, tuple[Any, Any]], depth: int) -> Any:
        """Return the expression with a variable for each element of an input, and what is stored in an intermediate for its elements."""

        def load(node: Any) -> Any:
            stored = self._stored.get(node.source, [])
            if len(stored) == 1 and depth < _MOST_INTERMEDIATES and not any(node.source.same_as(param) for param in self._params):
                return self._without_loads(stored[0], loads, depth + 1)
            text = f"{node} {depth}"
            if text not in loads:
                is_input = not stored and any(node.source.same_as(param) for param in self._params)
                variable = tirx.Var(f"element{len(loads)}", str(node.ty.dtype))
                if not is_input:
                    return variable  # anything may be there
                loads[text] = (variable, node.source)
            return loads[text][0]

        return structural.structural_map(expr, [(TensorLoad, load), (tirx.Var, lambda node: self._bound.get(node, node))])


_MOST_INTERMEDIATES = 8
"""Intermediate results through which an index is followed."""


def _reads_data(expr: Any) -> bool:
    found: list[Any] = []
    structural.structural_walk(expr, [(TensorLoad, found.append)])
    return bool(found)


def _is_integer(expr: Any) -> bool:
    return str(expr.ty.dtype).startswith(("int", "uint"))


def _bits(expr: Any) -> int:
    return int(str(expr.ty.dtype).removeprefix("u").removeprefix("int"))
