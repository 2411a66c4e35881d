"""Owns the reading of a TensorIR function as an iteration space: its blocks, their axes, accesses and arithmetic.

Knows nothing of schedules, policies, targets or hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Range, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer, detect_linear_equation

from kerneldecl.compiler import tfloat32
from kerneldecl.model import Access, Axis, Block, Condition, IterSpace

AXIS_KINDS = {tirx.IterVar.DataPar: "spatial", tirx.IterVar.CommReduce: "reduce"}

COUNTED = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.Max, tirx.Min)
"""Expressions that count as one operation each, where at least one operand depends on data."""

UNCOUNTED_CALLS = frozenset(
    {"prim.if_then_else", "prim.likely", "tirx.assume", "tirx.reinterpret", "tirx.isnan", "tirx.isinf", "tirx.isfinite"}
)
"""Calls that choose, compare or relabel. Any other call (exp, tanh, erf, sqrt, pow, …) is one operation, whatever it costs."""

CHILDREN = ("a", "b", "value", "condition", "true_value", "false_value", "base", "stride", "var_value", "body")
"""Fields of expression nodes that hold operands, over all kinds of node."""


def iter_space(mod: tvm.IRModule) -> IterSpace:
    """Return the iteration space of `mod["main"]`; raise ValueError for a function that is not made of plain blocks.

    A block's reads leave out its own accumulator. An operation counts only if it depends on data: arithmetic on
    axes alone (indices, padding conditions) is free, and so are casts, comparisons, selections and bit operations.
    """
    func = mod["main"]
    names = _Names()
    params = [param for param in func.params if isinstance(param.ty, tirx.buffer.BufferType)]
    operands = {param: names.of(param) for param in params}
    blocks = tuple(_block(nest, names) for nest in _nests(func.body, ()))
    if not blocks:
        raise ValueError("function main has no block (T.sblock) outside of its root, so there is nothing to schedule")
    written = {access.operand for block in blocks for access in block.writes}
    return IterSpace(
        blocks,
        inputs=tuple(name for name in operands.values() if name not in written),
        outputs=tuple(name for name in operands.values() if name in written),
    )


@dataclass
class _Names:
    """Gives each buffer one name, the buffer's own if no other has it."""

    by_buffer: dict[Any, str] = field(default_factory=dict)

    def of(self, buffer: Any) -> str:
        if buffer not in self.by_buffer:
            taken = set(self.by_buffer.values())
            numbered = (f"{buffer.name}_{n}" for n in range(1, len(taken) + 1))
            self.by_buffer[buffer] = next(name for name in (buffer.name, *numbered) if name not in taken)
        return self.by_buffer[buffer]


@dataclass(frozen=True)
class _Nest:
    """A block of a function, with the loops around it, outermost first."""

    realize: Any
    loops: tuple[Any, ...]


def _nests(stmt: Any, loops: tuple[Any, ...]) -> Iterator[_Nest]:
    match stmt:
        case SBlockRealize(block=block) if not block.iter_vars and not loops and _holds_block(block.body):
            yield from _nests(block.body, loops)
        case SBlockRealize():
            yield _Nest(stmt, loops)
        case tirx.For():
            yield from _nests(stmt.body, (*loops, stmt))
        case tirx.SeqStmt():
            for part in stmt.seq:
                yield from _nests(part, loops)
        case _:
            raise ValueError(f"function main has {type(stmt).__name__} outside of a block (T.sblock), which no schedule can transform")


def _holds_block(stmt: Any) -> bool:
    match stmt:
        case SBlockRealize():
            return True
        case tirx.SeqStmt():
            return any(_holds_block(part) for part in stmt.seq)
        case tirx.IfThenElse():
            return _holds_block(stmt.then_case) or (stmt.else_case is not None and _holds_block(stmt.else_case))
        case tirx.For() | tirx.While():
            return _holds_block(stmt.body)
        case _:
            return False


def _block(nest: _Nest, names: _Names) -> Block:
    block = nest.realize.block
    if _holds_block(block.body):
        raise ValueError(f"block {block.name_hint} holds other blocks: only functions of plain, unscheduled blocks have an iteration space")
    if nest.loops and not block.iter_vars:
        raise ValueError(f"block {block.name_hint} is opaque: it binds none of the loops around it to an axis (T.axis.remap)")
    axes = tuple(_axes(nest))
    found = _Found(block)
    found.stmt(block.body, times=1)
    affine = _Affine(block.iter_vars)
    writes = _accesses(found.writes, affine, names)
    reads = _accesses(found.reads, affine, names)
    is_spatial = all(axis.kind == "spatial" for axis in axes)
    return Block(
        name=block.name_hint,
        axes=axes,
        reads=reads if is_spatial else tuple(access for access in reads if access not in writes),
        writes=writes,
        flops_per_point=found.flops,
        is_multiply_accumulate=is_spatial or _is_multiply_accumulate(block),
        conditions=tuple(_conditions(block.body, affine)),
    )


