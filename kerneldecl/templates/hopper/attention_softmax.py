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
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.shared.fused_attention import LOG2_E

ALL_LANES = 0xFFFFFFFF
MAX_POWER_LOG2 = 8
"""How far a maximum may grow, as a power of two, before earlier results shrink to it. Powers are 256 at most then, which float16 holds as
precisely as 1; results shrink seldom, in a warp where any row's must."""
FLOAT8_POWER_LOG2, FLOAT8_GROWTH_LOG2 = 6, 2
"""The power that a reference itself has in float8, and how far a maximum may grow. Powers are 256 at most, of 448, and those of up to 2^-15
of the largest are not zero."""
LEAST_SCALE = 1e-30
"""Least scale of scores in float8: with zero, minus infinity would become NaN."""
FLOAT8_SOURCE = """
__device__ __forceinline__ unsigned tvm_attention_float8(float first, float second, float third, float fourth) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(second), "f"(first));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(fourth), "f"(third));
  return low | (unsigned)high << 16;
}
"""
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

    kernel: Any
    """What says how many scores a thread has, and how they are scaled and rounded: `FusedAttention`, or one of a KV cache."""
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
    scales: Any = None
    """Of float8: what scores are multiplied by before powers of two are taken, and before biases, and results; None for other dtypes."""

    @property
    def scale_log2(self) -> Any:
        has_scales = self.scales is not None and not self.kernel.spec.sizes.has_bias
        return self.scales[0] if has_scales else T.float32(self.kernel.scale_log2)

    @property
    def power_log2(self) -> int:
        """Return the logarithm of a reference's own power."""
        return 0 if self.scales is None else FLOAT8_POWER_LOG2

    def is_near(self, r: int) -> Any:
        """Return whether a row's maximum has not grown too far. One of NaN has: the row's reference becomes NaN, and so do its results."""
        grown = self.partial[r] - self.reference[r]
        if self.scales is None:
            return grown <= T.float32(MAX_POWER_LOG2 / self.kernel.scale_log2)
        return grown * self.scale_log2 <= T.float32(FLOAT8_GROWTH_LOG2)


def finite(reference: Any) -> Any:
    """Return a row's reference, or zero where it has seen no key yet: then the distance of each score to it is minus infinity."""
    lowest = tirx.const(float("-inf"), "float32")
    return T.Select(reference == lowest, T.float32(0), reference)


def highest_of(one: Any, other: Any) -> Any:
    """Return the larger of two numbers, NaN if one is."""
    return T.cuda.func_call("tvm_attention_max", one, other, source_code=MAX_SOURCE, return_type="float32")


