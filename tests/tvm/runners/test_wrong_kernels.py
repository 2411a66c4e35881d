"""Owns the test that no wrong kernel passes verification on a CPU: those of wrong_kernels.cpp, each wrong in its own way.

Knows nothing of candidates: kernels are compiled from C++ and sent to the worker that measures.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tvm_ffi import libinfo

from kerneldecl.runners.local import LocalRunner
from kerneldecl.runners.verdict import judged
from kerneldecl.toolchain import cxx

SOURCE = Path(__file__).with_name("wrong_kernels.cpp")
TOLERANCE = 1e-4
BOTH = '''
from dataclasses import dataclass

import numpy as np

from kerneldecl.rule import Arg, Rule, Signature


@dataclass(frozen=True, kw_only=True)
class Both(Rule):
    """The minimum and the maximum of each row."""

    def signature(self):
        return Signature((Arg("X", (64, 100), "float32"),), (Arg("Y", (64,), "float32"), Arg("W", (64,), "float32")))

    def lower(self):
        raise NotImplementedError

    def reference(self, x):
        return [x.min(axis=1), x.max(axis=1)]

    def flops(self):
        return 12800
'''
ATTRS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "add": ("elementwise", {"op": "add", "shape": [1003]}),
    "sum": ("reduce", {"op": "sum", "shape": [64, 100], "axes": [-1]}),
    "max": ("reduce", {"op": "max", "shape": [64, 100], "axes": [-1]}),
    "soft": ("softmax", {"shape": [64, 100]}),
    "bytes": ("elementwise", {"op": "add", "shape": [1003], "dtype": "int8"}),
    "both": ("both", {}),
    "append": ("rotary_append", {"batch": 2, "tokens": 3, "heads": 2, "size": 8, "keys": 20, "dtype": "float32"}),
}
"""Rule and attributes by the first word of a kernel's name."""
WRONG = {
    "add_writes_behind_output": "it writes behind its output Y",
    "add_writes_before_output": "it writes before its output Y",
    "add_writes_far_behind_output": "it writes behind its output Y (at a distance of 400000 bytes)",
    "add_reads_behind_output": "it reads behind its output Y",
    "add_reads_before_output": "it reads before its output Y",
    "add_reads_behind_first": "it reads behind its input X",
    "add_reads_before_first": "it reads before its input X",
    "add_reads_behind_second": "it reads behind its input Z",
    "add_reads_before_second": "it reads before its input Z",
    "add_writes_behind_first": "it writes behind its input X",
    "add_writes_before_first": "it writes into its input X",
    "add_writes_behind_second": "it writes behind its input Z",
    "add_writes_before_second": "it writes into its input Z",
    "add_changes_an_input": "it writes into its input X",
    "add_changes_an_input_and_restores_it": "it writes into its input X",
    "add_writes_behind_in_a_thread": "it writes behind its output Y",
    "add_writes_anywhere": "killed by SIGSEGV",
    "add_aborts": "killed by SIGABRT",
    "add_hangs": "took more than",
    "add_raises": "ValueError: not today",
    "add_keeps_a_larger_output": "wrong",
    "add_keeps_a_smaller_output": "in a later call on the same inputs",
    "add_accumulates_into_the_output": "wrong",
    "add_looks_at_the_output": "wrong",
    "add_leaves_the_last_element": "wrong",
    "add_leaves_the_first_element": "wrong",
    "add_leaves_a_tail_of_a_vector": "wrong",
    "add_writes_nothing": "wrong",
    "add_is_wrong_in_the_last_element": "wrong",
    "add_repeats_its_first_results": "where inputs hold zeros, tiny numbers and NaN",
    "add_is_wrong_from_the_second_call": "wrong",
    "add_is_wrong_after_many_calls": "wrong",
    "add_keeps_the_address_of_an_input": "wrong",
    "add_keeps_the_address_of_the_output": "it writes behind its output Y",
    "add_takes_aligned_arguments_for_granted": "wrong",
    "add_takes_unaligned_arguments_for_granted": "where inputs hold infinities and huge numbers",
    "add_takes_two_arguments_for_one": "wrong",
    "add_makes_nan_zero": "where inputs hold zeros, tiny numbers and NaN",
    "add_leaves_out_nan_of_the_first": "where inputs hold zeros, tiny numbers and NaN",
    "add_leaves_out_nan_of_the_second": "where inputs hold zeros, tiny numbers and NaN",
    "add_bounds_infinity": "where inputs hold infinities and huge numbers",
    "add_bounds_negative_infinity": "where inputs hold infinities and huge numbers",
    "add_bounds_huge_numbers": "where inputs hold infinities and huge numbers",
    "add_is_wrong_for_zero": "where inputs hold zeros, tiny numbers and NaN",
    "add_is_wrong_for_zero_in_the_second": "where inputs hold zeros, tiny numbers and NaN",
    "add_is_wrong_for_tiny_numbers": "where inputs hold zeros, tiny numbers and NaN",
    "add_is_not_deterministic": "its results differ from call to call",
    "add_depends_on_where_it_runs": "its results differ from call to call",
    "sum_leaves_out_the_last_column": "wrong",
    "sum_leaves_out_the_first_column": "wrong",
    "sum_takes_an_element_of_the_next_row": "wrong",
    "sum_is_wrong_in_the_last_row": "wrong",
    "sum_does_not_begin_with_zero": "wrong",
    "sum_races": "wrong",
    "sum_does_not_wait": "wrong",
    "sum_reads_uninitialized_memory": "wrong|its results differ from call to call",  # as the allocator has it
    "max_leaves_out_nan": "where inputs hold zeros, tiny numbers and NaN",
    "max_loses_nan_before_the_last": "where inputs hold zeros, tiny numbers and NaN",
    "soft_overflows": "where inputs hold infinities and huge numbers",
    "bytes_saturate": "wrong",
    "bytes_leave_one_byte": "wrong",
    "bytes_write_one_behind": "it writes behind its output Y",
    "both_have_a_wrong_second": "wrong",
    "both_have_a_wrong_first": "wrong",
    "both_swap_the_outputs": "wrong",
    "both_write_behind_the_first": "it writes behind its output Y",
    "append_begins_a_row_later": "elements of K_cache that must stay as they are",
    "append_changes_a_neighbour_by_little": "it changes 2 elements of V_cache that must stay as they are",
    "append_clears_the_rest": "elements of K_cache that must stay as they are",
    "append_leaves_the_last_token": "wrong",
    "append_writes_into_its_keys": "it writes into its input K",
    "append_writes_behind_its_cache": "it writes behind its output V_cache",
}
"""Each wrong kernel with a part of the sentence that refuses it, or several, of which one does."""
LIMIT_SECS = 60.0
LATE_SECS = 0.005
"""How long after its return a kernel that does not wait for its threads writes the last result."""


