"""Owns the pass that simplifies the indices of fused functions.

Knows nothing of what made them: a reshape that is fused into its consumer divides indices by extents.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from kerneldecl.compiler.graph.places import RULE


@tvm.transform.module_pass(opt_level=0, name="SimplifyIndices")
class SimplifyIndices:
    """Simplifies functions with divided indices, knowing the extents of their axes.

    `x[(i * 2048 + j // 2048 + k) % 8192]` becomes `x[i % 4 * 2048 + k]`. Templates see then what a thread reads. Standard rules stay as
    they are: they are recognised by their text.
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        fresh = mod.clone()
        for var, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc) and RULE not in (func.attrs or {}) and _divides(func):
                fresh.update_func(var, _simplified(func))
        return fresh


def _divides(func: Any) -> bool:
    found: list[Any] = []
    tvm_ffi.structural_map(func.body, [(tirx.FloorDiv, found.append), (tirx.FloorMod, found.append)], order="pre")
    return bool(found)


def _simplified(func: Any) -> Any:
    return tvm.s_tir.transform.StmtSimplify()(tvm.IRModule({"main": func}))["main"]
