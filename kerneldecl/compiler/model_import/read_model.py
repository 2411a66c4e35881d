"""Owns the way from a model to fused TensorIR functions: reading it, the deployment's own passes, and calls per function.

Knows nothing of workloads.toml, rules or schedules.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from kerneldecl.artifact.kernels import is_supported
from kerneldecl.compiler import canonical, dynamic_shapes
from kerneldecl.compiler.graph.pipeline import FUSED_PASSES, graph_passes
from kerneldecl.compiler.graph.rule_use import Fuses, fuses_nothing
from kerneldecl.compiler.input_values import allowed_values
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.model_import.from_onnx import from_onnx, sized_from_onnx
from kerneldecl.compiler.model_import.from_torch import from_torch
from kerneldecl.compiler.model_import.half_precision import half_precision
from kerneldecl.compiler.model_import.model_error import IMPORT_ERRORS, ModelError, last_line

KINDS = "saved Relax IR (.json), ONNX (.onnx), a torch.export program (.pt2) or module:attribute of Python"


def read_model(
    model: str | Path, *, dims: Sequence[str] = (), dtype: str = "", sizes: dynamic_shapes.Buckets | None = None
) -> tvm.IRModule:
    """Return a model as a Relax module, as `kerneldecl extract` reads it; raise ModelError where it is none.

    `model` is a file, or module:attribute of Python. `dims` name the dynamic dimensions of a torch program, whose file has lost
    the names, in the order in which its inputs have them. `dtype` makes a half-precision model of a float32 one. `sizes` are those of
    `extract --dim`: the model dispatches to a copy of itself for each combination of them (`read_sized`).
    """
    if sizes:
        return read_sized(model, sizes, dtype)
    found = _read(str(model), dims)
    return half_precision(found, dtype) if dtype else found


def read_sized(model: str | Path, sizes: dynamic_shapes.Buckets, dtype: str = "") -> tvm.IRModule:
    """Return a model that dispatches to a copy of itself for each combination of sizes of its dynamic dimensions.

    An ONNX file is read once for each, with these sizes: what its nodes compute of them is known then, so that a copy can be read where the
    model for any sizes cannot. Raise ModelError where the model cannot be read or lacks a dimension.
    """
    path = Path(model)
    if path.suffix != ".onnx" or not path.is_file():
        return with_shape_buckets(read_model(model, dims=tuple(sizes), dtype=dtype), sizes)
    found = sized_from_onnx(path, sizes)
    if dtype:
        copies = tuple((each, half_precision(mod, dtype)) for each, mod in found.copies)
        found = found._replace(whole=None if found.whole is None else half_precision(found.whole, dtype), copies=copies)
    if found.whole is not None and (reason := _why_not_any(found.whole)):
        found = found._replace(whole=None, why_none=reason)
    return dynamic_shapes.with_sized_copies(found)


def _why_not_any(mod: tvm.IRModule) -> str:
    """Return why a model of dynamic extents cannot be lowered, as a sentence; empty where it can, as one whose extents are all known."""
    if dynamic_shapes.has_all_extents(mod):
        return ""
    try:
        left = unlowered(fused(mod))
    except IMPORT_ERRORS as error:
        return f"TVM does not lower it for others: {last_line(error)}"
    return f"TVM does not lower {', '.join(left)} for others" if left else ""


def _read(model: str, dims: Sequence[str]) -> tvm.IRModule:
    path = Path(model)
    if path.suffix not in _READERS:
        module, colon, attribute = model.partition(":")
        if not colon:
            raise ModelError("not a model by its name", f"expected {KINDS}")
        return _from_python(module, attribute)
    if not path.is_file():
        raise ModelError("no such file", "give its path from the folder that you are in")
    return _READERS[path.suffix](path, dims)


def with_shape_buckets(mod: tvm.IRModule, buckets: dynamic_shapes.Buckets) -> tvm.IRModule:
    """Return the module with static copies for shape buckets of its dynamic dimensions; raise ModelError where it lacks these."""
    try:
        return dynamic_shapes.with_shape_buckets(mod, buckets)
    except ValueError as error:
        raise ModelError(str(error)) from None


def fused(mod: tvm.IRModule, target: tvm.target.Target | None = None, fuses: Fuses = fuses_nothing) -> tvm.IRModule:
    """Return the module after the passes that make fused functions of operators, as a deployment runs them.

    `fuses` says whether the target has a kernel for a whole attention, and for a convolution with weights in panels.
    """
    passes = tvm.transform.Sequential(
        [
            *graph_passes(fuses),
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            *FUSED_PASSES,
        ]
    )
    with target or tvm.target.Target("llvm"):
        return passes(mod)


def called(mod: tvm.IRModule) -> list[tuple[str, Any, int]]:
    """Return (name, function, calls) of each PrimFunc that the module's Relax functions call, in order of the first call.

    Call sites of the model are counted. For a function with copies for shape buckets, of which one runs, the largest count is taken.
    """
    by_function: dict[str, Counter[str]] = {}
    for var, func in sorted(mod.functions_items(), key=lambda item: item[0].name_hint):
        if isinstance(func, relax.Function):
            original = str((func.attrs or {}).get(dynamic_shapes.COPY_OF, var.name_hint))
            by_function[original] = by_function.get(original, Counter()) | Counter(dynamic_shapes.callees(func))
    calls = sum(by_function.values(), Counter())
    prim_funcs = {var.name_hint: func for var, func in mod.functions_items() if isinstance(func, tvm.tirx.PrimFunc)}
    return [(name, prim_funcs[name], count) for name, count in calls.items() if name in prim_funcs]


def unlowered(mod: tvm.IRModule) -> list[str]:
    """Return the names of the operators that no pass has lowered to a function, sorted."""
    found: set[str] = set()

    def note(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and not _is_call(expr.op.name):
            found.add(str(expr.op.name))

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, note)
    return sorted(found)


def _is_call(operator: str) -> bool:
    """Say whether an operator calls a function, or belongs to the virtual machine as views do: it needs no kernel of its own."""
    return operator.startswith(("relax.call_", "relax.builtin.", "relax.memory.", "relax.vm.", "relax.reshape"))


def _from_json(path: Path, _: Sequence[str]) -> tvm.IRModule:
    try:
        content = path.read_text(encoding="utf-8")
        json.loads(content)
    except ValueError as error:
        raise ModelError(f"not JSON: {error}", "tvm.ir.save_json writes a module as JSON") from None
    try:
        mod = tvm.ir.load_json(content)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"not IR that TVM {tvm.__version__} can read: {last_line(error)}", "save it with this TVM") from None
    return _checked(mod, "the file")


def _from_python(module: str, attribute: str) -> tvm.IRModule:
    sys.path[:0] = [str(Path.cwd())]
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModelError(str(error), f"expected {KINDS}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ModelError(f"module {module} has no attribute {attribute}")
        found = getattr(found, part)
    if callable(found) and not isinstance(found, tvm.IRModule):
        found = found()
    return _checked(found, attribute)


_READERS: Mapping[str, Callable[[Path, Sequence[str]], tvm.IRModule]] = {".json": _from_json, ".onnx": from_onnx, ".pt2": from_torch}


def _checked(found: Any, what: str) -> tvm.IRModule:
    """Return a module that has a Relax function; raise ModelError for anything else."""
    if not isinstance(found, tvm.IRModule):
        raise ModelError(
            f"{what} is a {type(found).__name__}, not a Relax module", "expected a tvm.IRModule, or a function that returns one"
        )
    if not any(isinstance(func, relax.Function) for func in found.functions.values()):
        raise ModelError(f"{what} has no Relax function", "a module of TensorIR alone is declared with rule tensor_ir")
    return found


def function_problem(func: Any) -> str:
    """Return why a function can have no entry; empty if it can."""
    try:
        signature = canonical.signature_of(func)
        if not isinstance(func.body, tvm.s_tir.SBlockRealize):
            return "it is not made of blocks, so that nothing can schedule it"
        allowed_values(func)
        iter_space(canonical.canonical_module(func))
    except (TypeError, ValueError) as error:
        return str(error)
    foreign = sorted({dtype for _, dtype in signature if not is_supported(dtype)})
    return f"kernels take no arrays of {', '.join(foreign)}" if foreign else ""


def is_dynamic(func: Any) -> bool:
    """Say whether a function takes a buffer of dynamic extent."""
    shapes = (param.shape for param in func.params if isinstance(param.ty, tvm.tirx.buffer.BufferType))
    return any(not isinstance(extent, tvm.tirx.IntImm) for shape in shapes for extent in shape)
