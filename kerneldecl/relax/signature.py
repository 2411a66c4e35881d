"""Owns what a compiled model says about its functions: their inputs and outputs, and why arguments do not fit them.

Knows nothing of how a model is compiled or loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BIND = "kerneldecl_bind_"
"""Begins the name of the function that takes a function's weights and returns it."""
SIGNATURE = "kerneldecl_signature"
"""The function of a model that returns its description as JSON."""
WEIGHTS_DIGEST = "kerneldecl_weights_digest"


def weights_path(library: Path) -> Path:
    """Return where the weights of a library lie: model.weights.safetensors beside model.so."""
    return library.with_suffix(".weights.safetensors")


def signature_text(name: str, signature: Mapping[str, Any]) -> str:
    """Return a function's inputs as one would declare them: main(x: float32[1, 3, 32, 32])."""
    inputs = ", ".join(f"{each['name']}: {_type_text(each)}" for each in signature["inputs"])
    return f"{name}({inputs})"


def misfit(name: str, signature: Mapping[str, Any], given: Sequence[tuple[tuple[int, ...], str]]) -> str:
    """Return why arguments, each a shape and a dtype, do not fit a function, as one sentence; empty where they do."""
    inputs = signature["inputs"]
    expected = f"expected {signature_text(name, signature)}"
    if len(given) != len(inputs):
        return f"{len(given)} inputs were given; {expected}"
    sizes: dict[str, int] = {}
    for described, (shape, dtype) in zip(inputs, given, strict=True):
        is_there = described["shape"] is None or _fits(described["shape"], shape, sizes)
        if not is_there or described["dtype"] not in {None, dtype}:
            return f"input {described['name']} is {dtype}[{', '.join(map(str, shape))}]; {expected}"
    return ""


def _fits(extents: Sequence[int | str], shape: Sequence[int], sizes: dict[str, int]) -> bool:
    """Say whether a shape is the declared one; the size of a dimension with a name is noted where it is met first."""
    if len(extents) != len(shape):
        return False
    for extent, size in zip(extents, shape, strict=True):
        # An expression, such as n + 1, is left to the model's own check.
        expected = extent if isinstance(extent, int) else sizes.setdefault(extent, size) if extent.isidentifier() else size
        if size != expected:
            return False
    return True


def _type_text(described: Mapping[str, Any]) -> str:
    extents = "..." if described["shape"] is None else ", ".join(map(str, described["shape"]))
    return f"{described['dtype'] or 'any'}[{extents}]"
