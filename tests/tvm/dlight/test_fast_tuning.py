"""Owns the tests of tuning whole modules: scheduled functions, reuse by a second run and by stock TVM, and reasons for unscheduled ones.

Knows nothing of candidates.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.compilers import needs_nvcc
from support.in_this_process import workers_here
from support.spaces import clean_environment
from tvm import relax, te
from tvm.s_tir.meta_schedule.database import JSONDatabase
from tvm.script import ir as I  # noqa: N812
from tvm.script import relax as R  # noqa: N812

from kerneldecl.compiler.cpu import target_of
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.dlight import CUDA, ApplyFastTuning, apply_opt_before_tuning, device, register_intrinsics
from kerneldecl.dlight.device import arch_of
from kerneldecl.errors import ToolchainError
from kerneldecl.hardware import host
from kerneldecl.relax import TIR_PIPELINE, load_model, pipeline

RNG = np.random.default_rng(4)
# Of whole vectors: all candidates have traces, whichever wins.
PARAMS = {"w": RNG.standard_normal((32, 32), dtype=np.float32), "b": RNG.standard_normal(32, dtype=np.float32)}


@I.ir_module
class Net:
    @R.function
    def main(  # noqa: ANN201
        x: R.Tensor((16, 32), "float32"),  # noqa: N805
        w: R.Tensor((32, 32), "float32"),
        b: R.Tensor((32,), "float32"),
    ):
        with R.dataflow():
            y = R.nn.softmax(R.nn.relu(R.add(R.matmul(x, w), b)))
            R.output(y)
        return y


def reference(x: Any) -> Any:
    powers = np.exp(np.maximum(x @ PARAMS["w"] + PARAMS["b"], 0))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have these tests see no GPU, also on a machine that has one."""
    monkeypatch.setattr(device, "gpu_here", lambda: None)
    here = "kerneldecl.hardware.can_measure.gpu_lock.why_not_here"
    monkeypatch.setattr(here, lambda model: f"it must be measured on {model}; there is none")


def relu(shape: tuple[Any, ...], dtype: str = "float32") -> Any:
    x = te.placeholder(shape, dtype, "X")
    return te.create_prim_func([x, te.compute(shape, lambda *i: te.max(x(*i), tvm.tirx.const(0, dtype)), name="Y")])


def output_first() -> Any:
    x = te.placeholder((8,), "float32", "X")
    return te.create_prim_func([te.compute((8,), lambda i: x[i] + 1.0, name="Y"), x])


def module(**functions: Any) -> tvm.IRModule:
    return tvm.IRModule({name: func.with_attr("global_symbol", name).with_attr("op_pattern", 4) for name, func in functions.items()})


def is_scheduled(mod: tvm.IRModule) -> dict[str, bool]:
    functions = {var.name_hint: func for var, func in mod.functions.items() if isinstance(func, tvm.tirx.PrimFunc)}
    return {name: bool((func.attrs or {}).get("tirx.is_scheduled")) for name, func in functions.items()}


def output(mod: tvm.IRModule, x: Any) -> Any:
    machine = relax.VirtualMachine(tvm.compile(mod, target=target_of(host.detect())), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tvm.IRModule]:
    """Return the folder and the module of a model that was tuned for this machine."""
    folder = tmp_path_factory.mktemp("tuned") / "database"
    mod = apply_opt_before_tuning(Net, PARAMS, "host")
    with workers_here():
        return folder, ApplyFastTuning(topk=2, target="host", meta_database_dir=folder)(mod)


# On a CPU, from a model to its results


def test_a_tuned_model_computes_what_it_did(tuned: tuple[Path, tvm.IRModule]) -> None:
    assert is_scheduled(tuned[1]) == {"matmul": True, "softmax": True}
    x = RNG.standard_normal((16, 32), dtype=np.float32)
    np.testing.assert_allclose(output(tuned[1], x), reference(x), rtol=1e-4, atol=1e-6)


