"""Owns the case that kernels are checked and timed with: a workload's random inputs, and what its reference makes of them.

Knows nothing of kernels or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kerneldecl.arrays import Array
from kerneldecl.model import Signature
from kerneldecl.plugins import load_rule


@dataclass(frozen=True)
class Case:
    """Inputs and expected outputs, in the signature's order."""

    signature: Signature
    inputs: tuple[Array, ...]
    """As the rule makes them."""
    expected: tuple[Array, ...]
    """Of the outputs' shapes; of a higher precision than theirs."""


def make_case(described: Mapping[str, Any]) -> Case:
    """Make the case from root, rule, attrs and seed."""
    root = Path(described["root"])
    rule = load_rule(root, described["rule"]).of(root, described["attrs"])
    signature = rule.signature()
    inputs = tuple(rule.inputs(np.random.default_rng(described["seed"])))
    found = rule.reference(*inputs)
    several = [found] if isinstance(found, np.ndarray) else list(found)
    expected = tuple(np.asarray(want).reshape(arg.shape) for want, arg in zip(several, signature.outputs, strict=True))
    return Case(signature, inputs, expected)
