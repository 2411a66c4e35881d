"""Owns the tests of artifacts in Relax models: matching, both modes, the report, refusals, exchanged kernels.

Knows nothing of how matching works inside.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.spaces import REAL, Space, clean_environment
from support.thinned import at
from tvm import relax, te
from tvm.script import ir as I  # noqa: N812
from tvm.script import relax as R  # noqa: N812

from kerneldecl.artifact import link
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.cpu import compile_object
from kerneldecl.compiler.model_import import read_model
from kerneldecl.errors import ArtifactError, UnmatchedError
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch
from kerneldecl.relax import TIR_PIPELINE, ApplyArtifact, Report, export_model, load_model, pipeline
from kerneldecl.serial import to_json
from kerneldecl.store.keys import digest
from kerneldecl.toolchain.cxx import link_shared_library

RNG = np.random.default_rng(5)
SHAPES = ((16, 32), (32, 24), (24,), (24, 8), (8,))
HEAD = REAL["workloads.toml"].split("[[workload]]")[0]
ENTRIES = """
[[workload]]
name = "fused_matmul_add_relu"
rule = "tensor_ir"
file = "first.json"

[[workload]]
name = "fused_matmul1_add1_relu1"
rule = "matmul"
m = 16
n = 8
k = 24
epilogue = ["bias", "relu"]

[[workload]]
name = "softmax"
rule = "softmax"
shape = [16, 8]

[[workload]]
name = "relu"
rule = "elementwise"
op = "relu"
shape = [24, 32]
"""
"""The model's functions, named as Relax names them: one saved, two declared by rules; and one that the model has not."""
FUSED = tvm.transform.Sequential(
    [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
)


@I.ir_module
class Net:
    @R.function
    def main(  # noqa: ANN201
        x: R.Tensor((16, 32), "float32"),  # noqa: N805
        w: R.Tensor((32, 24), "float32"),
        b: R.Tensor((24,), "float32"),
        v: R.Tensor((24, 8), "float32"),
        d: R.Tensor((8,), "float32"),
    ):
        with R.dataflow():
            h = R.nn.relu(R.add(R.matmul(x, w), b))
            y = R.nn.softmax(R.nn.relu(R.add(R.matmul(h, v), d)))
            R.output(y)
        return y


def reference(x: Any, w: Any, b: Any, v: Any, d: Any) -> Any:
    logits = np.maximum(np.maximum(x @ w + b, 0) @ v + d, 0)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace with an artifact of the model's three functions, all parallel, and of one that it has not."""
    space = Space(tmp_path_factory.mktemp("net"))
    space.write({name: text for name, text in REAL.items() if name != "workloads.toml"})
    space.edit("policies/plain.py", "(0, 1)", "(1,)")
    space.write({"workloads.toml": HEAD + ENTRIES, "first.json": tvm.ir.save_json(FUSED(Net)["fused_matmul_add_relu"])})
    space.run_here("build", "--jobs", "1")
    return space


@pytest.fixture
def artifact(built: Space, tmp_path: Path) -> Path:
    """Return a copy that may be changed."""
    return Path(shutil.copytree(built.artifact(), tmp_path / "artifact"))


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / link.MANIFEST).read_text())


def target_of(space: Space) -> tvm.target.Target:
    return tvm.target.Target(manifest_of(space.artifact())["arch"]["target"])


def inputs() -> list[Any]:
    return [RNG.standard_normal(shape, dtype=np.float32) for shape in SHAPES]


def output(machine: Any, arrays: list[Any]) -> Any:
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def prim_funcs(mod: tvm.IRModule) -> dict[str, Any]:
    return {var.name_hint: func for var, func in mod.functions.items() if isinstance(func, tvm.tirx.PrimFunc)}


def report_of(built: Space, *funcs: Any) -> Report:
    """Return the report on a module that holds functions under the names f0, f1, ..."""
    named = {f"f{at}": func.with_attr("global_symbol", f"f{at}") for at, func in enumerate(funcs)}
    apply = ApplyArtifact(built.artifact(), target=target_of(built))
    apply(tvm.IRModule(named))
    return apply.report


