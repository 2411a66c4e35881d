"""Owns how an elementwise function whose rows are no whole vectors is divided among threads on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.unaligned_elementwise import UnalignedParams, UnalignedSizes, unaligned_sizes_of
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal
from kerneldecl.policies import gpu_elementwise
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, LINE_BYTES, Timed, Work, load_rounds, ranked
from kerneldecl.policies.gpu_elementwise import OTHER_REGISTERS, THREADS, UNROLL, UNROLL_COST
from kerneldecl.policies.shared.traffic import moved_bytes, points

TEMPLATES = ("gpu_unaligned_elementwise", "gpu_elementwise")
AUTO = {"cuda": 79}
HAS_TRACES = False

PLACE_FLOPS = 8.0
"""Operations in which a thread finds the place of an element that no vector has: a comparison, two choices, a sum. Counted by hand."""
TURN_CYCLES = 800.0
"""Cycles that a thread waits more for each vector after its first where each loads elements alone, since nvcc 13.0 does not have those of
several in flight: 16 loads wait once, 32 up to 16 times, 64 9 to 20 times (SASS). Five operators took up to 0.9 us a vector so, most 0.3 to
0.5 (two seeds, H200, 2026-11)."""
DIVISION_FLOPS = 40.0
"""Operations in which a thread finds a vector's row and the place in it. Counted by hand."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return vectors of results, and the best of gpu_elementwise in turns; nothing where rows are whole vectors, or read across."""
    sizes = unaligned_sizes_of(space)
    if sizes is None or any(gpu_elementwise.transposed_extents(block) for block in space.blocks):
        return ()
    if gpu_elementwise.contiguous_elements(space.blocks[-1]) % 2 == 0:
        return ()
    own = ranked("gpu_unaligned_elementwise", arch.the_gpu, _timed(space, sizes, arch.the_gpu), top_k)
    found = filter(None, (own, gpu_elementwise.propose(space, arch, top_k)))
    return tuple(interleaved(*sorted(found, key=lambda each: each[0].predicted_secs)))[:top_k] if own else ()


def _timed(space: IterSpace, sizes: UnalignedSizes, gpu: Gpu) -> Iterator[Timed]:
    nbytes, width = moved_bytes(space), sizes.width
    shared = gpu_elementwise.shared_operands(space)
    for threads, unroll in itertools.product(THREADS, UNROLL):
        params = UnalignedParams(threads, unroll)
        # Threads should not be mostly idle, but small functions need some block, too.
        if not params.fits(sizes, gpu) or (threads * unroll >= 2 * sizes.vectors and (threads, unroll) != (min(THREADS), 1)):
            continue
        columns = sizes.per_column * width
        # A warp asks for a row's terms once more where a vector of it lies in two rows.
        rows = unroll * sizes.per_row * (1 + min(1.0, WARP_LANES * width / sizes.columns))
        loads = unroll * (sizes.flat + sizes.gathered * width) + columns + math.ceil(rows)
        # Of several axes of a row, an element's places are quotients.
        place = PLACE_FLOPS + (DIVISION_FLOPS / 2 if sizes.trailing > 1 else 0.0)
        accesses = unroll * ((sizes.flat + 1) / width + sizes.gathered) + sizes.per_column + rows / width
        work = Work(
            blocks=params.grid(sizes),
            threads=threads,
            regs_per_thread=OTHER_REGISTERS + unroll * (sizes.flat * 4 + sizes.gathered * width + 2 * sizes.per_row) + columns,
            flops=sum(points(block) * block.flops_per_point for block in space.blocks)
            + sizes.elements * (ACCESS_FLOPS * accesses / unroll + place * (sizes.gathered + sizes.per_column / unroll))
            + sizes.vectors * DIVISION_FLOPS,
            flops_per_s=gpu.simt_rate("float32"),
            dram_bytes=nbytes * (1 + UNROLL_COST * math.log2(unroll)),
            l2_bytes=nbytes,
            moved_smem_bytes=_l1_bytes(sizes, unroll),
            rounds=load_rounds(loads, 1) + (sizes.gathered > 0 and sizes.per_row + sizes.per_column > 0),
            serial_cycles=TURN_CYCLES * (unroll - 1) * (sizes.gathered + sizes.per_row > 0),
            shared_loads=math.ceil(min(1, shared) * rows) + (columns if shared else 0),
        )
        yield params._asdict(), (work,)


def _l1_bytes(sizes: UnalignedSizes, unroll: int) -> float:
    """Return the bytes of L1's turns for loads of single elements: lanes are a vector apart, so that a warp touches several lines."""
    apart = sizes.width * max(1, sizes.gathered_bytes) * WARP_LANES
    turn = max(1.0, apart / LINE_BYTES) * LINE_BYTES
    return sizes.elements / WARP_LANES * turn * (sizes.gathered + sizes.per_column / unroll)