def _conditions(body: Any, affine: _Affine) -> Iterator[Condition]:
    """Yield the affine conditions outside each of which a block stores a constant; data may decide besides."""
    value = body.value if isinstance(body, tirx.BufferStore) else None
    if not isinstance(value, Call) or getattr(value.op, "name", "") != "prim.if_then_else":
        return
    condition, _, otherwise = value.args
    if not isinstance(otherwise, tirx.IntImm | tirx.FloatImm):
        return
    found = (affine.condition(each) for each in _conjuncts(condition))
    yield from (each for each in found if each is not None)


def _conjuncts(condition: Any) -> Iterator[Any]:
    if isinstance(condition, tirx.And):
        yield from _conjuncts(condition.a)
        yield from _conjuncts(condition.b)
    else:
        yield condition


def _is_multiply_accumulate(block: SBlock) -> bool:
    """Say whether a reduction adds the product of two operands to one accumulator, which starts at zero, at each point."""
    match block.init, block.body:
        case tirx.BufferStore(value=tirx.IntImm(value=0) | tirx.FloatImm(value=0.0)), tirx.BufferStore(value=tirx.Add()) as store:
            terms = ((store.value.a, store.value.b), (store.value.b, store.value.a))
            return any(_is_accumulator(store, before) and _is_multiplication(added, store.value) for before, added in terms)
        case _:
            return False


def _is_accumulator(store: Any, before: Any) -> bool:
    """Say whether an expression loads the element that the store overwrites."""
    is_same = isinstance(before, TensorLoad) and before.source.same_as(store.buffer)
    return is_same and all(tvm_ffi.structural_equal(old, new) for old, new in zip(before.indices, store.indices, strict=True))


def _is_multiplication(added: Any, total: Any) -> bool:
    multiplied = _uncast(added)
    if not isinstance(multiplied, tirx.Mul):
        return False
    # Integers wrap around, so it matters whether they are widened before the multiplication; floating point is only rounded.
    is_exact = str(multiplied.ty.dtype) == str(total.ty.dtype) or "float" in str(multiplied.ty.dtype)
    return is_exact and all(isinstance(_operand(each), TensorLoad) for each in (multiplied.a, multiplied.b))


def _operand(expr: Any) -> Any:
    """Return the load of an operand, without the cast that widens it or the mask that reads it as TF32."""
    truncated = tfloat32.read_by(expr)
    return _uncast(expr) if truncated is None else truncated


def _uncast(expr: Any) -> Any:
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return expr


def _axes(nest: _Nest) -> Iterator[Axis]:
    block = nest.realize.block
    for iter_var, value in zip(block.iter_vars, nest.realize.iter_values, strict=True):
        if iter_var.iter_type not in AXIS_KINDS:
            raise ValueError(f"axis {iter_var.var.name} of block {block.name_hint} is neither spatial nor a reduction")
        # The loop's name is the one the author wrote; the axis's own is derived from it.
        name = value.name if any(value.same_as(loop.loop_var) for loop in nest.loops) else iter_var.var.name
        extent = _constant(iter_var.dom.extent, f"axis {name} of block {block.name_hint}")
        if extent == 0:
            raise ValueError(f"axis {name} of block {block.name_hint} has extent 0, so there is nothing to compute")
        yield Axis(name, extent, AXIS_KINDS[iter_var.iter_type])  # type: ignore[arg-type]


def _constant(extent: Any, what: str) -> int:
    if not isinstance(extent, tirx.IntImm):
        raise ValueError(f"{what} has extent {extent}, which is no constant")  # noqa: TRY004  the declaration's value is at fault
    return int(extent.value)


