"""Owns which register tiles, cache blocks and packings of a GEMM a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kerneldecl.model import Access, Arch, Block, Candidate, Cpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.cpu import time_model as model
from kerneldecl.policies.shared.reduction import matrix_vector

TEMPLATES = ("cpu_matmul", "cpu_dot")
AUTO = {"cpu": 10}

L1_WAYS = 8
"""Lines of one set of L1: rows whose distance is a multiple of a page all fall into the same set."""
PAGE_BYTES = 4096
ORDERS = ("nm", "mn")
"""Orders of the loops over tasks and over register tiles: column by column, or row by row."""


@dataclass(frozen=True)
class Gemm:
    """A GEMM as the model sees it: operand A has the axis m, operand B the axis n, both have k."""

    batch: int
    m: int
    n: int
    k: int
    a_bytes: int
    """Bytes of one element of A."""
    b_bytes: int
    """Bytes of one element of B."""
    out_dtype: str
    is_a_row_major: bool
    """True where k is the last index of A."""
    is_b_row_major: bool
    """True where n is the last index of B."""
    computed: tuple[bool, bool] = (False, False)
    """Whether the same function computes A, and B, before: they are computed into panels."""


@dataclass(frozen=True)
class Tiling:
    """A template and its parameters; `cpu_dot` neither blocks the reduction nor packs."""

    template: str
    tile_m: int
    tile_n: int
    block_m: int
    block_n: int
    order: str
    block_k: int = 0
    pack_m: bool = False
    pack_n: bool = False

    def candidate(self) -> Candidate:
        names = ("tile_m", "tile_n", "block_m", "block_n", "order")
        own = ("block_k", "pack_m", "pack_n") if self.template == "cpu_matmul" else ()
        return Candidate.of(self.template, {name: getattr(self, name) for name in (*names, *own)})


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what is no GEMM, and for what `cpu_gemv` reads in order."""
    gemm = gemm_of(space)
    return () if gemm is None or _is_row(space, gemm) else model.proposals_of(gemm, arch.the_cpu, tilings, estimate)[:top_k]


def _is_row(space: IterSpace, gemm: Gemm) -> bool:
    """Say whether a GEMM is one row by a matrix with contiguous columns, or by one that the function computes.

    Tiles of columns would read the former in short pieces, far apart; the latter is used once, and needs no panels.
    """
    return gemm.batch == gemm.m == 1 < gemm.n and (gemm.is_b_row_major or gemm.computed[1]) and matrix_vector(space) is not None


def gemm_of(space: IterSpace) -> Gemm | None:
    """Return the GEMM that a function is, or None."""
    block = model.two_operand_reduction(space)
    if block is None:
        return None
    out, first, second = model.output_axes(block), *(model.plain_axes(access) for access in block.reads)
    reduced = [i for i, axis in enumerate(block.axes) if axis.kind == "reduce"]
    if out is None or len(out) < 2 or first is None or second is None or len(reduced) != 1:
        return None
    n = out[-1]
    # Where n has extent 1, no operand has it; either may be B.
    is_second = n in second or n not in first
    a, b = (first, second) if is_second else (second, first)
    rows = _row_axis(block, out, a, b)
    if rows is None or n in a:
        return None
    gemm = _gemm(block, out, (rows, n, reduced[0]), block.reads if is_second else block.reads[::-1])
    before = {write.operand for other in itertools.takewhile(lambda each: not each.is_reduction, space.blocks) for write in other.writes}
    first_computed, second_computed = (access.operand in before for access in block.reads)
    return replace(gemm, computed=(first_computed, second_computed) if is_second else (second_computed, first_computed))


def _row_axis(block: Block, out: list[int], a: list[int], b: list[int]) -> int | None:
    """Return the axis that only A has; where none is longer than 1, the last axis of extent 1."""
    rows = [axis for axis in out[:-1] if axis in a and axis not in b]
    units = [axis for axis in out[:-1] if block.axes[axis].extent == 1]
    if len(rows) > 1 or not (rows or units) or any(axis not in a and axis not in units for axis in out[:-1]):
        return None
    return (rows or units)[-1]


