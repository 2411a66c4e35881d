"""Attention computes what its attributes say: beside plain loops in NumPy, for every kind of mask, and in blocks of rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.attention_cases import attributes
from support.repository import REPOSITORY

from kerneldecl.analysis.band import Band
from kerneldecl.arrays import Array, finite_rms, numpy_dtype, relative_error, row_scales
from kerneldecl.plugins.load import load_rule
from kerneldecl.rule import Rule


def rule(**attrs: Any) -> Any:
    instance = load_rule(REPOSITORY, "attention")(**attrs)
    assert list(instance.problems()) == []
    return instance


def is_seen(made: Any, i: int, j: int) -> bool:
    own = i + (made.keys or made.queries) - made.queries if made.align == "end" else i
    is_in_window = not made.window or abs(j - own) <= made.window
    return is_in_window and not (made.causal and j > own)


def plain(made: Any, inputs: list[Array]) -> tuple[Array, Array]:
    """Compute results and sums' logarithms one query at a time, over the keys that it sees alone."""
    named = {arg.name: x.astype(np.float64) if x.dtype != bool else x for arg, x in zip(made.signature().inputs, inputs, strict=True)}
    kv_heads, keys = made.kv_heads or made.heads, made.keys or made.queries
    if made.layout == "packed":
        named["Q"], named["K"], named["V"] = np.split(named["QKV"], (made.heads, made.heads + kv_heads), axis=2)
    q, k, v = (named[name] if made.layout == "bhsd" else named[name].transpose(0, 2, 1, 3) for name in "QKV")
    out = np.zeros((made.batch, made.heads, made.queries, v.shape[-1]))
    sums = np.full(out.shape[:3], -np.inf)
    for b, h, i in np.ndindex(*out.shape[:3]):
        scores = []
        for j in range(keys):
            score = q[b, h, i] @ k[b, h * kv_heads // made.heads, j] * (made.scale or made.head_dim**-0.5)
            score *= (named["q_scale"] * named["k_scale"])[0] if "q_scale" in named else 1.0
            score = made.softcap * math.tanh(score / made.softcap) if made.softcap else score
            if made.alibi:
                score -= named["slopes"][h] * abs(i + (keys - made.queries if made.align == "end" else 0) - j)
            if made.mask:
                added = np.broadcast_to(named["mask"], (made.batch, made.heads, made.queries, keys))[b, h, i, j]
                score = score + added if added.dtype != bool else score if added else -np.inf
            scores.append(score if is_seen(made, i, j) else -np.inf)
        if max(scores) > -np.inf:
            sums[b, h, i] = np.logaddexp.reduce(scores)
            out[b, h, i] = np.exp(np.array(scores) - sums[b, h, i]) @ v[b, h * kv_heads // made.heads]
    out *= named["v_scale"][0] if "v_scale" in named else 1.0
    return out if made.layout == "bhsd" else out.transpose(0, 2, 1, 3), sums


@given(attributes())
def test_any_attention_is_what_plain_loops_compute(attrs: dict[str, Any]) -> None:
    made = rule(**attrs)
    inputs = made.inputs(np.random.default_rng(1))
    got, sums = made.reference(*inputs) if made.logsumexp else (made.reference(*inputs), None)
    want, want_sums = plain(made, inputs)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    if sums is not None:
        np.testing.assert_allclose(sums, want_sums, rtol=1e-9, atol=1e-12)


@given(attributes())
def test_counts_leave_out_what_no_query_sees(attrs: dict[str, Any]) -> None:
    made = rule(**attrs)
    keys = made.keys or made.queries
    seen = {(i, j) for i, j in itertools.product(range(made.queries), range(keys)) if is_seen(made, i, j)}
    assert made.pairs() == len(seen)
    whole = sum(math.prod(arg.shape) * bytes_of(arg.dtype) for arg in made.signature().args)
    unseen = keys - len({j for _, j in seen})
    kv = made.batch * (made.kv_heads or made.heads) * unseen * (made.head_dim + (made.value_dim or made.head_dim)) * bytes_of(made.dtype)
    hidden = unseen if made.mask_axes == "bk" else made.queries * keys - len(seen)
    masks = math.prod(extent for axis, extent in (("b", made.batch), ("h", made.heads)) if axis in made.mask_axes)
    of_mask = masks * hidden * bytes_of(next(arg.dtype for arg in made.signature().inputs if arg.name == "mask")) if made.mask else 0
    assert made.least_bytes() == whole - kv - of_mask


def bytes_of(dtype: str) -> int:
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (4, 6), (6, 4)])
def test_a_band_knows_its_pairs_and_keys(queries: int, keys: int) -> None:
    limits = [None, *range(-7, 8)]
    for lower, upper in itertools.product(limits, limits):
        if lower is None or upper is None or lower <= upper:
            seen = [
                (i, j)
                for i, j in itertools.product(range(queries), range(keys))
                if (lower is None or j >= i + lower) and (upper is None or j <= i + upper)
            ]
            band = Band(lower, upper)
            assert band.pairs(queries, keys) == len(seen)
            for rows in filter(None, (range(queries), range(1, queries), range(1))):
                assert {j for i, j in seen if i in rows} == set(band.keys_of(rows, keys))


