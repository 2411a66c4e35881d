"""Owns tuning of whole modules: a pass that schedules every PrimFunc that it can, and the database that spares doing it again.

Knows nothing of Relax: a module's other functions stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

from kerneldecl.compiler import intrinsics_cuda, intrinsics_i4
from kerneldecl.compiler.specialised import SCHEDULED, in_place_of, specialised_function
from kerneldecl.compiler.tensorir import canonical_module, load, module_digest
from kerneldecl.dlight.building import Result, apply_and_build, workers
from kerneldecl.dlight.device import CUDA, Target
from kerneldecl.dlight.policy import DefaultPolicy, TensorCorePolicy
from kerneldecl.dlight.tensorize import get_tensorized_func_and_tags
from kerneldecl.errors import TuningError
from kerneldecl.runners.local import LocalRunner

SPECIALISED = "specialised"
"""The folder, beside the database, of functions that no trace leads to."""


@tvm.transform.module_pass(opt_level=0, name="ApplyFastTuning")
class ApplyFastTuning:
    """Schedules each PrimFunc that is not scheduled yet by its best configuration; `ApplyFastTuning(…)(mod)` returns the module.

    Functions that have no iteration space or no right configuration stay unscheduled, for the next pass to take. What was
    measured is kept in a MetaSchedule database in the folder `meta_database_dir`, if one is given, functions without a trace
    beside it, and taken from there when it comes again; what was only ranked, for want of the GPU, is not. Compile the
    module with the pass option `tirx.use_async_copy`, without which copies that should overlap with computing do not.

    Under a target with arch sm_90a, products may become functions of TIRx, which use wgmma; compile the module for that
    target then, with `tir_pipeline=kerneldecl.relax.TIR_PIPELINE`.
    """

    def __init__(
        self, topk: int = 20, target: Target = None, parallel_build: bool = True, meta_database_dir: str | Path | None = None
    ) -> None:
        """Take the target, or the one that is current when the pass runs."""
        self.topk, self.target, self.parallel_build = topk, target, parallel_build
        self.meta_database_dir = meta_database_dir

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        device = CUDA(self.target or tvm.target.Target.current())
        database = _database(self.meta_database_dir)
        tuned = dict(mod.functions)
        with workers(parallel_build=self.parallel_build) as runner:
            for name, func in mod.functions.items():
                if isinstance(func, tvm.tirx.PrimFunc) and not (func.attrs or {}).get(SCHEDULED):
                    scheduled = self._scheduled(func, device, database, runner)
                    tuned[name] = func if scheduled is None else in_place_of(func, scheduled)
        return tvm.IRModule(tuned, attrs=mod.attrs)

    def _scheduled(self, func: Any, device: CUDA, database: JSONDatabase | None, runner: LocalRunner) -> Any:
        """Return the scheduled function; None where there is none."""
        mod = canonical_module(func)
        if (known := _replayed(mod, device, database)) is not None:
            return known
        kept = Path(self.meta_database_dir or "") / SPECIALISED / f"{module_digest(mod)}-{device.arch.name}.json"
        if device.is_for_wgmma and self.meta_database_dir is not None and kept.is_file():
            return load(json.loads(kept.read_text(encoding="utf-8"))["function"])["main"]
        try:
            best = self._best(func, device, runner)
        except (TuningError, TypeError, ValueError):  # no iteration space, arguments that are no arrays, nothing that is right
            return None
        if database is not None and best.latency is not None:
            if best.schedule is not None:
                workload = database.commit_workload(mod)
                args = ArgInfo.from_entry_func(workload.mod)
                database.commit_tuning_record(TuningRecord(best.schedule.trace, workload, [best.latency / 1e3], device.target, args))
            else:
                kept.parent.mkdir(exist_ok=True)
                kept.write_text(json.dumps({**vars(specialised_function(mod, best.mod)), "latency": best.latency}), encoding="utf-8")
        return best.mod["main"]

    def _best(self, func: Any, device: CUDA, runner: LocalRunner) -> Result:
        func, tags = get_tensorized_func_and_tags(func, device.target)
        configs = TensorCorePolicy(func, device, {**tags, "use_wgmma": int(device.is_for_wgmma)}).emit_config(self.topk) if tags else []
        if configs:
            try:
                return apply_and_build(func, configs, device, runner=runner)[1]
            except TuningError:
                pass  # CUDA cores are left
        return apply_and_build(func, DefaultPolicy(func, device).emit_config(self.topk), device, runner=runner)[1]


def _database(folder: str | Path | None) -> JSONDatabase | None:
    if folder is None:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Traces name intrinsics, which must be there when they are read.
    intrinsics_cuda.register_all()
    intrinsics_i4.register_all()
    return JSONDatabase(work_dir=str(folder), module_equality="structural")


def _replayed(mod: tvm.IRModule, device: CUDA, database: JSONDatabase | None) -> Any:
    """Return the function as the database has it scheduled for the device; None where it has not."""
    if database is None or not database.has_workload(mod):
        return None
    records = database.get_top_k(database.commit_workload(mod), len(database))
    best = next((record for record in records if str(record.target) == str(device.target)), None)  # TVM looks at no target
    if best is None:
        return None
    schedule = tvm.s_tir.Schedule(mod)
    best.trace.apply_to_schedule(schedule, remove_postproc=False)
    return schedule.mod["main"]
