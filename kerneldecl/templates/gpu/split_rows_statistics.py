"""Owns what thread blocks find in their parts of a row, and how they exchange it: maxima, sums of powers, sums of squares.

Knows nothing of results or of how parameters are chosen.

A thread loads all its elements at once and keeps them. Each warp finds its statistics; warps leave them in shared memory, those of a
cluster in that of each of its thread blocks, and every warp combines all of them: one exchange for all statistics. Softmax has a maximum
and a sum of powers, which are distances to it; a warp's sum is scaled to the row's maximum (Milakov, Gimelshein, Online normalizer
calculation for softmax, 2018). A layer norm's sums are of distances to the row's first element, so that their squares lose nothing to a
large mean (Chan, Golub, LeVeque, Algorithms for computing the sample variance, 1983). Each sum has one order.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.templates.gpu.split_rows_config import Part, Registers, SplitRowsKernel
from kerneldecl.templates.hopper.epilogue import meta_vars

ALL_LANES = 0xFFFFFFFF
LOG2_E = math.log2(math.e)


def _lowest() -> Any:
    return tirx.const(float("-inf"), "float32")


def reference(value: Any) -> Any:
    """Return what powers are distances to: a maximum, or zero where there is none, so that those of minus infinity are zero."""
    return T.Select(value == _lowest(), T.float32(0), value)


def power(value: Any, reference: Any) -> Any:
    return T.exp2((value - reference) * T.float32(LOG2_E))


def registers_of(kernel: SplitRowsKernel) -> Registers:
    """Return a thread's registers, allocated."""
    dtype, weights = kernel.spec.dtype, kernel.kept if kernel.has_weights else 1
    return Registers(
        held=T.alloc_local((kernel.kept,), dtype),
        gamma=T.alloc_local((weights,), dtype),
        beta=T.alloc_local((weights,), dtype),
        powers=T.alloc_local((kernel.kept if kernel.is_softmax else 1,), "float32"),
        stats=T.alloc_local((kernel.statistics,), "float32"),
        own=T.alloc_local((1,), "float32"),
    )


def cells_of(kernel: SplitRowsKernel) -> Any:
    """Return the statistics of all warps that exchange theirs, in shared memory."""
    pool = T.SMEMPool()
    cells = pool.alloc((kernel.statistics, kernel.params.slots()), "float32", align=16)
    pool.commit()
    return cells


def first_element(part: Part) -> Any:
    """Return what distances are counted from: the row's first element, for a root mean square zero."""
    is_layer_norm = part.kernel.spec.kind == "layer_norm"
    return T.cast(part.args.x[part.first], "float32") if is_layer_norm else T.float32(0)


def _neutral(part: Part) -> Any:
    """Return an element that changes no statistic: a power of zero, or a distance of zero."""
    if part.kernel.spec.kind == "reduce":
        return _nothing(part.kernel)
    return _lowest() if part.kernel.is_softmax else first_element(part)


def _nothing(kernel: SplitRowsKernel) -> Any:
    """Return what a reduction of no element is."""
    return {"max": _lowest(), "min": tirx.const(float("inf"), "float32")}.get(kernel.spec.op, T.float32(0))


def _merged(kernel: SplitRowsKernel, one: Any, other: Any) -> Any:
    """Return the reduction of two results of a reduction."""
    if kernel.spec.op in {"max", "min"}:
        return (T.max if kernel.spec.op == "max" else T.min)(one, other)
    return one + other


@T.inline
def _load_ends(part, registers, s):
    """Load what a row has of a vector in which it begins or ends; elsewhere there are neutral elements."""
    kernel, width = T.meta_var((part.kernel, part.kernel.params.width))
    neutral = T.alloc_local((1,), "float32")  # a constant of bfloat16 would be written as none that CUDA knows
    neutral[0] = _neutral(part)
    for w in T.unroll(width):
        registers.held[s * width + w] = T.cast(neutral[0], kernel.spec.dtype)
        if kernel.is_ragged:
            if part.has(s, w):
                registers.held[s * width + w] = part.args.x[part.offset(s) + w]


