"""Owns the online softmax of a consumer's scores in registers: maxima, powers, sums, and the factors by which earlier results shrink.

Knows nothing of how scores are multiplied. A thread has elements of two rows of the 64, four threads share a row.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.hopper.attention_bias import prepare
from kerneldecl.templates.shared.fused_attention import FusedAttention

ALL_LANES = 0xFFFFFFFF
MAX_POWER_LOG2 = 8
"""How far a maximum may grow, as a power of two, before earlier results shrink to it. Powers are 256 at most then, which float16 holds as
precisely as 1; results shrink seldom, in a warp where any row's must."""
EXP2_SOURCE = """
__device__ __forceinline__ float tvm_attention_exp2(float x) {
  float at_least = fmaxf(x, -127.0f);
  float rounded = at_least + 12582912.0f;
  float rest = at_least - (rounded - 12582912.0f);
  float power = fmaf(fmaf(fmaf(0.0550088361f, rest, 0.242210940f), rest, 0.693282962f), rest, 1.0f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(rounded) << 23));
}
"""
"""2^x in eight instructions. Adding 1.5 * 2^23 rounds x to an integer, which then stands in the lowest bits and is added to the exponent.
The polynomial is a minimax approximation of 2^x between -1/2 and 1/2 with a relative error of 1.02e-4, less than half of what float16
rounds off. It is 1 at 0, so that minus infinity gives zero: the bits of 1 less 127 exponents."""
MAX_SOURCE = """
__device__ __forceinline__ float tvm_attention_max(float x, float y) {
  float highest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(highest) : "f"(x), "f"(y));
  return highest;
}
"""
ORDER_SOURCE = """
__device__ __forceinline__ void tvm_attention_await(float value, float least) {
  asm volatile("{.reg .pred never; .reg .b32 lanes; setp.lt.f32 never, %0, %1; selp.b32 lanes, 1, 0xffffffff, never; bar.warp.sync lanes;}"
               :: "f"(value), "f"(least) : "memory");
}
"""
"""Keeps ptxas from waiting for wgmma before a value is known. ptxas takes such a wait for a cheap instruction, and starts it while others
take long; it does not move it before another barrier, and which lanes meet at this one is found out from the value. `least` is below
all values, which ptxas does not know."""


class Softmax(NamedTuple):
    """A thread's scores and what it knows of its rows, while a kernel's script is read.

    Element i of the scores is in row `i % 4 // 2` of the thread's two, at column `i // 4 * 8 + i % 2` from the thread's first one.
    """

    kernel: FusedAttention
    scores: Any
    reference: Any
    """What is subtracted from the scores of each row: their maximum, or what it was `MAX_POWER_LOG2` ago."""
    total: Any
    """Sums of powers of this thread alone, of even and odd elements of both rows: short chains of dependent instructions."""
    factor: Any
    """Factor by which earlier results of each row shrink, and at the end one divided by its sum."""
    partial: Any
    """Maxima of a block, of even and odd elements of both rows."""
    grows: Any
    """Whether earlier results shrink, in any row of the warp."""


def finite(reference: Any) -> Any:
    """Return a row's reference, or zero where it has seen no key yet: then the distance of each score to it is minus infinity."""
    lowest = tirx.const(float("-inf"), "float32")
    return T.Select(reference == lowest, T.float32(0), reference)


def highest_of(one: Any, other: Any) -> Any:
    """Return the larger of two numbers, NaN if one is."""
    return T.cuda.func_call("tvm_attention_max", one, other, source_code=MAX_SOURCE, return_type="float32")


@T.inline
def _find_highest(softmax):
    """Find the rows' maxima of a block's scores, which all threads of a row know then."""
    scores, partial = T.meta_var((softmax.scores, softmax.partial))
    for i in T.unroll(4):
        partial[i] = scores[i]
    for i in T.unroll(softmax.kernel.scores - 4):
        partial[i % 4] = highest_of(partial[i % 4], scores[i + 4])
    for r in T.unroll(2):
        partial[r] = highest_of(partial[r * 2], partial[r * 2 + 1])
    for r in T.unroll(2):
        partial[r] = highest_of(partial[r], T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), partial[r], 1, 32, 32))
    for r in T.unroll(2):
        partial[r] = highest_of(partial[r], T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), partial[r], 2, 32, 32))


