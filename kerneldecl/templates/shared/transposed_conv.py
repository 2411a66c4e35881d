"""Owns the reading of a transposed convolution's blocks: the convolution of all its phases, and where their results are placed.

Knows nothing of kernels, and recognises the blocks by their structure, never by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm.ir import TensorLoad
from tvm.s_tir import Schedule
from tvm.sym import Analyzer
from tvm.tirx import Add, BufferStore, Cast, Mul
from tvm_ffi import structural

NAXES = 9
"""Axes of the convolution of all phases: image, row, column, phase down and along, output channel; tap's row and column, input channel."""


class PhaseResults(NamedTuple):
    """Where a function's last block puts the results of all phases, and what it makes of them."""

    axes: tuple[Any, ...]
    """The block's variables of image, row, column and channel."""
    value: Any
    """The element that it stores."""
    place: tuple[Any, ...]
    """Indices of the result there."""
    offsets: tuple[int, int]
    """What is added to row and column before they are divided by the stride."""
    extents: tuple[int, int]
    """Rows and columns of the result."""


def following_blocks(sch: Schedule, block: Any) -> list[Any]:
    """Return the blocks behind one, in order."""
    children = list(sch.get_child_blocks(sch.get_sblock("root")))
    position = next(at for at, child in enumerate(children) if sch.get(child).same_as(sch.get(block)))
    return children[position + 1 :]


def phase_operands(block: Any, stride: int) -> tuple[Any, Any] | None:
    """Return the buffers of pixels and of weights of a block that convolves all phases, or None for another block."""
    image, row, column, down, along, f, r, s, c = axes = [axis.var for axis in block.iter_vars]
    body = block.body
    if len(block.reads) != 2 or not isinstance(body, BufferStore) or not isinstance(body.value, Add) or not isinstance(body.value.b, Mul):
        return None
    most = [int(axis.dom.extent) for axis in block.iter_vars[6:8]]
    pixel, weight = (each.value if isinstance(each, Cast) else each for each in (body.value.b.a, body.value.b.b))
    if not isinstance(pixel, TensorLoad) or not isinstance(weight, TensorLoad):
        return None
    wanted = (
        (pixel.indices, (image, row + r, column + s, c)),
        (weight.indices, (down + (most[0] - 1 - r) * stride, along + (most[1] - 1 - s) * stride, c, f)),
        (body.indices, axes[:6]),
    )
    analyzer = bound_axes(block)
    return (pixel.source, weight.source) if all(are_equal(analyzer, *pair) for pair in wanted) else None


def bound_axes(block: Any) -> Analyzer:
    """Return an analyzer that knows the range of each axis of a block: TVM writes 0 for an axis of extent 1."""
    analyzer = Analyzer()
    for axis in block.iter_vars:
        analyzer.bind(axis.var, axis.dom)
    return analyzer


def are_equal(analyzer: Analyzer, found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Say whether two lists of indices are the same ones."""
    return len(found) == len(wanted) and all(analyzer.can_prove_equal(*pair) for pair in zip(found, wanted, strict=True))


def phase_results(last: Any, phases: Any, stride: int) -> PhaseResults | None:
    """Return where the last block puts results, None where it reads the phases otherwise than a transposed convolution does."""
    loads: list[Any] = []
    structural.structural_walk(last.body, [(TensorLoad, lambda load: loads.append(load) if load.source.same_as(phases) else None)])
    axes, analyzer = [axis.var for axis in last.iter_vars], bound_axes(last)
    if len(axes) != 4 or not loads or not are_equal(analyzer, last.body.indices, axes):
        return None
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
        image, y, x, f = (axes[at] for at in order)
        for top, left in ((top, left) for top in range(stride) for left in range(stride)):
            down, along = y + top, x + left
            wanted = (image, down // stride, along // stride, down % stride, along % stride, f)
            if all(are_equal(analyzer, load.indices, wanted) for load in loads):
                rows, columns = (int(last.iter_vars[at].dom.extent) for at in order[1:3])
                return PhaseResults((image, y, x, f), last.body.value, tuple(last.body.indices), (top, left), (rows, columns))
    return None
