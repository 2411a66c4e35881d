"""Owns the small attentions that their template for mma.sync is tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: attributes and parameters that differ from the plain ones.
"""

from __future__ import annotations

from kerneldecl.model import Value
from support.attention_cases import FLOAT8, Case

PLAIN: dict[str, Value] = {
    "warps": 2,
    "fragments": 1,
    "block_n": 32,
    "stages": 2,
    "q_in_registers": 0,
    "heads_together": 2,
    "ctas_per_sm": 1,
    "fma_powers": 0,
}
ONE: dict[str, Value] = {"warps": 1}
ATTENTIONS: dict[str, Case] = {
    "full": ({}, {}),
    "causal": ({"causal": True, "queries": 130}, {}),
    "causal, more queries than keys": ({"causal": True, "queries": 129, "keys": 65}, {"fragments": 2}),
    "causal, fewer queries than keys": ({"causal": True, "queries": 1, "keys": 200}, ONE),
    "one key": ({"queries": 3, "keys": 1}, ONE),
    "63 of each": ({"queries": 63, "keys": 63}, ONE),
    "64 of each": ({"queries": 64, "keys": 64}, ONE),
    "one stage": ({"causal": True}, {"stages": 1}),
    "three stages, two fragments, queries in registers": ({"keys": 300}, {"stages": 3, "fragments": 2, "q_in_registers": 1}),
    "head of 128": ({"causal": True, "queries": 200, "keys": 200, "head_dim": 128}, {"warps": 4, "block_n": 64, "q_in_registers": 1}),
    "head of 40": ({"head_dim": 40, "heads": 3}, {"block_n": 48, "warps": 3}),
    "head of 40 in one stage": ({"head_dim": 40, "causal": True}, {"stages": 1, "fragments": 2}),
    "head of 256": ({"head_dim": 256, "heads": 1, "causal": True, "queries": 130}, {"warps": 4}),
    "head of 96, values of 40": ({"head_dim": 96, "value_dim": 40}, {}),
    "head of 40, values of 96": ({"head_dim": 40, "value_dim": 96}, {"warps": 4}),
    "bshd, GQA, bfloat16": (
        {"layout": "bshd", "batch": 2, "heads": 4, "kv_heads": 2, "dtype": "bfloat16", "causal": True},
        {"heads_together": 3, "block_n": 64},
    ),
    "powers on CUDA cores": ({"causal": True, "queries": 70}, {"fma_powers": 3}),
    "additive mask": ({"mask": True}, {"fragments": 2}),
    "additive and causal mask, bfloat16": ({"mask": True, "causal": True, "dtype": "bfloat16", "keys": 65}, {"stages": 1}),
    "mask of bool for each sequence and key": ({"mask": True, "mask_axes": "bk", "mask_dtype": "bool", "batch": 2}, {}),
    "mask of float32 for each head": ({"mask": True, "mask_axes": "hqk", "mask_dtype": "float32", "causal": True}, {"fragments": 2}),
    "causal window": ({"causal": True, "window": 40, "queries": 150, "keys": 150}, {}),
    "window on both sides, aligned to the start": ({"window": 33, "align": "start", "queries": 200, "keys": 90}, {"fragments": 2}),
    "causal, aligned to the start": ({"causal": True, "align": "start", "queries": 70, "keys": 200}, {"stages": 1}),
    "slopes": ({"alibi": True, "causal": True}, {}),
    "slopes on both sides, softcap": ({"alibi": True, "softcap": 3.0, "heads": 3}, {}),
    "logsumexp": ({"logsumexp": True, "causal": True, "queries": 129, "keys": 65}, {}),
    "logsumexp, softcap": ({"logsumexp": True, "softcap": 20.0}, {}),
    "packed, GQA": ({"layout": "packed", "heads": 4, "kv_heads": 2, "queries": 65, "keys": 65}, {"q_in_registers": 1}),
    "results of float32": ({"out_dtype": "float32", "head_dim": 40}, {}),
    "results of bfloat16": ({"out_dtype": "bfloat16"}, {}),
    "head of 512": (
        {"head_dim": 512, "heads": 1, "queries": 33, "keys": 70},
        {"warps": 1, "fragments": 2, "column_warps": 4, "block_n": 64, "stages": 1},
    ),
    "head of 384, causal, GQA, bfloat16": (
        {"head_dim": 384, "heads": 2, "kv_heads": 1, "queries": 37, "keys": 45, "causal": True, "dtype": "bfloat16"},
        {"column_warps": 4, "stages": 1, "q_in_registers": 1},
    ),
    "head of 320, mask": ({"head_dim": 320, "heads": 1, "queries": 18, "keys": 50, "mask": True}, {"column_warps": 2, "warps": 1}),
    "head of 264, of which 72 columns a warp": ({"head_dim": 264, "heads": 1, "queries": 17, "keys": 33}, {"column_warps": 4, "warps": 1}),
    "shared rows, causal window, logsumexp": (
        {"causal": True, "window": 40, "queries": 150, "keys": 150, "logsumexp": True},
        {"column_warps": 3, "block_n": 48, "fragments": 2, "stages": 3},
    ),
    "shared rows, values of 40, results of float32": (
        {"head_dim": 96, "value_dim": 40, "out_dtype": "float32", "queries": 70},
        {"column_warps": 2, "stages": 2},
    ),
    "shared rows, slopes, softcap": ({"alibi": True, "softcap": 3.0, "heads": 3}, {"column_warps": 2, "block_n": 64}),
    "parts of keys, causal, logsumexp": ({"causal": True, "queries": 100, "keys": 230, "logsumexp": True}, {"split_k": 3}),
    "parts of keys, bshd, GQA, results of float32": (
        {"layout": "bshd", "batch": 2, "heads": 4, "kv_heads": 2, "queries": 33, "keys": 70, "out_dtype": "float32", "value_dim": 24},
        {"split_k": 4, "stages": 1},
    ),
    "parts of keys, shared rows, mask, bfloat16": (
        {"head_dim": 272, "heads": 1, "queries": 37, "keys": 150, "mask": True, "dtype": "bfloat16"},
        {"split_k": 2, "stages": 1, "column_warps": 4, "fragments": 2, "warps": 1},
    ),
    "parts of keys, float8": (
        {**FLOAT8, "head_dim": 40, "queries": 33, "keys": 97, "logsumexp": True, "window": 30, "causal": True},
        {"split_k": 2, "stages": 1},
    ),
    "float8, head of 40, causal": ({**FLOAT8, "head_dim": 40, "causal": True, "queries": 70, "keys": 97}, {"stages": 1}),
    "float8, head of 64, GQA, bshd": (
        {**FLOAT8, "layout": "bshd", "heads": 4, "kv_heads": 2, "queries": 33, "keys": 65, "out_dtype": "float16", "logsumexp": True},
        {"stages": 1, "fragments": 2, "q_in_registers": 1, "block_n": 64},
    ),
    "float8, packed": (
        {**FLOAT8, "layout": "packed", "keys": 0, "queries": 70, "heads": 4, "kv_heads": 2, "causal": True, "window": 30},
        {"stages": 1, "warps": 3},
    ),
    "float8, biased, values of 72": (
        {**FLOAT8, "mask": True, "mask_axes": "bqk", "alibi": True, "softcap": 2.0, "head_dim": 56, "value_dim": 72},
        {"stages": 1, "block_n": 48},
    ),
    "float8, head of 320": (
        {**FLOAT8, "head_dim": 320, "heads": 1, "queries": 17, "keys": 40},
        {"stages": 1, "column_warps": 4, "warps": 1},
    ),
    "shared rows, more queries than keys": ({"causal": True, "queries": 129, "keys": 65}, {"column_warps": 4}),
}
