"""Owns the tensor intrinsics of mma.sync: their names, what each computes, the PTX that does it.

Knows nothing of schedules, policies or how kernels are compiled.

TVM has such intrinsics for float16 alone with dynamic shared memory and takes seconds to import them; these are made
where they are first asked for. An operand's element (row, column) of a 16-row fragment lies with the lane and at the
place that `fragment_place` says, as ldmatrix and mma.sync have it (PTX ISA, matrix fragments for mma.m16n8k16).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tvm

from kerneldecl.model import dtype_bytes

ROWS = 16
"""Of a fragment, and columns of an accumulator's: two instructions m16n8 side by side."""
LANES = 32
ABBREVIATIONS = {"float16": "fp16", "bfloat16": "bf16", "int8": "int8", "float32": "fp32", "int32": "int32"}
SUMS = {"float16": ("float32", "float16"), "bfloat16": ("float32",), "int8": ("int32",)}
"""By dtype of the factors: what mma.sync can sum in."""

WRITTEN = ("c+ab", "c+ba", "ab+c", "ba+c")
"""Orders in which a sum of products can be written: the sum c, and a, b as the left and the right operand."""


@dataclass(frozen=True)
class Tensorized:
    """Names of the intrinsics of one kind of product."""

    load_left: str
    load_right: str
    multiply: str
    clear: str
    steps: int
    """Of the reduction, in one go."""


