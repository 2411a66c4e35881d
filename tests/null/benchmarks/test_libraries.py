"""The rows of benchmarks/libraries.py: what the library and we take in one race, and when that is slower than its noise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import libraries

from kerneldecl.declare.document import declare
from kerneldecl.model import Candidate, Trial, uses


def row(*trials: Trial) -> dict[str, Any]:
    entry: Any = SimpleNamespace(entry="mm@h200", tuned=SimpleNamespace(trials=trials))
    return libraries.row_of(entry)


def trial(template: str, secs: float, failure: str = "") -> Trial:
    samples = () if failure else tuple(secs * (1 + 1e-4 * (turn % 3)) for turn in range(30))
    return Trial(Candidate.of(template, {}), 0.0, samples=samples, failure=failure)


def test_a_winner_is_slower_than_the_library_only_beyond_the_noise_of_their_race() -> None:
    assert "beyond noise" not in row(trial("wgmma_matmul", 1.002e-5), trial("library_matmul", 1.0e-5))
    found = row(trial("wgmma_matmul", 1.2e-5), trial("library_matmul", 1.3e-5), trial("library_matmul", 1.0e-5))
    assert found["beyond noise"] == "slower"
    assert round(found["fastest / library"], 3) == 1.2


def test_a_library_that_failed_is_listed_with_its_reason() -> None:
    found = row(trial("wgmma_matmul", 1e-5), trial("library_matmul", 0.0, "cuBLASLt is missing"))
    assert found["library refused"] == "cuBLASLt is missing"
    assert "library us" not in found


def test_the_copy_of_a_workspace_lets_the_librarys_version_win(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    head = 'edition = 1\n[artifact]\nname = "a"\nversion = "1"\n[target.h200]\narch = "h200"\n[defaults]\ntop_k = 3\npolicy = "auto"\n'
    (source / "workloads.toml").write_text(head + '[[workload]]\nname = "mm"\nrule = "matmul"\nm = 8\nn = 8\nk = 8\n')
    libraries.copy_workspace(source, tmp_path / "copy", "h200", '{ name = "library", cublas = "13.0" }')
    (workload,) = declare(tmp_path / "copy").workloads
    assert [(use.name, dict(use.options)) for use in uses(workload.policy)] == [("auto", {}), ("library", {"cublas": "13.0"})]
