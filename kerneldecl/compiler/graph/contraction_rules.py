"""Owns finding the rules of matmuls and convolutions, with what follows a GEMM or a convolution as its epilogue.

Knows nothing of other rules, nor of how functions are replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax

from kerneldecl.compiler.graph.activations import ACTIVATIONS, activation_of, wide_activation_of
from kerneldecl.compiler.graph.gemm_operands import operands_of, stored_result
from kerneldecl.compiler.graph.named_constants import array_of, constant, is_array, name_of, scalar_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.rule_use import FLOATS, HALVES, Found, Use, dtype_attr, out_attr
from kerneldecl.compiler.graph.windows import LAYOUTS, window_use

_ACTIVATION_STEPS = frozenset({*ACTIVATIONS.values(), "relu6", "hard_sigmoid", "hard_swish"})
PANEL = 16
"""Output channels of a panel of weights: a cache line of float32, and the widest vector of it."""
PIXELS_OF_PANELS = 4
"""Pixels of the output from which on weights come in panels: for fewer, a kernel reads them once, whole rows of them."""
_OF_ROWS = frozenset({"add", "mul", "scale_rows"})
"""Steps whose operand lies in memory as the result does."""


def find_contraction(found: Found, var: relax.Var, call: relax.Call) -> None:
    """Find the longest epilogue of a matmul or a convolution that the rule takes."""
    operator = str(call.op.name)
    first = _gemm(found, call) if operator == "relax.matmul" else window_use(call) if operator in LAYOUTS else None
    if first is None:
        return
    chain = [(var, replace(first, attrs={**first.attrs, **out_attr(first.attrs, dtype_of(call))}))]
    while (longer := _longer(found, *chain[-1])) is not None:
        chain.append(longer)
    for last, use in reversed(chain):
        for end, whole in _written(found, last, use):
            if whole.is_accepted(end):
                found.add(end, _in_panels(found, whole) or whole)
                return


def _gemm(found: Found, call: relax.Call) -> Use | None:
    """Return the rule of a matmul of two or three axes, whose operands may be transposed, or views with interleaved heads."""
    of_a, of_b = static_shape(call.args[0]) or (), static_shape(call.args[1]) or ()
    dtype = dtype_of(call.args[0])
    is_gemm = len(of_a) == len(of_b) and len(of_a) in {2, 3} and of_a[:-2] == of_b[:-2]
    if not is_gemm or dtype != dtype_of(call.args[1]) or dtype not in FLOATS:
        return None
    operands = operands_of(found.graph, call)
    layout = "".join("t" if operand.is_transposed else "n" for operand in operands)
    sizes: dict[str, Any] = {"m": of_a[-2], "n": of_b[-1], "k": of_a[-1], **({"batch": of_a[0]} if len(of_a) == 3 else {})}
    heads = max(operand.heads for operand in operands)
    if heads:
        names = "".join(name for name, operand in zip("ab", operands, strict=True) if operand.heads)
        sizes |= {"batch": of_a[0] // heads, "heads": heads, "interleaved": names}
    attrs = sizes | ({} if layout == "nn" else {"layout": layout}) | dtype_attr(dtype)
    return Use("matmul", attrs, tuple(operand.value for operand in operands), is_viewed=True)


def _in_panels(found: Found, use: Use) -> Use | None:
    """Return a convolution with its constant weights in panels, where the target has a kernel that reads them so."""
    if use.rule != "conv2d" or not is_array(use.operands[1]):
        return None
    image, weights, *operands = use.operands
    *_, channels, f = static_shape(weights) or (0, 0)
    *pixels, _ = use.instance.signature().outputs[0].shape
    if channels == 1 or f == PANEL or f // use.attrs.get("groups", 1) % PANEL or math.prod(pixels) < PIXELS_OF_PANELS:
        return None
    in_panels = replace(use, attrs={**use.attrs, "panel": PANEL})
    if not found.fuses(in_panels.instance):
        return None
    rows = array_of(weights)
    assert rows is not None, "it is an array"
    panels = np.moveaxis(rows.reshape(*rows.shape[:-1], -1, PANEL), -2, 0)
    return replace(in_panels, operands=(image, constant(panels, dtype_of(weights), name_of(weights)), *operands))


def _written(found: Found, last: relax.Var, use: Use) -> Iterator[tuple[relax.Var, Use]]:
    """Yield a GEMM whose result is written with interleaved heads, if that is how it is read, and the GEMM as it is."""
    attrs = use.attrs
    result = stored_result(found.graph, last) if attrs.get("batch") and not _OF_ROWS & set(attrs.get("epilogue", ())) else None
    if result is not None and attrs.get("heads", result[1]) == result[1]:
        end, heads = result
        batch = attrs["batch"] if "heads" in attrs else attrs["batch"] // heads
        interleaved = {"batch": batch, "heads": heads, "interleaved": attrs.get("interleaved", "") + "c"}
        yield end, replace(use, attrs={**attrs, **interleaved}, replaced=(*use.replaced, last, *_views_to(found, last, end)))
    yield last, use


def _views_to(found: Found, first: relax.Var, end: relax.Var) -> Iterator[relax.Var]:
    reader = found.graph.only_reader(first)
    while reader is not None and not reader.same_as(end):
        yield reader
        reader = found.graph.only_reader(reader)


def _longer(found: Found, last: relax.Var, use: Use) -> tuple[relax.Var, Use] | None:
    """Return a use with one more step of its epilogue, and what it gives; None where what reads it is none."""
    graph, steps = found.graph, tuple(use.attrs.get("epilogue", ()))
    activation = activation_of(graph, last) or wide_activation_of(graph, last)
    if activation is not None and not _ACTIVATION_STEPS & set(steps):
        *inner, end = activation.variables
        return end, _with_step(use, activation.name, (*use.replaced, last, *inner))
    reader = graph.only_reader(last)
    call = graph.call(reader) if reader not in found.taken else None
    if reader is None or call is None:
        return None
    name, dtype = str(call.op.name), str(use.attrs.get("dtype", "float32"))
    if name == "relax.astype" and dtype in HALVES and dtype_of(last) == "float32" and dtype_of(call) == dtype:
        kept = {key: value for key, value in use.attrs.items() if key != "out_dtype"}
        return reader, replace(use, attrs=kept, replaced=(*use.replaced, last))
    step, operand = _step(call, name, last)
    if not step or step in steps:
        return None
    return reader, replace(_with_step(use, step, (*use.replaced, last)), operands=(*use.operands, operand))


def _with_step(use: Use, step: str, replaced: tuple[relax.Var, ...]) -> Use:
    return replace(use, attrs={**use.attrs, "epilogue": (*use.attrs.get("epilogue", ()), step)}, replaced=replaced)


def _step(call: relax.Call, name: str, last: relax.Var) -> tuple[str, relax.Expr]:
    """Return the step of two operands that an operator is after the value `last`, and its other operand."""
    if name not in {"relax.add", "relax.multiply", "relax.divide"} or len(call.args) != 2:
        return "", last
    is_first = isinstance(call.args[0], relax.Var) and call.args[0].same_as(last)
    other = call.args[1 if is_first else 0]
    number, shape, whole = scalar_of(other), static_shape(other), static_shape(call) or ()
    if name == "relax.add":
        return ("add" if shape == whole else "bias" if shape == whole[-1:] else ""), other
    if number is None and name == "relax.multiply" and shape == whole:
        return "mul", other
    if number is None or not number or (name == "relax.divide" and not is_first):
        return "", last
    scale = np.array([number if name == "relax.multiply" else 1 / number], "float32")
    return "scale", constant(scale, "float32")
