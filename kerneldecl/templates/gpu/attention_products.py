"""Owns the products of attention on mma.sync: scores and results of a warp's fragments, from elements of 16 or 32 bits.

Knows nothing of when blocks of keys and values are in shared memory.

Operands of 32 bits are split into two of TF32, of which three products are added (Ootomo and Yokota, Recovering single precision accuracy
from Tensor Cores, 2022): what is left out is below float32's rounding.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.templates.gpu.attention_config import AttentionTcKernel
from kerneldecl.templates.gpu.attention_tile import WORDS, Warp

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x{}{}.shared.b16"
TFLOAT32_BITS = 0xFFFFE000
"""What tensor cores take of a float32; they cut off the other bits."""
TFLOAT32_HALF = 0x1000
"""Half of the least of these bits: added before others are cut off, it rounds."""

Registers = tuple[Any, int]
"""A buffer, and the first of the registers in it."""


def _load_matrices(registers: Registers, address: Any, count: int = 4, *, is_transposed: bool = False) -> None:
    """Load so many matrices of 8 rows of 16 bytes."""
    buffer, first = registers
    T.evaluate(T.ptx[LDMATRIX.format(count, ".trans" if is_transposed else "")](*[buffer[first + i] for i in range(count)], address))


def _load_query_fragment(warp: Warp, number: int, step: int, to: int) -> None:
    """Load the operand A of a step: 16 rows of the warp's queries."""
    row = warp.warp * warp.kernel.params.warp_rows + number * FRAGMENT + warp.lane % 16
    address = warp.smem.q.ptr_to([row, step * (2 * WORDS) + warp.lane // 16 * WORDS])
    _load_matrices((warp.fragments[number].queries, to), address)


def hold_queries(warp: Warp) -> None:
    """Load all of the warp's queries to registers."""
    for number in range(len(warp.fragments)):
        for step in range(warp.kernel.score_steps):
            _load_query_fragment(warp, number, step, step * 4)


def _split(values: list[Any], to: Any, first: int = 0) -> None:
    """Split float32 into what rounds to TF32, and what is left, which goes four registers behind."""
    for i, value in enumerate(values):
        taken = T.bitwise_and(T.reinterpret("uint32", value) + T.uint32(TFLOAT32_HALF), T.uint32(TFLOAT32_BITS))
        left = T.reinterpret("uint32", value - T.reinterpret("float32", taken)) + T.uint32(TFLOAT32_HALF)
        # The latter first: the value may be where the former goes.
        T.buffer_store(to, left, [first + 4 + i])
        T.buffer_store(to, taken, [first + i])


def _floats(registers: Registers, count: int) -> list[Any]:
    return [T.reinterpret("float32", registers[0][registers[1] + i]) for i in range(count)]


def _multiply(kernel: AttentionTcKernel, sums: Registers, a: Registers, b: Registers, *, is_first: bool = False) -> None:
    """Multiply fragments: 16 x 8 sums, 16 x 32 bytes of A, 8 x 32 bytes of B."""
    accumulators = [sums[0][sums[1] + i] for i in range(4)]
    before = [T.float32(0)] * 4 if is_first else accumulators
    T.evaluate(T.ptx[kernel.mma](*accumulators, *[a[0][a[1] + i] for i in range(4)], *[b[0][b[1] + i] for i in range(2)], *before))


def _multiply_split(kernel: AttentionTcKernel, sums: Registers, a: Registers, b: Registers, *, is_first: bool = False) -> None:
    """Add the products of split fragments, the smallest first."""
    (of_a, at_a), (of_b, at_b) = a, b
    _multiply(kernel, sums, (of_a, at_a + 4), b, is_first=is_first)
    _multiply(kernel, sums, a, (of_b, at_b + 4))
    _multiply(kernel, sums, a, b)


def compute_scores(warp: Warp, stage: Any, matrices: Any) -> None:
    """Multiply the warp's queries and a block of keys."""
    kernel, lane = warp.kernel, warp.lane
    for step in range(kernel.score_steps):
        queries = _queries_of(warp, step)
        for pair in range(kernel.params.block_n // FRAGMENT):
            row, word = pair * FRAGMENT + lane // 16 * 8 + lane % 8, step * (2 * WORDS) + lane // 8 % 2 * WORDS
            _load_matrices((matrices, 0), warp.smem.k.ptr_to([stage, row, word]))
            if kernel.rows.is_wide:
                _split(_floats((matrices, 0), 4), matrices)
            multiply = _multiply_split if kernel.rows.is_wide else _multiply
            for fragment, a in zip(warp.fragments, queries, strict=True):
                for half in range(2):
                    multiply(kernel, (fragment.softmax.scores, pair * 8 + half * 4), a, (matrices, half * 2), is_first=step == 0)


def _queries_of(warp: Warp, step: int) -> list[Registers]:
    """Return where each fragment's operand A of a step is, once it is loaded, and split where it has 32 bits."""
    is_held = warp.kernel.params.q_in_registers == 1
    places = []
    for number, fragment in enumerate(warp.fragments):
        if not is_held:
            _load_query_fragment(warp, number, step, 0)
        loaded = (fragment.queries, step * 4 if is_held else 0)
        if warp.kernel.rows.is_wide:
            _split(_floats(loaded, 4), fragment.operand)
        places.append((fragment.operand, 0) if warp.kernel.rows.is_wide else loaded)
    return places


def add_results(warp: Warp, stage: Any, matrices: Any) -> None:
    """Add the product of powers and a block of values to the results."""
    if warp.kernel.rows.is_wide:
        _add_wide_results(warp, stage, matrices)
    else:
        _add_narrow_results(warp, stage, matrices)


def _add_narrow_results(warp: Warp, stage: Any, matrices: Any) -> None:
    kernel, lane = warp.kernel, warp.lane
    for step in range(kernel.params.block_n // FRAGMENT):
        for pair in range(-(-kernel.v_pieces // 2)):
            halves = min(2, kernel.v_pieces - pair * 2)
            word = pair * (2 * WORDS) + (lane // 16 * WORDS if halves == 2 else 0)
            address = warp.smem.v.ptr_to([stage, step * FRAGMENT + lane % 16, word])
            _load_matrices((matrices, 0), address, 2 * halves, is_transposed=True)
            for fragment in warp.fragments:
                for half in range(halves):
                    _multiply(kernel, (fragment.results, pair * 8 + half * 4), (fragment.operand, step * 4), (matrices, half * 2))


def _add_wide_results(warp: Warp, stage: Any, matrices: Any) -> None:
    """Do so in steps of eight keys, in the order in which threads hold their powers: the even ones, then the odd ones."""
    kernel, lane = warp.kernel, warp.lane
    for step in range(kernel.params.block_n // 8):
        for fragment in warp.fragments:
            _split([fragment.softmax.scores[step * 4 + place] for place in (0, 2, 1, 3)], fragment.operand)
        for column in range(kernel.spec.value_dim // 8):
            for i in range(2):
                T.buffer_store(matrices, warp.smem.v[stage, step * 8 + lane % 4 * 2 + i, column * 8 + lane // 4], [i])
            _split(_floats((matrices, 0), 2), matrices)
            for fragment in warp.fragments:
                _multiply_split(kernel, (fragment.results, column * 4), (fragment.operand, 0), (matrices, 0))
