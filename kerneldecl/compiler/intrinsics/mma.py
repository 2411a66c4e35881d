"""Owns the tensor intrinsics of mma.sync and ldmatrix: their names, the computation of each, and its PTX.

Knows nothing of schedules, policies or how kernels are compiled.

With dynamic shared memory, TVM has such intrinsics for float16 alone, and takes seconds to import them; these are registered on
first use. `fragment_place` maps an element (row, column) of a 16-row fragment to a lane and its register, as ldmatrix and mma.sync
do (PTX ISA, matrix fragments for mma.m16n8k16).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm

from kerneldecl.model import dtype_bytes

ROWS = 16
"""Rows of a fragment, and columns of an accumulator fragment: two m16n8 instructions along n."""
LANES = 32
ABBREVIATIONS = {"float16": "fp16", "bfloat16": "bf16", "int8": "int8", "float32": "fp32", "int32": "int32"}
ACCUM_DTYPES = {"float16": ("float32", "float16"), "bfloat16": ("float32",), "int8": ("int32",)}
"""Accumulator dtypes of mma.sync, by dtype of the operands."""

ORDERS = ("c+ab", "c+ba", "ab+c", "ba+c")
"""Orders in which a multiply-accumulate can be written: accumulator c, operands a and b."""
_SIDES = {"a": "left", "b": "right"}
"""Operands in the names of the ldmatrix intrinsics, which stand in recorded traces."""


@dataclass(frozen=True)
class MmaIntrinsics:
    """Names of the intrinsics of one GEMM."""

    load_a: str
    load_b: str
    mma: str
    clear: str
    k: int
    """Extent along k of one mma.sync."""


def mma_intrinsics(dtype: str, accum_dtype: str, *, a_k_last: bool, b_k_last: bool, order: str = ORDERS[0]) -> MmaIntrinsics:
    """Return the intrinsics of a GEMM, registered.

    `k_last` says that an operand is contiguous along k; `order`, one of ORDERS, in which order the function adds and multiplies:
    TVM matches expressions as they are written.
    """
    found = MmaIntrinsics(
        load_a=_load_name("a", dtype, k_last=a_k_last),
        load_b=_load_name("b", dtype, k_last=b_k_last),
        mma=_mma_name(dtype, accum_dtype, order, a_k_last=a_k_last, b_k_last=b_k_last),
        clear=f"kd.clear.{accum_dtype}",
        k=32 // dtype_bytes(dtype),
    )
    for name in (found.load_a, found.load_b, found.mma, found.clear):
        if tvm.s_tir.TensorIntrin.get(name, allow_missing=True) is None:
            _register(name)
    return found


def register_all() -> None:
    """Register every intrinsic: reading a database replays its traces, which name them."""
    for dtype, accum_dtype in ((dtype, accum) for dtype, several in ACCUM_DTYPES.items() for accum in several):
        layouts = (True, False) if dtype_bytes(dtype) == 2 else (True,)
        for a_k_last, b_k_last, order in itertools.product(layouts, layouts, ORDERS):
            mma_intrinsics(dtype, accum_dtype, a_k_last=a_k_last, b_k_last=b_k_last, order=order)


def fragment_place(row: Any, column: Any, dtype: str) -> tuple[Any, Any]:
    """Return the lane that holds an element of a fragment of 16 rows, and the element's index among the lane's.

    A lane holds 4 bytes of every eighth row; accumulators are laid out as 16-bit operands are.
    """
    pack = 4 // min(2, dtype_bytes(dtype))
    return 4 * (row % 8) + column % (4 * pack) // pack, 2 * pack * (column // (4 * pack)) + pack * (row // 8) + column % pack


def _load_name(operand: str, dtype: str, *, k_last: bool) -> str:
    return f"kd.ldmatrix.{_SIDES[operand]}.{dtype}.{'k_last' if k_last else 'k_first'}"


def _mma_name(dtype: str, accum_dtype: str, order: str, *, a_k_last: bool, b_k_last: bool) -> str:
    letters = ("n" if a_k_last else "t") + ("t" if b_k_last else "n")
    return f"kd.mma.{dtype}.{accum_dtype}.{letters}.{order}"


def _register(name: str) -> None:
    with _cheap_stack():
        match name.split("."):
            case [_, "ldmatrix", side, dtype, layout]:
                k_last = layout == "k_last"
                # The second of the four matrices is the one below the first, or else the one beside it.
                described, done = _load(dtype, k_last=k_last, is_below=(side == _SIDES["a"]) == k_last)
            case [_, "mma", dtype, accum_dtype, letters, order]:
                described = _described_mma(dtype, accum_dtype, order, a_k_last=letters[0] == "n", b_k_last=letters[1] == "t")
                done = _mma(dtype, accum_dtype)
            case [_, _, accum_dtype]:
                described, done = _clear(accum_dtype)
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


def _load(dtype: str, *, k_last: bool, is_below: bool) -> tuple[Any, Any]:
    """Return ldmatrix of four 8x8 matrices of 16-bit elements (8-bit elements in pairs): its computation, and its PTX."""
    from tvm.script import tirx as T

    depth, chunk = 32 // dtype_bytes(dtype), 16 // dtype_bytes(dtype)
    rows, columns = (ROWS, depth) if k_last else (depth, ROWS)
    held = rows * columns // LANES
    is_transposed = not k_last

    def offset(lane: Any, stride: Any) -> Any:
        if is_below:
            return stride * (lane % 16) + chunk * (lane // 16)
        return stride * (8 * (lane // 16) + lane % 8) + chunk * (lane % 16 // 8)

    @T.prim_func(s_tir=True)
    def described(warp_handle: T.handle, shared_handle: T.handle) -> None:
        shared = T.match_buffer(shared_handle, (rows, columns), dtype, align=64, offset_factor=columns, scope="shared.dyn")
        warp = T.match_buffer(warp_handle, (LANES, held), dtype, align=64, offset_factor=columns, scope="local")
        with T.sblock("root"):
            T.reads(shared[0:rows, 0:columns])
            T.writes(warp[0:LANES, 0:held])
            for ax0, ax1 in T.grid(rows, columns):
                with T.sblock("load"):
                    v0, v1 = T.axis.remap("SS", [ax0, ax1])
                    T.reads(shared[v0, v1])
                    lane, place = T.meta_var(fragment_place(v0, v1, dtype))
                    T.writes(warp[lane, place])
                    warp[lane, place] = shared[v0, v1]

    @T.prim_func(s_tir=True)
    def done(warp_handle: T.handle, shared_handle: T.handle) -> None:
        s0 = T.int32()
        s1 = T.int32()
        shared = T.match_buffer(
            shared_handle, (rows, columns), dtype, align=64, offset_factor=columns, scope="shared.dyn", strides=[s0, s1]
        )
        warp = T.match_buffer(warp_handle, (LANES, held), dtype, align=64, offset_factor=columns, scope="local")
        with T.sblock("root"):
            T.reads(shared[0:rows, 0:columns])
            T.writes(warp[0:LANES, 0:held])
            for tx in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(
                    T.ptx_legacy.ldmatrix(
                        is_transposed,
                        4,
                        ".b16",
                        warp.data,
                        warp.elem_offset + held * tx,
                        shared.access_ptr("r"),
                        offset(tx, s0),
                        dtype=dtype,
                    )
                )

    return described, done


def _described_mma(dtype: str, accum_dtype: str, order: str, *, a_k_last: bool, b_k_last: bool) -> Any:
    """Return the computation of two mma.sync m16n8 along n."""
    from tvm.script import tirx as T

    depth = 32 // dtype_bytes(dtype)
    held, held_accum = ROWS * depth // LANES, ROWS * ROWS // LANES

    def widened(value: Any) -> Any:
        return value if dtype == accum_dtype else tvm.tirx.Cast(accum_dtype, value)

    def ordered(a: Any, b: Any) -> tuple[Any, Any]:
        return (b, a) if "ba" in order else (a, b)

    def added(accumulator: Any, first: Any, second: Any) -> Any:
        multiplied = widened(first) * widened(second)
        return accumulator + multiplied if order.startswith("c") else multiplied + accumulator

    def a_place(i: Any, k: Any) -> tuple[Any, Any]:
        return fragment_place(i, k, dtype) if a_k_last else fragment_place(k, i, dtype)

    def b_place(j: Any, k: Any) -> tuple[Any, Any]:
        return fragment_place(j, k, dtype) if b_k_last else fragment_place(k, j, dtype)

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
                    lane_a, place_a = T.meta_var(a_place(vi, vk))
                    lane_b, place_b = T.meta_var(b_place(vj, vk))
                    lane_c, place_c = T.meta_var(fragment_place(vi, vj, accum_dtype))
                    operands = T.meta_var(ordered(A[lane_a, place_a], B[lane_b, place_b]))
                    T.reads(C[lane_c, place_c], operands[0], operands[1])
                    T.writes(C[lane_c, place_c])
                    C[lane_c, place_c] = added(C[lane_c, place_c], operands[0], operands[1])

    return described


def _mma(dtype: str, accum_dtype: str) -> Any:
    """Return the PTX of two mma.sync m16n8 along n."""
    from tvm.script import tirx as T

    depth = 32 // dtype_bytes(dtype)
    held, held_accum = ROWS * depth // LANES, ROWS * ROWS // LANES
    shape = f"m16n8k{depth}"
    operand, accumulator = ABBREVIATIONS[dtype], ABBREVIATIONS[accum_dtype]

    def multiply(*places: tuple[Any, Any]) -> Any:
        """Return one mma.sync of A, B and C, each as a pointer and an offset."""
        return T.ptx_legacy.mma(shape, "row", "col", operand, operand, accumulator, *itertools.chain(*places), False, dtype=accum_dtype)

    @T.prim_func(s_tir=True)
    def done(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, held), dtype, align=64, offset_factor=ROWS, scope="local")
        B = T.match_buffer(b, (LANES, held), dtype, align=64, offset_factor=ROWS, scope="local")
        C = T.match_buffer(c, (LANES, held_accum), accum_dtype, align=64, offset_factor=ROWS, scope="local")
        with T.sblock("root"):
            T.reads(C[0:LANES, 0:held_accum], A[0:LANES, 0:held], B[0:LANES, 0:held])
            T.writes(C[0:LANES, 0:held_accum])
            for tx in T.thread_binding(0, LANES, "threadIdx.x"):
                a_place = T.meta_var((A.data, A.elem_offset + tx * held))
                b_place = T.meta_var((B.data, B.elem_offset + tx * held))
                c_place = T.meta_var((C.data, C.elem_offset + tx * held_accum))
                T.evaluate(multiply(a_place, b_place, c_place))
                T.evaluate(multiply(a_place, (b_place[0], b_place[1] + held // 2), (c_place[0], c_place[1] + held_accum // 2)))

    return done


def _clear(dtype: str) -> tuple[Any, Any]:
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
                    lane, place = T.meta_var(fragment_place(vi, vj, dtype))
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
