"""Owns how values and scales of a k-tile come to shared memory: as they are by cp.async, then converted, or converted on the way.

Knows nothing of policies, of how k-tiles are multiplied or of what values mean. Blocks are those of `scaled_products`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm.s_tir import Schedule

from kerneldecl.analysis.gpu_limits import MIN_ASYNC_COPY_BYTES, VECTOR_BYTES
from kerneldecl.analysis.params import GemmTcParams
from kerneldecl.compiler.intrinsics.fragment_loads import LANES
from kerneldecl.model import dtype_bytes

VALUE_VECTOR = 8
"""Values that a thread converts at once: 16 bytes of float16."""

LOADED_VECTOR = 4
"""Bytes that a thread loads at once: TVM's CUDA has vectors of so many elements of 8 bits of all dtypes."""
ROWS_DIMENSIONS = 2
"""Dimensions of values that lie in rows, not packed."""


class Staging(NamedTuple):
    """Where copies belong."""

    sch: Schedule
    k_loop: Any
    """The loop over k-tiles."""
    tiles: GemmTcParams
    is_staged: bool
    """Whether values come to shared memory as they are."""
    has_words: bool = False
    """Whether four of B's values are made together, by a block of their own."""

    def values(self, name: str, fragment: Any) -> tuple[Any, int]:
        """Have all threads bring a k-tile of an operand, `left` or `right`, to shared memory, several neighbours along k each.

        Return the block that stores them converted, and the number of copies before it, whose memory is static: TVM finds no
        dependence between it and the dynamic one.
        """
        sch, values = self.sch, self.sch.get_sblock(name)
        is_left = name == "left"
        sources = [sch.get_sblock("stored")] if is_left else []
        made = [sch.get_sblock("words") if self.has_words else values, values][self.has_words ^ 1 :] if not is_left else [values]
        if not is_left and self.is_staged:
            sources = [sch.cache_read(made[0], at, "shared") for at in _staged_reads(sch.get(made[0]))]
        copy = sch.cache_read(fragment, 0 if is_left else 1, "shared.dyn")
        for block in made:
            sch.set_scope(block, 0, "local")
        for block in (copy, *reversed(made)):
            sch.compute_at(block, self.k_loop)
        staged = self._staged(sources)  # while TVM sees which elements of a k-tile they are
        lane = self._spread_rows(copy)
        for block in reversed(made):
            sch.compute_at(block, lane)
        if self.is_staged and len(sch.get(sources[0]).writes[0].region) == ROWS_DIMENSIONS:
            self._load_vectors(made[0], lane)
        for loop in [loop for block in made for loop in _loops_within(sch, block, lane)]:
            sch.unroll(loop)
        return copy, staged

    def scales(self) -> int:
        """Have all threads bring the scales of a k-tile to shared memory, where values come as they are; return the number of copies."""
        blocks = [self.sch.get_sblock(name) for name in ("left_scales", "right_scales")]
        constant = [block for block in blocks if not self.sch.get(block).reads]
        for block in constant:
            self.sch.compute_inline(block)
        return self._staged([block for block in blocks if not any(block.same_as(each) for each in constant)])

    def pipeline(self, copies: tuple[int, int, int]) -> None:
        """Pipeline the loop: `copies` are the numbers of copies of both operands' values and of scales."""
        if self.tiles.stages == 1:
            return
        left, right, scales = copies
        if self.is_staged:
            # Values of each operand before they are converted; sums are cleared, added up, and scaled.
            is_copy = [True] * left + [False] + [True] * right + [False, False, False] + [True] * scales + [False]
        else:
            is_copy = [True, True, False, False, False]
        first = sorted(range(len(is_copy)), key=lambda at: (not is_copy[at], at))
        self.sch.annotate(self.k_loop, "software_pipeline_stage", [0 if each else self.tiles.stages - 1 for each in is_copy])
        self.sch.annotate(self.k_loop, "software_pipeline_order", [first.index(at) for at in range(len(is_copy))])
        if self.is_staged:
            self.sch.annotate(self.k_loop, "software_pipeline_async_stages", [0])

    def _staged(self, blocks: list[Any]) -> int:
        """Copy what blocks read to shared memory, inline them where nothing is staged; return the number of copies."""
        for block in blocks:
            if not self.is_staged:
                self.sch.compute_inline(block)
                continue
            self.sch.set_scope(block, 0, "shared")
            self.sch.compute_at(block, self.k_loop)
            self._spread(block)
        return len(blocks) * self.is_staged

    def _load_vectors(self, values: Any, lane: Any) -> None:
        """Have a thread load its neighbours of a row from shared memory at once: nvcc loads bytes one by one."""
        loaded = self.sch.cache_read(values, 0, "local")
        self.sch.compute_at(loaded, lane)
        elements = self.sch.fuse(*_loops_within(self.sch, loaded, lane))
        size = int(self.sch.get(elements).extent)
        if size > LOADED_VECTOR:  # TVM takes an array of one vector for a scalar
            self.sch.vectorize(self.sch.split(elements, [None, math.gcd(LOADED_VECTOR, size)])[1])

    def _spread(self, copy: Any) -> None:
        """Spread a copy over all threads, in vectors of 4 to 16 bytes."""
        sch, threads = self.sch, self.tiles.warps * LANES
        item_bytes = dtype_bytes(str(sch.get(copy).writes[0].source.dtype))
        *outer, row = _loops_within(sch, copy, self.k_loop)
        size, length = (math.prod(int(sch.get(loop).extent) for loop in loops) for loops in ((*outer, row), (row,)))
        least = max(1, MIN_ASYNC_COPY_BYTES // item_bytes)
        vector = math.gcd(VECTOR_BYTES // item_bytes, max(least, size // threads), length)
        in_row, element = sch.split(row, [None, vector])
        vectors = sch.fuse(*outer, in_row)
        _, warp, lane = sch.split(vectors, [None, self.tiles.warps, LANES])
        sch.bind(warp, "threadIdx.y")
        sch.bind(lane, "threadIdx.x")
        sch.vectorize(element)

    def _spread_rows(self, copy: Any) -> Any:
        """Spread a copy of rows over all threads, in vectors of VALUE_VECTOR at most; return the loop over a warp's lanes."""
        sch, tiles = self.sch, self.tiles
        row, column = sch.get_loops(copy)[-2:]
        vector = math.gcd(VALUE_VECTOR, max(1, int(sch.get(row).extent) * tiles.block_k // (tiles.warps * LANES)))
        in_row = math.gcd(tiles.block_k // vector, LANES)
        _, warp, row_lane = sch.split(row, [None, tiles.warps, LANES // in_row])
        column, column_lane, element = sch.split(column, [None, in_row, vector])
        sch.reorder(warp, column, row_lane, column_lane, element)
        lane = sch.fuse(row_lane, column_lane)
        sch.bind(warp, "threadIdx.y")
        sch.bind(lane, "threadIdx.x")
        sch.vectorize(element)
        return lane


def _staged_reads(values: Any) -> list[int]:
    """Return which operands of the weights are staged: values, and zero points of which neighbouring columns have neighbours."""
    columns = int(values.writes[0].source.shape[0])
    return [at for at, read in enumerate(values.reads) if at == 0 or int(read.source.shape[-1]) == columns]


def _loops_within(sch: Schedule, block: Any, outer: Any) -> list[Any]:
    """Return a block's loops within an outer one."""
    loops = list(sch.get_loops(block))
    return loops[1 + next(at for at, loop in enumerate(loops) if sch.get(loop).same_as(sch.get(outer))) :]