def dense(  # noqa: PLR0913  each is one way to differ
    m: int = 16, n: int = 24, k: int = 32, dtype: str = "float32", *, transposed: bool = False, relu: bool = True, swapped: bool = False
) -> Any:
    """Return matmul, add and relu as TE has them: 32-bit indices, names and blocks of its own; operands perhaps the other way round."""
    left, right = te.placeholder((m, k), dtype), te.placeholder((n, k) if transposed else (k, n), dtype)
    bias, r = te.placeholder((n,), dtype), te.reduce_axis((0, k))
    product = te.compute((m, n), lambda i, j: te.sum(left[i, r] * (right[j, r] if transposed else right[r, j]), axis=r), name="mine")
    out = biased = te.compute((m, n), lambda i, j: bias[j] + product[i, j] if swapped else product[i, j] + bias[j], name="biased")
    if relu:
        zero = tvm.tirx.const(0, dtype)
        out = te.compute((m, n), lambda i, j: tvm.tirx.max(*((zero, biased[i, j]) if swapped else (biased[i, j], zero))), name="cut")
    return te.create_prim_func([left, right, bias, out])


# Both modes


@pytest.mark.parametrize("form", ["schedule", "binary"])
def test_the_model_computes_the_same_with_the_artifact(built: Space, form: Any, tmp_path: Path) -> None:
    target = target_of(built)
    executable = relax.build(Net, target, relax_pipeline=pipeline(built.artifact(), target, form, strict=True))
    if form == "binary":
        export_model(executable, tmp_path / "model.so")
        machine = load_model(tmp_path / "model.so", built.artifact())
    else:
        machine = relax.VirtualMachine(executable, tvm.cpu())
    arrays = inputs()
    np.testing.assert_allclose(output(machine, arrays), reference(*arrays), rtol=1e-4, atol=1e-5)


def test_schedules_are_applied_and_marked_and_attributes_kept(built: Space) -> None:
    before = FUSED(Net)
    with target_of(built):
        after = ApplyArtifact(built.artifact())(before)
    assert prim_funcs(after).keys() == prim_funcs(before).keys()
    for name, func in prim_funcs(after).items():
        assert "T.parallel" in func.script()
        assert dict(func.attrs) == {**dict(before[name].attrs), "tirx.is_scheduled": True}
    assert not any("T.parallel" in func.script() for func in prim_funcs(before).values())


def test_calls_of_kernels_replace_functions(built: Space) -> None:
    symbols = {entry["symbol"] for entry in manifest_of(built.artifact())["entries"] if entry["name"] != "relu"}
    after = ApplyArtifact(built.artifact(), "binary", target=target_of(built))(FUSED(Net))
    assert prim_funcs(after) == {}
    assert set(re.findall(r'call_dps_packed\("(\w+)"', after.script())) == symbols


def test_what_cannot_be_called_as_a_kernel_gets_its_schedule(built: Space) -> None:
    mod = tvm.IRModule({"f0": dense().with_attr("global_symbol", "f0")})
    after = ApplyArtifact(built.artifact(), "binary", strict=True, target=target_of(built))(mod)
    assert dict(after["f0"].attrs) == {**dict(mod["f0"].attrs), "tirx.is_scheduled": True}


@pytest.mark.parametrize("form", at({0}, ["schedule", "binary"]))
def test_functions_without_a_kernel_are_left_to_the_passes_that_follow(built: Space, form: Any, tmp_path: Path) -> None:
    @I.ir_module
    class Wider:
        @R.function
        def main(x: R.Tensor((24, 32), "float32"), y: R.Tensor((24, 32), "float32")):  # noqa: ANN202, N805
            with R.dataflow():
                z = R.nn.softmax(R.nn.relu(x))
                s = R.add(z, y)
                R.output(s)
            return s

    target = target_of(built)
    passes = pipeline(built.artifact(), target, form)
    relax.build(Wider, target, relax_pipeline=passes).export_library(str(tmp_path / "model.so"))
    x, y = RNG.standard_normal((2, 24, 32), dtype=np.float32)
    powers = np.exp(np.maximum(x, 0))
    got = output(load_model(tmp_path / "model.so", built.artifact()), [x, y])
    np.testing.assert_allclose(got, powers / powers.sum(axis=1, keepdims=True) + y, rtol=1e-4, atol=1e-5)


def test_what_is_scheduled_already_stays(built: Space) -> None:
    target = target_of(built)
    once = ApplyArtifact(built.artifact(), target=target)(FUSED(Net))
    again = ApplyArtifact(built.artifact(), strict=True, target=target)
    tvm.ir.assert_structural_equal(again(once), once)
    assert {match.outcome for match in again.report.matches} == {"scheduled before"}


