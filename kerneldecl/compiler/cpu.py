"""Owns how a candidate becomes machine code on a CPU: template applied, object file compiled, lines for TVM's database.

Knows nothing of rules, stores, measurements or processes.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir import meta_schedule
from tvm.tirx import compilation_pipeline

from kerneldecl.compiler.canonical import module_digest
from kerneldecl.compiler.passes import vector_math
from kerneldecl.compiler.passes.float8 import exact_float8
from kerneldecl.compiler.prim_funcs import is_tirx, specialised_digest, specialised_module
from kerneldecl.model import Arch, Candidate, Value
from kerneldecl.plugins.load import load_module

PASS_CONFIG = {"tirx.use_async_copy": True}
"""Options of TVM's that schedules of ours rely on: loops that ask for it (software_pipeline_async_stages) copy asynchronously."""


@dataclass(frozen=True)
class DatabaseLines:
    """What MetaSchedule's JSON database holds of one kernel: the forms of its workload, and its record without times."""

    workloads: tuple[str, ...]
    """Each a line of database_workload.json."""
    trace: Any
    target: Any
    args: Any


@dataclass(frozen=True)
class Applied:
    """What a candidate makes of a module."""

    mod: tvm.IRModule
    """Its function, scheduled, as `main`."""
    schedule: tvm.s_tir.Schedule | None
    """Whose trace leads there; None where the function is specialised."""

    @property
    def digest(self) -> str:
        """What stands for the scheduled module in keys."""
        return module_digest(self.mod) if self.schedule else specialised_digest(self.mod)


def apply_candidate(root: Path, mod: tvm.IRModule, candidate: Candidate, arch: Arch) -> Applied | None:
    """Return what the candidate's template makes of the module, None where it does not apply; raise as `applied` does."""
    made = load_module("templates", root, candidate.template).apply(mod, dict(candidate.params), arch)
    return None if made is None else applied(mod, made)


def applied(mod: tvm.IRModule, made: Any) -> Applied:
    """Return a schedule of the module, or what takes the module's place; raise TypeError or ValueError if it is neither."""
    if not isinstance(made, tvm.s_tir.Schedule | tvm.IRModule | tvm.tirx.PrimFunc):
        raise TypeError(f"{type(made).__name__} is no Schedule, IRModule or PrimFunc")
    if isinstance(made, tvm.s_tir.Schedule):
        return Applied(made.mod, made)
    return Applied(specialised_module(tvm.IRModule({"main": made}) if isinstance(made, tvm.tirx.PrimFunc) else made, mod), None)


def replays(schedule: tvm.s_tir.Schedule, mod: tvm.IRModule) -> bool:
    """Say whether a schedule's trace leads from the module to what the schedule holds; it may be one of another module."""
    again = tvm.s_tir.Schedule(mod)
    try:
        schedule.trace.apply_to_schedule(again, remove_postproc=False)
    except (RuntimeError, ValueError):
        return False
    return bool(tvm_ffi.structural_equal(again.mod, schedule.mod))


def target_of(arch: Arch) -> tvm.target.Target:
    return tvm.target.Target({name: _listed(value) for name, value in arch.tvm_target})


def _listed(value: Value) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def compile_object(mod: tvm.IRModule, arch: Arch, symbol: str) -> bytes:
    """Return the object file that holds the scheduled `main` as an exported function named `symbol`."""
    func = mod["main"].with_attr("global_symbol", symbol)
    library = tvm.tirx.build(tvm.IRModule({symbol: func}), target=target_of(arch), pipeline=PIPELINE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        library.write_to_file(str(path))
        return path.read_bytes()


def _of_both_kinds() -> Any:
    """Return TVM's pipelines for S-TIR and TIRx as one, which takes back what they promise of the arguments' alignment.

    Either refuses functions of the other kind, but a model may have both.

    TVM assumes that every argument starts at a multiple of 64 bytes. NumPy's arrays start at multiples of 16, slices of
    them anywhere; the kernel would crash. Loads of vectors from unaligned addresses are as fast where they are aligned.
    """
    pipelines = {flag: tvm.tirx.get_tir_pipeline(name) for flag, name in ((False, "s_tir"), (True, "tirx"))}

    def lowered(given: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        mod = exact_float8(given)
        done: dict[Any, Any] = {}
        with tvm.transform.PassContext(context.opt_level, config={**dict(context.config), **PASS_CONFIG}):
            for flag, (lower, *_rest) in pipelines.items():
                part = {name: func for name, func in mod.functions.items() if is_tirx(func) == flag}
                done |= dict(lower(tvm.IRModule(part, attrs=mod.attrs)).functions.items()) if part else {}
        return tvm.IRModule({name: func.with_body(_unaligned(func.body)) for name, func in done.items()}, attrs=mod.attrs)

    # Of both kinds, what follows the lowering is the same.
    return tvm.transform.module_pass(lowered, opt_level=0), *pipelines[False][1:]


def _unaligned(stmt: Any) -> Any:
    """Return the statement with every `storage_alignment` along its spine of sequences and attributes set to one byte."""
    if isinstance(stmt, tvm.tirx.SeqStmt):
        return tvm.tirx.SeqStmt([_unaligned(part) for part in stmt.seq])
    if not isinstance(stmt, tvm.tirx.AttrStmt):
        return stmt
    value = tvm.tirx.IntImm("int32", 1) if stmt.attr_key == "storage_alignment" else stmt.value
    return tvm.tirx.AttrStmt(stmt.node, stmt.attr_key, value, _unaligned(stmt.body))


PIPELINE = "kerneldecl"
"""The name of TVM's registry under which both kinds of function are lowered."""
vector_math.register()
compilation_pipeline.register_tir_pipeline(PIPELINE, _of_both_kinds)


def database_lines(schedule: tvm.s_tir.Schedule, mod: tvm.IRModule, arch: Arch) -> DatabaseLines:
    """Return the database's lines for a schedule of `mod`.

    Relax pipelines look a function up as they hold it: without attributes after LegalizeOps, with `op_pattern` after
    AnnotateTIROpPattern. The same trace is stored for both forms.
    """
    func = mod["main"].without_attr("global_symbol")
    annotated = relax.transform.AnnotateTIROpPattern()(tvm.IRModule({"main": func}))["main"]
    forms = (_normalized(func), _normalized(annotated))
    if not schedule.trace.insts:
        # TVM passes over a record without instructions; this one does nothing.
        schedule.get_sblock(func.body.block.name_hint)
    # TVM's own writer knows how to put index maps into JSON; its Python interface does not.
    with tempfile.TemporaryDirectory() as folder:
        database = meta_schedule.database.JSONDatabase(work_dir=folder)
        for form in forms:
            workload = database.commit_workload(form)
            args = meta_schedule.arg_info.ArgInfo.from_entry_func(form)
            database.commit_tuning_record(meta_schedule.database.TuningRecord(schedule.trace, workload, [1.0], target_of(arch), args))
        workloads = (Path(folder) / "database_workload.json").read_text(encoding="utf-8").splitlines()
        first = (Path(folder) / "database_tuning_record.json").read_text(encoding="utf-8").splitlines()[0]
    _, (trace, _, target, shapes) = json.loads(first)
    return DatabaseLines(tuple(dict.fromkeys(workloads)), trace, target, shapes)


def _normalized(func: Any) -> tvm.IRModule:
    return tvm.IRModule({"main": func.with_attr({"global_symbol": "main", "tirx.noalias": True})})
