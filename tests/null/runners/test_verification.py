"""Owns the tests of what verification asks of a kernel, call by call, and of what its answers mean.

Knows nothing of devices: a bench answers from a list.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from kerneldecl.arrays import numpy_dtype
from kerneldecl.runners.reference_data import DataSet, ReferenceData
from kerneldecl.runners.verdict import judged
from kerneldecl.runners.verification import Call, calls_of, poison_byte, verified
from kerneldecl.signature import Arg, Signature

SETS = (" where inputs are odd", " where inputs are large", " where inputs are small")


def data(sets: int, *, is_repeatable: bool = True) -> ReferenceData:
    """Return reference data of so many sets; verification looks at none of their values."""
    others = tuple(DataSet((), (), where) for where in SETS[: sets - 1])
    return ReferenceData(Signature((), ()), (), (), others, is_repeatable)


@dataclasses.dataclass
class Bench:
    """Answers each call from a list: its damage, its error, the fingerprint of its outputs."""

    data: ReferenceData
    answers: list[tuple[str, float, object]]
    ran: list[Call] = dataclasses.field(default_factory=list)

    def run(self, kernel: Any, call: Call) -> str:
        assert kernel == "kernel"
        self.ran.append(call)
        return self.answers[len(self.ran) - 1][0]

    def error(self, call: Call) -> float:
        assert call == self.ran[-1]
        return self.answers[len(self.ran) - 1][1]

    def fingerprint(self, call: Call) -> object:
        assert call == self.ran[-1]
        return self.answers[len(self.ran) - 1][2]


def bench(*errors: float, sets: int = 2, is_repeatable: bool = True, prints: str = "abab") -> Bench:
    answers = [("", error, print_) for error, print_ in zip(errors, prints, strict=False)]
    return Bench(data(sets, is_repeatable=is_repeatable), answers)


@pytest.mark.parametrize("sets", [2, 3, 4])
def test_every_set_is_used_in_place_and_one_elsewhere_in_memory(sets: int) -> None:
    calls = calls_of(data(sets))
    assert {call.data for call in calls} == set(range(sets))
    assert [call.data for call in calls[:3]] == [0, 1, 0], "another set between two calls on the same one"
    assert all(call.at_end for call in calls[:3])
    assert not any(call.at_end for call in calls[3:])
    assert calls[3:]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "int8", "int32", "bool"])
def test_outputs_hold_another_value_before_each_call(dtype: str) -> None:
    bytes_before = [poison_byte(call, Arg("Y", (1,), dtype)) for call in calls_of(data(4))]
    assert all(before != after for before, after in itertools.pairwise(bytes_before))
    assert len(set(bytes_before[:3])) == 3
    held = [np.full(8, byte, np.uint8).view(numpy_dtype(dtype))[0] for byte in bytes_before[:3]]
    if "float" in dtype:
        assert [bool(np.isnan(value)) for value in held] == [True, False, False]
        assert held[1] > 0 > held[2]
    else:
        assert 0xFF not in bytes_before, "-1 may well be right"


def test_a_kernel_is_as_good_as_its_worst_call() -> None:
    found = bench(1e-6, 3e-6, 2e-6, 1e-6)
    assert verified(found, "kernel") == {"error": 3e-6, "where": SETS[0]}
    assert found.ran == calls_of(found.data)


@pytest.mark.parametrize(
    ("errors", "where"),
    [
        ((5.0, 1.0, 1.0, 1.0), ""),
        ((1.0, 5.0, 1.0, 1.0), SETS[0]),
        ((1.0, 1.0, 5.0, 1.0), " in a later call on the same inputs"),
        ((1.0, 1.0, 1.0, math.inf), " in a later call on the same inputs"),
    ],
)
def test_where_the_worst_error_was_is_told(errors: tuple[float, ...], where: str) -> None:
    assert verified(bench(*errors, is_repeatable=False), "kernel") == {"error": max(errors), "where": where}


def test_damage_ends_it_at_once() -> None:
    found = Bench(data(2), [("", 0.0, "a"), ("it writes behind its output Y", 0.0, "b")])
    assert verified(found, "kernel") == {"failure": "it writes behind its output Y"}
    assert len(found.ran) == 2


@pytest.mark.parametrize(("prints", "differs"), [("abab", False), ("abcb", True), ("abac", True)])
def test_results_on_the_same_inputs_are_the_same_bits(prints: str, differs: bool) -> None:
    """Two calls on one set must agree, whatever those on the others give."""
    assert verified(bench(*[1e-6] * 4, prints=prints), "kernel").get("differs", False) == differs
    assert "differs" not in verified(bench(*[1e-6] * 4, prints=prints, is_repeatable=False), "kernel")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"error": 1e-4}, ""),
        ({"error": 2e-4}, "wrong: relative error 0.0002 over 0.0001"),
        ({"error": 0.0, "where": " on other inputs"}, ""),
        ({"error": 1.1e-4, "where": " on other inputs"}, "wrong: relative error 0.00011 over 0.0001 on other inputs"),
        ({"error": math.nan}, "wrong: relative error nan over 0.0001"),
        ({"error": math.inf, "differs": True}, "wrong: relative error inf over 0.0001"),
        (
            {"error": 0.0, "differs": True},
            "its results differ from call to call on the same inputs; a rule whose is_repeatable() says False admits that",
        ),
        ({"failure": "its process was killed by SIGSEGV"}, "its process was killed by SIGSEGV"),
    ],
)
def test_an_answer_is_judged_by_the_tolerance(answer: dict[str, Any], sentence: str) -> None:
    assert judged(answer, 1e-4) == sentence
