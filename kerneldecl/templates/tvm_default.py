"""Owns TVM's default schedules as a candidate: dlight's rules, in the order of TVM's own pipelines.

Knows nothing of any one operator, and chooses no parameter. It has none.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule
from tvm.s_tir import Schedule, dlight

from kerneldecl.compiler.cpu import target_of
from kerneldecl.model import Arch, Value

_GPU = ("Matmul", "GEMV", "Reduction", "GeneralReduction", "Fallback")
"""As `relax.backend.cuda` applies them."""
_CPU = ("GEMV", "Reduction")


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of the first rule that takes the function; on a CPU the function as it is where none does, as TVM leaves it."""
    del params
    target, rules = target_of(arch), [getattr(dlight.cpu, name)() for name in _CPU]
    if arch.gpu:
        rules = [getattr(dlight.gpu, name)() for name in _GPU]
    with target:
        for rule in rules:
            found = rule.apply(mod["main"], target, False)
            if found is not None:
                return found[0] if isinstance(found, list) else found
    return None if arch.gpu else Schedule(mod)
