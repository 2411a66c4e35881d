"""Owns how many heads a thread should turn by the same cosines and sines on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.rotary import RotaryParams, RotarySizes, rotary_of, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import gpu_elementwise
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, Timed, Work, access_widths, load_rounds, ranked
from kerneldecl.policies.gpu_elementwise import OTHER_REGISTERS, UNROLL_COST

TEMPLATES = ("gpu_rotary", "gpu_elementwise")
AUTO = {"cuda": 77}
HAS_TRACES = False

THREADS = (128, 256, 64, 512)
HEADS = (4, 2, 8, 1)
TURN_FLOPS = 8.0
"""Operations of an element: conversions of three and of the result, two multiplications, an addition."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return vectors of several heads, and the best of gpu_elementwise in turns; nothing for what is no rotary embedding."""
    sizes = rotary_of(space)
    if sizes is None or not takes(sizes):
        return ()
    own = list(_in_turns(sizes, arch.the_gpu, top_k))
    return tuple(interleaved(own, gpu_elementwise.propose(space, arch, top_k)))[:top_k] if own else ()


def _in_turns(sizes: RotarySizes, gpu: Gpu, top_k: int) -> Iterator[Proposal]:
    """Yield proposals with each number of heads in turns, the fastest first: memory limits all, so the model hardly tells them apart."""
    by_heads = [ranked("gpu_rotary", gpu, _timed(sizes, heads, gpu), top_k) for heads in HEADS]
    for proposals in itertools.zip_longest(*by_heads):
        yield from sorted(filter(None, proposals), key=lambda proposal: proposal.predicted_secs)


def _timed(sizes: RotarySizes, heads: int, gpu: Gpu) -> Iterator[Timed]:
    item = dtype_bytes(sizes.dtype)
    heads_bytes, table_bytes = 2 * sizes.elements * item, 2 * sizes.tokens * sizes.size * item
    for width, threads in itertools.product(access_widths(sizes.half, item), THREADS):
        params = RotaryParams(threads, width, heads)
        if not params.fits(sizes, gpu):
            continue
        work = Work(
            blocks=params.blocks(sizes),
            threads=threads,
            regs_per_thread=OTHER_REGISTERS + (2 * heads + 4) * -(-width * item // 4),
            flops=sizes.elements * (TURN_FLOPS + 2 * ACCESS_FLOPS / width),
            flops_per_s=gpu.simt_rate("float32"),
            dram_bytes=(heads_bytes + table_bytes) * (1 + UNROLL_COST * math.log2(heads)),
            l2_bytes=heads_bytes + table_bytes * sizes.heads / heads,
            # Vectors of both halves of each head, and of their cosines and sines.
            rounds=load_rounds(2 * heads + 4, width * item),
        )
        yield params._asdict(), (work,)
