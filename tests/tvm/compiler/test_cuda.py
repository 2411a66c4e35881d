"""Device code without a GPU: cubins in objects, objects in one library, nvcc's resource usage, and sources that are not compiled twice."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tvm
import tvm_ffi
from support.compilers import needs_nvcc, needs_nvdisasm, sass
from support.cuda_process import LOAD, answer
from support.thinned import at
from tvm import te
from tvm.s_tir import dlight

import kerneldecl
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import target_of
from kerneldecl.compiler.cuda import CudaObject, compile_cuda_object, cuda_program, cuda_source
from kerneldecl.errors import ToolchainError
from kerneldecl.hardware.arch_file import read_arch
from kerneldecl.model import Arch, Value
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_elementwise, gpu_matmul_simt, gpu_reduce
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.cuda_objects import link_cuda_library
from kerneldecl.toolchain.declarations import Headers
from kerneldecl.toolchain.scalarize_arrays import scalarized

ARCHS = Path(kerneldecl.__file__).parent / "archs"


def arch(name: str) -> Arch:
    path = ARCHS / f"{name}.toml"
    return read_arch(name, path.read_bytes(), path.name)


H200, A100 = arch("h200"), arch("a100-40gb")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """Return one store for all tests, so that each kernel is compiled once."""
    return LocalStore(tmp_path_factory.mktemp("cache"))


def module(*tensors: Any) -> tvm.IRModule:
    return tvm.IRModule({"main": te.create_prim_func(list(tensors))})


def addition(names: Sequence[str] = ("A", "B"), size: int = 1000, dtype: str = "float32") -> tvm.IRModule:
    a, b = (te.placeholder((size,), dtype, name=name) for name in names)
    return module(a, b, te.compute((size,), lambda i: a[i] + b[i], name="C"))


def bound(mod: tvm.IRModule, threads: int = 128) -> tvm.IRModule:
    """Return the addition with one element a thread."""
    sch = tvm.s_tir.Schedule(mod)
    block, thread = sch.split(*sch.get_loops(sch.get_sblock("C")), [None, threads])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return sch.mod


def staged(mod: tvm.IRModule, scope: str) -> tvm.IRModule:
    """Return the addition with 100 elements a block, the first operand by way of shared memory."""
    sch = tvm.s_tir.Schedule(mod)
    block, thread = sch.split(*sch.get_loops(sch.get_sblock("C")), [None, 100])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    copy = sch.cache_read(sch.get_sblock("C"), 0, scope)
    sch.compute_at(copy, block)
    sch.bind(sch.get_loops(copy)[-1], "threadIdx.x")
    return sch.mod


def matmul(device: Arch) -> tvm.IRModule:
    """Return a GEMM as TVM schedules it by default, on CUDA cores; its tensor intrinsics take seconds to import."""
    a, b = (te.placeholder((256, 256), "float32", name=name) for name in "AB")
    k = te.reduce_axis((0, 256), name="k")
    c = te.compute((256, 256), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    with target_of(device):
        return dlight.ApplyDefaultSchedule(dlight.gpu.Matmul())(module(a, b, c))


def linked(folder: Path, **objects: CudaObject) -> Path:
    paths = [folder / f"{name}.o" for name in objects]
    for path, compiled in zip(paths, objects.values(), strict=True):
        path.write_bytes(compiled.content)
    link_cuda_library(folder / "kernels.so", paths)
    return folder / "kernels.so"


def cubins(store: LocalStore) -> list[bytes]:
    records = (json.loads(path.read_text(encoding="utf-8")) for path in (store.root / "local" / "cubin").glob("*.json"))
    found = [store.read_blob(record["result"]["cubin"]) for record in records]
    assert all(isinstance(content, bytes) for content in found)
    return [content for content in found if isinstance(content, bytes)]


@needs_nvcc
@pytest.mark.parametrize("device", at({0}, [H200, A100]), ids=lambda device: device.name)
def test_library_holds_the_cubins_of_all_kernels_and_no_source(device: Arch, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "cache")
    objects = {
        "kd_add": compile_cuda_object(bound(addition()), device, "kd_add", store),
        "kd_matmul": compile_cuda_object(matmul(device), device, "kd_matmul", store),
    }
    content = linked(tmp_path, **objects).read_bytes()
    device_code = cubins(store)
    assert len(device_code) == 2
    assert all(cubin.startswith(b"\x7fELF") and cubin in content for cubin in device_code)
    assert b"__global__" not in content
    assert b"#include" not in content


def cast(dtype: str, out_dtype: str, width: int) -> tvm.IRModule:
    """Return a conversion whose threads have a vector each."""
    mod = canonical.lower(load_rule(STANDARD, "cast").of(STANDARD, {"shape": (64, 1024), "dtype": dtype, "out_dtype": out_dtype}))
    sch = gpu_elementwise.apply(mod, {"threads": 128, "width": width, "unroll": 1}, A100)
    assert sch is not None
    return sch.mod


@needs_nvcc
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "width"),
    at(
        {4},
        [
            (*dtypes, width)
            for dtypes in (("float8_e4m3fn", "float32"), ("float16", "float8_e4m3fn"), ("int8", "float8_e5m2"))
            for width in (1, 8, 16)
        ],
    ),
)
def test_gpus_without_instructions_for_float8_have_cudas_headers_convert_it(
    dtype: str, out_dtype: str, width: int, store: LocalStore
) -> None:
    """TVM's own conversions for such GPUs make 2^-7 of zero, and compare vectors of eight, for which CUDA has no type."""
    mod = cast(dtype, out_dtype, width)
    source = cuda_source(mod, A100, "kd_cast")
    assert "__nv_fp8_e" in source[source.index("__global__") :]
    assert "condval" not in source
    assert len(compile_cuda_object(mod, A100, "kd_cast", store).launches) == 1
    assert nvcc.compile_cubin(cuda_program(mod, A100, "kd_cast").source, "sm_80").usage, "with the headers themselves, as programs do"


