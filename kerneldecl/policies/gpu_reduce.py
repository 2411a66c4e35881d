"""Owns how a reduction should be cut into threads, rows, columns and chunks on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kerneldecl.model import Access, Arch, Block, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import (
    ACCESS_FLOPS,
    LINE_BYTES,
    WARP_CYCLES,
    Timed,
    Work,
    access_widths,
    in_flight_bytes,
    ranked,
    rounds,
)
from kerneldecl.policies.shared.reduction import is_across, streamed_reduction
from kerneldecl.policies.shared.traffic import contiguous_axis, largest, moved_bytes, points

TEMPLATES = ("gpu_reduce",)
AUTO = {"cuda": 75}

BLOCK_THREADS = (256, 128, 512, 1024)
ROW_THREADS = (32, 64, 128, 256, 512, 1024, 16, 8, 4, 2, 1)
COLUMN_ROWS = (8, 4, 16, 2, 32, 1)
UNROLL = (4, 2, 1)
OTHER_REGISTERS = 15
"""Of a thread, beside what it has on its way and its results: measured on an H200, 30 in all for 64 bytes."""
ELEMENT_CYCLES = 24.0
"""Of one element of a row that a thread adds up, each after the one before: its conversions, the multiplication and the sum. From the times
of products of a matrix and a vector on an H200."""
ENOUGH_UNROLLED = 4
"""Loads spelt out, where there are so many: nvcc unrolls what is left of the loop by itself."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return ways to compute the one reduction of a function; nothing where there are several, or operands are used again and again."""
    block = streamed_reduction(space)
    return () if block is None else ranked("gpu_reduce", arch.the_gpu, tilings(space, block, arch.the_gpu), top_k)


def tilings(space: IterSpace, block: Block, gpu: Gpu, tiles: Sequence[int] = ()) -> Iterator[Timed]:
    """Yield tilings of a reduction along or across contiguous memory; with `tiles`, also how many rows share a thread."""
    return _across(space, block, gpu) if is_across(block) else _along(space, block, gpu, tiles)


@dataclass(frozen=True)
class _Rows:
    """What all cuts of one reduction along rows share."""

    count: int
    """Rows."""
    elements: int
    """Of the largest operand, in one row."""
    element: int
    """Bytes of each."""
    operands: int
    others_bytes: int
    """Of the other operands, as if each row loaded its own."""
    lane_bytes: int
    """Of the operand of which a thread needs most, for each element of the largest one."""
    points: int
    flops: float
    moved_bytes: int


