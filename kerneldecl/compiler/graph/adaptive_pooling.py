"""Owns the pass that writes adaptive pooling with windows of several sizes out as sums.

Knows nothing of pooling to one pixel, which is a mean, nor of how sums are scheduled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx

from kerneldecl.compiler.graph.rewriting import Rewriter, graph_pass, static_shape

_POOLS = frozenset(f"relax.nn.adaptive_avg_pool{rank}d" for rank in (1, 2, 3))


@graph_pass
class ExpandAdaptivePooling(Rewriter):
    """Makes adaptive average pooling whose windows have several sizes sums over the largest, of which smaller ones use a part.

    Window i of n over an extent of e begins at floor(i e / n) and ends before ceil((i + 1) e / n). TVM's own function has loops of
    varying length in one block, which no schedule takes apart.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator not in _POOLS:
            return call
        given, result = static_shape(call.args[0]), static_shape(self.builder_.normalize(call))
        layout = str(call.attrs.layout)
        if given is None or result is None or len(layout) != len(given) or 0 in given:
            return call
        axes = [at for at, axis in enumerate(layout) if axis in "DHW"]
        if all(given[at] % result[at] == 0 for at in axes):
            return call
        pool = functools.partial(_pooled, result=result, axes=axes)
        return self.builder_.call_te(pool, call.args[0], primfunc_name_hint=operator.removeprefix("relax.nn."))


def _pooled(x: te.Tensor, result: Sequence[int], axes: Sequence[int]) -> te.Tensor:
    sums = te.compute(result, functools.partial(_sum, x, result, axes), name="sum")

    def mean(*at: Any) -> Any:
        count = tirx.const(1, "int64")
        for axis in axes:
            begin, end = _window(at[axis], int(x.shape[axis]), result[axis])
            count = count * (end - begin).astype("int64")
        return sums(*at) / count.astype(x.dtype)

    return te.compute(result, mean, name="mean")


def _sum(x: te.Tensor, result: Sequence[int], axes: Sequence[int], *at: Any) -> Any:
    source, inside, steps = list(at), [], []
    for axis in axes:
        extent = int(x.shape[axis])
        longest = max(end - begin for begin, end in (_window(place, extent, result[axis]) for place in range(result[axis])))
        step = te.reduce_axis((0, longest), f"step_{axis}")
        begin, end = _window(at[axis], extent, result[axis])
        source[axis] = tirx.min(begin + step, extent - 1)
        inside.append(begin + step < end)
        steps.append(step)
    return te.sum(tirx.Select(functools.reduce(tirx.all, inside), x(*source), tirx.const(0, x.dtype)), axis=steps)


def _window(place: Any, extent: int, count: int) -> tuple[Any, Any]:
    """Return where a window begins and ends."""
    return place * extent // count, ((place + 1) * extent + count - 1) // count
