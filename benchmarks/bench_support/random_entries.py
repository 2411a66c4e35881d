"""Owns operators drawn at random: a rule and attributes for each number of a seed, as tables of workloads.toml.

Knows nothing of how they are built or timed. Sizes are log-uniform, a third of the operators has odd extents, and what would take too long
or too much memory is drawn again. An operator depends on seed and number alone, not on how many others are drawn.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kerneldecl.plugins.load import load_rule

T = TypeVar("T")
Attrs = dict[str, Any]
ODD_SHARE = 1 / 3
"""Share of operators with odd extents; those of others are multiples of 8, as far as they are over 8."""
MOST_DRAWS = 1000


@dataclass(frozen=True)
class Limits:
    """What one operator may take."""

    flops: float
    slow_flops: float
    """The same of dtypes without tensor cores."""
    nbytes: float
    dtypes: tuple[str, ...]
    """Floating-point dtypes; what stands several times is drawn more often."""
    has_narrow: bool
    """Whether GEMMs in float8, int8, TF32 and with float16 accumulators are drawn."""


LIMITS = {
    "cuda": Limits(1e11, 1e10, 3e8, ("float16", "float16", "float16", "bfloat16", "bfloat16", "float32"), has_narrow=True),
    "cpu": Limits(1e9, 1e9, 3e7, ("float32",), has_narrow=False),
}
"""By kind of arch: under 0.3 ms on an H200, and 50 ms on a core with AVX-512."""


class Dice:
    """Draws from one operator's random numbers."""

    def __init__(self, seed: str, limits: Limits) -> None:
        self._random = random.Random(seed)
        self.limits = limits
        self.is_odd = self._random.random() < ODD_SHARE

    def extent(self, least: int, most: int, multiple: int = 8) -> int:
        """Return a log-uniform extent: odd for an odd operator, else a multiple as far as it is over that."""
        drawn = round(math.exp(self._random.uniform(math.log(least), math.log(most))))
        if self.is_odd:
            return drawn | 1
        return drawn if drawn <= multiple else drawn // multiple * multiple

    def whole(self, least: int, most: int) -> int:
        """Return a log-uniform number as it comes."""
        return round(math.exp(self._random.uniform(math.log(least), math.log(most))))

    def one(self, *choices: T) -> T:
        return self._random.choice(choices)

    def dtype(self) -> str:
        return self.one(*self.limits.dtypes)

    def weighted(self, weights: Mapping[str, int]) -> str:
        (chosen,) = self._random.choices(list(weights), weights.values())
        return chosen


EPILOGUES = (("bias",), ("bias", "relu"), ("bias", "gelu"), ("bias", "silu"), ("add",), ("bias", "add"))


def _epilogue(dice: Dice) -> tuple[str, ...]:
    return dice.one(*EPILOGUES, *[()] * (2 * len(EPILOGUES)))


NARROW: tuple[Attrs, ...] = (
    {"dtype": "float8_e4m3fn", "out_dtype": "float16"},
    {"dtype": "int8"},
    {"dtype": "float32", "precision": "tfloat32"},
    {"dtype": "float16", "accum_dtype": "float16"},
)


