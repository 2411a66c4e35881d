"""Owns what threads wait for that add up a column: bounds of rows and of columns, which keep loads apart, and one another's results.

Knows nothing of TVM or of which tilings are tried.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.model import Block
from kerneldecl.policies.gpu.time_model import RESOLVED_LOADS, THREAD_BYTES, THREAD_LOADS

BOUNDED_LOAD_CYCLES = 250.0
"""Cycles in which a thread that sums a column waits for each of its loads where bounds are tested turn by turn, so that no load crosses
another: a latency of L2. Sums and GEMVs of 40 to 13441 rows took 0.1 to 0.4 us a load so, and all loads of one turn are one wait; fitted,
as the next one, to 350 tilings of 19 operators (H200, 2026-11)."""
SHARED_COLUMN_CYCLES = 750.0
"""Cycles of each load where several threads share a column and bounds are tested of columns: sums of 32 to 4420 rows, of 125 and 1119
columns, took 0.32 to 0.5 us a load so, however unrolled (H200, 2026-11)."""
SHARED_REST_CYCLES, ROLLED_REST_CYCLES = 400.0, 100.0
"""Cycles of each load where they share one and unrolled rows are no whole turns; and where each row is a turn, which nvcc unrolls with
fewer branches. Six sums of 26 to 517 rows took 0.18 to 0.3 us a load and 0.02 to 0.1 us (H200, 2026-11)."""
WHOLE_TURN_CYCLES, WHOLE_TURN_LOAD_CYCLES = 360.0, 140.0
"""Cycles of each turn, or of each load if those are more, where threads share a column and all chunks but the last have whole turns: ten
tilings of nine columns of 9.9 million rows, which took 680 for each load where turns are single rows and some are left (H200, 2026-11)."""
COMBINED_CYCLES = 12.0
"""Cycles of one thread for each partial result of a column that it adds up out of shared memory, one after the other."""


class Turns(NamedTuple):
    """How the threads of a column go through a chunk of it."""

    rows: int
    """Threads that share the column."""
    unroll: int
    """Rows that each of them adds up in a turn."""
    steps: int
    """Rows of each."""
    are_whole: bool
    """Whether all chunks but the last have whole turns."""


def bounded_load_cycles(block: Block, has_rest: bool, has_partial: bool, turns: Turns) -> float:
    """Return the cycles that each load waits which tests bounds, since no other crosses it: of rows that are no whole turns, of columns.

    Padded columns are bounded where they are loaded alone.
    """
    if is_padded(block):
        return BOUNDED_LOAD_CYCLES if has_rest and not has_partial else 0.0
    if turns.rows == 1:
        return BOUNDED_LOAD_CYCLES if has_rest or has_partial else 0.0
    if has_partial or not has_rest:
        return SHARED_COLUMN_CYCLES if has_partial else 0.0
    if turns.are_whole:
        return max(WHOLE_TURN_CYCLES / turns.unroll, WHOLE_TURN_LOAD_CYCLES)
    if turns.unroll > 1:
        return SHARED_REST_CYCLES
    return ROLLED_REST_CYCLES if turns.steps <= RESOLVED_LOADS else SHARED_COLUMN_CYCLES


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


def is_padded(block: Block) -> bool:
    """Say whether the template pads columns and rows to whole tiles where they are none: those of a sum of products along one axis."""
    reduced = [axis for axis in block.axes if axis.kind == "reduce" and axis.extent > 1]
    return block.is_multiply_accumulate and len(block.reads) == 2 and len(reduced) == 1
