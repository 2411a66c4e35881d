"""Owns which tilings of a transposed convolution on wgmma a GPU should try, and in which order: those of a convolution of every phase.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from kerneldecl.analysis.contraction import contraction_of
from kerneldecl.analysis.params import CONV_ALONE
from kerneldecl.model import Arch, Candidate, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import wgmma_conv2d
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.hopper.convolution import ALIGNED_ITEMS, ITEM_BYTES, SAME_TILE
from kerneldecl.policies.hopper.operands import first_reason, has_residual
from kerneldecl.policies.hopper.ranking import in_turns
from kerneldecl.policies.shared.transposed_conv import source_of, transposed_of
from kerneldecl.policies.wgmma_conv2d import Convolution, Problem, Tiling

TEMPLATES = ("wgmma_conv2d_transpose",)
KINDS = ("cuda",)
HAS_TRACES = False


class TransposedTiling(Tiling):
    """The parameters of template `wgmma_conv2d_transpose`: those of a convolution."""

    __slots__ = ()

    def candidate(self) -> Candidate:
        return self.candidate_of(TEMPLATES[0], CONV_ALONE)


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what the template does not take."""
    return tuple(itertools.islice(proposals(space, arch), top_k))


def proposals(space: IterSpace, arch: Arch) -> Iterator[Proposal]:
    """Yield what `propose` returns."""
    problem = _problem_of(space, arch)
    return iter(()) if isinstance(problem, str) else in_turns(best_first(_estimates(problem, space), SAME_TILE))


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why the template does not take a computation, as a sentence; empty where it does."""
    problem = _problem_of(space, arch)
    return problem if isinstance(problem, str) else ""


def _problem_of(space: IterSpace, arch: Arch) -> Problem | str:
    """Return a convolution of stride 1 that has every phase's results as images of their own; a sentence for other computations."""
    gemm = contraction_of(space)
    if isinstance(gemm, str):
        return gemm
    conv = transposed_of(space)
    if conv is None:
        return "it is not a transposed convolution"
    pixels, filters, padded = source_of(space, conv.block.reads[0]), conv.filters, conv.block.reads[0]
    out, phases = space.blocks[-1].writes[0], conv.stride**2
    is_last = filters.shape[2:] == (conv.channels, conv.f) and pixels.shape[3] == conv.channels == padded.shape[3]
    is_even = out.shape == (conv.images, conv.rows * conv.stride, conv.columns * conv.stride, conv.f)
    dtype = gemm.a.dtype
    reasons = (
        (dtype_bytes(dtype) != ITEM_BYTES, f"wgmma transposes 16-bit operands alone, and filters of {dtype} do not have k last"),
        (not is_last, "its channels are not last"),
        (not is_even, "its stride does not divide the sides of the result"),
        (conv.channels % ALIGNED_ITEMS > 0 or conv.f % ALIGNED_ITEMS > 0, f"its channels or filters are not multiples of {ALIGNED_ITEMS}"),
    )
    if reason := first_reason(gemm, arch.the_gpu, reasons):
        return reason
    all_phases = Convolution((conv.images * phases, conv.rows, conv.columns), (1, 1), conv.phase_taps, conv.channels)
    batch, m, n, k = gemm.extents
    return Problem(all_phases, replace(gemm, extents=(batch, m * phases, n // phases, k)), out.dtype, arch.the_gpu, has_residual(space))


def _estimates(problem: Problem, space: IterSpace) -> Iterator[Estimate]:
    """Yield the tilings of a convolution whose boxes have pixels of no more images than a phase has."""
    images = space.blocks[-1].writes[0].shape[0]
    for estimate in wgmma_conv2d.estimates(problem):
        tiling = TransposedTiling(*estimate.tiling)  # type: ignore[misc]
        if tiling.box[0] < 2 * images:
            yield estimate._replace(tiling=tiling)
