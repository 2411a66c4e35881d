"""Owns the pass that computes group and instance norms in sums over pixels, which many thread blocks share.

Knows nothing of schedules.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import op
from tvm.script import tirx as T  # noqa: N812  # TVMScript's name

from kerneldecl.compiler.graph.named_constants import array_of, constant, name_of
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape
from kerneldecl.compiler.prim_funcs import OPAQUE

_NORMS = frozenset({"relax.nn.group_norm", "relax.nn.instance_norm"})


@graph_pass
class SplitGroupNorms(Rewriter):
    """Computes group and instance norms as sums over pixels, factors for each channel, and x * scale + shift; all in float32.

    TVM lowers a norm to one reduction with a result for each group, of which there are too few to fill a GPU, and whose groups are no
    rows of an image in NHWC. The sums have a result for each channel. Variances are E[x^2] - E[x]^2, as TVM's own are. Channels are
    axis 1 or the last, all other axes but the first are normalised; other norms stay. Run it after passes that remove equal
    subexpressions: a cast of x to float32 must stay a part of each kernel that reads it.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        shape = static_shape(call)
        if operator not in _NORMS or shape is None or len(shape) < 3 or not (call.attrs.center and call.attrs.scale):
            return call
        attrs, rank = call.attrs, len(shape)
        channel, pixels = (
            int(attrs.channel_axis) % rank,
            sorted({int(axis) % rank for axis in attrs.axes} - ({0} if shape[0] == 1 else set())),
        )
        if channel not in {1, rank - 1} or pixels != [axis for axis in range(1, rank) if axis != channel]:
            return call
        x, gamma, beta = call.args
        cast = self.producer(x, "relax.astype")
        x = x if cast is None or dtype_of(x) != "float32" else cast.args[0]  # cast again by each kernel that reads it
        groups = int(attrs.num_groups) if operator == "relax.nn.group_norm" else shape[channel]
        count = math.prod(shape[axis] for axis in pixels) * shape[channel] // groups
        sums = self._call(_sums(shape, dtype_of(x), channel), "group_norm_sums", [x], (2, shape[0], shape[channel]))
        func = _factors(shape[0], groups, shape[channel] // groups, count, float(attrs.epsilon))
        factors = self._call(func, "group_norm_factors", [sums, self._weight(gamma), self._weight(beta)], (2, shape[0], shape[channel]))
        along = [shape[axis] if axis in {0, channel} else 1 for axis in range(rank)]
        scale, shift = (self._row(factors, row, along) for row in range(2))
        scaled = self.builder_.emit(op.multiply(self._wide(x), scale))
        result = op.add(scaled, shift)
        return result if dtype_of(call) == "float32" else op.astype(self.builder_.emit(result), dtype_of(call))

    def _wide(self, x: relax.Expr) -> relax.Expr:
        return x if dtype_of(x) == "float32" else self.builder_.emit(op.astype(x, "float32"))

    def _weight(self, weight: relax.Expr) -> relax.Expr:
        """Return a weight in float32, a constant under its name."""
        values = array_of(weight)
        return self._wide(weight) if values is None else constant(values.astype("float32"), "float32", name_of(weight))

    def _row(self, factors: relax.Expr, row: int, shape: list[int]) -> relax.Expr:
        """Return the scales or the shifts of all channels, in a shape that broadcasts."""
        return self.builder_.emit(op.reshape(self.builder_.emit(op.strided_slice(factors, [0], [row], [row + 1])), shape))

    def _call(self, func: tirx.PrimFunc, name: str, args: list[relax.Expr], shape: tuple[int, ...]) -> relax.Expr:
        called = self.builder_.add_func(func.with_attr("op_pattern", OPAQUE), name)
        return self.builder_.emit(relax.call_tir(called, args, relax.TensorType(shape, "float32")))


def _sums(shape: tuple[int, ...], dtype: str, channel: int) -> tirx.PrimFunc:
    """Return the function from x to the sums of x and of x^2 over its pixels, [2, n, c], as one reduction: two would read x twice."""
    x = te.placeholder(shape, dtype, "x")
    pixels = [te.reduce_axis((0, extent), f"p{axis}") for axis, extent in enumerate(shape) if axis not in {0, channel}]

    def total(k: Any, n: Any, c: Any) -> Any:
        value = x(n, c, *pixels) if channel == 1 else x(n, *pixels, c)
        value = value.astype("float32")
        return te.sum(value * tirx.Select(k == 0, tirx.const(1.0, "float32"), value), pixels)

    return te.create_prim_func([x, te.compute((2, shape[0], shape[channel]), total, "sums")]).without_attr("global_symbol")


def _factors(images: int, groups: int, size: int, count: int, eps: float) -> tirx.PrimFunc:
    """Return the function from the sums of x and of x^2, [2, n, c], and gamma and beta, each [c], to scales and shifts, [2, n, c].

    All indices are affine: readers index the result by channels.
    """
    channels = groups * size

    @T.prim_func(private=True, s_tir=True)  # type: ignore[untyped-decorator]  # TVM is untyped
    def factors(a: T.handle, b: T.handle, c: T.handle, d: T.handle) -> None:
        sums = T.match_buffer(a, (2, images, channels))
        gamma = T.match_buffer(b, (channels,))
        beta = T.match_buffer(c, (channels,))
        out = T.match_buffer(d, (2, images, channels))
        means = T.sblock_alloc_buffer((images, groups))
        moments = T.sblock_alloc_buffer((images, groups))
        for n, g, j in T.grid(images, groups, size):
            with T.sblock("moments"):
                vn, vg, vj = T.axis.remap("SSR", [n, g, j])
                with T.init():
                    means[vn, vg] = T.float32(0)
                    moments[vn, vg] = T.float32(0)
                means[vn, vg] = means[vn, vg] + sums[0, vn, vg * size + vj] * T.float32(1 / count)
                moments[vn, vg] = moments[vn, vg] + sums[1, vn, vg * size + vj] * T.float32(1 / count)
        for n, g, j, k in T.grid(images, groups, size, 2):
            with T.sblock("factors"):
                vn, vg, vj, vk = T.axis.remap("SSSS", [n, g, j, k])
                out[vk, vn, vg * size + vj] = T.if_then_else(
                    vk == 0,
                    gamma[vg * size + vj] * T.rsqrt(T.max(moments[vn, vg] - means[vn, vg] * means[vn, vg], T.float32(0)) + T.float32(eps)),
                    beta[vg * size + vj]
                    - means[vn, vg]
                    * gamma[vg * size + vj]
                    * T.rsqrt(T.max(moments[vn, vg] - means[vn, vg] * means[vn, vg], T.float32(0)) + T.float32(eps)),
                )

    return factors