def test_a_tuned_function_is_neither_built_nor_measured_again(tuned: tuple[Path, tvm.IRModule], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_worker(*_: Any) -> None:
        raise AssertionError("a worker was asked for")

    monkeypatch.setattr("kerneldecl.api.LocalRunner", no_worker)
    folder, first = tuned
    passed = ApplyFastTuning(topk=2, target=target_of(host.detect()), meta_database_dir=folder)
    second = passed(apply_opt_before_tuning(Net, PARAMS, "host"))
    tvm.ir.assert_structural_equal(second, first)
    assert set(passed.report.hits) == {"matmul", "softmax"}


STOCK = """
import sys
import numpy as np
sys.modules["kerneldecl"] = None
sys.modules["torch"] = None  # which tvm_ffi imports where it is installed: it takes seconds
import tvm
from tvm import relax
from tvm.s_tir.meta_schedule.database import JSONDatabase

folder, target = sys.argv[1], tvm.target.Target(eval(sys.argv[2]))
mod = tvm.ir.load_json(open("model.json").read())
steps = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), relax.transform.FoldConstant()]
steps += [relax.transform.FuseOps(), relax.transform.FuseTIR()]
with JSONDatabase(work_dir=folder), target:
    mod = tvm.transform.Sequential(steps)(mod)
    mod = relax.transform.MetaScheduleApplyDatabase()(mod)
functions = [func for func in mod.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
assert len(functions) == 2 and all(func.attrs.get("tirx.is_scheduled") for func in functions)
machine = relax.VirtualMachine(tvm.compile(mod, target=target), tvm.cpu())
arrays = np.load("inputs.npz")
np.save("output.npy", machine["main"](*(tvm.runtime.tensor(arrays[name]) for name in arrays)).numpy())
"""


@pytest.mark.slow
def test_another_process_reuses_the_database_with_tvm_alone(tuned: tuple[Path, tvm.IRModule], tmp_path: Path) -> None:
    x = RNG.standard_normal((16, 32), dtype=np.float32)
    np.savez(tmp_path / "inputs.npz", x, PARAMS["w"], PARAMS["b"])
    (tmp_path / "model.json").write_text(tvm.ir.save_json(Net))
    target = repr(dict(host.detect().tvm_target))
    subprocess.run([sys.executable, "-c", STOCK, str(tuned[0]), target], cwd=tmp_path, env=clean_environment(), check=True)
    np.testing.assert_allclose(np.load(tmp_path / "output.npy"), reference(x), rtol=1e-4, atol=1e-6)


def test_the_folder_holds_an_artifact_for_deployment(tuned: tuple[Path, tvm.IRModule], tmp_path: Path) -> None:
    artifact, target = tuned[0] / "dist" / "tuned-0.1.0", target_of(host.detect())
    bound = relax.transform.BindParams("main", {name: tvm.runtime.tensor(value) for name, value in PARAMS.items()})(Net)
    relax.build(bound, target, relax_pipeline=pipeline(artifact, target, "binary", strict=True)).export_library(str(tmp_path / "net.so"))
    x = RNG.standard_normal((16, 32), dtype=np.float32)
    got = load_model(tmp_path / "net.so", artifact)["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(got, reference(x), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_another_module_is_added_and_the_first_one_kept(tmp_path: Path) -> None:
    tune = ApplyFastTuning(topk=1, target="host", meta_database_dir=tmp_path)
    tune(module(first=relu((64,))))
    tune(module(first=relu((96,)), second=relu((64,))))
    assert set(tune.report.hits) == {"first", "second"}
    records = (tmp_path / "database_tuning_record.json").read_text().splitlines()
    assert len({json.dumps(json.loads(line)[1][3]) for line in records}) == 2, "of two shapes"


@pytest.mark.slow
def test_nothing_is_left_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_scheduled(ApplyFastTuning(topk=1, target="host")(module(relu=relu((64,))))) == {"relu": True}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_functions_of_one_computation_are_tuned_once(tmp_path: Path) -> None:
    x = te.placeholder((64,), "float32", "other")
    wide = te.create_prim_func([x, te.compute((64,), lambda n: te.max(x[n], tvm.tirx.const(0, "float32")))], index_dtype_override="int64")
    after = ApplyFastTuning(topk=1, target="host", meta_database_dir=tmp_path)(module(narrow=relu((64,)), wide=wide))
    assert is_scheduled(after) == {"narrow": True, "wide": True}
    assert len(list((tmp_path / "functions").iterdir())) == 1


# Unscheduled functions


@pytest.mark.slow
def test_each_function_that_is_left_has_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    before = module(relu=relu((64,)), dynamic=relu((te.var("n", "int64"), 8)), output_first=output_first())
    passed = ApplyFastTuning(topk=1, target="host")
    after = passed(before)
    assert is_scheduled(after) == {"relu": True, "dynamic": False, "output_first": False}
    for name in ("dynamic", "output_first"):
        tvm.ir.assert_structural_equal(after[name], before[name])
    reasons = {match.function: match.reason for match in passed.report.missed}
    assert reasons["dynamic"] == "parameter X has a dynamic extent: [n, 8]"
    assert "are not its last ones" in reasons["output_first"]
    assert [record.getMessage() for record in caplog.records][-1] == str(passed.report)
    assert caplog.records[-1].levelname == "WARNING"


def nobodys(shape: tuple[int, ...]) -> Any:
    """Return a function that calls what no CPU has."""
    x = te.placeholder(shape, "float32", "X")
    mask = tvm.tirx.call_intrin("uint32", "tirx.tvm_warp_activemask").astype("float32")
    return te.create_prim_func([x, te.compute(shape, lambda *at: x[at] + mask, name="Y")], index_dtype_override="int64")


@pytest.mark.slow
def test_a_function_that_fails_costs_no_other_one(tmp_path: Path) -> None:
    tune = ApplyFastTuning(topk=1, target="host", meta_database_dir=tmp_path)
    assert is_scheduled(tune(module(odd=nobodys((64,))))) == {"odd": False}
    assert is_scheduled(tune(module(relu=relu((64,)), odd=nobodys((64,))))) == {"relu": True, "odd": False}
    (missed,) = tune.report.missed
    assert "candidates passed: InternalError: unknown intrinsic" in missed.reason
    assert is_scheduled(tune(module(relu=relu((64,))))) == {"relu": True}
    assert tune.report.missed == ()


def test_a_module_without_anything_to_tune_comes_back(tmp_path: Path) -> None:
    before = module(dynamic=relu((te.var("n", "int64"),)))
    tvm.ir.assert_structural_equal(ApplyFastTuning(target="host", meta_database_dir=tmp_path / "new")(before), before)
    assert not (tmp_path / "new").exists()


def test_views_are_left_as_they_are(tmp_path: Path) -> None:
    x = te.placeholder((8, 6), "float32", "X")
    view = te.create_prim_func([x, te.compute((48,), lambda i: x[i // 6, i % 6], name="Y")], index_dtype_override="int64")
    tune = ApplyFastTuning(target="host", meta_database_dir=tmp_path / "new")
    assert is_scheduled(tune(module(view=view))) == {"view": False}
    assert [match.outcome for match in tune.report.matches] == ["view"]


def test_a_module_of_operators_is_referred_to_the_lowering(caplog: pytest.LogCaptureFixture) -> None:
    tvm.ir.assert_structural_equal(ApplyFastTuning(target="host")(Net), Net)
    assert "apply_opt_before_tuning lowers" in caplog.text


def test_functions_are_left_where_none_can_be_tuned() -> None:
    before = module(output_first=output_first())
    passed = ApplyFastTuning(target="host")
    tvm.ir.assert_structural_equal(passed(before), before)
    assert [match.outcome for match in passed.report.matches] == ["miss"]


# For a GPU that is not here


@needs_nvcc
@pytest.mark.slow
def test_winners_are_ranked_where_the_gpu_is_not_and_a_warning_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    a, b, k = te.placeholder((128, 128), "float16", "A"), te.placeholder((128, 128), "float16", "B"), te.reduce_axis((0, 128), "k")
    gemm = te.compute((128, 128), lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), axis=k), name="C")
    functions = {"gemm": te.create_prim_func([a, b, gemm], index_dtype_override="int64"), "relu": relu((4096,))}
    plain, before = tvm.IRModule(functions), module(**functions)
    tune = ApplyFastTuning(topk=2, target="cuda -arch=sm_90", meta_database_dir=tmp_path)
    with pytest.raises(ValueError, match="can be gh200, h100"):
        tune(before)
    tune = ApplyFastTuning(topk=2, target="h200", meta_database_dir=tmp_path)
    after = tune(before)
    assert is_scheduled(after) == {"gemm": True, "relu": True}
    assert after["gemm"].attrs["op_pattern"] == 4
    assert str(after["gemm"].attrs["global_symbol"]) == "gemm"
    assert "mma.sync" in cuda_source(tvm.IRModule({"main": after["gemm"]}), CUDA("h200").arch, "gemm")
    (logged,) = (record.getMessage() for record in caplog.records)
    assert logged == "nothing was measured: it must be measured on NVIDIA H200; there is none; the policies' models chose"
    tvm.ir.assert_structural_equal(tune(after), after)
    # What nobody measured has no times in the databases, and TVM's lookup passes over it; the artifact has it.
    register_intrinsics(tmp_path / "database_intrinsics")
    for folder in (tmp_path, tmp_path / "database_intrinsics"):
        records = JSONDatabase(work_dir=str(folder)).get_all_tuning_records()
        assert [record.run_secs for record in records] == [None] * 2
        with JSONDatabase(work_dir=str(folder)), CUDA("h200").target:
            found = relax.transform.MetaScheduleApplyDatabase(enable_warning=False)(relax.transform.AnnotateTIROpPattern()(plain))
        assert is_scheduled(found) == {"gemm": False, "relu": False}
    with pytest.raises(ValueError, match=r"has what was tuned for h200; give b200 a folder of its own"):
        ApplyFastTuning(target="b200", meta_database_dir=tmp_path)(before)


@needs_nvcc
@pytest.mark.slow
def test_a_module_for_the_arch_with_wgmma_gets_functions_that_use_it_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_COMPILE_FORCE_FALLBACK", "1")  # source is enough, also where CUDA is installed
    a, b, k = te.placeholder((2048, 2048), "float16", "A"), te.placeholder((2048, 2048), "float16", "B"), te.reduce_axis((0, 2048), "k")
    gemm = te.compute((2048, 2048), lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), axis=k), name="C")
    before = module(gemm=te.create_prim_func([a, b, gemm]))
    target = tvm.target.Target({**CUDA("h200").target.export(), "arch": "sm_90a"})
    tune = ApplyFastTuning(topk=1, target=target, meta_database_dir=tmp_path)
    first, second = tune(before), tune(before)
    assert first["gemm"].script() == second["gemm"].script()
    assert "wgmma" in cuda_source(tvm.IRModule({"main": second["gemm"]}), CUDA("h200").arch, "gemm")
    library = tvm.tirx.build(second, target=target.with_host(tvm.target.Target("llvm")), pipeline=TIR_PIPELINE)
    assert library.imports
    # Under the arch's other name, TVM could not compile it.
    plain = ApplyFastTuning(topk=1, target="h200", meta_database_dir=tmp_path)(before)
    assert "mma.sync" in cuda_source(tvm.IRModule({"main": plain["gemm"]}), CUDA("h200").arch, "gemm")


# What is refused


def test_folders_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "database_workload.json").write_text("theirs")
    with pytest.raises(ValueError, match="is a database that ApplyFastTuning did not write"):
        ApplyFastTuning(target="host", meta_database_dir=tmp_path)(module(relu=relu((64,))))
    (tmp_path / "workloads.toml").write_text("edition = 1\n")
    with pytest.raises(ValueError, match="is a workspace that ApplyFastTuning did not write"):
        ApplyFastTuning(target="host", meta_database_dir=tmp_path)(module(relu=relu((64,))))
    assert (tmp_path / "database_workload.json").read_text() == "theirs"


@pytest.mark.slow
def test_a_folder_that_lost_a_function_is_reported_as_damaged(tmp_path: Path) -> None:
    tune = ApplyFastTuning(topk=1, target="host", meta_database_dir=tmp_path)
    tune(module(relu=relu((64,))))
    for path in (tmp_path / "functions").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"is damaged: workloads.toml:\d+: relu: .*give it another folder, or remove it"):
        tune(module(relu=relu((96,))))


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(_: str) -> None:
        raise ToolchainError("there is no nvcc")

    monkeypatch.setattr("kerneldecl.dlight.tuning.nvcc.compiler_for", no_compiler)
    with pytest.raises(ToolchainError, match="there is no nvcc"):
        ApplyFastTuning(target="h200")(module(relu=relu((64,))))


