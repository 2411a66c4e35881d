"""Owns the small attentions that their template for CUDA cores is tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: attributes, and parameters that differ from the plain ones.
"""

from __future__ import annotations

from kerneldecl.model import Value
from support.attention_cases import Case

PLAIN: dict[str, Value] = {"warps_m": 1, "warps_n": 2, "thread_m": 4, "thread_n": 4, "heads_together": 2}
FLOAT32: dict[str, Value] = {"dtype": "float32"}
ATTENTIONS: dict[str, Case] = {
    "full": (FLOAT32, {}),
    "causal": (FLOAT32 | {"causal": True, "queries": 130}, {"warps_m": 2, "thread_m": 8, "thread_n": 8}),
    "causal, more queries than keys": (FLOAT32 | {"causal": True, "queries": 129, "keys": 65}, {"warps_n": 1}),
    "causal, fewer queries than keys": (
        FLOAT32 | {"causal": True, "queries": 1, "keys": 200},
        {"warps_n": 8, "thread_m": 1, "thread_n": 2},
    ),
    "one key": (FLOAT32 | {"queries": 3, "keys": 1}, {}),
    "63 of each": (FLOAT32 | {"queries": 63, "keys": 63}, {"warps_m": 4}),
    "64 of each": (FLOAT32 | {"queries": 64, "keys": 64}, {"thread_m": 2}),
    "head of 128": (FLOAT32 | {"causal": True, "queries": 100, "keys": 100, "head_dim": 128}, {"warps_n": 4}),
    "head of 256": (FLOAT32 | {"head_dim": 256, "heads": 1, "causal": True, "queries": 70}, {"warps_n": 4, "thread_n": 2}),
    "head of 32": (FLOAT32 | {"head_dim": 32, "heads": 3}, {"warps_m": 2, "heads_together": 3}),
    "head of 42, values of 33": (FLOAT32 | {"head_dim": 42, "value_dim": 33, "causal": True}, {}),
    "head of 41, float16": ({"head_dim": 41, "causal": True, "queries": 70}, {}),
    "head of 40, values of 96, bfloat16": ({"head_dim": 40, "value_dim": 96, "dtype": "bfloat16"}, {"warps_n": 4}),
    "bshd, GQA": (FLOAT32 | {"layout": "bshd", "batch": 2, "heads": 4, "kv_heads": 2, "causal": True}, {"heads_together": 3}),
    "packed, GQA": (FLOAT32 | {"layout": "packed", "heads": 4, "kv_heads": 2, "queries": 65, "keys": 65}, {"warps_n": 4}),
    "additive mask": (FLOAT32 | {"mask": True}, {}),
    "additive and causal mask, bfloat16": ({"mask": True, "causal": True, "dtype": "bfloat16", "keys": 65}, {"warps_n": 1}),
    "mask of bool for each sequence and key": (FLOAT32 | {"mask": True, "mask_axes": "bk", "mask_dtype": "bool", "batch": 2}, {}),
    "mask of float16 for each head": (FLOAT32 | {"mask": True, "mask_axes": "hqk", "mask_dtype": "float16", "causal": True}, {}),
    "causal window": (FLOAT32 | {"causal": True, "window": 40, "queries": 150, "keys": 150}, {"warps_n": 4}),
    "window on both sides, aligned to the start": (FLOAT32 | {"window": 33, "align": "start", "queries": 200, "keys": 90}, {"thread_m": 8}),
    "slopes on both sides, softcap": (FLOAT32 | {"alibi": True, "softcap": 3.0, "heads": 3}, {}),
    "logsumexp": (FLOAT32 | {"logsumexp": True, "causal": True, "queries": 129, "keys": 65}, {"warps_n": 4}),
    "logsumexp, softcap": (FLOAT32 | {"logsumexp": True, "softcap": 20.0}, {}),
    "head of 300, values of 512": (
        FLOAT32 | {"head_dim": 300, "value_dim": 512, "heads": 1, "queries": 9, "keys": 40},
        {"warps_m": 2, "thread_m": 1, "thread_n": 2},
    ),
    "float8, head of 40": ({"dtype": "float8_e4m3fn", "head_dim": 40, "causal": True}, {"warps_n": 4}),
    "float8, head of 41, softcap": ({"dtype": "float8_e4m3fn", "head_dim": 41, "softcap": 3.0, "logsumexp": True}, {}),
    "results of float32": ({"out_dtype": "float32", "head_dim": 40}, {"warps_m": 4}),
    "results of bfloat16": (FLOAT32 | {"out_dtype": "bfloat16"}, {}),
}