def test_passes_compose_in_the_order_of_the_caller(built: Space, artifact: Path) -> None:
    seal(artifact, entries=[entry for entry in manifest_of(artifact)["entries"] if entry["name"] == "softmax"])
    target = target_of(built)
    passes = [ApplyArtifact(artifact, "binary", target=target), ApplyArtifact(built.artifact(), strict=True, target=target)]
    after = tvm.transform.Sequential([FUSED, *passes])(Net)
    assert f'call_dps_packed("{symbols_of(artifact)["softmax"]}"' in after.script()
    scheduled = {name: bool(func.attrs.get("tirx.is_scheduled", False)) for name, func in prim_funcs(after).items()}
    assert scheduled == {"fused_matmul_add_relu": True, "fused_matmul1_add1_relu1": True}


# Matching and the report


@pytest.mark.parametrize("swapped", [False, True])
def test_names_attributes_index_width_and_order_of_operands_do_not_matter(built: Space, *, swapped: bool) -> None:
    (match,) = report_of(built, dense(swapped=swapped).with_attr("op_pattern", 4)).matches
    assert match.outcome == "hit"
    assert match.kernel.entries == ("fused_matmul_add_relu",)


def test_a_kernel_of_another_index_width_is_applied(built: Space) -> None:
    mod = tvm.IRModule({"main": dense().with_attr("global_symbol", "main")})
    target = target_of(built)
    scheduled = ApplyArtifact(built.artifact(), target=target, strict=True)(mod)
    x, w, b = inputs()[:3]
    out = tvm.runtime.empty((16, 24), "float32")
    tvm.compile(scheduled, target=target)["main"](*map(tvm.runtime.tensor, (x, w, b)), out)
    np.testing.assert_allclose(out.numpy(), np.maximum(x @ w + b, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (lambda: dense(dtype="float64"), "dtype: argument 0 is float64, the kernel's is float32"),
        (lambda: dense(n=40), "shape: argument 1 is 32x40, the kernel's is 32x24"),
        (lambda: dense(relu=False), "fused epilogue: the kernel continues with compute, the function does not"),
        (lambda: dense(transposed=True), "layout: argument 1 is 24x32, the kernel's is 32x24, with other indices"),
    ],
    ids=["dtype", "shape", "epilogue", "layout"],
)
def test_a_near_miss_reports_the_first_difference(built: Space, func: Callable[[], Any], message: str) -> None:
    (match,) = report_of(built, func()).matches
    assert (match.outcome, match.reason) == ("near miss", message)
    assert match.kernel.entries == ("fused_matmul_add_relu",)


def test_a_function_with_more_than_a_kernel_is_a_near_miss(built: Space) -> None:
    x = te.placeholder((24, 32), "float32")
    cut = te.compute((24, 32), lambda i, j: tvm.tirx.max(x[i, j], tvm.tirx.const(0, "float32")))
    (match,) = report_of(built, te.create_prim_func([x, te.compute((24, 32), lambda i, j: cut[i, j] * 2.0, name="twice")])).matches
    assert match.kernel.entries == ("relu",)
    assert match.reason == "fused epilogue: the function continues with twice, the kernel does not"


def test_a_function_with_other_arguments_is_a_miss(built: Space) -> None:
    x, unused = te.placeholder((24, 32), "float32"), te.placeholder((7,), "float32")
    cut = te.compute((24, 32), lambda i, j: tvm.tirx.max(x[i, j], tvm.tirx.const(0, "float32")))
    assert [match.outcome for match in report_of(built, te.create_prim_func([x, unused, cut])).matches] == ["miss"]


def test_what_is_like_no_kernel_is_a_miss(built: Space) -> None:
    x, n = te.placeholder((5,), "float32"), te.var("n", "int64")
    dynamic = te.placeholder((n,), "float32")
    report = report_of(
        built,
        te.create_prim_func([x, te.compute((5,), lambda i: te.exp(x[i]))]),
        te.create_prim_func([dynamic, te.compute((n,), lambda i: dynamic[i] + 1.0)]),
    )
    assert [match.outcome for match in report.matches] == ["miss", "miss"]
    assert [match.kernel for match in report.matches] == [None, None]
    assert "dynamic extent" in report.matches[1].reason