def test_targets_name_one_arch() -> None:
    here = host.detect()
    assert arch_of("host") == arch_of(target_of(here)) == arch_of(dict(here.tvm_target)) == here
    assert arch_of({"kind": "llvm", "mcpu": "x86-64-v3"}).name == "x86-64-v3"
    assert arch_of("h200").name == "h200"
    with pytest.raises(ValueError, match=r"no arch is for the processor of target llvm; expected one of host \("):
        arch_of("llvm")
    with pytest.raises(ValueError, match="there is no target"):
        ApplyFastTuning()(module(relu=relu((64,))))
    with pytest.raises(ValueError, match="topk is 0; expected an integer above 0"):
        ApplyFastTuning(topk=0)


# Before tuning


def test_params_become_constants_or_stay_arguments() -> None:
    kept = apply_opt_before_tuning(Net, target="host")
    assert [param.name for param in kept["main"].params] == ["x", "w", "b"]
    bound = apply_opt_before_tuning(Net, PARAMS, "host")
    assert [param.name for param in bound["main"].params] == ["x"]
    assert is_scheduled(kept) == is_scheduled(bound) == {"matmul": False, "softmax": False}


def test_what_depends_on_params_alone_is_computed_before() -> None:
    @I.ir_module
    class Turned:
        @R.function
        def main(x: R.Tensor((16, 32), "float32"), w: R.Tensor((24, 32), "float32")):  # noqa: ANN202, N805
            with R.dataflow():
                y = R.matmul(x, R.permute_dims(w))
                R.output(y)
            return y

    assert is_scheduled(apply_opt_before_tuning(Turned, target="host")).keys() == {"matmul"}
    weight = RNG.standard_normal((24, 32), dtype=np.float32)
    mod = apply_opt_before_tuning(Turned, {"w": weight}, "host")
    assert is_scheduled(mod).keys() == {"matmul"}
    x = RNG.standard_normal((16, 32), dtype=np.float32)
    np.testing.assert_allclose(output(mod, x), x @ weight.T, rtol=1e-4, atol=1e-5)


def test_params_that_are_no_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="no function has an argument v; main has x, w, b"):
        apply_opt_before_tuning(Net, {"v": PARAMS["w"]}, "host")
    with pytest.raises(ValueError, match="no function has an argument v; there is no Relax function"):
        apply_opt_before_tuning(module(relu=relu((4,))), {"v": PARAMS["w"]}, "host")