def _along(space: IterSpace, block: Block, gpu: Gpu, tiles: Sequence[int]) -> Iterator[Timed]:
    """Yield cuts of rows: how many threads share one, how many rows a block has, in how many chunks each is."""
    rows = _rows(space, block)
    for width, row_threads, threads, unroll, tile in itertools.product(
        access_widths(_innermost(block), rows.element), ROW_THREADS, BLOCK_THREADS, UNROLL, tiles or (1,)
    ):
        vectors = rows.elements // width
        if row_threads > threads or rows.count % tile or not _fits(row_threads, vectors, unroll):
            continue
        together = largest_divisor(rows.count // tile, threads // row_threads)
        for chunks in _chunks(gpu, rows.count // (together * tile), vectors, row_threads):
            work = _row_work(rows, gpu, (width, row_threads, together, unroll, tile, chunks))
            params = {"strided": False, "threads": row_threads, "rows": together, "width": width, "unroll": unroll, "chunks": chunks}
            yield params | ({"tile": tile} if tiles else {}), (work, *_combining(gpu, rows.count, chunks))


def _rows(space: IterSpace, block: Block) -> _Rows:
    main, total, count = largest(block), points(block), points(block, "spatial")
    elements = math.prod(main.shape) // max(1, count)
    others = [access for access in block.reads if access != main and access.index]
    of_row = [_row_bytes(block, access, count) for access in others]
    return _Rows(
        count=count,
        elements=elements,
        element=dtype_bytes(main.dtype),
        operands=len(block.reads),
        others_bytes=count * sum(of_row),
        lane_bytes=-(-max(of_row, default=0) // max(1, elements)),
        points=total,
        flops=float(total * (block.flops_per_point + 1)),
        moved_bytes=moved_bytes(space),
    )


@functools.cache
def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def _fits(threads: int, vectors: int, unroll: int) -> bool:
    """Say whether threads find a vector each, or are as few as can be, and unrolled turns are many, but not mostly empty."""
    return (threads < 2 * vectors or threads == 1) and unroll in _unrolls(2 * vectors, threads)


def _unrolls(vectors: int, threads: int) -> list[int]:
    """Return how many loads of a thread to spell out: no more than there are vectors for, and few where more are too many."""
    fitting = [unroll for unroll in UNROLL if threads * unroll < vectors]
    return [unroll for unroll in fitting if unroll >= ENOUGH_UNROLLED] or fitting[:1] or [1]


def _row_bytes(block: Block, access: Access, count: int) -> int:
    """Return how much of an operand one row needs."""
    varies = any(block.axes[axis].kind == "spatial" for index in access.index for axis, _ in index or ())
    return math.prod(access.shape) * dtype_bytes(access.dtype) // (count if varies else 1)


def _row_work(rows: _Rows, gpu: Gpu, cut: tuple[int, int, int, int, int, int]) -> Work:
    width, threads, together, unroll, tile, chunks = cut
    vectors, access_bytes = rows.elements // width, width * rows.element
    steps = -(-vectors // (chunks * threads))
    # Lanes without a vector in the last step wait for the others.
    waste = steps * threads * chunks / vectors
    return Work(
        blocks=rows.count // (together * tile) * chunks,
        threads=threads * together,
        regs_per_thread=OTHER_REGISTERS + in_flight_bytes(unroll * (tile + rows.operands - 1) * access_bytes) // 4 + tile,
        flops=(rows.flops + ACCESS_FLOPS * rows.points / width) * waste,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=rows.moved_bytes,
        l2_bytes=rows.moved_bytes * waste * max(1.0, LINE_BYTES / (min(threads, vectors) * access_bytes)),
        # What all rows share comes from an SM's first-level cache, which is shared memory by another name; where a thread
        # takes more than one access, those of its neighbours lie as far apart, each in a line of its own.
        moved_smem_bytes=rows.points * rows.element + rows.others_bytes / tile * max(1.0, width * rows.lane_bytes / 16),
        rounds=rounds(steps * tile * access_bytes),
        barriers=2 if threads > gpu.warp_size else 0,
        serial_cycles=ELEMENT_CYCLES * steps * tile * width,
        warp_cycles=WARP_CYCLES,
    )


def _combining(gpu: Gpu, count: int, chunks: int) -> Iterator[Work]:
    """Yield the work of a second kernel that combines chunks."""
    if chunks > 1:
        yield Work(blocks=max(1, count * min(chunks, gpu.warp_size) // 128), threads=128, l2_bytes=count * chunks * 4, rounds=1)


def _chunks(gpu: Gpu, blocks: int, vectors: int, threads: int) -> list[int]:
    """Return into how many parts to cut each row: one, and where blocks are fewer than SMs, so many that each has some."""
    wanted = [gpu.sm_count * waves // blocks for waves in (1, 2, 4)] if blocks < gpu.sm_count else []
    powers = (1 << max(0, want - 1).bit_length() for want in wanted)
    return list(dict.fromkeys([1, *(chunks for chunks in powers if vectors % chunks == 0 and vectors // chunks >= threads)]))


def _innermost(block: Block) -> int:
    """Return the extent along which the largest operand is contiguous, 1 where there is none: vectors are cut of it."""
    axis = contiguous_axis(block, largest(block))
    return 1 if axis is None else block.axes[axis].extent


def _across(space: IterSpace, block: Block, gpu: Gpu) -> Iterator[Timed]:
    """Yield cuts of columns: how many threads lie side by side, how many share a column, in how many chunks each is."""
    main = largest(block)
    element, width_of_all, size = dtype_bytes(main.dtype), _innermost(block), points(block, "reduce")
    moved = moved_bytes(space)
    others = points(block, "spatial") // width_of_all
    for width, rows, threads, unroll in itertools.product(access_widths(width_of_all, element), COLUMN_ROWS, BLOCK_THREADS[:3], UNROLL):
        vectors = width_of_all // width
        side = largest_divisor(vectors, threads // rows)
        smem_bytes = rows * side * width * dtype_bytes(block.writes[0].dtype) if rows > 1 else 0
        if (rows > 1 and rows * unroll > size) or unroll > size or smem_bytes > gpu.smem_per_block_bytes:
            continue
        blocks = others * (vectors // side)
        # As on rows: chunks where blocks are few.
        for chunks in _chunks(gpu, blocks, size, rows):
            steps = -(-size // (chunks * rows))
            waste = -(-steps // unroll) * unroll * rows * chunks / size
            work = Work(
                blocks=blocks * chunks,
                threads=side * rows,
                regs_per_thread=OTHER_REGISTERS + in_flight_bytes(unroll * len(block.reads) * width * element) // 4 + width,
                smem_bytes=smem_bytes,
                flops=points(block) * (block.flops_per_point + 1 + ACCESS_FLOPS / width) * waste,
                flops_per_s=gpu.simt_rate("float32"),
                dram_bytes=moved,
                l2_bytes=moved * max(1.0, LINE_BYTES / (side * width * element)),
                rounds=rounds(steps * width * element),
                barriers=1 if rows > 1 else 0,
            )
            params = {"strided": True, "threads": side, "rows": rows, "width": width, "unroll": unroll, "chunks": chunks}
            yield params, (work, *_combining(gpu, points(block, "spatial"), chunks))
