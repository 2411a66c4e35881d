"""Owns how tests run fused kernels of rule attention on the emulated GPU, and judge their results.

Knows nothing of what parameters kernels have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from emulation import emulate, host

from kerneldecl.arrays import finite_rms, poisoned, relative_error, row_scales
from kerneldecl.compiler import canonical
from kerneldecl.model import Arch
from kerneldecl.plugins.load import load_rule
from support.attention_cases import SMALL
from support.repository import REPOSITORY


def rule_of(attrs: dict[str, Any]) -> Any:
    return load_rule(REPOSITORY, "attention").of(REPOSITORY, SMALL | attrs)


def results(template: ModuleType, attrs: dict[str, Any], params: dict[str, Any], arch: Arch, inputs: list[Any], seed: int = 1) -> list[Any]:
    """Return what the kernel makes of the inputs on the emulated GPU; it must leave them as they are."""
    rule = rule_of(attrs)
    mod = template.apply(canonical.lower(rule), params, arch)
    assert mod is not None
    after = emulate(mod["main"], *inputs, *map(poisoned, rule.signature().outputs), seed=seed)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(after, inputs, strict=False))
    return list(after[len(inputs) :])


def error(attrs: dict[str, Any], inputs: list[Any], got: list[Any]) -> float:
    """Return the largest error of all results by the rule's tolerance, measured as verification does: at most 1 is right."""
    rule = rule_of(attrs)
    with np.errstate(all="ignore"):
        reference = rule.reference(*inputs)
    wanted = [reference] if isinstance(reference, np.ndarray) else reference
    scales = [row_scales(want, finite_rms(want)) if rule.rows_vary() else None for want in wanted]
    any_for_nan = rule.nan_may_vanish()
    found = (relative_error(*each, any_for_nan=any_for_nan) for each in zip(got, wanted, scales, strict=True))
    return max(found) / float(rule.tolerance())


def flawed(monkeypatch: pytest.MonkeyPatch, flaw: Callable[[str], str]) -> None:
    """Have the emulator run kernels whose source a flaw has changed."""
    sound = host.lower

    def lower(func: Any, change: Callable[[Any], Any]) -> host.Lowered:
        lowered = sound(func, change)
        changed = replace(lowered, source=flaw(lowered.source))
        assert changed.source != lowered.source
        return changed

    monkeypatch.setattr(host, "lower", lower)


def growing_scores(attrs: dict[str, Any]) -> list[Any]:
    """Return inputs whose scores, of up to 1e4, grow towards the first keys: each block, from the last on, outgrows those before."""
    q, k, v = rule_of(attrs).inputs(np.random.default_rng(0))
    q[..., 0], k[..., 0] = 100, np.linspace(800, -800, k.shape[2], dtype=np.float16)
    return [q, k, v]
