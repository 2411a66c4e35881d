"""Owns cumulative sums of more elements than 32 bits count: those that read parts of rows twice take them, with the same parameters.

Knows nothing of TVM or of which parameters are fast. It is apart from `scan`, which is in the keys of all entries of the rule.
"""

from __future__ import annotations

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.scan import DTYPES, MAX_PARTS, GpuScanParams, ScanSizes, takes
from kerneldecl.model import Gpu

MAX_GRID = 2**31
"""Thread blocks of a kernel, and one more."""


def takes_any(sizes: ScanSizes) -> bool:
    """Say whether `gpu_scan` and `cpu_scan` compute such a sum: they address elements by 64 bits."""
    return sizes.dtype in DTYPES


def fits(params: GpuScanParams, sizes: ScanSizes, gpu: Gpu) -> bool:
    """Say whether a kernel of `gpu_scan` with these parameters can be built, and each part has elements, however many there are."""
    return (
        takes_any(sizes)
        and params.threads % WARP_LANES == 0
        and 0 < params.threads <= gpu.max_threads_per_block
        and 1 <= params.unroll <= 16
        and 1 <= params.parts <= MAX_PARTS
        and (takes(sizes) or params.blocks(sizes) * params.parts < MAX_GRID)
        and (params.parts - 1) * params.part(sizes) < sizes.extent
    )
