"""Owns the worker process: it reads one request a line, answers each with a line, and imports what a request needs.

Knows nothing of time limits, of other workers or of what is done with the answers. `runners/environment.py` runs its `main` with
arguments DESCRIPTOR [MODULE]; the descriptor is the pipe whose closing ends this process, and
MODULE is imported before the first request.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kerneldecl.runners.reasons import reason_of

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  pathlib is not imported yet
# Each request names an action; the module that has it is imported when it is first requested.
COMPILING = "kerneldecl.compiler.actions"
_OTHERS = {
    "cpu": "kerneldecl.runners.cpu",
    "cuda": "kerneldecl.runners.cuda",
    "export": "kerneldecl.export.actions",
    "model": "kerneldecl.deploy.actions",
    "policy": "kerneldecl.tuning.propose",
    "rpc": "kerneldecl.runners.rpc",
}
"""Modules with the actions that measure kernels, export them, run models or ask policies, by `device`; requests to compile name none."""


def main() -> None:
    """Answer requests until standard input ends."""
    _die_with_parent(int(sys.argv[1]))
    _bound_memory(int(os.environ.pop("KERNELDECL_MEMORY_BYTES", "0")))
    # What rules, compilers or kernels print must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for module in sys.argv[2:]:
        imported(module)
    for line in sys.stdin:
        answer = _answered(json.loads(line))
        with contextlib.suppress(Exception):  # a plug-in may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _die_with_parent(lifeline: int) -> None:
    """Have the kernel send SIGIO, which ends a process, when the other end of the pipe closes."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if os.getppid() == 1:
        sys.exit("the build ended before its worker began")


def _bound_memory(limit_bytes: int) -> None:
    """Bound what this process and each of its children may write to. Address space that CUDA reserves does not count."""
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _answered(request: dict[str, Any]) -> dict[str, Any]:
    device = request.pop("device", None)
    module = imported(_OTHERS[device] if device else COMPILING)
    action: Callable[..., dict[str, Any]] = getattr(module, request.pop("action"))
    try:
        return action(**request)
    except Exception as error:  # noqa: BLE001  whatever a rule, a template or a compiler raises is the candidate's failure
        failure = f"{_place(error, request)}{type(error).__name__}: {reason_of(str(error))[:300]}"
        return {"failure": failure, "diagnostics": traceback.format_exc()[-2000:], "is_last": getattr(error, "is_fatal", False)}


def _place(error: Exception, request: dict[str, Any]) -> str:
    """Return file and line in the workspace where a plug-in failed, as `rules/mine.py:12: `; nothing where kerneldecl itself did."""
    root = str(request.get("spec", request).get("root", ""))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if root and frame.filename.startswith(f"{root}/")]
    own = [frame for frame in frames if not frame.filename.startswith(f"{_PACKAGE}/")]  # a workspace may hold kerneldecl itself
    return f"{own[-1].filename.removeprefix(f'{root}/')}:{own[-1].lineno}: " if own else ""


def imported(name: str) -> ModuleType:
    """Import a module, but not torch with it: tvm_ffi and TVM do so where it is installed, which takes a worker seconds.

    The garbage collector rests meanwhile, and leaves alone what was imported: it would take a quarter of the time, and finds nothing.
    """
    if name in sys.modules:
        return sys.modules[name]
    has_torch = "torch" in sys.modules
    if not has_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
        if not has_torch:
            del sys.modules["torch"]
