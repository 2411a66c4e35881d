"""Owns what threads wait for that add up a column: bounds of rows and of columns, which keep loads apart, and one another's results.

Knows nothing of TVM or of which tilings are tried.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.model import Block, dtype_bytes
from kerneldecl.policies.gpu.time_model import FAST_MATH_BYTES, RESOLVED_LOADS, THREAD_BYTES, THREAD_LOADS

BOUNDED_LOAD_CYCLES = 250.0
"""Cycles in which a thread that sums a column alone waits for each of its loads where chunks are no whole turns, so that no load crosses
another: a latency of L2. Sums and GEMVs of 40 to 13441 rows took 0.1 to 0.4 us a load so, and all loads of one turn are one wait; fitted,
as the next one, to 350 tilings of 19 operators (H200, 2026-11). Chunks of one length have no bounds: nvcc resolves those of their turns."""
COLUMN_WAIT_CYCLES, BRANCHED_UNROLL = 600.0, 4
"""Cycles of each load where such a thread tests bounds of columns; of each turn instead where chunks are of one length and so many loads
or more are unrolled, since nvcc 13.0 then tests the columns once a turn. 611 rows of 8891 bfloat16 in chunks of 47 took 7.9 us in 3
turns, 8.6 in 6, 10.9 in 12, and 19 and 23 us in turns of two and one (H200, 2026-11)."""
SHARED_COLUMN_CYCLES = 750.0
"""Cycles of each load where several threads share a column and bounds are tested of columns: sums of 32 to 4420 rows, of 125 and 1119
columns, took 0.32 to 0.5 us a load so, however unrolled (H200, 2026-11)."""
PADDED_VECTOR_CYCLES = 250.0
"""Cycles of each load of 16 bytes where padded columns and chunks both have bounds; of narrower vectors, a branch each, it is the one
above. 20 tilings of a GEMV of 1272 x 2344 float16: 6.2 us with 7 loads, 9.2 with 14; single elements have none (H200, 2026-11)."""
SHARED_REST_CYCLES, ROLLED_REST_CYCLES = 400.0, 100.0
"""Cycles of each load where they share one and the chunks' unrolled rows are no whole turns; and where each row is a turn, which nvcc
unrolls with fewer branches. Six sums of 26 to 517 rows took 0.18 to 0.3 us a load and 0.02 to 0.1 us (H200, 2026-11)."""
REST_WAIT_CYCLES = 650.0
"""Cycles of each wait of `rest_waits`: sums of 27 x 563, 87 x 77 and 611 x 8891, 16 tilings of 1 to 38 waits, took 0.25 to 0.4 us a wait
(H200, 2026-11)."""
UNROLLED_STEPS, ROLLED_LOADS = 64, 6
"""Loads of a thread up to which nvcc 13.0 unrolls all turns of a column; and those in flight where turns are of one load, in the SASS of
110 sums."""
WHOLE_TURN_CYCLES, WHOLE_TURN_LOAD_CYCLES = 360.0, 140.0
"""Cycles of each turn, or of each load if those are more, where threads share a column and all chunks but the last have whole turns: ten
tilings of nine columns of 9.9 million rows, which took 680 for each load where turns are single rows and some are left (H200, 2026-11)."""
UNBRANCHED_BYTES = 4
"""Bytes of an access up to which padding is no branch: of single elements, mostly."""
COMBINED_CYCLES = 12.0
"""Cycles of one thread for each partial result of a column that it adds up out of shared memory, one after the other."""
COMBINED_WARP_CYCLES = 0.5
"""Cycles for each of them that an SM's shared memory is busy with a warp, where all threads of a column add it up: tilings of 1272 x 2344
took 0.9 to 1.9 us more with 16 threads a column than with 8 (H200, 2026-11)."""


class Turns(NamedTuple):
    """How the threads of a column go through a chunk of it."""

    rows: int
    """Threads that share the column."""
    unroll: int
    """Rows that each of them adds up in a turn."""
    steps: int
    """Rows of each."""
    are_whole: bool
    """Whether all chunks but the last have whole turns, and that one fewer rows."""
    chunks: int
    access_bytes: int
    """Bytes of a load."""


def bounded_load_cycles(block: Block, has_rest: bool, has_partial: bool, turns: Turns) -> float:
    """Return the cycles that each load waits which tests bounds, since no other crosses it: of rows that are no whole turns, of columns.

    Padded columns are bounded where they are loaded alone.
    """
    if is_padded(block):
        return _padded_load_cycles(turns, has_partial) if has_rest else 0.0
    if turns.rows == 1:
        return _alone_load_cycles(turns, has_partial)
    if has_partial or not has_rest:
        return SHARED_COLUMN_CYCLES if has_partial else 0.0
    return _rest_load_cycles(turns, is_narrow=dtype_bytes(block.reads[0].dtype) <= FAST_MATH_BYTES)


def _padded_load_cycles(turns: Turns, has_partial: bool) -> float:
    if not has_partial:
        return BOUNDED_LOAD_CYCLES
    if turns.chunks == 1 or turns.access_bytes <= UNBRANCHED_BYTES:
        return 0.0
    return PADDED_VECTOR_CYCLES if turns.access_bytes == VECTOR_BYTES else SHARED_COLUMN_CYCLES


def _alone_load_cycles(turns: Turns, has_partial: bool) -> float:
    if not has_partial:
        return BOUNDED_LOAD_CYCLES if turns.are_whole else 0.0
    is_branch_a_turn = not turns.are_whole and turns.unroll >= BRANCHED_UNROLL
    return COLUMN_WAIT_CYCLES / (turns.unroll if is_branch_a_turn else 1)


def _rest_load_cycles(turns: Turns, *, is_narrow: bool) -> float:
    if turns.are_whole:
        return max(WHOLE_TURN_CYCLES / turns.unroll, WHOLE_TURN_LOAD_CYCLES)
    if turns.chunks == 1:
        return REST_WAIT_CYCLES * rest_waits(turns, is_narrow=is_narrow) / turns.steps
    if turns.unroll > 1:
        return SHARED_REST_CYCLES
    return ROLLED_REST_CYCLES if turns.steps <= RESOLVED_LOADS else SHARED_COLUMN_CYCLES


def rest_waits(turns: Turns, *, is_narrow: bool) -> float:
    """Return how often a thread waits after the first time, where threads share a column and its rows are no whole turns (counted in SASS).

    Of each unrolled turn, the loads that bounds exclude of the last one wait one by one, the others together. Elements of 16 bits, whose
    additions are not branches where hardly a load is excluded, do not wait then.
    """
    missing, count = -turns.steps % turns.unroll, -(-turns.steps // turns.unroll)
    if is_narrow and turns.unroll == 1:
        return turns.steps / ROLLED_LOADS if turns.steps <= RESOLVED_LOADS else turns.steps / 2.0
    if turns.steps > UNROLLED_STEPS:
        return turns.steps - 1.0
    if is_narrow and missing <= (turns.unroll >= BRANCHED_UNROLL):
        return 0.0
    one_more = missing == 0 and turns.unroll > 1
    return min(turns.steps, count * (1 + missing) + one_more) - 1.0


def column_rounds(steps: int, access_bytes: int) -> float:
    """Return how often a thread that sums a column waits for memory."""
    return max(1.0, steps / THREAD_LOADS, steps * access_bytes / THREAD_BYTES)


def column_waits(steps: int, unroll: int, load_cycles: float) -> float:
    """Return the cycles in which a thread waits for the loads of a column, of which those of a single turn are resolved.

    Not so those that wait for the bounds of columns that threads share.
    """
    return steps * load_cycles if steps > unroll or load_cycles == SHARED_COLUMN_CYCLES else 0.0


def combining_cycles(rows: int, width: int) -> float:
    """Return the cycles in which threads add up what the threads of their columns have found; as many as columns, or one for several."""
    return 0.0 if rows == 1 else COMBINED_CYCLES * width * (1 if width % rows == 0 else rows)


def combining_warp_cycles(rows: int, width: int) -> float:
    """Return the cycles in which an SM's shared memory serves a warp that adds up columns: warps that add up the same ones take turns."""
    return 0.0 if rows == 1 or width % rows == 0 else COMBINED_WARP_CYCLES * width * rows


def is_padded(block: Block) -> bool:
    """Say whether the template pads columns and rows to whole tiles where they are none: those of a sum of products along one axis."""
    reduced = [axis for axis in block.axes if axis.kind == "reduce" and axis.extent > 1]
    return block.is_multiply_accumulate and len(block.reads) == 2 and len(reduced) == 1
