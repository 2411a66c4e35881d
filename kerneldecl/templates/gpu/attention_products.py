"""Owns both GEMMs of attention on mma.sync: a warp's fragments of QK and of PV.

Knows nothing of when blocks of keys and values are in shared memory.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.templates.gpu.attention_config import AttentionTcKernel
from kerneldecl.templates.gpu.attention_tile import WORDS, Warp

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x{}{}.shared.b16"

Registers = tuple[Any, int]
"""A buffer, and the first of the registers in it."""


def _load_matrices(registers: Registers, address: Any, count: int = 4, *, is_transposed: bool = False) -> None:
    """Load so many matrices of 8 rows of 16 bytes."""
    buffer, first = registers
    T.evaluate(T.ptx[LDMATRIX.format(count, ".trans" if is_transposed else "")](*[buffer[first + i] for i in range(count)], address))


def _load_query_fragment(warp: Warp, number: int, step: int, to: int) -> None:
    """Load the operand A of a step: 16 rows of the warp's queries."""
    row = warp.smem_row + number * FRAGMENT + warp.lane % 16
    address = warp.smem.q.ptr_to([row, step * (2 * WORDS) + warp.lane // 16 * WORDS])
    _load_matrices((warp.fragments[number].queries, to), address)


def hold_queries(warp: Warp) -> None:
    """Load all of the warp's queries to registers."""
    for number in range(len(warp.fragments)):
        for step in range(warp.kernel.score_steps):
            _load_query_fragment(warp, number, step, step * 4)


def _multiply(kernel: AttentionTcKernel, sums: Registers, a: Registers, b: Registers, *, is_first: bool = False) -> None:
    """Multiply fragments: 16 x 8 sums, 16 x 32 bytes of A, 8 x 32 bytes of B."""
    accumulators = [sums[0][sums[1] + i] for i in range(4)]
    before = [T.float32(0)] * 4 if is_first else accumulators
    T.evaluate(T.ptx[kernel.mma](*accumulators, *[a[0][a[1] + i] for i in range(4)], *[b[0][b[1] + i] for i in range(2)], *before))


def compute_scores(warp: Warp, stage: Any, matrices: Any) -> None:
    """Multiply the warp's queries and its keys of a block."""
    kernel, lane = warp.kernel, warp.lane
    keys = kernel.params.warp_keys
    first = warp.column * keys if warp.shares_rows else 0
    for step in range(kernel.score_steps):
        queries = _queries_of(warp, step)
        for pair in range(-(-keys // FRAGMENT)):
            halves = min(2, keys // 8 - pair * 2)
            row = first + pair * FRAGMENT + (lane // 16 * 8 if halves == 2 else 0) + lane % 8
            word = step * (2 * WORDS) + lane // 8 % 2 * WORDS
            _load_matrices((matrices, 0), warp.smem.k.ptr_to([stage, row, word]), 2 * halves)
            for fragment, a in zip(warp.fragments, queries, strict=True):
                for half in range(halves):
                    _multiply(kernel, (fragment.softmax.scores, pair * 8 + half * 4), a, (matrices, half * 2), is_first=step == 0)


def _queries_of(warp: Warp, step: int) -> list[Registers]:
    """Return where each fragment's operand A of a step is, once it is loaded."""
    if warp.kernel.params.q_in_registers == 1:
        return [(fragment.queries, step * 4) for fragment in warp.fragments]
    for number in range(len(warp.fragments)):
        _load_query_fragment(warp, number, step, 0)
    return [(fragment.queries, 0) for fragment in warp.fragments]


def add_results(warp: Warp, stage: Any, matrices: Any) -> None:
    """Add the product of powers and the warp's columns of a block of values to the results."""
    kernel, lane = warp.kernel, warp.lane
    first = warp.column * (kernel.warp_pieces * WORDS) if warp.shares_rows else 0
    for step in range(kernel.params.block_n // FRAGMENT):
        powers = _powers_of(warp, step)
        for pair in range(-(-kernel.warp_pieces // 2)):
            halves = min(2, kernel.warp_pieces - pair * 2)
            word = first + pair * (2 * WORDS) + (lane // 16 * WORDS if halves == 2 else 0)
            address = warp.smem.v.ptr_to([stage, step * FRAGMENT + lane % 16, word])
            _load_matrices((matrices, 0), address, 2 * halves, is_transposed=True)
            for fragment, a in zip(warp.fragments, powers, strict=True):
                for half in range(halves):
                    _multiply(kernel, (fragment.results, pair * 8 + half * 4), a, (matrices, half * 2))


def _powers_of(warp: Warp, step: int) -> list[Registers]:
    """Return where each fragment's operand A of a step is: its own powers, or those that warps of the same rows have exchanged."""
    if not warp.shares_rows:
        return [(fragment.operand, step * 4) for fragment in warp.fragments]
    for number, fragment in enumerate(warp.fragments):
        row, word = warp.smem_row + number * FRAGMENT + warp.lane % 16, step * (2 * WORDS) + warp.lane // 16 * WORDS
        _load_matrices((fragment.operand, 0), warp.smem.powers.ptr_to([row, word]))
    return [(fragment.operand, 0) for fragment in warp.fragments]
