"""Owns the tensor intrinsics of mma.sync and of the loads before it: their names, the computation of each, and its PTX.

Knows nothing of schedules, policies or how kernels are compiled.

With dynamic shared memory, TVM has such intrinsics for float16 alone, and takes seconds to import them; these are registered on
first use. An intrinsic multiplies fragments of 16 rows of A, 16 columns of B and 32 bytes of k, whatever the instruction: two m16n8 with
all of k, four m16n8k8, or eight m8n8k16 or four m8n8k4, whose fragments are parts of the same registers (PTX ISA, "Matrix Fragments").
Places of elements in operands' fragments are nominal: loads and multiplications alone see them. Those in accumulators are real.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tvm

from kerneldecl.analysis.tensor_cores import K_BYTES, TABLE, TensorCoreShape, shape_of
from kerneldecl.compiler.intrinsics.fragment_loads import LANES, ROWS, SIDES, fragment_load, operand_place
from kerneldecl.model import dtype_bytes

ABBREVIATIONS = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    "uint8": "uint8",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float64": "fp64",
    "float32": "fp32",
    "int32": "int32",
}
"""TVM's names of operand and accumulator types in `ptx_legacy.mma`."""

ORDERS = ("c+ab", "c+ba", "ab+c", "ba+c")
"""Orders in which a multiply-accumulate can be written: accumulator c, operands a and b."""


Interleaved = tuple[bool, bool]
"""Whether the rows, and the columns, of an accumulator fragment are even in its first half and odd in its second."""


@dataclass(frozen=True)
class MmaIntrinsics:
    """Names of the intrinsics of one GEMM."""

    load_a: str
    load_b: str
    mma: str
    clear: str
    k: int
    """Extent along k of a fragment."""
    interleaved: Interleaved


def mma_intrinsics(shape: TensorCoreShape, accum_dtype: str, *, a_k_last: bool, b_k_last: bool, order: str = ORDERS[0]) -> MmaIntrinsics:
    """Return the intrinsics of a GEMM, registered.

    `k_last` says that an operand is contiguous along k; `order`, one of ORDERS, in which order the function adds and multiplies:
    TVM matches expressions as they are written.
    """
    found = _named(shape, accum_dtype, ("n" if a_k_last else "t") + ("t" if b_k_last else "n"), order)
    register((found.load_a, found.load_b, found.mma, found.clear))
    return found


def register(names: Iterable[str]) -> None:
    """Register those intrinsics that are among the names: replaying a trace finds them by name."""
    for name in dict.fromkeys(names):
        if name in all_names() and tvm.s_tir.TensorIntrin.get(name, allow_missing=True) is None:
            _register(name)


@functools.cache
def all_names() -> frozenset[str]:
    """Return the names of all intrinsics; to register them all takes seconds."""
    shapes = [(shape, accum_dtype) for shape in TABLE if shape.unit == "mma.sync" for accum_dtype in shape.accum_dtypes]
    found = [_named(*each, letters, order) for each, letters, order in itertools.product(shapes, ("nn", "nt", "tn", "tt"), ORDERS)]
    return frozenset(name for each in found for name in (each.load_a, each.load_b, each.mma, each.clear))


def _named(shape: TensorCoreShape, accum_dtype: str, letters: str, order: str) -> MmaIntrinsics:
    """Return the names for a layout in BLAS's letters."""
    dtype = shape.dtype
    interleaved = _interleaved(dtype, letters)
    return MmaIntrinsics(
        load_a=_load_name("a", dtype, k_last=letters[0] == "n"),
        load_b=_load_name("b", dtype, k_last=letters[1] == "t"),
        mma=f"kd.mma.{dtype}.{accum_dtype}.{letters}.{order}" + f".{shape.name}" * (shape != shape_of("mma.sync", dtype)),
        clear=f"kd.clear.{accum_dtype}" + f".{letters}" * any(interleaved),
        k=K_BYTES // dtype_bytes(dtype),
        interleaved=interleaved,
    )


