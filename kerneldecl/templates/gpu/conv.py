"""Owns what templates share that keep a block's part of an image in shared memory: the normal form, and the copy of the image.

Knows nothing of policies, tile sizes, or which unit computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.s_tir import Schedule
from tvm.tirx import IndexMap

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.templates.gpu.gemm import flat, fuse_dims, inline_sources


def normalize_windows(sch: Schedule, block: Any, gemm: Contraction, window: Sequence[Sequence[int]]) -> None:
    """Bring a convolution into normal form: image, row, column and channel of the result, and the window's axes, in groups."""
    lines = [(axis,) for axis in gemm.m]
    operands = ((("read", gemm.a.position), [*lines, *window]), (("read", gemm.b.position), [(), *window, gemm.n]))
    for operand, groups in (*operands, (("write", 0), [*lines, gemm.n])):
        sch.reindex(block, operand)
        fuse_dims(sch, block, operand, groups)
    sizes = [int(axis.dom.extent) for axis in sch.get(block).iter_vars]
    groups = [*lines, gemm.n, *window]
    index_dtype = str(sch.get(block).iter_vars[0].var.ty.dtype)
    normal = IndexMap.from_func(lambda *axes: [flat(group, axes, sizes) for group in groups], ndim=len(sizes), index_dtype=index_dtype)
    sch.transform_block_layout(block, normal)


def staged_image(sch: Schedule, held: Any, margin: list[Any]) -> Any:
    """Return the block that keeps the image in shared memory, from where `held` reads: the one that adds its margin, where there is one."""
    inline_sources(sch, held, but=margin)
    if margin:
        sch.set_scope(margin[0], 0, "shared.dyn")
        return margin[0]
    return sch.cache_read(held, 0, "shared.dyn")
