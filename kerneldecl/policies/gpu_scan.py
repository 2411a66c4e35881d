"""Owns among how many threads and thread blocks a cumulative sum should be shared on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.long_scan import fits, takes_any
from kerneldecl.analysis.scan import (
    GROUP_TILES,
    MAX_PARTS,
    RESIDENT_THREADS,
    SUM_BYTES,
    GpuScanColumnsParams,
    GpuScanOnceParams,
    GpuScanParams,
    GpuScanTilesParams,
    ScanSizes,
    scan_of,
)
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import RIVAL_EVERY, interleaved
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, LINE_BYTES, Work, ranked, streamed_secs

TEMPLATES = ("gpu_scan", "gpu_scan_once", "gpu_scan_tiles", "gpu_scan_columns")
AUTO = {"cuda": 52}
HAS_TRACES = False

THREADS = (128, 256, 64, 512, 32, 1024)
UNROLL_ROWS, UNROLL_COLUMNS = (1, 2, 4), (4, 8, 16)
UNROLL_ONCE = (8, 4, 2)
LANES, UNROLL_STRIPS = (8, 4, 16, 2, 32), (2, 4, 1)
WAVES = (1, 2, 4)
"""Thread blocks for each SM where parts share rows."""
OTHER_REGISTERS = 28
SUM_FLOPS = 8.0
"""Cost of an element in operations: convert, add twice, convert, and its share of the scan of threads."""
CAMPING_BYTES, CAMPING = 1 << 16, 4.0
"""Distance of parts from which on they are taken to meet in the same slices of L2, and how much longer that takes: parts of a long row
256 KB to 1 MB apart took 372 to 563 us, four to six times what was predicted (H200, 2026-11-24). Not measured with other distances."""
RIVAL_SLOWDOWN = 1.8
"""How much slower than the best of the other template may candidates be predicted, and still be tried."""
ONCE_ROUNDS = 4
"""Latencies of a tile in one pass: which one it is, its elements, its sum published and seen, those of tiles a little behind. Assumed."""
ONCE_WAITS = 0.5
"""Fraction of DRAM's time in which thread blocks of one tile leave it idle, as all of an SM's load, wait and store at about the same time:
33 554 432 float32 took 96.6 us (H200, 2026-11). Blocks that stay and copy tiles ahead took 104.5 at best."""
TILES_WAITS = 0.19
"""The same fraction of tiles that look far back where nobody waits for sums. Fitted with the next one to 19 kernels of one row of
33 554 432 float32, which took 79 to 119 us: all are predicted within 5 % (H200, 2026-11-29)."""
LAG_WAITS, WAITED_BYTES = 0.28, 1 << 17
"""What it is more where tiles wait for sums, with so many bytes of tiles on an SM, and less where there are more; and where sums are
ahead, less by as much as they are, down to nothing where half the tiles that a GPU has at once are between a sum and its scan."""
RIVAL_PARTS = 16
"""One in so many candidates reads rows of many tiles twice by `gpu_scan`, where there are many ways to read them once."""
FAR = (
    (256, 8, 0, 1.0, 2, 1),
    (256, 4, 12, 0.5, 0, 1),
    (512, 8, 0, 1.0, 1, 1),
    (512, 4, 12, 1.0, 0, 1),
    (256, 8, 0, 0.5, 2, 1),
    (256, 4, 12, 1.0, 0, 1),
    (256, 8, 0, 1.0, 4, 1),
    (256, 8, 8, 1.0, 0, 1),
    (256, 4, 12, 1.0, 1, 1),
    (256, 8, 12, 1.0, 0, 1),
    (256, 8, 0, 1.0, 2, 0),
    (256, 4, 12, 1.0, 0, 0),
)
"""Tiles that look far back, in the order in which to try them, sums ahead and more under way in turns, each as fast as it was (one row
of 33 554 432 float32, H200, 2026-11-29): threads, vectors in registers and in shared memory, which part of the tiles that a GPU has at
once are looked at one by one, how many tiles for each SM sums are ahead, and whether what is read or written last leaves L2 first."""
SCAN_CYCLES = 150.0
"""Cycles in which a thread block scans its threads' sums: two times five shuffles and a barrier."""
STRIP_BYTES, STRIP_COST = 256, 0.08
"""Neighbouring bytes of a strip that DRAM reads and writes fastest, and the fraction of its time that each halving costs: strips of 256,
128 and 64 bytes of 32 x 4096 x 256 float32 took 76.8, 80.9 and 98.6 us at best (9 kernels, H200, 2026-11)."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time; nothing for what is no cumulative sum."""
    sizes, gpu = scan_of(space), arch.the_gpu
    if sizes is None or not takes_any(sizes):
        return ()
    fitting = (params for params in dict.fromkeys(_choices(sizes, gpu)) if fits(params, sizes, gpu))
    parts = ranked("gpu_scan", gpu, ((params._asdict(), _works(sizes, params, gpu)) for params in fitting), top_k)
    once = _strips(sizes, gpu, top_k) if sizes.inner > 1 else _tiles(sizes, gpu, top_k)
    # Parts are read twice: where tiles are faster and there are many ways to read those, few parts are worth a try.
    many = any(proposal.candidate.template == "gpu_scan_tiles" for proposal in once)
    return _raced(once, parts, RIVAL_PARTS if many else RIVAL_EVERY)[:top_k]


