"""Owns which vectors, threads and tiles of an elementwise function or a transpose a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import SECTOR_BYTES, VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Arch, Block, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, SHARED_BYTES, Timed, Work, access_widths, ranked
from kerneldecl.policies.shared.traffic import axes_of, contiguous_axis, is_elementwise, moved_bytes, operand_bytes, points

TEMPLATES = ("gpu_elementwise",)
AUTO = {"cuda": 80}

THREADS = (256, 128, 512, 1024)
MIN_WHOLE_THREADS = 96
"""Threads of a block at least that divide all vectors where none of `THREADS` does."""
UNROLL = (4, 2, 1, 8)
UNROLL_COST = 0.012
"""Fraction of DRAM's time that each doubling of the loads before a thread's stores costs: copies and additions of 16384 x 16384 on an H200
are the faster the fewer loads there are, 60 functions of 0.01 to 300 MB as well; why is not known."""
OTHER_REGISTERS = 24
"""Registers of a thread besides its loads in flight."""
BOUNDED_ROUND = 0.3
"""Latencies of each unrolled turn beyond the first where bounds are tested: nvcc resolves most of them. Fitted to 300 candidates of 20
functions of odd sizes (H200, 2026-11)."""
ELEMENT_CYCLES = 20.0
"""Cycles of a thread for each of its elements, which it converts, computes and stores one after the other. Fitted to 500 pairs of
candidates of 60 functions that differ in nothing but width or unrolling (H200, 2026-11)."""
UNPREFETCHED_ROUND = 0.25
"""Latencies that a kernel waits longer whose loads test bounds: none is prefetched while the kernel before ends. Functions of 7040 to
400000 elements took 0.15 to 0.25 us less by blocks that divide them (H200, 2026-11)."""
BOUNDED_TURN_CYCLES = 75.0
"""Cycles of a thread for each vector of a transposed tile where tiles do not divide extents: 20 tilings of 55 x 2049 (H200, 2026-11)."""
TILES = ((64, 64), (32, 64), (64, 32), (32, 32), (128, 64), (64, 128))
"""Elements along the transposed operand's contiguous axis by elements along the output's."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return vectors and, where an operand is read transposed, tiles; nothing for a function with a reduction."""
    if not is_elementwise(space):
        return ()
    across = next((found for block in space.blocks if (found := transposed_extents(block)) is not None), None)
    tiles = [] if across is None else list(_tiles(space, across, arch.the_gpu))
    return ranked("gpu_elementwise", arch.the_gpu, [*tiles, *_vectors(space, arch.the_gpu, is_across=across is not None)], top_k)


def in_vectors(space: IterSpace, gpu: Gpu, top_k: int) -> tuple[Proposal, ...]:
    """Return vectors for a function each of whose elements is made of few of each operand, in the order of memory; nothing for others."""
    if len(space.outputs) != 1 or len(space.blocks[-1].writes) != 1 or any(transposed_extents(block) is not None for block in space.blocks):
        return ()
    return ranked("gpu_elementwise", gpu, _vectors(space, gpu, is_across=False), top_k)


def transposed_extents(block: Block) -> tuple[int, int] | None:
    """Return the extents of the axes that an operand and the output are contiguous along, where these differ."""
    along = contiguous_axis(block, block.writes[0])
    for access in block.reads:
        axis = contiguous_axis(block, access)
        if along is not None and axis not in {None, along} and along in axes_of(access):
            assert axis is not None
            return block.axes[axis].extent, block.axes[along].extent
    return None


def contiguous_elements(block: Block) -> int:
    """Return how many elements are contiguous in the output and in the operands along the same axis, whose rows may be longer."""
    axis = contiguous_axis(block, block.writes[0])
    if axis is None:
        return 1
    along = [access for access in block.reads if contiguous_axis(block, access) == axis]
    rows = (next((size for size in reversed(access.shape) if size > 1), 1) for access in along)
    return math.gcd(block.axes[axis].extent, *rows)


def shared_operands(space: IterSpace) -> int:
    """Return how many arguments are small and read again and again, as those with one element for each channel."""
    reads = {access.operand: (block, access) for block in space.blocks for access in block.reads if access.operand in space.inputs}
    return sum(operand_bytes(access) <= SHARED_BYTES and len(axes_of(access)) < len(block.axes) for block, access in reads.values())


