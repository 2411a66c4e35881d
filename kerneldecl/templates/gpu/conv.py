"""Owns what convolution templates share whose blocks keep a receptive field in shared memory: the normal form and that copy.

Knows nothing of policies, of tile sizes, or of whether tensor cores or CUDA cores compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.s_tir import Schedule
from tvm.tirx import IndexMap

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.templates.gpu.gemm import flat, fuse_dims, inline_sources


def normalize_conv(sch: Schedule, block: Any, gemm: Contraction, reduction: Sequence[Sequence[int]]) -> None:
    """Bring a convolution into normal form: image, row, column and channel of the output, and the reduction axes in the given groups."""
    pixel = [(axis,) for axis in gemm.m]
    operands = ((("read", gemm.a.position), [*pixel, *reduction]), (("read", gemm.b.position), [(), *reduction, gemm.n]))
    for operand, groups in (*operands, (("write", 0), [*pixel, gemm.n])):
        sch.reindex(block, operand)
        fuse_dims(sch, block, operand, groups)
    sizes = [int(axis.dom.extent) for axis in sch.get(block).iter_vars]
    groups = [*pixel, gemm.n, *reduction]
    index_dtype = str(sch.get(block).iter_vars[0].var.ty.dtype)
    normal = IndexMap.from_func(lambda *axes: [flat(group, axes, sizes) for group in groups], ndim=len(sizes), index_dtype=index_dtype)
    sch.transform_block_layout(block, normal)


def receptive_field(sch: Schedule, load: Any, padding: list[Any]) -> Any:
    """Return the block that copies the receptive field to shared memory, from where `load` reads: the padding block, where there is one."""
    inline_sources(sch, load, but=padding)
    if padding:
        sch.set_scope(padding[0], 0, "shared.dyn")
        return padding[0]
    return sch.cache_read(load, 0, "shared.dyn")
