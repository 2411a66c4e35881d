"""Owns the sizes of one kernel of a grouped GEMM on wgmma: the GEMM of its tiles, its epilogue.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MAX_CTA_SMEM_BYTES, MMA_TILE_ROWS, RESERVED_SMEM_BYTES
from kerneldecl.analysis.matmul_grouped import GroupedSizes, WgmmaGroupedParams, grouped_epilogue_buffers
from kerneldecl.compiler.matmul_grouped import ACCUM_DTYPE, GroupedSpec
from kerneldecl.model import Arch, dtype_bytes
from kerneldecl.templates.hopper.epilogue import Epilogue
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.operands import SWIZZLES, TensorMap, operand_of
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_gemm import Matrix
from kerneldecl.templates.shared.grouped_tiles import GroupedTiles


@dataclass(frozen=True)
class TileGemm(GemmKernel):
    """The GEMM of a tile, beside whose stages shared memory holds tables."""

    table_bytes: int = 0

    @property
    def epilogue_buffers(self) -> int:
        """Return how many chunks of results each consumer has in shared memory."""
        free = MAX_CTA_SMEM_BYTES - RESERVED_SMEM_BYTES - self.table_bytes - self.params.stages * self.stage_bytes
        return grouped_epilogue_buffers(self.epilogue.chunks(self.params.accumulators), self.params.consumers, free)


@dataclass(frozen=True)
class GroupedKernel(GroupedTiles):
    """One kernel: clusters take tiles one after the other, in the order of segments."""

    params: WgmmaGroupedParams
    buffers: dict[str, Any]
    """The function's parameters by name."""
    gemm: TileGemm
    """The GEMM of a tile, in a batch of as many matrices B as there are groups."""

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.params.block_m, self.params.block_n * self.params.cluster_n, self.params.raster_group

    @property
    def threads(self) -> int:
        return self.params.threads

    @property
    def clusters(self) -> int:
        return self.gemm.clusters


def grouped_kernel(spec: GroupedSpec, sizes: GroupedSizes, params: WgmmaGroupedParams, arch: Arch) -> GroupedKernel | None:
    """Return the kernel of these parameters, None where they do not fit."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in spec.arguments}
    n, k = ((spec.n, spec.k), (spec.k, 1)) if spec.layout == "nt" else ((spec.n, 1), (spec.k, spec.n))
    gemm_params = GemmParams.of(params.gemm._asdict())
    a = operand_of(Matrix(buffers["A"], spec.dtype, (spec.places, spec.k), (spec.k, 1)), params.block_m, params.cluster_n, is_a=True)
    b = operand_of(Matrix(buffers["B"], spec.dtype, n, k, ((spec.groups, spec.n * spec.k),)), params.block_n, 1)
    k_tiles = -(-spec.k * dtype_bytes(spec.dtype) // K_TILE_BYTES)
    if a is None or b is None or a.via_registers or b.via_registers:
        return None
    if not gemm_params.fits(spec.dtype, ACCUM_DTYPE, k_tiles, a.stage_bytes + b.stage_bytes):
        return None
    gemm = TileGemm(
        func_params=tuple(buffers.values()),
        dtype=spec.dtype,
        accum_dtype=ACCUM_DTYPE,
        a=a,
        b=b,
        epilogue=_epilogue(spec, buffers["C"]),
        params=gemm_params,
        grid=(1, -(-spec.places // params.block_m) + spec.groups, -(-spec.n // params.block_n)),
        k_tiles=k_tiles,
        sm_count=arch.the_gpu.sm_count,
        table_bytes=params.table_bytes(sizes),
    )
    return GroupedKernel(spec, params, buffers, gemm) if gemm.can_store else None


def _epilogue(spec: GroupedSpec, out: Any) -> Epilogue:
    """Return the epilogue that rounds accumulators; rows are those of all groups."""
    width = MMA_TILE_ROWS

    def index(_: Any, row: Any, column: Any) -> list[Any]:
        return [row // spec.rows, row % spec.rows, column] if spec.is_masked else [row, column]

    def value(total: Any, _batch: Any, _row: Any, _column: Any, _aux: Sequence[Any]) -> Any:
        return T.cast(total, spec.out_dtype)

    return Epilogue(
        dtype=spec.out_dtype,
        buffer=out,
        map=TensorMap(
            buffer=out,
            dtype=spec.out_dtype,
            dims=(spec.n, spec.places),
            strides_bytes=(spec.n * dtype_bytes(spec.out_dtype),),
            box=(width, MMA_TILE_ROWS),
            swizzle=SWIZZLES[width * 2],
            promotion=0,
        ),
        coords=lambda _batch, row, column: (column, row),
        index=index,
        value=value,
        aux=lambda _batch, _row, _column: [],
        inside=lambda _row, column: column < spec.n,
        is_swapped=False,
        width=width,
        lines=MMA_TILE_ROWS,
        in_pairs=True,
    )
