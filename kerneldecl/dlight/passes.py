"""Owns the tuning of whole modules: a pass that schedules every PrimFunc that it can, and the passes that a model needs before it.

Knows nothing of candidates, stores or artifacts' contents.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from kerneldecl.compiler.cpu import target_of
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.model_import.read_model import function_problem, fused
from kerneldecl.compiler.prim_funcs import SCHEDULED
from kerneldecl.dlight.device import CUDA, Target, arch_of
from kerneldecl.dlight.tuning import Tuned, file_of, tune_functions
from kerneldecl.errors import ToolchainError
from kerneldecl.model import Arch
from kerneldecl.relax.matching import Report, match
from kerneldecl.relax.passes import scheduled
from kerneldecl.relax.prebuilt import Prebuilt, read_prebuilt
from kerneldecl.store.scratch import scratch_folder

_LOG = logging.getLogger(__name__)
tvm_ffi.register_error(ToolchainError.__name__, ToolchainError)  # TVM calls passes from C++: unregistered errors become RuntimeError
_NOTHING = Prebuilt(Path(), "nothing tuned", ())


@tvm.transform.module_pass(opt_level=0, name="ApplyFastTuning")
class ApplyFastTuning:
    """Schedules each unscheduled PrimFunc by its best configuration; `ApplyFastTuning(…)(mod)` returns the module.

    The folder `meta_database_dir` keeps tuned schedules in a MetaSchedule database, which TVM's own passes open, and reuses them
    when a function comes again. It is also a workspace of kerneldecl: its store holds the records, its artifact the kernels.
    Without a folder nothing is kept.

    Under a target with arch sm_90a, GEMMs may become TIRx functions, which use wgmma and are in the artifact alone; then compile
    the module for that target, with `tir_pipeline=kerneldecl.relax.TIR_PIPELINE`.

    Where the GPU is not in this machine, the policies' models choose, and a warning is logged. Functions that cannot be
    scheduled, such as those of dynamic shape, stay as they are for the next pass; `report` holds the outcome of each.
    """

    report: Report | None = None

    def __init__(
        self, topk: int = 20, target: Target = None, parallel_build: bool = True, meta_database_dir: str | Path | None = None
    ) -> None:
        """Take a GPU or a CPU as `kerneldecl.dlight.device.arch_of` does, by default the target that is current when the pass runs."""
        if type(topk) is not int or topk < 1:
            raise ValueError(f"topk is {topk!r}; expected an integer above 0")
        self.topk, self.target, self.parallel_build = topk, target, parallel_build
        self.meta_database_dir = meta_database_dir

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        target = self.target or tvm.target.Target.current(allow_none=True)
        arch = arch_of(target)
        waiting = {name: func for name, func in _prim_funcs(mod).items() if _needs_schedule(func)}
        problems = {name: problem for name, func in waiting.items() if (problem := function_problem(func))}
        functions = _distinct({name: func for name, func in waiting.items() if name not in problems})
        with scratch_folder() as scratch:
            root = Path(self.meta_database_dir or scratch).resolve()
            jobs = None if self.parallel_build else 1
            settings = {"top_k": self.topk, "policy": _policy(target, arch)}
            tuned = tune_functions(root, arch, functions, settings, jobs) if functions else Tuned(None, {}, "")
            found = match(mod, read_prebuilt(tuned.artifact, target_of(arch)) if tuned.artifact else _NOTHING)
        failed = {name: tuned.failures[path] for name, func in functions.items() if (path := file_of(func)) in tuned.failures}
        self.report = _with_reasons(found, problems | failed)
        self._log(tuned.unmeasured)
        return scheduled(mod, found.hits)

    def _log(self, unmeasured: str) -> None:
        assert self.report is not None
        if not self.report.matches:
            _LOG.warning("the module has no PrimFunc to tune; apply_opt_before_tuning lowers a model's operators to PrimFuncs")
        if unmeasured and self.report.hits:
            _LOG.warning("nothing was measured: %s; the policies' models chose", unmeasured)
        _LOG.log(logging.WARNING if self.report.missed else logging.INFO, "%s", self.report)


def apply_opt_before_tuning(mod: tvm.IRModule, params: Mapping[str, Any] | None = None, target: Target = None) -> tvm.IRModule:
    """Return a Relax module of operators as one of fused PrimFuncs and their calls, which `ApplyFastTuning` tunes.

    `params` are arrays by the names of functions' arguments: these arguments become constants, and expressions of constants are
    folded. Arguments without an array stay.
    """
    built_for = target_of(arch_of(target or tvm.target.Target.current(allow_none=True)))
    return fused(_bound(mod, params or {}), built_for)


def _bound(mod: tvm.IRModule, params: Mapping[str, Any]) -> tvm.IRModule:
    """Return the module with arrays in place of arguments; raise ValueError for those that no function has."""
    public = (item for item in mod.functions_items() if isinstance(item[1], relax.Function) and "global_symbol" in (item[1].attrs or {}))
    arguments = {var.name_hint: [param.name for param in func.params] for var, func in public}
    if unknown := sorted(params.keys() - {name for names in arguments.values() for name in names}):
        there = "; ".join(f"{function} has {', '.join(names)}" for function, names in arguments.items())
        raise ValueError(f"no function has an argument {', '.join(unknown)}; {there or 'there is no Relax function'}")
    for function, names in arguments.items():
        mod = relax.transform.BindParams(function, {name: _tensor(params[name]) for name in names if name in params})(mod)
    return mod


def _tensor(value: Any) -> Any:
    return value if isinstance(value, tvm.runtime.Tensor) else tvm.runtime.tensor(value)


def _needs_schedule(func: Any) -> bool:
    """Say whether a function has no schedule yet and is not a view, which needs no kernel."""
    return not (func.attrs or {}).get(SCHEDULED) and not relax.analysis.has_reshape_pattern(func)


def _prim_funcs(mod: tvm.IRModule) -> dict[str, Any]:
    found = {var.name_hint: func for var, func in mod.functions.items() if isinstance(func, tvm.tirx.PrimFunc)}
    return dict(sorted(found.items()))


def _policy(target: Target, arch: Arch) -> str:
    """Return `auto`, or for targets without wgmma `traced`: traceless kernels can be compiled for wgmma's arch alone."""
    return "traced" if arch.gpu and not CUDA(target).is_for_wgmma else "auto"


def _distinct(functions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first of each group of functions that one kernel implements."""
    first: dict[str, tuple[str, Any]] = {}
    for name, func in functions.items():
        first.setdefault(match_digest(func), (name, func))
    return dict(first.values())


def _with_reasons(report: Report, reasons: Mapping[str, str]) -> Report:
    """Return the report with the reasons why tuning gave no kernel for a function."""
    missed = {match.function for match in report.missed} & reasons.keys()
    matches = (replace(m, outcome="miss", kernel=None, reason=reasons[m.function]) if m.function in missed else m for m in report.matches)
    return Report(report.artifact, tuple(matches), ())
