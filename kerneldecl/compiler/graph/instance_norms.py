"""Owns the pass that gives instance norms the shape of their images: torch writes them for one image that has all images' channels.

Knows nothing of rules, or of what follows.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.named_constants import array_of, constant, name_of
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape


@graph_pass
class InstanceNorms(Rewriter):
    """Makes of reshape(instance_norm(reshape(x, [1, n * c, …])), [n, c, …]), whose weights repeat for each image, instance_norm(x).

    The reshapes would keep images from being NHWC. Casts around the norm stay. Run it before reshapes are moved.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        shape = static_shape(call)
        if operator != "relax.reshape" or shape is None or len(shape) < 3:
            return call
        narrow = self.producer(call.args[0], "relax.astype")
        norm = self.producer(call.args[0] if narrow is None else narrow.args[0], "relax.nn.instance_norm")
        joined = (1, shape[0] * shape[1], *shape[2:])
        if norm is None or static_shape(norm) != joined or int(norm.attrs.channel_axis) != 1:
            return call
        pixels = list(range(2, len(shape)))
        wide = self.producer(norm.args[0], "relax.astype")
        flat = self.producer(norm.args[0] if wide is None else wide.args[0], "relax.reshape")
        weights = [self._of_one_image(weight, shape[1]) for weight in norm.args[1:]]
        if flat is None or static_shape(flat.args[0]) != shape or {int(axis) for axis in norm.attrs.axes} - {0} != set(pixels):
            return call
        if any(weight is None for weight in weights) or not (norm.attrs.center and norm.attrs.scale):
            return call
        x = flat.args[0] if wide is None else self.emitted(op.astype(flat.args[0], dtype_of(wide)))
        result = op.nn.instance_norm(x, *weights, channel_axis=1, axes=pixels, epsilon=float(norm.attrs.epsilon))
        return result if narrow is None else op.astype(self.emitted(result), dtype_of(narrow))

    def _of_one_image(self, weight: relax.Expr, channels: int) -> relax.Expr | None:
        """Return the weights of one image's channels, where those of all images are the same; None elsewhere."""
        cast, tiled = self.producer(weight, "relax.astype"), self.producer(weight, "relax.tile")
        if cast is not None:
            narrow = self._of_one_image(cast.args[0], channels)
            return None if narrow is None else self.emitted(op.astype(narrow, dtype_of(cast)))
        if tiled is not None:
            return tiled.args[0] if static_shape(tiled.args[0]) == (channels,) else None
        values = array_of(self.known(weight))
        if values is None or values.size % channels:
            return None
        images = values.reshape(-1, channels)
        is_same = bool(np.array_equal(images, np.broadcast_to(images[:1], images.shape)))
        return constant(images[0], dtype_of(weight), name_of(self.known(weight))) if is_same else None