def test_tvm_is_asked_about_float8_as_before_once_code_is_generated() -> None:
    cuda_source(cast("float8_e4m3fn", "float32", 1), A100, "kd_cast")
    supports = tvm_ffi.get_global_func("tvm.support.nvcc.supports_fp8")
    assert [supports(capability) for capability in ("8.0", "9.0")] == [False, True]


REPORT = """
import tvm_ffi
load(tvm / "libtvm_runtime.so")
load(tvm / "libtvm_runtime_cuda.so")
module = tvm_ffi.load_module(str(library))
import numpy as np
def error(symbol):
    try:
        module.get_function(symbol)(*(tvm_ffi.from_dlpack(np.zeros(1000, "float32")) for _ in range(3)))
    except ValueError as error:
        return str(error)
print(json.dumps({
    "kinds": [each.kind for each in module.imports],
    "functions": [module.implements_function(symbol) for symbol in symbols],
    "kernels": [[each.get_function(f"{symbol}_kernel") is not None for symbol in symbols if each.implements_function(f"{symbol}_kernel")]
                for each in module.imports],
    "error": error(symbols[0]),
    "compiler": "tvm" in sys.modules,
}))
"""

BUILD = """
import tvm, tvm_ffi
sys.path[:0] = [sys.argv[4], str(Path(sys.argv[4]).parents[1])]
import test_cuda as cases
from kerneldecl.store.keys import digest
compiled = cases.compile_cuda_object(cases.bound(cases.addition()), cases.H200, "kd_add", cases.LocalStore(folder))
has_runtime = tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None
print(json.dumps({"code": compiled.code, "content": digest(compiled.content), "has_runtime": has_runtime}))
"""


@needs_nvcc
def test_library_loads_with_the_runtime_alone_and_finds_every_kernel(store: LocalStore, tmp_path: Path) -> None:
    symbols = ("kd_add", "kd_staged")
    modules = (bound(addition()), staged(addition(), "shared.dyn"))
    objects = {name: compile_cuda_object(mod, H200, name, store) for name, mod in zip(symbols, modules, strict=True)}
    found = answer(LOAD + REPORT, linked(tmp_path, **objects), tmp_path, *symbols)
    assert found["kinds"] == ["cuda", "cuda"]
    assert found["functions"] == [True, True]
    assert found["kernels"] == [[True], [True]], "each module knows its own kernel"
    assert "device_type" in found["error"], "an array of the host is refused before anything is launched"
    assert not found["compiler"]


@pytest.mark.slow
@needs_nvcc
def test_one_module_gives_one_object_in_any_process_with_cudas_runtime_or_without(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("with", "without")]
    for folder in folders:
        folder.mkdir()
    here = Path(__file__).parent
    with_runtime = answer(LOAD + BUILD, "", folders[0], "", here, seed="1")
    plain = LOAD[: LOAD.index("try:\n    ctypes")]
    without = answer(plain + BUILD, "", folders[1], "", here, seed="2")
    assert with_runtime["has_runtime"]
    assert {**with_runtime, "has_runtime": None} == {**without, "has_runtime": None}


