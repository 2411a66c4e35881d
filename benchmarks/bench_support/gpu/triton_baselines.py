"""Owns Triton kernels to compare with: an autotuned GEMM, autotuned attention and a softmax, as users would first write them.

Knows nothing of how they are timed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from bench_support.gpu.timing import Call

TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 5))
"""block_m, block_n, block_k, warps, stages."""
ATTENTION_TILES = ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 3), (128, 32, 8, 3))
"""block_m, block_n, warps, stages."""
ATTENTION_CONFIGS = [triton.Config({"BM": m, "BN": n}, num_warps=warps, num_stages=stages) for m, n, warps, stages in ATTENTION_TILES]
BLOCKS = ((128, 256), (256, 128), (128, 128), (128, 64), (64, 128), (64, 64))
THOROUGH = tuple((m, n, *rest) for m, n in BLOCKS for rest in ((64, 8, 3), (64, 4, 4), (32, 8, 4), (32, 4, 5), (128, 8, 2)))
"""Thirty configurations; those that do not fit into shared memory are left out by Triton."""


# fmt: off
@triton.jit
def _matmul(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917  a kernel's arguments are its strides
    a, b, c, m, n, k, am, ak, bk, bn, cm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr  # noqa: ANN001, N803
):
    # fmt: on
    rows, columns = tl.cdiv(m, BM), tl.cdiv(n, BN)
    # Rasterization in groups of eight rows of tiles: blocks that run together share operands in L2.
    group = tl.program_id(0) // (8 * columns)
    height = min(rows - group * 8, 8)
    row = group * 8 + tl.program_id(0) % (8 * columns) % height
    column = tl.program_id(0) % (8 * columns) // height
    i, j, p = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    a_tile = a + (i % m)[:, None] * am + p[None, :] * ak
    b_tile = b + p[:, None] * bk + (j % n)[None, :] * bn
    accum = tl.zeros((BM, BN), dtype=tl.float32)
    for k_tile in range(tl.cdiv(k, BK)):
        inside = p < k - k_tile * BK
        accum = tl.dot(tl.load(a_tile, inside[None, :], 0.0), tl.load(b_tile, inside[:, None], 0.0), accum)
        a_tile += BK * ak
        b_tile += BK * bk
    tl.store(c + i[:, None] * cm + j[None, :], accum.to(c.dtype.element_ty), (i < m)[:, None] & (j < n)[None, :])


def _autotuned(tiles: Sequence[tuple[int, ...]]) -> Any:
    configs = [triton.Config({"BM": m, "BN": n, "BK": k}, num_warps=warps, num_stages=stages) for m, n, k, warps, stages in tiles]
    return triton.autotune(configs=configs, key=["m", "n", "k", "am", "bk"])(_matmul)


MATMULS = {"triton": _autotuned(TILES), "triton30": _autotuned(THOROUGH)}
"""The GEMM by the name of the rival: among few configurations, and among thirty, which takes half a minute to compile."""


@triton.jit
def _softmax(x, y, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    j = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + j
    row = tl.load(x + at, j < columns, float("-inf")).to(tl.float32)
    powers = tl.exp(row - tl.max(row, 0))
    tl.store(y + at, (powers / tl.sum(powers, 0)).to(y.dtype.element_ty), j < columns)


# fmt: off
@triton.autotune(configs=ATTENTION_CONFIGS, key=["rows", "keys", "D", "CAUSAL"])
@triton.jit
def _attention(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917  as above
    q, k, v, o, rows, keys, group, scale_log2, D: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr  # noqa: ANN001, N803
):
    # fmt: on
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, d = tile * BM + tl.arange(0, BM), tl.arange(0, D)
    own, cached = head * rows * D, head // group * keys * D
    queries = tl.load(q + own + i[:, None] * D + d[None, :], (i < rows)[:, None], 0.0)
    accum, total, highest = tl.zeros((BM, D), tl.float32), tl.zeros((BM,), tl.float32), tl.full((BM,), float("-inf"), tl.float32)
    end = tl.minimum((tile + 1) * BM, keys) if CAUSAL else keys
    for first in range(0, end, BN):
        j = first + tl.arange(0, BN)
        seen = (j < keys)[None, :] & ((j[None, :] <= i[:, None]) | (not CAUSAL))
        keys_tile = tl.load(k + cached + j[None, :] * D + d[:, None], (j < keys)[None, :], 0.0)
        scores = tl.where(seen, tl.dot(queries, keys_tile) * scale_log2, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        powers, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total = total * shrink + tl.sum(powers, 1)
        values = tl.load(v + cached + j[:, None] * D + d[None, :], (j < keys)[:, None], 0.0)
        accum = tl.dot(powers.to(v.dtype.element_ty), values, accum * shrink[:, None])
        highest = higher
    tl.store(o + own + i[:, None] * D + d[None, :], (accum / total[:, None]).to(o.dtype.element_ty), (i < rows)[:, None])


def baselines(rule_name: str, attrs: Mapping[str, Any], sets: Sequence[Sequence[Any]], name: str = "triton") -> dict[str, Call]:
    """Return a call that computes the same as the rule, where there is a kernel for it; `name` is one of `MATMULS`."""
    is_gemm = rule_name == "matmul" and attrs["dtype"] in {"float16", "bfloat16"} and attrs["accum_dtype"] != "float16"
    if is_gemm and not attrs["batch"] and not attrs["epilogue"]:
        return {name: lambda i: _run_matmul(MATMULS[name], attrs, *sets[i])}
    if rule_name == "softmax" and len(attrs["shape"]) == 2 and attrs["axis"] in {-1, 1}:
        return {name: lambda i: _run_softmax(*sets[i])}
    if rule_name == "attention" and _is_plain(attrs):
        return {name: lambda i: _run_attention(attrs, *sets[i])}
    return {}


def _run_matmul(matmul: Any, attrs: Mapping[str, Any], a: Any, b: Any, out: Any) -> Any:
    a, b = a if attrs["layout"][0] == "n" else a.mT, b if attrs["layout"][1] == "n" else b.mT
    m, n, k = out.shape[0], out.shape[1], a.shape[1]

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        return (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)

    matmul[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), out.stride(0))
    return out


def _is_plain(attrs: Mapping[str, Any]) -> bool:
    """Say whether an attention is one that the kernel computes: heads of a power of two, no bias, rows of queries enough for a tile."""
    is_square = attrs["keys"] in {0, attrs["queries"]} and attrs["value_dim"] in {0, attrs["head_dim"]}
    biases = ("mask", "window", "alibi", "softcap", "logsumexp", "out_dtype")
    is_known = attrs["dtype"] in {"float16", "bfloat16"} and attrs["head_dim"] in {64, 128, 256} and attrs["layout"] == "bhsd"
    return is_square and is_known and not any(attrs[name] for name in biases)


def _run_attention(attrs: Mapping[str, Any], q: Any, k: Any, v: Any, out: Any) -> Any:
    batch, heads, rows, columns = q.shape
    scale = (attrs["scale"] or columns**-0.5) * math.log2(math.e)

    def grid(meta: Mapping[str, int]) -> tuple[int, int]:
        return triton.cdiv(rows, meta["BM"]), batch * heads

    _attention[grid](q, k, v, out, rows, k.shape[2], heads // k.shape[1], scale, D=columns, CAUSAL=attrs["causal"])
    return out


def _run_softmax(x: Any, out: Any) -> Any:
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    _softmax[(rows,)](x, out, columns, BLOCK=block, num_warps=max(1, min(8, block // 256)))
    return out
