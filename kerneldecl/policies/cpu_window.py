"""Owns which register tiles a reduction over windows should try on a CPU, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.model import Arch, Block, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu.time_model import FMA_LATENCY_CYCLES, compute_lanes, divisors, output_axes
from kerneldecl.policies.cpu.traffic_secs import LOOP_CYCLES, Stream, Timed, ranked, stream_secs
from kerneldecl.policies.shared.traffic import moved_bytes, points

TEMPLATES = ("cpu_window",)
AUTO = {"cpu": 18}

MOST_ROWS = 8
SPARE_REGISTERS = 6
"""Vector registers besides accumulators: what is loaded, and addresses' constants."""
SCALAR_CYCLES = 2.0
"""Cycles in which an element is copied or chosen by itself."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return register tiles, least predicted time first; nothing for a function without one reduction over windows."""
    reductions = [block for block in space.blocks if block.is_reduction]
    out = output_axes(reductions[0]) if len(reductions) == 1 else None
    if out is None or len(out) < 3 or not _is_over_windows(reductions[0], out[-1]) or _has_chain(space, reductions[0]):
        return ()
    return ranked("cpu_window", _tiles(space, reductions[0], out, arch.the_cpu), top_k)


def _has_chain(space: IterSpace, block: Block) -> bool:
    """Say whether more than padding comes before the reduction, such as the dilation of a transposed convolution."""
    before = space.blocks[: space.blocks.index(block)]
    return any(access.operand not in space.inputs for earlier in before for access in earlier.reads)


def _is_over_windows(block: Block, contiguous: int) -> bool:
    """Say whether all that is reduced are places in a window, or windows run along contiguous memory, as where channels come first.

    `cpu_conv2d` has the others: convolutions that reduce channels, too, which lie together.
    """
    windows = [{axis for axis, _ in index} for access in block.reads for index in access.index if index and _is_window(block, index)]
    places = set().union(*windows)
    reduced = {at for at, axis in enumerate(block.axes) if axis.kind == "reduce" and axis.extent > 1}
    return bool(windows) and (reduced <= places or contiguous in places)


def _is_window(block: Block, index: tuple[tuple[int, int], ...]) -> bool:
    """Say whether an index is the sum of a result's place and a place in its window."""
    return len({block.axes[axis].kind for axis, _ in index}) == 2


def _tiles(space: IterSpace, block: Block, out: list[int], cpu: Cpu) -> Iterator[Timed]:
    *tasks, rows_extent, columns_extent = (block.axes[axis].extent for axis in out)
    lanes, is_padded = compute_lanes(cpu, block.writes[0].dtype), space.blocks[0] is not block
    # Where windows run along contiguous memory, a vector's elements are padded one by one.
    is_along = any(len(access.index[-1] or ()) > 1 for access in block.reads)
    ways = (("task",) if is_along else ("inline", "task")) if is_padded else ("task",)
    rows = [size for size in divisors(rows_extent) if size <= MOST_ROWS]
    columns = [size for size in divisors(columns_extent) if size <= 4 * lanes]
    for row, column, pad_at in itertools.product(rows, columns, ways):
        width = math.gcd(column, lanes)
        accumulators = row * column // width
        if accumulators > max(1, cpu.vector_registers - SPARE_REGISTERS):
            continue
        # Results of one accumulator wait for one another.
        per_vector = max(1.0 / cpu.fma_per_cycle, FMA_LATENCY_CYCLES / accumulators) * max(1, block.flops_per_point)
        cycles = points(block) / width * per_vector + points(block) / (row * column) * LOOP_CYCLES
        if is_padded:
            cycles += points(space.blocks[0]) * SCALAR_CYCLES if is_along else points(block) / width * (0.5 if pad_at == "inline" else 1.0)
        work = Stream(moved_bytes(space), cycles, max(1, math.prod(tasks)))
        yield {"rows": row, "columns": column, "pad_at": pad_at}, stream_secs(cpu, work, is_parallel=work.tasks > 1)
