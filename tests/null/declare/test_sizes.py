"""Owns the tests of absurd values: numbers and shapes that no kernel has end in one sentence with their place, at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli

from kerneldecl.declare import catalogue
from kerneldecl.declare.document import declare
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule

HEAD = 'edition = 1\n[artifact]\nname = "a"\nversion = "1"\n[target.gpu]\narch = "h200"\n'
EXAMPLES = tomli.loads(catalogue._EXAMPLES.read_text(encoding="utf-8"))
ABSURD: tuple[Any, ...] = (
    *(0, -1, 1, 2**31, 2**40, 2**63 - 1, 2**63, 10**30, True, 1.5, 1e308, float("nan"), float("inf"), "", "../x", {}, {"a": 1}),
    *([], [0], [-1], [2**31, 2**31], [2**63 - 1], [10**30], [1] * 400, [[2**63 - 1]], [[]], [[[[[1]]]]]),
)
TOO_LARGE = "expected arguments of at most 4 TiB together"


def text(value: object) -> str:
    """Return a value in TOML."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {text(item)}' for key, item in value.items())}}}"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def problems(root: Path, rule: str, *several: dict[str, Any], **attrs: object) -> tuple[Problem, ...]:
    """Return the mistakes of entries w0, w1, … with these attributes."""
    lines = (
        [f'[[workload]]\nname = "w{place}"\nrule = "{rule}"', *(f"{key} = {text(value)}" for key, value in each.items())]
        for place, each in enumerate(several or [attrs])
    )
    try:
        declare(root, (HEAD + "\n".join(line for entry in lines for line in entry)).encode())
    except DeclarationError as error:
        return tuple(error.problems)
    return ()


def absurd(rule: str) -> Iterator[dict[str, object]]:
    """Yield a rule's example with each attribute, and each end of a list, replaced by something that it cannot be."""
    example = EXAMPLES[rule]
    for name in load_rule(STANDARD, rule).__dataclass_fields__:
        given = example.get(name)
        ends = [[value, *given[1:]] for value in ABSURD[:8]] if isinstance(given, list) and given else []
        yield from ({**example, name: value} for value in (*ABSURD, *ends))


@pytest.mark.parametrize("rule", EXAMPLES)
def test_absurd_values_are_right_or_end_in_a_few_sentences_with_their_line(rule: str, tmp_path: Path) -> None:
    several = list(absurd(rule))
    found = problems(tmp_path, rule, *several)
    assert all(each.line and len(each.sentence) < 600 for each in found)
    counted = Counter(each.entry for each in found)
    assert not [several[int(entry[1:].partition("[")[0])] for entry, count in counted.items() if count > 6]


@pytest.mark.parametrize(
    ("rule", "attrs", "sentence"),
    [
        ("matmul", {"m": 2**63 - 1, "n": 16, "k": 16}, f"argument A is float32[9223372036854775807, 16]; {TOO_LARGE}"),
        ("matmul", {"m": 2**63, "n": 16, "k": 16}, "m is 9223372036854775808; expected whole numbers of at most 64 bits"),
        ("softmax", {"shape": [2**20, 2**20, 2]}, f"argument X is float32[1048576, 1048576, 2]; {TOO_LARGE}"),
        ("elementwise", {"op": "relu", "shape": [1] * 33}, "argument Y has 33 extents; expected at most 32"),
        ("pool2d", {**EXAMPLES["pool2d"], "stride": -(2**63) - 1}, f"stride is {-(2**63) - 1}; expected whole numbers of at most 64 bits"),
    ],
)  # fmt: skip
def test_what_is_too_large_is_told_at_its_line(rule: str, attrs: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, rule, **attrs)
    assert found.sentence == sentence
    blamed = next(key for key in attrs if key in {"m", "shape", "stride"})
    assert found.line == len(HEAD.splitlines()) + 4 + list(attrs).index(blamed)


@pytest.mark.parametrize("eps", [1e39, 1e-60])
def test_floats_that_kernels_cannot_compute_with_are_told_at_their_line(eps: float, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "rms_norm", shape=[4, 64], eps=eps)
    assert found.sentence == f"eps is {eps}; expected numbers of float32: 0, or 1.4e-45 to 3.4e+38 in magnitude"
    assert found.line == len(HEAD.splitlines()) + 5


@pytest.mark.parametrize("eps", [3.4028234e38, 1.5e-45])
def test_the_largest_and_least_floats_are_right(eps: float, tmp_path: Path) -> None:
    assert not problems(tmp_path, "rms_norm", shape=[4, 64], eps=eps)


def test_large_arguments_that_a_machine_can_hold_are_right(tmp_path: Path) -> None:
    assert not problems(tmp_path, "matmul", m=2**20, n=2**20, k=2**18, dtype="float16")
    assert not problems(tmp_path, "elementwise", op="relu", shape=[2] * 32)


@pytest.mark.parametrize("targets", [[[1]], [["gpu"]], [{}]])
def test_targets_that_are_no_names_are_a_mistake(targets: list[object], tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "matmul", m=16, n=16, k=16, targets=targets)
    assert found.sentence.startswith("targets is [")


def test_a_default_budget_that_is_nested_is_a_mistake(tmp_path: Path) -> None:
    entry = '[[workload]]\nname = "w"\nrule = "matmul"\nm = 16\nn = 16\nk = 16\n'
    with pytest.raises(DeclarationError, match=r"trials of budget is \{a = 1\}"):
        declare(tmp_path, f"{HEAD}[defaults]\nbudget = {{ trials = {{ a = 1 }} }}\n{entry}".encode())


def test_an_empty_path_is_no_file_of_the_workspace_and_nothing_outside_is_named(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "outside.py").touch()
    (found, *_) = problems(tmp_path / "w", "tensor_ir", file=".", function="main")
    assert found.sentence == 'file is "."; no such file in the workspace'
    assert not found.hint