def _gemm(block: Block, out: list[int], mnk: tuple[int, int, int], operands: tuple[Access, ...]) -> Gemm:
    rows, n, k = mnk
    a, b = operands
    extent = [axis.extent for axis in block.axes]
    return Gemm(
        batch=math.prod(extent[axis] for axis in out[:-1] if axis != rows),
        m=extent[rows],
        n=extent[n],
        k=extent[k],
        a_bytes=dtype_bytes(a.dtype),
        b_bytes=dtype_bytes(b.dtype),
        out_dtype=block.writes[0].dtype,
        is_a_row_major=not _is_indexed_last(a, rows),
        is_b_row_major=not _is_indexed_last(b, k),
    )


def _is_indexed_last(access: Access, axis: int) -> bool:
    """Say whether neighbours along the axis are neighbours in memory."""
    dims = [dim for dim, size in zip(access.index, access.shape, strict=True) if size > 1]
    return bool(dims) and dims[-1] == ((axis, 1),)


def candidates(space: IterSpace, arch: Arch) -> Iterator[Candidate]:
    """Yield every register tile that fits the registers with every blocking and packing; nothing for what is no GEMM."""
    gemm = gemm_of(space)
    if gemm is not None:
        yield from (tiling.candidate() for tiling in tilings(gemm, arch.the_cpu, every=True))


def tilings(gemm: Gemm, cpu: Cpu, *, every: bool = False) -> Iterator[Tiling]:
    """Yield the register tiles that compute fastest, each with all sensible blockings and packings; or `every` tile and blocking."""
    most = None if every else model.TILE_SHAPES
    shapes = itertools.product(register_tiles(gemm, cpu)[:most], _reduction_blocks(gemm, cpu))
    for (tile_m, tile_n), block_k in shapes:
        packs_m = (False, True) if gemm.m % tile_m == 0 and not gemm.computed[0] else (True,)
        packs_n = (False, True) if gemm.n % tile_n == 0 and gemm.is_b_row_major and not gemm.computed[1] else (True,)
        blocks = _all_blocks(gemm, tile_m, tile_n) if every else _blocks(gemm, tile_m, tile_n, block_k or gemm.k, cpu)
        for (block_m, block_n), pack_m, pack_n, order in itertools.product(blocks, packs_m, packs_n, ORDERS):
            yield Tiling(
                template="cpu_matmul",
                tile_m=tile_m,
                tile_n=tile_n,
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                pack_m=pack_m,
                pack_n=pack_n,
                order=order,
            )
    for tile_m, tile_n in dot_tiles(gemm, cpu)[:most]:
        blocks = _all_blocks(gemm, tile_m, tile_n) if every else _blocks(gemm, tile_m, tile_n, gemm.k, cpu)
        for (block_m, block_n), order in itertools.product(blocks, ORDERS):
            yield Tiling(template="cpu_dot", tile_m=tile_m, tile_n=tile_n, block_m=block_m, block_n=block_n, order=order)


