"""Owns the small attentions that their template for wgmma is tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: attributes and parameters that differ from the plain ones.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kerneldecl.model import Value

Case = tuple[dict[str, Any], dict[str, Value]]
"""Attributes of the rule, parameters of the template."""
SMS = 2
"""SMs of the GPU that kernels are built for: so few that CTAs have several tiles."""
PLAIN: dict[str, Value] = {
    "consumers": 2,
    "block_n": 64,
    "stages": 2,
    "q_stages": 1,
    "overlap": 1,
    "pingpong": 1,
    "heads_together": 2,
    "ctas_per_sm": 1,
    "cluster": 1,
    "fma_powers": 0,
    "pdl": 1,
}
SMALL: dict[str, Any] = {"batch": 1, "heads": 2, "queries": 65, "keys": 130, "head_dim": 64, "dtype": "float16"}
FLOAT8 = {"dtype": "float8_e4m3fn"}
ONE = {"consumers": 1, "pingpong": 0}
ATTENTIONS: dict[str, Case] = {
    "full": ({}, {}),
    "causal": ({"causal": True, "queries": 130}, {}),
    "causal, more queries than keys": ({"causal": True, "queries": 129, "keys": 65}, {}),
    "causal, fewer queries than keys": ({"causal": True, "queries": 1, "keys": 200}, ONE),
    "one key": ({"queries": 3, "keys": 1}, ONE),
    "63 of each": ({"queries": 63, "keys": 63}, ONE),
    "64 of each": ({"queries": 64, "keys": 64}, ONE),
    "head of 128, three consumers": (
        {"causal": True, "queries": 200, "keys": 200, "head_dim": 128},
        {"consumers": 3, "block_n": 32, "q_stages": 2},
    ),
    "head of 128, long blocks": ({"head_dim": 128, "keys": 300}, {"block_n": 128, "stages": 3}),
    "head of 40": ({"head_dim": 40, "heads": 3}, {"block_n": 48}),
    "head of 256": ({"head_dim": 256, "heads": 1, "causal": True, "queries": 130}, {"block_n": 80}),
    "head of 96, values of 40": ({"head_dim": 96, "value_dim": 40}, {"pingpong": 0}),
    "bshd, GQA, bfloat16": (
        {"layout": "bshd", "batch": 2, "heads": 4, "kv_heads": 2, "dtype": "bfloat16", "causal": True},
        {"q_stages": 2, "heads_together": 3, "pdl": 0},
    ),
    "one after the other": ({"causal": True, "queries": 130, "kv_heads": 1}, {"overlap": 0, "pingpong": 0}),
    "two CTAs on an SM": ({"queries": 300, "causal": True}, {**ONE, "ctas_per_sm": 2, "q_stages": 2}),
    "powers on CUDA cores": ({"causal": True, "queries": 70}, {"fma_powers": 3}),
    "clusters of heads": ({"causal": True, "queries": 150, "heads": 4, "kv_heads": 1}, {"cluster": 2, "heads_together": 4}),
    "clusters of rows": ({"queries": 300, "heads": 3}, {"cluster": 2, "block_n": 48, "stages": 3}),
    "four consumers": ({"queries": 300, "keys": 300, "heads": 1}, {"consumers": 4, "block_n": 32}),
    "in turns by scores": ({"causal": True, "queries": 200}, {"pingpong": 2}),
    "two ahead": ({"queries": 100, "keys": 500}, {"overlap": 2, "pingpong": 0}),
    "two ahead, causal": ({"causal": True, "queries": 300, "keys": 300}, {"overlap": 2, "pingpong": 0, "stages": 3}),
    "in turns, without overlap": ({"queries": 300}, {"overlap": 0, "stages": 3}),
    "window": ({"causal": True, "window": 70, "queries": 200, "keys": 300, "heads": 1}, {"block_n": 32, "stages": 3}),
    "window to both sides": ({"window": 40, "queries": 150, "keys": 260, "align": "start"}, {"block_n": 48}),
    "window, two ahead": ({"causal": True, "window": 100, "queries": 300, "keys": 300, "heads": 1}, {"overlap": 2, "pingpong": 0}),
    "window, more queries than keys": ({"window": 20, "queries": 200, "keys": 70, "align": "start", "logsumexp": True}, {}),
    "window, one query": ({"causal": True, "window": 20, "queries": 1, "keys": 300}, ONE),
    "aligned to the start": ({"causal": True, "align": "start", "queries": 200, "keys": 130}, {}),
    "aligned to the start, more keys": ({"causal": True, "align": "start", "queries": 100, "keys": 300}, ONE),
    "softcap": ({"softcap": 1.5, "causal": True}, {"fma_powers": 2}),
    "ALiBi": ({"alibi": True, "causal": True, "heads": 3, "dtype": "bfloat16"}, {"q_stages": 2}),
    "ALiBi to both sides": ({"alibi": True, "softcap": 2.0}, {"overlap": 0, "pingpong": 0}),
    "mask": ({"mask": True, "logsumexp": True}, {"cluster": 2}),
    "mask of heads": ({"mask": True, "mask_axes": "bhqk", "batch": 2, "causal": True, "mask_dtype": "float32", "queries": 128}, {}),
    "boolean mask": ({"mask": True, "mask_axes": "bqk", "mask_dtype": "bool", "keys": 129}, {"overlap": 2, "pingpong": 0, "block_n": 48}),
    "mask of keys": ({"mask": True, "mask_axes": "bk", "batch": 2, "heads": 1, "keys": 128}, ONE),
    "logsumexp": ({"logsumexp": True, "causal": True, "queries": 129, "keys": 65, "scale": 0.4}, {}),
    "packed": ({"layout": "packed", "keys": 0, "queries": 130, "heads": 4, "kv_heads": 2, "causal": True}, {"heads_together": 4}),
    "all at once": (
        {
            "layout": "packed",
            "keys": 0,
            "queries": 150,
            "heads": 2,
            "kv_heads": 1,
            "causal": True,
            "window": 60,
            "batch": 2,
            "softcap": 3.0,
            "alibi": True,
            "mask": True,
            "mask_axes": "bhqk",
            "logsumexp": True,
            "dtype": "bfloat16",
        },
        {"stages": 3, "block_n": 48},
    ),
    "float8": ({**FLOAT8, "keys": 97, "queries": 40}, ONE),
    "float8, heads of 128": (
        {**FLOAT8, "head_dim": 128, "causal": True, "queries": 130, "keys": 230, "out_dtype": "float16", "logsumexp": True},
        {"block_n": 96, "overlap": 2, "pingpong": 0},
    ),
    "float8, heads of 256": ({**FLOAT8, "head_dim": 256, "heads": 1, "queries": 130, "keys": 150}, {"block_n": 64}),
    "float8, heads of 48, values of 80": (
        {**FLOAT8, "head_dim": 48, "value_dim": 80, "keys": 300},
        {"block_n": 160, "fma_powers": 2, "pdl": 0},
    ),
    "float8, packed": (
        {**FLOAT8, "layout": "packed", "keys": 0, "queries": 70, "heads": 4, "kv_heads": 2, "batch": 2, "causal": True, "window": 30},
        {"block_n": 32, "q_stages": 2},
    ),
    "float8, biased": (
        {**FLOAT8, "mask": True, "mask_axes": "bqk", "alibi": True, "softcap": 2.0, "logsumexp": True, "layout": "bshd"},
        {"overlap": 0, "pingpong": 0},
    ),
    "values longer than keys": ({"head_dim": 64, "value_dim": 136, "causal": True}, {"block_n": 48, "q_stages": 2}),
}


@st.composite
def attributes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw attributes of a small attention of any kind that the rule takes."""
    small, flag, one_of = st.integers(1, 3), st.booleans(), st.sampled_from
    attrs: dict[str, Any] = {name: draw(flag, name) for name in ("causal", "mask", "alibi", "logsumexp")}
    attrs |= {name: draw(st.integers(1, 9), name) for name in ("queries", "head_dim")}
    attrs |= {"batch": draw(small), "kv_heads": draw(small), "window": draw(st.integers(0, 6)), "align": draw(one_of(["end", "start"]))}
    attrs |= {"heads": attrs["kv_heads"] * draw(small), "layout": draw(one_of(["bhsd", "bshd", "packed"]))}
    if attrs["layout"] != "packed":
        attrs |= {"keys": draw(st.integers(1, 9)), "value_dim": draw(st.integers(1, 9))}
    if attrs["mask"]:
        attrs["mask_axes"] = draw(one_of(["qk", "bqk", "hqk", "bhqk", "bk"]))
        attrs["mask_dtype"] = draw(one_of(["", "bool", "float32"]))
    attrs |= {"softcap": draw(one_of([0.0, 2.5])), "scale": draw(one_of([0.0, 1.0, 0.3]))}
    return {**attrs, "dtype": draw(one_of(["float16", "bfloat16", "float32", "float8_e4m3fn"]))}
