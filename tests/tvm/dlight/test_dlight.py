"""The published interface of fast dlight, on a machine without a GPU: targets, policies, configurations, built and ranked results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.compilers import needs_nvcc
from support.spaces import REPOSITORY, clean_environment
from tvm import te

from kerneldecl.compiler import reference
from kerneldecl.dlight import (
    CUDA,
    Config,
    DefaultPolicy,
    TensorCorePolicy,
    apply_and_build,
    device,
    get_tensorized_func_and_tags,
    why_no_tensor_cores,
)
from kerneldecl.errors import TuningError
from kerneldecl.hardware.cuda_driver import DriverGpu
from kerneldecl.model import Candidate
from kerneldecl.signature import Arg

PUBLISHED_TAGS = {"tensorcore_config": [0, 1], "pipeline_stage": 2, "use_async_copy": 1}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have these tests see no GPU, also on a machine that has one."""
    monkeypatch.setattr(device, "gpu_here", lambda: None)
    monkeypatch.setattr("kerneldecl.dlight.building.why_not_measured_here", lambda _: "no GPU here")


def matmul(m: int, n: int, k: int, dtype: str = "float16", accum_dtype: str = "float32") -> Any:
    a, b = te.placeholder((m, k), dtype, "A"), te.placeholder((k, n), dtype, "B")
    axis = te.reduce_axis((0, k), "k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, axis].astype(accum_dtype) * b[axis, j].astype(accum_dtype), axis=axis), name="C")
    return te.create_prim_func([a, b, c])


def gemv(n: int, k: int) -> Any:
    a, x = te.placeholder((n, k), "float16", "A"), te.placeholder((k,), "float16", "X")
    axis = te.reduce_axis((0, k), "k")
    return te.create_prim_func([a, x, te.compute((n,), lambda i: te.sum(a[i, axis] * x[axis], axis=axis), name="Y")])


def relu(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    x = te.placeholder(shape, dtype, "X")
    return te.create_prim_func([x, te.compute(shape, lambda *i: tvm.tirx.max(x(*i), tvm.tirx.const(0, dtype)), name="Y")])


# Targets


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("h200", "h200"),
        ("t4", "t4"),
        ("cuda -arch=sm_87", "orin"),
        ({"kind": "cuda", "arch": "sm_87"}, "orin"),
        (tvm.target.Target({"kind": "cuda", "arch": "sm_120"}), "rtx-5090"),
        ("nvidia/geforce-rtx-4090", "rtx-4090"),
        ({"kind": "cuda", "arch": "sm_75", "l2_cache_size_bytes": 4194304}, "t4"),
    ],
)
def test_targets_name_a_gpu_in_many_ways(target: Any, name: str) -> None:
    assert CUDA(target).arch.name == name


