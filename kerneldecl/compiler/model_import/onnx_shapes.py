"""Owns the converters of ONNX operators that move or repeat elements where TVM's importer gets them wrong, and their attributes.

Knows nothing of files, nor of operators that compute.

A converter returns None where TVM's own is right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.named_constants import array_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.model_import.onnx_elementwise import text


def split(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert Split into parts of which some are empty, or of which the last is smaller."""
    data, shape, sizes = inputs[0], static_shape(inputs[0]), _sizes(inputs, attrs)
    if shape is None:
        return None
    axis, count = int(attrs.get("axis", 0)) % len(shape), attrs["tvm_custom"]["num_outputs"]
    if sizes is None:
        size = -(-shape[axis] // count)
        sizes = [max(0, min(size, shape[axis] - at * size)) for at in range(count)]
    elif sum(sizes) != shape[axis] or len(sizes) != count:
        raise ValueError(f"{count} parts of {sizes} do not make up {shape[axis]}")
    return None if min(sizes) == max(sizes) > 0 else _parts(builder, data, axis, sizes)


def _sizes(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> list[int] | None:
    given = [*inputs, None][1]
    if given is None:
        return list(attrs["split"]) if "split" in attrs else None
    known = array_of(given)
    if known is None:
        raise NotImplementedError("the sizes of its parts are no constant")
    return [int(size) for size in known]


def _parts(builder: Any, data: Any, axis: int, sizes: Sequence[int]) -> Any:
    ends = np.cumsum(sizes)
    places = zip(ends - sizes, ends, strict=True)
    return relax.Tuple([builder.emit(op.strided_slice(data, [axis], [int(begin)], [int(end)])) for begin, end in places])


def space_to_depth(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert SpaceToDepth in mode CRD: channels of the result count the image's channel first, then the place in its block."""
    if text(attrs.get("mode", "DCR")) != "CRD":
        return None
    shape, block = static_shape(inputs[0]), int(attrs["blocksize"])
    if shape is None:
        raise NotImplementedError("mode CRD of a dynamic shape")
    n, c, h, w = shape
    blocks = builder.emit(op.reshape(inputs[0], (n, c, h // block, block, w // block, block)))
    return builder.emit(op.reshape(builder.emit(op.permute_dims(blocks, [0, 1, 3, 5, 2, 4])), (n, c * block**2, h // block, w // block)))


def constant_of_shape(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert ConstantOfShape of a shape that is known when the model runs."""
    from onnx import numpy_helper

    if array_of(inputs[0]) is not None or static_shape(inputs[0]) is None:
        return None
    value = numpy_helper.to_array(attrs["value"]).reshape(()) if "value" in attrs else np.zeros((), "float32")
    return builder.emit(op.broadcast_to(relax.const(value, str(value.dtype)), _run_time_shape(builder, inputs[0])))


def expand(builder: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    """Convert Expand to a shape that is known when the model runs: an extent of 1 there leaves the data's."""
    data, target = inputs
    if not isinstance(target.ty, relax.TensorType) or array_of(target) is not None:
        return None
    shape, count = static_shape(data), static_shape(target)
    if shape is None or count is None:
        raise NotImplementedError("its shape is no constant, nor that of its data")
    rank, emit = max(len(shape), count[0]), builder.emit
    ones = relax.const(np.ones(rank - count[0], "int64"), "int64")
    target = emit(op.astype(target, "int64"))
    whole = target if rank == count[0] else emit(op.concat([ones, target], axis=0))
    own = np.array([1] * (rank - len(shape)) + list(shape), "int64")
    # Where the data's extent is 1 the target's counts, 0 included; elsewhere the two are equal, or the target's is 1.
    extents = emit(op.where(relax.const(own == 1, "bool"), whole, relax.const(own, "int64")))
    return emit(op.broadcast_to(data, _run_time_shape(builder, extents)))


def _run_time_shape(builder: Any, extents: Any) -> Any:
    """Return the shape whose extents a tensor holds when the model runs."""
    shape = static_shape(extents)
    if shape is None:
        raise NotImplementedError("the rank of its result is not known")
    if dtype_of(extents) != "int64":
        extents = builder.emit(op.astype(extents, "int64"))
    found = builder.emit(relax.Call(relax.ExternFunc("vm.builtin.tensor_to_shape"), [extents], ty_args=[relax.ShapeType(ndim=shape[0])]))
    names = [tvm.tirx.Var(f"extent_{i}", "int64") for i in range(shape[0])]
    builder.match_cast(found, relax.ShapeType(names))
    return relax.ShapeExpr(names)


def reverse_sequence(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert ReverseSequence: of each sequence of the batch, the first elements in the other order, and the rest as they are."""
    batch, time = int(attrs.get("batch_axis", 1)), int(attrs.get("time_axis", 0))
    lengths = builder.emit(op.astype(inputs[1], "int32"))
    return builder.emit_te(tvm.topi.reverse_sequence, inputs[0], lengths, time, batch, primfunc_name_hint="reverse_sequence")


def conv_transpose_attrs(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the attributes of ConvTranspose with pads in place of an output shape, by the formula of ONNX's definition."""
    wanted = attrs.get("output_shape")
    if wanted is None:
        return attrs
    image, window = (static_shape(each) for each in inputs[:2])
    if image is None or window is None:
        raise NotImplementedError("an output shape of an image of dynamic shape")
    spatial = len(image) - 2
    given = {name: list(attrs.get(name, [default] * spatial)) for name, default in _WINDOW.items()}
    begins, ends, extra = [], [], []
    places = zip(image[2:], window[2:], list(wanted)[-spatial:], *given.values(), strict=True)
    for extent, size, out, stride, dilation, added in places:
        total = stride * (extent - 1) + added + (size - 1) * dilation + 1 - out
        begin = max(total, 0) // 2 if text(attrs.get("auto_pad", "NOTSET")) == "SAME_UPPER" else math.ceil(max(total, 0) / 2)
        begins.append(begin)
        ends.append(max(total, 0) - begin)
        extra.append(added + max(-total, 0))
    kept = {name: value for name, value in attrs.items() if name not in {"output_shape", "auto_pad"}}
    return {**kept, "pads": (*begins, *ends), "output_padding": tuple(extra)}


_WINDOW = {"strides": 1, "dilations": 1, "output_padding": 0}
