"""Owns the small attentions against a KV cache that their template is tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: a rule, attributes and parameters that differ from the plain ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kerneldecl.model import Value
from kerneldecl.rule import Rule

Case = tuple[str, dict[str, Any], dict[str, Value]]
"""Rule, its attributes, parameters of the template."""
PLAIN: dict[str, Value] = {"rows": 8, "block_n": 16, "warps_m": 1, "warps": 2, "stages": 2, "split_k": 1, "blocks": 1, "cluster": 1}
SMALL: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "keys": 100, "head_dim": 64, "dtype": "float16"}
DECODE, PLAIN_ATTENTION = "attention_decode", "attention"
DECODES: dict[str, Case] = {
    "one query": (DECODE, {}, {}),
    "three parts of the keys": (DECODE, {"batch": 3}, {"split_k": 3, "stages": 3, "warps": 3}),
    "a cluster": (DECODE, {"batch": 1}, {"split_k": 2, "cluster": 2}),
    "clusters and parts": (DECODE, {"batch": 3}, {"split_k": 6, "cluster": 3}),
    "several queries, more rows than one block takes": (
        DECODE,
        {"queries": 3, "heads": 8, "dtype": "bfloat16", "layout": "bshd"},
        {"split_k": 2},
    ),
    "warps with rows of their own": (
        DECODE,
        {"queries": 9, "heads": 8, "page_size": 8, "keys": 96},
        {"warps": 4, "warps_m": 2, "rows": 16},
    ),
    "three warps in two groups": (
        DECODE,
        {"queries": 6, "heads": 8, "head_dim": 72},
        {"warps": 6, "warps_m": 3, "split_k": 2, "cluster": 2},
    ),
    "sixteen queries": (DECODE, {"queries": 16, "keys": 40}, {"rows": 32}),
    "pages, a block in each": (DECODE, {"page_size": 16, "keys": 112}, {"split_k": 2}),
    "pages of several blocks, more than needed": (
        DECODE,
        {"page_size": 32, "keys": 128, "layout": "bshd", "pages": 9},
        {"block_n": 16, "rows": 16, "stages": 3},
    ),
    "shared pages": (DECODE, {"page_size": 32, "keys": 128, "pages": 5}, {"block_n": 32}),
    "pages smaller than blocks": (DECODE, {"page_size": 8, "keys": 128}, {"split_k": 2, "cluster": 2}),
    "more pages than lanes": (DECODE, {"page_size": 2, "keys": 160}, {"warps": 1}),
    "blocks and pages that do not divide each other": (DECODE, {"page_size": 24, "keys": 120}, {"warps": 1}),
    "heads of 40": (DECODE, {"head_dim": 40}, {}),
    "heads of 72, values of 24": (DECODE, {"head_dim": 72, "value_dim": 24}, {"warps": 1}),
    "latent, in pages": (
        DECODE,
        {"latent": True, "head_dim": 96, "value_dim": 64, "kv_heads": 1, "heads": 20, "page_size": 16, "keys": 112},
        {"split_k": 3},
    ),
    "one key": (DECODE, {"keys": 1}, {}),
    "no lengths": (PLAIN_ATTENTION, {"queries": 1}, {"split_k": 2, "rows": 16}),
    "no lengths, causal": (PLAIN_ATTENTION, {"queries": 5, "causal": True}, {"split_k": 2, "rows": 16}),
    "no lengths, causal, more queries than keys": (PLAIN_ATTENTION, {"queries": 9, "keys": 3, "causal": True}, {"rows": 8}),
    "no lengths, all see all": (PLAIN_ATTENTION, {"queries": 16, "heads": 2, "layout": "bshd"}, {"split_k": 4, "cluster": 2, "rows": 16}),
}
RAGGED: dict[str, Any] = {"batch": 4, "page_size": 16, "keys": 64, "queries": 2, "kv_heads": 4, "pages": 16}


def ragged_inputs(rule: Rule) -> tuple[list[Any], Any]:
    """Return inputs of a rule with attributes RAGGED and its results: lengths 0, 1, 33, 64; NaN and wild numbers of pages beyond them."""
    q, k, v, table, lengths = rule.inputs(np.random.default_rng(0))
    lengths[:] = 0, 1, 33, 64
    want = rule.reference(q, k, v, table, lengths)
    for sequence, length in enumerate(lengths):
        pages = -(-length // 16)
        k[table[sequence, pages:]] = v[table[sequence, pages:]] = np.nan
        if length % 16:
            k[table[sequence, pages - 1], :, length % 16 :] = v[table[sequence, pages - 1], :, length % 16 :] = np.nan
        table[sequence, pages:] = -(2**31)
    return [q, k, v, table, lengths], want
