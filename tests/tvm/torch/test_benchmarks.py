"""The comparisons with torch, as far as they need no GPU: errors as NumPy has them, races, and operators drawn at random."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bench_support.distribution import by_rule
from bench_support.gpu.kernels import Entry
from bench_support.random_entries import DRAWN, LIMITS, Limits, drawn
from support.repository import REPOSITORY
from support.thinned import every

from kerneldecl import arrays
from kerneldecl.arrays import finite_rms, relative_error, row_scales
from kerneldecl.hardware.host import detect
from kerneldecl.model import Workload
from kerneldecl.plugins.find import HOST
from kerneldecl.plugins.load import load_rule

torch = pytest.importorskip("torch", reason="pip install -e '.[models]'")
comparison = pytest.importorskip("bench_support.gpu.comparison")
timing = pytest.importorskip("bench_support.gpu.timing")
torch_baselines = pytest.importorskip("bench_support.gpu.torch_baselines")
torch_references = pytest.importorskip("bench_support.gpu.torch_references")


def test_errors_are_those_of_numpy_by_row_as_well() -> None:
    rng = np.random.default_rng(0)
    want = rng.standard_normal((2, 9, 16)) * np.logspace(-2, 0, 9)[:, None]
    got = want + 1e-3 * rng.standard_normal(want.shape)
    both = torch.from_numpy(got), torch.from_numpy(want)
    scales = row_scales(want, finite_rms(want))
    np.testing.assert_allclose(torch_references.relative_error(*both), relative_error(got, want), rtol=1e-12)
    np.testing.assert_allclose(torch_references.relative_error(*both, rows_vary=True), relative_error(got, want, scales), rtol=1e-12)


def test_where_every_contender_is_wrong_nothing_is_timed() -> None:
    assert timing.interleaved({}, 3) == {}


def test_drawn_operators_are_valid_within_limits_and_independent_of_their_number() -> None:
    for kind in ("cuda", "cpu"):
        few, many = (drawn(7, count, list(DRAWN), kind) for count in (3, 40))
        assert many[:3] == few
        for _, name, attrs in many:
            rule = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
            assert not list(rule.problems())
            assert rule.flops() <= LIMITS[kind].flops
            assert rule.least_bytes() <= LIMITS[kind].nbytes
    assert drawn(8, 3, list(DRAWN), "cuda") != drawn(7, 3, list(DRAWN), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("rule_name", every(2, [name for name in DRAWN if name != "gemv_i4"]))  # torch packs 4-bit weights on GPUs alone
def test_torch_computes_what_drawn_operators_do(rule_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "cuda", Limits(1e6, 1e6, 1e5, ("float16", "float32"), has_narrow=False))
    compared = 0
    for _, _, attrs in drawn(2, 4, [rule_name], "cuda"):
        rule = load_rule(REPOSITORY, rule_name).of(REPOSITORY, attrs)
        every = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}  # type: ignore[arg-type]
        inputs = torch_references.inputs_of(rule_name, rule, every, "cpu")
        computed = rule.reference(*(x.numpy() for x in inputs))
        wants = [np.asarray(want) for want in ([computed] if isinstance(computed, np.ndarray) else computed)]
        wide = _several(torch_references.reference(rule_name, every, inputs))
        assert _error(wide, [torch.from_numpy(want.copy()) for want in wants]) <= rule.tolerance()
        outputs = [torch.empty(arg.shape, dtype=getattr(torch, arg.dtype)) for arg in rule.signature().outputs]
        for name, call in torch_baselines.baselines(rule_name, every, [[*inputs, *outputs]]).items():
            if (name == "fused" and rule_name == "conv2d") or "compile" in name:  # cuDNN's; what takes a compiler half a minute
                continue
            assert _error(_several(call(0)), wide) <= rule.tolerance(), name
            compared += 1
    assert compared


def _several(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _error(got: Sequence[Any], wants: Sequence[Any]) -> float:
    return max(torch_references.relative_error(one, want) for one, want in zip(got, wants, strict=True))


def arguments_of(rule_name: str, attrs: dict[str, Any]) -> Any:
    """Return what a benchmark on this CPU gives the kernel of an operator."""
    workload = Workload("one", HOST, rule_name, tuple(sorted(attrs.items())), "auto", 1, None, (), 1)
    return comparison.arguments_of(Entry(REPOSITORY, workload, detect()))


def test_results_of_long_sums_are_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of large arrays repeat: so does their sum, until it leaves float16."""
    monkeypatch.setattr(arrays, "BLOCK_ELEMENTS", 4099)
    attrs = {"shape": (1 << 24,), "dtype": "float16", "axis": 0, "exclusive": False, "reverse": False}
    rule = load_rule(REPOSITORY, "cumsum").of(REPOSITORY, attrs)
    assert np.abs(rule.reference(*rule.inputs(np.random.default_rng(0)))).max() > 65504
    arguments = arguments_of("cumsum", attrs)
    ((x, _),) = arguments.sets
    np.testing.assert_allclose(arguments.wants[0].numpy(), rule.reference(x.numpy()))
    assert arguments.error(lambda i: torch.cumsum(arguments.sets[i][0].double(), 0).half()) <= rule.tolerance()