def register_tiles(gemm: Gemm, cpu: Cpu) -> list[tuple[int, int]]:
    """Return (tile_m, tile_n) whose accumulators fit the vector registers, those with the fewest cycles first."""
    lanes = model.compute_lanes(cpu, gemm.out_dtype)
    widths = [lanes * vectors for vectors in (1, 2, 3, 4, 5, 6) if lanes * (vectors - 1) < gemm.n]
    if gemm.n < lanes:
        widths = [1 << (gemm.n - 1).bit_length()]
    tiles = []
    for tile_n in widths:
        vectors = -(-tile_n // lanes)
        # One register holds the broadcast element of A and `vectors` hold the row of B.
        rows = min(gemm.m, (cpu.vector_registers - 1) // vectors - 1)
        tiles += [(tile_m, tile_n) for tile_m in range(1, rows + 1)]
    return sorted(tiles, key=lambda tile: (_micro_cycles(gemm, "cpu_matmul", tile, cpu), tile))


def dot_tiles(gemm: Gemm, cpu: Cpu) -> list[tuple[int, int]]:
    """Return (tile_m, tile_n) whose accumulators fit the vector registers, fewest cycles first; none unless both operands have k last."""
    if any(gemm.computed) or not gemm.is_a_row_major or gemm.is_b_row_major or gemm.k % model.compute_lanes(cpu, gemm.out_dtype):
        return []
    # The rows of one operand stay in registers besides the accumulators while the other's are read in turn.
    tiles = [
        (tile_m, tile_n)
        for tile_m, tile_n in itertools.product(model.divisors(gemm.m), model.divisors(gemm.n))
        if tile_m * tile_n + tile_m + 1 <= cpu.vector_registers
    ]
    return sorted(tiles, key=lambda tile: (_micro_cycles(gemm, "cpu_dot", tile, cpu), tile))


def _blocks(gemm: Gemm, tile_m: int, tile_n: int, panel_k: int, cpu: Cpu) -> list[tuple[int, int]]:
    """Return pairs of block extents that are multiples of the tile, for panels of `panel_k` along k."""
    half_bytes = cpu.l2_bytes // 2
    blocks_m = _block_extents(gemm.m, tile_m, half_bytes // (panel_k * gemm.a_bytes))
    blocks_n = _block_extents(gemm.n, tile_n, half_bytes // (panel_k * gemm.b_bytes))
    return list(itertools.product(blocks_m, blocks_n))


def _all_blocks(gemm: Gemm, tile_m: int, tile_n: int) -> list[tuple[int, int]]:
    """Return all pairs of block extents that are multiples of the tile and divide the padded result."""
    blocks_m, blocks_n = (
        [tile * count for count in model.divisors(-(-extent // tile))] for extent, tile in ((gemm.m, tile_m), (gemm.n, tile_n))
    )
    return list(itertools.product(blocks_m, blocks_n))


def _block_extents(extent: int, tile: int, most: int) -> list[int]:
    """Return all of an extent, its half, and what comes next below `most` and a quarter of it."""
    tiles = -(-extent // tile)
    counts = model.divisors(tiles)
    fitting = [max((count for count in counts if count * tile <= limit), default=1) for limit in (most, most // 4)]
    halves = [tiles // 2] if tiles % 2 == 0 else []
    return sorted({tile * count for count in (tiles, *halves, *fitting)})


def _reduction_blocks(gemm: Gemm, cpu: Cpu) -> list[int]:
    """Return 0 (no blocking) and, for reductions that outgrow L1, the largest divisor of k with which a panel stays in it."""
    most = cpu.l1d_bytes // 2 // (2 * cpu.vector_bytes)
    fitting = max((d for d in model.divisors(gemm.k) if d <= 2 * most), default=1)
    return [0, fitting] if most <= fitting < gemm.k else [0]


def _micro_cycles(gemm: Gemm, template: str, tile: tuple[int, int], cpu: Cpu) -> float:
    """Return the cycles of all register tiles on one core, were every operand in L1."""
    tile_m, tile_n = tile
    lanes = model.compute_lanes(cpu, gemm.out_dtype)
    vectors = tile_n if template == "cpu_dot" else -(-tile_n // lanes)
    # A broadcast reads one element and costs half of a full vector's load.
    loads = vectors + (tile_m if template == "cpu_dot" else tile_m / 2)
    load_cycles = loads * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    step_cycles = max(tile_m * vectors / cpu.fma_per_cycle, load_cycles, model.FMA_LATENCY_CYCLES)
    if template == "cpu_dot":
        # In the end, the lanes of each accumulator are added one by one.
        tile_cycles = gemm.k / lanes * step_cycles + tile_m * tile_n * lanes + 20
    else:
        # Accumulators are cleared, written and read once each.
        tile_cycles = gemm.k * step_cycles + 3 * tile_m * vectors + 20
    return gemm.batch * math.ceil(gemm.m / tile_m) * math.ceil(gemm.n / tile_n) * tile_cycles


def estimate(gemm: Gemm, tiling: Tiling, cpu: Cpu) -> model.Estimate:
    """Return the predicted time: packing first, then the GEMM.

    Traffic follows Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, TOMS 2008, section 4):
    per register tile, the panel that changes comes from the cache that its block fits, the other from the cache that the panel fits.
    """
    works = [*_packing(gemm, tiling, cpu), _work(gemm, tiling, cpu)]
    return model.estimate_of(cpu, tiling.candidate(), works, (tiling.tile_m, tiling.tile_n))


def _work(gemm: Gemm, tiling: Tiling, cpu: Cpu) -> model.Work:
    m_tiles, n_tiles = math.ceil(gemm.m / tiling.tile_m), math.ceil(gemm.n / tiling.tile_n)
    tasks = gemm.batch * (m_tiles * tiling.tile_m // tiling.block_m) * (n_tiles * tiling.tile_n // tiling.block_n)
    share = model.busiest_share(tasks, cpu.cores)
    panel_k = tiling.block_k or gemm.k
    panel_m, panel_n = tiling.tile_m * panel_k * gemm.a_bytes, tiling.tile_n * panel_k * gemm.b_bytes
    block_m, block_n = tiling.block_m * panel_k * gemm.a_bytes, tiling.block_n * panel_k * gemm.b_bytes
    visits = gemm.batch * m_tiles * n_tiles * (gemm.k / panel_k)
    changing, kept, block = (panel_m, panel_n, block_m) if tiling.order == "nm" else (panel_n, panel_m, block_n)
    near_bytes = visits * ((changing if block > cpu.l1d_bytes // 2 else 0) + (kept if kept + changing > cpu.l1d_bytes else 0))
    far_bytes = visits * changing if block > cpu.l2_bytes // 2 else 0
    if not tiling.pack_m and gemm.is_a_row_major and tiling.tile_m > L1_WAYS and gemm.k * gemm.a_bytes % PAGE_BYTES == 0:
        near_bytes += visits * panel_k * tiling.tile_m * cpu.line_bytes
    out_bytes = dtype_bytes(gemm.out_dtype) * gemm.batch * gemm.m * gemm.n
    if tiling.block_k:
        near_bytes += 2 * out_bytes * (gemm.k / panel_k)
    operand_bytes = gemm.batch * gemm.k * (gemm.m * gemm.a_bytes + gemm.n * gemm.b_bytes)
    first_bytes = tasks * (block_m + block_n) * (gemm.k / panel_k)
    cycles = _micro_cycles(gemm, tiling.template, (tiling.tile_m, tiling.tile_n), cpu) + _tail_cycles(gemm, tiling)
    if not tiling.pack_n and gemm.is_b_row_major:
        cycles += visits * panel_k * model.spread_cycles(cpu, gemm.n * gemm.b_bytes, tiling.tile_n * gemm.b_bytes)
    return model.Work(
        compute_cycles=share * cycles,
        l2_bytes=share * near_bytes,
        l3_bytes=share * (far_bytes + first_bytes),
        dram_bytes=operand_bytes + out_bytes if operand_bytes + out_bytes > cpu.l3_bytes else 0,
        parallel_regions=int(tasks > 1),
    )


def _tail_cycles(gemm: Gemm, tiling: Tiling) -> float:
    """Return the cycles of storing elements one by one, where a tile reaches beyond the end of a row."""
    return 3.0 * gemm.batch * gemm.m * gemm.n if gemm.n % tiling.tile_n else 0.0


def _packing(gemm: Gemm, tiling: Tiling, cpu: Cpu) -> Iterator[model.Work]:
    """Yield the work of copying operands into panels: at L3's rate, or one by one where the copy transposes or pads."""
    is_parallel = gemm.batch > 1 or tiling.block_m < gemm.m or tiling.block_n < gemm.n
    cores = cpu.cores if is_parallel else 1
    for is_packed, extent, tile, item_bytes, is_straight in (
        (tiling.pack_m, gemm.m, tiling.tile_m, gemm.a_bytes, not gemm.is_a_row_major),
        (tiling.pack_n, gemm.n, tiling.tile_n, gemm.b_bytes, gemm.is_b_row_major),
    ):
        if is_packed:
            items = gemm.batch * gemm.k * extent
            cycles = items * (2.0 if extent % tile else 0.0 if is_straight else 1.0)
            moved_bytes = 2 * items * item_bytes
            far_bytes = moved_bytes if moved_bytes > cpu.l3_bytes else 0
            yield model.Work(cycles / cores, l3_bytes=moved_bytes / cores, dram_bytes=far_bytes, parallel_regions=int(is_parallel))
