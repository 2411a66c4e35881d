"""Owns the test of traceless functions on a GPU: built, verified, timed with schedules, and called.

Knows nothing of how they compile without one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tvm
from spaces import Space
from specialised import FILES

import kerneldecl

pytestmark = pytest.mark.gpu
WRONG = """
def specialize(mod, arch):
    yield addition(4096, threads=1024)
    yield addition(4096, cluster=2)
    yield half(4096)
"""
HALF = """
def half(size):
    @T.prim_func
    def add(A: T.Buffer((size,), "float16"), B: T.Buffer((size,), "float16"), C: T.Buffer((size,), "float16")):
        T.device_entry()
        thread = T.thread_id([128])
        C[thread] = A[thread] + B[thread]

    return add
"""


def test_traceless_functions_are_verified_timed_and_called(tmp_path: Path) -> None:
    space = Space(tmp_path).write(FILES)
    own = space.read("own/addition.py").partition("\n\ndef specialize")[0]
    space.write({"own/addition.py": own + HALF + WRONG})
    space.run("build")
    assert "2 of 2 kernels correct" in space.run("verify").stdout
    results = {
        result["winner"]["template"]: result for result in (json.loads(path.read_text())["result"] for path in space.records("tune"))
    }
    assert results["tile"]["trials"][0]["is_traceless"]
    (other,) = (result for template, result in results.items() if template != "tile")
    own_functions = {m["candidate"]["params"]["variant"]: m for m in other["trials"] if m["candidate"]["template"] == "specialize"}
    assert [bool(own_functions[variant].get("samples")) for variant in range(3)] == [True, True, False]
    assert "wrong: relative error" in own_functions[2]["failure"]
    kernels = kerneldecl.load(space.artifact("gpu"))
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype("float16") for shape in ((64, 64), (16, 64)))
    device = tvm.cuda(0)
    out = tvm.runtime.tensor(np.zeros((64, 16), "float32"), device)
    kernels["gemm"](tvm.runtime.tensor(a, device), tvm.runtime.tensor(b, device), out)
    device.sync()
    np.testing.assert_allclose(out.numpy(), a.astype("float32") @ b.astype("float32").T, rtol=1e-3, atol=1e-3)


def test_a_bundle_of_them_is_measured_without_a_compiler(tmp_path: Path) -> None:
    space = Space(tmp_path / "builder").write(FILES)
    space.run("build", "--no-measure")
    (bundle,) = space.root.glob("dist/*/gpu.bundle")
    elsewhere = Space(tmp_path / "gpu").write({})
    elsewhere.root.mkdir(exist_ok=True)
    shutil.move(bundle, elsewhere.root / "a.bundle")
    # PATH holds no compiler: none is to be called.
    told = elsewhere.run("measure", "a.bundle", PATH=str(tmp_path), CUDA_PATH="", CUDA_HOME="").stdout
    assert "2 entries: 2 measured" in told
    shutil.copytree(elsewhere.root / "cache/record", space.root / "cache/record", dirs_exist_ok=True)
    space.run("build")
    assert "unmeasured" not in space.read("workloads.lock")
    assert "2 of 2 kernels correct" in space.run("verify").stdout
