"""Owns how a few of ONNX's node tests go through the commands that users run, together, as the functions of one model.

Knows nothing of other chunks: a process of its own runs one, `python -m support.onnx_chunk FOLDER NAME …`, and may die of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import tvm
from tvm import relax

from kerneldecl.compiler.model_import.model_error import IMPORT_ERRORS, ModelError
from kerneldecl.compiler.model_import.read_model import read_model
from kerneldecl.relax import load_model
from support.onnx_nodes import as_it_is, cases, compared, has_constants, with_constants

WORKSPACE = """\
edition = 1

[artifact]
name = "nodes"
version = "0.1.0"

[target.host]
arch = "host"

[defaults]
top_k = 1

[[workload]]  # so that there is an artifact also where no function of the nodes needs a kernel
name = "other"
rule = "elementwise"
op = "relu"
shape = [8]
dtype = "float32"
"""
_NODE = re.compile(r" \(node [^()]*(\([^()]*\))?[^()]*\)")


def tvm_reads(name: str) -> bool:
    """Say whether TVM's own importer reads a case as it is."""
    from tvm.relax.frontend.onnx import from_onnx

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from_onnx(as_it_is(cases()[name])[0], keep_params_in_input=False)
    except (*IMPORT_ERRORS, AssertionError, NotImplementedError, tvm.error.OpNotImplemented):
        return False
    return True


def read(name: str, folder: Path) -> tuple[Any, list[Any]]:
    """Return a case's model as `kerneldecl extract` reads its file, and its inputs; sizes are initializers where it is refused else.

    Raise ModelError where it is refused either way.
    """
    case, path = cases()[name], folder / f"{name}.onnx"
    attempts = [as_it_is, *([with_constants] if has_constants(case) else [])]
    for attempt in attempts:
        model, args = attempt(case)
        onnx.save(model, path)
        try:
            return read_model(path), args
        except ModelError:
            if attempt is attempts[-1]:
                raise
    raise AssertionError


def merged(mods: Mapping[str, tvm.IRModule]) -> tvm.IRModule:
    """Return a module with the main function of each module under its name."""
    builder = relax.BlockBuilder()
    for name, mod in mods.items():
        called = {var: func for var, func in mod.functions.items() if not isinstance(func, relax.Function)}
        renamed = _Renamed({var: builder.add_func(func, f"{name}_{var.name_hint}") for var, func in called.items()})
        main = relax.Function(mod["main"].params, renamed.visit_expr(mod["main"].body), mod["main"].ret_ty, mod["main"].is_pure)
        builder.add_func(main.with_attrs({**dict(mod["main"].attrs or {}), "global_symbol": name}), name)
    return builder.finalize()


@relax.expr_functor.mutator
class _Renamed(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, fresh: dict[Any, Any]) -> None:
        super().__init__()
        self._fresh = fresh

    def visit_global_var_(self, var: Any) -> Any:
        return self._fresh.get(var, var)


def command(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a command of kerneldecl; return its exit code, and the last lines that it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "kerneldecl", *arguments],
        cwd=folder,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, " ".join(done.stdout.split()[-60:])


def verdicts(names: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what becomes of each case: right, refused, wrong, failed; and what the commands said where they did not end well."""
    mods, inputs = {}, {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, of the reference by which constants are computed
            is_read = not name.endswith("_expanded") and tvm_reads(name)
            yield {"name": name, "tvm reads": is_read}
            try:
                mods[name], inputs[name] = read(name, folder)
            except ModelError as error:
                yield {"name": name, "outcome": "refused", "why": _NODE.sub("", error.sentence)}
            except IMPORT_ERRORS as error:
                yield {"name": name, "outcome": "failed", "why": f"extract: {type(error).__name__}: {error}"}
    if mods:
        (folder / "nodes.json").write_text(tvm.ir.save_json(merged(mods)), encoding="utf-8")
        yield from _compiled(mods, inputs, folder)


def _compiled(mods: dict[str, Any], inputs: dict[str, list[Any]], folder: Path) -> Iterator[dict[str, Any]]:
    (folder / "workloads.toml").write_text(WORKSPACE, encoding="utf-8")
    # extract ends with 2 where nothing can be an entry, build with 1 where entries have failed: models run all the same.
    for allowed, *arguments in (({0, 2}, "extract", "nodes.json"), ({0, 1}, "build"), ({0}, "compile", "nodes.json")):
        code, text = command(folder, *arguments)
        if code:
            yield {"command": arguments[0], "code": code, "said": text}
        if code not in allowed:
            yield from ({"name": name, "outcome": "failed", "why": f"{arguments[0]} ended with {code}: {text}"} for name in mods)
            return
    model = load_model(folder / "nodes.so")
    for name in mods:
        yield {"name": name, "outcome": "crash", "why": "its process died"}  # unless another verdict follows
        try:
            wrong = compared(cases()[name], model[name](*map(tvm.runtime.tensor, inputs[name])))
        except (*IMPORT_ERRORS, TypeError) as error:
            yield {"name": name, "outcome": "failed", "why": f"run: {type(error).__name__}: {' '.join(str(error).split())[-300:]}"}
        else:
            yield {"name": name, "outcome": "wrong" if wrong else "right", "why": wrong}


def main() -> None:
    folder = Path(sys.argv[1])
    with (folder / "verdicts.jsonl").open("w", encoding="utf-8") as file:
        for verdict in verdicts(sys.argv[2:], folder):
            print(json.dumps(verdict), file=file, flush=True)


if __name__ == "__main__":
    main()