def _matmul(dice: Dice) -> Attrs:
    drawn = {"m": dice.whole(1, 8192), "n": dice.extent(32, 16384), "k": dice.extent(32, 16384)}
    narrow = dice.one(*NARROW, *[{}] * (2 * len(NARROW)))
    if narrow and dice.limits.has_narrow:
        # torch multiplies 8-bit operands in one layout, and whole vectors of 16 bytes alone.
        eight = {"m": drawn["m"] + 16, **{name: -(-drawn[name] // 16) * 16 for name in "nk"}} if "8" in narrow["dtype"] else {}
        return drawn | eight | narrow | {"layout": "nt" if eight else dice.one("nn", "nt", "nt", "tn", "tt")}
    batch = {"batch": dice.whole(2, 64)} if dice.one(*range(8)) == 0 else {}
    epilogue = {} if batch else {"epilogue": _epilogue(dice)}
    return drawn | batch | epilogue | {"layout": dice.one("nn", "nt", "nt", "tn", "tt"), "dtype": dice.dtype()}


def _conv2d(dice: Dice) -> Attrs:
    kind = dice.one("3x3", "3x3", "3x3", "1x1", "1x1", "stem", "grouped", "depthwise")
    side, groups = dice.extent(7, 112, 1), 1
    c, f = dice.extent(16, 1024), dice.extent(16, 1024)
    kernel = {"1x1": 1, "stem": dice.one(3, 7)}.get(kind, dice.one(3, 3, 3, 5))
    if kind == "stem":
        c, f, side = 3, dice.extent(16, 128), 2 * side
    elif kind == "grouped":
        groups = dice.one(2, 4, 8, 16, 32)
        c, f = groups * dice.one(4, 8, 16, 32), groups * dice.one(4, 8, 16, 32)
    elif kind == "depthwise":
        groups = f = c
    place = {"stride": dice.one(1, 1, 1, 2), "padding": kernel // 2, "groups": groups}
    image = {"n": dice.whole(1, 64), "h": side, "w": side, "c": c, "f": f, "kh": kernel, "kw": kernel}
    return image | place | {"dtype": dice.dtype(), "epilogue": dice.one((), (), ("bias", "relu"), ("bias",), ("bias", "add"))}


def _gemv(dice: Dice) -> Attrs:
    return {"n": dice.extent(64, 32768), "k": dice.extent(64, 32768), "layout": dice.one("n", "n", "t"), "dtype": dice.dtype()}


def _gemv_i4(dice: Dice) -> Attrs:
    group = dice.one(32, 64, 128)
    return {"n": 32 * dice.whole(8, 512), "k": 128 * dice.whole(4, 128), "group": group, "dtype": dice.dtype()}


def _rows(dice: Dice, most: int = 1 << 27) -> tuple[int, int]:
    """Return rows and columns of log-uniform total and shape: few long rows as often as many short ones."""
    total = dice.whole(1 << 12, most)
    rows = dice.whole(1, total // 4)
    return rows, dice.extent(max(4, total // rows), max(5, total // rows) + 8)


def _reduce(dice: Dice) -> Attrs:
    rows, columns = _rows(dice)
    split = dice.one(1, 1, 4)
    shape, axes = [(rows, columns), (rows // split + 1, split, columns)][split > 1], dice.one((-1,), (-1,), (0,))
    return {"op": dice.one("sum", "sum", "max", "mean"), "shape": shape, "axes": axes, "dtype": dice.dtype()}


def _softmax(dice: Dice) -> Attrs:
    return _masked_softmax(dice) if dice.one(True, False, False) else {"shape": _rows(dice), "dtype": dice.dtype()}


def _masked_softmax(dice: Dice) -> Attrs:
    batch, heads, queries, keys = dice.whole(1, 16), dice.whole(1, 16), dice.whole(1, 512), dice.extent(16, 2048)
    mask = dice.one((), (queries, keys), (batch, 1, queries, keys), (batch, 1, 1, keys))
    return {"shape": (batch, heads, queries, keys), "scale": 0.125, "mask": mask, "dtype": dice.dtype()}


def _cross_entropy(dice: Dice) -> Attrs:
    return {"rows": dice.whole(1, 8192), "classes": dice.extent(10, 200_000), "dtype": dice.dtype()}


def _norm(dice: Dice) -> Attrs:
    return {"shape": (dice.whole(1, 16384), dice.extent(64, 16384)), "dtype": dice.dtype()}


QUANTIZED = ((True, ""), (True, "int8"), (True, "float8_e4m3fn"), (False, "int8"), (False, "float8_e4m3fn"))


def _fused_norm(dice: Dice) -> Attrs:
    residual, out = dice.one((False, ""), *QUANTIZED) if dice.limits.has_narrow else (dice.one(True, False), "")
    return _norm(dice) | {"residual": residual, "out_dtype": out}


def _group_norm(dice: Dice) -> Attrs:
    groups, axis = dice.one(8, 16, 32), dice.one(1, -1)
    channels, side = groups * dice.one(1, 2, 4, 8, 16, 32), dice.extent(8, 128)
    image = (channels, side, side) if axis == 1 else (side, side, channels)
    return {"shape": (dice.whole(1, 16), *image), "groups": groups, "axis": axis, "activation": dice.one("", "silu"), "dtype": dice.dtype()}


OPS = ("copy", "add", "sub", "mul", "div", "relu", "exp", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu", "silu_mul", "hard_swish")


def _gated_halves(dice: Dice) -> Attrs:
    return {"op": dice.one("silu_mul", "gelu_mul", "gelu_tanh_mul"), "halves": True, "shape": _rows(dice), "dtype": dice.dtype()}


def _matmul_gated(dice: Dice) -> Attrs:
    sizes = {"m": dice.whole(1, 8192), "n": dice.extent(32, 16384), "k": dice.extent(32, 8192)}
    return sizes | {"gate": dice.one("silu", "silu", "gelu", "gelu_tanh"), "dtype": dice.dtype()}


def _pool2d(dice: Dice) -> Attrs:
    side, kernel = dice.extent(8, 112, 1), dice.one(2, 3, 3)
    window = {"kh": kernel, "kw": kernel, "stride": dice.one(1, 2, 2), "padding": kernel // 2, "op": dice.one("max", "max", "mean")}
    image = {"n": dice.whole(1, 64), "h": side, "w": side, "c": dice.extent(16, 512), "layout": dice.one("nhwc", "nchw")}
    return image | window | {"dtype": dice.dtype()}


def _batch_norm(dice: Dice) -> Attrs:
    side = dice.extent(7, 112, 1)
    channels, axis = dice.extent(16, 1024), dice.one(1, -1)
    image = (channels, side, side) if axis == 1 else (side, side, channels)
    return {"shape": (dice.whole(1, 32), *image), "axis": axis, "activation": dice.one("", "relu"), "dtype": dice.dtype()}


def _embedding(dice: Dice) -> Attrs:
    indices = (dice.whole(1, 32), dice.whole(1, 2048))
    return {"indices": indices, "rows": dice.whole(100, 100_000), "columns": dice.extent(16, 8192), "dtype": dice.dtype()}


def _arg_reduce(dice: Dice) -> Attrs:
    return {"op": dice.one("argmax", "argmin"), "shape": _rows(dice), "axis": dice.one(-1, -1, 0), "dtype": dice.dtype()}


EXPRESSIONS = ("gelu(x) * y + 1", "x * sigmoid(y) + x", "where(x < y, -x / 2, max(x, y))", "exp(min(x, 1)) - abs(y)")


def _expression(dice: Dice) -> Attrs:
    rows, columns = _rows(dice)
    other = dice.one((rows, columns), (columns,), (rows, 1))
    return {"expr": dice.one(*EXPRESSIONS), "shapes": ((rows, columns), other), "dtype": dice.dtype()}


def _elementwise(dice: Dice) -> Attrs:
    if dice.one(*range(6)) == 0:
        return _gated_halves(dice)
    rows, columns = _rows(dice)
    return {"op": dice.one(*OPS), "shape": dice.one((rows, columns), (rows * columns,)), "dtype": dice.dtype()}


def _transpose(dice: Dice) -> Attrs:
    rows, columns = dice.extent(16, 8192), dice.extent(16, 8192)
    if dice.one(True, False):
        return {"shape": (rows, columns), "axes": (1, 0), "dtype": dice.dtype()}
    return {"shape": (dice.whole(1, 16), rows, dice.whole(2, 32), dice.one(64, 128)), "axes": (0, 2, 1, 3), "dtype": dice.dtype()}


def _rotary(dice: Dice) -> Attrs:
    return {
        "batch": dice.whole(1, 8), "tokens": dice.whole(1, 4096), "heads": dice.whole(1, 64), "size": dice.one(64, 128),
        "pairs": dice.one(True, False), "dtype": dice.dtype(),
    }  # fmt: skip


def _heads(dice: Dice) -> Attrs:
    kv_heads, group = dice.whole(1, 16), dice.one(1, 1, 4, 8)
    return {"batch": dice.whole(1, 16), "heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": dice.one(64, 128)}


def _attention(dice: Dice) -> Attrs:
    return _heads(dice) | {"queries": dice.extent(16, 2048, 64), "causal": dice.one(True, False), "dtype": dice.dtype()}


def _attention_decode(dice: Dice) -> Attrs:
    return _heads(dice) | {"keys": dice.extent(64, 16384, 64), "dtype": dice.dtype()}


DRAWN: Mapping[str, tuple[int, Callable[[Dice], Attrs]]] = {
    "matmul": (26, _matmul),
    "matmul_gated": (2, _matmul_gated),
    "conv2d": (13, _conv2d),
    "gemv": (3, _gemv),
    "gemv_i4": (1, _gemv_i4),
    "reduce": (4, _reduce),
    "arg_reduce": (1, _arg_reduce),
    "softmax": (3, _softmax),
    "cross_entropy": (1, _cross_entropy),
    "layer_norm": (2, _fused_norm),
    "rms_norm": (2, _fused_norm),
    "group_norm": (1, _group_norm),
    "elementwise": (4, _elementwise),
    "expression": (1, _expression),
    "transpose": (1, _transpose),
    "pool2d": (2, _pool2d),
    "batch_norm": (1, _batch_norm),
    "embedding": (1, _embedding),
    "rotary": (1, _rotary),
    "attention": (2, _attention),
    "attention_decode": (1, _attention_decode),
}
"""By rule: how often it is drawn, and by what. Of the standard rules only `tensor_ir` is not among them, which is any function at all."""


def drawn(seed: int, count: int, rules: Sequence[str], kind: str, first: int = 0) -> list[tuple[str, str, Attrs]]:
    """Return name, rule and attributes of `count` operators for a kind of arch, from number `first` on."""
    weights = {rule: DRAWN[rule][0] for rule in rules}
    numbers = range(first, first + count)
    return [_operator(f"{seed}/{number}", f"s{seed}_{number:03}", weights, LIMITS[kind]) for number in numbers]


def _operator(seed: str, name: str, weights: Mapping[str, int], limits: Limits) -> tuple[str, str, Attrs]:
    for attempt in range(MOST_DRAWS):
        dice = Dice(f"{seed}/{attempt}", limits)
        rule = Dice(seed, limits).weighted(weights)
        attrs = DRAWN[rule][1](dice)
        if not any(_problems(rule, attrs, limits)):
            return f"{name}_{rule}", rule, attrs
    raise ValueError(f"{rule}: none of {MOST_DRAWS} operators is valid and within {limits}")


def _problems(rule_name: str, attrs: Attrs, limits: Limits) -> Iterator[str]:
    rule = load_rule(Path(), rule_name).of(Path(), attrs)
    yield from rule.problems()
    is_slow = attrs["dtype"] == "float32" and not attrs.get("precision")
    if rule.flops() > (limits.slow_flops if is_slow else limits.flops) or rule.least_bytes() > limits.nbytes:
        yield "too large"


def toml_of(operators: Sequence[tuple[str, str, Attrs]], arch: str, top_k: int) -> str:
    """Return the text of workloads.toml. JSON writes these values as TOML does."""
    head = f'edition = 1\n\n[artifact]\nname = "random"\nversion = "0.1.0"\n\n[target.{arch}]\narch = "{arch}"\n'
    defaults = f'\n[defaults]\ntargets = ["{arch}"]\npolicy = "auto"\ntop_k = {top_k}\n'
    tables = ({"name": name, "rule": rule, **attrs} for name, rule, attrs in operators)
    lines = ("".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for table in tables)
    return head + defaults + "".join(f"\n[[workload]]\n{text}" for text in lines)