def _tiles(sizes: ScanSizes, gpu: Gpu, top_k: int) -> tuple[Proposal, ...]:
    """Return rows in one pass, where they are so few that thread blocks have to share them."""
    if sizes.outer > gpu.sm_count:
        return ()
    tiles = (params for params in itertools.starmap(GpuScanOnceParams, itertools.product(THREADS, UNROLL_ONCE)) if params.fits(sizes, gpu))
    once = ranked("gpu_scan_once", gpu, ((params._asdict(), _once_works(sizes, params, gpu)) for params in tiles), top_k)
    return _raced(tuple(_far_tiles(sizes, gpu)), once)


def _raced(some: tuple[Proposal, ...], others: tuple[Proposal, ...], every: int = RIVAL_EVERY) -> tuple[Proposal, ...]:
    """Return the proposals whose first one is predicted faster, and between them those of the rest that are not much slower.

    Where it is the others that are slower, one in `every` is one of them.
    """
    if not some or not others:
        return some or others
    if others[0].predicted_secs <= some[0].predicted_secs:
        some, others, every = others, some, RIVAL_EVERY
    rivals = [proposal for proposal in others if proposal.predicted_secs <= RIVAL_SLOWDOWN * some[0].predicted_secs]
    return tuple(interleaved(some, rivals, every=every))


def _far_tiles(sizes: ScanSizes, gpu: Gpu) -> Iterator[Proposal]:
    """Yield tiles that look far back, where a GPU cannot have all tiles at once.

    They look at as many groups as have that part of the tiles that a GPU has at once: older groups are done.
    """
    for threads, held, kept, turns, per_sm, stream in FAR:
        params = GpuScanTilesParams(threads, held, kept, GROUP_TILES, 1, per_sm * gpu.sm_count, stream)
        at_once = params.ctas_per_sm(sizes, gpu) * gpu.sm_count
        params = params._replace(lag=math.ceil(turns * at_once / GROUP_TILES))
        if not params.fits(sizes, gpu) or 2 * params.ahead * params.tile(sizes) * dtype_bytes(sizes.dtype) > gpu.l2_bytes:
            continue
        if sizes.outer * params.tiles(sizes) > at_once:
            works = _tiles_works(sizes, params, gpu)
            yield Proposal(Candidate.of("gpu_scan_tiles", params._asdict()), sum(streamed_secs(gpu, work) for work in works))


def _strips(sizes: ScanSizes, gpu: Gpu, top_k: int) -> tuple[Proposal, ...]:
    """Return strips of columns in one pass."""
    choices = itertools.starmap(GpuScanColumnsParams, itertools.product(THREADS, LANES, UNROLL_STRIPS))
    fitting = (params for params in choices if params.fits(sizes, gpu) and params.step <= sizes.extent)
    return ranked("gpu_scan_columns", gpu, ((params._asdict(), (_strip_work(sizes, params, gpu),)) for params in fitting), top_k)


