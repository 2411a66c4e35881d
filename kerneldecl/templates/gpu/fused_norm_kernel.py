"""Owns the kernel of norms with a residual or a quantised output: rows in registers, statistics by shuffles and shared memory.

Knows nothing of how parameters are chosen.

A thread loads all its elements, and those of the residual, before it waits for any. Rows beyond the last one are computed as the last one
is, so that all threads of a block meet at its barriers. Each sum has one order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.fused_norm import LEAST_LARGEST, LIMITS, FusedNormParams, NormSizes
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.compiler.fused_norm import FusedNormSpec
from kerneldecl.templates.hopper.epilogue import meta_vars

ALL_LANES = 0xFFFFFFFF


@dataclass(frozen=True)
class FusedNormKernel:
    """A norm with the parameters of its kernel, and what follows from both."""

    spec: FusedNormSpec
    params: FusedNormParams
    pdl: bool

    @property
    def sizes(self) -> NormSizes:
        return self.spec.sizes

    @property
    def steps(self) -> int:
        return self.params.steps(self.sizes)

    @property
    def kept(self) -> int:
        """Return the elements of a thread."""
        return self.steps * self.params.width

    @property
    def warps(self) -> int:
        """Return the warps of a row."""
        return self.params.threads // WARP_LANES

    @property
    def is_exact(self) -> bool:
        """Say whether every thread has a vector in every step."""
        return self.kept * self.params.threads == self.sizes.columns


class Args(NamedTuple):
    """Flat buffers of the function's arguments; None for those that it has not."""

    x: Any
    residual: Any
    gamma: Any
    beta: Any
    y: Any
    added: Any
    scale: Any


class Thread(NamedTuple):
    """A thread's place: which row, which of the block's rows, which of the row's threads."""

    kernel: FusedNormKernel
    args: Args
    row: Any
    slot: Any
    place: Any

    @property
    def lane(self) -> Any:
        return self.place % WARP_LANES

    @property
    def warp(self) -> Any:
        return self.place // WARP_LANES

    def column(self, step: int) -> Any:
        """Return the column of the thread's first element in a step: neighbours take neighbours."""
        return (self.place + step * self.kernel.params.threads) * self.kernel.params.width

    def has(self, step: int) -> Any:
        """Say whether the thread has a vector of the row in a step."""
        return self.kernel.is_exact or self.column(step) < self.kernel.sizes.columns

    def offset(self, step: int) -> Any:
        return self.row * self.kernel.sizes.columns + self.column(step)


@T.inline
def _load(thread, source, place, held):
    """Load a thread's elements of an operand; those that a row does not have are zero."""
    kernel, width = T.meta_var((thread.kernel, thread.kernel.params.width))
    if source is not None:
        for s in T.unroll(kernel.steps):
            if thread.has(s):
                for w in T.vectorized(width):
                    held[s * width + w] = source[place(s) + w]


@T.inline
def _add_residual(thread, held, residual, values):
    """Widen a thread's elements; with a residual, add it, round, and store the sums."""
    kernel, width = T.meta_var((thread.kernel, thread.kernel.params.width))
    for s in T.unroll(kernel.steps):
        for w in T.unroll(width):
            values[s * width + w] = T.float32(0)
        if thread.has(s):
            if thread.args.residual is not None:
                for w in T.unroll(width):
                    at = T.meta_var(s * width + w)
                    held[at] = held[at] + residual[at]
                for w in T.vectorized(width):
                    thread.args.added[thread.offset(s) + w] = held[s * width + w]
            for w in T.unroll(width):
                values[s * width + w] = T.cast(held[s * width + w], "float32")


def _merged(one: Any, other: Any, *, is_sum: bool) -> Any:
    return one + other if is_sum else T.max(one, other)


@T.inline
def _over_lanes(value, lanes, is_sum):
    """Combine a register over groups of so many neighbouring lanes, a power of two, which all get the result."""
    for bit in T.unroll(lanes.bit_length() - 1):
        value[0] = _merged(value[0], T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), value[0], 1 << bit, 32, 32), is_sum=is_sum)


@T.inline
def _over_warps(thread, value, cells, statistic, is_sum):
    """Combine what a row's warps have left in shared memory: groups of lanes read all of it."""
    warps, lanes = T.meta_var((thread.kernel.warps, 1 << (thread.kernel.warps - 1).bit_length()))
    value[0] = T.float32(0)
    if thread.lane % lanes < warps:
        value[0] = cells[statistic, thread.slot, thread.lane % lanes]
    _over_lanes(value, lanes, is_sum)


