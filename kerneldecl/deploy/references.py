"""Owns the programs that a compiled model is compared with: onnxruntime, torch, TVM without optimisation.

Knows nothing of the compiled model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.arrays import Array, is_float, numpy_dtype
from kerneldecl.compiler.model_import.read_model import read_model
from kerneldecl.deploy.compile import compile_unoptimised
from kerneldecl.deploy.error import DeployError
from kerneldecl.deploy.inputs import on_device, outputs_of
from kerneldecl.store.scratch import scratch_folder

_ONNX_FLOATS = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}
_IS_NARROW = re.compile("int[24]|float[468]e")
Reference = Callable[[Sequence[Array]], list[Array]]


def reference_of(model: str) -> tuple[str, Reference]:
    """Return who computes a model's reference, and the function that does: the exporter's own program where it is installed."""
    if not Path(model).is_file() and ":" not in model:
        raise DeployError(f"{model}: no such file", "--against takes the model that the library was compiled from")
    if model.endswith(".pt2"):
        return "torch", torch_program(model)
    if model.endswith(".onnx"):
        with contextlib.suppress(ImportError):
            if (found := _onnx(model)) is not None:
                return "onnxruntime", found
    return "TVM at -O0", _tvm(model)


def torch_program(model: str) -> Reference:
    """Return what runs a torch.export program eagerly on the CPU."""
    try:
        import torch
    except ImportError:
        raise DeployError(f"{model}: the package torch is not installed", "pip install torch") from None
    program = torch.export.load(model)
    call, dtypes = torch_call(program, program.module()), torch_dtypes(program)

    def run(arrays: Sequence[Array]) -> list[Array]:
        with torch.no_grad():
            return torch_outputs(call([torch_tensor(array) for array in _as(dtypes, arrays)]))

    return run


def torch_call(program: Any, module: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    """Return a call of a program's module by its tensors in order, which stand where they stood in its export: by name, in a dict."""
    from torch.utils import _pytree as pytree

    spec = program.call_spec.in_spec

    def call(tensors: Sequence[Any]) -> Any:
        if len(tensors) != spec.num_leaves:  # some arguments are no tensors
            return module(*tensors)
        args, kwargs = pytree.tree_unflatten(list(tensors), spec)
        return module(*args, **kwargs)

    return call


def torch_dtypes(program: Any) -> list[str]:
    """Return the dtype of each input of a torch.export program; empty for an input that is no tensor."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    return [str(getattr(values.get(name), "dtype", "")).removeprefix("torch.") for name in program.graph_signature.user_inputs]


def _as(dtypes: Sequence[str], arrays: Sequence[Array]) -> list[Array]:
    """Return arrays of floating point in the dtypes that a reference takes: a half-precision model is compared with its float32 one."""
    pairs = zip(arrays, dtypes, strict=True)
    return [array.astype(numpy_dtype(dtype)) if is_float(dtype) and is_float(array.dtype.name) else array for array, dtype in pairs]


def torch_tensor(array: Array) -> Any:
    """Return an array as a torch tensor, bfloat16 included."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def torch_outputs(found: Any) -> list[Array]:
    """Return the tensors in what a module has returned, as the importer orders them."""
    import torch
    from torch.utils import _pytree as pytree

    tensors = [each for each in pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]
    return [(each.float() if each.dtype == torch.bfloat16 else each).detach().cpu().numpy() for each in tensors]


def _onnx(model: str) -> Reference | None:
    """Return what runs a model in onnxruntime; None where it takes or returns numbers that a compiled model has in wider dtypes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    if any(_IS_NARROW.search(each.type) for each in (*session.get_inputs(), *session.get_outputs())):
        return None
    names = [each.name for each in session.get_inputs()]
    dtypes = [_ONNX_FLOATS.get(each.type, "") for each in session.get_inputs()]

    def run(arrays: Sequence[Array]) -> list[Array]:
        found: list[Array] = session.run(None, dict(zip(names, _as(dtypes, arrays), strict=True)))
        return found

    return run


def _tvm(model: str) -> Reference:
    mod = read_model(model)
    dtypes = [str(param.ty.dtype.dtype) if isinstance(param.ty, tvm.relax.TensorType) else "" for param in mod["main"].params]

    def run(arrays: Sequence[Array]) -> list[Array]:
        with scratch_folder() as folder:
            library = compile_unoptimised(mod, Path(folder) / "reference.so")
            machine = tvm.runtime.vm.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
            return outputs_of(machine["main"](*on_device(_as(dtypes, arrays), tvm.cpu())))

    return run