def test_inputs_of_results_in_range_are_as_drawn() -> None:
    attrs = {"shape": (64, 64), "dtype": "float16", "axis": -1, "exclusive": False, "reverse": False}
    rule = load_rule(REPOSITORY, "cumsum").of(REPOSITORY, attrs)
    ((x, _),) = arguments_of("cumsum", attrs).sets
    assert x.numpy().tobytes() == rule.inputs(np.random.default_rng(0))[0].tobytes()


def test_a_summary_counts_what_is_slower_and_what_is_not_compared() -> None:
    rows = [{"rule": "matmul", "ratio": ratio} for ratio in (0.5, 2.0, 1.0, None)] + [{"rule": "reduce", "ratio": 0.96}]
    every, matmul, reduce = by_rule(rows, lambda row: row["ratio"])
    assert (every["entries"], every["compared"], every["worst"]) == (5, 4, 0.5)
    assert every["under 0.97"] == 0.5
    assert matmul["geomean"] == pytest.approx(1.0)
    assert reduce["5 %"] == 0.96


@pytest.mark.slow
def test_random_operators_are_built_and_compared_on_this_cpu(tmp_path: Path) -> None:
    script, results = REPOSITORY / "benchmarks" / "random_shapes.py", tmp_path / "found.json"
    given = ["--arch", "host", "--seed", "4", "--count", "2", "--rules", "softmax,gemv_i4", "--top-k", "1", "--rounds", "1", "--jobs", "1"]
    subprocess.run([sys.executable, str(script), *given, "--json", str(results)], check=True, capture_output=True, timeout=300)
    found = json.loads(results.read_text(encoding="utf-8"))
    assert {row["rule"] for row in found["entries"]} == {"softmax", "gemv_i4"}
    for row in found["entries"]:
        assert set(row["secs"]) == {"steady", "isolated"}, row.get("failure")
        # torch has no GEMV of 4-bit weights on CPUs: a row without a ratio.
        assert (row["ratio"]["steady"] is None) == (row["rule"] == "gemv_i4")
    assert [table[0]["compared"] for table in found["summary"].values()] == [1, 1]


@pytest.mark.parametrize("layout", ["bhsd", "packed"])
def test_the_reference_of_attention_in_float8_multiplies_by_its_scales(layout: str) -> None:
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 9, "head_dim": 16}
    rule = load_rule(REPOSITORY, "attention").of(REPOSITORY, {**sizes, "dtype": "float8_e4m3fn", "causal": True, "layout": layout})
    attrs = asdict(rule)
    inputs = torch_references.inputs_of("attention", rule, attrs, "cpu")
    arrays = [x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) if x.dtype.itemsize == 1 else x.numpy() for x in inputs]
    want = rule.reference(*arrays)
    got = torch_references.reference("attention", attrs, [*inputs, None])
    np.testing.assert_allclose(got.numpy(), np.asarray(want, "float64"), rtol=1e-9)