@T.inline
def _over_row(thread, value, cells, statistic, is_sum):
    """Combine a register over the threads of a row, which all get the result: sums or, of what is not negative, maxima."""
    kernel = T.meta_var(thread.kernel)
    _over_lanes(value, WARP_LANES, is_sum)
    if kernel.warps > 1:
        if thread.lane == 0:
            cells[statistic, thread.slot, thread.warp] = value[0]
        T.cuda.cta_sync()
        _over_warps(thread, value, cells, statistic, is_sum)


@T.inline
def _sum_and_largest(thread, total, largest, cells):
    """Combine a sum and a maximum over the threads of a row, in one exchange."""
    kernel = T.meta_var(thread.kernel)
    _over_lanes(total, WARP_LANES, True)
    _over_lanes(largest, WARP_LANES, False)
    if kernel.warps > 1:
        if thread.lane == 0:
            cells[0, thread.slot, thread.warp] = total[0]
            cells[1, thread.slot, thread.warp] = largest[0]
        T.cuda.cta_sync()
        _over_warps(thread, total, cells, 0, True)
        _over_warps(thread, largest, cells, 1, False)


@T.inline
def _square_sum(thread, values, mean, found):
    """Add up squares of distances to the mean, of the elements that the row has."""
    kernel, width = T.meta_var((thread.kernel, thread.kernel.params.width))
    found[0] = T.float32(0)
    for s in T.unroll(kernel.steps):
        if thread.has(s):
            for w in T.unroll(width):
                distance: T.float32 = values[s * width + w] - mean
                found[0] = found[0] + distance * distance


@T.inline
def _normalize(thread, values, weights, cells):
    """Replace a thread's elements by their norm."""
    kernel, width = T.meta_var((thread.kernel, thread.kernel.params.width))
    gamma, beta = meta_vars(weights)
    is_layer_norm = T.meta_var(kernel.spec.kind == "layer_norm")
    count = T.meta_var(T.float32(1 / kernel.sizes.columns))
    found = T.alloc_local((1,), "float32")
    mean: T.float32 = T.float32(0)
    if is_layer_norm:
        found[0] = T.float32(0)
        for i in T.unroll(kernel.kept):
            found[0] = found[0] + values[i]
        _over_row(thread, found, cells, 1, True)
        mean = found[0] * count
    _square_sum(thread, values, mean, found)
    _over_row(thread, found, cells, 0, True)
    factor: T.float32 = T.rsqrt(found[0] * count + T.float32(kernel.spec.eps))
    for s in T.unroll(kernel.steps):
        if thread.has(s):
            for w in T.unroll(width):
                at = T.meta_var(s * width + w)
                values[at] = (values[at] - mean) * factor * T.cast(gamma[at], "float32")
                if is_layer_norm:
                    values[at] = values[at] + T.cast(beta[at], "float32")


@T.inline
def _quantize_rms(thread, values, gamma, cells, factor):
    """Multiply a thread's elements by gamma, and find by what they are then quantised: a row's norm and its largest product together.

    The norm multiplies all of a row's products alike, so that it is left out of them and of their largest.
    """
    kernel, width, limit = T.meta_var((thread.kernel, thread.kernel.params.width, LIMITS[thread.kernel.spec.out_dtype]))
    total = T.alloc_local((1,), "float32")
    largest = T.alloc_local((1,), "float32")
    largest[0] = T.float32(0)
    _square_sum(thread, values, T.float32(0), total)
    for s in T.unroll(kernel.steps):
        if thread.has(s):
            for w in T.unroll(width):
                at = T.meta_var(s * width + w)
                values[at] = values[at] * T.cast(gamma[at], "float32")
                largest[0] = T.max(largest[0], T.fabs(values[at]))
    _sum_and_largest(thread, total, largest, cells)
    inverse_rms: T.float32 = T.rsqrt(total[0] * T.float32(1 / kernel.sizes.columns) + T.float32(kernel.spec.eps))
    largest[0] = T.max(largest[0] * inverse_rms, T.float32(LEAST_LARGEST))
    factor[0] = T.float32(limit) / largest[0] * inverse_rms
    if thread.place == 0:
        thread.args.scale[thread.row] = largest[0] * T.float32(1 / limit)


