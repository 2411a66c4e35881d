"""Owns among how many thread blocks a long row should be shared on a GPU, in one kernel or two, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.split_rows import MAX_KEPT, RowSizes, SplitRowsParams, max_cluster, row_sizes_of, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import gpu_reduce, gpu_rowwise
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import (
    ACCESS_FLOPS,
    FAST_MATH_BYTES,
    LINE_BYTES,
    WARP_CYCLES,
    Timed,
    Work,
    load_rounds,
    ranked,
)
from kerneldecl.policies.gpu_rowwise import (
    DIVISION_CYCLES,
    INSTRUCTION_CYCLES,
    INSTRUCTION_FLOPS,
    OTHER_REGISTERS,
    SHUFFLE_CYCLES,
)

TEMPLATES = ("gpu_split_rows", "gpu_rowwise", "gpu_reduce")
AUTO = {"cuda": 58}
HAS_TRACES = False

BLOCK_THREADS = (32, 64, 128, 256, 512, 1024)
CLUSTERS = (1, 2, 4, 8)
WAVES = (1, 2)
"""Thread blocks of two kernels, by SMs."""
CLUSTER_SECS = 8e-7
"""Seconds in which the thread blocks of a cluster begin together and exchange statistics: as those of `gpu_attention_decode`."""
ELEMENT_INSTRUCTIONS = {"softmax": 6.0, "layer_norm": 8.0, "rms_norm": 5.0, "reduce": 2.0}
"""Instructions for an element: converted, compared or added, a power, scaled."""
WEIGHTS = {"softmax": 0, "layer_norm": 2, "rms_norm": 1, "reduce": 0}
"""Arguments as long as a row, which scale and shift."""
ENDS_CYCLES = 900.0
"""Cycles in which a whole row's first and last elements are accessed one by one: softmaxes of 37 x 1951 took 0.3 to 0.5 us more so than
where all elements are (H200, 2026-11)."""
SHUFFLES = 20
"""Shuffles of a warp: five for each of two statistics, before the exchange and after it."""
RIVAL_SLOWDOWN = 1.5
"""How much slower than the best of the other template may candidates be predicted, and still be tried: of 16 rows of 32 000 that one thread
block has in registers, the model expects half of what they take (H200, 2026-11)."""
MOST_ROWS_SHARE = 0.5
"""Rows by SMs at most: more of them leave few SMs idle."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return how to split rows, and the best of gpu_rowwise in turns; nothing where rows fill the SMs or splitting promises nothing."""
    sizes, gpu = row_sizes_of(space), arch.the_gpu
    if sizes is None or not takes(sizes) or (sizes.rows > MOST_ROWS_SHARE * gpu.sm_count and not is_odd(sizes)):
        return ()
    own = ranked("gpu_split_rows", gpu, (_timed(sizes, params, gpu) for params in choices(sizes, gpu)), top_k)
    whole = (gpu_reduce if sizes.kind == "reduce" else gpu_rowwise).propose(space, arch, top_k)
    first, second = sorted((own, whole), key=lambda found: min((proposal.predicted_secs for proposal in found), default=math.inf))
    rivals = [proposal for proposal in second if proposal.predicted_secs <= RIVAL_SLOWDOWN * first[0].predicted_secs] if first else []
    chosen = tuple(interleaved(first, rivals))[:top_k]
    return chosen if any(proposal.candidate.template == "gpu_split_rows" for proposal in chosen) else ()


def is_odd(sizes: RowSizes) -> bool:
    """Say whether vectors that divide rows, as gpu_rowwise has them, are narrower than they could be in rows that busy a warp."""
    return sizes.columns % sizes.most_width != 0 and sizes.columns >= WARP_LANES * sizes.most_width


def choices(sizes: RowSizes, gpu: Gpu) -> Iterator[SplitRowsParams]:
    """Yield the search space: rows in clusters where the GPU has them, in two kernels as fill the SMs, and odd rows whole."""
    widths = {sizes.most_width, math.gcd(sizes.columns, sizes.most_width), math.gcd(sizes.columns, sizes.most_width // 2)}
    for width, threads in itertools.product(sorted(widths, reverse=True), BLOCK_THREADS):
        fewest = -(-sizes.columns // (threads * MAX_KEPT))
        filling = {max(fewest, -(-waves * gpu.sm_count // sizes.rows)) for waves in WAVES} | {fewest}
        clusters = [(parts, parts) for parts in CLUSTERS if parts <= max_cluster(gpu) and (parts > 1 or is_odd(sizes))]
        for parts, cluster in (*clusters, *((parts, 1) for parts in sorted(filling) if parts > 1)):
            params = SplitRowsParams(width=width, threads=threads, parts=parts, cluster=cluster)
            if params.fits(sizes, gpu):
                yield params


def _timed(sizes: RowSizes, params: SplitRowsParams, gpu: Gpu) -> Timed:
    return params._asdict(), _works(sizes, params, gpu)


def _works(sizes: RowSizes, params: SplitRowsParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of one kernel, or of the statistics and the results."""
    element, elements = dtype_bytes(sizes.dtype), sizes.rows * sizes.columns
    read_bytes, written_bytes = elements * element, (sizes.rows if sizes.kind == "reduce" else elements) * dtype_bytes(sizes.out_dtype)
    kept = params.steps(sizes) * params.width
    waste = params.parts * params.threads * kept / sizes.columns
    instructions, weights = ELEMENT_INSTRUCTIONS[sizes.kind], WEIGHTS[sizes.kind] * params.steps(sizes)
    is_wide = max(element, dtype_bytes(sizes.out_dtype)) > FAST_MATH_BYTES
    element_cycles = INSTRUCTION_CYCLES * instructions + (DIVISION_CYCLES if sizes.kind == "softmax" and is_wide else 0.0)
    lines = max(1.0, LINE_BYTES / (min(params.threads, params.vectors(sizes)) * params.width * element))
    work = Work(
        blocks=sizes.rows * params.parts,
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + kept * (1 if sizes.kind == "softmax" else 0) + -(-kept * element // 4) * 2,
        smem_bytes=params.smem_bytes(sizes),
        flops=elements * (INSTRUCTION_FLOPS * instructions + 2 * ACCESS_FLOPS / params.width) * waste,
        flops_per_s=gpu.simt_rate("float32"),
        # Weights are loaded with the row, before its statistics.
        rounds=load_rounds(params.steps(sizes) + weights, params.width * element),
        barriers=1,
        serial_cycles=element_cycles * kept + SHUFFLES * SHUFFLE_CYCLES + (ENDS_CYCLES if params.parts == 1 else 0.0),
        warp_cycles=WARP_CYCLES,
    )
    if params.cluster == params.parts:
        meeting = CLUSTER_SECS * gpu.clock_hz if params.cluster > 1 else 0.0
        return (
            work._replace(
                dram_bytes=read_bytes + written_bytes,
                l2_bytes=(read_bytes + written_bytes) * waste * lines,
                serial_cycles=work.serial_cycles + meeting,
            ),
        )
    if sizes.kind == "reduce":
        combining = Work(blocks=sizes.rows, threads=params.threads, l2_bytes=4 * sizes.rows * params.parts, barriers=1)
        return work._replace(dram_bytes=read_bytes, l2_bytes=read_bytes * waste * lines), combining
    again = read_bytes if read_bytes > gpu.l2_bytes / 2 else 0
    return (
        work._replace(dram_bytes=read_bytes, l2_bytes=read_bytes * waste * lines),
        work._replace(dram_bytes=written_bytes + again, l2_bytes=(read_bytes + written_bytes) * waste * lines, rounds=work.rounds + 1),
    )
