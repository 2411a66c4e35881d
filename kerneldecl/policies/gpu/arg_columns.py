"""Owns how threads should share columns whose extreme elements are looked for, along an axis that is not the last, and their times.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.arg_reduce import MAX_PARTS, ArgColumnsParams, ArgSizes
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, WARP_CYCLES, Timed, Work, access_widths, touched_share
from kerneldecl.policies.gpu_reduce import NARROW_BYTES
from kerneldecl.policies.gpu_rowwise import INSTRUCTION_CYCLES, OTHER_REGISTERS, SHUFFLE_CYCLES
from kerneldecl.policies.gpu_scan import STRIP_BYTES, STRIP_COST

THREADS = (128, 256, 512)
LANES = (32, 64, 128, 256, 512, 16, 8, 4, 2, 1)
UNROLL = (8, 4, 2, 1)
NARROW_UNROLL = (16, *UNROLL)
WAVES = (1, 2, 4)
"""Thread blocks for each SM where several share columns."""
ELEMENT_FLOPS = 18.0
"""Cost of an element in operations: converted, compared twice, and two choices, of it and of its row. All but the first have half the rate
of multiply-adds (nvcc 13.0's SASS; CUDA C++ Programming Guide, throughput of native arithmetic instructions)."""
RESULT_BYTES, KEY_BYTES = 8, 8
CELL_CYCLES = 12.0
"""Cycles of one thread for each key of a column that it reads from shared memory and compares, one after the other."""


def timed(sizes: ArgSizes, gpu: Gpu) -> Iterator[Timed]:
    """Yield the parameters of `gpu_arg_columns` that are worth a try, and the work of their kernels."""
    for params in dict.fromkeys(_choices(sizes, gpu)):
        if params.fits(sizes, gpu):
            yield params._asdict(), _works(sizes, params, gpu)


def _choices(sizes: ArgSizes, gpu: Gpu) -> Iterator[ArgColumnsParams]:
    """Yield the search space; some of it may not fit."""
    item = dtype_bytes(sizes.dtype)
    for width in access_widths(sizes.inner, item):
        for threads, lanes in _shapes(sizes.inner // width, sizes.outer * sizes.inner // width):
            one = ArgColumnsParams(threads, lanes, width, 1, 1)
            wanted = [gpu.sm_count * waves // one.strips(sizes) for waves in WAVES]
            for parts in dict.fromkeys([1, *(min(MAX_PARTS, want, -(-sizes.extent // one.below)) for want in wanted)]):
                if parts < 1:
                    continue
                # As many as have rows, all of them the same.
                part = -(-sizes.extent // parts)
                for unroll in _unrolls(-(-part // one.below), width * item):
                    yield one._replace(unroll=unroll, parts=-(-sizes.extent // part))


def _shapes(vectors: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield threads of a block, and how many are side by side: powers of two, and a row's vectors where they are few."""
    for threads, lanes in itertools.product(THREADS, LANES):
        if lanes <= threads and (lanes < 2 * count or lanes == 1):
            yield threads, lanes
    if vectors < WARP_LANES:
        whole = math.lcm(vectors, WARP_LANES)
        for threads in THREADS:
            yield max(1, threads // whole) * whole, vectors


def _unrolls(rows: int, access_bytes: int) -> list[int]:
    """Return how many rows of a thread to load together, of so many: turns are alike."""
    choices = NARROW_UNROLL if access_bytes < NARROW_BYTES else UNROLL
    return list(dict.fromkeys(-(-rows // -(-rows // unroll)) for unroll in choices if unroll == 1 or unroll < 2 * rows))


def _works(sizes: ArgSizes, params: ArgColumnsParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of the kernel that reads columns, and of the one that chooses among parts."""
    item, columns, strips = dtype_bytes(sizes.dtype), sizes.outer * sizes.inner, params.strips(sizes)
    turns = -(-params.part(sizes) // (params.below * params.unroll))
    rows = turns * params.unroll
    # Rows and columns that do not exist are computed like others.
    computed = rows * params.below * params.parts * strips * params.lanes * params.width
    passes = -(-params.lanes * params.width * params.sharing // params.threads)
    compared = passes * (-(-params.below // params.sharing) * CELL_CYCLES + 2 * math.log2(params.sharing) * SHUFFLE_CYCLES)
    dtype, cells = params.smem
    results = columns * params.parts * (RESULT_BYTES if params.parts == 1 else KEY_BYTES)
    nbytes, piece = sizes.elements * item, _piece_bytes(sizes, params)
    reading = Work(
        blocks=strips * params.parts,
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + params.unroll * -(-params.width * item // 4) + 2 * params.width,
        smem_bytes=cells * dtype_bytes(dtype),
        flops=computed * (ELEMENT_FLOPS + ACCESS_FLOPS / params.width),
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=nbytes * (1 + STRIP_COST * max(0.0, math.log2(STRIP_BYTES / piece))) + results,
        l2_bytes=nbytes * touched_share(piece) + results,
        moved_smem_bytes=2.0 * strips * params.parts * cells * dtype_bytes(dtype),
        rounds=turns,
        barriers=1,
        serial_cycles=rows * params.width * INSTRUCTION_CYCLES + compared,
        warp_cycles=WARP_CYCLES,
    )
    if params.parts == 1:
        return (reading,)
    threads = params.parts_sharing * columns
    choosing = Work(
        blocks=-(-threads // (4 * WARP_LANES)),
        threads=4 * WARP_LANES,
        dram_bytes=results + columns * RESULT_BYTES,
        l2_bytes=results + columns * RESULT_BYTES,
        rounds=-(-params.parts // params.parts_sharing),
        serial_cycles=2 * math.log2(params.parts_sharing) * SHUFFLE_CYCLES,
    )
    return reading, choosing


def _piece_bytes(sizes: ArgSizes, params: ArgColumnsParams) -> int:
    """Return the neighbouring bytes that threads read together: threads below others have the next row, which follows a whole one."""
    row, piece = sizes.inner * dtype_bytes(sizes.dtype), params.lanes * params.width * dtype_bytes(sizes.dtype)
    return params.below * row if piece == row else min(row, piece)
