"""Kernels of templates are parsed to the functions that TVM's own parser gives, and mistakes in them are found as it finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from support.repository import REPOSITORY
from support.thinned import at
from support.wgmma_cases import FLOAT16, PACKED, PLAIN
from tvm.script.parser.core import doc, evaluator

from kerneldecl.compiler import canonical
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.templates import wgmma_matmul
from kerneldecl.templates.shared.fast_parse import fast_parsing

ROOT = REPOSITORY


@pytest.mark.parametrize("params", at({1}, [{"pdl": 1}, {"split_k": 2}, PACKED]), ids=str)
def test_a_kernel_is_the_one_that_tvm_parses(params: dict[str, Any]) -> None:
    attrs = {**FLOAT16, "m": 131, "n": 136, "k": 256, "layout": "tn", "epilogue": ["bias", "gelu"]}
    mod, arch = canonical.lower(load_rule(ROOT, "matmul").of(ROOT, attrs)), load_arch(ROOT, "h200")
    fast, tvms = (apply(mod, PLAIN | params, arch) for apply in (wgmma_matmul.apply, wgmma_matmul.apply.__wrapped__))
    tvm.ir.assert_structural_equal(fast, tvms)
    assert fast.script() == tvms.script()


VALUES = {"a": (3, 4, 5), "k": {"x": 1}, "f": lambda *args, **named: (args, named), "Array": np.arange}


@pytest.mark.parametrize(
    "text",
    [
        "f(*a, 2, **k, y=a)",
        "a[1]",
        "a[0:2]",
        "k['x']",
        "(a, *a)",
        "[*a, 1]",
        "[i for i in a if i > 3]",
        "len(a)",
        "f.__name__",
        "Array(4).T.shape",
    ],
)
def test_an_expression_has_its_value(text: str) -> None:
    with fast_parsing():
        assert evaluator._eval_expr(expression(text), dict(VALUES)) == eval(text, dict(VALUES))


@pytest.mark.parametrize(("text", "error"), [("f(x=2, **k)", TypeError), ("a[7]", IndexError)])
def test_a_mistake_is_an_error(text: str, error: type[Exception]) -> None:
    with fast_parsing(), pytest.raises(error):
        evaluator._eval_expr(expression(text), dict(VALUES))


def expression(text: str) -> Any:
    return doc.parse(text).body[0].value
