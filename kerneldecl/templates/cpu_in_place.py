"""Owns the schedule on CPUs of functions of one block that writes its arguments at places that data tell, as a KV cache is.

Knows nothing of policies or of any one operator.

Parameters:
  parallel  True runs on all cores
  width     adjacent points of the innermost axis that are computed as vectors; what remains of the axis is computed one by one
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one spatial block, where it is; None where there are several."""
    del arch
    return blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    blocks.add_missing_loops(sch)
    found = blocks.leaves(sch)
    if found is None or len(found) != 1 or found[0].block.is_reduction:
        return False
    *outer, inner = sch.get_loops(found[0].rv)
    loop = blocks.vectorized(sch, inner, blocks.count(params, "width"))
    if params["parallel"]:
        sch.parallel(blocks.fused(sch, outer, found[0].rv) if outer else loop)
    return True