@T.inline
def _find_scale(thread, values, cells, factor):
    """Find what a row is multiplied by to be quantised, and have one thread store its inverse."""
    kernel, limit = T.meta_var((thread.kernel, LIMITS[thread.kernel.spec.out_dtype]))
    found = T.alloc_local((1,), "float32")
    found[0] = T.float32(0)
    for i in T.unroll(kernel.kept):
        found[0] = T.max(found[0], T.fabs(values[i]))
    _over_row(thread, found, cells, kernel.sizes.statistics - 1, False)
    found[0] = T.max(found[0], T.float32(LEAST_LARGEST))
    factor[0] = T.float32(limit) / found[0]
    if thread.place == 0:
        thread.args.scale[thread.row] = found[0] * T.float32(1 / limit)


@T.inline
def _store(thread, values, factor):
    """Round a thread's results and store them."""
    kernel, width, dtype = T.meta_var((thread.kernel, thread.kernel.params.width, thread.kernel.spec.out_dtype))
    packed = T.meta_var(math.gcd(width, 4))
    out = T.alloc_local((width,), dtype)
    for s in T.unroll(kernel.steps):
        if thread.has(s):
            for group in T.unroll(width // packed):
                for w in T.vectorized(packed):
                    at = T.meta_var(group * packed + w)
                    if kernel.sizes.is_quantized:
                        value = T.meta_var(values[s * width + at] * factor[0])
                        out[at] = T.cast(T.nearbyint(value) if dtype == "int8" else value, dtype)
                    else:
                        out[at] = T.cast(values[s * width + at], dtype)
            for w in T.vectorized(width):
                thread.args.y[thread.offset(s) + w] = out[w]


@T.inline
def _compute(thread, cells):
    kernel, args = T.meta_var((thread.kernel, thread.args))
    spec = T.meta_var(kernel.spec)
    held = T.alloc_local((kernel.kept,), spec.dtype)
    residual = T.alloc_local((kernel.kept,), spec.dtype)
    gamma = T.alloc_local((kernel.kept,), spec.dtype)
    beta = T.alloc_local((kernel.kept,), spec.dtype)
    values = T.alloc_local((kernel.kept,), "float32")
    factor = T.alloc_local((1,), "float32")
    if kernel.pdl:
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
    _load(thread, args.x, thread.offset, held)
    _load(thread, args.residual, thread.offset, residual)
    _load(thread, args.gamma, thread.column, gamma)
    _load(thread, args.beta, thread.column, beta)
    _add_residual(thread, held, residual, values)
    if kernel.sizes.is_quantized and spec.kind == "rms_norm":
        _quantize_rms(thread, values, gamma, cells, factor)
    else:
        _normalize(thread, values, (gamma, beta), cells)
        if kernel.sizes.is_quantized:
            _find_scale(thread, values, cells, factor)
    _store(thread, values, factor)


def build(kernel: FusedNormKernel, arguments: Sequence[tuple[tuple[int, ...], str]]) -> tvm.IRModule:
    """Return a module whose `main` is the function, with arguments of these shapes and dtypes, which are in the function's order."""
    names = [field for field, is_there in zip(Args._fields, _present(kernel.sizes), strict=True) if is_there]
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, (shape, dtype) in zip(names, arguments, strict=True)}
    params, sizes = kernel.params, kernel.sizes

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([-(-sizes.rows // params.rows)])
        warp = T.warp_id([params.threads * params.rows // WARP_LANES])
        lane = T.lane_id([WARP_LANES])
        args = T.meta_var(_flat(buffers))
        pool = T.SMEMPool()
        cells = pool.alloc((sizes.statistics, params.rows, kernel.warps), "float32", align=16)
        pool.commit()
        slot = T.meta_var(warp // kernel.warps)
        row = T.meta_var(T.min(block * params.rows + slot, sizes.rows - 1))
        place = T.meta_var(warp % kernel.warps * WARP_LANES + lane)
        thread = T.meta_var(Thread(kernel, args, row, slot, place))
        _compute(thread, cells)

    func = tirx.PrimFunc(list(buffers.values()), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})


def _present(sizes: NormSizes) -> tuple[bool, ...]:
    """Return which of the arguments a norm has."""
    return True, sizes.has_residual, True, sizes.kind == "layer_norm", True, sizes.has_residual, sizes.is_quantized


def _flat(buffers: dict[str, Any]) -> Args:
    """Return the arguments with one dimension each."""

    def flat(name: str) -> Any:
        buffer = buffers.get(name)
        return None if buffer is None else T.decl_buffer((math.prod(map(int, buffer.shape)),), str(buffer.dtype), data=buffer.data)

    return Args(*map(flat, Args._fields))
