"""Owns cumulative sums of long rows on GPUs by tiles that look only at sums which were published long ago.

Knows nothing of how its parameters are chosen, and recognises a cumulative sum by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  held     vectors of a thread in registers: 1 to 8; all threads' vectors are a tile
  kept     vectors of a thread in shared memory: 0 to 32
  group    tiles of a row whose sum is published as one, too
  lag      groups before a tile's own whose tiles it adds up one by one
  ahead    tiles by which sums are ahead of the scan, which reads each tile again from L2; with 0, a tile is read once
  stream   1 where results, and elements that are read for the last time into registers, are the first to leave L2

Returns TIRx kernels, a PrimFunc without a trace. Sums have one order.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.scan import GpuScanTilesParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.scan import read_scan
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.scan_once_source import CLEAR_THREADS
from kerneldecl.templates.gpu.scan_tiles_source import scan_tiles_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sum as one function of two kernels, the first of which clears words, or None where these do not take it."""
    chosen = GpuScanTilesParams(**{name: params[name] for name in GpuScanTilesParams._fields})  # type: ignore[arg-type]
    spec = read_scan(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    sizes, gpu = spec.sizes, arch.the_gpu
    words, smem = chosen.words(sizes), (spec.accum, chosen.smem_sums(sizes))
    return build(
        CudaFunction(
            arguments=(("X", spec.shape, spec.dtype), ("Y", spec.shape, spec.dtype)),
            workspaces={"found": (words, "uint64")},
            text=scan_tiles_source(spec, chosen),
            kernels=[
                CudaKernel("clear", ("found",), -(-words // CLEAR_THREADS), CLEAR_THREADS),
                CudaKernel("scan_tiles", ("X", "Y", "found"), chosen.blocks(sizes), chosen.threads, smem, chosen.ctas_per_sm(sizes, gpu)),
            ],
            pdl=supports_pdl(gpu),
        )
    )
