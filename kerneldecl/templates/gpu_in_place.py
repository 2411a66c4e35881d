"""Owns the schedule on GPUs of functions of one block that writes its arguments at places that data tell, as a KV cache is.

Knows nothing of policies or of any one operator.

Parameters:
  threads  threads of a block
  width    adjacent points of the innermost axis that a thread computes with vectors; it divides that axis
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one spatial block, where it is; None where there are several, or the width does not divide."""
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    threads, width = (blocks.count(params, name) for name in ("threads", "width"))
    blocks.add_missing_loops(sch)
    found = blocks.leaves(sch)
    if found is None or len(found) != 1 or found[0].block.is_reduction:
        return False
    *outer, inner = sch.get_loops(found[0].rv)
    if blocks.extent(sch, inner) % width:
        return False  # TVM computes a vector with a predicate element by element
    vectors, lane = sch.split(inner, [None, width])
    grid, tx = sch.split(sch.fuse(*outer, vectors) if outer else vectors, [None, threads])
    sch.bind(grid, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    if width > 1:
        sch.vectorize(lane)
    return True
