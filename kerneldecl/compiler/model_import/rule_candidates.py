"""Owns the entries of standard rules that a function could be, by shapes and dtypes of its arguments alone.

Knows nothing of what the function computes: the caller lowers each candidate and compares it with the function.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kerneldecl.model import Arg

_ACTIVATIONS = ("relu", "relu6", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "hard_sigmoid", "hard_swish")
UNARY = (*_ACTIVATIONS, "copy", "neg", "abs", "sqrt", "exp")
BINARY = ("add", "mul", "sub", "div", "maximum", "minimum", "silu_mul", "gelu_mul", "gelu_tanh_mul")
_REDUCTIONS = ("sum", "mean", "max", "min")
_LARGEST_STRIDE = 4
_LARGEST_DILATION = 3
_LARGEST_RANK = 4
"""Largest rank of arrays whose axes are tried in every order: the number of orders is the rank's factorial."""


@dataclass(frozen=True)
class RuleCandidate:
    """A rule and its attributes that differ from the rule's defaults."""

    rule: str
    attrs: dict[str, Any]


def rule_candidates(args: Sequence[Arg], constants: Iterable[float] = ()) -> Iterator[RuleCandidate]:
    """Yield the entries that a function with these arguments, the last being its only output, could be; likely ones first.

    `constants` are the floating-point numbers in the function: values that no shape determines, such as an epsilon, are among them.
    """
    *inputs, out = args
    if len(inputs) == 1:
        yield from _unary(inputs[0], out)
    if 1 <= len(inputs) <= 2:
        yield from _elementwise(inputs, out)
    if len(inputs) >= 2:
        for rule, shapes in (("matmul", _gemms), ("gemv", _gemvs), ("conv2d", _convolutions)):
            yield from (RuleCandidate(rule, attrs | dtypes) for attrs, dtypes in _with_dtypes(shapes(inputs, out), inputs, out))
        yield from _norms(inputs, out, sorted({value for value in constants if value > 0}))


def _unary(x: Arg, out: Arg) -> Iterator[RuleCandidate]:
    if x.dtype != out.dtype or not x.shape:
        return
    given = {"shape": x.shape, **_unless(dtype="float32", given=x.dtype)}
    rank = len(x.shape)
    if x.shape == out.shape:
        yield RuleCandidate("softmax", given)
        yield from (RuleCandidate("softmax", given | {"axis": axis}) for axis in range(rank - 1))
    for axes in itertools.permutations(range(rank)) if rank <= _LARGEST_RANK else ():
        if tuple(x.shape[axis] for axis in axes) == out.shape:
            yield RuleCandidate("transpose", given | {"axes": axes})
    for kind in _reductions(x.shape, out.shape):
        yield from (RuleCandidate("reduce", {"op": op, **given, **kind}) for op in _REDUCTIONS)


def _reductions(shape: tuple[int, ...], out: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for count in range(1, len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), count):
            if tuple(1 if axis in axes else extent for axis, extent in enumerate(shape)) == out:
                yield {"axes": axes, "keepdims": True}
            if tuple(extent for axis, extent in enumerate(shape) if axis not in axes) == out:
                yield {"axes": axes}


def _elementwise(inputs: Sequence[Arg], out: Arg) -> Iterator[RuleCandidate]:
    if out.shape and all((arg.shape, arg.dtype) == (out.shape, out.dtype) for arg in inputs):
        for op in UNARY if len(inputs) == 1 else BINARY:
            yield RuleCandidate("elementwise", {"op": op, "shape": out.shape, **_unless(dtype="float32", given=out.dtype)})


def _norms(inputs: Sequence[Arg], out: Arg, constants: Sequence[float]) -> Iterator[RuleCandidate]:
    x, *scales = inputs
    is_row = all(scale.shape == out.shape[-1:] for scale in scales) and {arg.dtype for arg in inputs} == {out.dtype}
    if is_row and x.shape == out.shape and len(scales) <= 2:
        rule = "rms_norm" if len(scales) == 1 else "layer_norm"
        for eps in constants:
            yield RuleCandidate(rule, {"shape": x.shape, "eps": eps, **_unless(dtype="float32", given=x.dtype)})


