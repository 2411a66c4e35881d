"""Owns how device code addresses memory and registers: 32-bit indices, and fragments as arrays of one lane's elements.

Knows nothing of schedules, policies or how kernels are compiled.

A schedule sees a fragment as one array over the lanes of a warp. In device code each lane has an array of its own, of which it uses
only its elements; where their index depends on the lane, nvcc cannot always keep the array in registers.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import tvm
from tvm.ir import Call, TensorLoad, Var
from tvm.s_tir import transform
from tvm.sym import Analyzer
from tvm.tirx import Bind, BufferLoad, BufferStore, For, ForKind, IntImm, decl_buffer, floordiv, floormod
from tvm_ffi import structural

from kerneldecl.compiler.rows import UPTO

FRAGMENT_OPS = ("tirx.ptx_legacy.mma", "tirx.ptx_legacy.ldmatrix", "tirx.mma_fill_legacy")
"""Operations that take a fragment as its array, followed by the index of the lane's elements."""

LANES = 32
_ANALYZER = Analyzer()

FIRST_PASSES = (
    transform.CanonicalizeLoop,
    transform.LowerCrossThreadReduction,
    transform.LowerInitBlock,
    transform.PlanAndUpdateBufferAllocationLocation,
    transform.ConvertBlocksToOpaque,
    transform.LiftThreadBinding,
    transform.ManifestSharedMemoryLocalStage,
    transform.CompactBufferAllocation,
)
"""The first passes of TVM's pipeline for S-TIR; run a second time, they change nothing."""


def narrowed(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a scheduled module with 32-bit indices, unless an argument has more elements than those can count, or 64-bit integers.

    TVM's own first passes run before it: the regions that blocks of intrinsics read keep 64-bit indices, and one of those passes,
    which inspects the regions, fails where widths are mixed.
    """
    params = [param for func in mod.functions.values() for param in func.params]
    [upto] = {int((func.attrs or {}).get(UPTO, 0)) for func in mod.functions.values()}
    sizes = (math.prod(int(extent) if isinstance(extent, IntImm) else upto for extent in param.ty.shape) for param in params)
    # TVM's pass does not tell 64-bit integers that are data from indices, and refuses arguments of them.
    if max(sizes, default=0) >= 2**31 or any(str(param.dtype) == "int64" for param in params):
        return mod
    return tvm.ir.transform.Sequential([*(each() for each in FIRST_PASSES), tvm.tirx.transform.ForceNarrowIndexToInt32()])(mod)


def lane_arrays(mod: tvm.IRModule) -> tvm.IRModule:
    """Return device functions in which the array of a fragment has the elements of one lane alone.

    nvcc does not keep an array of 8192 elements in registers, however few of them a lane uses.
    """
    return tvm.IRModule({name: func.with_body(_lane_arrays(func.body)) for name, func in mod.functions.items()})


def unrolled(mod: tvm.IRModule) -> tvm.IRModule:
    """Return device functions with unrolled loops where fragments alternate between iterations.

    In a loop that is not unrolled, nvcc keeps no such array in registers; the other loops it unrolls by itself.
    """
    return tvm.IRModule({name: func.with_body(_unrolled(func.body)) for name, func in mod.functions.items()})


def _unrolled(body: Any) -> Any:
    at_lane = _AtLane(body, 0)

    def loop(node: Any) -> Any:
        if not any(_alternates(at_lane(place), node.loop_var) for _, place in _fragments(node.body)):
            return node
        return For(node.loop_var, node.min, node.extent, ForKind.UNROLLED, node.body, node.thread_binding, node.annotations)

    return structural.structural_map(body, [(For, loop)])


def _alternates(place: Any, loop_var: Var) -> bool:
    """Say whether an index does not grow by the same amount with each iteration."""

    def at(iteration: int) -> Any:
        known = (Var, lambda var: tvm.tirx.const(iteration, str(var.ty.dtype)) if var.same_as(loop_var) else var)
        return structural.structural_map(place, [known])

    first, second, third = at(0), at(1), at(2)
    return not _ANALYZER.can_prove_equal(second - first, third - second)


def _lane_arrays(body: Any) -> Any:
    fragments = _fragments(body)
    if not fragments:
        return body
    first, second = _AtLane(body, 0), _AtLane(body, 1)
    lane_sizes = {array: int(_ANALYZER.simplify(second(place) - first(place))) for array, place in fragments}

    def own_index(array: Any, index: Any) -> Any:
        size, place = lane_sizes[array], first(index)
        return _ANALYZER.simplify(floordiv(place, LANES * size) * size + floormod(place, LANES * size))

    def load(node: Any) -> Any:
        return BufferLoad(node.source, [own_index(node.source, index) for index in node.indices]) if node.source in lane_sizes else node

    def store(node: Any) -> Any:
        if node.buffer not in lane_sizes:
            return node
        return BufferStore(node.buffer, node.value, [own_index(node.buffer, index) for index in node.indices])

    def call(node: Any) -> Any:
        if _name(node) not in FRAGMENT_OPS:
            return node
        pairs = zip([None, *node.args], node.args, strict=False)
        args = [own_index(_array(before), arg) if _array(before) in lane_sizes else arg for before, arg in pairs]
        return Call(node.op, args, node.attrs, node.ty_args, node.span, node.ty)

    placed = structural.structural_map(body, [(TensorLoad, load), (BufferStore, store), (Call, call)])
    arrays = {array: _array_of_one_lane(array) for array in lane_sizes}
    return structural.structural_map(placed, [(Var, lambda var: arrays.get(var, var))])


def _array_of_one_lane(array: Any) -> Any:
    sizes = [int(extent) // LANES for extent in array.shape]
    return decl_buffer(sizes, str(array.dtype), array.name, scope=array.scope(), data_alignment=array.data_alignment, layout=None)


class _AtLane:
    """Evaluates indices for one lane: threadIdx.x is a constant, and let-bound variables are substituted."""

    def __init__(self, body: Any, lane: int) -> None:
        self._values: dict[Var, Any] = {}
        self._lane = lane
        structural.structural_walk(body, [(Bind, self._note)])

    def _note(self, bind: Any) -> None:
        self._values[bind.var] = bind.value

    def __call__(self, index: Any) -> Any:
        return structural.structural_map(index, [(Var, self._substituted)])

    def _substituted(self, var: Var) -> Any:
        if var in self._values:
            return self(self._values[var])
        return tvm.tirx.const(self._lane, str(var.ty.dtype)) if var.name == "threadIdx.x" else var


def _fragments(body: Any) -> list[tuple[Any, Any]]:
    """Return the arrays that hold fragments, each with an index into it."""
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
