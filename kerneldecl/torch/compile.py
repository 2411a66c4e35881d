"""Owns the way from a torch module to a callable on torch tensors: export, extract, build, load.

Knows nothing of torch.compile.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tvm
import tvm_ffi
from torch.utils import _pytree as pytree

from kerneldecl import api
from kerneldecl.compiler.model_import.read_model import read_model
from kerneldecl.declare.toml_keys import FILE
from kerneldecl.deploy.compile import compile_module as compile_library
from kerneldecl.extract.extract import extract_model
from kerneldecl.relax.deployment import Model, load_model
from kerneldecl.store.workspaces import remove_unused

_PROGRAM = "module.pt2"
_HEADER = """\
# The workspace of a torch module; each build of it tunes what is new.
edition = 1

[artifact]
name = "module"
version = "0.1.0"

[target.{target}]
arch = {arch}
"""
_TARGET = "device"


class CompiledModule:
    """A module whose forward pass runs on tuned kernels; it takes and returns what the module does."""

    def __init__(self, model: Model, program: Any, folder: Path) -> None:
        self._model, self.workspace = model, folder
        self._main = model["main"]
        self._in_spec, self._out_spec = program.call_spec.in_spec, program.call_spec.out_spec
        self._is_gpu = model.device_kind == "cuda"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on torch's current stream; raise ValueError for inputs of other shapes or dtypes than the example's."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise ValueError("the inputs are not structured as the example's were; compile the module for them")
        given = [_tensor(leaf) for leaf in leaves]
        stream: Any = tvm_ffi.use_torch_stream() if self._is_gpu else contextlib.nullcontext()
        with stream:
            found = self._main(*given)
        tensors = [found] if isinstance(found, tvm_ffi.Tensor) else list(found)
        return pytree.tree_unflatten([torch.from_dlpack(each) for each in tensors], self._out_spec)


def compile_module(
    module: torch.nn.Module, example_inputs: Sequence[Any], target: str | None = None, workspace: str | Path | None = None
) -> CompiledModule:
    """Export a module, tune what it calls, and return a callable with the module's weights as they are now.

    `target` is the name of an arch, such as "h200"; by default the CPU that this process runs on. The workspace is by default a
    folder of the user's cache, named by what the module computes: to compile it again runs nothing. Those not used for 60 days are
    removed. Raise ValueError for a module that
    cannot be compiled, TuningError for a kernel that failed.
    """
    if any(part.training for part in module.modules()):
        raise ValueError("the module is in training mode; call module.eval() first")
    if target is None and any(each.is_cuda for each in _tensors(example_inputs)):
        raise ValueError('the inputs are on a GPU; name its arch, such as target="h200"')
    arch = target or "host"
    on_cpu = copy.deepcopy(module).to("cpu")
    inputs = pytree.tree_map(lambda each: each.cpu() if isinstance(each, torch.Tensor) else each, tuple(example_inputs))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about itself
        program = torch.export.export(on_cpu, inputs)
        _check(program.run_decompositions({}))  # in place becomes visible
        folder = Path(workspace) if workspace else _cache_folder(program, arch)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _PROGRAM
        if not workspace:
            remove_unused(folder.parent, _PROGRAM, but=folder)
        torch.export.save(program, path)
        return _built(program, path, arch)


def _built(program: Any, path: Path, arch: str) -> CompiledModule:
    folder = path.parent
    if not (folder / FILE).exists():
        (folder / FILE).write_text(_HEADER.format(target=_TARGET, arch=json.dumps(arch)), encoding="utf-8")
    extract_model(str(path), folder)
    artifact = api.build(folder)[_TARGET]
    compiled = compile_library(read_model(str(path)), artifact.folder, folder / "module.so")
    device = tvm.cuda(0) if artifact.manifest["arch"]["kind"] == "cuda" else tvm.cpu()
    return CompiledModule(load_model(compiled.library, device=device), program, folder)


def _check(program: Any) -> None:
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise ValueError("the module changes its buffers or inputs, which a compiled model cannot")
    if any(not isinstance(name, str) for name in (*signature.user_inputs, *signature.user_outputs)):
        raise ValueError("the module takes or returns something other than tensors")
    if len(signature.user_outputs) != program.call_spec.out_spec.num_leaves:
        raise ValueError("the module returns something other than tensors")


def _cache_folder(program: Any, arch: str) -> Path:
    """Return the folder of the workspace of what a program computes, whatever its weights."""
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in sorted(program.state_dict.items())]
    content = f"{program.graph_module.code}{program.graph_module.graph}{shapes}{program.graph_signature.user_inputs}{arch}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "kerneldecl" / "torch" / hashlib.sha256(content.encode()).hexdigest()[:16]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


def _tensor(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"the compiled module takes tensors, not {type(leaf).__name__}")
    return tvm_ffi.from_dlpack(leaf.detach().contiguous())