def test_the_report_lists_every_function_and_unused_entries(built: Space) -> None:
    apply = ApplyArtifact(built.artifact(), target=target_of(built))
    apply(FUSED(Net))
    text = str(apply.report)
    assert apply.report.unused == ("relu",)
    assert re.search(r"unused +relu$", text)
    assert "mini 0.1.0: kernels for 3 of 3 functions" in text
    assert all(re.search(rf"hit +{name}: {name}$", text, re.MULTILINE) for name in prim_funcs(FUSED(Net)))


def test_the_report_is_logged_and_is_no_warning_which_would_say_it_twice(built: Space, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report = report_of(built, dense(n=40))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", str(report))]


def test_the_pipeline_has_the_report_of_the_model_that_was_compiled(built: Space) -> None:
    target = target_of(built)
    passes = pipeline(built.artifact(), target)
    assert passes.report is None
    tvm.compile(Net, target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    assert set(passes.report.hits) == {name for name, _, _ in read_model.called(read_model.fused(Net))}


def test_strict_raises_with_the_report(built: Space) -> None:
    mod = tvm.IRModule({"f0": dense(n=40).with_attr("global_symbol", "f0")})
    with pytest.raises(UnmatchedError, match=r"near miss +f0: fused_matmul_add_relu: shape: argument 1"):
        ApplyArtifact(built.artifact(), strict=True, target=target_of(built))(mod)


# What is refused


def test_an_artifact_for_another_target_is_refused(built: Space) -> None:
    with tvm.target.Target({"kind": "llvm", "mcpu": "core2"}), pytest.raises(ArtifactError, match=r"is for mcpu .*, this target has core2"):
        ApplyArtifact(built.artifact())(FUSED(Net))
    with tvm.target.Target("cuda"), pytest.raises(ArtifactError, match="is for kind llvm, this target has cuda"):
        ApplyArtifact(built.artifact())(FUSED(Net))


def test_an_artifact_for_another_gpu_is_refused(artifact: Path) -> None:
    gpu = {**to_json(load_arch(STANDARD, "h200")), "target": {"kind": "cuda", "arch": "sm_90"}}
    seal(artifact, arch=gpu)
    with pytest.raises(ArtifactError, match="is for arch sm_90, this target has sm_80; compile for"):
        ApplyArtifact(artifact, target=tvm.target.Target({"kind": "cuda", "arch": "sm_80"}))(FUSED(Net))


def seal(folder: Path, **changes: Any) -> None:
    """Change a manifest as one who writes artifacts would."""
    (folder / link.MANIFEST).write_bytes(link.with_digest({**manifest_of(folder), **changes}))


def damage_database(folder: Path) -> None:
    path = folder / "database" / "database_workload.json"
    path.write_text(path.read_text().replace("a", "b", 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_database, "database_workload.json of the artifact has other content"),
        (lambda folder: seal(folder, schema=7), "the artifact has schema 7; this kerneldecl reads 5"),
        (lambda folder: seal(folder, toolchain={"tvm": "0.26.0"}), "the artifact was built with TVM 0.26.0"),
        (shutil.rmtree, "holds no artifact"),
    ],
    ids=["changed", "schema", "tvm", "absent"],
)
def test_a_damaged_artifact_is_refused(built: Space, artifact: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(artifact)
    with pytest.raises(ArtifactError, match=message):
        ApplyArtifact(artifact, target=target_of(built))(FUSED(Net))


def test_a_wrong_mode_and_a_missing_target_are_refused(built: Space) -> None:
    with pytest.raises(ValueError, match='mode "object" is unknown; expected "schedule" or "binary"'):
        ApplyArtifact(built.artifact(), "object")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ValueError, match="has no target"):
        ApplyArtifact(built.artifact())(FUSED(Net))


# Kernels exchanged


def exchange(folder: Path, kernels: dict[str, Any]) -> None:
    """Have the artifact's library hold these kernels alone, by symbol, whatever they compute."""
    arch, objects = load_arch(folder, "host"), []
    for symbol, func in kernels.items():
        objects.append(folder.parent / f"{symbol}.o")
        objects[-1].write_bytes(compile_object(canonical_module(func), arch, symbol))
    link_shared_library(folder / "other.so", objects)
    name = f"lib/mini-{digest((folder / 'other.so').read_bytes())[:16]}.so"
    (folder / "other.so").rename(folder / name)
    seal(folder, library=name, files={**manifest_of(folder)["files"], name: digest((folder / name).read_bytes())})


@pytest.fixture
def model(built: Space, tmp_path: Path) -> Path:
    """Return the exported model that calls kernels."""
    target = target_of(built)
    executable = relax.build(Net, target, relax_pipeline=pipeline(built.artifact(), target, "binary", strict=True))
    export_model(executable, tmp_path / "model.so")
    return tmp_path / "model.so"


def symbols_of(folder: Path) -> dict[str, str]:
    return {entry["name"]: entry["symbol"] for entry in manifest_of(folder)["entries"]}


def doubled() -> Any:
    """Return what stands in for the softmax: twice the input."""
    x = te.placeholder((16, 8), "float32")
    return te.create_prim_func([x, te.compute((16, 8), lambda i, j: x[i, j] * 2.0)])


def test_kernels_of_a_newer_artifact_replace_those_of_a_compiled_model(built: Space, artifact: Path, model: Path) -> None:
    funcs = prim_funcs(FUSED(Net))
    symbols = symbols_of(artifact)
    kernels = {symbols[name]: doubled() if name == "softmax" else func for name, func in funcs.items()}
    exchange(artifact, kernels)
    loaded, arrays = load_model(model, built.artifact()), inputs()
    old = output(loaded, arrays)
    loaded.replace_kernels(artifact)
    x, w, b, v, d = arrays
    logits = np.maximum(np.maximum(x @ w + b, 0) @ v + d, 0)
    np.testing.assert_allclose(output(loaded, arrays), 2 * logits, rtol=1e-4, atol=1e-5)
    loaded.replace_kernels(built.artifact())
    np.testing.assert_array_equal(output(loaded, arrays), old)


def test_a_model_never_runs_without_one_of_its_kernels(built: Space, artifact: Path, model: Path) -> None:
    entries = manifest_of(artifact)["entries"]
    softmax = symbols_of(artifact)["softmax"]
    seal(artifact, entries=[entry for entry in entries if entry["name"] != "softmax"])
    with pytest.raises(ArtifactError, match=rf"the model calls {softmax}, which .*artifact does not have"):
        load_model(model, artifact)
    with pytest.raises(ArtifactError, match=rf"the model calls kd_.*{softmax}.*, which .*model.so does not have"):
        load_model(model)
    loaded, arrays = load_model(model, built.artifact()), inputs()
    before = output(loaded, arrays)
    with pytest.raises(ArtifactError, match="does not have"):
        loaded.replace_kernels(artifact)
    np.testing.assert_array_equal(output(loaded, arrays), before)


def test_kernels_can_be_linked_into_the_model(built: Space, artifact: Path, tmp_path: Path) -> None:
    target = target_of(built)
    executable = relax.build(Net, target, relax_pipeline=pipeline(artifact, target, "binary", strict=True))
    export_model(executable, tmp_path / "model.so", artifact)
    shutil.rmtree(artifact)
    arrays = inputs()
    np.testing.assert_allclose(output(load_model(tmp_path / "model.so"), arrays), reference(*arrays), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArtifactError, match=r"model.so has its kernels linked in"):
        load_model(tmp_path / "model.so", built.artifact())
    assert symbols_of(built.artifact())["relu"].encode() not in (tmp_path / "model.so").read_bytes()


BESIDE = """
import sys
sys.modules["torch"] = None  # which tvm_ffi imports where it is installed: it takes seconds
import numpy as np
import tvm
from kerneldecl.relax import load_model
arrays = np.load("inputs.npz")
tensors = [tvm.runtime.tensor(arrays[name]) for name in arrays]
np.save("output.npy", load_model("model.so", sys.argv[1])["main"](*tensors).numpy())
assert not hasattr(tvm, "relax"), "this is TVM's runtime without its compiler"
"""


def test_a_model_is_loaded_where_no_compiler_is(built: Space, tmp_path: Path) -> None:
    target = target_of(built)
    executable = relax.build(Net, target, relax_pipeline=pipeline(built.artifact(), target, "binary", strict=True))
    export_model(executable, tmp_path / "model.so")
    arrays = inputs()
    np.savez(tmp_path / "inputs.npz", *arrays)
    command = [sys.executable, "-c", BESIDE, str(built.artifact())]
    subprocess.run(command, cwd=tmp_path, env={**clean_environment(), "TVM_USE_RUNTIME_LIB": "1"}, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "output.npy"), reference(*arrays), rtol=1e-4, atol=1e-5)
