"""Owns TVM's target tags: the tag that a target names, and the tags that a target without a name can come from.

Knows nothing of archs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tvm


def named_tag(target: Any) -> str:
    """Return the tag that a target is or holds; empty where it names none. A Target made of a tag's text has forgotten it."""
    if isinstance(target, str):
        return target if target in tvm.target.list_tags() else ""
    return str(target.get("tag", "") if isinstance(target, Mapping) else getattr(target, "tag", ""))


def tags_like(attrs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tags whose targets have exactly these attributes, sorted: TVM gives many GPUs the same ones."""
    return _by_attrs().get(_identity(attrs), ())


@functools.cache
def _by_attrs() -> Mapping[frozenset[tuple[str, str]], tuple[str, ...]]:
    found: dict[frozenset[tuple[str, str]], list[str]] = {}
    for tag in sorted(tvm.target.list_tags()):
        target = tvm.target.Target(tag)
        if target.kind.name == "cuda":
            found.setdefault(_identity(target.attrs), []).append(tag)
    return {attrs: tuple(tags) for attrs, tags in found.items()}


def _identity(attrs: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((str(name), str(value)) for name, value in attrs.items())
