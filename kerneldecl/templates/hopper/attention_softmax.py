"""Owns the online softmax of a consumer's scores in registers: maxima, powers, sums, and the factors by which earlier results shrink.

Knows nothing of how scores are multiplied. A thread has elements of two rows of the 64, four threads share a row.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.hopper.attention_config import AttentionKernel
from kerneldecl.templates.hopper.epilogue import meta_vars

ALL_LANES = 0xFFFFFFFF


class Softmax(NamedTuple):
    """A thread's scores and what it knows of its rows, while a kernel's script is read.

    Element i of the scores is in row `i % 4 // 2` of the thread's two, at column `i // 4 * 8 + i % 2` from the thread's first one.
    """

    kernel: AttentionKernel
    scores: Any
    highest: Any
    """Maximum of each row, of all threads that share it."""
    total: Any
    """Sums of powers of this thread alone: of even and odd elements of both rows."""
    inverse: Any
    """Factor by which earlier results of each row shrink, and at the end one divided by its sum."""
    partial: Any
    """Maxima of even and odd elements of both rows: chains of dependent instructions are shorter so."""

    def limits(self, first_row: Any, lanes: tuple[Any, Any]) -> list[Any]:
        """Return the first key that each of the thread's rows does not see, counted from the thread's first column of the first block."""
        spec, (warp, lane) = self.kernel.spec, lanes
        row = first_row + warp * 16 + lane // 4
        seen = [row + 8 * r + (spec.diagonal + 1) for r in range(2)]
        return [(T.min(spec.keys, each) if spec.is_causal else spec.keys) - lane % 4 * 2 for each in seen]

    def may_be_empty(self) -> bool:
        """Say whether a row may have seen no key after the first block."""
        return self.kernel.spec.is_causal


def _mask(softmax: Softmax, limits: tuple[list[Any], Any]) -> None:
    """Set scores of keys that a row does not see to minus infinity; `limits` are those of rows, and the number of the block."""
    of_rows, block = limits
    for i in range(softmax.kernel.scores):
        limit = of_rows[i % 4 // 2] - block * softmax.kernel.params.block_n
        value = T.Select(i // 4 * 8 + i % 2 < limit, softmax.scores[i], tirx.const(float("-inf"), "float32"))
        T.buffer_store(softmax.scores, value, [i])


@T.inline
def _find_highest(softmax, is_first):
    """Bring the rows' maxima up to date."""
    scores, highest, partial = T.meta_var((softmax.scores, softmax.highest, softmax.partial))
    for i in T.unroll(4):
        partial[i] = scores[i]
    for i in T.unroll(softmax.kernel.scores - 4):
        partial[i % 4] = T.max(partial[i % 4], scores[i + 4])
    for r in T.unroll(2):
        partial[r * 2] = T.max(partial[r * 2], partial[r * 2 + 1])
    for r in T.unroll(2):
        partial[r * 2] = T.max(partial[r * 2], T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), partial[r * 2], 1, 32, 32))
    for r in T.unroll(2):
        partial[r * 2] = T.max(partial[r * 2], T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), partial[r * 2], 2, 32, 32))
    for r in T.unroll(2):
        if is_first:
            highest[r] = partial[r * 2]
        else:
            highest[r] = T.max(highest[r], partial[r * 2])


@T.inline
def _raise(softmax, is_first):
    """Turn scores into powers of two of their distance to the maximum, and add them up."""
    kernel, scores, total, partial = T.meta_var((softmax.kernel, softmax.scores, softmax.total, softmax.partial))
    for r in T.unroll(2):
        if softmax.may_be_empty():
            # All of a row's keys may be masked so far: its maximum is minus infinity, and so is the distance of every score to zero.
            partial[r] = T.Select(
                softmax.highest[r] == tirx.const(float("-inf"), "float32"), T.float32(0), softmax.highest[r] * T.float32(-kernel.scale_log2)
            )
        else:
            partial[r] = softmax.highest[r] * T.float32(-kernel.scale_log2)
    for i in T.unroll(kernel.scores):
        scores[i] = T.exp2(scores[i] * T.float32(kernel.scale_log2) + partial[i % 4 // 2])
    for i in T.unroll(kernel.scores):
        if is_first:
            if i < 4:
                total[i] = scores[i]
            else:
                total[i % 4] = total[i % 4] + scores[i]
        else:
            total[i % 4] = total[i % 4] + scores[i]


@T.inline
def first_softmax(softmax, limits, is_masked):
    """Turn the scores of the first block into powers."""
    if is_masked:
        _mask(softmax, limits)
    _find_highest(softmax, True)
    _raise(softmax, True)


@T.inline
def next_softmax(softmax, limits, is_masked):
    """Turn the scores of another block into powers, and note by which factors what came before shrinks."""
    kernel, highest, inverse = T.meta_var((softmax.kernel, softmax.highest, softmax.inverse))
    if is_masked:
        _mask(softmax, limits)
    for r in T.unroll(2):
        inverse[r] = highest[r]
    _find_highest(softmax, False)
    for r in T.unroll(2):
        if softmax.may_be_empty():
            reference = T.meta_var(T.Select(highest[r] == tirx.const(float("-inf"), "float32"), T.float32(0), highest[r]))
            inverse[r] = T.exp2((inverse[r] - reference) * T.float32(kernel.scale_log2))
        else:
            inverse[r] = T.exp2((inverse[r] - highest[r]) * T.float32(kernel.scale_log2))
    for i in T.unroll(4):
        softmax.total[i] = softmax.total[i] * inverse[i // 2]
    _raise(softmax, False)


@T.inline
def rescale(softmax, results, count):
    """Shrink earlier results to the rows' new maxima."""
    for i in T.unroll(count):
        results[i] = results[i] * softmax.inverse[i % 4 // 2]


@T.inline
def to_operand(softmax, operand):
    """Round powers to wgmma's operand A, whose elements threads hold where they hold the scores."""
    kernel, scores = T.meta_var((softmax.kernel, softmax.scores))
    for i in T.unroll(kernel.scores // 2):
        T.ptx[kernel.narrow](operand[i], scores[i * 2 + 1], scores[i * 2])


@T.inline
def finish_rows(softmax):
    """Add up the sums of the threads that share a row, and note their inverse; zero for rows that see no key."""
    total, inverse = T.meta_var((softmax.total, softmax.inverse))
    for r in T.unroll(2):
        total[r * 2] = total[r * 2] + total[r * 2 + 1]
    for r in T.unroll(2):
        total[r * 2] = total[r * 2] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[r * 2], 1, 32, 32)
    for r in T.unroll(2):
        total[r * 2] = total[r * 2] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[r * 2], 2, 32, 32)
    for r in T.unroll(2):
        inverse[r] = T.Select(total[r * 2] > T.float32(0), T.float32(1) / total[r * 2], T.float32(0))
