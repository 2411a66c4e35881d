"""Owns grouped GEMM on wgmma: persistent CTAs that find their tiles by the sizes of groups at run time; TMA into a ring of stages.

Knows nothing of how its parameters are chosen, and recognises a grouped GEMM by its computation, never by its names.

A tile has rows of one group. TMA loads its rows of A from any row on; what is behind the group's last row is multiplied in vain. Results
are stored by TMA in 64 rows together, and row by row where a group ends. CTAs keep where groups lie in shared memory: each reads the sizes
once, adds up rows of tiles, and finds the group of each of its tiles in as many steps as the number of groups has bits. Whatever the sizes
are, nothing outside of the arguments is read or written.

Parameters:
  block_m       rows of a tile: 64 or 128 (one or two MMA tiles) for each consumer
  block_n       columns of a tile: 64, 128, 192 or 256. A thread has an accumulator for each 128 elements of its consumer's part
  consumers     1 to 3 consumer warpgroups of 128 threads; one more is the producer
  stages        2 to 12 k-tiles of both operands in shared memory at once; a k-tile has 128 bytes of k
  cluster_n     1, 2 or 4 CTAs with neighbouring columns that share rows of A by TMA multicast
  raster_group  rows of tiles of a group that are computed before the next column of tiles
  kernel_schedule  optional, of two consumers: "cooperative", the default; "staggered": the second one some k-tiles behind the first;
                   "pingpong": each has tiles of its own, of block_m rows. One's epilogue then overlaps with the other's MMAs

Shared memory: stages * (block_m + block_n) * 128 bytes, 8192 bytes for each of a consumer's epilogue buffers, 12 bytes for each group (24
with places for each group), 1 KiB of barriers and alignment.

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.matmul_grouped import GroupedSizes, WgmmaGroupedParams, wgmma_takes
from kerneldecl.compiler.matmul_grouped import GroupedSpec, read_matmul_grouped
from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.grouped_config import grouped_kernel
from kerneldecl.templates.hopper.grouped_kernel import build
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma


def sizes_of(spec: GroupedSpec) -> GroupedSizes:
    """Return the sizes of a grouped GEMM as policies see it."""
    names = ("rows", "groups", "n", "k", "dtype", "out_dtype", "is_masked", "is_scaled")
    return GroupedSizes(**{name: getattr(spec, name) for name in names}, is_k_last=spec.layout == "nt")


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the grouped GEMM as one kernel, or None where wgmma or these parameters do not take it."""
    chosen = WgmmaGroupedParams(**{name: params[name] for name in WgmmaGroupedParams._fields if name in params})  # type: ignore[arg-type]
    spec = read_matmul_grouped(mod) if has_wgmma(arch) else None
    if spec is None or not wgmma_takes(sizes := sizes_of(spec)) or not chosen.fits(sizes):
        return None
    kernel = grouped_kernel(spec, sizes, chosen, arch)
    return None if kernel is None else build(kernel)
