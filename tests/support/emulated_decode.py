"""Owns how tests run kernels of attention against a KV cache on the emulated GPU.

Knows nothing of what parameters kernels have, or of what is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from emulation import emulate

from kerneldecl.compiler import canonical
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch
from support.repository import REPOSITORY

H200 = load_arch(REPOSITORY, "h200")


def decoded(template: ModuleType, rule: Any, params: Mapping[str, Value], inputs: list[Any], seed: int) -> Any:
    """Return what a template's kernels make of the inputs on the emulated GPU; they must leave them as they are."""
    mod = template.apply(canonical.lower(rule), params, H200)
    assert mod is not None
    (out,) = rule.signature().outputs
    *after, got = emulate(mod["main"], *inputs, np.full(out.shape, np.nan, inputs[0].dtype), seed=seed)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(after, inputs, strict=True))
    return got
