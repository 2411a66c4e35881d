"""Whole modules are tuned, deployed and run on the GPU: measured once, reused by TVM alone, in shape buckets, with their kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from spaces import clean_environment
from tvm import relax
from tvm.script import ir as I  # noqa: N812
from tvm.script import relax as R  # noqa: N812

from kerneldecl.dlight import CUDA, ApplyFastTuning, apply_opt_before_tuning
from kerneldecl.relax import TIR_PIPELINE, ShapeBuckets, export_model, load_model, pipeline

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(4)
SHAPES = ((256, 512), (512, 384), (384,))


@I.ir_module
class Net:
    @R.function
    def main(  # noqa: ANN201
        x: R.Tensor(("n", 512), "float16"),  # noqa: N805
        w: R.Tensor((512, 384), "float16"),
        b: R.Tensor((384,), "float16"),
    ):
        with R.dataflow():
            y = R.nn.softmax(R.astype(R.nn.relu(R.add(R.astype(R.matmul(x, w, out_dtype="float32"), "float16"), b)), "float32"))
            R.output(y)
        return y


def inputs(rows: int = 256) -> list[Any]:
    return [(RNG.standard_normal((rows, *shape[1:]) if at == 0 else shape) / 8).astype("float16") for at, shape in enumerate(SHAPES)]


def reference(x: Any, w: Any, b: Any) -> Any:
    powers = np.exp(np.maximum(x.astype("float32") @ w.astype("float32") + b, 0))
    return powers / powers.sum(axis=1, keepdims=True)


def output(machine: Any, arrays: list[Any]) -> Any:
    return machine["main"](*(tvm.runtime.tensor(array, tvm.cuda(0)) for array in arrays)).numpy()


def check(machine: Any, rows: int = 256) -> None:
    arrays = inputs(rows)
    np.testing.assert_allclose(output(machine, arrays), reference(*arrays), rtol=2e-2, atol=1e-4)


def static() -> Any:
    mod = Net.clone()
    mod.update_func(mod.get_global_var("main"), relax.utils.copy_with_new_vars(Net["main"]).bind_symbolic_vars({"n": 256}))
    return mod


def targets() -> list[Any]:
    """Return the target of this machine's GPU by each name that nvcc has for it."""
    arch = CUDA("cuda").arch
    names = {str(dict(arch.tvm_target)["arch"]), arch.the_gpu.wgmma_arch} - {""}
    return [tvm.target.Target({**dict(arch.tvm_target), "arch": name}) for name in sorted(names)]


def test_a_module_is_tuned_once_and_computes_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_worker(*_: Any) -> None:
        raise AssertionError("a worker was asked for")

    for target in targets():
        tune = ApplyFastTuning(topk=5, target=target, meta_database_dir=tmp_path / "tuned")
        mod = tune(apply_opt_before_tuning(static(), target=target))
        assert tune.report.missed == ()
        passes = relax.get_default_pipeline(target)
        executable = relax.build(mod, target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
        check(relax.VirtualMachine(executable, tvm.cuda(0)))
    manifest = json.loads(next((tmp_path / "tuned").glob("dist/*/*/manifest.json")).read_text())
    assert not any(entry["unmeasured"] for entry in manifest["entries"])
    monkeypatch.setattr("kerneldecl.api.LocalRunner", no_worker)
    again = ApplyFastTuning(topk=5, target=targets()[-1], meta_database_dir=tmp_path / "tuned")
    again(apply_opt_before_tuning(static(), target=targets()[-1]))
    assert again.report.missed == ()


EXTRACT = [sys.executable, "-m", "kerneldecl"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of the model's functions for two shape buckets, tuned on this GPU."""
    root = tmp_path_factory.mktemp("net")
    (root / "net.json").write_text(tvm.ir.save_json(Net))
    arch = CUDA("cuda").arch.name
    subprocess.run([*EXTRACT, "extract", "net.json", "--dim", "n=16,256"], cwd=root, env=clean_environment(), check=True)
    text = (root / "workloads.toml").read_text()
    head, rest = text.split("[target.host]")
    (root / "workloads.toml").write_text(
        f'{head}[defaults]\ntop_k = 3\n\n[target.gpu]\narch = "{arch}"\n{rest[rest.index("[[workload]]") - 1 :]}'
    )
    subprocess.run([*EXTRACT, "build"], cwd=root, env=clean_environment(), check=True)
    return next(root.glob("dist/*/gpu"))


def test_a_dynamic_model_uses_the_kernels_of_its_sizes_beside_it(built: Path, tmp_path: Path) -> None:
    target = targets()[-1]
    passes = pipeline(built, target, "binary", strict=True)
    executable = relax.build(ShapeBuckets({"n": (16, 256)})(Net), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    assert {match.outcome for match in passes.report.matches} == {"hit", "other sizes"}
    export_model(executable, tmp_path / "net.so")
    model = load_model(tmp_path / "net.so", built, tvm.cuda(0))
    for rows in (16, 256, 40):
        check(model, rows)
    model.replace_kernels(built)
    check(model, 16)


ALONE = """
import ctypes, sys
sys.modules["tvm"] = sys.modules["kerneldecl"] = None
import torch, tvm_ffi
for name in ("libtvm_runtime.so", "libtvm_runtime_cuda.so"):
    ctypes.CDLL(sys.argv[1] + "/" + name, ctypes.RTLD_GLOBAL)
library = tvm_ffi.load_module("./net.so")
library.import_module(tvm_ffi.load_module(sys.argv[2]))
machine = library["vm_load_executable"]()
machine["vm_initialization"](2, 0, 2, 1, 0, 2)
x, w, b = (torch.randn(shape, dtype=torch.float16, device="cuda") / 8 for shape in ((16, 512), (512, 384), (384,)))
out = torch.from_dlpack(machine["main"](*map(tvm_ffi.from_dlpack, (x, w, b))))
torch.testing.assert_close(out, torch.softmax(torch.relu(x @ w + b).float(), 1), rtol=2e-2, atol=1e-4)
"""


def test_a_model_runs_with_the_runtime_alone(built: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch makes the arrays on the GPU")
    target = targets()[-1]
    passes = pipeline(built, target, "binary", strict=True)
    mod = ShapeBuckets({"n": (16, 256)})(Net)
    export_model(relax.build(mod, target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE), tmp_path / "net.so")
    (library,) = built.glob("lib/*.so")
    command = [sys.executable, "-c", ALONE, str(Path(tvm.__file__).parent / "lib"), str(library)]
    subprocess.run(command, cwd=tmp_path, env=clean_environment(), check=True)
