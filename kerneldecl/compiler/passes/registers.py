"""Owns how device code addresses memory and registers: 32-bit indices, and of a fragment only what the lane itself holds.

Knows nothing of schedules, policies or how kernels are compiled.

A schedule sees a fragment whole, an array over the lanes of a warp. In device code each lane has an array of its own, of which
it uses one part; where that part's place depends on the lane, nvcc cannot always keep the array in registers.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import tvm
from tvm.ir import Call, TensorLoad, Var
from tvm.s_tir import transform
from tvm.sym import Analyzer
from tvm.tirx import Bind, BufferLoad, BufferStore, For, ForKind, decl_buffer, floordiv, floormod
from tvm_ffi import structural

FRAGMENT_OPS = ("tirx.ptx_legacy.mma", "tirx.ptx_legacy.ldmatrix", "tirx.mma_fill_legacy")
"""They take a fragment as its array, followed by the place of the lane's part."""

LANES = 32
_ANALYZER = Analyzer()

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
    """Return device functions in which every lane has an array of what it holds of a fragment alone.

    nvcc keeps no array of 8192 elements in registers, of however few of them a lane makes use.
    """
    return tvm.IRModule({name: func.with_body(_own_parts(func.body)) for name, func in mod.functions.items()})


def unrolled(mod: tvm.IRModule) -> tvm.IRModule:
    """Return device functions whose loops are unrolled where fragments alternate from step to step.

    Of a loop that nvcc leaves as it is, it keeps no such array in registers; the others it unrolls by itself.
    """
    return tvm.IRModule({name: func.with_body(_unrolled(func.body)) for name, func in mod.functions.items()})


def _unrolled(body: Any) -> Any:
    of_lane = _OfLane(body, 0)

    def loop(node: Any) -> Any:
        if not any(_alternates(of_lane(place), node.loop_var) for _, place in _fragments(node.body)):
            return node
        return For(node.loop_var, node.min, node.extent, ForKind.UNROLLED, node.body, node.thread_binding, node.annotations)

    return structural.structural_map(body, [(For, loop)])


def _alternates(place: Any, step: Var) -> bool:
    """Say whether a place does not grow by as much with each step."""
    first, second, third = (
        structural.structural_map(place, [(Var, lambda var, at=at: tvm.tirx.const(at, str(var.ty.dtype)) if var.same_as(step) else var)])
        for at in range(3)
    )
    return not _ANALYZER.can_prove_equal(second - first, third - second)


def _own_parts(body: Any) -> Any:
    fragments = _fragments(body)
    if not fragments:
        return body
    first, second = _OfLane(body, 0), _OfLane(body, 1)
    parts = {array: int(_ANALYZER.simplify(second(place) - first(place))) for array, place in fragments}

    def own(array: Any, index: Any) -> Any:
        part, place = parts[array], first(index)
        return _ANALYZER.simplify(floordiv(place, LANES * part) * part + floormod(place, LANES * part))

    def load(node: Any) -> Any:
        return BufferLoad(node.source, [own(node.source, index) for index in node.indices]) if node.source in parts else node

    def store(node: Any) -> Any:
        return BufferStore(node.buffer, node.value, [own(node.buffer, index) for index in node.indices]) if node.buffer in parts else node

    def call(node: Any) -> Any:
        if _name(node) not in FRAGMENT_OPS:
            return node
        pairs = zip([None, *node.args], node.args, strict=False)
        args = [own(_array(before), arg) if _array(before) in parts else arg for before, arg in pairs]
        return Call(node.op, args, node.attrs, node.ty_args, node.span, node.ty)

    placed = structural.structural_map(body, [(TensorLoad, load), (BufferStore, store), (Call, call)])
    arrays = {array: _array_of_one_lane(array) for array in parts}
    return structural.structural_map(placed, [(Var, lambda var: arrays.get(var, var))])


def _array_of_one_lane(array: Any) -> Any:
    sizes = [int(extent) // LANES for extent in array.shape]
    return decl_buffer(sizes, str(array.dtype), array.name, scope=array.scope(), data_alignment=array.data_alignment, layout=None)


class _OfLane:
    """Has an index say of one lane what it says of any lane."""

    def __init__(self, body: Any, lane: int) -> None:
        self._values: dict[Var, Any] = {}
        self._lane = lane
        structural.structural_walk(body, [(Bind, self._note)])

    def _note(self, bind: Any) -> None:
        self._values[bind.var] = bind.value

    def __call__(self, index: Any) -> Any:
        return structural.structural_map(index, [(Var, self._of)])

    def _of(self, var: Var) -> Any:
        if var in self._values:
            return self(self._values[var])
        return tvm.tirx.const(self._lane, str(var.ty.dtype)) if var.name == "threadIdx.x" else var


def _fragments(body: Any) -> list[tuple[Any, Any]]:
    """Return the arrays that hold fragments, each with a place in it."""
    found: list[tuple[Any, Any]] = []

    def note(node: Any) -> None:
        if _name(node) in FRAGMENT_OPS:
            found.extend((array, place) for arg, place in itertools.pairwise(node.args) if (array := _array(arg)) is not None)

    structural.structural_walk(body, [(Call, note)])
    return found


def _array(arg: Any) -> Any | None:
    """Return the array that an argument points to, or None."""
    return arg.args[0] if isinstance(arg, Call) and _name(arg) == "tirx.buffer_data" else None


def _name(call: Any) -> str:
    return str(getattr(call.op, "name", ""))
