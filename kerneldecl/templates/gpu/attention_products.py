"""Owns the products of attention on mma.sync: scores and results of a warp's fragments, and the additive mask.

Knows nothing of when blocks of keys and values are in shared memory.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.templates.gpu.attention_config import LOG2_E, AttentionTcKernel
from kerneldecl.templates.gpu.attention_tile import WORDS, Warp

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x{}{}.shared.b16"


def _load_matrices(registers: Any, first: int, address: Any, count: int = 4, *, is_transposed: bool = False) -> None:
    """Load so many 8 x 8 matrices to registers from one on."""
    T.evaluate(T.ptx[LDMATRIX.format(count, ".trans" if is_transposed else "")](*[registers[first + i] for i in range(count)], address))


def _load_query_fragment(warp: Warp, number: int, step: int, to: int) -> None:
    """Load the operand A of a step: 16 rows and columns of the warp's queries."""
    row = warp.warp * warp.kernel.params.warp_rows + number * FRAGMENT + warp.lane % 16
    address = warp.smem.q.ptr_to([row, step * (FRAGMENT // 2) + warp.lane // 16 * WORDS])
    _load_matrices(warp.fragments[number].queries, to, address)


def _multiply(kernel: AttentionTcKernel, sums: tuple[Any, int], a: tuple[Any, int], b: tuple[Any, int], *, is_first: bool = False) -> None:
    """Multiply fragments: 16 x 8 sums from a register on, 16 x 16 of A, 16 x 8 of B."""
    accumulators = [sums[0][sums[1] + i] for i in range(4)]
    before = [T.float32(0)] * 4 if is_first else accumulators
    T.evaluate(T.ptx[kernel.mma](*accumulators, *[a[0][a[1] + i] for i in range(4)], *[b[0][b[1] + i] for i in range(2)], *before))


def compute_scores(warp: Warp, stage: Any, matrices: Any) -> None:
    """Multiply the warp's queries and a block of keys."""
    kernel, lane = warp.kernel, warp.lane
    for step in range(kernel.score_steps):
        if not kernel.params.q_in_registers:
            for number in range(len(warp.fragments)):
                _load_query_fragment(warp, number, step, 0)
        for pair in range(kernel.params.block_n // FRAGMENT):
            row, column = pair * FRAGMENT + lane // 16 * 8 + lane % 8, step * FRAGMENT + lane // 8 % 2 * 8
            _load_matrices(matrices, 0, warp.smem.k.ptr_to([stage, row, column]))
            for fragment in warp.fragments:
                a = (fragment.queries, step * 4 if kernel.params.q_in_registers else 0)
                for half in range(2):
                    _multiply(kernel, (fragment.softmax.scores, pair * 8 + half * 4), a, (matrices, half * 2), is_first=step == 0)


def add_results(warp: Warp, stage: Any, matrices: Any) -> None:
    """Add the product of powers and a block of values to the results."""
    kernel, lane = warp.kernel, warp.lane
    for step in range(kernel.params.block_n // FRAGMENT):
        for pair in range(-(-kernel.v_pieces // 2)):
            halves = min(2, kernel.v_pieces - pair * 2)
            column = pair * FRAGMENT + (lane // 16 * 8 if halves == 2 else 0)
            address = warp.smem.v.ptr_to([stage, step * FRAGMENT + lane % 16, column])
            _load_matrices(matrices, 0, address, 2 * halves, is_transposed=True)
            for fragment in warp.fragments:
                for half in range(halves):
                    _multiply(kernel, (fragment.results, pair * 8 + half * 4), (fragment.operand, step * 4), (matrices, half * 2))


def add_mask(warp: Warp, block: Any) -> None:
    """Scale the scores of a block of keys, and add the mask."""
    kernel, spec = warp.kernel, warp.kernel.spec
    values = kernel.func_params[3]
    for number, fragment in enumerate(warp.fragments):
        scores = fragment.softmax.scores
        for i in range(kernel.scores):
            row = warp.first_row(number) + warp.lane // 4 + i % 4 // 2 * 8
            column = block * kernel.params.block_n + warp.lane % 4 * 2 + i // 4 * 8 + i % 2
            inside = (T.min(row, spec.queries - 1), T.min(column, spec.keys - 1))
            added = T.cast(values[inside], "float32") * T.float32(LOG2_E)
            T.buffer_store(scores, scores[i] * T.float32(spec.scale * LOG2_E) + added, [i])


def hold_queries(warp: Warp) -> None:
    """Load all of the warp's queries to registers."""
    for number in range(len(warp.fragments)):
        for step in range(warp.kernel.score_steps):
            _load_query_fragment(warp, number, step, step * 4)
