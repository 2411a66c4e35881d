"""Owns the one store that is left of an elementwise function, with all other blocks inlined into it.

Knows nothing of how a kernel divides it among threads.
"""

from __future__ import annotations

from tvm import IRModule, tirx
from tvm.s_tir import Schedule

from kerneldecl.templates.shared import blocks


def inlined_store(mod: IRModule) -> tuple[Schedule, tirx.BufferStore] | None:
    """Return the schedule with everything inlined into one spatial block, and what that stores; None where there is no such block."""
    sch = blocks.attempt(mod, _inlined)
    if sch is None:
        return None
    found = blocks.leaves(sch)
    assert found is not None
    store = sch.get(found[0].rv).body
    return (sch, store) if isinstance(store, tirx.BufferStore) else None


def _inlined(sch: Schedule) -> bool:
    blocks.inline_producers(sch)
    found = blocks.leaves(sch)
    return found is not None and len(found) == 1 and not found[0].block.is_reduction
