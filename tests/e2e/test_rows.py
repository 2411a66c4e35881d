"""Owns the end-to-end tests of rows at run time: one symbol that takes any number of rows, in Python and in a Relax model.

Knows nothing of how the kernels are made.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.spaces import Space

import kerneldecl

pytestmark = pytest.mark.slow
HEAD = """\
edition = 1

[artifact]
name = "mini"
version = "0.1.0"

[target.host]
arch = "host"

[defaults]
top_k = 2
"""
GEMM = """
[[workload]]
name = "gemm"
rule = "matmul"
m = { upto = 100, tuned = [1, 16] }
n = 48
k = 64
epilogue = ["bias", "relu"]
"""
RNG = np.random.default_rng(5)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    space = Space(tmp_path_factory.mktemp("rows")).write({"workloads.toml": HEAD + GEMM})
    space.run("build", "--jobs", "1")
    return space


def test_one_kernel_takes_any_number_of_rows_up_to_its_bound(built: Space) -> None:
    kernels = kerneldecl.load(built.artifact())
    gemm = kernels["gemm"]
    b, bias = RNG.standard_normal((64, 48), np.float32), RNG.standard_normal(48, np.float32)
    for rows in (1, 2, 15, 16, 17, 63, 99, 100):
        a = RNG.standard_normal((rows, 64), np.float32)
        np.testing.assert_allclose(gemm(a, b, bias), np.maximum(a @ b + bias, 0), rtol=1e-3, atol=1e-3)
    for rows in (0, 101):
        a, out = np.zeros((rows, 64), np.float32), np.zeros((rows, 48), np.float32)
        with pytest.raises(ValueError, match=f"^A has {rows} rows; gemm takes 1 to 100$"):
            gemm(a, b, bias)
        with pytest.raises(ValueError, match=f"{rows} rows are given; gemm takes 1 to 100"):
            kernels.library.get_function(kernels.manifest["rows"][0]["symbol"])(*map(np.ascontiguousarray, (a, b, bias, out)))
    with pytest.raises(ValueError, match=r"A is float32\[5, 63\]; expected gemm\(A: float32\[5, 64\]"):
        gemm(np.zeros((5, 63), np.float32), b, bias)


def test_the_choice_is_recorded_and_made_once(built: Space) -> None:
    (family,) = json.loads((built.artifact() / "manifest.json").read_text(encoding="utf-8"))["rows"]
    assert {"gemm[m=1]", "gemm[m=16of100]"} <= {*family["entries"]}
    assert (family["table"][0]["upto"], family["table"][0]["tuned"]) == (1, 1)
    assert family["table"][-1]["upto"] == 100
    (record,) = built.records("rows")
    result = json.loads(record.read_text(encoding="utf-8"))["result"]
    assert {1, 16, 100} <= {*map(int, result["secs"])}
    assert {2, 17} <= {*result["verified"]}
    count = len(built.plan().entries)
    assert f"{count} entries: {count} up to date" in built.run("build").stdout
    assert built.run("verify").stdout.count("ok ") == len(family["entries"])


BETWEEN = GEMM.replace("tuned = [1, 16]", "tuned = [16, 48]")
SELDOM = """\
\"\"\"Owns proposals for GEMMs of other numbers of rows than 32.\"\"\"

from kerneldecl.policies import cpu_matmul

TEMPLATES = cpu_matmul.TEMPLATES
KINDS = ("cpu",)


def propose(space, arch, top_k):
    return () if space.blocks[0].axes[0].extent == 32 else cpu_matmul.propose(space, arch, top_k)
"""


def test_numbers_between_the_declared_ones_have_kernels_of_their_own(tmp_path: Path) -> None:
    """Few candidates each; of those that no call reaches the artifact has none, and norms get none at all."""
    norm = BETWEEN.replace("gemm", "norm").replace("matmul", "softmax").replace("m = {", "shape = [{").replace(" }\n", " }, 64]\n", 1)
    norm = "\n".join(line for line in norm.splitlines() if not line.startswith(("n =", "k =", "epilogue")))
    space = Space(tmp_path).write({"workloads.toml": HEAD.replace("top_k = 2", "top_k = 3") + BETWEEN + norm})
    space.run("build", "--jobs", "1")
    entries = [planned.entry for planned in space.plan().entries]
    assert "gemm[m=32of100]@host" in entries
    assert [name for name in entries if name.startswith("norm")] == ["norm[shape=16of100x64]@host", "norm[shape=48of100x64]@host"]
    manifest = json.loads((space.artifact() / "manifest.json").read_text(encoding="utf-8"))
    family = next(family for family in manifest["rows"] if family["name"] == "gemm")
    called = {each["tuned"] for each in family["table"]}
    assert ("gemm[m=32of100]" in family["entries"]) == (32 in called)
    assert {"gemm[m=16of100]", "gemm[m=48of100]"} <= {*family["entries"]}


def test_a_number_between_that_has_no_kernel_is_done_without(tmp_path: Path) -> None:
    declared = HEAD + BETWEEN + 'policy = "seldom"\n'
    space = Space(tmp_path).write({"workloads.toml": declared, "policies/seldom.py": SELDOM})
    assert "gemm[m=32of100]@host" in space.run("build", "--jobs", "1", code=1).stderr
    gemm = kerneldecl.load(space.artifact())["gemm"]
    a, b, bias = RNG.standard_normal((33, 64), np.float32), RNG.standard_normal((64, 48), np.float32), np.zeros(48, np.float32)
    np.testing.assert_allclose(gemm(a, b, bias), np.maximum(a @ b, 0), rtol=1e-3, atol=1e-3)


def test_a_model_of_dynamic_rows_calls_the_one_symbol(tmp_path: Path) -> None:
    import tvm
    from support.relax_functions import dynamic_mlp

    from kerneldecl.relax import load_model

    space = Space(tmp_path / "space").write({"net.json": tvm.ir.save_json(dynamic_mlp(64, 48)), "workloads.toml": HEAD})
    said = space.run("extract", "net.json", "--rows", "n=1,16..100").stdout
    assert "1 new" in said
    assert "m = { upto = 100, tuned = [1, 16] }" in (space.root / "workloads.toml").read_text(encoding="utf-8")
    assert "1 known" in space.run("extract", "net.json", "--rows", "n=1,16..100").stdout
    space.run("build", "--jobs", "1")
    assert "kernels for 1 of 1 functions" in space.run("compile", "net.json", "-o", "net.so").stdout
    model = load_model(space.root / "net.so")
    w, bias = RNG.standard_normal((64, 48), np.float32), RNG.standard_normal(48, np.float32)
    for rows in (1, 16, 37, 100):
        x = RNG.standard_normal((rows, 64), np.float32)
        np.testing.assert_allclose(np.from_dlpack(model["main"](x, w, bias)), np.maximum(x @ w + bias, 0), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="101 rows are given"):
        model["main"](np.zeros((101, 64), np.float32), w, bias)


def test_a_dimension_that_is_not_there_or_has_no_bound_is_one_sentence(tmp_path: Path) -> None:
    import tvm
    from support.relax_functions import dynamic_mlp

    space = Space(tmp_path / "space").write({"net.json": tvm.ir.save_json(dynamic_mlp(64, 48)), "workloads.toml": HEAD})
    assert (
        "the model has no dynamic dimension k; its dynamic dimensions are n"
        in space.run("extract", "net.json", "--rows", "k=1,2..3", code=2).stderr
    )
    assert "expected it as in --rows n=1,16,128..4096" in space.run("extract", "net.json", "--rows", "n=1,16", code=2).stderr
