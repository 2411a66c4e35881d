"""Owns how tests run kernels of GEMMs with packed 4-bit weights on the emulated GPU, and judge their results.

Knows nothing of which template they are of, nor of what parameters they have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from emulation import Kernel

from kerneldecl.arrays import numpy_dtype, relative_error
from kerneldecl.plugins.load import load_rule
from kerneldecl.rule import Rule
from support.compilers import compiled_cubin
from support.repository import REPOSITORY


def rule_of(attrs: dict[str, Any]) -> Rule:
    rule = load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, {"layout": "packed", **attrs})
    assert not list(rule.problems())
    return rule


def check(mod: Any, rule: Rule, *, has_prefetch: bool) -> None:
    """Check that a kernel computes what the rule does in two orders of threads, waits before it reads, and compiles without spills."""
    kernel = Kernel(mod["main"])
    # The emulator checks that L2 prefetches lie within the arguments.
    before, wait, behind = kernel.source.rpartition("__global__")[2].partition("griddepcontrol_wait()")
    assert wait
    assert ("::prefetch" in before) == has_prefetch
    assert "::multiply" in behind
    for seed in (1, 2):
        assert error(kernel, rule, seed) <= rule.tolerance()
    usage = compiled_cubin(kernel.source, "sm_90a").usage.values()
    assert not any(each.stack_bytes + each.spill_bytes for each in usage)


def error(kernel: Kernel, rule: Rule, seed: int = 1) -> float:
    """Return the relative error of a kernel's result."""
    [out] = rule.signature().outputs
    inputs = rule.inputs(np.random.default_rng(1))
    result = kernel(*inputs, np.full(out.shape, np.nan).astype(numpy_dtype(out.dtype)), seed=seed)[-1]
    return float(relative_error(result, np.asarray(rule.reference(*inputs))))
