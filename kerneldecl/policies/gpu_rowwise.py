"""Owns how a chain of reductions and elementwise steps over rows should be computed on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from kerneldecl.analysis.gpu_limits import SECTOR_BYTES, VECTOR_BYTES
from kerneldecl.model import Arch, Block, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import (
    ACCESS_FLOPS,
    FAST_MATH_BYTES,
    LINE_BYTES,
    WARP_CYCLES,
    Timed,
    Work,
    access_widths,
    load_rounds,
    ranked,
)
from kerneldecl.policies.gpu_reduce import BRANCH_CYCLES, ROW_THREADS, block_rows
from kerneldecl.policies.shared.reduction import rowwise_reductions
from kerneldecl.policies.shared.traffic import largest, moved_bytes, points

TEMPLATES = ("gpu_rowwise",)
AUTO = {"cuda": 60}

BLOCK_THREADS = (64, 128, 256, 512, 1024)
MAX_KEPT = 64
"""Elements of a row that one thread keeps at most: each may need a register of its own, besides those that hold what was loaded."""
OTHER_REGISTERS = 24
"""Registers of a thread besides the elements that it keeps or has in flight."""

INSTRUCTION_FLOPS = 4.0
"""Cost of an operation in multiply-adds, besides its accesses."""
INSTRUCTION_CYCLES = 4.0
"""Latency of an arithmetic instruction in cycles: a thread adds up its elements one after another (Jia et al., Dissecting the NVIDIA Volta
GPU Architecture via Microbenchmarking, 2018, table 4.1). Norms of 128 rows on an H200 take 35 to 50 cycles per element."""
WEIGHTS_SHARE = 0.5
"""Latency of a row's weights as a share of DRAM's: all blocks read them, so most find them in L2."""
SHUFFLE_CYCLES = 25.0
"""Cycles of a shuffle between the threads of a warp and the operation on its result."""
DIVISION_CYCLES = 340.0
"""Cycles of a thread to divide an element of a softmax where an argument has more than 16 bits, and nvcc gets no fast math: each division
tests for a slow path, and none begins before the one before it. Four softmaxes of 33 to 288 float32, 60 candidates, took 0.16 to 0.2 us an
element of a thread more than predicted without; softmaxes of 16 bits, norms and losses, which divide once a row, none (H200, 2026-11)."""
LINE_SHARE = 0.5
"""Part of a line that an access of a warp costs of L1's bandwidth for each line that it touches, where a line is more than it wants.
Fitted, as the next one, to 29 operators over rows of 8 to 12864 elements on an H200 (2026-11)."""
BOUNDED_VECTOR_CYCLES = 50.0
"""Cycles for each element of a thread's last vector of 16 bytes where some threads have one less: softmaxes of 136 to 3776 elements took
0.2 to 0.6 us more with eight elements of 16 bits than with four. Norms, which load weights as well, did not."""

STORED_AGAIN = 3.0
"""Bytes through L2 for each byte of a sector that stores of few lanes leave as they are. Softmaxes of 213852 x 23 and 332235 x 11 float16
and of 243703 x 8 float32 took 3 to 7 times as long by single elements or threads as by 4 or 8 lanes, 20 tilings each (H200, 2026-11)."""
IDLE_LANES_CYCLES = 500.0
"""Cycles of a row that one turn of a part of a warp holds, where some lanes have no vector: all that a lane does with one is a branch
then. Softmaxes of 24 and 29 elements took 0.2 to 0.45 us more so than with fewer lanes (H200, 2026-11)."""
BOUNDED_ROW_CYCLES, BOUNDED_ROW_LOADS = 500.0, 4
"""Cycles for each of a thread's loads where the last block has fewer rows than others, so that each load is a branch that no other
crosses; and the loads after which those of rows without weights cross them after all. Seven norms, softmaxes and losses of 5 to 1070
rows took 0.2 to 0.35 us a load so (H200, 2026-11). Single threads of a row leave at once where they have none."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return how many threads share a row, and how; nothing where reductions do not share their rows, the leading axes.

    Nothing for several results either: the template writes one, behind the reductions.
    """
    reductions = rowwise_reductions(space) if len(space.outputs) == 1 else ()
    return ranked("gpu_rowwise", arch.the_gpu, _timed(space, reductions, arch.the_gpu), top_k) if reductions else ()


def _timed(space: IterSpace, reductions: Sequence[Block], gpu: Gpu) -> Iterator[Timed]:
    count, size = points(reductions[0], "spatial"), points(reductions[0], "reduce")
    last = space.blocks[-1]
    # The last block writes whole rows, or one result for each.
    writes_rows = points(last) > count
    element = dtype_bytes((last.writes[0] if writes_rows else largest(reductions[0])).dtype)
    lengths = [block.axes[-1].extent for block in (*reductions, *([last] if writes_rows else []))]
    division = DIVISION_CYCLES if writes_rows and _divides_exactly(space) else 0.0
    instructions = sum(points(block) * max(1, block.flops_per_point) for block in space.blocks)
    element_cycles = INSTRUCTION_CYCLES * instructions / (count * size) + division
    for width, row_threads, threads in itertools.product(access_widths(math.gcd(*lengths), element), ROW_THREADS, BLOCK_THREADS):
        vectors = size // width
        if row_threads > threads or (row_threads >= 2 * vectors and row_threads > 1):
            continue
        rows = block_rows(count, threads // row_threads)
        steps = -(-vectors // row_threads)
        is_kept = steps * width <= MAX_KEPT
        # A row that is not kept in registers is read again for each reduction, from L2.
        passes = 1 if is_kept else len(reductions) + 1
        waste = steps * row_threads / vectors
        weights = _weights(space, size)
        # The row itself, and what is read beside it, such as a mask.
        streams = len(space.inputs) - weights
        # A row's loads are in flight together, so that what they leave of a line is still in L1.
        lines = max(1.0, LINE_BYTES / (min(row_threads, vectors) * width * element))
        # Threads of several warps meet at barriers instead.
        shuffles = len(reductions) * math.log2(row_threads) if row_threads <= gpu.warp_size else 0
        is_bounded = vectors % row_threads > 0 and width * element == VECTOR_BYTES and not weights
        bounded = BOUNDED_VECTOR_CYCLES * width if is_bounded else 0.0
        # Lanes without a vector of a row that takes one turn.
        if steps == 1 and vectors % row_threads and row_threads <= gpu.warp_size:
            bounded += IDLE_LANES_CYCLES
        # Registers hold all loads of a row without bounds at once. With bounds, those of each operand are a branch.
        kept_rounds = load_rounds(steps * streams, width * element) if vectors % row_threads else 1
        if vectors % row_threads and streams > 1:
            bounded += streams * BRANCH_CYCLES
        if count % rows and row_threads > 1:
            bounded += BOUNDED_ROW_CYCLES * (steps if weights else min(steps, BOUNDED_ROW_LOADS))
        again = _stored_again(last, row_threads * width) if writes_rows else 0.0
        work = Work(
            blocks=-(-count // rows),
            threads=row_threads * rows,
            regs_per_thread=OTHER_REGISTERS + (steps * (-(-width * element // 4) + width) if is_kept else 4 * width),
            flops=(INSTRUCTION_FLOPS * instructions + sum(points(block) * ACCESS_FLOPS / width for block in space.blocks)) * waste,
            flops_per_s=gpu.simt_rate("float32"),
            dram_bytes=moved_bytes(space),
            l2_bytes=moved_bytes(space) * waste * (passes + 1) / 2 * (1.0 if is_kept else lines) + STORED_AGAIN * again,
            moved_smem_bytes=points(last) * 4 * (len(reductions) if row_threads > gpu.warp_size else 0)
            + LINE_SHARE * moved_bytes(space) * lines,
            rounds=(kept_rounds if is_kept else steps * passes)
            + WEIGHTS_SHARE * (load_rounds(weights * steps, width * element) if weights else 0),
            barriers=2 * len(reductions) if row_threads > gpu.warp_size else 0,
            serial_cycles=element_cycles * steps * width + shuffles * SHUFFLE_CYCLES + bounded,
            warp_cycles=WARP_CYCLES,
        )
        yield {"threads": row_threads, "rows": rows, "width": width, "in_registers": is_kept}, (work,)


def _stored_again(last: Block, elements: int) -> float:
    """Return the bytes of L2's sectors that results take besides their own where lanes store so many elements of a row at once.

    Each store of a warp then writes a part of a sector, or of one that it shares with the next rows.
    """
    element, size = dtype_bytes(last.writes[0].dtype), last.axes[-1].extent
    sector = min(SECTOR_BYTES, size * element)
    return points(last) * element * max(0.0, sector / (min(elements, size) * element) - 1)


def _weights(space: IterSpace, size: int) -> int:
    """Return how many arguments are as long as one row: what a norm scales its elements with, and adds to them."""
    arguments = {access.operand: access for block in space.blocks for access in block.reads if access.operand in space.inputs}
    return sum(math.prod(access.shape) == size for access in arguments.values())


def _divides_exactly(space: IterSpace) -> bool:
    """Say whether results are quotients of what was computed for each element, as a softmax's are, and compiled without fast math."""
    arguments = {access.operand: access.dtype for block in space.blocks for access in (*block.reads, *block.writes)}
    is_wide = any(dtype_bytes(arguments[name]) > FAST_MATH_BYTES for name in (*space.inputs, *space.outputs))
    last = space.blocks[-1]
    computed = {read.operand: read.shape for read in last.reads if read.operand not in space.inputs}
    # A norm's last step may read what was computed for each element alone; a softmax's reads the row's sum as well.
    return is_wide and len(computed) > 1 and last.writes[0].shape in computed.values()