def accumulator_place(row: Any, column: Any, interleaved: Interleaved = (False, False)) -> tuple[Any, Any]:
    """Return the lane that holds an accumulator of a fragment of 16 x 16, and the accumulator's index among the lane's 8.

    A lane holds two neighbours of every eighth row, in both halves of the columns (PTX ISA, "Matrix Fragments for mma.m16n8k16").
    """
    row_half, row_lane = (row % 2, row // 2) if interleaved[0] else (row // 8, row % 8)
    if interleaved[1]:
        return 4 * row_lane + column // 4, 4 * (column % 2) + 2 * row_half + column // 2 % 2
    return 4 * row_lane + column % 8 // 2, 4 * (column // 8) + 2 * row_half + column % 2


def _interleaved(dtype: str, letters: str) -> Interleaved:
    """Return how accumulators lie for a layout in BLAS's letters: 8-bit elements are loaded in pairs where k is not last."""
    return (dtype_bytes(dtype) == 1 and letters[0] == "t", dtype_bytes(dtype) == 1 and letters[1] == "n")


def _load_name(operand: str, dtype: str, *, k_last: bool) -> str:
    return f"kd.ldmatrix.{SIDES[operand]}.{dtype}.{'k_last' if k_last else 'k_first'}"


def _register(name: str) -> None:
    with _cheap_stack():
        match name.split("."):
            case [_, "ldmatrix", side, dtype, layout]:
                described, done = fragment_load(dtype, side, k_last=layout == "k_last")
            case [_, "mma", dtype, accum_dtype, letters, order, *shape_name]:
                shape = next(row for row in TABLE if (row.unit, row.dtype) == ("mma.sync", dtype) and shape_name in ([], [row.name]))
                described = _described_mma(dtype, accum_dtype, order, letters)
                done = _mma(shape, accum_dtype)
            case [_, _, accum_dtype, *letters]:
                # Letters stand only where operands have 8 bits.
                described, done = _clear(accum_dtype, _interleaved("int8", letters[0]) if letters else (False, False))
    tvm.s_tir.TensorIntrin.register(name, described, done)


@contextlib.contextmanager
def _cheap_stack() -> Iterator[None]:
    """Have `inspect.stack` read no source: TVMScript calls it for each function and needs the frames alone."""

    def frames(_: int = 1) -> list[inspect.FrameInfo]:
        found = []
        frame: Any = sys._getframe(1)  # noqa: SLF001  # what inspect.stack itself does
        while frame is not None:
            found.append(inspect.FrameInfo(frame, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None, None))
            frame = frame.f_back
        return found

    stack, inspect.stack = inspect.stack, frames  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.stack = stack


# TVMScript has its own rules for names, annotations and what counts as an expression.
# ruff: noqa: N806, N812
# mypy: disable-error-code="valid-type, no-any-return, misc, untyped-decorator"


def _described_mma(dtype: str, accum_dtype: str, order: str, letters: str) -> Any:
    """Return the computation of a fragment of 16 x 16 results."""
    from tvm.script import tirx as T

    depth = K_BYTES // dtype_bytes(dtype)
    held, held_accum = ROWS * depth // LANES, ROWS * ROWS // LANES
    a_k_last, b_k_last, interleaved = letters[0] == "n", letters[1] == "t", _interleaved(dtype, letters)

    def widened(value: Any) -> Any:
        return value if dtype == accum_dtype else tvm.tirx.Cast(accum_dtype, value)

    def ordered(a: Any, b: Any) -> tuple[Any, Any]:
        return (b, a) if "ba" in order else (a, b)

    def added(accumulator: Any, first: Any, second: Any) -> Any:
        multiplied = widened(first) * widened(second)
        return accumulator + multiplied if order.startswith("c") else multiplied + accumulator

    def place(spatial: Any, k: Any, *, k_last: bool) -> tuple[Any, Any]:
        return operand_place(*((spatial, k) if k_last else (k, spatial)), dtype, k_last=k_last)

    @T.prim_func(s_tir=True)
    def described(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, held), dtype, align=64, offset_factor=ROWS, scope="local")
        B = T.match_buffer(b, (LANES, held), dtype, align=64, offset_factor=ROWS, scope="local")
        C = T.match_buffer(c, (LANES, held_accum), accum_dtype, align=64, offset_factor=ROWS, scope="local")
        with T.sblock("root"):
            whole = T.meta_var(ordered(A[0:LANES, 0:held], B[0:LANES, 0:held]))
            T.reads(C[0:LANES, 0:held_accum], whole[0], whole[1])
            T.writes(C[0:LANES, 0:held_accum])
            for i, j, k in T.grid(ROWS, ROWS, depth):
                with T.sblock("C"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    lane_a, place_a = T.meta_var(place(vi, vk, k_last=a_k_last))
                    lane_b, place_b = T.meta_var(place(vj, vk, k_last=b_k_last))
                    lane_c, place_c = T.meta_var(accumulator_place(vi, vj, interleaved))
                    operands = T.meta_var(ordered(A[lane_a, place_a], B[lane_b, place_b]))
                    T.reads(C[lane_c, place_c], operands[0], operands[1])
                    T.writes(C[lane_c, place_c])
                    C[lane_c, place_c] = added(C[lane_c, place_c], operands[0], operands[1])

    return described


def _mma(shape: TensorCoreShape, accum_dtype: str) -> Any:
    """Return the PTX of a fragment of 16 x 16 results: as many instructions as that takes."""
    from tvm.script import tirx as T

    depth = K_BYTES // dtype_bytes(shape.dtype)
    held, held_accum = ROWS * depth // LANES, ROWS * ROWS // LANES
    operand, accumulator = ABBREVIATIONS[shape.dtype], ABBREVIATIONS[accum_dtype]

    def multiply(a: Any, b: Any, c: Any, lane: Any) -> None:
        begins = (a.elem_offset + lane * held, b.elem_offset + lane * held, c.elem_offset + lane * held_accum)
        for places in _instructions(shape):
            pointers = zip((a.data, b.data, c.data), map(operator.add, begins, places), strict=True)
            types = ("row", "col", operand, operand, accumulator)
            T.evaluate(T.ptx_legacy.mma(shape.name, *types, *itertools.chain(*pointers), False, dtype=accum_dtype))

    @T.prim_func(s_tir=True)
    def done(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, held), shape.dtype, align=64, offset_factor=ROWS, scope="local")
        B = T.match_buffer(b, (LANES, held), shape.dtype, align=64, offset_factor=ROWS, scope="local")
        C = T.match_buffer(c, (LANES, held_accum), accum_dtype, align=64, offset_factor=ROWS, scope="local")
        with T.sblock("root"):
            T.reads(C[0:LANES, 0:held_accum], A[0:LANES, 0:held], B[0:LANES, 0:held])
            T.writes(C[0:LANES, 0:held_accum])
            for tx in T.thread_binding(0, LANES, "threadIdx.x"):
                multiply(A, B, C, tx)

    return done


