"""Owns what becomes of a model's functions without a kernel: TVM's default schedule, or a plain one where that does not do.

Knows nothing of artifacts, nor of how a compiled function is verified.

Each way is tried on the function alone, so that one function that TVM cannot schedule or compile does not cost the model. Plain on
a CPU is code without vector optimisations, in a library of its own that the model links: TVM's LLVM miscompiles some functions
for AVX-512 with them. Plain on a GPU is one thread a result or, if that fails too, one thread for everything.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule, dlight

from kerneldecl.compiler.canonical import load, save
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.prim_funcs import SCHEDULED
from kerneldecl.errors import ToolchainError
from kerneldecl.relax.calls import called_by_symbol

_LOG = logging.getLogger(__name__)
tvm_ffi.register_error(ToolchainError.__name__, ToolchainError)  # TVM calls passes from C++: unregistered errors become RuntimeError
_RAISED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, ToolchainError)
"""What TVM's passes and code generators raise on a function that they cannot take."""

Scheduling = Callable[[tvm.IRModule], tvm.IRModule]
Means = Literal["default", "plain"]


class Verdict(NamedTuple):
    """What verification says of a compiled function."""

    is_wrong: bool
    text: str


Verify = Callable[[Any, Any, str], Verdict]
"""Judges a compiled function: the function before any schedule, the library, and the symbol that it exports."""


@dataclass(frozen=True)
class Compiled:
    """How a function without a kernel is compiled."""

    means: Means
    reason: str
    """Why not by TVM's default schedule; empty where it is."""
    verdict: str
    """What verification found; empty where there was none."""

    def __str__(self) -> str:
        schedule = {"default": "TVM's default schedule", "plain": "a plain schedule"}[self.means]
        return "; ".join(filter(None, (schedule, self.reason, self.verdict)))


class _Way(NamedTuple):
    """A way to schedule and compile functions."""

    means: Means
    schedule: Scheduling
    target: tvm.target.Target | None
    """The target of a library of its own; None where the model compiles the function."""


class _Build(NamedTuple):
    """A function that was scheduled and compiled by itself."""

    func: Any
    symbol: str
    library: Any
    way: _Way


@tvm.transform.module_pass(opt_level=0, name="kerneldecl.DefaultSchedules")
class DefaultSchedules:
    """Schedules every PrimFunc that is not scheduled yet, by TVM's default schedule or else a plain one.

    `compiled` says how, by the functions' names. A function is compiled alone to see whether it can be, and verified where that is
    asked for; a wrong one is taken only where all ways are wrong, with a warning. Raise ToolchainError, with the function's name,
    where no way can be compiled.
    """

    def __init__(
        self, passes: Sequence[tvm.transform.Pass], verification: Callable[[], contextlib.AbstractContextManager[Verify]] | None = None
    ) -> None:
        """Take the passes of TVM's default schedules, and what gives the judge of compiled functions; without it, none is run."""
        self.passes, self.verification = passes, verification
        self.compiled: Mapping[str, Compiled] = {}

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        target = tvm.target.Target.current(allow_none=False)
        waiting = {
            var.name_hint: func for var, func in mod.functions.items() if isinstance(func, tirx.PrimFunc) and not _is_scheduled(func)
        }
        verification = self.verification() if self.verification and waiting else contextlib.nullcontext()
        with verification as verify:
            chosen = {name: _chosen(name, func, _ways(self.passes, target), verify) for name, func in sorted(waiting.items())}
        self.compiled = {name: compiled for name, (compiled, _) in chosen.items()}
        fresh = mod.clone()
        for name, (_, build) in chosen.items():
            fresh.update_func(mod.get_global_var(name), build.func)
        apart = {name: build for name, (_, build) in chosen.items() if build.way.target}
        return _with_libraries(fresh, apart) if apart else fresh


def _is_scheduled(func: Any) -> bool:
    return bool((func.attrs or {}).get(SCHEDULED))


def _ways(passes: Sequence[tvm.transform.Pass], target: tvm.target.Target) -> Iterator[_Way]:
    yield _Way("default", tvm.transform.Sequential(list(passes)), None)
    if target.kind.name == "llvm":
        yield _Way("plain", lambda mod: mod, tvm.target.Target({**dict(target.export()), "opt-level": 1}))
    else:
        yield _Way("plain", dlight.ApplyDefaultSchedule(dlight.gpu.Fallback()), None)
        yield _Way("plain", _on_one_thread, None)


