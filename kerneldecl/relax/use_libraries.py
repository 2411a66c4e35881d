"""Owns the pass that has a Relax module call vendors' libraries, without an artifact and without tuning.

Knows nothing of artifacts. What a library cannot compute stays as it is, for the passes that follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm

from kerneldecl.compiler.canonical import private_module
from kerneldecl.compiler.cpu import scheduled_module
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.prim_funcs import SCHEDULED, in_place_of
from kerneldecl.model import Arch
from kerneldecl.plugins.find import STANDARD, plugin_names
from kerneldecl.plugins.load import load_arch
from kerneldecl.policies import library
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.templates import library_attention, library_conv2d, library_matmul

_TEMPLATES: dict[str, Any] = {
    "library_attention": library_attention,
    "library_conv2d": library_conv2d,
    "library_matmul": library_matmul,
}


@tvm.transform.module_pass(opt_level=0, name="UseLibraries")
class UseLibraries:
    """Replaces GEMMs, convolutions and attention of a module by calls of OpenBLAS, cuBLASLt or cuDNN.

    `UseLibraries()(mod)` returns the module. It takes functions that are lowered and fused (after `FuseTIR`) and marks what it replaces
    as scheduled. Of a library's algorithms it takes the first. Nothing is verified. The model is compiled with `tir_pipeline=TIR_PIPELINE`
    and exported by `export_model`, which links the calls. `replaced` holds the functions of the last module that a library computes, with
    the library of each.
    """

    replaced: dict[str, str]

    def __init__(self, versions: library.Options | None = None, target: tvm.target.Target | None = None) -> None:
        """Take the versions of the libraries, by default those of policy `library`; the target is by default the current one."""
        self.versions, self.target, self.replaced = versions or library.Options(), target, {}

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        target = self.target or tvm.target.Target.current(allow_none=True)
        if target is None:
            raise ValueError("UseLibraries has no target; run it under `with target:` or give it one")
        arch, fresh = _arch_like(target), mod.clone()
        self.replaced = {}
        for name, func in _unscheduled(mod):
            found = self._called(func, arch)
            if found:
                self.replaced[name], implementation = found
                fresh.update_func(mod.get_global_var(name), in_place_of(func, implementation))
        return fresh

    def _called(self, func: Any, arch: Arch) -> tuple[str, Any] | None:
        """Return a library that computes a function, and the function that calls it; None where there is none."""
        module = private_module(func)
        try:
            space = iter_space(module)
        except (TypeError, ValueError):  # dynamic shapes
            return None
        for proposal in library.configurations(SearchSpace(space, arch, 1, ()), self.versions):
            params = dict(proposal.candidate.params)
            called = _TEMPLATES[proposal.candidate.template].apply(module, params, arch)
            if called is not None:
                return str(params["library"]), scheduled_module(module, called).mod["main"].without_attr("global_symbol")
        return None


def _unscheduled(mod: tvm.IRModule) -> Iterator[tuple[str, Any]]:
    for var, func in mod.functions.items():
        if isinstance(func, tvm.tirx.PrimFunc) and not (func.attrs or {}).get(SCHEDULED):
            yield var.name_hint, func


def _arch_like(target: tvm.target.Target) -> Arch:
    """Return an arch of a target's kind, preferably its own: calls differ by the kind, and by a CPU's number of cores."""
    if target.kind.name != "cuda":
        return load_arch(STANDARD, "host")
    archs = [arch for arch in (load_arch(STANDARD, name) for name in plugin_names("archs", STANDARD)) if arch.gpu]
    wanted = str(target.attrs.get("arch", ""))
    return next((arch for arch in archs if dict(arch.tvm_target).get("arch") == wanted), archs[0])