class Kernels:
    """The kernels, and the worker that measures them."""

    def __init__(self, folder: Path, runner: LocalRunner) -> None:
        self._folder, self._runner = folder, runner
        (folder / "rules").mkdir()
        (folder / "rules/both.py").write_text(BOTH, encoding="utf-8")
        self._library = folder / "kernels.so"
        flags = ["-O0", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", f"-I{libinfo.find_include_path()}"]
        subprocess.run([cxx.compiler(), *flags, str(SOURCE), "-o", str(self._library), "-lpthread"], check=True)

    def ask(self, action: str, name: str, limit_secs: float = LIMIT_SECS, **fields: object) -> dict[str, Any]:
        rule, attrs = ATTRS[name.partition("_")[0]]
        spec = {"root": str(self._folder), "rule": rule, "attrs": attrs, "seed": 20}
        request = {"action": action, "device": "cpu", "model": "", "spec": spec, "library": str(self._library), "symbol": name, **fields}
        return self._runner.measure(request, limit_secs)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    with LocalRunner(1, 2) as runner:
        yield Kernels(tmp_path_factory.mktemp("wrong"), runner)


def refusal(kernels: Kernels, name: str) -> str:
    """Return why a kernel is refused before it is timed or after; empty if it is not."""
    limit_secs = 1.0 if "hangs" in name else LIMIT_SECS
    before = judged(kernels.ask("verify", name, limit_secs), TOLERANCE)
    if "does_not_wait" in name:
        time.sleep(20 * LATE_SECS)  # or its threads write where the next test's arguments are not any more, which ends the worker
    if before:
        return before
    assert kernels.ask("sample", name, calls=30, samples=1)["samples"]
    return judged(kernels.ask("confirm", name), TOLERANCE)


@pytest.mark.parametrize("name", ATTRS)
def test_the_right_kernel_passes(kernels: Kernels, name: str) -> None:
    assert refusal(kernels, name) == ""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_refused_with_its_reason(kernels: Kernels, name: str) -> None:
    said = refusal(kernels, name)
    assert any(part in said for part in WRONG[name].split("|")), said


@pytest.mark.parametrize(("action", "fields"), [("confirm", {}), ("sample", {"calls": 2, "samples": 1})])
def test_a_process_that_follows_a_crash_loads_the_kernel_again(kernels: Kernels, action: str, fields: dict[str, int]) -> None:
    assert "SIGABRT" in kernels.ask("verify", "add_aborts")["failure"]
    assert kernels.ask(action, "add", **fields).keys() & {"error", "samples"}


@pytest.mark.parametrize("calls", [1, 50])
def test_a_time_is_of_one_call(kernels: Kernels, calls: int) -> None:
    """All calls together take no longer than the request."""
    assert judged(kernels.ask("verify", "add"), TOLERANCE) == ""
    start = time.perf_counter()
    samples = kernels.ask("sample", "add", calls=calls, samples=3)["samples"]
    elapsed = time.perf_counter() - start
    assert len(samples) == 3
    assert min(samples) > 0
    assert sum(samples) * calls < elapsed


def test_an_isolated_time_is_of_one_call_whatever_the_calls_asked_for(kernels: Kernels) -> None:
    assert judged(kernels.ask("verify", "add"), TOLERANCE) == ""
    start = time.perf_counter()
    samples = kernels.ask("sample", "add", calls=1_000_000_000, samples=2, protocol="isolated")["samples"]
    assert len(samples) == 2
    assert 0 < sum(samples) < time.perf_counter() - start


def test_the_time_of_a_first_run_is_within_the_request(kernels: Kernels) -> None:
    """A kernel that failed is not run again for its time."""
    assert set(kernels.ask("verify", "add_writes_behind_output")) == {"failure"}
    start = time.perf_counter()
    first = kernels.ask("verify", "sum")["secs"]
    assert 0 < first < time.perf_counter() - start
