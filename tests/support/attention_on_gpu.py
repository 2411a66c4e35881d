"""Owns which attentions both fused templates are tested with on a real GPU: lengths that divide nothing, and large ones.

Knows nothing of how they are run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from support.attention_cases import SMALL
from support.gpu_kernels import Case, Choice

LENGTHS = ((1, 1), (7, 1000), (63, 63), (64, 65), (65, 64), (1000, 1000), (129, 4097))
"""Queries, keys."""


def attention(name: str, choice: Choice, attrs: dict[str, Any], sms: int = 0) -> Case:
    return Case(name, "attention", SMALL | attrs, choice, sms)


def at_lengths(choice: Choice, heads: Iterable[tuple[dict[str, Any], str]], kinds: Iterable[dict[str, Any]]) -> list[Case]:
    """Return cases of all lengths, heads with their dtypes, and kinds."""
    return [
        attention(
            "-".join([*map(str, head.values()), f"{queries}x{keys}", *kind]),
            choice,
            {"batch": 2, "heads": 6, "kv_heads": 2, "queries": queries, "keys": keys, "dtype": dtype, **head, **kind},
        )
        for (head, dtype), (queries, keys), kind in itertools.product(heads, LENGTHS, kinds)
    ]


def large(choice: Choice, *more: dict[str, Any]) -> list[Case]:
    """Return large cases: full, causal, other heads and layouts, and with other attributes given."""
    sizes = {"batch": 1, "heads": 16, "kv_heads": 4, "queries": 2048, "keys": 2048, "head_dim": 128}
    kinds = ({}, {"causal": True}, {"head_dim": 64, "layout": "bshd", "causal": True}, {"layout": "bshd", "queries": 1999}, *more)
    return [attention("large", choice, {**sizes, **kind}) for kind in kinds]
