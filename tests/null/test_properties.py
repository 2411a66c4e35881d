"""Owns properties of values: what goes through JSON comes back, and what is compared is compared by content.

Knows nothing of stages.
"""

from __future__ import annotations

import dataclasses
import json
import statistics

from hypothesis import given
from hypothesis import strategies as st

from kerneldecl.hardware.host import detect
from kerneldecl.model import Access, Axis, Block, Candidate, IterSpace, Trial, Value, dtype_bytes, frozen
from kerneldecl.serial import arch_from_json, signature_from_json, space_from_json, to_json, trial_from_json, trial_to_json
from kerneldecl.signature import Arg, Signature

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES: st.SearchStrategy[Value] = st.recursive(
    st.booleans() | st.integers() | FLOATS | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5
)
CANDIDATES = st.builds(Candidate.of, NAMES, st.dictionaries(NAMES, VALUES, max_size=4))
EXTENTS = st.integers(1, 1 << 40)
ARGS = st.builds(Arg, NAMES, st.lists(EXTENTS, max_size=4).map(tuple), st.sampled_from(["float32", "bfloat16", "int8"]))
INDEX = st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9)), max_size=3).map(tuple)
ACCESSES = st.builds(
    Access,
    NAMES,
    st.lists(EXTENTS, max_size=3).map(tuple),
    st.just("float32"),
    st.lists(st.none() | INDEX, max_size=3).map(tuple),
)
BLOCKS = st.builds(
    Block,
    NAMES,
    st.lists(st.builds(Axis, NAMES, EXTENTS, st.sampled_from(["spatial", "reduce"])), max_size=4).map(tuple),
    st.lists(ACCESSES, max_size=3).map(tuple),
    st.lists(ACCESSES, max_size=2).map(tuple),
    st.integers(0, 100),
)
SPROTOCOLS = st.builds(IterSpace, st.lists(BLOCKS, max_size=3).map(tuple), st.lists(NAMES).map(tuple), st.lists(NAMES).map(tuple))


def through_json(value: object) -> object:
    return json.loads(json.dumps(value))


@given(CANDIDATES)
def test_candidates_come_back(candidate: Candidate) -> None:
    back = Candidate.from_json(through_json(candidate.to_json()))  # type: ignore[arg-type]
    assert back == candidate
    assert hash(back) == hash(candidate)


@given(NAMES, st.dictionaries(NAMES, VALUES, max_size=5), st.randoms())
def test_the_order_of_parameters_does_not_matter(template: str, params: dict[str, Value], random: object) -> None:
    shuffled = list(params.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert Candidate.of(template, dict(shuffled)) == Candidate.of(template, params)


@given(SPROTOCOLS)
def test_iteration_spaces_come_back(space: IterSpace) -> None:
    assert space_from_json(through_json(to_json(space))) == space  # type: ignore[arg-type]


@given(st.builds(Signature, st.lists(ARGS, max_size=3).map(tuple), st.lists(ARGS, max_size=2).map(tuple)))
def test_signatures_come_back(signature: Signature) -> None:
    assert signature_from_json(through_json(to_json(signature))) == signature  # type: ignore[arg-type]


def test_archs_come_back() -> None:
    arch = detect()
    assert arch_from_json(through_json(to_json(arch))) == arch  # type: ignore[arg-type]
    assert arch.is_detected


@given(
    CANDIDATES,
    st.lists(st.floats(1e-9, 10), max_size=6).map(tuple),
    st.none() | st.floats(0, 10),
    st.text(max_size=9),
    st.sampled_from(["", "0" * 64]),
)
def test_measurements_come_back(candidate: Candidate, samples: tuple[float, ...], error: float | None, failure: str, code: str) -> None:
    measurement = Trial(candidate, 1.5e-3, code_digest=code, code_bytes=7, error=error, samples=samples, failure=failure)
    assert trial_from_json(through_json(trial_to_json(measurement))) == measurement  # type: ignore[arg-type]


@given(st.lists(st.floats(1e-9, 10), min_size=1))
def test_the_time_of_a_measurement_is_its_median(samples: list[float]) -> None:
    measurement = dataclasses.replace(Trial(Candidate.of("x", {}), 0.0), samples=tuple(samples))
    assert measurement.run_secs == statistics.median(samples)


@given(VALUES)
def test_frozen_values_stay_as_they_are(value: Value) -> None:
    assert frozen(through_json(value)) == value


def test_bytes_of_dtypes() -> None:
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "bool": 1, "int64": 8, "uint16": 2}
    assert {dtype: dtype_bytes(dtype) for dtype in sizes} == sizes
