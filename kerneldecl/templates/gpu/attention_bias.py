"""Owns what is done to scores of attention on mma.sync before their softmax: a cap, slopes, masks, and keys that rows do not see.

Knows nothing of products.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.gpu.attention_config import LOG2_E
from kerneldecl.templates.gpu.attention_tile import Warp
from kerneldecl.templates.hopper.attention_softmax import Softmax, mask


def add_biases(warp: Warp, block: Any) -> None:
    """Scale the scores of a block of keys, cap them, and add what there is to add, in units of powers of two; hide what a mask hides."""
    kernel = warp.kernel
    for number, fragment in enumerate(warp.fragments):
        for i in range(kernel.scores):
            row = warp.first_row(number) + warp.lane // 4 + i % 4 // 2 * 8
            column = block * kernel.params.block_n + warp.lane % 4 * 2 + i // 4 * 8 + i % 2
            T.buffer_store(fragment.softmax.scores, _biased(warp, fragment.softmax.scores[i], row, column), [i])


def _biased(warp: Warp, score: Any, row: Any, column: Any) -> Any:
    kernel, spec = warp.kernel, warp.kernel.spec
    if spec.softcap:
        # The exponential, unlike the GPU's approximate tanh, is as precise as float32.
        power = T.exp2(score * T.float32(2 * LOG2_E * spec.scale / spec.softcap))
        score = T.float32(LOG2_E * spec.softcap) - T.float32(2 * LOG2_E * spec.softcap) / (power + T.float32(1))
    elif kernel.has_bias:
        score = score * T.float32(spec.scale * LOG2_E)
    if spec.alibi is not None:
        distance = T.Cast("float32", tirx.abs(row + spec.alibi - column))
        score = score - kernel.arguments["slopes"][warp.tile.head] * T.float32(LOG2_E) * distance
    if not spec.has_mask:
        return score
    masked = kernel.arguments["mask"][_mask_index(warp, row, column)]
    if spec.bias_dtype == "bool":
        return T.Select(masked, score, tirx.const(float("-inf"), "float32"))
    return score + T.Cast("float32", masked) * T.float32(LOG2_E)


def _mask_index(warp: Warp, row: Any, column: Any) -> list[Any]:
    """Return where the mask has what belongs to a score, in the last row and column in place of those beyond."""
    spec, tile = warp.kernel.spec, warp.tile
    at = (tile.batch, tile.head, T.min(row, spec.queries - 1), T.min(column, spec.keys - 1))
    return [0 if extent == 1 else place for extent, place in zip(spec.mask, at[4 - len(spec.mask) :], strict=True)]


def hide_unseen(warp: Warp, block: Any) -> None:
    """Set the scores of keys that rows do not see to minus infinity."""
    for number, fragment in enumerate(warp.fragments):
        softmax, first_row = fragment.softmax, warp.first_row(number)
        mask(softmax, (softmax.limits(first_row, (0, warp.lane)), block))
        if warp.kernel.spec.band.lower is not None:
            _hide_first(softmax, first_row + warp.kernel.spec.band.lower, warp.lane, block)


def _hide_first(softmax: Softmax, first_key: Any, lane: Any, block: Any) -> None:
    """Do so for the keys before the first that rows see; `first_key` is that of the fragment's first row."""
    for i in range(softmax.kernel.scores):
        first = first_key + lane // 4 + i % 4 // 2 * 8 - block * softmax.kernel.params.block_n - lane % 4 * 2
        value = T.Select(i // 4 * 8 + i % 2 >= first, softmax.scores[i], tirx.const(float("-inf"), "float32"))
        T.buffer_store(softmax.scores, value, [i])
