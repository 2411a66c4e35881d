"""The operator that docs/guides/adding-an-operator.md adds: its file and its declaration work as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tvm
from support.repository import REPOSITORY

from kerneldecl.arrays import aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler.canonical import lower
from kerneldecl.compiler.cpu import target_of
from kerneldecl.declare.document import declare
from kerneldecl.errors import DeclarationError
from kerneldecl.plugins.load import load_arch, load_rule

DOCUMENT = REPOSITORY / "docs/guides/adding-an-operator.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (rule,), (declaration,) = blocks("python"), blocks("toml")
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "rope.py").write_text(rule, encoding="utf-8")
    (tmp_path / "workloads.toml").write_text(declaration, encoding="utf-8")
    return tmp_path


def test_every_declared_kernel_matches_its_reference(workspace: Path) -> None:
    declaration = declare(workspace)
    assert [workload.entry for workload in declaration.workloads] == [
        "rotate_queries[tokens=1]@host",
        "rotate_queries[tokens=512]@host",
    ]
    for workload in declaration.workloads:
        rule = load_rule(workspace, workload.rule)(**dict(workload.attrs))
        kernel = tvm.compile(lower(rule), target=target_of(load_arch(workspace, "host")))["main"]
        inputs = [aligned(array) for array in rule.inputs(np.random.default_rng(0))]
        output = aligned(poisoned(rule.signature().outputs[0]))
        kernel(*map(tensor, inputs), tensor(output))
        assert relative_error(output, np.asarray(rule.reference(*inputs))) <= rule.tolerance()


def test_its_reference_turns_vectors(workspace: Path) -> None:
    rule = load_rule(workspace, "rope")(tokens=1, heads=1, dim=2)  # type: ignore[call-arg]
    quarter_turn = rule.reference(np.array([[[3.0, 4.0]]]), np.array([[0.0]]), np.array([[1.0]]))
    assert np.asarray(quarter_turn).tolist() == [[[-4.0, 3.0]]]


def test_its_problem_is_reported_with_the_entry(workspace: Path) -> None:
    path = workspace / "workloads.toml"
    path.write_text(path.read_text(encoding="utf-8").replace("dim = 64", "dim = 63"), encoding="utf-8")
    with pytest.raises(DeclarationError, match=r"rotate_queries.*dim 63 is odd, but elements turn in pairs"):
        declare(workspace)
