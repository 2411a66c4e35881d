"""Owns how many pixels of windows that overlap, or are small, a thread should pool on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.pool import PoolParams, PoolSizes, computes, pool_of, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import gpu_window
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.pool_planes import INSTRUCTION_FLOPS, planes_in_turns
from kerneldecl.policies.gpu.time_model import Timed, Work, access_widths, ranked
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATES = ("gpu_pool", "gpu_pool_planes", *gpu_window.TEMPLATES)
AUTO = {"cuda": 69}
HAS_TRACES = False

COLUMNS = (1, 2, 4, 7)
"""Pixels of a column of a thread at most: as many as cut an image into equal parts."""
STRIPS = (1, 2)
"""Pixels of a row of a thread."""
AHEAD = (1, 2, 3, 5)
"""Rows that a thread loads before it uses the first, at most."""
THREADS = (128, 256, 512)
MAX_ROW_THREADS = 1024
"""Threads of a block of whole rows of pixels at most."""
MORE_AHEAD = 2
"""Rows more than those that nvcc 13.0 has under way: it moves up the loads of the next ones (SASS of 40 kernels)."""
MANY_THREADS = 512
"""Threads of an SM with which narrower vectors have no use: 16 vectors of 16 bytes of each are 128 KB under way."""
MAX_WINDOW = 16
"""Elements of a window at most that overlaps no other and whose columns are contiguous: a thread reads all of it. gpu_reduce, which takes
such windows else, is predicted three times as slow with those of 2 x 2."""
MAX_REGISTERS = 168
OTHER_REGISTERS = 10
"""Registers of a thread besides the vectors under way and the windows that it keeps: 8 to 18 in 40 kernels of nvcc 13.0."""
TURN_INSTRUCTIONS = 50.0
"""Instructions of a thread that finds its place."""
LOAD_INSTRUCTIONS = 2.0
"""Instructions of a load with its predicate, besides those that set its registers."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return columns of pixels of several lengths, and the best of gpu_window, in turns; nothing for what other policies do as well."""
    sizes, gpu = pool_of(space), arch.the_gpu
    if sizes is None or not (computes(sizes) if sizes.channels_first else takes(sizes, gpu)) or not _is_shared(sizes):
        return ()
    in_turns = (planes_in_turns if sizes.channels_first else _in_turns)(sizes, moved_bytes(space), gpu, top_k)
    # Blocks of whole rows may be those of another kind.
    own = list({proposal.candidate: proposal for proposal in in_turns}.values())
    return tuple(interleaved(own, gpu_window.propose(space, arch, top_k)))[:top_k] if own else ()


def _is_shared(sizes: PoolSizes) -> bool:
    """Say whether windows overlap, or threads share the lines of small ones."""
    is_small = sizes.channels_first and sizes.window_rows * sizes.window_columns <= MAX_WINDOW
    return is_small or sizes.window_rows > sizes.stride_rows or sizes.window_columns > sizes.stride_columns