@T.inline
def _load_weights(part, weights, registers, s):
    """Load the weights of a thread's columns; those of ragged rows are no vectors."""
    kernel, width = T.meta_var((part.kernel, part.kernel.params.width))
    if weights is not None:
        if kernel.is_ragged:
            for w in T.unroll(width):
                registers[s * width + w] = weights[part.weight(s, w)]
        elif part.is_whole(s):
            for w in T.vectorized(width):
                registers[s * width + w] = weights[part.column(s) + w]


@T.inline
def load(part, registers):
    """Load a thread's elements, and what belongs to their columns."""
    kernel, width = T.meta_var((part.kernel, part.kernel.params.width))
    for s in T.unroll(kernel.steps):
        if T.Or(kernel.is_exact, part.is_whole(s)):
            for w in T.vectorized(width):
                registers.held[s * width + w] = part.args.x[part.offset(s) + w]
        else:
            _load_ends(part, registers, s)
        _load_weights(part, part.args.gamma, registers.gamma, s)
        _load_weights(part, part.args.beta, registers.beta, s)


@T.inline
def _butterfly_sum(value):
    """Add up a register over the lanes of a warp, which all get the sum."""
    for bit in T.unroll(5):
        value[0] = value[0] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), value[0], 1 << bit, 32, 32)


@T.inline
def _sum_of_stats(kernel, stats):
    """Add up sums over the lanes of a warp."""
    one = T.alloc_local((1,), "float32")
    for k in T.unroll(kernel.statistics):
        one[0] = stats[k]
        _butterfly_sum(one)
        stats[k] = one[0]


@T.inline
def _highest_of_warp(value):
    """Find the maximum of a register over the lanes of a warp."""
    for bit in T.unroll(5):
        value[0] = T.max(value[0], T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), value[0], 1 << bit, 32, 32))


@T.inline
def to_powers(part, registers, reference):
    """Compute the powers of a thread's elements as distances to a reference; the second statistic is their sum."""
    registers.stats[1] = T.float32(0)
    for i in T.unroll(part.kernel.kept):
        registers.powers[i] = power(T.cast(registers.held[i], "float32"), reference)
        registers.stats[1] = registers.stats[1] + registers.powers[i]


@T.inline
def _find_powers(part, registers):
    """Find the maximum of a warp's elements, and their powers."""
    registers.own[0] = _lowest()
    for i in T.unroll(part.kernel.kept):
        registers.own[0] = T.max(registers.own[0], T.cast(registers.held[i], "float32"))
    _highest_of_warp(registers.own)
    registers.stats[0] = registers.own[0]
    to_powers(part, registers, reference(registers.own[0]))
    total = T.alloc_local((1,), "float32")
    total[0] = registers.stats[1]
    _butterfly_sum(total)
    registers.stats[1] = total[0]


@T.inline
def _find_sums(part, registers):
    """Add up a warp's elements and their squares, as distances; of a root mean square, the squares alone."""
    kernel = T.meta_var(part.kernel)
    first: T.float32 = first_element(part)
    for k in T.unroll(kernel.statistics):
        registers.stats[k] = T.float32(0)
    for i in T.unroll(kernel.kept):
        distance: T.float32 = T.cast(registers.held[i], "float32") - first
        registers.stats[kernel.statistics - 1] = registers.stats[kernel.statistics - 1] + distance * distance
        if kernel.statistics == 2:
            registers.stats[0] = registers.stats[0] + distance
    _sum_of_stats(kernel, registers.stats)


@T.inline
def _merge_lanes(kernel, stats):
    """Reduce over the lanes of a warp."""
    for bit in T.unroll(5):
        stats[0] = _merged(kernel, stats[0], T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), stats[0], 1 << bit, 32, 32))


