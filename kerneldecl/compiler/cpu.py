"""Owns the way from a candidate to machine code on a CPU: template applied, object file compiled, lines for TVM's database.

Knows nothing of rules, stores, measurements or processes.
"""

from __future__ import annotations

import errno
import json
import os
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
from kerneldecl.compiler.passes.bool_operands import integer_bools
from kerneldecl.compiler.passes.float8 import exact_float8
from kerneldecl.compiler.passes.nan import ATTRIBUTE, nan_results
from kerneldecl.compiler.passes.registers import narrowed
from kerneldecl.compiler.prim_funcs import is_tirx, traceless_digest, traceless_module
from kerneldecl.compiler.rows import UPTO
from kerneldecl.model import Arch, Candidate, Value
from kerneldecl.plugins.load import load_module

PASS_CONFIG = {"tirx.use_async_copy": True}
"""TVM's options that the templates rely on: loops annotated with software_pipeline_async_stages copy asynchronously."""


@dataclass(frozen=True)
class DatabaseLines:
    """The rows of one kernel in MetaSchedule's JSON database: the forms of its workload, and its record without times."""

    workloads: tuple[str, ...]
    """Lines of database_workload.json."""
    trace: Any
    target: Any
    args: Any


@dataclass(frozen=True)
class ScheduledModule:
    """A module that a candidate was applied to."""

    mod: tvm.IRModule
    """The scheduled function as `main`."""
    schedule: tvm.s_tir.Schedule | None
    """The schedule whose trace leads to the module; None for a traceless function."""

    @property
    def digest(self) -> str:
        """The digest that stands for the scheduled module in keys."""
        return module_digest(self.mod) if self.schedule else traceless_digest(self.mod)


def apply_candidate(root: Path, mod: tvm.IRModule, candidate: Candidate, arch: Arch) -> ScheduledModule | None:
    """Return the module that the candidate's template gives, None where it does not apply; raise as `scheduled_module` does."""
    result = load_module("templates", root, candidate.template).apply(mod, dict(candidate.params), arch)
    return None if result is None else scheduled_module(mod, result)


def scheduled_module(mod: tvm.IRModule, result: Any) -> ScheduledModule:
    """Return a schedule of the module, or a function that implements it; raise TypeError or ValueError if `result` is neither."""
    if not isinstance(result, tvm.s_tir.Schedule | tvm.IRModule | tvm.tirx.PrimFunc):
        raise TypeError(f"{type(result).__name__} is no Schedule, IRModule or PrimFunc")
    if isinstance(result, tvm.s_tir.Schedule):
        return ScheduledModule(result.mod, result)
    implementation = tvm.IRModule({"main": result}) if isinstance(result, tvm.tirx.PrimFunc) else result
    return ScheduledModule(traceless_module(implementation, mod), None)


def replays(schedule: tvm.s_tir.Schedule, mod: tvm.IRModule) -> bool:
    """Say whether a schedule's trace, replayed on the module, gives the schedule's result; it may be one of another module."""
    replayed = tvm.s_tir.Schedule(mod)
    try:
        schedule.trace.apply_to_schedule(replayed, remove_postproc=False)
    except (RuntimeError, ValueError):
        return False
    return bool(tvm_ffi.structural_equal(replayed.mod, schedule.mod))


def target_of(arch: Arch) -> tvm.target.Target:
    return tvm.target.Target({name: _as_lists(value) for name, value in arch.tvm_target})


def _as_lists(value: Value) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def compile_object(mod: tvm.IRModule, arch: Arch, symbol: str) -> bytes:
    """Return the object file that holds the scheduled `main` as an exported function named `symbol`."""
    library = _library(mod, arch, symbol)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        library.write_to_file(str(path))
        return path.read_bytes()


def assembly(mod: tvm.IRModule, arch: Arch, symbol: str) -> str:
    """Return what `compile_object` compiles to, as assembly."""
    return str(_library(mod, arch, symbol).inspect_source("asm"))


