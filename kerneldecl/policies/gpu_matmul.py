"""Owns how the GEMM policies for GPUs compete: by the times that they predict, so that measuring decides between them.

Knows nothing of tiles, of TVM or of what the policies know.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterator

from kerneldecl.analysis.contraction import contraction_of
from kerneldecl.model import Arch, Candidate, IterSpace, Proposal, Value
from kerneldecl.policies import (
    gpu_gemv,
    gpu_gemv_i4,
    gpu_matmul_packed,
    gpu_matmul_scaled,
    gpu_matmul_tc,
    wgmma_conv2d,
    wgmma_conv2d_transpose,
    wgmma_matmul,
    wgmma_matmul_quantized,
    wgmma_window,
)
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.hopper.operands import are_tma_loadable

ON_TENSOR_CORES = (wgmma_matmul, wgmma_conv2d, wgmma_conv2d_transpose, wgmma_window, gpu_matmul_tc)
TEMPLATES = tuple(name for policy in (*ON_TENSOR_CORES, gpu_gemv) for name in policy.TEMPLATES)
AUTO = {"cuda": 10}
HAS_TRACES = False
TENSORISED = (
    *(name for policy in ON_TENSOR_CORES for name in policy.TEMPLATES),
    *gpu_matmul_packed.TEMPLATES,
    *gpu_matmul_scaled.TEMPLATES,
    *wgmma_matmul_quantized.TEMPLATES,
    gpu_gemv_i4.TEMPLATE,
)
"""Templates that multiply on tensor cores, those for quantised weights included."""

RIVAL_SLOWDOWN, RIVAL_SLOWDOWN_VIA_REGISTERS = 1.4, 4.0
"""How much slower than the best of all a policy's best candidate may be predicted, apart from a launch, for the policy to take part: models
err, most of all about operands that threads load through registers."""
RIVAL_CANDIDATES = 20
"""Candidates of a rival among which those with different tiles come first."""
TILE = frozenset({"block_m", "block_n", "rows", "columns", "tile_h", "tile_w"})
"""Parameters of templates that determine a block's tile of the result."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return what the GEMM policies propose; nothing for what tensor cores do not take.

    The policy that predicts the least time comes in its order, with rivals that may be as good in every fourth place. Predictions of
    different models are not compared more closely than that.
    """
    gemm = contraction_of(space)
    if isinstance(gemm, str):
        return ()
    found = [_with_least_secs(policy.proposals(space, arch)) for policy in ON_TENSOR_CORES]
    if not any(found):
        return ()
    found.append(_with_least_secs(iter(gpu_gemv.propose(space, arch, top_k))))
    (least_secs, first), *others = sorted(filter(None, found), key=operator.itemgetter(0))
    most_secs = (RIVAL_SLOWDOWN if are_tma_loadable(gemm) else RIVAL_SLOWDOWN_VIA_REGISTERS) * least_secs + arch.the_gpu.launch_secs
    rivals = [_different_tiles_first(proposals) for secs, proposals in others if secs <= most_secs]
    in_turn = (proposal for each in itertools.zip_longest(*rivals) for proposal in each if proposal is not None)
    return tuple(itertools.islice(interleaved(first, in_turn), top_k))


def candidates(space: IterSpace, arch: Arch) -> Iterator[Candidate]:
    """Yield what every GEMM policy proposes, however slow it is predicted; nothing for what tensor cores do not take."""
    if not isinstance(contraction_of(space), str):
        yield from (each.candidate for policy in ON_TENSOR_CORES for each in policy.proposals(space, arch))
        yield from (each.candidate for each in gpu_gemv.propose(space, arch, sys.maxsize))


def _different_tiles_first(proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    """Yield proposals; among the first ones, the best of each tile comes first: a rival has few places, and its model errs."""
    tiles: dict[tuple[Value, ...], Proposal] = {}
    later = []
    for proposal in itertools.islice(proposals, RIVAL_CANDIDATES):
        tile = tuple(value for name, value in proposal.candidate.params if name in TILE)
        if tiles.setdefault(tile, proposal) is not proposal:
            later.append(proposal)
    yield from itertools.chain(tiles.values(), later, proposals)


def _with_least_secs(proposals: Iterator[Proposal]) -> tuple[float, Iterator[Proposal]] | None:
    """Return the least predicted time, which is the first proposal's, and all proposals; None where there are none."""
    first = next(proposals, None)
    return None if first is None else (first.predicted_secs, itertools.chain((first,), proposals))


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why tensor cores do not take a computation, as a sentence; empty where they do."""
    return (
        wgmma_matmul.why_not(space, arch)
        and wgmma_conv2d.why_not(space, arch)
        and wgmma_conv2d_transpose.why_not(space, arch)
        and gpu_matmul_tc.why_not(space, arch)
    )


def _why_no_wgmma(space: IterSpace, arch: Arch) -> str:
    """Return why no policy takes a computation for wgmma on a GPU that has it; empty where one does, and on other GPUs."""
    policies = (wgmma_conv2d_transpose, wgmma_conv2d, wgmma_window, wgmma_matmul) if arch.the_gpu.wgmma_arch else ()
    reasons = [policy.why_not(space, arch) for policy in policies]
    # Policies of other kinds say what it is not; the one of its own says what does not fit.
    return next((reason for reason in reasons if not reason.startswith("it is ")), "") if all(reasons) else ""


def tensor_cores(space: IterSpace, arch: Arch, template: str) -> str:
    """Return "used", with a reason where it is not by the GPU's wgmma, or why a winner with this template does not use tensor cores.

    It is empty for what is no reduction of two operands.
    """
    reductions = [block for block in space.blocks if block.is_reduction]
    if len(reductions) != 1 or len(reductions[0].reads) < 2:
        return ""
    if template in TENSORISED:
        reason = _why_no_wgmma(space, arch) if template in gpu_matmul_tc.TEMPLATES else ""
        return f"used by mma.sync, not wgmma: {reason}" if reason else "used"
    # A rival template may have won by its time; one of a later policy wins only where no other is correct.
    is_rival = template in TEMPLATES
    return why_not(space, arch) or f"no schedule for them that was tried is correct{' and faster' * is_rival}"
