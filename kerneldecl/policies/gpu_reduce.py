"""Owns how a reduction should be cut into threads, rows, columns and chunks on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kerneldecl.analysis.combined_columns import chunk_rows, combining_threads, has_warps
from kerneldecl.analysis.gpu_limits import SECTOR_BYTES, VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.short_reduction import is_short
from kerneldecl.model import Access, Arch, Block, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.column_waits import (
    BOUNDED_LOAD_CYCLES,
    Turns,
    bounded_load_cycles,
    column_rounds,
    column_waits,
    combining_cycles,
    combining_warp_cycles,
    is_padded,
)
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import (
    ACCESS_FLOPS,
    PREFETCHED_ROUND,
    RESOLVED_LOADS,
    WARP_CYCLES,
    Timed,
    Work,
    access_widths,
    in_flight_bytes,
    load_rounds,
    prefetched_share,
    ranked,
    touched_share,
)
from kerneldecl.policies.gpu_elementwise import in_vectors
from kerneldecl.policies.shared.reduction import is_across, streamed_reduction
from kerneldecl.policies.shared.traffic import axes_of, contiguous_axis, largest, moved_bytes, operand_bytes, points

TEMPLATES = ("gpu_reduce", "gpu_elementwise")
AUTO = {"cuda": 75}

BLOCK_THREADS = (256, 128, 512, 1024)
ROW_THREADS = (32, 64, 128, 256, 512, 1024, 16, 8, 4, 2, 1)
COLUMN_ROWS = (8, 4, 16, 2, 32, 1)
"""Threads of a block that share a column."""
UNROLL = (4, 2, 1)
NARROW_BYTES = 4
"""Bytes of an access up to which more are unrolled: as where an odd number of columns leaves no wider ones."""
NARROW_UNROLL = (16, 8, *UNROLL)
OTHER_REGISTERS = 15
"""Registers of a thread besides its loads in flight and its results: 30 in all for 64 bytes in flight, measured on an H200."""
ELEMENT_CYCLES = 24.0
"""Cycles in which a thread accumulates one element of a row after the one before: its conversions, the multiplication and the addition.
Fitted to GEMVs on an H200."""
TILE_COST = 0.08
"""Part of DRAM's time that threads with several rows take longer: each warp then reads as many rows of DRAM at once. GEMVs of 33 and 47 MB
took 1.1 to 1.2 times as long so (H200, 2026-11)."""
PIECE_BYTES, PIECE_COST = 1024, 0.02
"""Bytes of a row that its threads read at once, and the part of DRAM's time by which less takes longer, each time half as much: a warp then
reads several rows of DRAM at once. GEMVs of 134 and 537 MB took 1 % more by 64 threads instead of 128, 4 % by 16; sums of 34 MB 5 % by 16
instead of 32 (H200, 2026-11)."""
ENOUGH_UNROLLED = 4
"""Loads that are unrolled where a thread has so many: nvcc unrolls what is left of the loop by itself."""
WIDE_COLUMNS, WIDE_COLUMNS_COST = 8, 0.08
"""Columns of a thread from which on sums of columns take longer, and by which part: vectors of eight elements of 16 bits took 1.08 times as
long as those of four (global pool of 128 x 7 x 7 x 2048) and 3.3 times (2 x 37 million; H200, 2026-11). GEMVs do not."""
ROLLED_SHARE = 0.1
"""Part of the latencies of a column by which they are more for each turn that could have been unrolled: GEMVs and sums of float32 took 1.2
to 2.4 times as long without unrolling, sums of 16 bits less (nine operators, H200, 2026-11)."""
UNPREFETCHED_ROUND = 0.25
"""Latencies that a kernel waits longer whose threads have more than one turn, or bounds: no load is prefetched while the kernel before
ends. Sums of 16 x 2400 and 32 x 1119 took 0.2 us less in a single turn (H200, 2026-11)."""
CHUNK_CYCLES = 120.0
"""Cycles of a lane for each chunk that it adds up in the second kernel: 92 to 442 chunks of 125 and 176 columns took 0.06 us for each of
3 to 14 a lane (two operators, H200, 2026-11)."""
BRANCH_CYCLES = 200.0
"""Cycles that a thread waits more for each load of a product's two operands that is a branch: those of a single turn with bounds, of
whole 16 bytes with bounds, or of several rows with bounds. GEMVs of 72 to 7560 columns took 0.2 to 0.4 us more so (four operators), four of
1240 to 2744 columns 0.4 to 1.2 us by 16 bytes or two rows a thread (seed 43, H200, 2026-11)."""
UNPACK_FLOPS = 16.0
"""Operations that unpack and convert an element of 4 bits, as of the times of GEMVs with bfloat16 vectors (H200, 2026-11)."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return schedules of the one reduction of a function; nothing where there are several, or operands are used again and again."""
    block = streamed_reduction(space)
    if block is None:
        return ()
    elements, own = points(block, "reduce"), ranked("gpu_reduce", arch.the_gpu, tilings(space, block, arch.the_gpu), top_k)
    if len(block.reads) != 1 or not (elements == 1 or (is_short(elements) and is_across(block))):
        return own
    # Threads that hold all elements store vectors, which those that share a reduction do not. One element is copied.
    stored = in_vectors(space, arch.the_gpu, top_k)
    return ((*stored, *own) if elements == 1 else tuple(interleaved(stored, own)))[:top_k]


