"""Owns the question whether tensor cores can run a function, and the tags of a function that they can.

Knows nothing of tiles or schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm

from kerneldecl.analysis.contraction import Contraction, contraction_of
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.dlight.device import Target, archs_of
from kerneldecl.model import IterSpace
from kerneldecl.policies import gpu_matmul

Tags = Mapping[str, Any]


def get_tensorized_func_and_tags(func: Any, target: Target) -> tuple[Any, dict[str, Any] | None]:
    """Return the function and its tags; (func, None) where tensor cores cannot run it, see `why_no_tensor_cores`.

    The function is returned unchanged: templates normalise it in their schedules, so that these apply to the user's own
    function. Tags are `tensorcore_config`, the dimensions of the GEMM's output that m and n (the last axis of each) index, and
    `use_async_copy`, 1 where the GPU has cp.async. The number of stages is searched; adding `pipeline_stage` fixes it.
    """
    space = space_of(func)
    if why_not(space, target):
        return func, None
    has_async = archs_of(target)[0].the_gpu.async_copy
    return func, {"tensorcore_config": output_dims(space), "use_async_copy": int(has_async)}


def why_no_tensor_cores(func: Any, target: Target) -> str:
    """Return why tensor cores cannot run a function, as a sentence; empty where they can."""
    return why_not(space_of(func), target)


def why_not(space: IterSpace, target: Target) -> str:
    """Return why tensor cores cannot run a computation; all GPUs of one compute capability have the same tensor cores."""
    return gpu_matmul.why_not(space, archs_of(target)[0])


def prim_func(func: Any) -> Any:
    """Return the one PrimFunc of the argument, a PrimFunc or an IRModule; raise TypeError or ValueError otherwise."""
    if isinstance(func, tvm.IRModule):
        funcs = [each for each in func.functions.values() if isinstance(each, tvm.tirx.PrimFunc)]
        if len(funcs) != 1:
            raise ValueError(f"the module has {len(funcs)} PrimFuncs; expected one")
        return funcs[0]
    if not isinstance(func, tvm.tirx.PrimFunc):
        raise TypeError(f"func is {type(func).__name__}; expected a PrimFunc, or an IRModule of one")
    return func


def space_of(func: Any) -> IterSpace:
    """Return a function's iteration space; raise ValueError for one that is already scheduled, or not made of plain blocks."""
    return iter_space(canonical_module(prim_func(func)))


def output_dims(space: IterSpace) -> list[int]:
    """Return the dimensions of a GEMM's output that m and n index, the last one of each."""
    gemm = contraction_of(space)
    assert isinstance(gemm, Contraction), "the caller has checked that tensor cores can run it"
    (block,) = (block for block in space.blocks if block.is_reduction)
    dims = {axis: dim for dim, index in enumerate(block.writes[0].index) for axis, _ in index or ()}
    # An axis of extent 1 may index nothing.
    return [max((dims[axis] for axis in group if axis in dims), default=len(dims) - 1) for group in (gemm.m, gemm.n)]
