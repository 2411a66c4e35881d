"""Owns which register tiles and blocks of a direct convolution a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kerneldecl.analysis.cpu_params import CpuConvParams
from kerneldecl.model import Access, Arch, Block, Candidate, Cpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.cpu import time_model as model

TEMPLATES = ("cpu_conv2d",)
AUTO = {"cpu": 20}

MOST_VECTORS = 6
"""Vectors of output channels in a register tile at most: more leave too few rows for the loads of weights to pay."""


@dataclass(frozen=True)
class Convolution:
    """A convolution as the model sees it."""

    images: int
    h: int
    w: int
    """Columns of the output, as h is its rows."""
    f: int
    taps: int
    """Elements of the filter along its rows times its columns."""
    channels: int
    """Input channels that one output channel sees."""
    is_depthwise: bool
    group_f: int
    """Output channels that share their input channels; all of them where the convolution is depthwise."""
    row_stride: int
    """Input rows between two output rows."""
    halo: int
    """Input rows of one output row, less one stride."""
    image_row_bytes: int
    """Bytes of one row of the input, all channels."""
    weight_bytes: int
    """Bytes of one weight."""
    panel: int
    """Output channels of a panel, where the weights come in panels; else 0."""
    out_dtype: str
    is_padded: bool


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what is no convolution."""
    return model.proposals_of(convolution_of(space), arch.the_cpu, tilings, estimate)[:top_k]


def convolution_of(space: IterSpace) -> Convolution | None:
    """Return the convolution that a function is, its output [..., h, w, f], or None."""
    block = model.two_operand_reduction(space)
    out = None if block is None else model.output_axes(block)
    if block is None or out is None or len(out) < 3:
        return None
    # Where the output is a single pixel both operands look like weights; they come second.
    weights = [access for access in block.reads if _panel(block, access, out[-1]) or _is_rows(access, out)]
    if not weights or len(weights[-1].shape) != len(_reduced(block)) + (2 if _panel(block, weights[-1], out[-1]) else 1):
        return None
    pixels = block.reads[1 - block.reads.index(weights[-1])]
    return _convolution(space, block, pixels, weights[-1]) if len(pixels.shape) >= 3 else None


def _reduced(block: Block) -> list[int]:
    return [i for i, axis in enumerate(block.axes) if axis.kind == "reduce"]


def _is_rows(access: Access, out: list[int]) -> bool:
    """Say whether an access may be weights [reduced axes, f], in any order."""
    axes = model.plain_axes(access)
    return axes is not None and not set(out[:-1]) & set(axes)


def _panel(block: Block, access: Access, f: int) -> int:
    """Return the channels of a panel where an access is weights [f // panel, reduced axes, f % panel], else 0."""
    first, *inner, last = access.index
    # With one panel, its number is constant.
    is_panel = (first, last) in {(None, None), ((), ((f, 1),))} and len(access.shape) == 2 + len(_reduced(block))
    is_reduced = all(dim is not None and {axis for axis, _ in dim} <= set(_reduced(block)) for dim in inner)
    return access.shape[-1] if is_panel and is_reduced else 0


