"""Owns how device code addresses memory and registers: 32-bit indices, and of a fragment only what the lane itself holds.

Knows nothing of schedules, policies or how kernels are compiled.

A schedule sees a fragment whole, an array over the lanes of a warp. In device code each lane has an array of its own, of which
it uses one part; where that part's place depends on the lane, nvcc cannot always keep the array in registers.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm.ir import Call, TensorLoad, Var
from tvm.s_tir import transform
from tvm.tirx import Bind, BufferLoad, BufferStore
from tvm_ffi import structural

FRAGMENT_OPS = ("tirx.ptx_legacy.mma", "tirx.ptx_legacy.ldmatrix", "tirx.mma_fill_legacy")
"""They take a fragment as its array, followed by the place of the lane's part."""

FIRST_STEPS = (
    transform.CanonicalizeLoop,
    transform.LowerCrossThreadReduction,
    transform.LowerInitBlock,
    transform.PlanAndUpdateBufferAllocationLocation,
    transform.ConvertBlocksToOpaque,
    transform.LiftThreadBinding,
    transform.ManifestSharedMemoryLocalStage,
    transform.CompactBufferAllocation,
)
"""Of TVM's pipeline for S-TIR; taken a second time, they change nothing."""


def narrowed(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a scheduled module with 32-bit indices, unless an argument has more elements than those can count.

    The first of TVM's own steps come before: what blocks of intrinsics read keeps wider indices, and one of those steps,
    which looks at it, takes no mixture.
    """
    params = (param for func in mod.functions.values() for param in func.params)
    sizes = (math.prod(int(extent) for extent in param.ty.shape) for param in params)
    if max(sizes, default=0) >= 2**31:
        return mod
    return tvm.ir.transform.Sequential([*(first() for first in FIRST_STEPS), tvm.tirx.transform.ForceNarrowIndexToInt32()])(mod)


def own_parts(mod: tvm.IRModule) -> tvm.IRModule:
    """Return device functions in which every lane has its part of a fragment where lane 0 has it."""
    return tvm.IRModule({name: func.with_body(_own_parts(func.body)) for name, func in mod.functions.items()})


def _own_parts(body: Any) -> Any:
    fragments = _fragments(body)
    places = _Lane0(body)

    def load(node: Any) -> Any:
        return BufferLoad(node.source, [places(index) for index in node.indices]) if node.source in fragments else node

    def store(node: Any) -> Any:
        return BufferStore(node.buffer, node.value, [places(index) for index in node.indices]) if node.buffer in fragments else node

    def call(node: Any) -> Any:
        if _name(node) not in FRAGMENT_OPS:
            return node
        pairs = zip([None, *node.args], node.args, strict=False)
        args = [places(arg) if _array(before) in fragments else arg for before, arg in pairs]
        return Call(node.op, args, node.attrs, node.ty_args, node.span, node.ty)

    return structural.structural_map(body, [(TensorLoad, load), (BufferStore, store), (Call, call)])


class _Lane0:
    """Has an index say of lane 0 what it says of any lane."""

    def __init__(self, body: Any) -> None:
        self._values: dict[Var, Any] = {}
        structural.structural_walk(body, [(Bind, self._note)])

    def _note(self, bind: Any) -> None:
        self._values[bind.var] = bind.value

    def __call__(self, index: Any) -> Any:
        return structural.structural_map(index, [(Var, self._of)])

    def _of(self, var: Var) -> Any:
        if var in self._values:
            return self(self._values[var])
        return tvm.tirx.const(0, str(var.ty.dtype)) if var.name == "threadIdx.x" else var


def _fragments(body: Any) -> set[Any]:
    """Return the arrays that hold fragments."""
    found: set[Any] = set()

    def note(node: Any) -> None:
        if _name(node) in FRAGMENT_OPS:
            found.update(_array(arg) for arg in node.args)

    structural.structural_walk(body, [(Call, note)])
    return found - {None}


def _array(arg: Any) -> Any | None:
    """Return the array that an argument points to, or None."""
    return arg.args[0] if isinstance(arg, Call) and _name(arg) == "tirx.buffer_data" else None


def _name(call: Any) -> str:
    return str(getattr(call.op, "name", ""))
