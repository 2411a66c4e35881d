"""Owns the tests of traceless functions without a GPU: compilation, artifacts that hold them, models that use them.

Knows nothing of what wgmma computes; tests/gpu/test_specialised.py runs it.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tvm
from support.compilers import needs_nvcc
from support.spaces import Space
from support.traceless import ADDITION, FILES, GEMM, TILE
from tvm import relax, te

from kerneldecl.artifact.archive import ARCHIVE, read_member
from kerneldecl.artifact.load import checked_artifact
from kerneldecl.compiler.canonical import canonical_module, load, lower, module_digest
from kerneldecl.compiler.cpu import ScheduledModule, scheduled_module
from kerneldecl.compiler.cuda import compile_cuda_object, cuda_source
from kerneldecl.compiler.prim_funcs import is_tirx
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.relax import TIR_PIPELINE, ApplyArtifact, pipeline
from kerneldecl.store.local import LocalStore
from kerneldecl.toolchain import nvcc

H200 = load_arch(STANDARD, "h200")


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a module with `tile` and `addition`; TVMScript reads its source from a file."""
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(TILE + ADDITION.replace("import tvm\n", ""), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("functions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    return LocalStore(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace that was built without its GPU."""
    space = Space(tmp_path_factory.mktemp("traceless")).write(FILES)
    space.run_here("build", "--jobs", "1")
    return space


def gemm() -> tvm.IRModule:
    return lower(load_rule(STANDARD, "matmul").of(STANDARD, GEMM))


def addition(size: int) -> tvm.IRModule:
    a, b = (te.placeholder((size,), "float16", name=name) for name in "AB")
    return canonical_module(te.create_prim_func([a, b, te.compute((size,), lambda i: a[i] + b[i], name="C")]))


# Compiled


@needs_nvcc
def test_wgmma_is_compiled_for_the_arch_that_has_it(functions: Any, store: LocalStore) -> None:
    result = scheduled_module(gemm(), tvm.IRModule({"any_name": functions.tile()}))
    assert result.schedule is None
    assert is_tirx(result.mod["main"])
    compiled = compile_cuda_object(result.mod, H200, "kd_tile", store)
    (launch,) = compiled.launches
    assert (launch.grid, launch.block, launch.cluster) == ((1, 1, 1), (128, 1, 1), (1, 1, 1))
    assert 2 * (64 + 16) * 64 <= launch.dynamic_smem_bytes <= 2 * (64 + 16) * 64 + 1024, "both tiles, and a barrier"
    assert launch.usage.spill_bytes == 0
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in cuda_source(result.mod, H200, "kd_tile")


@needs_nvcc
def test_without_wgmma_tirx_is_compiled_for_the_archs_own_name(functions: Any, store: LocalStore) -> None:
    ampere = load_arch(STANDARD, "a100-40gb")
    add = scheduled_module(addition(4096), functions.addition(4096))
    codes = {compile_cuda_object(add.mod, arch, "kd_add", store).code for arch in (ampere, H200)}
    assert len(codes) == 2
    with pytest.raises(ValueError, match=r"nvcc|ptxas"):
        compile_cuda_object(scheduled_module(gemm(), functions.tile()).mod, ampere, "kd_tile", store)


@needs_nvcc
def test_clusters_are_launched_and_are_part_of_the_code(functions: Any, store: LocalStore) -> None:
    modules = (scheduled_module(addition(4096), functions.addition(4096, cluster=n)).mod for n in (1, 2))
    alone, paired = (compile_cuda_object(mod, H200, "kd_add", store) for mod in modules)
    assert [result.launches[0].cluster for result in (alone, paired)] == [(1, 1, 1), (2, 1, 1)]
    assert alone.launches[0].grid == paired.launches[0].grid == (32, 1, 1)
    assert alone.code != paired.code


@needs_nvcc
def test_tma_descriptors_are_part_of_the_code(functions: Any, store: LocalStore) -> None:
    modules = (scheduled_module(gemm(), functions.tile(promotion)).mod for promotion in (2, 2, 3))
    first, again, other = (compile_cuda_object(mod, H200, "kd_tile", store) for mod in modules)
    assert first == again
    # The cubin is the same: TMA reads more of a line into L2 or less.
    assert first.launches == other.launches
    assert first.code != other.code


def test_a_function_of_other_arguments_is_refused(functions: Any) -> None:
    with pytest.raises(ValueError, match=r"takes float16\[8192\], .*; the workload takes float16\[4096\]"):
        scheduled_module(addition(4096), functions.addition(8192))
    with pytest.raises(ValueError, match="holds 2 functions; expected one"):
        scheduled_module(addition(4096), tvm.IRModule({"a": functions.addition(4096), "b": functions.addition(4096)}))
    with pytest.raises(TypeError, match="str is no Schedule, IRModule or PrimFunc"):
        scheduled_module(addition(4096), "T.evaluate(0)")


def test_functions_that_increment_different_variables_have_two_digests(functions: Any) -> None:
    text = functions.addition(4096).script(show_meta=True)
    assert text.count("C[") == 1
    counting = "x: T.int32\n    y: T.int32\n    x = 0\n    y = 0\n    while x < 4:\n        {} = x + 1\n    C["
    x, y = (ScheduledModule(tvm.IRModule({"main": _parsed(text.replace("C[", counting.format(name), 1))}), None).digest for name in "xy")
    assert x != y


def _parsed(text: str) -> Any:
    return tvm.script.from_source(text)


# A GEMM by wgmma, which is serialized if an accumulator is touched while it runs.
WGMMA = """
extern "C" __global__ void __launch_bounds__(128, 1) k(float* out, unsigned long long a, unsigned long long b, int n) {
  float d[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    MEANWHILE
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}
"""


@needs_nvcc
def test_serialized_wgmma_is_a_failure_with_ptxas_diagnostics() -> None:
    assert nvcc.compile_cubin(WGMMA.replace("MEANWHILE", ""), "sm_90a").usage["k"].spill_bytes == 0
    with pytest.raises(ValueError, match=r"ptxas: wgmma.mma_async instructions are serialized due to .* in the function 'k'"):
        nvcc.compile_cubin(WGMMA.replace("MEANWHILE", "d[0] *= 2.0f;"), "sm_90a")


# In an artifact


def entries_of(space: Space) -> dict[str, Any]:
    _, manifest = checked_artifact(space.artifact("gpu"))
    return {entry["name"]: entry for entry in manifest["entries"]}


@needs_nvcc
def test_an_artifact_keeps_traceless_functions_by_their_computation(built: Space) -> None:
    folder, entry = built.artifact("gpu"), entries_of(built)["gemm"]
    assert entry["traceless"] == f"traceless/{entry['computation']}.json"
    text = (folder / entry["traceless"]).read_text(encoding="utf-8")
    held = json.loads(text)
    assert module_digest(load(held["workload"])) == entry["computation"]
    assert "wgmma" in load(held["function"])["main"].script()
    assert str(built.root) not in text, "where the function was written is of no use to others"
    assert "wgmma" in read_member(folder / ARCHIVE, f"{entry['symbol']}.py").decode()
    shown = built.run_here("show", "gemm").stdout
    assert "the winner is a PrimFunc without a schedule trace" in shown


@needs_nvcc
def test_without_measurement_the_policys_choice_wins_and_not_the_custom_kernel(built: Space) -> None:
    entry = entries_of(built)["addition"]
    assert entry["traceless"] == ""
    assert entry["winner"]["template"] != "specialize"
    database = (built.artifact("gpu") / "database" / "database_tuning_record.json").read_text(encoding="utf-8")
    assert len(database.splitlines()) == 2, "two forms of the addition; the GEMM has no trace"


@needs_nvcc
@pytest.mark.slow
def test_a_bundle_holds_traceless_candidates(built: Space, tmp_path: Path) -> None:
    space = built.copy_of(tmp_path / "bundle")
    (space.root / "own").mkdir()
    space.write({"own/addition.py": built.read("own/addition.py")})
    space.run("build", "--no-measure")
    (path,) = space.root.glob("dist/*/gpu.bundle/bundle.json")
    groups = {entry["workload"]["name"]: entry["groups"] for entry in json.loads(path.read_text())["entries"]}
    found = {name: several[0]["candidates"] for name, several in groups.items()}
    own = [candidate for candidate in found["addition"] if candidate["candidate"]["template"] == "specialize"]
    assert [candidate["candidate"]["params"] for candidate in own] == [{"variant": 0}, {"variant": 1}]
    assert all(candidate["is_traceless"] for candidate in (*own, *found["gemm"]))
    assert len({candidate["code_digest"] for candidate in found["addition"]}) == len(found["addition"])
    libraries = {library.stem for library in path.parent.glob("lib/*.so")}
    assert {candidate["code_digest"] for several in groups.values() for group in several for candidate in group["candidates"]} == libraries


# In a Relax model


def net() -> tvm.IRModule:
    """Return a model of the GEMM and of a softmax; the artifact has a kernel for the former."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType(shape, "float16")) for name, shape in (("x", (64, 64)), ("w", (16, 64))))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            func = builder.add_func(gemm()["main"].without_attr("global_symbol"), "gemm")
            y = builder.emit(relax.call_tir(func, [x, w], relax.TensorType((64, 16), "float32")))
            out = builder.emit_output(relax.op.nn.softmax(y))
        builder.emit_func_output(out)
    return builder.get()


def cuda(arch: str) -> tvm.target.Target:
    target = {"kind": "cuda", "arch": arch, "max_threads_per_block": 1024, "thread_warp_size": 32}
    return tvm.target.Target(target).with_host(tvm.target.Target("llvm"))


def kernels_of(executable: Any) -> str:
    """Return the CUDA source of a compiled model, which TVM leaves in it where there is no GPU."""
    modules = [executable.mod, *executable.mod.imports]
    return "".join(str(each.inspect_source("cuda")) for module in modules for each in module.imports if each.kind == "cuda")


@pytest.fixture
def source_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_COMPILE_FORCE_FALLBACK", "1")


@needs_nvcc
@pytest.mark.usefixtures("source_only")
def test_a_model_uses_a_traceless_function_with_scheduled_ones(built: Space) -> None:
    target = cuda("sm_90a")
    passes = pipeline(built.artifact("gpu"), target)
    code = kernels_of(relax.build(net(), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE))
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in code
    assert "softmax" in code


@pytest.mark.slow  # TVM's own passes take half a minute, whatever the size
@needs_nvcc
@pytest.mark.usefixtures("source_only")
def test_functions_without_a_kernel_get_tvms_schedule_for_tensor_cores(built: Space) -> None:
    target, builder = cuda("sm_90a"), relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((256, 256), "float16")) for name in "xw")
    with builder.function("main", [x, w]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(out)
    passes = pipeline(built.artifact("gpu"), target)
    assert "wmma" in kernels_of(relax.build(builder.get(), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE))


@needs_nvcc
@pytest.mark.usefixtures("source_only")
def test_the_pass_alone_marks_the_functions_that_it_replaces(built: Space) -> None:
    apply = ApplyArtifact(built.artifact("gpu"), target=cuda("sm_90a"))
    func = apply(net())["gemm"]
    assert is_tirx(func)
    assert func.attrs["tirx.is_scheduled"]
    assert int(func.attrs["op_pattern"]) == 8, "opaque"
    assert set(apply.report.hits) == {"gemm"}  # type: ignore[union-attr]  # it has run
    # Passes that look into functions must pass over it.
    relax.transform.FuseOps()(relax.transform.AnnotateTIROpPattern()(apply(net())))


@needs_nvcc
@pytest.mark.usefixtures("source_only")
def test_a_model_for_another_arch_name_calls_the_kernel_or_has_a_reason(built: Space) -> None:
    target = cuda("sm_90")
    apply = ApplyArtifact(built.artifact("gpu"), target=target)
    apply(net())
    (missed,) = apply.report.missed  # type: ignore[union-attr]  # it has run
    assert "the kernel is for sm_90a alone, the target is sm_90; compile for sm_90a, or use mode" in missed.reason
    passes = pipeline(built.artifact("gpu"), target, "binary")
    executable = relax.build(net(), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    assert entries_of(built)["gemm"]["symbol"] in executable["stats"]()
