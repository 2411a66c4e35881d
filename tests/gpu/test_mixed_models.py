"""A model that mixes our kernels with device code of TVM's own loads beside torch, before or after it, twice, and beside another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from support.spaces import Space, clean_environment
from tvm import relax

from kerneldecl.relax import TIR_PIPELINE, export_model, load_model, pipeline

pytestmark = pytest.mark.gpu

WORKLOADS = """\
edition = 1

[artifact]
name = "mixed"
version = "0.1.0"

[target.gpu]
arch = "h200"

[defaults]
top_k = 1

[[workload]]
name = "product"
rule = "matmul"
m = 64
n = 48
k = 4096
epilogue = ["relu"]
"""
ROWS, K, N = 64, 4096, 48


def mixed(seed: int, rows: int) -> tvm.IRModule:
    """Return relu(table[ids] @ weight)[ids]: gathers, which no entry can be, around a product, which is split over a workspace."""
    rng = np.random.default_rng(seed)
    table, weight = (relax.const(rng.standard_normal(shape, dtype="float32")) for shape in ((rows, K), (K, N)))
    builder = relax.BlockBuilder()
    ids = relax.Var("ids", relax.TensorType((ROWS,), "int64"))
    with builder.function("main", [ids]):
        with builder.dataflow():
            gathered = builder.emit(relax.op.take(table, ids, axis=0))
            product = builder.emit(relax.op.nn.relu(relax.op.matmul(gathered, weight)))
            out = builder.emit_output(relax.op.take(product, ids, axis=0))
        builder.emit_func_output(out)
    return builder.get()


def wanted(seed: int, rows: int) -> float:
    rng = np.random.default_rng(seed)
    table, weight = (rng.standard_normal(shape, dtype="float32") for shape in ((rows, K), (K, N)))
    ids = np.arange(ROWS)
    return float(np.maximum(table[ids] @ weight, 0)[ids].sum())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two mixed models, their weights in the library and beside it; the first is as large as those that were seen to crash."""
    space = Space(tmp_path_factory.mktemp("mixed")).write({"workloads.toml": WORKLOADS})
    space.run("build")
    target = tvm.target.Target(json.loads((space.artifact("gpu") / "manifest.json").read_text())["arch"]["target"])
    made = []
    for seed, rows, detach in ((0, 20_000, False), (1, 100, True)):
        passes = pipeline(space.artifact("gpu"), target, "binary", detach_weights=detach)
        executable = relax.build(mixed(seed, rows), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
        assert passes.report is not None
        assert (len(passes.report.hits), len(passes.report.missed)) == (1, 2)
        made.append(space.root / f"model{seed}.so")
        export_model(executable, made[-1], space.artifact("gpu"), passes.weights)
    return made


RUN = """
import json, sys
import numpy as np
if sys.argv[1] == "torch first":
    import torch
    torch.ones(8, device="cuda").sum().item()
import tvm
from kerneldecl.relax import load_model
ids = tvm.runtime.tensor(np.arange(64), tvm.cuda(0))
models = [load_model(path, device=tvm.cuda(0)) for path in sys.argv[2:]]
if sys.argv[1] == "torch last":
    import torch
    torch.ones(8, device="cuda").sum().item()
sums = [float(model["main"](ids).numpy().sum()) for model in models]
sums += [float(model["main"](ids).numpy().sum()) for model in reversed(models)]
print(json.dumps(sums))
"""


@pytest.mark.parametrize("order", ["torch first", "torch last", "no torch"])
@pytest.mark.parametrize("places", [[0], [1], [0, 0], [0, 1], [1, 0, 1]], ids=str)
def test_mixed_models_load_in_any_company(libraries: list[Path], order: str, places: list[int]) -> None:
    if order != "no torch":
        pytest.importorskip("torch", reason="it shares the process")
    paths = [str(libraries[place]) for place in places]
    done = subprocess.run([sys.executable, "-c", RUN, order, *paths], env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sums = [wanted(place, (20_000, 100)[place]) for place in places]
    assert json.loads(done.stdout) == pytest.approx([*sums, *reversed(sums)], rel=1e-3)


def test_a_model_outlives_another_of_the_same_library(libraries: list[Path]) -> None:
    """TVM keeps one pointer to a module in each library, that of the module loaded last: it must not be another model's."""
    ids = tvm.runtime.tensor(np.arange(ROWS), tvm.cuda(0))
    first = load_model(libraries[1], device=tvm.cuda(0))
    second = load_model(libraries[1], device=tvm.cuda(0))
    del second
    assert float(first["main"](ids).numpy().sum()) == pytest.approx(wanted(1, 100), rel=1e-3)