def _narrowest(space: IterSpace) -> int:
    arguments = {*space.inputs, *space.outputs}
    accesses = (access for block in space.blocks for access in (*block.reads, *block.writes) if access.operand in arguments)
    return min(dtype_bytes(access.dtype) for access in accesses)


def _vectors(space: IterSpace, gpu: Gpu, *, is_across: bool) -> Iterator[Timed]:
    last = space.blocks[-1]
    element = _narrowest(space)
    for width, unroll in itertools.product(access_widths(contiguous_elements(last), element), UNROLL):
        yield from _of_width(space, gpu, (width, unroll), is_across=is_across)


def _thread_counts(vectors: int, unroll: int) -> tuple[int, ...]:
    """Return the threads of a block to try; where all of `THREADS` leave a rest, two more that do not.

    Without a rest no load has a condition, and the first ones are prefetched.
    """
    if any(vectors % (threads * unroll) == 0 for threads in THREADS):
        return THREADS
    whole = [threads for threads in range(WARP_LANES, max(THREADS), WARP_LANES) if vectors % (threads * unroll) == 0]
    several = (max((threads for threads in whole if MIN_WHOLE_THREADS <= threads <= most), default=0) for most in (256, 512))
    return (*THREADS, *filter(None, dict.fromkeys(several)))


def _of_width(space: IterSpace, gpu: Gpu, accesses: tuple[int, int], *, is_across: bool) -> Iterator[Timed]:
    """Yield blocks of threads that have so many elements in each access, and so many accesses in flight."""
    (width, unroll), last = accesses, space.blocks[-1]
    element, nbytes, vectors = _narrowest(space), moved_bytes(space), points(last, "spatial") // width
    # A thread holds the elements of a short reduction.
    held = max(points(block, "reduce") for block in space.blocks)
    shared = shared_operands(space)
    for threads in _thread_counts(vectors, unroll):
        # Threads should not be mostly idle, but small functions need some block, too.
        if threads * unroll >= 2 * vectors and (threads, unroll) != (min(THREADS), 1):
            continue
        # Where an operand is read across its memory, every element of it moves a sector.
        moved = nbytes * (SECTOR_BYTES / element if is_across else 1.0)
        work = Work(
            blocks=-(-vectors // (threads * unroll)),
            threads=threads,
            regs_per_thread=OTHER_REGISTERS + unroll * held * len(space.inputs) * -(-width * element // 4),
            flops=sum(points(block) * (block.flops_per_point + ACCESS_FLOPS / width) for block in space.blocks),
            flops_per_s=gpu.simt_rate("float32"),
            dram_bytes=nbytes * (1 + UNROLL_COST * math.log2(unroll)),
            l2_bytes=moved * (VECTOR_BYTES / min(VECTOR_BYTES, width * element)) ** 0.5,
            # Where the last block is not whole, turns test bounds.
            rounds=1 if vectors % (threads * unroll) == 0 else 1 + UNPREFETCHED_ROUND + BOUNDED_ROUND * (unroll - 1),
            serial_cycles=ELEMENT_CYCLES * unroll * held * width,
            shared_loads=unroll * shared,
            ends_together=False,
        )
        yield {"threads": threads, "width": width, "unroll": unroll}, (work,)


def _tiles(space: IterSpace, extents: tuple[int, int], gpu: Gpu) -> Iterator[Timed]:
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
        sector_waste = math.prod(max(1.0, SECTOR_BYTES / (side * element)) for side in tile)
        work = Work(
            blocks=max(1, math.prod(counts) * points(last) // math.prod(extents)),
            threads=threads,
            regs_per_thread=OTHER_REGISTERS + vectors // threads * -(-width * element // 4),
            smem_bytes=smem_bytes,
            dram_bytes=nbytes,
            l2_bytes=nbytes * sector_waste * waste * (VECTOR_BYTES / min(VECTOR_BYTES, width * element)) ** 0.5,
            moved_smem_bytes=nbytes * waste * 4 / element,
            rounds=1,
            barriers=1,
            serial_cycles=vectors / threads * (BOUNDED_TURN_CYCLES if waste > 1.0 else 0.0),
        )
        yield {"threads": threads, "width": width, "unroll": 1, "tile": tile}, (work,)
