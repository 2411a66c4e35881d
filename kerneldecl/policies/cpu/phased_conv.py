"""Owns the time model of convolutions that copy their operands first, phase by phase where they are transposed, and their search space.

Knows nothing of how a function is read or of TVM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from kerneldecl.analysis.cpu_params import CpuPhasedConvParams
from kerneldecl.model import Access, Candidate, Cpu, dtype_bytes
from kerneldecl.policies.cpu import time_model as model

TILES = (1, 2, 3, 4, 6, 7, 8, 11, 12, 14, 16)
VECTORS = (1, 2, 3, 4)
ROWS = (2, 8, 32)
COPY_CYCLES = 1.0
"""Cycles of one core to copy a weight into a panel where output channels are no neighbours, about."""
TILE_CYCLES = 30.0
"""Cycles of a register tile besides its multiplications and stores."""


@dataclass(frozen=True)
class PhasedConv:
    """A convolution as the model sees it."""

    images: int
    rows: int
    """Rows of one phase, as columns are its columns."""
    columns: int
    stride: int
    """Phases of each side: 1 but for transposed convolutions."""
    f: int
    taps: int
    """Taps of all phases together, without those that are zero."""
    channels: int
    dtype: str
    """Of the accumulators."""
    image_bytes: int
    """Bytes that are copied to have zeros around the images; 0 where they are read from the argument."""
    has_panels: bool
    """Whether the weights must be copied into panels."""
    is_first: bool = False
    """Whether channels come first, so that images are copied as well."""


def choices(conv: PhasedConv, cpu: Cpu) -> Iterator[CpuPhasedConvParams]:
    """Yield the register tiles that fit the vector registers, with sensible tasks."""
    lanes = model.compute_lanes(cpu, conv.dtype)
    packs = (True,) if conv.has_panels else (False, True)
    for tile_w, vectors in itertools.product(TILES, VECTORS):
        if tile_w > conv.columns or (vectors > 1 and vectors * lanes > conv.f) or vectors * (tile_w + 1) + 1 > cpu.vector_registers:
            continue
        panels = -(-conv.f // (vectors * lanes))
        for rows, pack in itertools.product(sorted({min(rows, conv.rows) for rows in ROWS}), packs):
            # Panels are divided among tasks where rows are too few for all cores.
            is_enough = conv.images * conv.stride * (conv.rows // rows) >= 2 * cpu.cores
            for part in {panels} if is_enough else {panels, -(-panels // cpu.cores)}:
                yield CpuPhasedConvParams(tile_w=tile_w, vectors=vectors, block_h=rows, panels=part, pack=pack)


def estimate(template: str, conv: PhasedConv, params: CpuPhasedConvParams, cpu: Cpu) -> model.Estimate:
    """Return the predicted time: copies of image and weights, then the register tiles of all phases."""
    works = [*_copies(conv, params, cpu), _work(conv, params, cpu)]
    return model.estimate_of(cpu, Candidate.of(template, params._asdict()), works, (params.tile_w, params.vectors))


def _copies(conv: PhasedConv, params: CpuPhasedConvParams, cpu: Cpu) -> Iterator[model.Work]:
    weights = conv.taps * conv.channels * conv.f
    if params.pack:
        cycles = weights * (COPY_CYCLES if conv.has_panels else 2.0 / model.compute_lanes(cpu, conv.dtype))
        yield model.Work(compute_cycles=cycles / cpu.cores, l3_bytes=2 * weights * dtype_bytes(conv.dtype) / cpu.cores, parallel_regions=1)
    if conv.image_bytes:
        moved = 2 * conv.image_bytes
        yield model.Work(compute_cycles=moved / cpu.vector_bytes / cpu.cores, l3_bytes=moved / cpu.cores, parallel_regions=1)


def _work(conv: PhasedConv, params: CpuPhasedConvParams, cpu: Cpu) -> model.Work:
    """Return the work of the busiest core. All phases together have each tap once."""
    lanes, nbytes = model.compute_lanes(cpu, conv.dtype), dtype_bytes(conv.dtype)
    width = params.vectors * lanes
    panels, strips = -(-conv.f // width), -(-conv.columns // params.tile_w)
    tasks = conv.images * conv.stride * -(-conv.rows // params.block_h) * -(-panels // params.panels)
    share = model.busiest_share(tasks, cpu.cores)
    loads = (params.vectors + params.tile_w / 2) * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    step = max(params.tile_w * params.vectors / cpu.fma_per_cycle, loads, model.FMA_LATENCY_CYCLES)
    tiles = conv.images * conv.rows * strips * panels
    steps = tiles * conv.taps * conv.channels
    if not params.pack:
        step += model.spread_cycles(cpu, conv.f * nbytes, width * nbytes)
    cycles = steps * step + tiles * conv.stride**2 * (TILE_CYCLES + 3 * params.tile_w * params.vectors)
    panel_bytes = conv.taps * conv.channels * width * nbytes / conv.stride**2
    visits = tiles if panel_bytes > cpu.l1d_bytes / 2 else tiles / (strips * min(params.block_h, conv.rows))
    far = tiles / (strips * min(params.block_h, conv.rows)) * conv.stride**2 * panel_bytes
    return model.Work(
        compute_cycles=share * cycles,
        l2_bytes=share * visits * conv.stride**2 * panel_bytes,
        l3_bytes=share * far,
        parallel_regions=1,
    )


def points_of(access: Access) -> int:
    found = 1
    for extent in access.shape:
        found *= extent
    return found