@T.inline
def find_highest(softmax):
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
        power = scores[i] * softmax.scale_log2 + softmax.partial[i % 4 // 2]
        is_on_fma = (i + 1) * kernel.fma_powers // 8 > i * kernel.fma_powers // 8
        value = (
            T.cuda.func_call("tvm_attention_exp2", power, source_code=EXP2_SOURCE, return_type="float32") if is_on_fma else T.exp2(power)
        )
        T.buffer_store(scores, value, [i])


@T.inline
def _raise(softmax):
    """Turn scores into powers of two of their distance to the rows' references."""
    partial = T.meta_var(softmax.partial)
    for r in T.unroll(2):
        if softmax.scales is None:
            partial[r] = finite(softmax.reference[r]) * T.float32(-softmax.kernel.scale_log2)
        else:
            partial[r] = T.float32(softmax.power_log2) - finite(softmax.reference[r]) * softmax.scale_log2
    _replace_by_powers(softmax)


@T.inline
def first_softmax(softmax, rows, block, is_masked):
    """Turn the scores of the first block into powers, and add them up."""
    total = T.meta_var(softmax.total)
    prepare(softmax, rows, block, is_masked)
    find_highest(softmax)
    for r in T.unroll(2):
        softmax.reference[r] = softmax.partial[r]
    _raise(softmax)
    for i in T.unroll(4):
        total[i] = softmax.scores[i]
    for i in T.unroll(softmax.kernel.scores - 4):
        total[i % 4] = total[i % 4] + softmax.scores[i + 4]


@T.inline
def take_powers(softmax):
    """Turn scores into powers, and add them up; `partial` begins with the rows' maxima.

    Where a maximum has grown far, the warp's references become its maxima, and what came before shrinks.
    """
    kernel, reference, partial, total = T.meta_var((softmax.kernel, softmax.reference, softmax.partial, softmax.total))
    grows = T.meta_var(T.Not(T.And(softmax.is_near(0), softmax.is_near(1))))
    softmax.grows[0] = T.cuda.any_sync(T.uint32(ALL_LANES), T.cast(grows, "int32"))
    if softmax.grows[0] != 0:
        for r in T.unroll(2):
            partial[r] = highest_of(reference[r], partial[r])
            softmax.factor[r] = T.exp2((reference[r] - finite(partial[r])) * softmax.scale_log2)
            reference[r] = partial[r]
        for i in T.unroll(4):
            total[i] = total[i] * softmax.factor[i // 2]
    _raise(softmax)
    for i in T.unroll(kernel.scores):
        total[i % 4] = total[i % 4] + softmax.scores[i]


@T.inline
def take_scores(softmax):
    """Turn scores into powers, and add them up, by the maxima that the warp finds."""
    find_highest(softmax)
    take_powers(softmax)


@T.inline
def next_softmax(softmax, rows, block, is_masked):
    """Bias and mask the scores of another block, turn them into powers, and add them up."""
    prepare(softmax, rows, block, is_masked)
    take_scores(softmax)


@T.inline
def follow(softmax):
    """Have the rows' references become those in `partial`, which another warpgroup has found, and what came before shrink."""
    reference, partial, total = T.meta_var((softmax.reference, softmax.partial, softmax.total))
    has_moved = T.meta_var(T.Or(partial[0] != reference[0], partial[1] != reference[1]))
    softmax.grows[0] = T.cuda.any_sync(T.uint32(ALL_LANES), T.cast(has_moved, "int32"))
    if softmax.grows[0] != 0:
        for r in T.unroll(2):
            softmax.factor[r] = T.exp2((reference[r] - finite(partial[r])) * softmax.scale_log2)
            reference[r] = partial[r]
        for i in T.unroll(4):
            total[i] = total[i] * softmax.factor[i // 2]


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
def to_halves(softmax, operand):
    """Round powers to 16 bits in operand A, whose elements threads hold where they hold the scores."""
    kernel, scores = T.meta_var((softmax.kernel, softmax.scores))
    for i in T.unroll(kernel.scores // 2):
        T.ptx[kernel.narrow](operand[i], scores[i * 2 + 1], scores[i * 2])


@T.inline
def to_operand(softmax, operand):
    """Round powers to wgmma's operand A, whose elements threads hold where they hold the scores.

    In float8 a thread holds four neighbours of operand A, but pairs of scores in blocks of eight keys: `attention_transpose` orders values'
    keys so that two pairs are four neighbours.
    """
    kernel, scores = T.meta_var((softmax.kernel, softmax.scores))
    if softmax.scales is None:
        to_halves(softmax, operand)
    else:
        for i in T.unroll(kernel.scores // 4):
            first = T.meta_var(i // 2 * 8 + i % 2 * 2)
            operand[i] = T.cuda.func_call(
                "tvm_attention_float8",
                *[scores[first + at] for at in (0, 1, 4, 5)],
                source_code=FLOAT8_SOURCE,
                return_type="uint32",
            )


@T.inline
def load_scales(softmax):
    """Load the scales of float8, and multiply those of scores."""
    kernel, scales = T.meta_var((softmax.kernel, softmax.scales))
    q_scale, k_scale, v_scale = meta_vars([kernel.argument(name) for name in ("q_scale", "k_scale", "v_scale")])
    scales[1] = q_scale[0] * k_scale[0] * T.float32(kernel.spec.scale)
    scales[0] = highest_of(T.fabs(scales[1]) * T.float32(LOG2_E), T.float32(LEAST_SCALE))
    scales[2] = v_scale[0]


@T.inline
def scale_results(softmax):
    """Have results multiplied by the scale of float8's values."""
    for r in T.unroll(2):
        softmax.factor[r] = softmax.factor[r] * softmax.scales[2]


@T.inline
def add_threads(softmax):
    """Add up the sums of the threads that share a row, in each row's first place."""
    total = T.meta_var(softmax.total)
    for r in T.unroll(2):
        total[r * 2] = total[r * 2] + total[r * 2 + 1]
    for r in T.unroll(2):
        total[r * 2] = total[r * 2] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[r * 2], 1, 32, 32)
    for r in T.unroll(2):
        total[r * 2] = total[r * 2] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[r * 2], 2, 32, 32)


@T.inline
def spoil_sums(softmax):
    """Have rows with NaN have sums of NaN."""
    total = T.meta_var(softmax.total)
    for r in T.unroll(2):
        # Powers on CUDA cores do not keep NaN: where the reference is NaN or infinite, infinity less infinity is the sum.
        infinity = T.meta_var(tirx.const(float("inf"), "float32"))
        total[r * 2] = T.Select(softmax.reference[r] < infinity, total[r * 2], softmax.reference[r] - infinity)


@T.inline
def invert_sums(softmax):
    """Note the inverse of rows' sums: zero for rows that see no key, NaN for those with NaN."""
    total, factor = T.meta_var((softmax.total, softmax.factor))
    spoil_sums(softmax)
    for r in T.unroll(2):
        factor[r] = T.Select(total[r * 2] == T.float32(0), T.float32(0), T.float32(1) / total[r * 2])


@T.inline
def finish_rows(softmax):
    """Add up the sums of the threads that share a row, and note their inverse."""
    add_threads(softmax)
    invert_sums(softmax)


def _log2_of_sum(softmax: Softmax, r: int) -> Any:
    reference = finite(softmax.reference[r]) * softmax.scale_log2
    return T.log2(softmax.total[r * 2]) + (reference if softmax.scales is None else reference - T.float32(softmax.power_log2))


@T.inline
def store_sums(softmax, sums, tile, first_row, lanes):
    """Have one thread of each row store the logarithm of the row's sum: minus infinity where it sees no key."""
    kernel = T.meta_var(softmax.kernel)
    warp, lane = T.meta_var(lanes)
    for r in T.unroll(2):
        row = T.meta_var(first_row + warp * 16 + lane // 4 + r * 8)
        log2 = T.meta_var(_log2_of_sum(softmax, r))
        if (lane % 4 == 0) & (row < kernel.spec.queries):
            sums[tile.batch, tile.head, row] = log2 * T.float32(math.log(2))