def _with_dtypes(found: Iterable[dict[str, Any]], inputs: Sequence[Arg], out: Arg) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each contraction's attributes with each choice of dtypes that it may be declared with."""
    dtype = inputs[0].dtype
    if inputs[1].dtype != dtype:
        return
    accum_dtypes = ("", "float16") if dtype == "float16" else ("",)
    default_out = "int32" if dtype in {"int8", "uint8"} else dtype
    for attrs, accum in itertools.product(found, accum_dtypes):
        declared = {"accum_dtype": accum} if accum else {}
        yield attrs, {**_unless(dtype="float32", given=dtype), **declared, **({} if out.dtype == default_out else {"out_dtype": out.dtype})}


def _gemms(inputs: Sequence[Arg], out: Arg) -> Iterator[dict[str, Any]]:
    a, b = (arg.shape for arg in inputs[:2])
    rank = len(out.shape)
    if rank not in {2, 3} or len(a) != rank or len(b) != rank or not a[:-2] == b[:-2] == out.shape[:-2]:
        return
    m, n = out.shape[-2:]
    for layout in ("nn", "nt", "tn", "tt"):
        (rows, k), (depth, columns) = _transposed(a[-2:], layout[0]), _transposed(b[-2:], layout[1])
        if (rows, columns, k) == (m, n, depth):
            sizes = {"m": m, "n": n, "k": k, **({"batch": a[0]} if rank == 3 else {}), **({} if layout == "nn" else {"layout": layout})}
            yield from (sizes | epilogue for epilogue in _epilogues(inputs[2:], out))


def _transposed(shape: tuple[int, ...], letter: str) -> tuple[int, ...]:
    return shape if letter == "n" else shape[::-1]


def _gemvs(inputs: Sequence[Arg], out: Arg) -> Iterator[dict[str, Any]]:
    if len(inputs) != 2 or [len(arg.shape) for arg in (*inputs, out)] != [2, 1, 1]:
        return
    for layout in ("n", "t"):
        if _transposed(inputs[0].shape, layout) == (*out.shape, *inputs[1].shape):
            yield {"n": out.shape[0], "k": inputs[1].shape[0], **({} if layout == "n" else {"layout": layout})}


def _convolutions(inputs: Sequence[Arg], out: Arg) -> Iterator[dict[str, Any]]:
    x, weights = inputs[:2]
    if not len(x.shape) == len(weights.shape) == len(out.shape) == 4:
        return
    (n, h, w, c), (kh, kw, depth, f) = x.shape, weights.shape
    if (n, f) != (out.shape[0], out.shape[3]) or c % depth:
        return
    sizes = {"n": n, "h": h, "w": w, "c": c, "f": f, "kh": kh, "kw": kw, **({} if c == depth else {"groups": c // depth})}
    for window in _sliding_windows((h, w), (kh, kw), out.shape[1:3]):
        yield from (sizes | window | epilogue for epilogue in _epilogues(inputs[2:], out))


def _sliding_windows(image: Sequence[int], kernel: Sequence[int], out: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield the strides, paddings and dilations that map one image size to another."""
    is_point = max(kernel) == 1
    for dilation in range(1, 2 if is_point else _LARGEST_DILATION + 1):
        receptive = [dilation * (extent - 1) + 1 for extent in kernel]
        for stride, padding in itertools.product(range(1, _LARGEST_STRIDE + 1), range(max(receptive))):
            if all((i + 2 * padding - r) // stride + 1 == o for i, r, o in zip(image, receptive, out, strict=True)):
                window = {"stride": stride, "padding": padding, "dilation": dilation}
                yield {name: value for name, value in window.items() if value != (0 if name == "padding" else 1)}


def _epilogues(operands: Sequence[Arg], out: Arg) -> Iterator[dict[str, Any]]:
    """Yield the epilogues with these operands, with no activation or with one at any place; none if an operand's shape fits no step."""
    steps: list[str] = []
    for operand in operands:
        if operand.shape not in {out.shape, out.shape[-1:]} or operand.dtype != out.dtype:
            return
        steps.append("add" if operand.shape == out.shape else "bias")
    if len(set(steps)) < len(steps):
        return
    yield {"epilogue": tuple(steps)} if steps else {}
    for place, activation in itertools.product(range(len(steps), -1, -1), _ACTIVATIONS):
        yield {"epilogue": (*steps[:place], activation, *steps[place:])}


def _unless(*, dtype: str, given: str) -> dict[str, str]:
    """Return the dtype as an attribute unless it is the default."""
    return {} if given == dtype else {"dtype": given}
