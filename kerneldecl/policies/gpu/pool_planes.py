"""Owns how many results of planes, images with channels first, a thread should pool on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import SECTOR_BYTES, VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.pool import PoolSizes
from kerneldecl.analysis.pool_planes import PlanesParams, pieces
from kerneldecl.model import Gpu, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import LINE_BYTES, Timed, Work, ranked

COLUMNS = (1, 2, 4, 7)
"""Results of a column of a thread at most: as many as cut a plane into equal parts."""
STRIPS = (1, 2, 4, 8)
"""Results of a row of a thread."""
AHEAD = (2, 3, 5, 9)
"""Rows that a thread loads before it uses the first, at most."""
STAGED_AHEAD = 2
"""The same where rows come from shared memory."""
THREADS = (128, 256, 512)
MAX_ROW_THREADS = 512
"""Threads of a block of whole rows of strips at most."""
MORE_AHEAD = 2
"""Rows more than those that nvcc 13.0 has under way: it moves up the loads of the next ones."""
MAX_REGISTERS = 168
OTHER_REGISTERS = 14
"""Registers of a thread besides the loads under way and the windows that it keeps: 12 to 18 in the SASS of eight kernels of nvcc 13.0."""
INSTRUCTION_FLOPS = 2.0
"""Operations for which an instruction counts: both take an issue slot, and rates count a multiply-add as two."""
TURN_INSTRUCTIONS = 70.0
"""Instructions of a thread that finds its place and what its block prefetches."""
LOAD_INSTRUCTIONS = 1.5
"""Instructions of a load with its predicate, besides those that set its registers."""
COPY_INSTRUCTIONS = 3.0
"""Instructions of a copy to shared memory, with its predicate."""


def planes_in_turns(sizes: PoolSizes, moved: int, gpu: Gpu, top_k: int) -> Iterator[Proposal]:
    """Yield columns of each length in turns, from global and from shared memory, the fastest first.

    Memory limits all of them, so the model hardly tells them apart.
    """
    lengths = sorted({-(-sizes.out_rows // -(-sizes.out_rows // most)) for most in COLUMNS})
    kinds = [
        ranked("gpu_pool_planes", gpu, _timed(sizes, column, staged, moved, gpu), top_k)
        for column, staged in itertools.product(lengths, (False, True))
    ]
    for in_turn in itertools.zip_longest(*kinds):
        yield from sorted(filter(None, in_turn), key=lambda proposal: proposal.predicted_secs)


def _timed(sizes: PoolSizes, column: int, staged: bool, moved: int, gpu: Gpu) -> Iterator[Timed]:
    for strip, most_ahead in itertools.product(STRIPS, (STAGED_AHEAD,) if staged else AHEAD):
        ahead = min(most_ahead, max(1, PlanesParams(1, strip, column, 1, staged).rows(sizes) - MORE_AHEAD))
        for threads in _threads(PlanesParams(1, strip, column, ahead, staged).strips(sizes)):
            params = PlanesParams(threads, strip, column, ahead, staged)
            if params.fits(sizes, gpu):
                work = _work(sizes, params, moved, gpu)
                if work.regs_per_thread <= MAX_REGISTERS:
                    yield params._asdict(), (work,)


def _threads(strips: int) -> list[int]:
    """Return threads of a block: usual ones, and those of whole rows of strips, which no other block copies as well."""
    row = math.lcm(strips, WARP_LANES)
    whole = {row * max(1, most // row) for most in THREADS if row <= MAX_ROW_THREADS}
    return sorted({*THREADS, *whole})


def _work(sizes: PoolSizes, params: PlanesParams, moved: int, gpu: Gpu) -> Work:
    element, accum, out = (dtype_bytes(dtype) for dtype in (sizes.dtype, sizes.accum, sizes.out_dtype))
    rows, columns, turns = params.rows(sizes), params.columns(sizes), params.turns(sizes)
    # The padding is not known here; that of windows which are as many as the image's pixels is usual.
    loads = pieces(columns, (sizes.window_columns - 1) * sizes.step_columns // 2, params.vector(sizes))
    row_words = sum(max(1, size * element // 4) for _, size in loads)
    in_flight = min(rows, params.ahead + MORE_AHEAD)
    # A column's elements are combined in words, where maxima are of 16 bits.
    row_parts = row_words if accum == 2 else columns
    combined = params.column * ((sizes.window_rows - 1) * row_parts + params.strip * (sizes.window_columns - 1))
    converted = rows * columns if accum != element else 0
    copies = params.staged_elements(sizes) * element / (VECTOR_BYTES * params.threads) if params.staged else 0.0
    loaded = rows * (len(loads) * LOAD_INSTRUCTIONS + row_words)
    instructions = TURN_INSTRUCTIONS + copies * COPY_INSTRUCTIONS + loaded + converted + combined + params.column * params.strip
    kept = -(-sizes.window_rows // sizes.stride_rows) * row_parts
    blocks = params.blocks(sizes)
    load_turns = rows * sum(_load_turns(sizes, params, size * element) for _, size in loads)
    store_turns = params.column * max(1.0, WARP_LANES * params.strip * out / LINE_BYTES)
    copy_turns = blocks * params.threads * copies * VECTOR_BYTES / LINE_BYTES
    return Work(
        blocks=blocks,
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + in_flight * row_words + kept,
        smem_bytes=params.staged_elements(sizes) * element if params.staged else 0,
        flops=turns * INSTRUCTION_FLOPS * instructions,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=moved,
        l2_bytes=moved + blocks * _read_again(sizes, params) * element,
        moved_smem_bytes=LINE_BYTES * (turns / WARP_LANES * (load_turns + store_turns) + copy_turns),
        rounds=1 if params.staged else -(-rows // in_flight),
        barriers=int(params.staged),
        thread_instructions=instructions,
    )


def _load_turns(sizes: PoolSizes, params: PlanesParams, nbytes: int) -> float:
    """Return the turns of L1 or of shared memory that a warp's load takes, of so many bytes a lane.

    L1 takes a turn for each line that is touched, shared memory for each word of the bank that has most.
    """
    words, element = max(1, nbytes // 4), dtype_bytes(sizes.dtype)
    apart = params.strip * sizes.stride_columns * element
    if params.staged:
        return float(words * math.gcd(max(1, apart // (4 * words)), WARP_LANES // words))
    lanes = min(WARP_LANES, params.strips(sizes))
    segments = WARP_LANES / lanes
    band = params.column * sizes.stride_rows * sizes.image_columns * element
    return max(float(words), min(segments * (lanes * apart / LINE_BYTES + 1), segments * band / LINE_BYTES + 1))


def _read_again(sizes: PoolSizes, params: PlanesParams) -> float:
    """Return the elements that a block reads and the one before it, too: rows that two windows share, and of staged rows whole bands."""
    shared = max(0, (sizes.window_rows - 1) * sizes.step_rows + 1 - sizes.stride_rows)
    bands = params.threads / params.strips(sizes)
    # Blocks that begin with a plane share nothing.
    within = 0.0 if bands % params.bands(sizes) == 0 else 1.0 - 1.0 / params.bands(sizes)
    band = sizes.stride_rows * params.column if params.staged and bands % 1 else 0
    return (within * shared + band) * sizes.image_columns + SECTOR_BYTES / dtype_bytes(sizes.dtype)
