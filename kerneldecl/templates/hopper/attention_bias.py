"""Owns what becomes of a block's scores in registers before their softmax: cap, slopes, mask, and the band of keys that rows see.

Knows nothing of how scores are multiplied, or of the softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.shared.fused_attention import LOG2_E, FusedAttention

CAP_SOURCE = """
__device__ __forceinline__ float tvm_attention_cap(float score, float factor, float cap) {
  float raised, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(raised) : "f"(score * factor));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + raised));
  return fmaf(-2.0f * cap, inverse, cap);
}
"""
"""cap tanh(x) = cap - 2 cap / (1 + exp(2 x)), of which the absolute error is some 1e-7 of the cap; that of tanh.approx is 5e-4 of it."""


class Rows(NamedTuple):
    """A thread's two rows of a consumer's 64, while a kernel's script is read.

    Element i of its scores is in row `i % 4 // 2` of the two, at column `i // 4 * 8 + i % 2` from the thread's first one.
    """

    kernel: FusedAttention
    tile: Any
    first_row: Any
    """The consumer's first row."""
    lanes: tuple[Any, Any]
    """Warp of the warpgroup, lane."""
    first_key: Any = 0
    """The first of its keys of a block, where warps of the same rows have keys of their own."""

    @property
    def first_column(self) -> Any:
        column = self.lanes[1] % 4 * 2
        return column if isinstance(self.first_key, int) else column + self.first_key

    def row(self, r: int) -> Any:
        warp, lane = self.lanes
        return self.first_row + warp * 16 + lane // 4 + 8 * r

    def limits(self, block: Any) -> list[tuple[Any, Any]]:
        """Return the first key that each row sees, None for no limit, and the one after the last, from the thread's first column."""
        spec, (lower, upper) = self.kernel.spec, self.kernel.spec.band
        origin = self.first_column + block * self.kernel.params.block_n
        found = []
        for r in range(2):
            stop = spec.keys if upper is None else T.min(spec.keys, self.row(r) + (upper + 1))
            found.append((None if lower is None else self.row(r) + lower - origin, stop - origin))
        return found


def prepare(softmax: Any, rows: Rows, block: Any, is_masked: Any) -> None:
    """Cap, scale and bias a block's scores; set those of keys that a row does not see to minus infinity, where `is_masked` holds.

    `is_masked` is a bool, or a condition that is evaluated for each block.
    """
    if rows.kernel.spec.sizes.has_bias:
        _add_bias(softmax, rows, block)
    elif softmax.scales is not None:
        _negate(softmax)
    if isinstance(is_masked, bool):
        if is_masked:
            _mask(softmax.scores, rows, block)
        return
    with T.If(is_masked), T.Then():
        _mask(softmax.scores, rows, block)


def _mask(scores: Any, rows: Rows, block: Any) -> None:
    limits = rows.limits(block)
    for i in range(rows.kernel.scores):
        start, stop = limits[i % 4 // 2]
        column = i // 4 * 8 + i % 2
        is_seen = column < stop if start is None else T.And(column < stop, column >= start)
        T.buffer_store(scores, T.Select(is_seen, scores[i], tirx.const(float("-inf"), "float32")), [i])


def _negate(softmax: Any) -> None:
    """Negate scores whose scale, of float8, is negative: it is known at run time, and softmax takes its magnitude."""
    with T.If(softmax.scales[1] < T.float32(0)), T.Then():
        for i in range(softmax.kernel.scores):
            T.buffer_store(softmax.scores, -softmax.scores[i], [i])


def _add_bias(softmax: Any, rows: Rows, block: Any) -> None:
    spec, scores = rows.kernel.spec, softmax.scores
    scale = spec.scale if softmax.scales is None else softmax.scales[1]
    slope = None if spec.alibi is None else rows.kernel.argument("slopes")[rows.tile.head]
    origin = block * rows.kernel.params.block_n + rows.first_column
    for i in range(rows.kernel.scores):
        column, r = i // 4 * 8 + i % 2, i % 4 // 2
        value = _capped(scale, spec.softcap, scores[i])
        if slope is not None:
            distance = T.cast(rows.row(r) + spec.alibi - origin, "float32") - T.float32(column)
            value = value - slope * T.fabs(distance)
        if spec.mask:
            value = _masked(rows, (rows.row(r), origin + column), value)
        T.buffer_store(scores, value, [i])


def _capped(scale: Any, cap: float, score: Any) -> Any:
    is_known = isinstance(scale, float)
    if not cap:
        return score * (T.float32(scale) if is_known else scale)
    factor = T.float32(2 * LOG2_E * scale / cap) if is_known else scale * T.float32(2 * LOG2_E / cap)
    return T.cuda.func_call("tvm_attention_cap", score, factor, T.float32(cap), source_code=CAP_SOURCE, return_type="float32")


def _masked(rows: Rows, at: tuple[Any, Any], value: Any) -> Any:
    """Return a score with what the mask adds; rows and keys beyond the last ones read the last one's."""
    kernel, spec, tile = rows.kernel, rows.kernel.spec, rows.tile
    row = at[0] if spec.queries % kernel.params.block_m == 0 else T.min(at[0], spec.queries - 1)
    key = at[1] if spec.keys % kernel.params.block_n == 0 else T.min(at[1], spec.keys - 1)
    places = (tile.batch, tile.head, row, key)[4 - len(spec.mask) :]
    index = [0 if extent == 1 else place for extent, place in zip(spec.mask, places, strict=True)]
    loaded = kernel.argument("mask")[tuple(index)]
    if spec.bias_dtype == "bool":
        return T.Select(loaded, value, tirx.const(float("-inf"), "float32"))
    return value + (loaded if spec.bias_dtype == "float32" else T.cast(loaded, "float32"))
