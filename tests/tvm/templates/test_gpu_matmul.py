"""GEMMs on GPUs: schedules apply, compile without spills to the instructions they are for, and replay elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support import serial_programs
from support.compilers import compiled_cubin, needs_nvcc, needs_nvdisasm
from support.thinned import at, every, only
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

import kerneldecl
from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import target_of
from kerneldecl.compiler.cuda import compile_cuda_object, cuda_program
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.hardware.arch_file import read_arch
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_matmul_simt as simt_policy
from kerneldecl.policies import gpu_matmul_tc as tc_policy
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_conv2d_tc, gpu_matmul_simt, gpu_matmul_tc
from kerneldecl.toolchain import nvcc

ROOT = Path(kerneldecl.__file__).parent.parent
H200_FILE = Path(kerneldecl.__file__).parent / "archs" / "h200.toml"
H200 = read_arch("h200", H200_FILE.read_bytes(), "h200.toml")
TC = {
    "block_m": 64,
    "block_n": 64,
    "block_k": 32,
    "warps_m": 2,
    "warps_n": 2,
    "stages": 3,
    "raster_group": 1,
    "smem_epilogue": 0,
    "split_k": 1,
}
SIMT = {"block_m": 64, "block_n": 64, "block_k": 8, "thread_m": 4, "thread_n": 8, "stages": 3, "raster_group": 1, "split_k": 1}


def lowered(rule: str = "matmul", **attrs: Any) -> tvm.IRModule:
    return canonical.lower(load_rule(ROOT, rule).of(ROOT, attrs))


def matmul(m: int, n: int, k: int, **attrs: Any) -> tvm.IRModule:
    return lowered(m=m, n=n, k=k, **attrs)


def source(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TVM_COMPILE_FORCE_FALLBACK", "1")
    with tvm.transform.PassContext(config=gpu_matmul_tc.PASS_CONFIG):
        return str(tvm.compile(schedule.mod, target=target_of(H200)).mod.imports[0].inspect_source("cuda"))


@pytest.mark.parametrize(
    ("layout", "dtype", "accum_dtype"),
    every(2, ["nn", "nt", "tn", "tt"], [("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32")]),
)
def test_tensor_cores_take_every_layout(layout: str, dtype: str, accum_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = gpu_matmul_tc.apply(matmul(128, 192, 256, layout=layout, dtype=dtype, accum_dtype=accum_dtype), TC, H200)
    assert schedule is not None
    code = source(schedule, monkeypatch)
    letters = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
    accum, operand = letters[accum_dtype], letters[dtype]
    assert f"mma.sync.aligned.m16n8k16.row.col.{accum}.{operand}.{operand}.{accum}" in code
    assert "ldmatrix.sync.aligned.m8n8.x4" in code
    # An operand whose fastest axis is k is loaded as it lies, the other is transposed on the way.
    assert ("x4.trans" in code) == (layout != "nt")
    assert "ptx_cp_async_legacy_cg_16" in code


@pytest.mark.parametrize(
    "attrs",
    at(
        {0},
        [
            {"m": 1000, "n": 1003, "k": 517, "epilogue": ("bias", "relu")},
            {"m": 100, "n": 96, "k": 72, "layout": "tn", "batch": 3},
            {"m": 64, "n": 64, "k": 64, "epilogue": ("bias", "gelu_tanh", "add")},
            {"m": 128, "n": 64, "k": 128, "layout": "nt", "dtype": "int8"},
            {"m": 7, "n": 300, "k": 40, "layout": "nt", "dtype": "bfloat16", "epilogue": ("hard_swish",)},
        ],
    ),
)
def test_no_further_kernel_whatever_the_sizes_and_the_epilogue(attrs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mod = lowered(**{"dtype": "float16", **attrs})
    for policy, template in ((tc_policy, gpu_matmul_tc), (simt_policy, gpu_matmul_simt)):
        proposals = policy.propose(iter_space(mod), H200, 6)
        assert proposals
        for proposal in proposals[::3]:
            params = dict(proposal.candidate.params)
            schedule = template.apply(mod, params, H200)
            assert schedule is not None, proposal
            kernels = 1 if params["split_k"] == 1 else 2  # the second adds up the partial results of split-K
            assert source(schedule, monkeypatch).count("__launch_bounds__") == 2 * kernels, "a declaration and a definition"


RAGGED = [
    *({"m": 100, "n": 99, "k": 70, "layout": layout, "dtype": "float16"} for layout in ("nn", "nt", "tn", "tt")),
    {"m": 100, "n": 104, "k": 72, "layout": "nt", "dtype": "bfloat16", "epilogue": ("bias", "gelu", "add")},
    {"m": 33, "n": 70, "k": 40, "layout": "tt", "dtype": "float16", "batch": 3, "epilogue": ("relu",)},
    {"m": 8, "n": 200, "k": 67, "layout": "nn", "dtype": "float16", "accum_dtype": "float16"},
    {"m": 130, "n": 17, "k": 96, "layout": "nt", "dtype": "int8"},
    {"m": 65, "n": 97, "k": 33, "layout": "tn", "dtype": "float32"},
]


@pytest.mark.parametrize("attrs", at({8}, RAGGED), ids=lambda attrs: "-".join(map(str, attrs.values())))
def test_tiles_that_divide_nothing_compute_the_reference_within_bounds(attrs: dict[str, Any]) -> None:
    rule = load_rule(ROOT, "matmul").of(ROOT, attrs)
    mod = canonical.lower(rule)
    space = iter_space(mod)
    simt = [(gpu_matmul_simt, dict(found.candidate.params)) for found in simt_policy.propose(space, H200, 40)[::13]]
    tc = [(gpu_matmul_tc, dict(found.candidate.params)) for found in tc_policy.propose(space, H200, 40)[::13]]
    if tc:
        variants: list[dict[str, Any]] = [
            {"smem_epilogue": 0},
            {"smem_epilogue": 1},
            {"split_k": 3},
            {"split_k": 2, "smem_epilogue": 1},
            {"stages": 3, "double_buffer": 1},
        ]
        tc += [(gpu_matmul_tc, {**TC, "block_k": 64 if attrs["dtype"] == "int8" else 32, "stages": 2, **params}) for params in variants]
    assert simt
    for template, params in (*simt, *tc):
        assert_right_as_serial_program(rule, template, params)


def assert_right_as_serial_program(rule: Any, template: Any, params: dict[str, Any]) -> None:
    with serial_programs.without_threads():
        schedule = template.apply(canonical.lower(rule), params, H200)
    assert schedule is not None, params
    inputs = rule.inputs(np.random.default_rng(0))
    result = serial_programs.run(schedule.mod, inputs, rule.signature().outputs[0])
    assert relative_error(result, rule.reference(*inputs)) <= rule.tolerance(), params


CONV_TC: dict[str, Any] = {"rows": 2, "columns": 16, "block_n": 32, "warps_rows": 2, "warps_columns": 1, "warps_n": 1, "smem_epilogue": 0}


@pytest.mark.parametrize(
    ("attrs", "params"),
    at(
        {0, 2},
        [
            (
                {"n": 2, "f": 64, "h": 20, "w": 44, "c": 3, "kh": 7, "kw": 7, "stride": 2, "padding": 3},
                {"columns": 32, "block_n": 64, "smem_epilogue": 1},
            ),
            ({"n": 3, "f": 40, "h": 9, "w": 17, "c": 5, "kh": 3, "kw": 2, "padding": 1, "epilogue": ("bias", "relu")}, {"warps_n": 2}),
            ({"n": 3, "f": 17, "h": 9, "w": 17, "c": 4, "kh": 3, "kw": 3, "dilation": 2, "dtype": "bfloat16"}, {"rows": 4}),
            ({"n": 2, "f": 16, "h": 7, "w": 33, "c": 8, "kh": 3, "kw": 3, "stride": 3, "padding": 2}, {"columns": 16, "smem_epilogue": 1}),
        ],
    ),
)
def test_convolutions_from_an_image_in_shared_memory(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    rule = load_rule(ROOT, "conv2d").of(ROOT, {"dtype": "float16", **attrs})
    assert_right_as_serial_program(rule, gpu_conv2d_tc, {**CONV_TC, **params})


@pytest.mark.parametrize(
    "attrs",
    at(
        {1},
        [
            {"n": 2, "f": 24, "h": 9, "w": 11, "c": 8, "kh": 3, "kw": 3, "stride": 2, "padding": 1},
            {"n": 2, "f": 24, "h": 9, "w": 11, "c": 24, "kh": 1, "kw": 1, "stride": 2, "padding": 3, "epilogue": ("bias",)},
        ],
    ),
)
def test_convolutions_as_gemms(attrs: dict[str, Any]) -> None:
    rule = load_rule(ROOT, "conv2d").of(ROOT, {"dtype": "float16", **attrs})
    for smem_epilogue in (0, 1):
        assert_right_as_serial_program(rule, gpu_matmul_tc, {**TC, "stages": 2, "smem_epilogue": smem_epilogue})


def test_stores_are_single_where_rows_of_the_result_have_an_odd_length(monkeypatch: pytest.MonkeyPatch) -> None:
    odd, even = (gpu_matmul_tc.apply(matmul(64, n, 128, layout="nt", dtype="float16"), TC, H200) for n in (63, 64))
    assert "*(half2*)(C_ptr" in source(even, monkeypatch)
    assert "*(half2*)(C_ptr" not in source(odd, monkeypatch)


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"dtype": "float32"}, TC),  # no tensor cores
        ({"dtype": "float16"}, {**TC, "block_m": 48}),  # two warps of 24 rows
        ({"dtype": "float16"}, {**TC, "stages": 5, "k": 64}),  # more stages than k-tiles
        ({"dtype": "float16"}, {**TC, "raster_group": 3}),  # does not divide the rows of tiles
        ({"dtype": "float16"}, {**TC, "stages": 2, "double_buffer": 1}),  # no stage left to double-buffer
    ],
)
def test_template_refuses_what_does_not_fit(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert gpu_matmul_tc.apply(matmul(128, 128, 64, **attrs), params, H200) is None


WIDE = {**TC, "block_m": 128, "block_n": 256, "warps_n": 4, "stages": 3, "raster_group": 8}
SQUARE = {**TC, "block_m": 128, "block_n": 128, "stages": 3, "raster_group": 8}


@needs_nvcc
@pytest.mark.parametrize(
    ("arch", "attrs", "params"),
    at(
        {3, 5, 14},
        [
            (arch, *case)
            for arch in ("a100-80gb", "l4", "h200", "b200")
            for case in (
                ({"dtype": "float16", "layout": "nt"}, WIDE),
                ({"dtype": "float16", "layout": "nn", "accum_dtype": "float16"}, SQUARE),
                ({"dtype": "bfloat16", "layout": "tn", "epilogue": ("bias", "gelu")}, {**SQUARE, "stages": 2, "smem_epilogue": 1}),
                ({"dtype": "int8", "layout": "nt"}, {**SQUARE, "block_k": 64}),
                ({"dtype": "float16", "layout": "tn"}, {**WIDE, "double_buffer": 1}),
            )
        ],
    ),
)
def test_accumulators_stay_in_registers(attrs: dict[str, Any], params: dict[str, Any], arch: str, tmp_path: Path) -> None:
    gpu = load_arch(ROOT, arch)
    assert_no_stack(gpu_matmul_tc, matmul(1024, 1024, 1024, **attrs), params, gpu, tmp_path)


@pytest.mark.slow
@needs_nvcc
def test_double_buffered_fragments_stay_in_registers(tmp_path: Path) -> None:
    params = {**TC, "block_m": 32, "block_n": 128, "block_k": 128, "warps_m": 1, "double_buffer": 1}
    assert_no_stack(gpu_matmul_tc, matmul(1024, 1024, 1024, dtype="float16"), params, H200, tmp_path)


@pytest.mark.slow
@needs_nvcc
def test_ragged_integers_compile(tmp_path: Path) -> None:
    mod = matmul(129, 66, 80, dtype="int8", layout="nt")
    assert_no_stack(gpu_matmul_tc, mod, {**TC, "block_k": 64, "stages": 2}, H200, tmp_path)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("n", at({0}, [63, 66, 64]))
def test_split_k_compiles(n: int, tmp_path: Path) -> None:
    schedule = gpu_matmul_tc.apply(matmul(100, n, 500, dtype="float16", layout="nt"), {**TC, "split_k": 3}, H200)
    built = compile_cuda_object(schedule.mod, H200, "kd_product", LocalStore(tmp_path))
    assert [launch.usage.stack_bytes + launch.usage.spill_bytes for launch in built.launches] == [0, 0]
    assert built.launches[0].grid == (2 * -(-n // 64), 1, 3)


@pytest.mark.slow
@needs_nvcc
def test_fragments_of_an_image_stay_in_registers(tmp_path: Path) -> None:
    mod = lowered("conv2d", n=8, f=64, h=224, w=224, c=3, kh=7, kw=7, stride=2, padding=3, dtype="float16")
    params = {**CONV_TC, "columns": 112, "block_n": 64, "warps_rows": 1, "warps_columns": 7}
    assert_no_stack(gpu_conv2d_tc, mod, params, H200, tmp_path)


@needs_nvcc
@pytest.mark.parametrize("arch", at({0}, ["t4", "h200"]))
def test_accumulators_of_cuda_cores_stay_in_registers(arch: str, tmp_path: Path) -> None:
    params = {**SIMT, "block_m": 128, "block_n": 128, "thread_m": 8, "stages": 1}
    assert_no_stack(gpu_matmul_simt, matmul(1024, 1024, 1024, dtype="float32", layout="nt"), params, load_arch(ROOT, arch), tmp_path)


MACHINE_CODE = [
    ("t4 float16", {"dtype": "float16", "layout": "nn"}, "HMMA.1688.F32"),
    ("t4 int8", {"dtype": "int8", "layout": "nt"}, "IMMA.8816.S8.S8"),
    ("t4 uint8", {"dtype": "uint8", "layout": "tn"}, "IMMA.8816.U8.U8"),
    ("l4 float8_e4m3fn", {"dtype": "float8_e4m3fn", "layout": "nn", "out_dtype": "float16"}, "QMMA.16832.F32.E4M3.E4M3"),
    ("l4 float8_e5m2", {"dtype": "float8_e5m2", "layout": "nt", "out_dtype": "bfloat16"}, "QMMA.16832.F32.E5M2.E5M2"),
    ("a100-80gb float64", {"dtype": "float64", "layout": "tt"}, "DMMA.884"),
    ("a100-80gb int8", {"dtype": "int8", "layout": "tt"}, "IMMA.16832.S8.S8"),
]


@needs_nvdisasm
@pytest.mark.parametrize(("name", "attrs", "instruction"), only(("t4 float16", "l4 float8_e4m3fn"), MACHINE_CODE))
def test_machine_code_has_the_instructions_of_the_gpus_tensor_cores(name: str, attrs: dict[str, Any], instruction: str) -> None:
    arch = load_arch(ROOT, name.partition(" ")[0])
    mod = matmul(256, 256, 256, **attrs)
    proposal = tc_policy.propose(iter_space(mod), arch, 1)[0]
    schedule = gpu_matmul_tc.apply(mod, dict(proposal.candidate.params), arch)
    assert schedule is not None
    program = cuda_program(schedule.mod, arch, "kernel")
    cubin = compiled_cubin(program.source, program.arch, program.flags)
    assert instruction in nvcc.disassembled(cubin.content)
    assert not any(usage.stack_bytes + usage.spill_bytes for usage in cubin.usage.values())


LIMITED_VECTORS = [
    ("h200", {"dtype": "float8_e4m3fn", "layout": "nn", "out_dtype": "float16"}),
    ("t4", {"dtype": "bfloat16", "layout": "nt"}),
]
"""Dtypes whose widest vectors CUDA lacks in part: float8 cannot be stored one by one; bfloat16 before 8.0 is eight 32-bit integers."""


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(("name", "attrs"), LIMITED_VECTORS)
def test_narrow_floats_on_cuda_cores_compile(name: str, attrs: dict[str, Any]) -> None:
    arch = load_arch(ROOT, name)
    mod = matmul(256, 256, 256, **attrs)
    schedule = gpu_matmul_simt.apply(mod, {**SIMT, "stages": 2}, arch)
    assert schedule is not None
    program = cuda_program(schedule.mod, arch, "kernel")
    assert compiled_cubin(program.source, program.arch, program.flags).usage


@pytest.mark.slow
@needs_nvcc
def test_split_k_on_cuda_cores_compiles(tmp_path: Path) -> None:
    schedule = gpu_matmul_simt.apply(matmul(128, 128, 5000, dtype="float32", layout="nt"), {**SIMT, "stages": 2, "split_k": 3}, H200)
    built = compile_cuda_object(schedule.mod, H200, "kd_product", LocalStore(tmp_path))
    assert [launch.usage.stack_bytes + launch.usage.spill_bytes for launch in built.launches] == [0, 0]
    assert built.launches[0].grid == (4, 1, 3)


def assert_no_stack(template: Any, mod: tvm.IRModule, params: dict[str, Any], arch: Any, folder: Path) -> None:
    schedule = template.apply(mod, params, arch)
    (launch,) = compile_cuda_object(schedule.mod, arch, "kd_product", LocalStore(folder)).launches
    assert (launch.usage.stack_bytes, launch.usage.spill_bytes) == (0, 0)
    assert launch.dynamic_smem_bytes <= arch.the_gpu.smem_per_block_optin_bytes


REPLAY = """
import sys
sys.modules["torch"] = None  # which tvm_ffi imports where it is installed: it takes seconds
import json, tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase
from kerneldecl.relax.prebuilt import register_intrinsics
from kerneldecl.compiler.canonical import module_digest
register_intrinsics(sys.argv[1])
database = JSONDatabase(work_dir=sys.argv[1])
records = database.get_all_tuning_records()
hashes = []
for record in records:
    schedule = tvm.s_tir.Schedule(record.workload.mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    hashes.append(module_digest(schedule.mod))
print(json.dumps(sorted(hashes)))
"""


@pytest.mark.slow
def test_traces_replay_from_a_database_in_another_process(tmp_path: Path) -> None:
    database = JSONDatabase(work_dir=str(tmp_path))
    hashes = []
    for template, params, dtype in ((gpu_matmul_tc, TC, "float16"), (gpu_matmul_simt, SIMT, "float32")):
        mod = matmul(100, 120, 136, dtype=dtype, layout="nn", epilogue=("bias", "relu"))
        schedule = template.apply(mod, params, H200)  # type: ignore[attr-defined]
        args = ArgInfo.from_entry_func(mod)
        workload = database.commit_workload(mod)
        database.commit_tuning_record(TuningRecord(schedule.trace, workload, [1.0], target_of(H200), args))
        hashes.append(canonical.module_digest(schedule.mod))
    done = subprocess.run([sys.executable, "-c", REPLAY, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == sorted(hashes)