def _choices(sizes: ScanSizes, gpu: Gpu) -> Iterator[GpuScanParams]:
    """Yield the search space; some of it may not fit."""
    for threads, unroll in itertools.product(THREADS, UNROLL_ROWS if sizes.inner == 1 else UNROLL_COLUMNS):
        one = GpuScanParams(threads, 1, unroll)
        yield one
        for waves in WAVES:
            parts = min(MAX_PARTS, gpu.sm_count * waves // one.blocks(sizes), -(-sizes.extent // one.step(sizes)))
            if parts > 1:
                # As many parts as have whole steps, all of them filled.
                part = GpuScanParams(threads, parts, unroll).part(sizes)
                yield GpuScanParams(threads, -(-sizes.extent // part), unroll)
                if sizes.inner == 1:
                    yield GpuScanParams(threads, -(-sizes.extent // (part + one.step(sizes))), unroll)


def _works(sizes: ScanSizes, params: GpuScanParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of one kernel, or of the sums and of the scan."""
    element, width, blocks = dtype_bytes(sizes.dtype), params.width(sizes), params.blocks(sizes)
    nbytes, part = sizes.elements * element, params.part(sizes)
    steps = -(-part // params.step(sizes))
    held = params.unroll * width * element
    lanes = (
        sizes.outer * sizes.inner / width / (blocks * params.threads) if sizes.inner > 1 else min(1.0, sizes.extent / params.step(sizes))
    )
    base = Work(
        blocks=blocks * params.parts,
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + 2 * -(-held // 4) + 2 * width,
        flops_per_s=gpu.simt_rate("float32"),
        flops=sizes.elements * (SUM_FLOPS + 2 * ACCESS_FLOPS / width) / max(lanes, 1e-3),
        dram_bytes=2 * nbytes,
        l2_bytes=2 * nbytes,
        rounds=max(1.0, steps / 2),
        serial_cycles=steps * SCAN_CYCLES if sizes.inner == 1 else steps * params.unroll * 4.0,
        barriers=1,
    )
    if params.parts == 1:
        return (base,)
    if sizes.inner == 1 and part * element % CAMPING_BYTES == 0:
        base = base._replace(l2_bytes=base.l2_bytes * CAMPING)
    sums = base._replace(flops=base.flops / 3, dram_bytes=nbytes, l2_bytes=base.l2_bytes / 2, rounds=max(1.0, steps / 4), serial_cycles=0.0)
    again = nbytes if nbytes > gpu.l2_bytes / 2 else 0
    return sums, base._replace(dram_bytes=nbytes + again, barriers=2)


def _strip_work(sizes: ScanSizes, params: GpuScanColumnsParams, gpu: Gpu) -> Work:
    """Return the work of thread blocks that walk down strips; the next step's loads are under way while one is added up."""
    element, width, blocks = dtype_bytes(sizes.dtype), params.width(sizes), params.blocks(sizes)
    nbytes, steps = sizes.elements * element, -(-sizes.extent // params.step)
    strip_bytes = params.lanes * width * element
    idle = steps * params.step * params.slices(sizes) * params.lanes * width / (sizes.extent * sizes.inner)
    return Work(
        blocks=blocks,
        threads=params.threads,
        regs_per_thread=min(OTHER_REGISTERS + params.held_registers(sizes), gpu.registers_per_sm // RESIDENT_THREADS),
        flops=sizes.elements * idle * (SUM_FLOPS + 2 * ACCESS_FLOPS / width),
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=2 * nbytes * (1 + STRIP_COST * max(0.0, math.log2(STRIP_BYTES / strip_bytes))),
        l2_bytes=2 * nbytes * max(1.0, LINE_BYTES / strip_bytes) ** 0.5,
        rounds=max(1.0, steps / 2),
        serial_cycles=2 * steps * SCAN_CYCLES,
        barriers=1,
    )


def _once_works(sizes: ScanSizes, params: GpuScanOnceParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of clearing words, and of the tiles."""
    element, tiles, looks = dtype_bytes(sizes.dtype), params.tiles(sizes), (GROUP_TILES + params.groups(sizes)) / 2
    width = params.tile(sizes) // (params.threads * params.unroll)
    nbytes, words = sizes.elements * element, 8.0 * params.words(sizes)
    scan = Work(
        blocks=sizes.outer * tiles,
        threads=params.threads,
        regs_per_thread=min(OTHER_REGISTERS + params.unroll * (-(-width * element // 4) + 2), gpu.registers_per_sm // RESIDENT_THREADS),
        flops=sizes.elements * (SUM_FLOPS + 2 * ACCESS_FLOPS / width) * tiles * params.tile(sizes) / sizes.extent,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=2 * nbytes * (1 + ONCE_WAITS),
        l2_bytes=2 * nbytes + words * looks,
        rounds=ONCE_ROUNDS + looks / params.threads / 4,
        serial_cycles=3 * SCAN_CYCLES,
        barriers=3,
    )
    return Work(blocks=-(-params.words(sizes) // 256), threads=256, dram_bytes=words), scan


def _tiles_works(sizes: ScanSizes, params: GpuScanTilesParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of clearing words, and of the tiles."""
    element, width = dtype_bytes(sizes.dtype), params.width(sizes)
    nbytes, words = sizes.elements * element, 8.0 * params.words(sizes)
    resident = params.ctas_per_sm(sizes, gpu)
    late = max(0.0, 1 - 2 * params.ahead / (resident * gpu.sm_count))
    waits = TILES_WAITS + late * LAG_WAITS * WAITED_BYTES / (resident * params.tile(sizes) * element)
    scan = Work(
        blocks=params.blocks(sizes),
        threads=params.threads,
        regs_per_thread=gpu.registers_per_sm // RESIDENT_THREADS,
        smem_bytes=SUM_BYTES * params.smem_sums(sizes),
        flops=sizes.elements * ((2 if params.ahead else 1) * SUM_FLOPS + 2 * ACCESS_FLOPS / width),
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=2 * nbytes * (1 + waits),
        l2_bytes=(3 if params.ahead else 2) * nbytes + sizes.outer * params.tiles(sizes) * 8.0 * params.looks(sizes) * params.threads,
        rounds=ONCE_ROUNDS,
        serial_cycles=3 * SCAN_CYCLES,
        barriers=4 if params.ahead else 3,
    )
    return Work(blocks=-(-params.words(sizes) // 256), threads=256, dram_bytes=words), scan
