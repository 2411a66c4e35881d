"""Owns which tiles and kernel schedules of a gated GEMM on wgmma a GPU should try: those of a GEMM of both products' columns.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from kerneldecl.analysis.contraction import Contraction, contraction_of
from kerneldecl.analysis.hopper_limits import SWIZZLE_ROWS
from kerneldecl.model import Arch, Candidate, IterSpace, Proposal
from kerneldecl.policies import wgmma_matmul
from kerneldecl.policies.hopper.operands import are_tma_loadable
from kerneldecl.policies.hopper.tilings import Result

TEMPLATES = ("wgmma_matmul_gated",)
AUTO = {"cuda": 8}
HAS_TRACES = False

HALVES = 2
GATE_SECS = 1e-8
"""Seconds of a thread for each accumulator of its last tile, two of which and an activation make a result: 3 rows by 2488 columns of 64
took 2.06 us in tiles of 32 columns, 2.5 of 128, 2.9 of 256. Fitted to 87 tilings of five GEMMs (seed 43, H200, 2026-11)."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what is no gated GEMM or wgmma does not take."""
    gemm = gated_of(space)
    if gemm is None or wgmma_matmul.why_not(space, arch) or not are_tma_loadable(gemm):
        return ()
    return tuple(itertools.islice(_taken(gemm, space.blocks[-1].writes[0].dtype, arch), top_k))


def gated_of(space: IterSpace) -> Contraction | None:
    """Return the GEMM of both products, None where a function's last block does not make one result of two accumulators."""
    gemm, last = contraction_of(space), space.blocks[-1]
    if isinstance(gemm, str) or len(space.blocks) != HALVES or len(space.inputs) != HALVES:
        return None
    (accumulated,), (out,) = space.blocks[0].writes, last.writes
    *rows, columns = out.shape
    reads_it = all(read.operand == accumulated.operand for read in last.reads)
    return gemm if reads_it and accumulated.shape == (*rows, HALVES * columns) else None


def _taken(gemm: Contraction, out_dtype: str, arch: Arch) -> Iterator[Proposal]:
    for proposal in wgmma_matmul.of_gemm(gemm, Result(out_dtype, has_residual=False, accumulator_secs=GATE_SECS), arch.the_gpu, swaps=(0,)):
        params = dict(proposal.candidate.params)
        width = params["block_n"]
        assert isinstance(width, int)
        if params["split_k"] == 1 and not params["pack"] and width % (HALVES * SWIZZLE_ROWS) == 0:
            yield replace(proposal, candidate=Candidate.of("wgmma_matmul_gated", params))
