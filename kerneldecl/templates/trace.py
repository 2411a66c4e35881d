"""Owns schedules that are given as TVM's traces: what MetaSchedule has found is replayed.

Knows nothing of where a trace comes from.

Parameters:
  trace   the trace as TVM's JSON, on one line, as a tuning record of MetaSchedule's database holds it
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tvm import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from kerneldecl.compiler.intrinsics.standard import register_intrinsics
from kerneldecl.model import Arch, Value


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule to which the trace leads; TVM raises where it does not apply to the function."""
    text = str(params["trace"])
    if '"Tensorize"' in text:
        register_intrinsics(arch.kind)
    sch = Schedule(mod)
    Trace.apply_json_to_schedule(json.loads(text), sch)
    return sch
