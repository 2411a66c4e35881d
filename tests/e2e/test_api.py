"""Owns the tests of the Python interface: plan, build, load, and calling what was built.

Knows nothing of the command line.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from support.in_this_process import workers_here
from support.spaces import Space, clean_environment

import kerneldecl
from kerneldecl.errors import TuningError

RNG = np.random.default_rng(3)


def test_plan_build_load_and_call(real: Space) -> None:
    real.edit("workloads.toml", "m = 16", "m = 5")
    planned = kerneldecl.plan(real.root)
    assert {(action.entry, action.kind) for action in planned.misses} == {
        ("gemm@host", "lower"),
        ("gemm@host", "propose"),
        ("gemm@host", "tune"),
        ("gemm@host", "build"),
        ("host", "link"),
    }
    events: list[object] = []
    with workers_here():
        artifacts = kerneldecl.build(real.root, jobs=1, report=events.append)
    assert list(artifacts) == ["host"]
    assert events
    assert kerneldecl.plan(str(real.root)).misses == ()
    artifact = kerneldecl.load(real.artifact())
    assert list(artifact) == list(artifacts["host"])
    a, b, out = RNG.standard_normal((5, 32), np.float32), RNG.standard_normal((32, 24), np.float32), np.empty((5, 24), np.float32)
    artifact["gemm"](a, b, out)
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-5)


def test_load_finds_the_one_target_below_a_folder(real: Space) -> None:
    artifact = kerneldecl.load(real.artifact().parent)
    assert artifact.folder == real.artifact()
    assert "gemm" in artifact


def test_a_failed_build_names_the_entries(real: Space) -> None:
    real.edit("policies/plain.py", "(0, 1)", "()")
    with workers_here(), pytest.raises(TuningError, match="relu@host: no policy proposes a candidate for it"):
        kerneldecl.build(real.root, jobs=1)


CALL = """
import sys
import numpy as np
import kerneldecl
artifact = kerneldecl.load(sys.argv[1])
x = np.linspace(-1, 1, 24 * 32, dtype=np.float32).reshape(24, 32)
y = np.full_like(x, np.nan)
artifact["relu"](x, y)
assert (y == np.maximum(x, 0)).all()
print("tvm" in sys.modules)
"""


def test_calling_kernels_needs_tvms_runtime_alone(built_real: Space) -> None:
    command = [sys.executable, "-c", CALL, str(built_real.artifact())]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_tvmscript_file_is_an_entry_like_any_other(real: Space) -> None:
    """Its path is relative to the workspace, wherever the command runs."""
    script = """\
from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def triple(X: T.Buffer((8, 4), "float32"), Y: T.Buffer((8, 4), "float32")):
    for i, j in T.grid(8, 4):
        with T.sblock("Y"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = X[vi, vj] * T.float32(3)
"""
    real.write({"kernels/triple.py": script})
    real.write(
        {
            "workloads.toml": real.read("workloads.toml")
            + '\n[[workload]]\nname = "triple"\nrule = "tensor_ir"\nfile = "kernels/triple.py"\n'
        }
    )
    artifact = kerneldecl.build(real.root, jobs=1)["host"]
    x, y = RNG.standard_normal((8, 4), np.float32), np.empty((8, 4), np.float32)
    artifact["triple"](x, y)
    np.testing.assert_array_equal(y, x * 3)
    assert json.loads((real.artifact() / "manifest.json").read_text())["entries"][-1]["attrs"]["file"] == "kernels/triple.py"