@needs_nvcc
def test_launch_geometry_and_shared_memory_are_those_of_the_schedule(store: LocalStore) -> None:
    # A GPU without PDL: with it, blocks are spread by a larger request (test_overlap.py).
    static = compile_cuda_object(staged(addition(), "shared"), A100, "kd_static", store)
    dynamic = compile_cuda_object(staged(addition(), "shared.dyn"), A100, "kd_dynamic", store)
    for compiled in (static, dynamic):
        (launch,) = compiled.launches
        assert (launch.grid, launch.block) == ((10, 1, 1), (100, 1, 1))
        assert launch.usage.spill_bytes == 0
        assert 0 < launch.usage.registers <= 255
    # CUDA reserves up to 1 KiB a block for itself, which ptxas counts from some arch on.
    tile_bytes = 100 * 4
    assert static.launches[0].dynamic_smem_bytes == 0
    assert tile_bytes <= static.launches[0].usage.smem_bytes <= tile_bytes + 1024
    assert dynamic.launches[0].dynamic_smem_bytes == tile_bytes
    assert dynamic.launches[0].usage.smem_bytes < tile_bytes


def two_blocks(*threads: tuple[str, int]) -> tvm.IRModule:
    """Return row sums and their squares, with each of the named blocks bound to a number of threads per thread block."""
    a = te.placeholder((64, 512), "float32", name="A")
    k = te.reduce_axis((0, 512), name="k")
    b = te.compute((64,), lambda i: te.sum(a[i, k], axis=k), name="B")
    sch = tvm.s_tir.Schedule(module(a, te.compute((64,), lambda i: b[i] * b[i], name="C")))
    for name, count in threads:
        outer, inner = sch.split(sch.get_loops(sch.get_sblock(name))[0], [None, count])
        sch.bind(outer, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
    return sch.mod


@needs_nvcc
def test_two_kernels_of_one_function_are_launched_in_order(store: LocalStore) -> None:
    compiled = compile_cuda_object(two_blocks(("B", 32), ("C", 16)), H200, "kd_two", store)
    assert [(launch.grid[0], launch.block[0]) for launch in compiled.launches] == [(2, 32), (4, 16)]
    assert len({launch.kernel for launch in compiled.launches}) == 2


@needs_nvcc
def test_memory_between_kernels_comes_from_pages_that_stay(store: LocalStore, tmp_path: Path) -> None:
    """TVM's loader gives a library its own pool where it finds the name: test_cuda_pages.py tests the other cases."""
    compiled = compile_cuda_object(two_blocks(("B", 32), ("C", 16)), H200, "kd_two", store)
    assert b"__TVMBackendAllocWorkspace" in compiled.content
    exported = subprocess.run(["nm", "-D", linked(tmp_path, kd_two=compiled)], capture_output=True, text=True, check=True).stdout
    assert "__TVMBackendAllocWorkspace" not in exported
    assert "U TVMBackendAllocWorkspace" in exported


@pytest.mark.parametrize("name", ["B", "C"])
def test_function_that_would_compute_on_the_host_is_refused(name: str, store: LocalStore) -> None:
    with pytest.raises(ValueError, match="bound to no threads and would run on the host"):
        compile_cuda_object(two_blocks((name, 32)), H200, "kd_half", store)


@pytest.mark.slow
@needs_nvcc
def test_same_device_code_is_one_code_whatever_the_arguments_are_called(store: LocalStore) -> None:
    compiled = compile_cuda_object(bound(addition()), H200, "kd_add", store)
    # TVM orders a kernel's parameters by name: these keep their places.
    renamed = compile_cuda_object(bound(addition(("Augend", "B"))), H200, "kd_add", store)
    assert compiled.content != renamed.content, "the host code's messages name the arguments"
    assert compiled.code == renamed.code
    others = [
        compile_cuda_object(bound(addition(), threads=64), H200, "kd_add", store),
        compile_cuda_object(bound(addition(size=1024)), H200, "kd_add", store),
        compile_cuda_object(bound(addition()), A100, "kd_add", store),
    ]
    assert len({compiled.code, *(other.code for other in others)}) == 4


@needs_nvcc
def test_a_source_in_the_store_is_not_compiled_again(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_cuda_object(bound(addition()), H200, "kd_add", store)

    def compiled(*_: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(nvcc, "compile_cubin", compiled)
    assert compile_cuda_object(bound(addition()), H200, "kd_add", store) == first
    with pytest.raises(AssertionError, match="compiled"):
        compile_cuda_object(bound(addition(), threads=32), H200, "kd_add", store)


@needs_nvcc
@pytest.mark.parametrize(("dtype", "flags"), [("float16", nvcc.FAST_MATH_FLAGS), ("float32", nvcc.FLAGS)])
def test_arithmetic_is_quick_where_results_are_rounded_to_16_bits(
    dtype: str, flags: tuple[str, ...], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = []
    compile_cubin = nvcc.compile_cubin

    def compiled(source: str, arch: str, flags: tuple[str, ...], headers: Headers | None) -> nvcc.Cubin:
        passed.append(flags)
        return compile_cubin(source, arch, flags, headers)

    monkeypatch.setattr(nvcc, "compile_cubin", compiled)
    compile_cuda_object(bound(addition(size=777, dtype=dtype)), H200, "kd_add", store)
    assert passed == [flags]


GEMM_TILE = {"block_m": 64, "block_n": 64, "block_k": 8, "thread_m": 8, "thread_n": 8, "stages": 2, "raster_group": 1, "split_k": 1}


@pytest.mark.slow
@needs_nvcc
def test_a_comment_in_cuda_leaves_the_code_as_it_is() -> None:
    """So a template whose CUDA has a comment reworded is compiled again, and keeps its measurements."""
    source = cuda_source(bound(addition()), H200, "kd_x")
    commented = source.replace(nvcc._KERNEL, f"// One.\n\n{nvcc._KERNEL}").replace("{\n", "{  // two\n")
    assert commented.count("//") > source.count("//") + 1
    assert nvcc.compile_cubin(commented, "sm_90").content == nvcc.compile_cubin(source, "sm_90").content


@pytest.mark.slow
@needs_nvcc
def test_split_arrays_leave_the_code_as_it_is() -> None:
    a, b = (te.placeholder((512, 512), "float32", name=name) for name in "AB")
    k = te.reduce_axis((0, 512), name="k")
    gemm = module(a, b, te.compute((512, 512), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C"))
    scheduled = gpu_matmul_simt.apply(gemm, GEMM_TILE, H200)
    assert scheduled is not None
    source = cuda_source(scheduled.mod, H200, "kd_product")
    whole, split = (nvcc.compile_cubin(text, "sm_90a") for text in (source, scalarized(source)))
    assert scalarized(source) != source
    assert split == whole


@needs_nvcc
def test_damaged_cubin_is_compiled_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    compiled = compile_cuda_object(bound(addition()), H200, "kd_add", store)
    for path in (tmp_path / "blob").rglob("*"):
        if path.is_file():
            path.write_bytes(b"truncated")
    assert compile_cuda_object(bound(addition()), H200, "kd_add", store) == compiled


def test_unscheduled_function_is_no_kernel(store: LocalStore) -> None:
    with pytest.raises(ValueError, match="no kernel: nothing is bound to threads"):
        compile_cuda_object(addition(), H200, "kd_add", store)


REGISTERS = """
extern "C" __global__ void crowded(float* x) {
  __shared__ float tile[250];
  float values[96];
  for (int i = 0; i < 250; i += 50) tile[i + threadIdx.x % 50] = x[i];
  #pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = x[i * 128 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 96; ++i) x[i * 128 + threadIdx.x] = values[i] * values[95 - i] + tile[threadIdx.x];
}
extern "C" __global__ void plain(float* x) { x[threadIdx.x] += 1.0f; }
"""


@needs_nvcc
def test_usage_is_read_of_each_kernel_and_a_limit_of_registers_shows_as_spills() -> None:
    free = nvcc.compile_cubin(REGISTERS, "sm_80").usage
    limited = nvcc.compile_cubin(REGISTERS, "sm_80", (*nvcc.FLAGS, "-maxrregcount=32")).usage
    assert set(free) == {"crowded", "plain"}
    assert free["crowded"].registers > 96
    assert free["crowded"].spill_bytes == 0
    assert free["crowded"].smem_bytes == 250 * 4
    assert limited["crowded"].registers <= 32
    assert limited["crowded"].spill_bytes >= (96 - 32) * 4
    assert limited["crowded"].stack_bytes >= (96 - 32) * 4
    assert limited["plain"].spill_bytes == 0
    assert limited["plain"].smem_bytes == 0


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('extern "C" __global__ void k() { int x = y; }', '"y" is undefined'),
        ('extern "C" __global__ void k(float* x) { __shared__ float s[20000]; s[threadIdx.x] = *x; *x = s[3]; }', "too much shared"),
    ],
)
def test_nvccs_diagnostics_are_reported(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nvcc.compile_cubin(source, "sm_80")


@needs_nvcc
def test_arch_that_the_compiler_does_not_know_is_an_error_of_the_toolchain() -> None:
    with pytest.raises(ToolchainError, match=r"makes no code for sm_30: it knows .*sm_90"):
        nvcc.compile_cubin(REGISTERS, "sm_30")
    assert nvcc.compiler_for("sm_90a") == nvcc.compiler()


def fake_nvcc(folder: Path, version: str, archs: str) -> Path:
    path = folder / "nvcc"
    folder.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release, V{version}" || echo {archs}\n', encoding="ascii")
    path.chmod(0o755)
    return path


def test_compiler_is_looked_for_on_path_then_where_cuda_home_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    at_home = fake_nvcc(tmp_path / "home" / "bin", "12.8.93", "sm_90 sm_100 sm_70")
    assert nvcc.compiler() == nvcc.Compiler(str(at_home), "12.8.93", ("sm_70", "sm_90", "sm_100"))
    assert nvcc.compiler_for("sm_70").version == "12.8.93"
    on_path = fake_nvcc(tmp_path / "path", "13.0.88", "sm_90")
    assert nvcc.compiler().path == str(on_path)
    with pytest.raises(ToolchainError, match="makes no code for sm_70"):
        nvcc.compiler_for("sm_70")


def test_compiler_of_pypi_is_among_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia" / "cu13" / "bin").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tmp_path / "nvidia" / "cu13" / "bin" in list(nvcc._places())


def test_without_a_compiler_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc, "_places", lambda: iter([tmp_path]))
    with pytest.raises(ToolchainError, match=r"no CUDA compiler.*kerneldecl\[cuda\]"):
        nvcc.compiler_for("sm_90")


RANKED = """#include <cuda/barrier>
#include <cooperative_groups.h>
#ifdef __CUDACC_RTC__
using cuda::std::uint8_t;
#else
#include <cstdint>
#endif
__forceinline__ __device__ int rank() {
    namespace cg = cooperative_groups;
    return cg::this_thread_block().thread_rank();
}
extern "C" __global__ void kernel(int* out) { out[rank()] = %s; }
"""


@needs_nvcc
@needs_nvdisasm
@pytest.mark.parametrize(("op", "dtype"), at({1}, [("min", "float16"), ("max", "bfloat16"), ("max", "float16"), ("min", "bfloat16")]))
def test_the_maximum_of_two_16_bit_numbers_is_one_instruction(op: str, dtype: str, tmp_path: Path) -> None:
    """As TVM writes it, each waits for a comparison and a choice."""
    rule = load_rule(ARCHS.parent.parent, "reduce").of(ARCHS.parent.parent, {"op": op, "shape": (512, 1024), "axes": (1,), "dtype": dtype})
    mod = canonical.lower(rule)
    rows: dict[str, Value] = {"strided": False, "chunks": 1, "rows": 4, "threads": 32, "unroll": 4, "width": 8}
    schedule = gpu_reduce.apply(mod, rows, H200)
    assert schedule is not None
    code = sass(nvcc.compile_cubin(cuda_source(schedule.mod, H200, "kd_main"), "sm_90", nvcc.FAST_MATH_FLAGS).content, tmp_path)
    assert "HMNMX" in code
    assert not re.search(r"\b(HSETP2|SEL)\b", code)


@pytest.mark.slow
@needs_nvcc
@needs_nvdisasm
def test_older_gpus_have_no_such_instruction_and_keep_the_comparison(tmp_path: Path) -> None:
    source = """#include <cuda_fp16.h>
__device__ half max(half a, half b)
{
  return __hgt(__half(a), __half(b)) ? a : b;
}
extern "C" __global__ void kernel(half* out, half x) { *out = max(*out, x); }
"""
    code = {arch: sass(nvcc.compile_cubin(source, arch).content, tmp_path) for arch in ("sm_75", "sm_80", "sm_90a")}
    assert {arch: "HSETP2" in each for arch, each in code.items()} == {"sm_75": True, "sm_80": False, "sm_90a": False}
    assert "HMNMX" in code["sm_80"]


@needs_nvcc
@pytest.mark.parametrize(
    ("value", "slow"),
    at({0}, [("rank()", 0), ("cooperative_groups::this_grid().size()", 1), ("(int)sizeof(cuda::barrier<cuda::thread_scope_block>)", 1)]),
)
def test_slow_headers_are_read_where_something_of_them_is_used(value: str, slow: int) -> None:
    source = RANKED % value
    assert nvcc.drop_slow_headers(source).count("#include <c") == 1 + slow
    assert "kernel" in nvcc.compile_cubin(source, "sm_90a").usage
