"""Owns how tests run custom kernels of rules with one result on the emulated GPU, and judge their results.

Knows nothing of which template or rule it is, nor of what parameters kernels have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from emulation import emulate

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.model import Arch


def error(template: ModuleType, rule: Any, params: Mapping[str, Any], arch: Arch) -> float:
    """Return the error of the kernel's result by the rule's tolerance: at most 1 is right. The kernel must leave its inputs as they are."""
    mod = template.apply(canonical.lower(rule), params, arch)
    assert mod is not None
    inputs = rule.inputs(np.random.default_rng(0))
    want = rule.reference(*inputs)
    (out,) = rule.signature().outputs
    *after, got = emulate(mod["main"], *inputs, poisoned(out))
    assert all((one == other).all() for one, other in zip(after, inputs, strict=True))
    found, allowed = float(relative_error(got, want)), float(rule.tolerance())
    if not allowed:  # integers
        return math.inf if found else 0.0
    return found / allowed