def _in_turns(sizes: PoolSizes, moved: int, gpu: Gpu, top_k: int) -> Iterator[Proposal]:
    """Yield columns of each length in turns, the fastest first, of each a block of whole rows and another one.

    Memory limits all of them, so the model hardly tells them apart.
    """
    lengths = {-(-sizes.out_rows // -(-sizes.out_rows // most)) for most in COLUMNS}
    kinds = [
        [ranked("gpu_pool", gpu, _timed(sizes, column, moved, gpu, has_whole_rows=whole), top_k) for whole in (False, True)]
        for column in sorted(lengths)
    ]
    for in_turn in itertools.zip_longest(*(itertools.zip_longest(*kind) for kind in kinds), fillvalue=()):
        pairs = sorted((sorted(filter(None, pair), key=_secs) for pair in in_turn if any(pair)), key=lambda pair: _secs(pair[0]))
        yield from itertools.chain.from_iterable(pairs)


def _secs(proposal: Proposal) -> float:
    return proposal.predicted_secs


def _timed(sizes: PoolSizes, column: int, moved: int, gpu: Gpu, *, has_whole_rows: bool) -> Iterator[Timed]:
    widest, *narrower = access_widths(sizes.channels, dtype_bytes(sizes.dtype))
    for width, strip, most_ahead in itertools.product((widest, *narrower), STRIPS, AHEAD):
        ahead = min(most_ahead, max(1, PoolParams(1, widest, column, strip, 1).rows(sizes) - MORE_AHEAD))
        is_full = PoolParams(1, widest, column, strip, ahead).turns(sizes) >= gpu.sm_count * MANY_THREADS
        for threads in _row_threads(sizes, width, strip) if has_whole_rows else THREADS:
            params = PoolParams(threads, width, column, strip, ahead)
            if params.fits(sizes, gpu) and (width == widest or not is_full):
                work = _work(sizes, params, moved, gpu)
                if work.regs_per_thread <= MAX_REGISTERS:
                    yield params._asdict(), (work,)


def _row_threads(sizes: PoolSizes, width: int, strip: int) -> list[int]:
    """Return the threads of blocks of whole rows of pixels, where these are whole warps."""
    row = sizes.channels // width * -(-sizes.out_columns // strip)
    return [row * bands for bands in (1, 2, 4) if row * bands <= MAX_ROW_THREADS and row * bands % WARP_LANES == 0]


def _work(sizes: PoolSizes, params: PoolParams, moved: int, gpu: Gpu) -> Work:
    element, accum = dtype_bytes(sizes.dtype), dtype_bytes(sizes.accum)
    rows, columns, access = params.rows(sizes), params.columns(sizes), params.width * element
    words = -(-access // 4)
    loads, turns = rows * columns, params.turns(sizes)
    in_flight = min(rows, params.ahead + MORE_AHEAD) * columns
    converted = loads * params.width if sizes.accum != sizes.dtype else 0
    # Windows that a thread keeps, and a row's part of each, unless they take the place of vectors.
    kept = (-(-sizes.window_rows // sizes.stride_rows) + 1) * params.strip * params.width if in_flight < loads or converted else 0
    combined = params.strip * params.width * (rows * (sizes.window_columns - 1) + params.column * (sizes.window_rows - 1))
    instructions = TURN_INSTRUCTIONS + loads * (LOAD_INSTRUCTIONS + words) + converted + combined * accum / 4
    read = sizes.images * sizes.image_rows * sizes.image_columns * sizes.channels * element
    return Work(
        blocks=params.blocks(sizes),
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + in_flight * words + kept * accum // 4,
        flops=turns * INSTRUCTION_FLOPS * instructions,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=moved,
        l2_bytes=moved + read * (_read_again(sizes, params) - 1),
        moved_smem_bytes=turns * access * (loads + params.column * params.strip),
        rounds=-(-loads // in_flight),
        thread_instructions=instructions,
    )


def _read_again(sizes: PoolSizes, params: PoolParams) -> float:
    """Return how often thread blocks read an element of the input, on average: what threads of one block share comes from L1."""
    strips, vectors = -(-sizes.out_columns // params.strip), sizes.channels // params.width
    covered = params.threads / vectors
    bands, along = max(1.0, covered / strips) * params.column, min(covered, strips) * params.strip
    down = (bands * sizes.stride_rows + max(0, _reach(sizes.window_rows, sizes.step_rows) - sizes.stride_rows)) / (
        bands * sizes.stride_rows
    )
    beside = max(0, _reach(sizes.window_columns, sizes.step_columns) - sizes.stride_columns) if covered < strips else 0
    return down * (along * sizes.stride_columns + beside) / (along * sizes.stride_columns)


def _reach(window: int, step: int) -> int:
    """Return the elements from the first to the last one of a window."""
    return (window - 1) * step + 1