@pytest.mark.parametrize("name", ["t4", "rtx-4090", "h100-pcie", "h100-sxm", "h200", "b100", "b200"])
def test_an_archs_own_target_leads_back_to_it(name: str) -> None:
    arch = CUDA(name)
    assert CUDA(arch.target).arch == arch.arch
    assert CUDA(arch).arch == arch.arch


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cuda -arch=sm_90", r"can be gh200, h100-nvl, h100-pcie, h100-sxm, h200; name one of them, such as CUDA\(\"gh200\"\)"),
        ({"kind": "cuda", "arch": "sm_90a", "l2_cache_size_bytes": 62914560}, "can be gh200, h100-nvl, h200; name one of them"),
        ("cuda", "names no GPU and this machine has none; expected one of a10, "),
        ({"kind": "cuda", "arch": "sm_61"}, r"no arch has compute capability 6\.1; expected one of a10, "),
        ({"kind": "cuda", "arch": "gfx90a"}, 'arch gfx90a is none of NVIDIA\'s; expected such as "sm_90"'),
        ({"kind": "llvm"}, "is of kind llvm"),
        ("h300", "'h300' is no target of TVM's and no arch; expected one of a10, "),
        ("x86-64-v3", "arch x86-64-v3 is a CPU"),
    ],
)
def test_an_ambiguous_target_is_refused_with_the_choices(target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CUDA(target)


def gpu_of(model: str, name: str) -> DriverGpu:
    """Return the driver's figures of a GPU with those of an arch."""
    gpu = CUDA(name).gpu
    fields = {field: getattr(gpu, field) for field in DriverGpu.__dataclass_fields__ if hasattr(gpu, field)}
    major, minor = gpu.compute_capability
    return DriverGpu(
        **fields,
        model=model,
        uuid="",
        compute_capability_major=major,
        compute_capability_minor=minor,
        clock_khz=int(gpu.clock_hz / 1e3),
        memory_clock_khz=3_000_000,
        memory_bus_bits=6144,
    )


def test_the_gpu_here_settles_what_a_compute_capability_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_of("NVIDIA H200", "h200")
    monkeypatch.setattr(device, "gpu_here", lambda: found)
    assert CUDA("cuda").arch.name == "h200"
    assert CUDA("cuda -arch=sm_90").arch.name == "h200"
    assert CUDA("h100-pcie").arch.name == "h100-pcie", "a name is a name"
    assert CUDA({"kind": "cuda", "arch": "sm_87"}).arch.name == "orin"
    assert CUDA(CUDA("h100-sxm").target).arch.name == "h100-sxm", "so is the target of a name"
    one_of = {"kind": "cuda", "arch": "sm_90", "l2_cache_size_bytes": 52428800}
    assert [arch.name for arch in device.archs_of(one_of)] == ["h100-pcie", "h100-sxm"], "another size of L2"


def test_a_gpu_without_an_arch_file_has_the_drivers_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_of("NVIDIA H800", "h100-sxm")
    monkeypatch.setattr(device, "gpu_here", lambda: found)
    arch = CUDA("cuda").arch
    assert arch.model == "NVIDIA H800"
    assert arch.the_gpu.sm_count == found.sm_count


def test_attributes_that_users_of_fast_dlight_read() -> None:
    arch = CUDA("h200")
    assert (arch.platform, arch.sm_version, arch.compute_capability, arch.warp_size, arch.compute_max_core) == ("CUDA", 90, "90", 32, 132)
    assert arch.smem_cap == 227 << 10
    assert arch.reg_cap == 1 << 16
    assert str(arch.target.attrs["arch"]) == "sm_90"
    dram, smem = arch.bandwidth
    assert dram < arch.gpu.l2_bytes_per_s < smem


# Policies


def test_the_published_tags_are_heeded() -> None:
    configs = TensorCorePolicy(func=matmul(1024, 1024, 1024), arch=CUDA("a100-40gb"), tags=PUBLISHED_TAGS).emit_config(20)
    assert len(set(configs)) == 20
    assert {config.params["stages"] for config in configs} == {2}


def test_configurations_are_distinct_and_best_first() -> None:
    for policy in (TensorCorePolicy(matmul(4096, 4096, 4096), "h200"), DefaultPolicy(matmul(4096, 4096, 4096, "float32"), "h200")):
        configs = policy.emit_config(20)
        assert len(set(configs)) == len(configs) == 20
        assert configs[0].predicted_secs == min(config.predicted_secs for config in configs)
        assert policy.emit_config(5) == configs[:5]


def test_configurations_survive_json() -> None:
    config = TensorCorePolicy(matmul(4096, 4096, 4096), "h200").emit_config(1)[0]
    assert Config.from_json(config.to_json()) == config
    assert "wgmma_matmul(block_m=" in repr(config)
    assert " us expected" in repr(config)


@pytest.mark.parametrize(
    ("func", "template"),
    [
        (matmul(256, 256, 256, "float32"), "gpu_matmul_simt"),
        (gemv(1024, 1024), "gpu_gemv"),
        (relu((1024, 1024)), "gpu_elementwise"),
    ],
)
def test_the_default_policy_knows_the_kind_of_function(func: Any, template: str) -> None:
    assert {config.candidate.template for config in DefaultPolicy(func=func, arch=CUDA("h200")).emit_config(20)} == {template}


def test_a_tag_makes_copies_synchronous() -> None:
    func = matmul(256, 256, 256)
    with_async, without = (TensorCorePolicy(func, "h200", {"use_async_copy": flag}).emit_config(1)[0] for flag in (1, 0))
    arch = CUDA("h200").arch
    assert with_async.arch_of(arch).the_gpu.async_copy
    assert not without.arch_of(arch).the_gpu.async_copy


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({"tensorcore_conf": [0, 1]}, 'unknown tag "tensorcore_conf"; expected one of .*; did you mean "tensorcore_config"'),
        ({"tensorcore_config": [1, 2]}, r"tensorcore_config is \[1, 2\], but m and n index dimensions \[0, 1\] of the output"),
        ({"pipeline_stage": 0}, "pipeline_stage is 0; expected an integer above 0"),
        ({"use_async_copy": 2}, "use_async_copy is 2; expected 0 or 1"),
    ],
)
def test_wrong_tags_are_refused(tags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorCorePolicy(func=matmul(256, 256, 256), arch=CUDA("h200"), tags=tags)


def test_the_default_policy_has_no_tags() -> None:
    with pytest.raises(ValueError, match='unknown tag "pipeline_stage"'):
        DefaultPolicy(relu((8,)), "h200", {"pipeline_stage": 2})


def test_the_tensor_core_policy_refuses_other_functions() -> None:
    with pytest.raises(ValueError, match=r"tensor cores cannot run the function: there is no mma.sync of float32.*use DefaultPolicy"):
        TensorCorePolicy(matmul(256, 256, 256, "float32"), "h200")


def test_a_function_may_be_given_as_a_module() -> None:
    func = matmul(256, 256, 256)
    in_module = tvm.IRModule({"gemm": func})
    assert TensorCorePolicy(in_module, "h200").emit_config(3) == TensorCorePolicy(func, "h200").emit_config(3)
    with pytest.raises(ValueError, match="the module has 2 PrimFuncs; expected one"):
        DefaultPolicy(tvm.IRModule({"one": func, "two": func.with_attr("global_symbol", "two")}), "h200")
    with pytest.raises(TypeError, match="func is str; expected a PrimFunc"):
        DefaultPolicy("matmul", "h200")


def test_a_function_that_is_scheduled_already_is_refused() -> None:
    sch = tvm.s_tir.Schedule(matmul(64, 64, 64))
    sch.blockize(sch.get_loops(sch.get_sblock("C"))[1])
    with pytest.raises(ValueError, match="holds other blocks"):
        DefaultPolicy(sch.mod, "h200")


# Tags


def test_tags_of_a_gemm_and_of_other_functions() -> None:
    func = matmul(256, 256, 256)
    same, tags = get_tensorized_func_and_tags(func, CUDA("h200").target)
    assert same is func
    assert tags == {"tensorcore_config": [0, 1], "use_async_copy": 1}
    assert TensorCorePolicy(func=func, arch=CUDA("h200"), tags=tags).emit_config(1)
    assert get_tensorized_func_and_tags(relu((64, 64)), "h200")[1] is None
    assert why_no_tensor_cores(relu((64, 64)), "h200") == "it has no reductions; a GEMM has one"


def test_tags_need_a_compute_capability_alone() -> None:
    assert get_tensorized_func_and_tags(matmul(256, 256, 256), "cuda -arch=sm_90")[1]
    assert get_tensorized_func_and_tags(matmul(256, 256, 256), "cuda -arch=sm_75")[1] == {"tensorcore_config": [0, 1], "use_async_copy": 0}
    bfloat16 = matmul(256, 256, 256, dtype="bfloat16")
    assert get_tensorized_func_and_tags(bfloat16, "cuda -arch=sm_75")[1] is None
    assert "no mma.sync of bfloat16" in why_no_tensor_cores(bfloat16, "cuda -arch=sm_75")


def test_a_batch_beyond_the_grid_is_refused() -> None:
    a, b = (te.placeholder((70000, 16, 16), "float16", name) for name in "AB")
    axis = te.reduce_axis((0, 16), "k")
    c = te.compute((70000, 16, 16), lambda h, i, j: te.sum(a[h, i, axis] * b[h, axis, j], axis=axis), name="C")
    assert why_no_tensor_cores(te.create_prim_func([a, b, c]), "h200") == "its batch is longer than a grid: 65535"


# Building


@pytest.mark.slow
@needs_nvcc
def test_each_result_belongs_to_its_own_configuration() -> None:
    func, arch = matmul(128, 128, 128), CUDA("h200")
    configs = TensorCorePolicy(func=func, arch=arch, tags={"use_wgmma": 0}).emit_config(20)
    distinct = list({config.params["warps_m"] * config.params["warps_n"]: config for config in configs}.values())  # type: ignore[operator]
    chosen = [*reversed(distinct), configs[0]]
    results, best = apply_and_build(func, chosen, arch, parallel_build=True)
    assert [result.config for result in results] == chosen
    for result in results:
        warps = result.config.params["warps_m"] * result.config.params["warps_n"]  # type: ignore[operator]
        assert re.findall(r"__launch_bounds__\((\d+)", result.code)[-1] == str(32 * warps)
        assert result.library is not None
        assert result.library.stat().st_size > 0
    assert best.config == min(chosen, key=lambda config: config.predicted_secs)
    assert not any(result.measured for result in results)
    assert best.reason == "not measured: no GPU here; ranked by the model"
    assert (best.latency, best.error, best.spill_bytes) == (None, None, 0)


@pytest.mark.slow
@needs_nvcc
def test_traceless_functions_are_built_with_schedules() -> None:
    func, arch = matmul(256, 256, 256), CUDA("h200")
    configs = TensorCorePolicy(func=func, arch=arch).emit_config(20)
    assert {config.candidate.template for config in configs} == {"wgmma_matmul", "gpu_matmul_tc"}
    chosen = list({config.candidate.template: config for config in reversed(configs)}.values())
    results, _ = apply_and_build(func, chosen, arch, parallel_build=False)
    found = {result.config.candidate.template: result for result in results}
    wgmma, traced = found["wgmma_matmul"], found["gpu_matmul_tc"]
    assert wgmma.schedule is None
    assert traced.schedule.trace is not None
    assert "wgmma.mma_async" in wgmma.code
    assert "device_entry" in wgmma.mod["main"].script()
    assert all(result.library and result.smem_bytes > 0 and result.registers > 0 for result in results)


@pytest.mark.slow
@needs_nvcc
def test_a_configuration_that_does_not_apply_has_a_reason_and_is_not_the_best() -> None:
    func, arch = relu((1000,)), CUDA("h200")
    right = DefaultPolicy(func, arch).emit_config(1)[0]
    wrong = Config(Candidate.of("gpu_matmul_simt", {"block_m": 1}), 0.0)
    results, best = apply_and_build(func, [wrong, right], arch, parallel_build=False)
    assert best is results[1]
    assert results[0].library is None
    assert results[0].reason
    with pytest.raises(TuningError, match="none of 1 candidates passed"):
        apply_and_build(func, [wrong], arch)


@needs_nvcc
@pytest.mark.slow
def test_synchronous_copies_are_in_the_code() -> None:
    func = matmul(128, 128, 1024)
    codes = []
    for flag in (0, 1):
        configs = TensorCorePolicy(func, "h200", {"use_async_copy": flag}).emit_config(1)
        codes.append(apply_and_build(func, configs, "h200")[1].code)
    assert ["cp_async" in code for code in codes] == [False, True]


@pytest.mark.parametrize("extent", ["n", 4])
def test_functions_that_cannot_be_called_by_arrays_are_refused(extent: Any) -> None:
    n = te.var("n", "int64") if extent == "n" else extent
    x = te.placeholder((n,), "float32", "X")
    y = te.compute((n,), lambda i: x[i] * 2.0, name="Y")
    func = te.create_prim_func([y, x] if extent == 4 else [x, y])
    with pytest.raises(ValueError, match=r"extent|not its last ones"):
        apply_and_build(func, [Config(Candidate.of("gpu_fallback", {"threads": 32, "across": False}), 1e-6)], "h200")


def test_building_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no configurations"):
        apply_and_build(relu((8,)), [], "h200")


# The reference


@pytest.mark.parametrize("limit", [0, 1 << 40])
@pytest.mark.parametrize(("dtype", "wide"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")])
def test_the_reference_is_the_function_at_a_higher_precision(dtype: str, wide: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "UNSCHEDULED_FLOPS", limit)
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype(reference.numpy_dtype(dtype)) for shape in ((33, 70), (70, 41)))
    (got,) = reference.expected_outputs(matmul(33, 41, 70, dtype), [a, b], [Arg("C", (33, 41), "float32")])
    assert got.dtype == wide
    want = a.astype("float64") @ b.astype("float64")
    assert np.abs(got - want).max() < (1e-12 if dtype == "float32" else 1e-4)


def test_bits_that_are_relabelled_keep_their_width() -> None:
    x = te.placeholder((8,), "float32", "X")
    func = te.create_prim_func([x, te.compute((8,), lambda i: tvm.tirx.reinterpret("int32", x[i]), name="Y")])
    value = np.arange(8, dtype="float32")
    (got,) = reference.expected_outputs(func, [value], [Arg("Y", (8,), "int32")])
    assert (got == value.view("int32")).all()


def test_rounding_grows_with_the_root_of_the_reductions_length_and_is_zero_for_maxima() -> None:
    short, long = (reference.rounding(matmul(16, 16, k, accum_dtype="float16")) for k in (64, 4096))
    assert long == pytest.approx(8 * short)
    assert 4096**0.5 * 2**-11 < long < 10 * 4096**0.5 * 2**-11
    x, k = te.placeholder((8, 64), "float16", "X"), te.reduce_axis((0, 64), "k")
    assert reference.rounding(te.create_prim_func([x, te.compute((8,), lambda i: te.max(x[i, k], axis=k), name="Y")])) == 0


# What the documents show


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "name"), [("docs/guides/from-python.md", "from_python.py"), ("docs/guides/from-python.md", "whole_module.py")]
)
def test_documented_lines_run_without_a_gpu(document: str, name: str, tmp_path: Path) -> None:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    (tmp_path / name).write_text(found[1], encoding="utf-8")
    environment = {**clean_environment(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, name], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if name == "from_python.py":
        assert re.fullmatch(r"wgmma_matmul\(.*\), .* us expected not measured: .*; ranked by the model\n", done.stdout)
