"""Owns how a reduction should be cut into threads, rows, columns and chunks on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from kerneldecl.model import Arch, Block, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies._cpu_reduction import MAX_REUSE, is_across, reuse
from kerneldecl.policies._cpu_traffic import contiguous_axis, largest, moved_bytes, only_reduction, points
from kerneldecl.policies._gpu_model import LINE_BYTES, Timed, Work, access_widths, ranked

TEMPLATES = ("gpu_reduce",)

BLOCK_THREADS = (256, 128, 512, 1024)
ROW_THREADS = (32, 64, 128, 256, 512, 1024, 16, 8, 4, 2, 1)
COLUMN_ROWS = (8, 4, 16, 2, 32, 1)
UNROLL = (4, 8, 2, 1)


def propose(space: IterSpace, arch: Arch, top_k: int, measured: Sequence[object]) -> tuple[Proposal, ...]:
    """Return ways to compute the one reduction of a function; nothing where there are several, or operands are used again and again."""
    found = only_reduction(space)
    if measured or found is None or reuse(found[0]) > MAX_REUSE:
        return ()
    return ranked("gpu_reduce", arch.the_gpu, cuts(space, found[0], arch.the_gpu, tiles=()), top_k)


def cuts(space: IterSpace, block: Block, gpu: Gpu, tiles: Sequence[int]) -> Iterator[Timed]:
    """Yield cuts of a reduction along or across contiguous memory; with `tiles`, also of rows that share a thread."""
    return across(space, block, gpu) if is_across(block) else along(space, block, gpu, tiles)


def along(space: IterSpace, block: Block, gpu: Gpu, tiles: Sequence[int]) -> Iterator[Timed]:
    """Yield cuts of rows: how many threads share one, how many rows a block has, in how many chunks each is."""
    element = dtype_bytes(largest(block).dtype)
    count, size, moved = points(block, "spatial"), _row_elements(block), moved_bytes(space)
    for width, row_threads, threads, unroll, tile in itertools.product(
        access_widths(_innermost(block), element), ROW_THREADS, BLOCK_THREADS, UNROLL, tiles or (1,)
    ):
        vectors = size // width
        if row_threads > threads or count % tile or not _fits(row_threads, vectors, unroll):
            continue
        rows = largest_divisor(count // tile, threads // row_threads)
        for chunks in _chunks(gpu, count // (rows * tile), vectors, row_threads):
            work = _row_work(block, gpu, moved, (width, row_threads, rows, unroll, tile, chunks))
            params = {"across": False, "threads": row_threads, "rows": rows, "width": width, "unroll": unroll, "chunks": chunks}
            yield params | ({"tile": tile} if tiles else {}), (work, *_combining(gpu, count, chunks))


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def _fits(threads: int, vectors: int, unroll: int) -> bool:
    """Say whether threads find a vector each, or are as few as can be, and unrolled turns are not mostly empty."""
    return (threads < 2 * vectors or threads == 1) and (unroll == 1 or threads * unroll < 2 * vectors)


def _row_work(block: Block, gpu: Gpu, moved: int, cut: tuple[int, int, int, int, int, int]) -> Work:
    width, threads, rows, unroll, tile, chunks = cut
    main = largest(block)
    element, count, vectors = dtype_bytes(main.dtype), points(block, "spatial"), _row_elements(block) // width
    steps = -(-vectors // (chunks * threads))
    others = sum(points(block) // tile * dtype_bytes(access.dtype) for access in block.reads if access != main and access.index)
    # Lanes without a vector in the last step wait for the others.
    waste = steps * threads * chunks / vectors
    return Work(
        blocks=count // (rows * tile) * chunks,
        threads=threads * rows,
        regs_per_thread=24 + unroll * (tile + len(block.reads) - 1) * -(-width * element // 4) + tile,
        flops=points(block) * (block.flops_per_point + 1) * waste,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=moved,
        l2_bytes=moved * waste * max(1.0, LINE_BYTES / (min(threads, vectors) * width * element)),
        # What all rows share comes from an SM's first-level cache, which is shared memory by another name.
        moved_smem_bytes=points(block) * element + others,
        rounds=-(-steps // unroll),
        barriers=2 if threads > gpu.warp_size else 0,
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


def _row_elements(block: Block) -> int:
    """Return how many elements of the largest operand make one result."""
    return math.prod(largest(block).shape) // max(1, points(block, "spatial"))


def _innermost(block: Block) -> int:
    """Return the extent along which the largest operand is contiguous, 1 where there is none: vectors are cut of it."""
    axis = contiguous_axis(block, largest(block))
    return 1 if axis is None else block.axes[axis].extent


def across(space: IterSpace, block: Block, gpu: Gpu) -> Iterator[Timed]:
    """Yield cuts of columns: how many threads lie side by side, how many share a column, in how many chunks each is."""
    main = largest(block)
    element, width_of_all, size = dtype_bytes(main.dtype), _innermost(block), points(block, "reduce")
    moved = moved_bytes(space)
    others = points(block, "spatial") // width_of_all
    for width, rows, threads, unroll in itertools.product(access_widths(width_of_all, element), COLUMN_ROWS, BLOCK_THREADS[:3], UNROLL):
        vectors = width_of_all // width
        side = largest_divisor(vectors, threads // rows)
        if (rows > 1 and rows * unroll > size) or unroll > size:
            continue
        blocks = others * (vectors // side)
        # As on rows: chunks where blocks are few.
        for chunks in _chunks(gpu, blocks, size, rows):
            steps = -(-size // (chunks * rows))
            waste = -(-steps // unroll) * unroll * rows * chunks / size
            work = Work(
                blocks=blocks * chunks,
                threads=side * rows,
                regs_per_thread=24 + unroll * len(block.reads) * -(-width * element // 4) + width,
                smem_bytes=rows * side * width * dtype_bytes(block.writes[0].dtype) if rows > 1 else 0,
                flops=points(block) * (block.flops_per_point + 1) * waste,
                flops_per_s=gpu.simt_rate("float32"),
                dram_bytes=moved,
                l2_bytes=moved * max(1.0, LINE_BYTES / (side * width * element)),
                rounds=-(-steps // unroll),
                barriers=1 if rows > 1 else 0,
            )
            params = {"across": True, "threads": side, "rows": rows, "width": width, "unroll": unroll, "chunks": chunks}
            yield params, (work, *_combining(gpu, points(block, "spatial"), chunks))
