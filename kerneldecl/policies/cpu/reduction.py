"""Owns the parameters and predicted times on a CPU of one reduction that reads its largest operand once, along or across memory.

Knows nothing of templates or TVM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from kerneldecl.model import Block, Cpu, IterSpace, Value, dtype_bytes
from kerneldecl.policies.cpu.time_model import compute_lanes, divisors, spread_cycles
from kerneldecl.policies.cpu.traffic_secs import COMBINE_CYCLES, LOOP_CYCLES, Stream, Timed, access_cycles, stream_secs, vector_cycles
from kerneldecl.policies.shared.reduction import is_across
from kerneldecl.policies.shared.traffic import contiguous_axis, largest, moved_bytes, points

STEPS = (4, 2, 1)
"""Rows that a reduction across memory adds up together, unless its policy has others."""
COLUMN_VECTORS = (4, 16)
"""The fewest vectors of columns that are computed together, and a few."""
PARTIAL_CYCLES = 1.0
"""Cycles of a point where the last group of columns is partial: its condition is evaluated in all of them.

Measured on a Zen 4 in November 2026, 128 x 19488 from L3, one core: 0.77 ms with groups of 256 columns, 0.13 with 464.
"""


def tilings(
    space: IterSpace, block: Block, cpu: Cpu, vectors: Sequence[int], rows: Sequence[int] = (), steps: Sequence[int] = STEPS
) -> Iterator[Timed]:
    """Yield tilings of a reduction along or across contiguous memory, with their times."""
    return _across(space, block, cpu, steps) if is_across(block) else _along(space, block, cpu, vectors, rows)


def _along(space: IterSpace, block: Block, cpu: Cpu, vectors: Sequence[int], rows: Sequence[int]) -> Iterator[Timed]:
    """Yield tilings of a reduction along contiguous memory; with `rows`, also how many rows are computed together."""
    lanes = compute_lanes(cpu, block.writes[0].dtype)
    count, size = points(block, "spatial"), points(block, "reduce")
    fitting = [row for row in rows if count % row == 0] or [1]
    for row, vector, chunks, is_parallel in itertools.product(fitting, vectors, _chunks(cpu, block, count), (True, False)):
        tasks = count // row * chunks
        if (vector > 1 and vector * lanes > size) or (is_parallel and tasks < 2):
            continue
        turns = count // row * -(-size // (lanes * vector))
        operations = points(block) / lanes * block.flops_per_point
        loads = sum(points(block) * dtype_bytes(access.dtype) / (1 if access == largest(block) else row) for access in block.reads)
        # One chain of additions advances by a vector per latency; several vectors, rows and out-of-order execution hide that.
        latency = points(block) / lanes / (row * vector) * COMBINE_CYCLES
        combining = count * chunks * (vector - 1 + min(lanes, size)) * LOOP_CYCLES
        cycles = max(vector_cycles(cpu, operations), access_cycles(cpu, loads), latency) + turns * LOOP_CYCLES + combining
        params: dict[str, Value] = {"vectors": vector, "chunks": chunks, "parallel": is_parallel}
        if rows:
            params["rows"] = row
        yield params, stream_secs(cpu, Stream(moved_bytes(space), cycles, tasks), is_parallel=is_parallel)


def _across(space: IterSpace, block: Block, cpu: Cpu, counts: Sequence[int]) -> Iterator[Timed]:
    """Yield tilings of a reduction across contiguous memory."""
    axis = contiguous_axis(block, largest(block))
    assert axis is not None
    width, size = block.axes[axis].extent, points(block, "reduce")
    others = points(block, "spatial") // width
    element, out = dtype_bytes(largest(block).dtype), dtype_bytes(block.writes[0].dtype)
    chunked = [(chunks, steps) for chunks in _chunks(cpu, block, 1) for steps in _steps(size, chunks, counts)]
    for (chunks, steps), columns, is_parallel in itertools.product(chunked, _columns(cpu, block, width), (True, False)):
        groups = -(-width // columns)
        tasks = others * groups * chunks
        has_uneven_chunks = chunks > 1 and size % (chunks * steps) > 0
        if steps > size or has_uneven_chunks or (is_parallel and tasks < 2):
            continue
        # Partial results are loaded and stored once for each step of rows.
        loads = points(block) * (element + 2 * out / steps)
        jumps = others * groups * size * spread_cycles(cpu, width * element, min(columns, width) * element)
        # Whole rows, one after another, are one stream; segments of rows, or several rows at a time, are not.
        cycles = access_cycles(cpu, loads) + (jumps if groups > 1 or steps > 1 else 0.0) + others * groups * size / steps * LOOP_CYCLES
        cycles += PARTIAL_CYCLES * points(block) if width % columns else 0.0
        params: Mapping[str, Value] = {"columns": columns, "steps": steps, "chunks": chunks, "parallel": is_parallel}
        yield params, stream_secs(cpu, Stream(moved_bytes(space), cycles, tasks), is_parallel=is_parallel)


def _steps(size: int, chunks: int, counts: Sequence[int]) -> list[int]:
    """Return how many rows to add up together: those of a policy; in chunks, which must be whole, first the most that divide one."""
    dividing = [count for count in divisors(size // chunks) if count <= max(counts)] if chunks > 1 else []
    return list(dict.fromkeys([*dividing[-1:], *counts]))


def _chunks(cpu: Cpu, block: Block, rows: int) -> list[int]:
    """Return into how many chunks to cut a reduction: one, and where rows may leave cores idle, as many as there are cores."""
    size = points(block, "reduce")
    counts = [cpu.cores, 2 * cpu.cores] if cpu.cores > 1 and rows < 4 * cpu.cores else []
    return [1, *(count for count in counts if size >= 8 * count and size % count == 0)]


def _columns(cpu: Cpu, block: Block, width: int) -> list[int]:
    """Return how many columns to compute together, the most first: equal groups whose results stay in L1.

    For each limit, the most that give each core as many groups, and the most that are whole vectors. Where there are no equal groups, all
    columns if their results stay in L2, and a few vectors.
    """
    lanes = compute_lanes(cpu, block.writes[0].dtype)
    most = cpu.l1d_bytes // (2 * dtype_bytes(block.writes[0].dtype))
    few = [lanes * vectors for vectors in COLUMN_VECTORS]
    equal = [columns for columns in divisors(width) if few[0] <= columns <= most]
    shared = [columns for columns in equal if width // columns % cpu.cores == 0]
    vectors = [columns for columns in equal if columns % lanes == 0]
    found = [width] if width <= most else []
    for limit in (most, most // 4, few[-1]):
        for wanted in (set(shared) & set(vectors) or shared, vectors or equal):
            found += [max(columns for columns in wanted if columns <= limit)] if any(columns <= limit for columns in wanted) else []
    in_l2 = [width] if width * dtype_bytes(block.writes[0].dtype) <= cpu.l2_bytes // 4 else []
    return list(dict.fromkeys(found or [*in_l2, *few]))