def tensorized(dtype: str, sums: str, *, left_k_last: bool, right_k_last: bool, written: str = WRITTEN[0]) -> Tensorized:
    """Return the intrinsics of a product, registered.

    `k_last` says that neighbours along k are neighbours in memory, `written` in which of the orders WRITTEN the function
    adds and multiplies: TVM matches expressions as they are written.
    """
    multiply = _multiply_name(dtype, sums, written, left_k_last=left_k_last, right_k_last=right_k_last)
    loads = _load_name("left", dtype, k_last=left_k_last), _load_name("right", dtype, k_last=right_k_last)
    names = (*loads, multiply, f"kd.clear.{sums}")
    for name in names:
        if tvm.s_tir.TensorIntrin.get(name, allow_missing=True) is None:
            _register(name)
    return Tensorized(*names, steps=32 // dtype_bytes(dtype))


def register_all() -> None:
    """Register every intrinsic: reading a database replays its traces, which name them."""
    for dtype, sums in ((dtype, total) for dtype, totals in SUMS.items() for total in totals):
        layouts = (True, False) if dtype_bytes(dtype) == 2 else (True,)
        for left, right, written in itertools.product(layouts, layouts, WRITTEN):
            tensorized(dtype, sums, left_k_last=left, right_k_last=right, written=written)


def fragment_place(row: Any, column: Any, dtype: str) -> tuple[Any, Any]:
    """Return the lane that holds an element of a fragment of 16 rows, and the element's place among the lane's.

    A lane holds 4 bytes of every eighth row; accumulators are laid out as 16-bit factors are.
    """
    pack = 4 // min(2, dtype_bytes(dtype))
    return 4 * (row % 8) + column % (4 * pack) // pack, 2 * pack * (column // (4 * pack)) + pack * (row // 8) + column % pack


def _load_name(side: str, dtype: str, *, k_last: bool) -> str:
    return f"kd.ldmatrix.{side}.{dtype}.{'k_last' if k_last else 'k_first'}"


def _multiply_name(dtype: str, sums: str, written: str, *, left_k_last: bool, right_k_last: bool) -> str:
    letters = ("n" if left_k_last else "t") + ("t" if right_k_last else "n")
    return f"kd.mma.{dtype}.{sums}.{letters}.{written}"


def _register(name: str) -> None:
    with _cheap_stack():
        match name.split("."):
            case [_, "ldmatrix", side, dtype, order]:
                described, done = _load("left" if side == "left" else "right", dtype, k_last=order == "k_last")
            case [_, "mma", dtype, sums, letters, written]:
                described, done = _multiply(dtype, sums, written, left_k_last=letters[0] == "n", right_k_last=letters[1] == "t")
            case [_, _, sums]:
                described, done = _clear(sums)
    tvm.s_tir.TensorIntrin.register(name, described, done)


@contextlib.contextmanager
def _cheap_stack() -> Iterator[None]:
    """Have `inspect.stack` read no source: TVM's script calls it for each function and needs the frames alone."""

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


# TVM's script has its own rules for names, annotations and what counts as an expression.
# ruff: noqa: N806, N812
# mypy: disable-error-code="valid-type, no-any-return, misc, untyped-decorator"


def _load(side: Literal["left", "right"], dtype: str, *, k_last: bool) -> tuple[Any, Any]:
    """Return ldmatrix of four 8x8 matrices of 16-bit elements (of pairs, for 8 bits) as what it means and as PTX."""
    from tvm.script import tirx as T

    steps, chunk = 32 // dtype_bytes(dtype), 16 // dtype_bytes(dtype)
    rows, columns = (ROWS, steps) if k_last else (steps, ROWS)
    held = rows * columns // LANES
    is_transposed = not k_last
    # Which of the four matrices comes second: the one below the first, or the one beside it.
    is_below = (side == "left") == k_last

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


def _multiply(  # noqa: C901  what it nests is the text of scripts
    dtype: str, sums: str, written: str, *, left_k_last: bool, right_k_last: bool
) -> tuple[Any, Any]:
    """Return two mma.sync m16n8 side by side as what they mean and as PTX."""
    from tvm.script import tirx as T

    steps = 32 // dtype_bytes(dtype)
    held, held_sums = ROWS * steps // LANES, ROWS * ROWS // LANES
    shape = f"m16n8k{steps}"
    factor, total = ABBREVIATIONS[dtype], ABBREVIATIONS[sums]

    def widened(value: Any) -> Any:
        return value if dtype == sums else tvm.tirx.Cast(sums, value)

    def ordered(left: Any, right: Any) -> tuple[Any, Any]:
        return (right, left) if "ba" in written else (left, right)

    def added(before: Any, first: Any, second: Any) -> Any:
        product = widened(first) * widened(second)
        return before + product if written.startswith("c") else product + before

    def left_place(i: Any, k: Any) -> tuple[Any, Any]:
        return fragment_place(i, k, dtype) if left_k_last else fragment_place(k, i, dtype)

    def right_place(j: Any, k: Any) -> tuple[Any, Any]:
        return fragment_place(j, k, dtype) if right_k_last else fragment_place(k, j, dtype)

    @T.prim_func(s_tir=True)
    def described(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, held), dtype, align=64, offset_factor=ROWS, scope="local")
        B = T.match_buffer(b, (LANES, held), dtype, align=64, offset_factor=ROWS, scope="local")
        C = T.match_buffer(c, (LANES, held_sums), sums, align=64, offset_factor=ROWS, scope="local")
        with T.sblock("root"):
            whole = T.meta_var(ordered(A[0:LANES, 0:held], B[0:LANES, 0:held]))
            T.reads(C[0:LANES, 0:held_sums], whole[0], whole[1])
            T.writes(C[0:LANES, 0:held_sums])
            for i, j, k in T.grid(ROWS, ROWS, steps):
                with T.sblock("C"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    lane_a, place_a = T.meta_var(left_place(vi, vk))
                    lane_b, place_b = T.meta_var(right_place(vj, vk))
                    lane_c, place_c = T.meta_var(fragment_place(vi, vj, sums))
                    factors = T.meta_var(ordered(A[lane_a, place_a], B[lane_b, place_b]))
                    T.reads(C[lane_c, place_c], factors[0], factors[1])
                    T.writes(C[lane_c, place_c])
                    C[lane_c, place_c] = added(C[lane_c, place_c], factors[0], factors[1])

    @T.prim_func(s_tir=True)
    def done(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, held), dtype, align=64, offset_factor=ROWS, scope="local")
        B = T.match_buffer(b, (LANES, held), dtype, align=64, offset_factor=ROWS, scope="local")
        C = T.match_buffer(c, (LANES, held_sums), sums, align=64, offset_factor=ROWS, scope="local")
        with T.sblock("root"):
            T.reads(C[0:LANES, 0:held_sums], A[0:LANES, 0:held], B[0:LANES, 0:held])
            T.writes(C[0:LANES, 0:held_sums])
            for tx in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(
                    T.ptx_legacy.mma(
                        shape,
                        "row",
                        "col",
                        factor,
                        factor,
                        total,
                        A.data,
                        A.elem_offset + tx * held,
                        B.data,
                        B.elem_offset + tx * held,
                        C.data,
                        C.elem_offset + tx * held_sums,
                        False,
                        dtype=sums,
                    )
                )
                T.evaluate(
                    T.ptx_legacy.mma(
                        shape,
                        "row",
                        "col",
                        factor,
                        factor,
                        total,
                        A.data,
                        A.elem_offset + tx * held,
                        B.data,
                        B.elem_offset + tx * held + held // 2,
                        C.data,
                        C.elem_offset + tx * held_sums + held_sums // 2,
                        False,
                        dtype=sums,
                    )
                )

    return described, done


def _clear(dtype: str) -> tuple[Any, Any]:
    """Return the setting of a fragment's sums to zero."""
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