def test_blocks_of_rows_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rule(batch=1, heads=2, queries=9, keys=11, head_dim=4, causal=True, window=4, alibi=True, mask=True, logsumexp=True)
    inputs = made.inputs(np.random.default_rng(1))
    whole = made.reference(*inputs)
    monkeypatch.setitem(type(made)._compute.__globals__, "BLOCK_ELEMENTS", 23)
    for one, other in zip(whole, made.reference(*inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def with_rounded_powers(made: Any, inputs: list[Array], *, own: int = 0) -> Array:
    """Return what exact arithmetic gives of powers that are rounded to 16 bits, as tensor cores take them, rounded once more."""
    dtype = numpy_dtype(made.dtype)
    q, k, v = (x.astype(np.float64) for x in inputs)
    out = np.empty(q.shape)
    for b, h in np.ndindex(*q.shape[:2]):
        kv = h * made.kv_heads // made.heads
        scores = q[b, h] @ k[b, kv].T * made.head_dim**-0.5
        scores[np.triu_indices(made.queries, 1 + own)] = -np.inf
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[b, h] = powers.astype(dtype).astype(np.float64) @ v[b, kv] / powers.sum(axis=1, keepdims=True)
    return out.astype(dtype)


@pytest.mark.slow
def test_rounded_powers_pass_in_rows_of_few_keys_too() -> None:
    """Values of few keys cancel, and leave an error that is large beside the mean of all results, which are means of many keys."""
    made = rule(batch=1, heads=6, kv_heads=3, queries=1500, head_dim=128, causal=True, dtype="bfloat16")
    inputs = made.inputs(np.random.default_rng(6))
    want = made.reference(*inputs)
    scales = row_scales(want, finite_rms(want))
    assert made.rows_vary()
    assert relative_error(with_rounded_powers(made, inputs), want) > made.tolerance()
    assert relative_error(with_rounded_powers(made, inputs), want, scales) < made.tolerance() / 2
    assert relative_error(with_rounded_powers(made, inputs, own=1), want, scales) > 10 * made.tolerance()


def reference_with(made: Rule, name: str, place: tuple[Any, ...], value: float) -> Array:
    inputs = dict(zip((arg.name for arg in made.signature().inputs), made.inputs(np.random.default_rng(1)), strict=True))
    inputs[name][place] = value
    return np.asarray(made.reference(*inputs.values()))


def test_extreme_scores() -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "queries": 2, "keys": 5, "head_dim": 4, "dtype": "float32"}
    outlier = reference_with(rule(**sizes), "K", (0, 0, 3), 1e4)
    v = rule(**sizes).inputs(np.random.default_rng(1))[2]
    assert any(np.allclose(row, v[0, 0, 3]) for row in outlier[0, 0])  # one key has the whole weight, where its score is positive
    assert np.isfinite(outlier).all()
    masked = reference_with(rule(**sizes, mask=True), "mask", (0,), -np.inf)
    assert (masked[0, 0, 0] == 0).all()
    assert np.isnan(reference_with(rule(**sizes), "Q", (0, 0, 0, 0), np.nan)[0, 0, 0]).all()


def test_nan_of_keys_that_are_hidden_is_expected_where_a_kernel_may_show_it() -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "queries": 4, "head_dim": 4}
    hidden = reference_with(rule(**sizes, causal=True), "V", (0, 0, 3, 0), np.nan)
    assert np.isnan(hidden[..., 0]).all()
    assert np.isfinite(hidden[..., 1:]).all()
    assert rule(**sizes, causal=True).nan_may_vanish()
    assert rule(**sizes, mask=True).nan_may_vanish()
    assert not rule(**sizes, alibi=True, causal=True, keys=1, align="start").nan_may_vanish()
