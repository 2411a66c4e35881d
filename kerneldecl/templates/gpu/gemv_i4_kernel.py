"""Owns the TIRx kernel of a vector's product with 4-bit weights: warps that each have a ring of stages, and rows of their own.

Knows nothing of which computations it is for, nor how parameters are chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.compiler.intrinsics.int4_dot import (
    bias_source,
    cp_async_source,
    dot_rows_source,
    permute_registers_source,
    permute_source,
    prefetch_source,
    reduce_source,
)
from kerneldecl.compiler.passes.l2_prefetch import PREFETCH_BYTES
from kerneldecl.model import Gpu

ROWS = (2, 4, 8)
LANES = 32
STEP, STEP_BYTES = 1024, 512
"""Weights of a row that a warp takes at once: 16 bytes a lane."""
GROUPS = (128, 256, 512, 1024)
"""Weights with one scale: at least the four lanes whose weights tensor cores add up."""
VECTOR_BYTES = 16
LEAST_COPY_BYTES = 4
LINE_BYTES = 128
HELD = 4
"""Vectors of factors that a thread has on their way together."""
QUADS = 8
"""Of a warp, each with sums of its own."""


@dataclass(frozen=True)
class Kernel:
    """The product's sizes and the template's parameters."""

    n: int
    k: int
    group: int
    rows: int
    warps: int
    stages: int
    blocks: int
    warps_k: int
    sm_count: int
    overlaps: bool
    """With the end of the kernel before it."""

    @property
    def steps(self) -> int:
        return -(-self.k // STEP)

    @property
    def tiles(self) -> int:
        return -(-self.n // self.rows)

    @property
    def row_groups(self) -> int:
        """Of a block's warps, each with rows of its own."""
        return self.warps // self.warps_k

    @property
    def own_steps(self) -> int:
        """That a warp takes of the rows of its team; the last one may lie beyond them."""
        return -(-self.steps // self.warps_k)

    @property
    def holds(self) -> bool:
        """Whether warps have what they need of the vector in registers: one step."""
        return self.own_steps == 1

    @property
    def kept_steps(self) -> int:
        """Of the vector, in shared memory."""
        return 1 if self.holds else self.steps

    @property
    def grid(self) -> int:
        return min(self.blocks * self.sm_count, -(-self.tiles // self.row_groups))

    @property
    def block_rows(self) -> int:
        """Whose parts a block adds up at its end, in the order in which its teams come to them."""
        return -(-self.tiles // (self.grid * self.row_groups)) * self.row_groups * self.rows if self.warps_k > 1 else 0

    @property
    def vectors(self) -> int:
        """Of 8 elements, that the vector has with what fills its last step."""
        return self.steps * STEP // 8

    @property
    def turns(self) -> int:
        """In which a block's threads load the vector."""
        return -(-self.vectors // (HELD * self.warps * LANES))

    @property
    def ahead_rows(self) -> int:
        """Of a warp's first step, to be asked for ahead."""
        return min(self.rows, PREFETCH_BYTES // (self.blocks * self.warps * STEP_BYTES))

    @property
    def scales(self) -> int:
        """Of a row and a step."""
        return STEP // self.group

    @property
    def copied_scales(self) -> int:
        """That a lane copies at once: rows of scales are side by side, wherever they start."""
        return math.gcd(self.scales, self.k // self.group, VECTOR_BYTES // 2)

    @property
    def smem_bytes(self) -> int:
        ring = self.warps * self.stages * self.rows * (STEP_BYTES + 2 * self.scales)
        return ring + (2 * STEP + 4 * QUADS) * self.kept_steps + 4 * max(4, self.block_rows * self.warps_k)

    def fits(self, gpu: Gpu) -> bool:
        """Say whether the kernel can be made so."""
        return (
            self.rows in ROWS
            and self.group in GROUPS
            and self.warps % self.warps_k == 0
            and self.warps_k <= self.steps
            and self.k % self.group == 0
            and 2 * self.copied_scales >= LEAST_COPY_BYTES
            and self.rows * self.scales // self.copied_scales <= LANES
            and self.stages >= 2
            and self.warps * LANES <= gpu.max_threads_per_block
            and self.smem_bytes <= gpu.smem_per_block_optin_bytes
            and self.blocks * (self.smem_bytes + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
            and self.n * self.k // 2 < 2**31
        )


def _at_most(place: Any, most: int, is_sure: bool) -> Any:
    return place if is_sure else T.min(place, most)


@T.inline
def _fetch(kernel, sources, stages, tile, column, slot, lane):
    """Have a warp start the copies of one step of its rows, zeros in place of what lies beyond them."""
    packed, scale = T.meta_var(sources[0]), T.meta_var(sources[1])
    weights, scales = T.meta_var(stages[0]), T.meta_var(stages[1])
    row_bytes = T.meta_var(kernel.k // 2)
    at_once = T.meta_var(kernel.copied_scales)
    pieces = T.meta_var(kernel.scales // at_once)
    is_whole = T.meta_var(kernel.k % (kernel.warps_k * STEP) == 0)
    if tile < kernel.tiles:
        byte = T.meta_var(column * STEP_BYTES + lane * VECTOR_BYTES)
        for r in T.unroll(kernel.rows):
            row = T.meta_var(_at_most(tile * kernel.rows + r, kernel.n - 1, kernel.n % kernel.rows == 0))
            T.cuda.func_call(
                cp_async_source(VECTOR_BYTES)[0],
                weights.ptr_to([slot, r, lane * VECTOR_BYTES]),
                packed.ptr_to([row, _at_most(byte, row_bytes - VECTOR_BYTES, is_whole)]),
                VECTOR_BYTES if is_whole else T.Select(byte < row_bytes, VECTOR_BYTES, 0),
                source_code=cp_async_source(VECTOR_BYTES)[1],
            )
        if lane < kernel.rows * pieces:
            owner = T.meta_var(_at_most(tile * kernel.rows + lane // pieces, kernel.n - 1, kernel.n % kernel.rows == 0))
            first = T.meta_var(column * kernel.scales + lane % pieces * at_once)
            T.cuda.func_call(
                cp_async_source(2 * at_once)[0],
                scales.ptr_to([slot, lane // pieces, lane % pieces * at_once]),
                scale.ptr_to([owner, _at_most(first, kernel.k // kernel.group - at_once, is_whole)]),
                2 * at_once if is_whole else T.Select(first < kernel.k // kernel.group, 2 * at_once, 0),
                source_code=cp_async_source(2 * at_once)[1],
            )
    T.ptx.cp.async_.commit_group()


@T.inline
def _ask_ahead(kernel, packed, tile, column, lane):
    """Have a warp ask for the weights of its first step, which come to the second-level cache: that is no access and changes nothing."""
    lines = T.meta_var(STEP_BYTES // LINE_BYTES)
    row_bytes = T.meta_var(kernel.k // 2)
    byte = T.meta_var(column * STEP_BYTES + lane % lines * LINE_BYTES)
    if T.And(lane < kernel.ahead_rows * lines, T.And(tile < kernel.tiles, byte < row_bytes)):
        row = T.meta_var(_at_most(tile * kernel.rows + lane // lines, kernel.n - 1, kernel.n % kernel.rows == 0))
        T.cuda.func_call(prefetch_source()[0], packed.ptr_to([row, byte]), source_code=prefetch_source()[1])


@T.inline
def _load(kernel, x, held, first, thread):
    """Have a thread load some of the vector, zeros beyond its end."""
    words = T.decl_buffer((kernel.k // 2,), "uint32", data=x.data)
    for i in T.unroll(HELD):
        place = T.meta_var(((first + i) * (kernel.warps * LANES) + thread) * 4)
        if place < kernel.k // 2:
            for v in T.vectorized(4):
                held[i * 4 + v] = words[place + v]
        else:
            for v in T.unroll(4):
                held[i * 4 + v] = T.uint32(0)


@T.inline
def _keep(kernel, held, operands, first, thread):
    """Have a thread store to shared memory what it holds, in the order in which lanes multiply by it."""
    for i in T.unroll(HELD):
        place = T.meta_var((first + i) * (kernel.warps * LANES) + thread)
        if place < kernel.vectors:
            T.cuda.func_call(
                permute_source()[0],
                operands.ptr_to([((place // 128 * 4 + place % 4) * LANES + place % 128 // 4) * 8]),
                held.ptr_to([i * 4]),
                source_code=permute_source()[1],
            )


@T.inline
def _load_own(kernel, x, own, column, lane):
    """Have a lane load its factors of one step, zeros beyond the vector's end."""
    words = T.decl_buffer((kernel.k // 2,), "uint32", data=x.data)
    place = T.meta_var(column * (STEP // 2) + lane * 16)
    if place < kernel.k // 2:
        for i in T.unroll(4):
            for v in T.vectorized(4):
                own[i * 4 + v] = words[place + i * 4 + v]
    else:
        for i in T.unroll(16):
            own[i] = T.uint32(0)


@T.inline
def _start(kernel, operands, starts, thread):
    """Have a block compute what the sums of all steps begin with."""
    threads = T.meta_var(kernel.warps * LANES)
    for i in T.serial(-(-kernel.steps * QUADS // threads)):
        place = T.meta_var(i * threads + thread)
        if place < kernel.steps * QUADS:
            T.cuda.func_call(
                bias_source()[0],
                starts.ptr_to([place]),
                operands.ptr_to([place // QUADS * STEP + place % QUADS * 32]),
                source_code=bias_source()[1],
            )


@T.inline
def _finish(kernel, y, parts, sums, tile, turn, warp, lane):
    """Add up what the lanes of a warp have of their rows, and store it: a result, or a part of one."""
    lanes = T.meta_var(LANES // kernel.rows)
    row = T.meta_var(lane // lanes)
    total: T.float32 = T.cuda.func_call(
        reduce_source(kernel.rows)[0], sums.ptr_to([0]), source_code=reduce_source(kernel.rows)[1], return_type="float32"
    )
    if lane % lanes == 0:
        if kernel.warps_k > 1:
            warps_k = T.meta_var(turn * kernel.row_groups + warp // kernel.warps_k)
            parts[(warps_k * kernel.rows + row) * kernel.warps_k + warp % kernel.warps_k] = total
        elif tile * kernel.rows + row < kernel.n:
            y[tile * kernel.rows + row] = T.cast(total, "float16")


@T.inline
def _add_up(kernel, y, parts, block, thread):
    """Have a block add up the parts of its rows, in one order, and store them."""
    threads = T.meta_var(kernel.warps * LANES)
    for i in T.serial(-(-kernel.block_rows // threads)):
        place = T.meta_var(i * threads + thread)
        warps_k = T.meta_var(place // kernel.rows)
        tile = T.meta_var((warps_k // kernel.row_groups * kernel.grid + block) * kernel.row_groups + warps_k % kernel.row_groups)
        row = T.meta_var(tile * kernel.rows + place % kernel.rows)
        if T.And(place < kernel.block_rows, row < kernel.n):
            total: T.float32 = 0.0
            for part in T.unroll(kernel.warps_k):
                total = total + parts[place * kernel.warps_k + part]
            y[row] = T.cast(total, "float16")


def build(kernel: Kernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel: of weights, scales, vector and result."""
    shapes = (kernel.n, kernel.k // 2), (kernel.n, kernel.k // kernel.group), (kernel.k,), (kernel.n,)
    dtypes = "uint8", "float16", "float16", "float16"
    packed, scale, x, y = params = [
        tirx.decl_buffer(shape, dtype, name) for shape, dtype, name in zip(shapes, dtypes, ("W", "scale", "x", "y"), strict=True)
    ]
    dot, source = dot_rows_source(kernel.rows, kernel.group, in_registers=kernel.holds)
    permutes, permuting = permute_registers_source()

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": kernel.blocks})
        if kernel.overlaps:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.grid])
        warp = T.warp_id([kernel.warps])
        lane = T.lane_id([LANES])
        pool = T.SMEMPool()
        weights = pool.alloc((kernel.warps * kernel.stages, kernel.rows, STEP_BYTES), "uint8", align=16)
        scales = pool.alloc((kernel.warps * kernel.stages, kernel.rows, kernel.scales), "float16", align=16)
        operands = pool.alloc((kernel.kept_steps * STEP,), "float16", align=16)
        starts = pool.alloc((kernel.kept_steps * QUADS,), "float32", align=16)
        parts = pool.alloc((max(1, kernel.block_rows * kernel.warps_k),), "float32", align=16)
        pool.commit()
        first_column = T.meta_var(warp % kernel.warps_k)
        first = T.meta_var(block * kernel.row_groups + warp // kernel.warps_k)
        if kernel.overlaps:
            # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
            T.ptx.griddepcontrol.launch_dependents()
            _ask_ahead(kernel, packed, first, first_column, lane)
            T.ptx.griddepcontrol.wait()

        thread = T.meta_var(warp * LANES + lane)
        own = T.alloc_local((HELD * 4,), "uint32")
        # Asked for before the weights, behind which it would come.
        if kernel.holds:
            _load_own(kernel, x, own, first_column, lane)
        else:
            _load(kernel, x, own, 0, thread)
        stride = T.meta_var(kernel.grid * kernel.row_groups)
        slots = T.meta_var(warp * kernel.stages)
        ahead_tile: T.int32 = first
        ahead_step: T.int32 = 0
        for s in T.unroll(kernel.stages - 1):
            ahead = T.meta_var(ahead_step * kernel.warps_k + first_column)
            _fetch(kernel, (packed, scale), (weights, scales), ahead_tile, ahead, slots + s, lane)
            ahead_step = ahead_step + 1
            if ahead_step == kernel.own_steps:
                ahead_step = 0
                ahead_tile = ahead_tile + stride
        begin: T.float32 = 0.0
        if kernel.holds:
            begin = T.cuda.func_call(permutes, own.ptr_to([0]), source_code=permuting, return_type="float32")
        else:
            _keep(kernel, own, operands, 0, thread)
            for i in T.serial(kernel.turns - 1):
                _load(kernel, x, own, (i + 1) * HELD, thread)
                _keep(kernel, own, operands, (i + 1) * HELD, thread)
            T.cuda.cta_sync()
            _start(kernel, operands, starts, thread)
            T.cuda.cta_sync()
        sums = T.alloc_local((kernel.rows,), "float32")
        tile: T.int32 = first
        turn: T.int32 = 0
        slot: T.int32 = 0
        while tile < kernel.tiles:
            for r in T.unroll(kernel.rows):
                sums[r] = T.float32(0)
            for step in T.serial(kernel.own_steps):
                T.ptx.cp.async_.wait_group(kernel.stages - 2)
                T.cuda.warp_sync()
                # Into the stage that every lane has left.
                a = T.meta_var(T.Select(slot == 0, kernel.stages - 1, slot - 1))
                ahead = T.meta_var(ahead_step * kernel.warps_k + first_column)
                _fetch(kernel, (packed, scale), (weights, scales), ahead_tile, ahead, slots + a, lane)
                ahead_step = ahead_step + 1
                if ahead_step == kernel.own_steps:
                    ahead_step = 0
                    ahead_tile = ahead_tile + stride
                column = T.meta_var(step * kernel.warps_k + first_column)
                stage = T.meta_var(weights.ptr_to([slots + slot, 0, lane * VECTOR_BYTES]))
                of_stage = T.meta_var(scales.ptr_to([slots + slot, 0, 0]))
                if kernel.holds:
                    T.cuda.func_call(dot, sums.ptr_to([0]), stage, of_stage, own.ptr_to([0]), begin, source_code=source)
                elif column < kernel.steps:
                    T.cuda.func_call(
                        dot,
                        sums.ptr_to([0]),
                        stage,
                        of_stage,
                        operands.ptr_to([(column * 4 * LANES + lane) * 8]),
                        starts.ptr_to([column * QUADS]),
                        source_code=source,
                    )
                slot = T.Select(slot == kernel.stages - 1, 0, slot + 1)
            _finish(kernel, y, parts, sums, tile, turn, warp, lane)
            tile = tile + stride
            turn = turn + 1
        T.ptx.cp.async_.wait_group(0)
        if kernel.warps_k > 1:
            T.cuda.cta_sync()
            _add_up(kernel, y, parts, block, thread)

    func = tirx.PrimFunc(list(params), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
