"""Owns how the policies for products on a GPU compete: by the times that they predict, so that measuring decides between them.

Knows nothing of tiles, of TVM or of what the policies know.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

from kerneldecl.analysis.contraction import contraction_of
from kerneldecl.model import Arch, IterSpace, Proposal, Value
from kerneldecl.policies import gpu_gemv, gpu_gemv_i4, gpu_matmul_tc, wgmma_conv2d, wgmma_matmul, wgmma_window
from kerneldecl.policies.gpu.gemm_tiles import mixed
from kerneldecl.policies.hopper.operands import are_tma_loadable

ON_TENSOR_CORES = (wgmma_matmul, wgmma_conv2d, wgmma_window, gpu_matmul_tc)
TEMPLATES = tuple(name for policy in (*ON_TENSOR_CORES, gpu_gemv) for name in policy.TEMPLATES)
AUTO = {"cuda": 10}
HAS_TRACES = False
TENSORISED = (*(name for policy in ON_TENSOR_CORES for name in policy.TEMPLATES), gpu_gemv_i4.TEMPLATE)
"""Templates that multiply on tensor cores, those for other computations than products of two matrices included."""

IN_DOUBT, IN_MORE_DOUBT = 1.4, 4.0
"""A policy takes part whose best is predicted to be slower than the best of all by no more, and a launch: models err, most of all
about operands that threads load."""
FIRST_OF_A_RIVAL = 20
TILE = frozenset({"block_m", "block_n", "rows", "columns", "tile_h", "tile_w"})
"""Parameters of templates that say which part of the result a block computes."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return what the policies for products propose; nothing for what tensor cores do not take.

    Candidates of the policy that predicts the least time come in its order, and every fourth one is of another policy that
    may be as good. Predictions of different models are not compared more closely than that.
    """
    gemm = contraction_of(space)
    if isinstance(gemm, str):
        return ()
    found = [_begun(policy.proposals(space, arch)) for policy in ON_TENSOR_CORES]
    if not any(found):
        return ()
    found.append(_begun(iter(gpu_gemv.propose(space, arch, top_k))))
    (least_secs, first), *others = sorted(filter(None, found), key=operator.itemgetter(0))
    uses_tma = are_tma_loadable(gemm)
    most_secs = (IN_DOUBT if uses_tma else IN_MORE_DOUBT) * least_secs + arch.the_gpu.launch_secs
    rivals = [_apart(proposals) for secs, proposals in others if secs <= most_secs]
    turns = (proposal for turn in itertools.zip_longest(*rivals) for proposal in turn if proposal is not None)
    return tuple(itertools.islice(mixed(first, turns), top_k))


def _apart(proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    """Yield proposals, of the first ones those before others whose tile has not come yet: a rival has few places, and its model errs."""
    tiles: dict[tuple[Value, ...], Proposal] = {}
    later = []
    for proposal in itertools.islice(proposals, FIRST_OF_A_RIVAL):
        tile = tuple(value for name, value in proposal.candidate.params if name in TILE)
        if tiles.setdefault(tile, proposal) is not proposal:
            later.append(proposal)
    yield from itertools.chain(tiles.values(), later, proposals)


def _begun(proposals: Iterator[Proposal]) -> tuple[float, Iterator[Proposal]] | None:
    """Return the least time of proposals, which is the first one's, and all of them; None where there are none."""
    first = next(proposals, None)
    return None if first is None else (first.predicted_secs, itertools.chain((first,), proposals))


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why tensor cores do not take a computation, as a sentence; empty where they do."""
    return wgmma_matmul.why_not(space, arch) and wgmma_conv2d.why_not(space, arch) and gpu_matmul_tc.why_not(space, arch)


def tensor_cores(space: IterSpace, arch: Arch, template: str) -> str:
    """Return "used" or why a winner with this template does without tensor cores; empty for what multiplies no two operands."""
    reductions = [block for block in space.blocks if block.is_reduction]
    if len(reductions) != 1 or len(reductions[0].reads) < 2:
        return ""
    if template in TENSORISED:
        return "used"
    # What competes with them may have won by its time; what is asked behind them has not.
    is_rival = template in TEMPLATES
    return why_not(space, arch) or f"no schedule for them that was tried is right{' and faster' * is_rival}"
