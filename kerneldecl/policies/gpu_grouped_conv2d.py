"""Owns which kernels of a convolution in groups of few channels a GPU should try: on tensor cores, on CUDA cores, and in which order.

Knows nothing of TVM, nor of the time models, which are `gpu.grouped_conv_tiles` and `gpu.grouped_conv_tiles_simt`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable

from kerneldecl.analysis import grouped_conv
from kerneldecl.analysis.grouped_conv import GroupedConvSizes, grouped_conv_of
from kerneldecl.analysis.grouped_conv_params import GroupedConvParams, GroupedConvSimtParams
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal
from kerneldecl.policies import gpu_window
from kerneldecl.policies.gpu import grouped_conv_tiles, grouped_conv_tiles_simt
from kerneldecl.policies.gpu.gemm_tiles import interleaved

TEMPLATES = ("gpu_grouped_conv2d", "gpu_grouped_conv2d_simt", *gpu_window.TEMPLATES)
AUTO = {"cuda": 45}
HAS_TRACES = False

SAME_TILE = 3
"""Candidates of one tile that come before all others: the model may be wrong about it."""
MANY_BLOCKS = 3
"""Blocks of an SM from which on they hide one another's copies. One alone, or two, hide them by their own warps: tiles for that are a kind
of their own, since the model weighs the one against the other by assumption."""
RIVAL_SLOWDOWN = 1.5
"""How much slower than the best of all a kind's best may be predicted, apart from a launch, for the kind to take part: nothing is fitted
yet."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the candidates with the least predicted time, best first; every fourth is of a kind that may be as good.

    Nothing for what is no convolution in groups, or has dtypes that neither kernel takes.
    """
    sizes, gpu = grouped_conv_of(space), arch.the_gpu
    if sizes is None:
        return ()
    kinds = [
        *(() if grouped_conv.why_not(sizes, gpu) else _by_blocks(sizes, gpu)),
        () if grouped_conv.why_not_simt(sizes, gpu) else _ranked(grouped_conv_tiles_simt.timed(sizes, gpu)),
    ]
    if not any(kinds):
        return ()
    # Windows of depthwise convolutions share loads through L1 as well.
    kinds.append(gpu_window.propose(space, arch, top_k) if sizes.is_depthwise else ())
    first, *others = sorted(filter(None, kinds), key=lambda kind: kind[0].predicted_secs)
    most_secs = RIVAL_SLOWDOWN * first[0].predicted_secs + gpu.launch_secs
    rivals = [kind for kind in others if kind[0].predicted_secs <= most_secs]
    in_turn = (proposal for each in itertools.zip_longest(*rivals) for proposal in each if proposal is not None)
    return tuple(itertools.islice(interleaved(iter(first), in_turn), top_k))


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why neither kernel takes a computation, as a sentence; empty where one does."""
    sizes = grouped_conv_of(space)
    if sizes is None:
        return "it is no convolution of images in groups of channels"
    return grouped_conv.why_not(sizes, arch.the_gpu) and grouped_conv.why_not_simt(sizes, arch.the_gpu)


def _by_blocks(sizes: GroupedConvSizes, gpu: Gpu) -> list[tuple[Proposal, ...]]:
    """Return the candidates on tensor cores by how many blocks an SM has, the fastest first; of the others each tile once, then again."""
    found: dict[int, list[tuple[float, GroupedConvParams]]] = {}
    for secs, params in grouped_conv_tiles.timed(sizes, gpu):
        found.setdefault(min(MANY_BLOCKS, -(-params.tile(sizes).blocks // gpu.sm_count)), []).append((secs, params))
    return [_ranked(each, 1 if place else SAME_TILE) for place, each in enumerate(sorted(found.values(), key=min))]


def _ranked(timed: Iterable[tuple[float, GroupedConvParams | GroupedConvSimtParams]], same_tile: int = SAME_TILE) -> tuple[Proposal, ...]:
    """Return candidates with their times, the least first, but those beyond a few of one tile last."""
    seen: Counter[tuple[int, ...]] = Counter()
    first: list[Proposal] = []
    later: list[Proposal] = []
    for secs, params in sorted(each for each in timed if math.isfinite(each[0])):
        tile = params.rows, params.columns, params.block_n
        seen[tile] += 1
        (first if seen[tile] <= same_tile else later).append(Proposal(params.candidate(), secs))
    return (*first, *later)
