"""Owns what CPU and GPU templates of contractions share: finding the one reduction, and merging its epilogue.

Knows nothing of policies, of tile sizes or of any one operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm.s_tir import Schedule
from tvm.tirx import IntImm

from kerneldecl.compiler.blocks import is_reduction


class FusedReduction(NamedTuple):
    """A function's only reduction, and the one block that its epilogue was merged into."""

    block: Any
    last: Any | None
    """None where the reduction has no epilogue."""
    behind: Any | None = None
    """The block that puts results in other places, all that follows merged into it; None where results are where they belong."""

    def blocks(self, sch: Schedule) -> tuple[Any, Any | None]:
        """Return both as the schedule's TensorIR blocks."""
        return sch.get(self.block), None if self.last is None else sch.get(self.last)


def fuse_epilogue(sch: Schedule, *, has_behind: bool = False) -> FusedReduction | None:
    """Merge the epilogue of a function's only reduction into one block; None where it has several reductions or another epilogue.

    With `has_behind`, blocks may follow that put the results in other places: they are merged into one, which is a kernel of its own.
    """
    block = only_reduction(sch)
    if block is None:
        return None
    behind = _behind(sch, block) if has_behind else []
    moved = merge(sch, behind) if behind else None
    epilogue = epilogue_of(sch, block, but=behind[-1:])
    return None if epilogue is None else FusedReduction(block, merge(sch, epilogue) if epilogue else None, moved)


def _behind(sch: Schedule, block: Any) -> list[Any]:
    """Return the blocks from the first one on that reads the results at other places; none where there is a reduction among them."""
    following = _following(sch, block)
    results = [sch.get(block).writes[0].source]
    for at, each in enumerate(following):
        if not _is_elementwise(sch.get(each), results):
            return [] if any(is_reduction(sch.get(rest)) for rest in following[at:]) else following[at:]
        results.append(sch.get(each).writes[0].source)
    return []


def _following(sch: Schedule, block: Any) -> list[Any]:
    children = list(sch.get_child_blocks(sch.get_sblock("root")))
    position = next(i for i, child in enumerate(children) if sch.get(child).same_as(sch.get(block)))
    return children[position + 1 :]


def only_reduction(sch: Schedule) -> Any | None:
    """Return the function's reduction block, or None where it has none or several."""
    found = [block for block in sch.get_child_blocks(sch.get_sblock("root")) if is_reduction(sch.get(block))]
    return found[0] if len(found) == 1 else None


def positions(region: Any, axes: Sequence[Any]) -> list[int | None]:
    """Return, for each dimension of a buffer region, which of the axes is its index; None where the index is anything but one axis."""
    return [next((i for i, axis in enumerate(axes) if dim.min.same_as(axis)), None) for dim in region.region]


def plain_positions(region: Any, axes: Sequence[Any]) -> list[int] | None:
    """Return `positions`, or None where any dimension's index is not one axis."""
    found = [position for position in positions(region, axes) if position is not None]
    return found if len(found) == len(region.region) else None


def epilogue_of(sch: Schedule, block: Any, but: Sequence[Any] = ()) -> list[Any] | None:
    """Return the blocks after `block`, None unless each is elementwise in the results before it and all but the last have consumers.

    The blocks in `but`, which come last, are left out.
    """
    epilogue = _following(sch, block)[: -len(but) or None]
    results = [sch.get(block).writes[0].source]
    for following in epilogue:
        sblock = sch.get(following)
        if not _is_elementwise(sblock, results):
            return None
        results.append(sblock.writes[0].source)
    return epilogue if all(sch.get_consumers(inner) for inner in [block, *epilogue][:-1]) else None


def _is_elementwise(block: Any, results: Sequence[Any]) -> bool:
    """Say whether a block writes each element once and reads earlier results at that element alone."""
    if is_reduction(block) or len(block.writes) != 1:
        return False
    axes = [axis.var for axis in block.iter_vars]
    written = plain_positions(block.writes[0], axes)
    own = [read for read in block.reads if any(read.source.same_as(buffer) for buffer in results)]
    # Of several elements, TVM gives the region from the first to the last one.
    is_single = all(isinstance(dim.extent, IntImm) and int(dim.extent) == 1 for read in own for dim in read.region)
    accessed = [positions(read, axes) for read in own]
    return is_single and written is not None and sorted(written) == list(range(len(axes))) and all(each == written for each in accessed)


def merge(sch: Schedule, chain: Sequence[Any]) -> Any:
    """Inline every block of an epilogue into the last one, and return that one."""
    for block in chain[:-1]:
        sch.compute_inline(block)
    return chain[-1]