@T.inline
def _find_reduced(part, registers):
    """Reduce a warp's elements."""
    registers.stats[0] = _nothing(part.kernel)
    for i in T.unroll(part.kernel.kept):
        registers.stats[0] = _merged(part.kernel, registers.stats[0], T.cast(registers.held[i], "float32"))
    _merge_lanes(part.kernel, registers.stats)


@T.inline
def find(part, registers):
    """Find the statistics of a warp's elements."""
    if part.kernel.spec.kind == "reduce":
        _find_reduced(part, registers)
    elif part.kernel.is_softmax:
        _find_powers(part, registers)
    else:
        _find_sums(part, registers)


@T.inline
def _combine_powers(read, lanes, count, stats):
    """Find the maximum of all, and the sum of powers as distances to it."""
    first, stride = meta_vars(lanes)
    one = T.alloc_local((1,), "float32")
    one[0] = _lowest()
    for i in T.unroll(-(-count // stride)):
        if first + i * stride < count:
            one[0] = T.max(one[0], read(0, first + i * stride))
    _highest_of_warp(one)
    stats[0] = one[0]
    one[0] = T.float32(0)
    for i in T.unroll(-(-count // stride)):
        if first + i * stride < count:
            one[0] = one[0] + read(1, first + i * stride) * power(read(0, first + i * stride), reference(stats[0]))
    _butterfly_sum(one)
    stats[1] = one[0]


@T.inline
def _combine_sums(kernel, read, lanes, count, stats):
    first, stride = meta_vars(lanes)
    for k in T.unroll(kernel.statistics):
        stats[k] = T.float32(0)
        for i in T.unroll(-(-count // stride)):
            if first + i * stride < count:
                stats[k] = stats[k] + read(k, first + i * stride)


@T.inline
def _combine_reduced(kernel, read, lanes, count, stats):
    first, stride = meta_vars(lanes)
    stats[0] = _nothing(kernel)
    for i in T.unroll(-(-count // stride)):
        if first + i * stride < count:
            stats[0] = _merged(kernel, stats[0], read(0, first + i * stride))
    _merge_lanes(kernel, stats)


@T.inline
def combine(kernel, read, lanes, count, stats):
    """Combine the statistics that `read` has, of which each lane takes every so-many-th; all lanes of a warp get those of the warp."""
    if kernel.spec.kind == "reduce":
        _combine_reduced(kernel, read, lanes, count, stats)
    elif kernel.is_softmax:
        _combine_powers(read, lanes, count, stats)
    else:
        _combine_sums(kernel, read, lanes, count, stats)
        _sum_of_stats(kernel, stats)


@T.inline
def _exchange(part, cells, stats, rank):
    """Leave a warp's statistics where all warps find them: in the shared memory of each thread block of the cluster."""
    kernel, params = T.meta_var((part.kernel, part.kernel.params))
    if params.cluster == 1:
        if part.lane == 0:
            for k in T.unroll(kernel.statistics):
                cells[k, part.warp] = stats[k]
        T.cuda.cta_sync()
    else:
        # Every thread block of the cluster has begun, so that its shared memory is there.
        T.ptx.barrier.cluster.wait.acquire()
        if part.lane < params.cluster:
            address = T.alloc_local((1,), "uint32")
            for k in T.unroll(kernel.statistics):
                place = T.meta_var(T.cuda.cvta_generic_to_shared(cells.ptr_to([k, rank * params.warps + part.warp])))
                T.ptx.mapa.shared__cluster.u32(address[0], place, T.cast(part.lane, "uint32"))
                T.ptx["st.shared::cluster.f32"](address[0], stats[k])
        T.ptx.barrier.cluster.arrive.release()
        T.ptx.barrier.cluster.wait.acquire()


@T.inline
def exchange_all(part, cells, registers, rank):
    """Make of a warp's statistics those of its part, or of the row where a cluster has all of it."""
    kernel, params = T.meta_var((part.kernel, part.kernel.params))
    _exchange(part, cells, registers.stats, rank)
    combine(kernel, lambda k, at: cells[k, at], (part.lane, WARP_LANES), params.slots(), registers.stats)