def _library(mod: tvm.IRModule, arch: Arch, symbol: str) -> Any:
    func = mod["main"].with_attr("global_symbol", symbol)
    # TVM narrows indices whose extents it knows. Where it does not, its loop partitioning mixes widths.
    found = narrowed(tvm.IRModule({symbol: func})) if UPTO in (func.attrs or {}) else tvm.IRModule({symbol: func})
    return tvm.tirx.build(found, target=target_of(arch), pipeline=PIPELINE)


def _mixed_pipeline() -> Any:
    """Return one pipeline for modules of S-TIR and TIRx functions, which does not assume aligned arguments.

    TVM's own pipelines each refuse functions of the other kind, but a model may have both.

    TVM assumes that every argument is 64-byte aligned. NumPy's arrays are 16-byte aligned, slices of them not at all; the
    kernel would crash. Unaligned vector loads are as fast as aligned ones where the address is aligned.
    """
    pipelines = {flag: tvm.tirx.get_tir_pipeline(name) for flag, name in ((False, "s_tir"), (True, "tirx"))}

    def lowered(before: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        mod = integer_bools(exact_float8(before))
        done: dict[Any, Any] = {}
        with tvm.transform.PassContext(context.opt_level, config={**dict(context.config), **PASS_CONFIG}):
            for flag, (lower, *_rest) in pipelines.items():
                part = {name: func for name, func in mod.functions.items() if is_tirx(func) == flag}
                done |= dict(nan_results(lower(tvm.IRModule(part, attrs=mod.attrs))).functions.items()) if part else {}
        return tvm.IRModule({name: func.with_body(_unaligned(func.body)) for name, func in done.items()}, attrs=mod.attrs)

    # The passes after the lowering are the same for S-TIR and TIRx.
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
"""The name in TVM's registry of the pipeline for modules of S-TIR and TIRx functions."""
vector_math.register()
compilation_pipeline.register_tir_pipeline(PIPELINE, _mixed_pipeline)


def database_lines(schedule: tvm.s_tir.Schedule, mod: tvm.IRModule, arch: Arch) -> DatabaseLines:
    """Return the database's lines for a schedule of `mod`.

    Relax pipelines look a function up as they hold it: without attributes after LegalizeOps, with `op_pattern` after
    AnnotateTIROpPattern. The same trace is stored for both forms.
    """
    func = mod["main"].without_attr("global_symbol").without_attr(ATTRIBUTE)
    annotated = relax.transform.AnnotateTIROpPattern()(tvm.IRModule({"main": func}))["main"]
    forms = (normalized(func), normalized(annotated))
    if not schedule.trace.insts:
        # TVM skips a record without instructions; get_sblock is one that changes nothing.
        schedule.get_sblock(func.body.block.name_hint)
    # TVM's own writer can serialise index maps; its Python interface cannot.
    with tempfile.TemporaryDirectory() as folder:
        database = meta_schedule.database.JSONDatabase(work_dir=folder)
        for form in forms:
            workload = database.commit_workload(form)
            args = meta_schedule.arg_info.ArgInfo.from_entry_func(form)
            database.commit_tuning_record(meta_schedule.database.TuningRecord(schedule.trace, workload, [1.0], target_of(arch), args))
        workloads = _whole_lines(Path(folder) / "database_workload.json")
        first = _whole_lines(Path(folder) / "database_tuning_record.json")[0]
    _, (trace, _, target, shapes) = json.loads(first)
    return DatabaseLines(tuple(dict.fromkeys(workloads)), trace, target, shapes)


def _whole_lines(path: Path) -> list[str]:
    """Return the lines that TVM has written; raise OSError where it could not write all of them, which it does not look at."""
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return text.splitlines()


def normalized(func: Any) -> tvm.IRModule:
    """Return a function as MetaSchedule's databases hold it."""
    return tvm.IRModule({"main": func.with_attr({"global_symbol": "main", "tirx.noalias": True})})
