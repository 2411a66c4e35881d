"""Owns how an elementwise function whose arguments have odd extents is divided among threads on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.flat_elementwise import FlatParams, FlatSizes, flat_sizes_of, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal
from kerneldecl.policies import gpu_elementwise
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, Timed, Work, ranked
from kerneldecl.policies.gpu_elementwise import ELEMENT_CYCLES, OTHER_REGISTERS, THREADS, UNPREFETCHED_ROUND, UNROLL, UNROLL_COST
from kerneldecl.policies.shared.traffic import moved_bytes, points

TEMPLATES = ("gpu_flat_elementwise", "gpu_elementwise")
AUTO = {"cuda": 78}
HAS_TRACES = False


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return flat vectors, and the best of gpu_elementwise in turns; nothing where the last extent is one of whole vectors."""
    sizes = flat_sizes_of(space)
    if sizes is None or not takes(sizes) or space.blocks[-1].writes[0].shape[-1] % sizes.width == 0:
        return ()
    own = ranked("gpu_flat_elementwise", arch.the_gpu, _timed(space, sizes, arch.the_gpu), top_k)
    return tuple(interleaved(own, gpu_elementwise.propose(space, arch, top_k)))[:top_k] if own else ()


def _timed(space: IterSpace, sizes: FlatSizes, gpu: Gpu) -> Iterator[Timed]:
    vectors, nbytes = -(-sizes.elements // sizes.width), moved_bytes(space)
    for threads, unroll in itertools.product(THREADS, UNROLL):
        params = FlatParams(threads, unroll)
        # Threads should not be mostly idle, but small functions need some block, too.
        if not params.fits(sizes, gpu) or (threads * unroll >= 2 * vectors and (threads, unroll) != (min(THREADS), 1)):
            continue
        work = Work(
            blocks=-(-vectors // (threads * unroll)),
            threads=threads,
            regs_per_thread=OTHER_REGISTERS + unroll * sizes.inputs * 4,
            flops=sum(points(block) * (block.flops_per_point + ACCESS_FLOPS / sizes.width) for block in space.blocks),
            flops_per_s=gpu.simt_rate("float32"),
            dram_bytes=nbytes * (1 + UNROLL_COST * math.log2(unroll)),
            l2_bytes=nbytes,
            rounds=1 + UNPREFETCHED_ROUND,
            serial_cycles=ELEMENT_CYCLES * unroll * sizes.width,
            ends_together=False,
        )
        yield params._asdict(), (work,)