def _replace_by_powers(softmax: Softmax) -> None:
    """Replace each score by its power; of neighbours, those that CUDA cores compute come between others."""
    kernel, scores = softmax.kernel, softmax.scores
    for i in range(kernel.scores):
        power = scores[i] * T.float32(kernel.scale_log2) + softmax.partial[i % 4 // 2]
        is_on_fma = (i + 1) * kernel.params.fma_powers // 8 > i * kernel.params.fma_powers // 8
        value = (
            T.cuda.func_call("tvm_attention_exp2", power, source_code=EXP2_SOURCE, return_type="float32") if is_on_fma else T.exp2(power)
        )
        T.buffer_store(scores, value, [i])


@T.inline
def _raise(softmax):
    """Turn scores into powers of two of their distance to the rows' references."""
    kernel, partial = T.meta_var((softmax.kernel, softmax.partial))
    for r in T.unroll(2):
        partial[r] = finite(softmax.reference[r]) * T.float32(-kernel.scale_log2)
    _replace_by_powers(softmax)


@T.inline
def first_softmax(softmax, rows, block, is_masked):
    """Turn the scores of the first block into powers, and add them up."""
    total = T.meta_var(softmax.total)
    prepare(softmax, rows, block, is_masked)
    _find_highest(softmax)
    for r in T.unroll(2):
        softmax.reference[r] = softmax.partial[r]
    _raise(softmax)
    for i in T.unroll(4):
        total[i] = softmax.scores[i]
    for i in T.unroll(softmax.kernel.scores - 4):
        total[i % 4] = total[i % 4] + softmax.scores[i + 4]


@T.inline
def next_softmax(softmax, rows, block, is_masked):
    """Turn the scores of another block into powers, and add them up.

    Where a maximum has grown far, the warp's references become its maxima, and what came before shrinks.
    """
    kernel, reference, partial, total = T.meta_var((softmax.kernel, softmax.reference, softmax.partial, softmax.total))
    prepare(softmax, rows, block, is_masked)
    _find_highest(softmax)
    limit = T.meta_var(T.float32(MAX_POWER_LOG2 / kernel.scale_log2))
    # A maximum of NaN counts as grown: the row's reference becomes NaN, and so do its results.
    grows = T.meta_var(T.Not(T.And(partial[0] - reference[0] <= limit, partial[1] - reference[1] <= limit)))
    softmax.grows[0] = T.cuda.any_sync(T.uint32(ALL_LANES), T.cast(grows, "int32"))
    if softmax.grows[0] != 0:
        for r in T.unroll(2):
            partial[r] = highest_of(reference[r], partial[r])
            softmax.factor[r] = T.exp2((reference[r] - finite(partial[r])) * T.float32(kernel.scale_log2))
            reference[r] = partial[r]
        for i in T.unroll(4):
            total[i] = total[i] * softmax.factor[i // 2]
    _raise(softmax)
    for i in T.unroll(kernel.scores):
        total[i % 4] = total[i % 4] + softmax.scores[i]


@T.inline
def await_sums(softmax):
    """Keep what is waited for after this from being waited for earlier than powers and their sums are known."""
    total = T.meta_var(softmax.total)
    T.cuda.func_call("tvm_attention_await", total[0] + total[1] + (total[2] + total[3]), T.float32(-1), source_code=ORDER_SOURCE)


@T.inline
def rescale(softmax, results, count):
    """Shrink earlier results where references have grown."""
    if softmax.grows[0] != 0:
        for i in T.unroll(count):
            results[i] = results[i] * softmax.factor[i % 4 // 2]


@T.inline
def to_operand(softmax, operand):
    """Round powers to wgmma's operand A, whose elements threads hold where they hold the scores."""
    kernel, scores = T.meta_var((softmax.kernel, softmax.scores))
    for i in T.unroll(kernel.scores // 2):
        T.ptx[kernel.narrow](operand[i], scores[i * 2 + 1], scores[i * 2])


@T.inline
def finish_rows(softmax):
    """Add up the sums of the threads that share a row, and note their inverse: zero for rows that see no key, NaN for those with NaN."""
    total, factor = T.meta_var((softmax.total, softmax.factor))
    for r in T.unroll(2):
        total[r * 2] = total[r * 2] + total[r * 2 + 1]
    for r in T.unroll(2):
        total[r * 2] = total[r * 2] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[r * 2], 1, 32, 32)
    for r in T.unroll(2):
        total[r * 2] = total[r * 2] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[r * 2], 2, 32, 32)
    for r in T.unroll(2):
        # Powers on CUDA cores do not keep NaN: where the reference is NaN or infinite, infinity less infinity is the sum.
        infinity = T.meta_var(tirx.const(float("inf"), "float32"))
        total[r * 2] = T.Select(softmax.reference[r] < infinity, total[r * 2], softmax.reference[r] - infinity)
    for r in T.unroll(2):
        factor[r] = T.Select(total[r * 2] == T.float32(0), T.float32(0), T.float32(1) / total[r * 2])


@T.inline
def store_sums(softmax, sums, tile, first_row, lanes):
    """Have one thread of each row store the logarithm of the row's sum: minus infinity where it sees no key."""
    kernel = T.meta_var(softmax.kernel)
    warp, lane = T.meta_var(lanes)
    for r in T.unroll(2):
        row = T.meta_var(first_row + warp * 16 + lane // 4 + r * 8)
        log2 = T.meta_var(T.log2(softmax.total[r * 2]) + finite(softmax.reference[r]) * T.float32(kernel.scale_log2))
        if (lane % 4 == 0) & (row < kernel.spec.queries):
            sums[tile.batch, tile.head, row] = log2 * T.float32(math.log(2))
