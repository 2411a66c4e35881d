"""Owns which vectors, threads and tiles of an elementwise function or a transpose a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from kerneldecl.model import Arch, Block, Gpu, IterSpace, Proposal, Value, dtype_bytes
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, Work, access_widths, ranked
from kerneldecl.policies.shared.traffic import contiguous_axis, moved_bytes, points

TEMPLATES = ("gpu_elementwise",)
AUTO = {"cuda": 80}

THREADS = (256, 128, 512, 1024)
UNROLL = (4, 2, 1, 8)
UNROLL_COST = 0.006
"""Of DRAM's time, for each doubling of what a thread loads before it stores. Measured on an H200: copies and additions of 16384 x 16384
are the faster the less it is; why is not known."""
TILES = ((64, 64), (32, 64), (64, 32), (32, 32), (128, 64), (64, 128))
"""Elements along the transposed operand's contiguous axis by elements along the output's."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return vectors and, where an operand is read transposed, tiles; nothing for a function with a reduction."""
    last = space.blocks[-1]
    if any(block.is_reduction for block in space.blocks) or len(space.outputs) != 1 or len(last.writes) != 1:
        return ()
    across = next((found for block in space.blocks if (found := _transposed(block)) is not None), None)
    tiled = [] if across is None else list(_tiled(space, across, arch.the_gpu))
    return ranked("gpu_elementwise", arch.the_gpu, [*tiled, *_vectors(space, arch.the_gpu, is_across=across is not None)], top_k)


def _transposed(block: Block) -> tuple[int, int] | None:
    """Return the extents of the axes that an operand and the output are contiguous along, where these differ."""
    along = contiguous_axis(block, block.writes[0])
    for access in block.reads:
        axis = contiguous_axis(block, access)
        if along is not None and axis not in {None, along} and along in {used for index in access.index for used, _ in index or ()}:
            assert axis is not None
            return block.axes[axis].extent, block.axes[along].extent
    return None


def _run(block: Block) -> int:
    """Return how many elements lie side by side, in what is written and in what is read along it: rows may be parts of longer ones."""
    axis = contiguous_axis(block, block.writes[0])
    if axis is None:
        return 1
    along = [access for access in block.reads if contiguous_axis(block, access) == axis]
    rows = (next((size for size in reversed(access.shape) if size > 1), 1) for access in along)
    return math.gcd(block.axes[axis].extent, *rows)


def _narrowest(space: IterSpace) -> int:
    arguments = {*space.inputs, *space.outputs}
    accesses = (access for block in space.blocks for access in (*block.reads, *block.writes) if access.operand in arguments)
    return min(dtype_bytes(access.dtype) for access in accesses)


def _vectors(space: IterSpace, gpu: Gpu, *, is_across: bool) -> Iterator[tuple[Mapping[str, Value], tuple[Work, ...]]]:
    last = space.blocks[-1]
    element, nbytes, size = _narrowest(space), moved_bytes(space), points(last)
    for width, threads, unroll in itertools.product(access_widths(_run(last), element), THREADS, UNROLL):
        vectors = size // width
        # Not mostly idle threads, but small functions need some block, too.
        if threads * unroll >= 2 * vectors and (threads, unroll) != (min(THREADS), 1):
            continue
        # Where an operand is read across its memory, every element of it moves a sector of 32 bytes.
        moved = nbytes * (32 / element if is_across else 1.0)
        work = Work(
            blocks=-(-vectors // (threads * unroll)),
            threads=threads,
            regs_per_thread=24 + unroll * len(space.inputs) * -(-width * element // 4),
            flops=sum(points(block) * (block.flops_per_point + ACCESS_FLOPS / width) for block in space.blocks),
            flops_per_s=gpu.simt_rate("float32"),
            dram_bytes=nbytes * (1 + UNROLL_COST * math.log2(unroll)),
            l2_bytes=moved * (16 / min(16, width * element)) ** 0.5,
        )
        yield {"threads": threads, "width": width, "unroll": unroll}, (work,)


def _tiled(space: IterSpace, extents: tuple[int, int], gpu: Gpu) -> Iterator[tuple[Mapping[str, Value], tuple[Work, ...]]]:
    last = space.blocks[-1]
    element, nbytes = dtype_bytes(last.writes[0].dtype), moved_bytes(space)
    both = math.gcd(*extents)
    for tile, threads, width in itertools.product(TILES, THREADS, access_widths(both, element)):
        vectors = tile[0] * tile[1] // width
        smem_bytes = tile[1] * (tile[0] + 1) * element
        if vectors % threads or tile[0] % width or tile[1] % width or smem_bytes > gpu.smem_per_block_bytes:
            continue
        # Partial tiles at the ends are computed whole.
        counts = [-(-extent // side) for extent, side in zip(extents, tile, strict=True)]
        waste = math.prod(count * side / extent for count, extent, side in zip(counts, extents, tile, strict=True))
        part = math.prod(max(1.0, 32 / (side * element)) for side in tile)
        work = Work(
            blocks=math.prod(counts) * points(last) // math.prod(extents),
            threads=threads,
            regs_per_thread=24 + vectors // threads * -(-width * element // 4),
            smem_bytes=smem_bytes,
            dram_bytes=nbytes,
            l2_bytes=nbytes * part * waste * (16 / min(16, width * element)) ** 0.5,
            moved_smem_bytes=nbytes * waste * 4 / element,
            rounds=1,
            barriers=1,
        )
        yield {"threads": threads, "width": width, "unroll": 1, "tile": tile}, (work,)
