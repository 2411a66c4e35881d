"""Owns which vectors and threads a GPU should try where a function writes its arguments at places that data tell, as a KV cache is.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, Timed, Work, access_widths, ranked
from kerneldecl.policies.shared.traffic import contiguous_axis, moved_bytes, points, writes_at_data

TEMPLATES = ("gpu_in_place",)
AUTO = {"cuda": 82}

THREADS = (128, 256, 64, 512)
OTHER_REGISTERS = 32
"""Registers of a thread besides its loads in flight."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return vectors and threads; nothing for a function that writes whole outputs."""
    return ranked("gpu_in_place", arch.the_gpu, _vectors(space, arch.the_gpu), top_k) if writes_at_data(space) else ()


def _vectors(space: IterSpace, gpu: Gpu) -> Iterator[Timed]:
    (block,) = space.blocks
    element, size, nbytes = dtype_bytes(block.writes[0].dtype), points(block), moved_bytes(space)
    is_contiguous = contiguous_axis(block, block.writes[0]) == len(block.axes) - 1
    for width, threads in itertools.product(access_widths(block.axes[-1].extent, element) if is_contiguous else (1,), THREADS):
        vectors = size // width
        if threads >= 2 * vectors and threads != min(THREADS):
            continue
        work = Work(
            blocks=-(-vectors // threads),
            threads=threads,
            regs_per_thread=OTHER_REGISTERS + (len(block.reads) + len(block.writes)) * -(-width * element // 4),
            flops=size * (block.flops_per_point + ACCESS_FLOPS / width),
            flops_per_s=gpu.simt_rate("float32"),
            dram_bytes=nbytes,
            l2_bytes=nbytes,
        )
        yield {"threads": threads, "width": width}, (work,)
