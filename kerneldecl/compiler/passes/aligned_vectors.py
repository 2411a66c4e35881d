"""Owns divisions inside vectors: all elements of a vector that begins at a multiple of its length have the same quotient.

Knows nothing of schedules, policies or what is divided.

The pixel that a lane of a convolution copies is a quotient of its place in the reduction. Eight channels from a multiple of eight on
lie in one pixel if the channels are a multiple of eight. TVM proves that only where a k-tile lies in one pixel as well; elsewhere it
takes the vector apart into elements, each with divisions of its own.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.sym import Analyzer
from tvm.tirx import FloorDiv, FloorMod, For, ForKind, IntImm, floordiv, floormod
from tvm_ffi import structural


def aligned_vectors(mod: tvm.IRModule) -> tvm.IRModule:
    """Return functions whose vectorized loops divide the place of a vector, not of each element, where all elements have one quotient."""
    return tvm.IRModule(
        {name: func.with_body(structural.structural_map(func.body, [(For, _loop)])) for name, func in mod.functions.items()}
    )


def _loop(loop: Any) -> Any:
    if loop.kind != ForKind.VECTORIZED or not isinstance(loop.extent, IntImm):
        return loop
    analyzer, lanes, at = Analyzer(), int(loop.extent), loop.loop_var

    def begin(place: Any, divisor: Any) -> Any | None:
        """Return the place of the vector's first element; None unless it is a multiple of the lanes, as the divisor is."""
        if not isinstance(divisor, IntImm) or int(divisor) % lanes or not _holds(place, at):
            return None
        first = analyzer.simplify(place - at)
        known = analyzer.modular_set(first)
        return None if _holds(first, at) or known.coeff % lanes or known.base % lanes else first

    def quotient(node: Any) -> Any:
        first = begin(node.a, node.b)
        return node if first is None else floordiv(first, node.b)

    def remainder(node: Any) -> Any:
        first = begin(node.a, node.b)
        return node if first is None else floormod(first, node.b) + at

    body = structural.structural_map(loop.body, [(FloorDiv, quotient), (FloorMod, remainder)])
    return For(at, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)


def _holds(expr: Any, var: Any) -> bool:
    found: list[Any] = []
    structural.structural_walk(expr, [(type(var), lambda each: found.append(each) if each.same_as(var) else None)])
    return bool(found)