@dataclass
class _Found:
    """Collects what one block reads, writes and computes."""

    block: SBlock
    reads: list[tuple[Any, Any, str]] = field(default_factory=list)
    """Buffer, indices, and the dtype that the access has."""
    writes: list[tuple[Any, Any, str]] = field(default_factory=list)
    flops: int = 0

    def stmt(self, stmt: Any, times: int) -> None:
        """Add a statement that runs `times` times at each point."""
        match stmt:
            case tirx.BufferStore():
                self.writes.append((stmt.buffer, stmt.indices, str(stmt.buffer.dtype)))
                self._expr(stmt.value, times)
                self._exprs(stmt.indices, times=0)
            case tirx.SeqStmt():
                for part in stmt.seq:
                    self.stmt(part, times)
            case tirx.Bind():
                self._expr(stmt.value, times)
            case tirx.IfThenElse():
                self._expr(stmt.condition, times=0)
                self.stmt(stmt.then_case, times)
                if stmt.else_case is not None:
                    self.stmt(stmt.else_case, times)
            case tirx.For():
                self.stmt(stmt.body, times * _constant(stmt.extent, f"loop {stmt.loop_var.name} of block {self.block.name_hint}"))
            case _:
                raise ValueError(f"block {self.block.name_hint} is opaque: it has {type(stmt).__name__} in its body")

    def _exprs(self, exprs: Iterable[Any], times: int) -> bool:
        depends = [self._expr(expr, times) for expr in exprs]
        return any(depends)

    def _expr(self, expr: Any, times: int) -> bool:
        """Add an expression; return whether it depends on data. `times=0` collects accesses alone."""
        match expr:
            case TensorLoad():
                return self._load(expr, str(expr.source.dtype))
            case Call() if isinstance(load := tfloat32.read_by(expr), TensorLoad):
                return self._load(load, tfloat32.NAME)
            case Call():
                return self._call(expr, times)
            case tirx.Select():
                self._expr(expr.condition, times=0)
                return self._exprs((expr.true_value, expr.false_value), times)
            case tirx.IntImm() | tirx.FloatImm():
                return False
            case _:
                depends = self._exprs((child for name in CHILDREN if (child := getattr(expr, name, None)) is not None), times)
                self.flops += times * (depends and isinstance(expr, COUNTED))
                return depends

    def _load(self, load: Any, dtype: str) -> bool:
        self.reads.append((load.source, load.indices, dtype))
        self._exprs(load.indices, times=0)
        return True

    def _call(self, call: Any, times: int) -> bool:
        name = getattr(call.op, "name", "")
        if name == "prim.if_then_else":
            self._expr(call.args[0], times=0)
            return self._exprs(call.args[1:], times)
        depends = self._exprs(call.args, times)
        self.flops += times * (depends and name not in UNCOUNTED_CALLS)
        return depends


class _Affine:
    """Reads indices as affine functions of a block's axes."""

    def __init__(self, iter_vars: Iterable[Any]) -> None:
        self._axes = [iter_var.var for iter_var in iter_vars]
        self._analyzer = Analyzer()
        for iter_var in iter_vars:
            self._analyzer.bind(iter_var.var, Range.from_min_extent(iter_var.dom.min, iter_var.dom.extent))

    def __call__(self, index: Any) -> tuple[tuple[int, int], ...] | None:
        found = detect_linear_equation(self._analyzer.simplify(index), self._axes)
        if not found or not all(isinstance(value, tirx.IntImm) for value in found):
            return None
        return _terms(found)

    def condition(self, expr: Any) -> Condition | None:
        """Return a comparison as one of an affine function with zero; None for other conditions."""
        match expr:
            case tirx.LE():
                low, high, distance = expr.a, expr.b, 0
            case tirx.LT():
                low, high, distance = expr.a, expr.b, 1
            case tirx.GE():
                low, high, distance = expr.b, expr.a, 0
            case tirx.GT():
                low, high, distance = expr.b, expr.a, 1
            case _:
                return None
        if not str(low.ty.dtype).startswith("int"):
            return None
        found = detect_linear_equation(self._analyzer.simplify(high - low - distance), self._axes)
        if not found or not all(isinstance(value, tirx.IntImm) for value in found):
            return None
        return Condition(_terms(found), int(found[-1].value))


def _terms(found: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return the axes' coefficients but for zeros; what stands last is the constant."""
    return tuple((axis, int(value.value)) for axis, value in enumerate(found[:-1]) if value.value)


def _accesses(found: Iterable[tuple[Any, Any, str]], affine: _Affine, names: _Names) -> tuple[Access, ...]:
    """Return the distinct accesses, in order of first appearance."""
    distinct: Mapping[Access, None] = dict.fromkeys(
        Access(
            names.of(buffer),
            tuple(_constant(extent, f"a dimension of {buffer.name}") for extent in buffer.shape),
            dtype,
            tuple(affine(index) for index in indices),
        )
        for buffer, indices, dtype in found
    )
    return tuple(distinct)
