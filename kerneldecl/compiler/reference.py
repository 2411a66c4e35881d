"""Owns the reference of a function that no rule declares: the function itself, run on the CPU at a higher precision.

Knows nothing of rules, GPUs or tolerances.

The function is widened (float16, bfloat16 and float8 become float32; where there is none of these, float32 becomes
float64) and compiled by LLVM at -O1. A small function runs unscheduled, with the loops that its author wrote. A large one, which
would take minutes that way, runs with the first schedule of this CPU's policies. It shares with the GPU kernel that it is
compared with the function alone: policy, template, target, compiler and precision are others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm

from kerneldecl.arrays import Array, aligned, numpy_dtype, poisoned
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.compiler.canonical import canonical_module, save, signature_of
from kerneldecl.compiler.cpu import PIPELINE, apply_candidate, target_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.widening import widened
from kerneldecl.hardware import host
from kerneldecl.model import Arch, Arg, IterSpace
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_module
from kerneldecl.plugins.policy_order import standard_order

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
UNSCHEDULED_FLOPS = 1 << 28
"""Operations that one core does within a second without vector instructions: larger functions are scheduled."""


def expected_outputs(func: Any, inputs: Sequence[Array], outputs: Sequence[Arg]) -> list[Array]:
    """Return the function's outputs in widened dtypes; raise ValueError where it cannot be compiled for the CPU."""
    mod = widened(canonical_module(func))
    dtypes = [dtype for _, dtype in signature_of(mod["main"])]
    arrays = [aligned(array.astype(numpy_dtype(dtype))) for array, dtype in zip(inputs, dtypes, strict=False)]
    results = [aligned(poisoned(Arg(arg.name, arg.shape, dtype))) for arg, dtype in zip(outputs, dtypes[len(inputs) :], strict=True)]
    _compiled(mod)(*map(tensor, (*arrays, *results)))
    return results


def rounding(func: Any) -> float:
    """Return the relative error that accumulation in the function's own dtypes may have against `expected_outputs`.

    Rounding errors of an accumulator add up like a random walk: with the square root of its length (Higham and Mary, A new
    approach to probabilistic rounding error analysis, 2019). The factor 4 covers the worst of a million elements.
    """
    schedule = tvm.s_tir.Schedule(canonical_module(func))
    root = schedule.get_sblock(func.body.block.name_hint)  # an author may name it
    blocks = (schedule.get(block) for block in schedule.get_child_blocks(root))
    adding = [block for block in blocks if isinstance(getattr(block.body, "value", None), tvm.tirx.Add) and is_reduction(block)]
    return sum(4 * UNIT_ROUNDOFF.get(str(block.writes[0].source.dtype), 0.0) * math.sqrt(_terms(block)) for block in adding)


def _terms(block: Any) -> int:
    return math.prod(int(axis.dom.extent) for axis in block.iter_vars if axis.iter_type == tvm.tirx.IterVar.CommReduce)


def _compiled(mod: tvm.IRModule) -> Any:
    """Return the function compiled for this CPU; the last one is kept, since a reference runs on several sets of inputs."""
    text = save(mod)
    if text not in _COMPILED:
        _COMPILED.clear()
        _COMPILED[text] = _built(mod)
    return _COMPILED[text]


_COMPILED: dict[str, Any] = {}


def _built(mod: tvm.IRModule) -> Any:
    arch = host.detect()
    space = iter_space(mod)
    if _flops(space) > UNSCHEDULED_FLOPS:
        mod = _scheduled(mod, space, arch)
    # TVM's LLVM vectorizes some loops wrongly for AVX-512 (tile of (3, 4, 5) by (6, 4, 2)): at -O1 it does not vectorize.
    target = tvm.target.Target({**dict(target_of(arch).export()), "opt-level": 1})
    return tvm.compile(mod, target=target, tir_pipeline=PIPELINE)["main"]


def _flops(space: IterSpace) -> float:
    points = (float(np.prod([axis.extent for axis in block.axes], dtype=float)) for block in space.blocks)
    return sum(count * max(1, block.flops_per_point) for count, block in zip(points, space.blocks, strict=True))


def _scheduled(mod: tvm.IRModule, space: IterSpace, arch: Arch) -> tvm.IRModule:
    """Return the module with the first schedule that applies; the fallback's last candidate always applies, and changes nothing."""
    for policy in standard_order(arch.kind):
        for proposal in load_module("policies", STANDARD, policy).propose(space, arch, 4):
            applied = apply_candidate(STANDARD, mod, proposal.candidate, arch)
            if applied is not None:
                return applied.mod
    raise AssertionError("cpu_fallback applies to every function")