def _chosen(name: str, func: Any, ways: Iterator[_Way], verify: Verify | None) -> tuple[Compiled, _Build]:
    reasons: list[str] = []
    wrong: list[tuple[Compiled, _Build]] = []
    for way in ways:
        build = _built(name, func, way)
        if isinstance(build, str):
            reasons.append(f"TVM cannot compile it: {build}")
            continue
        verdict = verify(func, build.library, build.symbol) if verify else Verdict(is_wrong=False, text="")
        found = Compiled(way.means, "; ".join(dict.fromkeys(reasons)), verdict.text), build
        if not verdict.is_wrong:
            return found
        wrong.append(found)
        reasons.append(f"TVM's code for it is wrong: {verdict.text}")
    if not wrong:
        raise ToolchainError(f"{name}: {reasons[0]}; declare an entry for it, or replace the operator")
    compiled, build = wrong[-1]
    _LOG.warning("%s differs from its reference however it is compiled: %s", name, compiled.verdict)
    return compiled, build


def _built(name: str, func: Any, way: _Way) -> _Build | str:
    """Return the function compiled by itself, or why it cannot be."""
    symbol = f"{name}_plain" if way.target else name
    # TVM's schedules may change in place what the model's own function refers to.
    own = load(save(tvm.IRModule({name: func.with_attr("global_symbol", symbol)})))
    try:
        mod = way.schedule(own)
        library = tirx.build(mod, target=way.target or tvm.target.Target.current(), pipeline=PIPELINE)
    except _RAISED as error:
        return _last_line(error)
    scheduled = mod[name]
    return _Build(scheduled if "global_symbol" in (func.attrs or {}) else scheduled.without_attr("global_symbol"), symbol, library, way)


def _last_line(error: Exception) -> str:
    """Return the sentence of an error of TVM, whose text may be a trace of C++ with the sentence at its end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def _on_one_thread(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with each statement of its function's root block as a kernel of one thread."""
    local = _with_local_buffers(mod)
    return tvm.IRModule({var: _with_kernels(func) for var, func in local.functions.items()}, attrs=mod.attrs)


def _with_local_buffers(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with those intermediates in local memory that one statement of the root block alone uses.

    TVM moves their allocation into the kernel, where none may be in global memory.
    """
    schedule = Schedule(mod)
    (name,) = (var.name_hint for var in mod.functions)
    schedule.work_on(name)
    root = schedule.get_sblock(mod[name].body.block.name_hint)  # an author may name it
    blocks = schedule.get_child_blocks(root)
    statements = [schedule.get(next(iter(schedule.get_loops(block)), block)) for block in blocks]
    alone: list[tuple[Any, int]] = []
    for buffer in schedule.get(root).alloc_buffers:
        users = [at for at, block in enumerate(blocks) if _uses(schedule.get(block), buffer)]
        if users and all(statements[at].same_as(statements[users[0]]) for at in users):
            alone.append(next((blocks[at], index) for at in users for index in _writes(schedule.get(blocks[at]), buffer)))
    for block, index in alone:
        schedule.set_scope(block, index, "local")
    return schedule.mod


def _writes(block: Any, buffer: Any) -> list[int]:
    return [index for index, region in enumerate(block.writes) if region.source.same_as(buffer)]


def _uses(block: Any, buffer: Any) -> bool:
    return any(region.source.same_as(buffer) for region in (*block.reads, *block.writes))


def _with_kernels(func: Any) -> Any:
    if not isinstance(func.body, SBlockRealize):
        raise ValueError("it is not made of blocks")  # noqa: TRY004  the function is at fault
    root = func.body.block
    parts = root.body.seq if isinstance(root.body, tirx.SeqStmt) else [root.body]
    kernels = [_bound(_bound(part, "threadIdx.x"), "blockIdx.x") for part in parts]
    body = kernels[0] if len(kernels) == 1 else tirx.SeqStmt(kernels)
    block = SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        body,
        root.init,
        alloc_buffers=root.alloc_buffers,
        match_buffers=root.match_buffers,
        annotations=root.annotations,
    )
    return func.with_body(SBlockRealize(func.body.iter_values, func.body.predicate, block)).with_attr(SCHEDULED, True)


def _bound(body: Any, thread: str) -> Any:
    """Return a statement in a loop of extent 1 that is bound to a thread axis."""
    var = tirx.Var(thread.replace(".", "_"), "int32")
    axis = tirx.IterVar(None, tirx.Var("", "int32"), tirx.IterVar.ThreadIndex, thread)
    return tirx.For(var, 0, 1, tirx.ForKind.THREAD_BINDING, body, axis)


def _with_libraries(mod: tvm.IRModule, apart: Mapping[str, _Build]) -> tvm.IRModule:
    """Return the module that calls functions in libraries of their own, with the libraries for `relax.build` to link."""
    called = called_by_symbol(mod, {name: build.symbol for name, build in apart.items()})
    for name in sorted(apart.keys() & {var.name_hint for var in called.functions}):
        _LOG.warning("%s keeps TVM's code where it is called otherwise than by call_tir, since only such calls reach a library", name)
    libraries = [*(mod.attrs or {}).get("external_mods", []), *(build.library for build in apart.values())]
    return called.with_attr("external_mods", libraries)
