"""Owns samples of all parameters that attention's templates take on a GPU, whatever their policies think of them.

Knows nothing of how candidates are built, timed or judged.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench_support.gpu.kernels import Entry

PREFILL = {
    "consumers": (1, 2, 3, 4),
    "block_n": tuple(range(32, 225, 16)),
    "stages": (2, 3, 4),
    "q_stages": (1, 2),
    "overlap": (0, 1, 2),
    "pingpong": (0, 1, 2),
    "heads_together": (0,),  # one of those that the policy knows
    "ctas_per_sm": (1, 2, 3),
    "cluster": (1, 2),
    "fma_powers": (0, 1, 2),
    "pdl": (1,),
}
DECODE = {
    "rows": (8, 16, 32, 64),
    "block_n": (16, 32, 48, 64),
    "warps_m": (1, 2, 4, 8),
    "warps": (1, 2, 4, 6, 8, 12, 16),
    "stages": (2, 3, 4, 6, 8),
    "split_k": (0,),  # up to `MOST_PARTS` CTAs for each SM
    "blocks": (1, 2, 3, 4),
    "cluster": (1, 2, 4, 8),
}
DECODE_SIMT = {
    "rows": (1, 2, 3, 4, 5, 6, 8, 12, 16),
    "lanes": (4, 8, 16, 32),
    "unroll": (1, 2, 4, 8),
    "warps": (2, 4, 6, 8, 12, 16),
    "split_k": (0,),
    "blocks": (1, 2, 3, 4),
}
WGMMA_DECODE = {"stages": (2, 4, 6), "split_k": (0,), "cluster": (1, 2), "turns": (0, 1)}
MOST_PARTS = 4


def sample(entry: Entry, policy: str, count: int, seed: int = 0) -> tuple[Any, ...]:
    """Return so many candidates of a policy's template, each of all that fit as likely as any other; fewer where fewer fit."""
    from kerneldecl.compiler import canonical
    from kerneldecl.compiler.iter_space import iter_space
    from kerneldecl.plugins.load import load_rule

    rule = load_rule(entry.root, entry.workload.rule).of(entry.root, dict(entry.workload.attrs))
    found = list(_SPACES[policy](iter_space(canonical.lower(rule)), entry.arch.the_gpu))
    return tuple(params.candidate() for params in random.Random(seed).sample(found, min(count, len(found))))


def _points(axes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    for point in itertools.product(*axes.values()):
        yield dict(zip(axes, point, strict=True))


def _prefill(space: Any, gpu: Any) -> Iterator[Any]:
    from kerneldecl.analysis.attention import WgmmaAttentionParams, attention_of
    from kerneldecl.model import dtype_bytes
    from kerneldecl.policies.gpu.attention_tiles import heads_in_l2

    sizes = attention_of(space)
    assert sizes is not None, "the entry is an attention"
    together = {1, heads_in_l2(sizes, gpu), sizes.batch * sizes.heads}
    shares = sizes.band.is_full or sizes.group % 2 == 0
    for point in _points(PREFILL | {"heads_together": sorted(together)}):
        params = WgmmaAttentionParams(**point)
        fits = params.fits(sizes.head_dim, sizes.value_dim, sizes.bias_registers, dtype_bytes(sizes.dtype))
        if fits and (params.cluster == 1 or shares):
            yield params


def _splits(sizes: Any, gpu: Any, block_n: int) -> list[int]:
    """Return into how many parts keys may be cut, up to so many that each SM has `MOST_PARTS` of them, in powers of two and whole waves."""
    most = max(1, min(sizes.keys // block_n, MOST_PARTS * gpu.sm_count // (sizes.batch * sizes.kv_heads)))
    waves = (wave * gpu.sm_count // (sizes.batch * sizes.kv_heads) for wave in range(1, MOST_PARTS + 1))
    return sorted({split for split in (1, 2, 4, 8, 16, 32, 64, *waves) if 1 <= split <= most})


def _decode(space: Any, gpu: Any) -> Iterator[Any]:
    from kerneldecl.analysis.attention_decode import DecodeParams, decode_of

    sizes = decode_of(space)
    assert sizes is not None, "the entry is an attention of few queries"
    for point in _points(DECODE | {"split_k": _splits(sizes, gpu, min(DECODE["block_n"]))}):
        params = DecodeParams(**point)
        # A warp whose rows are not there, or that finds no block of keys, is no schedule.
        is_used = params.rows * (params.warps_m - 1) < sizes.group_rows and params.rows < 2 * max(8, sizes.group_rows)
        if params.fits(sizes, gpu) and is_used and params.block_n * params.groups * params.split_k <= sizes.keys:
            yield params


def _decode_simt(space: Any, gpu: Any) -> Iterator[Any]:
    from kerneldecl.analysis.attention_decode import decode_of
    from kerneldecl.analysis.attention_decode_simt import DecodeSimtParams

    sizes = decode_of(space)
    assert sizes is not None, "the entry is an attention of few queries"
    for point in _points(DECODE_SIMT | {"split_k": _splits(sizes, gpu, 1)}):
        params = DecodeSimtParams(**point)
        # A thread block without a row, or a warp that finds no block of keys, is of no use.
        is_used = params.rows <= sizes.group_rows and params.block_n * params.warps * params.split_k <= sizes.keys
        if params.fits(sizes, gpu) and is_used:
            yield params


def _wgmma_decode(space: Any, gpu: Any) -> Iterator[Any]:
    from kerneldecl.analysis.attention_decode import decode_of
    from kerneldecl.analysis.wgmma_decode import BLOCK_KEYS, WgmmaDecodeParams

    sizes = decode_of(space)
    assert sizes is not None, "the entry is an attention of few queries"
    for point in _points(WGMMA_DECODE | {"split_k": _splits(sizes, gpu, 2 * BLOCK_KEYS)}):
        params = WgmmaDecodeParams(**point)
        if params.fits(sizes):
            yield params


_SPACES: Mapping[str, Callable[[Any, Any], Iterator[Any]]] = {
    "wgmma_attention": _prefill,
    "gpu_attention_decode": _decode,
    "gpu_attention_decode_simt": _decode_simt,
    "wgmma_attention_decode": _wgmma_decode,
}