def _instructions(shape: TensorCoreShape) -> list[tuple[int, int, int]]:
    """Return where the operands and accumulators of each instruction begin among a lane's elements.

    A's registers are ordered by k, then rows; B's by columns, then k; accumulators by columns, then rows.
    """
    m, n, k = shape.tile
    depth = K_BYTES // dtype_bytes(shape.dtype)
    held, held_accum = ROWS * depth // LANES, ROWS * ROWS // LANES
    k_parts, m_parts, n_parts = depth // k, ROWS // m, ROWS // n
    return [
        (
            (k_part * m_parts + m_part) * (held // (k_parts * m_parts)),
            (n_part * k_parts + k_part) * (held // (k_parts * n_parts)),
            (n_part * m_parts + m_part) * (held_accum // (m_parts * n_parts)),
        )
        for k_part, n_part, m_part in itertools.product(range(k_parts), range(n_parts), range(m_parts))
    ]


def _clear(dtype: str, interleaved: Interleaved) -> tuple[Any, Any]:
    """Return the zeroing of an accumulator fragment: its computation, and its PTX."""
    from tvm.script import tirx as T

    held = ROWS * ROWS // LANES
    zero = tvm.tirx.const(0, dtype)

    @T.prim_func(s_tir=True)
    def described(c: T.handle) -> None:
        C = T.match_buffer(c, (LANES, held), dtype, scope="local")
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:LANES, 0:held])
            for i, j in T.grid(ROWS, ROWS):
                with T.sblock("clear"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, place = T.meta_var(accumulator_place(vi, vj, interleaved))
                    T.reads()
                    T.writes(C[lane, place])
                    C[lane, place] = zero

    @T.prim_func(s_tir=True)
    def done(c: T.handle) -> None:
        C = T.match_buffer(c, (LANES, held), dtype, scope="local", offset_factor=1)
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:LANES, 0:held])
            for tx in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(T.cuda.mma_fill_legacy(held, C.data, C.elem_offset + tx * held, dtype=dtype))

    return described, done
