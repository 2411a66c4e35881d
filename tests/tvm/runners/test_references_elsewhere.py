"""Owns the tests of references where the workspace is not: of artifacts that are verified elsewhere, and of bundles.

Knows nothing of GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.spaces import REAL, Space

from kerneldecl.arrays import relative_error
from kerneldecl.cli.verify import verify_text
from kerneldecl.compiler.actions import computation, lower, reference_of
from kerneldecl.plugins.find import STANDARD
from kerneldecl.runners.reference_data import make_reference_data

OWN = """
from dataclasses import dataclass

from kerneldecl.rule import Arg, Extent, Rule, Signature


@dataclass(frozen=True, kw_only=True)
class {name}(Rule):
    n: Extent

    def signature(self):
        return Signature((Arg("X", (self.n,), "float32"),), (Arg("Y", (self.n,), "float32"),))

    def lower(self):
        from tvm import te

        x = te.placeholder((self.n,), "float32", name="X")
        return [x, te.compute((self.n,), lambda i: x[i] * 3.0 + 1.0, name="Y")]

    def reference(self, x):
        {line}
        return x.astype("float64") * 3 + 1

    def flops(self):
        return 2 * self.n
"""
FUNCTION = """
from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def shifted(A: T.Buffer((24, 32), "float32"), B: T.Buffer((24, 32), "float32")):
    with T.sblock("root"):
        for i, j in T.grid(24, 32):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] + T.float32(1)
"""
HEAD = REAL["workloads.toml"].partition("[[workload]]")[0]
ENTRIES = """
[[workload]]
name = "standard"
rule = "elementwise"
op = "relu"
shape = [24, 32]

[[workload]]
name = "own"
rule = "tripled"
n = 100

[[workload]]
name = "ir"
rule = "tensor_ir"
file = "function.py"
"""


@pytest.fixture
def own(space: Space) -> Space:
    space.write({**REAL, "workloads.toml": HEAD + ENTRIES, "function.py": FUNCTION})
    return space.write({"rules/tripled.py": OWN.format(name="Tripled", line="pass")})


def given(space: Space, rule: str, attrs: dict[str, object], folder: Path) -> dict[str, object]:
    """Return what `reference_of` is asked, with the computation written into a folder as bundles have it."""
    lowered = lower(str(space.root), rule, attrs)
    spec = {"root": str(space.root), "rule": rule, "attrs": attrs, "computation": lowered["computation"]}
    file = folder / f"{lowered['computation']}.json"
    file.write_text(computation(spec)["ir"])
    asked = {"rule": rule, "attrs": attrs}
    return {"asked": asked, "computation": lowered["computation"], "file": str(file), "roots": [str(STANDARD)]}


def test_a_rule_of_ones_own_is_replaced_by_its_computation_which_gives_the_same(own: Space, tmp_path: Path) -> None:
    asked = given(own, "tripled", {"n": 100}, tmp_path)
    found = reference_of(**asked)  # type: ignore[arg-type]
    assert found["rule"] == "tensor_ir"
    data = make_reference_data({**found, "seed": 3})
    (x,), (y,) = data.inputs, data.expected
    assert relative_error(y, x.astype("float64") * 3 + 1) < 1e-12
    assert reference_of(**{**asked, "roots": [str(own.root)]})["rule"] == "tripled"  # type: ignore[arg-type]


def test_a_standard_rule_is_its_own_reference_and_code_beside_the_computation_does_not_run(own: Space, tmp_path: Path) -> None:
    attrs = {"op": "relu", "shape": [24, 32], "dtype": "float32"}
    asked = given(own, "elementwise", attrs, tmp_path)
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/elementwise.py").write_text("raise SystemExit('it ran')")
    found = reference_of(**asked)  # type: ignore[arg-type]
    assert (found["root"], found["rule"]) == (str(STANDARD), "elementwise")


def test_another_computation_than_the_named_one_is_no_reference(own: Space, tmp_path: Path) -> None:
    asked = given(own, "tripled", {"n": 100}, tmp_path)
    for other in ("tripled", "elementwise"):
        with pytest.raises(ValueError, match="is another one"):
            reference_of(**{**asked, "asked": {"rule": other, "attrs": {"n": 100}}, "computation": "0" * 64})  # type: ignore[arg-type]
    Path(str(asked["file"])).unlink()
    with pytest.raises(ValueError, match="computes something else here, or is not here"):
        reference_of(**asked)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_artifact_proves_itself_where_its_workspace_is_not(own: Space, tmp_path: Path) -> None:
    own.run("build", "--jobs", "1")
    elsewhere = Space(tmp_path / "elsewhere")
    elsewhere.root.mkdir()
    found = json.loads(elsewhere.run("verify", str(own.artifact()), "--json").stdout)["artifacts"][0]
    verdicts = {entry["name"]: (entry["ok"], entry["against"]) for entry in found["entries"]}
    assert verdicts["standard"] == (True, "its rule")
    assert verdicts["own"] == (True, "its computation, for its rule is not here")
    assert verdicts["ir"][0]
    assert "against its computation" in verify_text({"artifacts": [found]})
    # A workspace's rule of the same name that computes the same is asked; what it says counts.
    elsewhere.write({"rules/tripled.py": OWN.format(name="Tripled", line="return x * 2")})
    done = elsewhere.run("verify", str(own.artifact()), code=7)
    assert "WRONG  own  wrong: relative error" in done.stdout