def tilings(space: IterSpace, block: Block, gpu: Gpu, tiles: Sequence[int] = ()) -> Iterator[Timed]:
    """Yield tilings of a reduction along or across contiguous memory; with `tiles`, also how many rows share a thread."""
    return _across(space, block, gpu) if is_across(block) else _along(space, block, gpu, tiles)


class _Rows(NamedTuple):
    """What all tilings of one reduction along rows share."""

    row_count: int
    """Rows."""
    elements: int
    """Elements of the largest operand in one row."""
    element: int
    """Bytes of each of them."""
    operands: int
    others_bytes: int
    """Bytes of the other operands, as if each row loaded its own."""
    lane_bytes: int
    """Bytes of another operand per element of the largest one, for the operand that needs most."""
    points: int
    flops: float
    moved_bytes: int
    l2_bytes: int
    """Bytes that SMs get from L2 or send there: the largest operand's as often as other rows read them again."""


class _RowTiling(NamedTuple):
    """How rows are cut."""

    width: int
    """Elements of one access."""
    threads: int
    """Threads that share a row."""
    rows: int
    """Rows of a block at once."""
    unroll: int
    tile: int
    """Rows that share a thread."""
    chunks: int
    """Chunks of a row, each of another block."""


def _along(space: IterSpace, block: Block, gpu: Gpu, tiles: Sequence[int]) -> Iterator[Timed]:
    """Yield tilings of rows: how many threads share one, how many rows a block has, in how many chunks each is."""
    rows = _rows(space, block)
    widths = access_widths(_contiguous(block), rows.element)
    for width, row_threads, threads, unroll, tile in itertools.product(widths, ROW_THREADS, BLOCK_THREADS, UNROLL, tiles or (1,)):
        vectors = rows.elements // width
        if row_threads > threads or rows.row_count % tile or not _fits(row_threads, vectors, unroll):
            continue
        count = block_rows(rows.row_count // tile, threads // row_threads)
        for chunks in _chunks(gpu, -(-rows.row_count // (count * tile)), vectors, row_threads):
            tiling = _RowTiling(width=width, threads=row_threads, rows=count, unroll=unroll, tile=tile, chunks=chunks)
            params = {"strided": False, "threads": row_threads, "rows": count, "width": width, "unroll": unroll, "chunks": chunks}
            works = (_row_work(rows, gpu, tiling), *_combining(gpu, rows.row_count, chunks))
            yield params | ({"tile": tile} if tiles else {}), works


def _rows(space: IterSpace, block: Block) -> _Rows:
    main, total, count = largest(block), points(block), points(block, "spatial")
    own_rows = math.prod(block.axes[axis].extent for axis in axes_of(main) if block.axes[axis].kind == "spatial")
    elements = math.prod(main.shape) // max(1, own_rows)
    others = [access for access in block.reads if access != main and access.index]
    row_bytes = [_row_bytes(block, access, count) for access in others]
    return _Rows(
        row_count=count,
        elements=elements,
        element=dtype_bytes(main.dtype),
        operands=len(block.reads),
        others_bytes=count * sum(row_bytes),
        lane_bytes=-(-max(row_bytes, default=0) // max(1, elements)),
        points=total,
        flops=float(total * (block.flops_per_point + 1 + _unpack_flops(block, main))),
        moved_bytes=moved_bytes(space),
        l2_bytes=moved_bytes(space) + (count // own_rows - 1) * operand_bytes(main),
    )


def _unpack_flops(block: Block, main: Access) -> float:
    """Return the operations that unpack an element of 4 bits; multiplications by float16 have instructions of their own."""
    is_packed = main.dtype == "uint8" and len(block.reads) > 1
    return UNPACK_FLOPS if is_packed and all(access.dtype != "float16" for access in block.reads) else 0.0


@functools.cache
def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def block_rows(count: int, most: int) -> int:
    """Return how many of `count` rows a block has, at most `most`: a divisor, so that the last one is whole, if one is more than half.

    A GPU starts a block of few threads no sooner than one of many.
    """
    whole, full = largest_divisor(count, most), min(count, most)
    return whole if 2 * whole > full else full


def _fits(threads: int, vectors: int, unroll: int) -> bool:
    """Say whether threads find a vector each, or are as few as can be, and unrolled turns are many, but not mostly empty."""
    return (threads < 2 * vectors or threads == 1) and unroll in _unrolls(2 * vectors, threads)


def _unrolls(vectors: int, threads: int) -> list[int]:
    """Return how many loads of a thread to unroll: no more than there are vectors for, and few only where more are too many."""
    fitting = [unroll for unroll in UNROLL if threads * unroll < vectors]
    return [unroll for unroll in fitting if unroll >= ENOUGH_UNROLLED] or fitting[:1] or [1]


def _row_bytes(block: Block, access: Access, count: int) -> int:
    """Return the bytes of an operand that one row needs."""
    varies = any(block.axes[axis].kind == "spatial" for axis in axes_of(access))
    return math.prod(access.shape) * dtype_bytes(access.dtype) // (count if varies else 1)


def _row_work(rows: _Rows, gpu: Gpu, tiling: _RowTiling) -> Work:
    vectors, access_bytes = rows.elements // tiling.width, tiling.width * rows.element
    steps = -(-vectors // (tiling.chunks * tiling.threads))
    loads = steps * (tiling.tile + rows.operands - 1)
    is_even = vectors % (tiling.chunks * tiling.threads * min(tiling.unroll, steps)) == 0
    # What unrolled turns leave is a loop of its own: a sum of 9360 float16 by 512 threads, five loads each, took 2.9 us instead of 1.3, a
    # GEMV of 147 columns by 32 threads 2.3 instead of 1.2. Turns without a rest wait as those without bounds: 1967 columns by 128 threads,
    # four turns, took 2.8 us like two turns of 256.
    has_rest = not is_even and steps > tiling.unroll and steps % tiling.unroll > 0
    bounded_turns = -(-steps // tiling.unroll) if has_rest else 0
    # Lanes without a vector in the last step wait for the others; loads that bounds exclude of the last turn are issued, too.
    slots = steps if is_even or steps <= tiling.unroll else -(-steps // tiling.unroll) * tiling.unroll
    waste = slots * tiling.threads * tiling.chunks / vectors
    is_branched = not is_even and rows.operands <= 2 and (steps == 1 or access_bytes == VECTOR_BYTES or tiling.tile > 1)
    branches = (1 if rows.operands == 1 else loads) * is_branched
    piece = min(tiling.threads, vectors) * access_bytes
    return Work(
        blocks=-(-rows.row_count // tiling.tile * tiling.chunks // tiling.rows),
        threads=tiling.threads * tiling.rows,
        regs_per_thread=OTHER_REGISTERS
        + in_flight_bytes(tiling.unroll * (tiling.tile + rows.operands - 1) * access_bytes) // 4
        + tiling.tile,
        flops=(rows.flops + ACCESS_FLOPS * rows.points / tiling.width) * waste,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=rows.moved_bytes * (1 + TILE_COST * (tiling.tile > 1) + PIECE_COST * math.log2(max(1.0, PIECE_BYTES / piece))),
        l2_bytes=rows.l2_bytes * waste * max(1.0, SECTOR_BYTES / (min(tiling.threads, vectors) * access_bytes)),
        # Operands that all rows share come from an SM's L1, which is shared memory by another name; where a thread takes more than
        # one access, its neighbours' are as far from one another, each in a line of its own.
        moved_smem_bytes=rows.points * rows.element
        + rows.others_bytes / tiling.tile * max(1.0, tiling.width * rows.lane_bytes / VECTOR_BYTES),
        rounds=load_rounds(loads, access_bytes, bounded_turns) + has_rest - PREFETCHED_ROUND * _prefetched(rows, gpu, tiling),
        barriers=2 * tiling.tile if tiling.threads > gpu.warp_size else 0,
        serial_cycles=ELEMENT_CYCLES * steps * tiling.tile * tiling.width + branches * BRANCH_CYCLES,
        warp_cycles=WARP_CYCLES,
    )


def _prefetched(rows: _Rows, gpu: Gpu, tiling: _RowTiling) -> float:
    """Return which part of a row is prefetched: what a single turn loads of whole rows without bounds."""
    vectors, whole = rows.elements // tiling.width, rows.elements // tiling.width // tiling.threads
    is_looped = -(-vectors // tiling.threads) > tiling.unroll
    if rows.operands > 1 or tiling.chunks > 1 or is_looped or rows.row_count % tiling.rows:
        return 0.0
    blocks, threads = rows.row_count // tiling.rows, tiling.threads * tiling.rows
    return prefetched_share(gpu, blocks, threads, whole, tiling.width * rows.element) * whole * tiling.threads / vectors


def _combining(gpu: Gpu, count: int, chunks: int) -> Iterator[Work]:
    """Yield the work of a second kernel in which a warp combines the chunks of one row."""
    if chunks > 1:
        threads = min(chunks, gpu.warp_size)
        loads = -(-chunks // threads)
        yield Work(
            blocks=count,
            threads=threads,
            l2_bytes=count * chunks * 4,
            rounds=load_rounds(loads, 4),
            serial_cycles=loads * CHUNK_CYCLES,
        )


def _combining_columns(gpu: Gpu, count: int, chunks: int) -> Iterator[Work]:
    """Yield the work of a second kernel in which a thread or a warp combines the chunks of one column."""
    threads = combining_threads(count)
    if has_warps(count):
        yield from _combining(gpu, count, chunks)
    elif chunks > 1:
        yield Work(
            blocks=-(-count // threads),
            threads=threads,
            l2_bytes=count * chunks * 4,
            rounds=load_rounds(chunks, 4),
            serial_cycles=chunks * BOUNDED_LOAD_CYCLES if count % threads else 0.0,
        )


def _chunks(gpu: Gpu, blocks: int, vectors: int, threads: int) -> list[int]:
    """Return into how many chunks to cut each row: one, and where blocks are fewer than SMs, so many that each SM has some."""
    # Chunks are equally long.
    found = (largest_divisor(vectors, power) for power in _wanted_chunks(gpu, blocks))
    return list(dict.fromkeys([1, *(chunks for chunks in found if vectors // chunks >= threads)]))


def _wanted_chunks(gpu: Gpu, blocks: int) -> list[int]:
    """Return into how many chunks to cut blocks for one, two or four on each SM, powers of 2; none where blocks are enough."""
    wanted = [gpu.sm_count * waves // blocks for waves in (1, 2, 4)] if blocks < gpu.sm_count else []
    return [1 << max(0, want - 1).bit_length() for want in wanted]


def _contiguous(block: Block) -> int:
    """Return the extent along which the largest operand is contiguous, 1 where there is none: accesses are as wide as divides it."""
    axis = contiguous_axis(block, largest(block))
    return 1 if axis is None else block.axes[axis].extent


def _across(space: IterSpace, block: Block, gpu: Gpu) -> Iterator[Timed]:
    """Yield tilings of columns: how many threads are next to one another, how many share a column, in how many chunks each is."""
    main = largest(block)
    element, columns, size = dtype_bytes(main.dtype), _contiguous(block), points(block, "reduce")
    moved = moved_bytes(space)
    others = points(block, "spatial") // columns
    for width, rows, threads in itertools.product(access_widths(columns, element), COLUMN_ROWS, BLOCK_THREADS[:3]):
        vectors, is_narrow = columns // width, width * element <= NARROW_BYTES
        sides = _sides(vectors, threads // rows)
        is_converted = len(block.reads) == 1 and element < 4
        is_wide = width * element == VECTOR_BYTES and width >= WIDE_COLUMNS and not is_padded(block)
        for side, unroll in itertools.product(sides, NARROW_UNROLL if is_narrow else UNROLL):
            smem_bytes = rows * side * width * dtype_bytes(block.writes[0].dtype) if rows > 1 else 0
            if (rows > 1 and rows * unroll > size) or unroll > size or smem_bytes > gpu.smem_per_block_bytes:
                continue
            blocks = others * -(-vectors // side)
            combined = blocks * side * width if is_padded(block) else others * columns
            # Threads that share whole rows read neighbouring rows.
            piece_bytes = side * width * element * (rows if others == 1 and side == vectors else 1)
            is_unrolled = rows == 1 and size <= RESOLVED_LOADS
            rolled = 1.0 if is_converted or is_unrolled else 1 + ROLLED_SHARE * (ENOUGH_UNROLLED / unroll - 1)
            # As on rows, there are chunks where blocks are few.
            for chunks in _column_chunks(gpu, blocks, size, rows, unroll):
                steps = -(-chunk_rows(size, chunks, rows * unroll) // rows)
                turns = Turns(rows, unroll, steps, size % chunks > 0, chunks, width * element)
                load_cycles = bounded_load_cycles(block, size % (chunks * rows * unroll) > 0, vectors % side > 0, turns)
                is_prefetched = steps <= unroll and load_cycles == 0.0
                waste = -(-steps // unroll) * unroll * rows * chunks / size * blocks * side / (others * vectors)
                work = Work(
                    blocks=blocks * chunks,
                    threads=side * rows,
                    regs_per_thread=OTHER_REGISTERS + in_flight_bytes(unroll * len(block.reads) * width * element) // 4 + width,
                    smem_bytes=smem_bytes,
                    flops=points(block) * (block.flops_per_point + 1 + ACCESS_FLOPS / width) * waste,
                    flops_per_s=gpu.simt_rate("float32"),
                    dram_bytes=moved * (1 + is_wide * WIDE_COLUMNS_COST),
                    l2_bytes=moved * touched_share(piece_bytes),
                    rounds=column_rounds(steps, width * element) * rolled + (0.0 if is_prefetched else UNPREFETCHED_ROUND),
                    barriers=1 if rows > 1 else 0,
                    serial_cycles=column_waits(steps, unroll, load_cycles) + combining_cycles(rows, width),
                    warp_cycles=combining_warp_cycles(rows, width),
                )
                params = {"strided": True, "threads": side, "rows": rows, "width": width, "unroll": unroll, "chunks": chunks}
                yield params, (work, *_combining_columns(gpu, combined, chunks))


def _column_chunks(gpu: Gpu, blocks: int, size: int, rows: int, unroll: int) -> list[int]:
    """Return into how many chunks to cut each column: as each row, and into whole turns where few numbers divide it."""
    found = _chunks(gpu, blocks, size, rows)
    for power in _wanted_chunks(gpu, blocks):
        whole = largest_divisor(size, power)
        if 2 * whole <= power:
            found.append(-(-size // chunk_rows(size, power, rows * unroll)))
    return list(dict.fromkeys(found))


def _sides(vectors: int, most: int) -> list[int]:
    """Return how many threads along the columns to try: a divisor of all, and where that is less than half of `most`, that."""
    divisor = largest_divisor(vectors, most)
    return [divisor, most] if most >= WARP_LANES and 2 * divisor <= min(vectors, most) else [divisor]
