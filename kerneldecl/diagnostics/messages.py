"""Owns the wording of mistakes: values as the user wrote them, lists of expected names, the nearest valid name.

Knows nothing of the workspace file's structure or of line numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from kerneldecl.errors import printable

_LEAST_RATIO = 0.5
"""Lowest similarity of a suggestion, that of "nq" and "nn"; below it suggestions are noise."""
_LEAST_RATIO_OF_WORDS = 0.62
"""The same of words of more than four letters: "transpose_b" is no "tolerance" (0.60)."""
_ALSO_CALLED = {
    **dict.fromkeys(("half", "fp16", "f16"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("single", "float", "fp32", "f32"), "float32"),
    **dict.fromkeys(("double", "fp64", "f64"), "float64"),
    **dict.fromkeys(("fp8", "e4m3", "float8"), "float8_e4m3fn"),
    **dict.fromkeys(("fp4", "e2m1", "float4", "mxfp4", "nvfp4"), "float4_e2m1fn"),
    **dict.fromkeys(("e8m0", "ue8m0"), "float8_e8m0fnu"),
    **dict.fromkeys(("linear", "dense", "gemm", "mm", "bmm", "addmm"), "matmul"),
    **dict.fromkeys(("conv", "convolution"), "conv2d"),
    **dict.fromkeys(("sdpa", "flash_attention", "mha"), "attention"),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "maxpool", "avgpool", "pool"), "pool2d"),
    **dict.fromkeys(("add", "mul", "relu", "gelu", "silu"), "elementwise"),
    **dict.fromkeys(("sum", "mean", "max"), "reduce"),
    **dict.fromkeys(("argmax", "argmin"), "arg_reduce"),
}
"""What other libraries call dtypes and operators."""
_LONGEST_VALUE = 80
_LONGEST_SENTENCE = 400
_MOST_NAMES = 12
"""Names that a message lists where a command lists them as well."""
_LISTED_BY = {"rule": "rules", "policy": "policies", "template": "templates", "arch": "archs"}
"""The command that lists what may be declared of a kind."""


def show(value: object) -> str:
    """Return a TOML value as the user would write it, cut to a line's length."""
    text = printable(_show(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def cut(sentence: str) -> str:
    """Return a sentence of a rule's own, which may repeat any value, without what is too long to be read."""
    return sentence if len(sentence) <= _LONGEST_SENTENCE else f"{sentence[:_LONGEST_SENTENCE]}…"


def _show(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_show, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_show(item)}' for key, item in value.items())}}}"
    return str(value)


def unknown(kind: str, got: object, known: Iterable[str], *, where: str = "", also: Iterable[str] = ()) -> tuple[str, str]:
    """Return message and hint for a name that is not in `known`; the hint may suggest a name in `known` or `also`."""
    names = tuple(known)
    expected = f"one of {', '.join(names)}" if len(names) > 1 else "".join(names) or "none, for there is none"
    if kind in _LISTED_BY and len(names) > _MOST_NAMES:
        expected = f"one of the {len(names)} that `kerneldecl {_LISTED_BY[kind]}` lists"
    near = _meant(got, (*names, *also)) if isinstance(got, str) else None
    place = f" {where}" if where else ""
    return f"unknown {kind} {show(got)}{place}; expected {expected}", f'did you mean "{near}"?' if near else ""


def rewritten(value: object, expected: str) -> str:
    """Return how a value of the wrong type was meant, as a hint; empty where that cannot be told."""
    is_number = type(value) in {int, float}
    if expected.startswith("a list of lists"):
        return ""
    if expected.startswith("a list") and not isinstance(value, list | tuple | dict):
        return f"write [{show(value)}]"
    if "string" in expected.split()[:2] or "in quotes" in expected or expected.startswith(("a name", "a path")):
        return f'write "{value}"' if is_number else ""
    if type(value) is float and value.is_integer() and expected.startswith("an integer"):
        return f"write {int(value)}"
    if isinstance(value, str) and expected.startswith(("an integer", "a number", "a finite number", "true or false")):
        is_meant = value in {"true", "false"} if expected.startswith("true") else re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", value)
        return f"write {value}, without quotes" if is_meant else ""
    return ""


def _meant(word: str, names: Sequence[str]) -> str | None:
    """Return the name that a word stands for elsewhere, else the most similar one."""
    known = _ALSO_CALLED.get(word.lower())
    return known if known in names else nearest(word, names, _LEAST_RATIO if len(word) <= 4 else _LEAST_RATIO_OF_WORDS)


def nearest(word: str, names: Iterable[str], least: float = _LEAST_RATIO) -> str | None:
    """Return the name most similar to `word`, the first of equals; None if no name is similar enough."""
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(None, b=word.lower())
    best, best_ratio = None, 0.0
    for name in names:
        matcher.set_seq1(name.lower())
        if matcher.real_quick_ratio() <= best_ratio or matcher.quick_ratio() <= best_ratio:
            continue
        ratio = matcher.ratio()
        if ratio >= least and ratio > best_ratio:
            best, best_ratio = name, ratio
    return best
