"""Owns the schedule on GPUs of matrix-vector products: each weight is read once, and unpacked in registers.

Knows nothing of policies or of how weights are packed.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates import _blocks, _gpu_blocks, _reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one reduction over a matrix and vectors, everything before it inlined, everything after it in its rows.

    Parameters as those of gpu_reduce; besides, a thread computes `tile` rows together and loads the vector once for them.
    """
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return _blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    found = _reductions.only_reduction(sch)
    if found is None or len(found[0].block.reads) < 2 or _reductions.is_across(found[0]) != params["across"]:
        return False
    return _gpu_blocks.reduction(sch, found, params)