def _convolution(space: IterSpace, block: Block, pixels: Access, weights: Access) -> Convolution:
    *images, h, w, f = model.output_axes(block) or []
    extent = [axis.extent for axis in block.axes]
    reduced = _reduced(block)
    strides = [dict(dim) for dim in pixels.index if dim is not None]
    row_stride = next((stride[h] for stride in strides if h in stride), 0)
    # An axis of the last dimension is a channel, of whatever group; any other reduced axis slides the window.
    sliding = {axis for dim in pixels.index[:-1] if dim is not None for axis, _ in dim} & set(reduced)
    taps = math.prod(extent[axis] for axis in sliding)
    channels = math.prod(extent[axis] for axis in reduced) // taps
    is_depthwise = pixels.index[-1] is not None and f in dict(pixels.index[-1])
    return Convolution(
        images=math.prod(extent[axis] for axis in images),
        h=extent[h],
        w=extent[w],
        f=extent[f],
        taps=taps,
        channels=channels,
        is_depthwise=is_depthwise,
        group_f=extent[f] if is_depthwise else max(1, extent[f] * channels // pixels.shape[-1]),
        row_stride=row_stride,
        halo=pixels.shape[-3] - row_stride * extent[h],
        image_row_bytes=pixels.shape[-2] * pixels.shape[-1] * dtype_bytes(pixels.dtype),
        weight_bytes=dtype_bytes(weights.dtype),
        panel=_panel(block, weights, f),
        out_dtype=block.writes[0].dtype,
        is_padded=pixels.operand not in space.inputs,
    )


def candidates(space: IterSpace, arch: Arch) -> Iterator[Candidate]:
    """Yield every register tile that fits the registers with every blocking; nothing for what is no convolution."""
    conv = convolution_of(space)
    if conv is not None:
        yield from (tiling.candidate() for tiling in tilings(conv, arch.the_cpu, every=True))


def tilings(conv: Convolution, cpu: Cpu, *, every: bool = False) -> Iterator[CpuConvParams]:
    """Yield the register tiles that compute fastest, each with all sensible blockings; or `every` tile and blocking."""
    extents = model.divisors if every else _spaced
    pad_places = ("task", "root") if conv.is_padded else ("task",)
    pack_choices = (False,) if conv.panel else (False, True)
    for tile_w, tile_f in register_tiles(conv, cpu)[: None if every else model.TILE_SHAPES]:
        blocks_f = sorted({tile_f * count for count in extents(conv.f // tile_f)})
        for block_h, block_f, pack_f, order, pad_at in itertools.product(extents(conv.h), blocks_f, pack_choices, ("fw", "wf"), pad_places):
            yield CpuConvParams(tile_w=tile_w, tile_f=tile_f, block_h=block_h, block_f=block_f, pack_f=pack_f, order=order, pad_at=pad_at)


def _spaced(extent: int) -> list[int]:
    """Return a few divisors, from 1 to all of it."""
    found = model.divisors(extent)
    quarters = {found[len(found) * quarter // 4] for quarter in range(4)}
    return sorted(quarters | {extent} | ({extent // 2} if extent % 2 == 0 else set()))


def register_tiles(conv: Convolution, cpu: Cpu) -> list[tuple[int, int]]:
    """Return (tile_w, tile_f) that divide the output and whose accumulators fit the vector registers, fewest cycles first."""
    lanes = model.compute_lanes(cpu, conv.out_dtype)
    tiles = []
    for tile_f in model.divisors(conv.group_f):
        if conv.panel and max(conv.panel, tile_f) % min(conv.panel, tile_f):
            continue  # a register tile is whole panels, or a panel whole register tiles
        vectors = _vectors(tile_f, lanes)
        # One register holds the broadcast element and `vectors` hold the weights.
        rows = (cpu.vector_registers - 1) // vectors - 1
        if vectors <= MOST_VECTORS:
            tiles += [(tile_w, tile_f) for tile_w in model.divisors(conv.w) if tile_w <= rows]
    return sorted(tiles, key=lambda tile: (_micro_cycles(conv, tile[0], tile[1], cpu), tile))


def _vectors(tile_f: int, lanes: int) -> int:
    """Return the registers of one row of accumulators, vectors being as wide as divides the row."""
    return tile_f // math.gcd(tile_f, lanes)


def _micro_cycles(conv: Convolution, tile_w: int, tile_f: int, cpu: Cpu) -> float:
    """Return the cycles of all register tiles on one core, were every operand in L1."""
    vectors = _vectors(tile_f, model.compute_lanes(cpu, conv.out_dtype))
    fma_cycles = tile_w * vectors / cpu.fma_per_cycle
    # A broadcast reads one element and costs half of a full vector's load; a depthwise convolution reads vectors of pixels.
    pixel_loads = tile_w * vectors if conv.is_depthwise else tile_w / 2
    load_cycles = (vectors + pixel_loads) * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    step_cycles = max(fma_cycles, load_cycles, model.FMA_LATENCY_CYCLES)
    # Accumulators are cleared, written and read once each, and the loop over channels starts anew for each tap.
    tile_cycles = conv.taps * (conv.channels * step_cycles + 4) + 3 * tile_w * vectors + 20
    return conv.images * conv.h * (conv.w / tile_w) * (conv.f / tile_f) * tile_cycles


def estimate(conv: Convolution, tiling: CpuConvParams, cpu: Cpu) -> model.Estimate:
    """Return the predicted time: preparing weights and image first, then the convolution.

    Traffic is counted as for a GEMM (Goto and van de Geijn, TOMS 2008, section 4): a panel of weights stands for one operand's
    panel, and the rows that a task reads for the other's block.
    """
    works = [*_preparation(conv, tiling, cpu), _work(conv, tiling, cpu)]
    return model.estimate_of(cpu, tiling.candidate(), works, (tiling.tile_w, tiling.tile_f))


def _tasks(conv: Convolution, tiling: CpuConvParams) -> int:
    return conv.images * (conv.h // tiling.block_h) * (conv.f // tiling.block_f)


def _task_rows(conv: Convolution, tiling: CpuConvParams) -> int:
    """Return the input rows that a task reads."""
    return tiling.block_h * conv.row_stride + conv.halo


def _work(conv: Convolution, tiling: CpuConvParams, cpu: Cpu) -> model.Work:
    tasks = _tasks(conv, tiling)
    share = model.busiest_share(tasks, cpu.cores)
    terms = conv.taps * conv.channels
    panel = tiling.tile_f * terms * conv.weight_bytes
    receptive_field = _task_rows(conv, tiling) * conv.image_row_bytes
    weights = tiling.block_f * terms * conv.weight_bytes
    visits = conv.images * conv.h * (conv.w / tiling.tile_w) * (conv.f / tiling.tile_f)
    near_bytes = visits * panel if panel > cpu.l1d_bytes // 2 else 0.0
    passes = tiling.block_f // tiling.tile_f if tiling.order == "fw" else 1
    near_bytes += tasks * receptive_field * (passes if receptive_field > cpu.l1d_bytes // 2 else 1)
    far_bytes: float = tasks * (weights + receptive_field * (passes if receptive_field > cpu.l2_bytes // 2 else 1))
    if tiling.order == "wf" and weights > cpu.l2_bytes // 2:
        far_bytes += visits * panel
    cycles = _micro_cycles(conv, tiling.tile_w, tiling.tile_f, cpu)
    if not tiling.pack_f and not conv.panel:
        cycles += visits * terms * model.spread_cycles(cpu, conv.f * conv.weight_bytes, tiling.tile_f * conv.weight_bytes)
    if conv.is_padded and tiling.pad_at == "task":
        # A load and a store for each vector, and the test of the margin.
        cycles += tasks * 2 * receptive_field / cpu.vector_bytes
    total_bytes = conv.f * terms * conv.weight_bytes + conv.images * conv.h * conv.row_stride * conv.image_row_bytes
    dram_bytes = total_bytes if total_bytes > cpu.l3_bytes else 0
    return model.Work(
        compute_cycles=share * cycles,
        l2_bytes=share * near_bytes,
        l3_bytes=share * far_bytes,
        dram_bytes=dram_bytes,
        parallel_regions=int(tasks > 1),
    )


def _preparation(conv: Convolution, tiling: CpuConvParams, cpu: Cpu) -> Iterator[model.Work]:
    """Yield the work of packing the weights and of padding the whole image, where a tiling asks for it."""
    is_parallel = _tasks(conv, tiling) > 1
    cores = cpu.cores if is_parallel else 1
    weights = conv.f * conv.taps * conv.channels * conv.weight_bytes
    image = conv.images * (conv.h * conv.row_stride + conv.halo) * conv.image_row_bytes
    for is_copied, copy_bytes in ((tiling.pack_f, weights), (conv.is_padded and tiling.pad_at == "root", image)):
        if is_copied:
            moved_bytes = 2 * copy_bytes
            yield model.Work(
                compute_cycles=moved_bytes / cpu.vector_bytes / cores,
                l3_bytes=moved_bytes / cores,
                dram_bytes=moved_bytes if moved_bytes > cpu.l3_bytes else 0,
                parallel_regions=int(is_parallel),
            )
