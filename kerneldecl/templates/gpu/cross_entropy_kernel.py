"""Owns the kernel of cross entropies: each thread keeps a maximum and a sum of powers of what it has met, which threads then combine.

Knows nothing of how parameters are chosen.

Powers are distances to the maximum so far; where a larger element comes, the sum is scaled to it (Milakov, Gimelshein, Online normalizer
calculation for softmax, 2018). Each sum has one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.cross_entropy import CrossEntropyParams
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.compiler.cross_entropy import CrossEntropySpec
from kerneldecl.templates.gpu.split_rows_statistics import ALL_LANES, power, reference

STATISTICS = 2
"""The maximum, and the sum of powers as distances to it."""


@dataclass(frozen=True)
class CrossEntropyKernel:
    """A cross entropy with the parameters of its kernel."""

    spec: CrossEntropySpec
    params: CrossEntropyParams
    pdl: bool

    @property
    def loaded(self) -> int:
        """Return the elements that a thread loads at once."""
        return self.params.width * self.params.unroll

    @property
    def warps(self) -> int:
        return self.params.threads // WARP_LANES


class Thread(NamedTuple):
    """A thread's place."""

    kernel: CrossEntropyKernel
    row: Any
    place: Any

    @property
    def first(self) -> Any:
        return self.row * self.kernel.spec.classes

    def column(self, step: Any, vector: int) -> Any:
        """Return the column of a vector's first element: neighbours take neighbours."""
        params = self.kernel.params
        return ((step * params.unroll + vector) * params.threads + self.place) * params.width


def _lowest() -> Any:
    return tirx.const(float("-inf"), "float32")


@T.inline
def _load(thread, x, step, held):
    """Load a thread's elements of a step; those that a row does not have are minus infinity."""
    kernel, width = T.meta_var((thread.kernel, thread.kernel.params.width))
    lowest = T.alloc_local((1,), "float32")  # a constant of bfloat16 would be written as none that CUDA knows
    lowest[0] = _lowest()
    for v in T.unroll(kernel.params.unroll):
        if thread.column(step, v) < kernel.spec.classes:
            for w in T.vectorized(width):
                held[v * width + w] = x[thread.first + thread.column(step, v) + w]
        else:
            for w in T.unroll(width):
                held[v * width + w] = T.cast(lowest[0], kernel.spec.dtype)


@T.inline
def _merge(stats, other):
    """Merge another maximum and its sum into those of a thread."""
    highest: T.float32 = T.max(stats[0], other[0])
    stats[1] = stats[1] * power(stats[0], reference(highest)) + other[1] * power(other[0], reference(highest))
    stats[0] = highest


@T.inline
def _add_step(kernel, held, stats):
    """Add the powers of a step's elements to those of before."""
    highest = T.alloc_local((1,), "float32")
    highest[0] = stats[0]
    for i in T.unroll(kernel.loaded):
        highest[0] = T.max(highest[0], T.cast(held[i], "float32"))
    stats[1] = stats[1] * power(stats[0], reference(highest[0]))
    stats[0] = highest[0]
    for i in T.unroll(kernel.loaded):
        stats[1] = stats[1] + power(T.cast(held[i], "float32"), reference(stats[0]))


@T.inline
def _over_lanes(stats):
    """Combine what the lanes of a warp have found, which all get the result."""
    other = T.alloc_local((STATISTICS,), "float32")
    for bit in T.unroll(5):
        for k in T.unroll(STATISTICS):
            other[k] = T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), stats[k], 1 << bit, 32, 32)
        _merge(stats, other)


@T.inline
def _over_block(thread, stats, cells):
    """Combine what all threads have found; the first warp gets the result."""
    kernel = T.meta_var(thread.kernel)
    _over_lanes(stats)
    if kernel.warps > 1:
        if thread.place % WARP_LANES == 0:
            for k in T.unroll(STATISTICS):
                cells[k, thread.place // WARP_LANES] = stats[k]
        T.cuda.cta_sync()
        stats[0] = _lowest()
        stats[1] = T.float32(0)
        if thread.place % WARP_LANES < kernel.warps:
            for k in T.unroll(STATISTICS):
                stats[k] = cells[k, thread.place % WARP_LANES]
        _over_lanes(stats)


@T.inline
def _store(thread, x, target, y, stats):
    """Have one thread look up its row's class, and store the loss."""
    spec = T.meta_var(thread.kernel.spec)
    if thread.place == 0:
        own = T.alloc_local((1,), "int32")
        own[0] = T.cast(target[thread.row], "int32")
        loss = T.alloc_local((1,), "float32")
        loss[0] = T.log(stats[1]) + (stats[0] - T.cast(x[thread.first + T.max(own[0], 0)], "float32"))
        y[thread.row] = T.Select(own[0] == spec.ignore_index, T.float32(0), loss[0])


def build(kernel: CrossEntropyKernel) -> tvm.IRModule:
    """Return a module whose `main` is the function."""
    spec, params = kernel.spec, kernel.params
    shapes = {"X": ((spec.rows, spec.classes), spec.dtype), "T": ((spec.rows,), spec.index_dtype), "Y": ((spec.rows,), spec.out_dtype)}
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, (shape, dtype) in shapes.items()}

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        row = T.cta_id([spec.rows])
        warp = T.warp_id([kernel.warps])
        lane = T.lane_id([WARP_LANES])
        x = T.meta_var(T.decl_buffer((spec.rows * spec.classes,), spec.dtype, data=buffers["X"].data))
        target = T.meta_var(T.decl_buffer((spec.rows,), spec.index_dtype, data=buffers["T"].data))
        y = T.meta_var(T.decl_buffer((spec.rows,), spec.out_dtype, data=buffers["Y"].data))
        pool = T.SMEMPool()
        cells = pool.alloc((STATISTICS, kernel.warps), "float32", align=16)
        pool.commit()
        held = T.alloc_local((kernel.loaded,), spec.dtype)
        stats = T.alloc_local((STATISTICS,), "float32")
        stats[0] = _lowest()
        stats[1] = T.float32(0)
        thread = T.meta_var(Thread(kernel, row, warp * WARP_LANES + lane))
        if kernel.pdl:
            T.ptx.griddepcontrol.launch_dependents()
            T.ptx.griddepcontrol.wait()
        for step in T.serial(params.steps(spec.sizes)):
            _load(thread, x, step, held)
            _add_step(kernel, held, stats)
        _over_block(thread, stats, cells)
        _store(thread, x, target, y, stats)

    func = tirx.PrimFunc(list(buffers.values()), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
