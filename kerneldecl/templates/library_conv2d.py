"""Owns convolutions by cuDNN, called from a function of our own with the epilogue that cuDNN knows: a bias, an operand added, relu, gelu
by tanh.

Knows nothing of schedules. cuDNN wants weights with their channels innermost: where they lie otherwise, a kernel of our own copies them to
a workspace first, in every call.

Parameters:
  library     cudnn
  version     the library's version, as far as it counts: a kernel refuses to run with another one
  engine      place in what cuDNN's heuristic returns, from 0 on
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tvm import IRModule, tirx
from tvm.ir import Var

from kerneldecl.compiler.passes.nan import ATTRIBUTE
from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.read_conv import Convolution, SlidingWindow, read_convolution
from kerneldecl.templates.shared.library_epilogue import FusedSteps, Result, fused_steps
from kerneldecl.templates.shared.vendor_call import NULL, function_of, vendor_call
from kerneldecl.toolchain.companions import CUDNN_CONV2D

_DATA_TYPES = MappingProxyType({"float32": 0, "float16": 2, "bfloat16": 9})
"""cudnnDataType_t of cudnn_graph.h."""
_ACTIVATIONS = MappingProxyType({"": -1, "relu": 100, "gelu_tanh": 107})
"""cudnnPointwiseMode_t; negative for none."""
_THREADS = 256


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return a function that calls cuDNN, or None where the function is no convolution that cuDNN takes."""
    convolution = read_convolution(mod) if arch.gpu else None
    if convolution is None or not _takes(convolution):
        return None
    steps = fused_steps(_result(convolution))
    if steps is None:
        return None
    propagates_nan = ATTRIBUTE not in dict(mod["main"].attrs or {})
    return function_of(convolution.func_params, _body(convolution, steps, params, propagates_nan=propagates_nan))


def _takes(convolution: Convolution) -> bool:
    dtypes = {str(each.dtype) for each in (convolution.image, convolution.weights, convolution.out)}
    is_known = len(dtypes) == 1 and dtypes <= _DATA_TYPES.keys()
    return is_known and convolution.accum_dtype == "float32" and convolution.groups == 1


def _result(convolution: Convolution) -> Result:
    place = [Var(name, "int32") for name in ("image", "row", "column", "filter")]
    return Result(
        buffer=convolution.out,
        place=place,
        fastest=place[-1],
        accum_dtype=convolution.accum_dtype,
        value=lambda total, values: convolution.value(total, place, values),
        aux=convolution.aux(place),
    )


def _body(convolution: Convolution, steps: FusedSteps, params: Mapping[str, Value], *, propagates_nan: bool) -> Any:
    rows, columns = convolution.rows, convolution.columns
    shape = (convolution.filters, rows.taps, columns.taps, convolution.channels)
    wanted = (shape[1] * shape[2] * shape[3], 1, shape[3], shape[2] * shape[3])
    ones = (shape[0], shape[3], shape[2], shape[1])
    strides = zip(convolution.weight_strides, wanted, ones, strict=True)
    is_in_order = all(found == want or extent == 1 for found, want, extent in strides)
    weights = convolution.weights if is_in_order else tirx.decl_buffer(shape, convolution.weights.dtype, "weights", scope="global")
    buffers = (convolution.image, weights, steps.add, steps.bias, convolution.out)
    numbers = [
        *(params["engine"], _DATA_TYPES[str(convolution.image.dtype)], _DATA_TYPES[str(convolution.out.dtype)], propagates_nan),
        *(_ACTIVATIONS[steps.activation], convolution.images, convolution.channels, convolution.filters, rows.image, columns.image),
        *(rows.results, columns.results, rows.taps, columns.taps, rows.stride, columns.stride, rows.dilation, columns.dilation),
        *(rows.padding, columns.padding, _padding_after(rows), _padding_after(columns)),
    ]
    call = vendor_call(CUDNN_CONV2D, params["version"], *(NULL if each is None else each.data for each in buffers), *numbers)
    return call if is_in_order else tirx.SeqStmt([tirx.AllocBuffer(weights), _copied(convolution, weights), call])


def _padding_after(window: SlidingWindow) -> int:
    """Return the zeros behind a side: as many as before it where that gives the same results, which more engines take."""
    spanned = window.dilation * (window.taps - 1) + 1
    is_symmetric = (window.image + 2 * window.padding - spanned) // window.stride + 1 == window.results
    return window.padding if is_symmetric else max(0, (window.results - 1) * window.stride + spanned - window.image - window.padding)


def _copied(convolution: Convolution, weights: Any) -> Any:
    """Return the kernel that copies weights to the order [f, r, s, c], an element a thread."""
    count = convolution.filters * convolution.rows.taps * convolution.columns.taps * convolution.channels
    block, thread = Var("block", "int32"), Var("thread", "int32")
    flat = block * _THREADS + thread
    index: list[Any] = []
    rest = flat
    for extent in reversed([int(extent) for extent in weights.shape]):
        index.insert(0, rest % extent)
        rest = rest // extent
    filters, row, column, channel = index
    strides = dict(zip(("f", "c", "s", "r"), convolution.weight_strides, strict=True))
    offset = filters * strides["f"] + channel * strides["c"] + column * strides["s"] + row * strides["r"]
    source: list[Any] = []
    for extent in reversed([int(extent) for extent in convolution.weights.shape]):
        source.insert(0, offset % extent)
        offset = offset // extent
    store = tirx.BufferStore(weights, convolution.weights[tuple(source)], index)
    inside = store if count % _THREADS == 0 else tirx.IfThenElse(flat < count, store, None)
    return _bound(block, "blockIdx.x", -(-count // _THREADS), _bound(thread, "threadIdx.x", _THREADS, inside))


def _bound(var: Any, axis: str, extent: int, body: Any) -> Any:
    thread = tirx.IterVar(None, Var(axis, "int32"), tirx.IterVar.ThreadIndex, axis)
    return tirx.For(var, 0, extent, tirx.ForKind.THREAD_BINDING, body, thread)
