"""Owns the loads of operands' fragments from shared memory before mma.sync: their computation, and their PTX or CUDA.

Knows nothing of names of intrinsics, of multiplications or of how kernels are compiled.

8-bit elements that are not contiguous along k: ldmatrix transposes them in pairs, so that a lane gets two neighbouring rows of A (or
columns of B) and four values of k of each, which byte permutations take apart. A fragment's first half is then its even rows. The rows of
k that a matrix consists of are chosen so that they differ modulo 8, hence lie in different banks.
"""

from __future__ import annotations

from typing import Any

from kerneldecl.analysis.tensor_cores import K_BYTES
from kerneldecl.model import dtype_bytes

ROWS = 16
"""Rows of a fragment, and columns of an accumulator fragment."""
LANES = 32
WIDE_BYTES = 8
"""Bytes of elements that ldmatrix does not take."""
SIDES = {"a": "left", "b": "right"}
"""Operands in the names of the ldmatrix intrinsics, which stand in recorded traces."""

# TVMScript has its own rules for annotations and what counts as an expression.
# ruff: noqa: N812
# mypy: disable-error-code="valid-type, no-any-return, misc, untyped-decorator"


def operand_place(row: Any, column: Any, dtype: str, *, k_last: bool) -> tuple[Any, Any]:
    """Return the lane that holds an element of an operand's fragment, and the element's index among the lane's.

    Rows are those of memory: of A's m or B's n where k is last, else of k. Of 64-bit elements, a lane holds one of every eighth row.
    """
    if dtype_bytes(dtype) == WIDE_BYTES:
        spatial, k = (row, column) if k_last else (column, row)
        return 4 * (spatial % 8) + k, spatial // 8
    pack = 4 // dtype_bytes(dtype)
    if pack * 4 == ROWS and not k_last:
        return 4 * (row % 8) + column // pack, pack * (row // 8) + column % pack
    return 4 * (row % 8) + column % (4 * pack) // pack, 2 * pack * (column // (4 * pack)) + pack * (row // 8) + column % pack


_PAIRS_SOURCE = """
__device__ __forceinline__ void {name}(void* fragment, const void* tile, int offset) {{
  unsigned* words = static_cast<unsigned*>(fragment);
  unsigned address = __cvta_generic_to_shared(static_cast<const char*>(tile) + offset), x[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
  // Bytes of two rows of A (or columns of B) alternate. Lanes with bit 1 set hold the later values of k first.
  const unsigned even = threadIdx.x & 2 ? 0x2064u : 0x6420u, odd = even + 0x1111u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {{
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(words[{even}]) : "r"(x[2 * half]), "r"(x[2 * half + 1]), "r"(even));
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(words[{odd}]) : "r"(x[2 * half]), "r"(x[2 * half + 1]), "r"(odd));
  }}
}}
"""
"""CUDA that loads pairs of 8-bit elements and takes them apart."""
_PAIRS_WORDS = {"a": {"even": "2 * half", "odd": "2 * half + 1"}, "b": {"even": "half", "odd": "2 + half"}}
"""Where their words belong: A's registers are first those of one half of k, B's those of one half of the columns."""


def fragment_load(dtype: str, side: str, *, k_last: bool) -> tuple[Any, Any]:
    """Return the load of a fragment from shared memory: its computation, and its PTX."""
    from tvm.script import tirx as T

    depth = K_BYTES // dtype_bytes(dtype)
    rows, columns = (ROWS, depth) if k_last else (depth, ROWS)
    held = rows * columns // LANES

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
                    lane, place = T.meta_var(operand_place(v0, v1, dtype, k_last=k_last))
                    T.writes(warp[lane, place])
                    warp[lane, place] = shared[v0, v1]

    if dtype_bytes(dtype) == WIDE_BYTES:
        return described, _wide_load(dtype, k_last=k_last)
    if dtype_bytes(dtype) == 1 and not k_last:
        return described, _pair_load(dtype, side)
    return described, _ldmatrix(dtype, side, k_last=k_last)


def _ldmatrix(dtype: str, side: str, *, k_last: bool) -> Any:
    """Return the PTX of four 8x8 matrices of 16-bit elements (8-bit elements in pairs)."""
    from tvm.script import tirx as T

    depth, chunk = K_BYTES // dtype_bytes(dtype), 16 // dtype_bytes(dtype)
    rows, columns = (ROWS, depth) if k_last else (depth, ROWS)
    held = rows * columns // LANES
    is_transposed = not k_last
    # The second of the four matrices is the one below the first, or else the one beside it.
    is_below = (side == SIDES["a"]) == k_last

    def offset(lane: Any, stride: Any) -> Any:
        if is_below:
            return stride * (lane % 16) + chunk * (lane // 16)
        return stride * (8 * (lane // 16) + lane % 8) + chunk * (lane % 16 // 8)

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

    return done


def _pair_load(dtype: str, side: str) -> Any:
    """Return the CUDA of a load of 8-bit elements whose rows in memory are values of k."""
    from tvm.script import tirx as T

    depth = K_BYTES // dtype_bytes(dtype)
    held = depth * ROWS // LANES
    operand = next(each for each, name in SIDES.items() if name == side)
    name = f"kd_load_pairs_{operand}"
    source = _PAIRS_SOURCE.format(name=name, **_PAIRS_WORDS[operand])

    def offset(lane: Any, stride: Any) -> Any:
        matrix, row = lane // 8, lane % 8
        return stride * (16 * (matrix // 2) + 4 * (row // 2) + 2 * ((matrix + row // 4) % 2) + row % 2)

    @T.prim_func(s_tir=True)
    def done(warp_handle: T.handle, shared_handle: T.handle) -> None:
        s0 = T.int32()
        s1 = T.int32()
        shared = T.match_buffer(shared_handle, (depth, ROWS), dtype, align=64, offset_factor=ROWS, scope="shared.dyn", strides=[s0, s1])
        warp = T.match_buffer(warp_handle, (LANES, held), dtype, align=64, offset_factor=ROWS, scope="local")
        with T.sblock("root"):
            T.reads(shared[0:depth, 0:ROWS])
            T.writes(warp[0:LANES, 0:held])
            for tx in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(T.cuda.func_call(name, T.address_of(warp[tx, 0]), shared.access_ptr("r"), offset(tx, s0), source_code=source))

    return done


def _wide_load(dtype: str, *, k_last: bool) -> Any:
    """Return the load of 64-bit elements, which ldmatrix does not take: each lane loads its own."""
    from tvm.script import tirx as T

    depth = K_BYTES // dtype_bytes(dtype)
    rows, columns = (ROWS, depth) if k_last else (depth, ROWS)
    held = rows * columns // LANES

    def place(lane: Any, half: Any) -> tuple[Any, Any]:
        spatial, k = 8 * half + lane // 4, lane % 4
        return (spatial, k) if k_last else (k, spatial)

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
                for half in T.unroll(held):
                    row, column = T.meta_var(place(tx, half))
                    warp[tx, half] = shared[row, column]

    return done
