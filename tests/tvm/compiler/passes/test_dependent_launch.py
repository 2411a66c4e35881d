"""Kernels with PDL: they wait before they touch memory, only on GPUs that support it, and prefetch their first inputs to L2."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import Kernel
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at, only
from support.wgmma_cases import PLAIN

from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical, cpu
from kerneldecl.compiler.cuda import compile_cuda_object, cuda_source
from kerneldecl.compiler.passes.dependent_launch import TAG, WAIT, balanced_smem_bytes, pdl_kernels
from kerneldecl.compiler.passes.registers import narrowed
from kerneldecl.model import Arch, Candidate, Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies.gpu.time_model import occupancy
from kerneldecl.store.local import LocalStore
from kerneldecl.toolchain import nvcc

ROOT = REPOSITORY
H200, A100 = load_arch(ROOT, "h200"), load_arch(ROOT, "a100-80gb")
ROWS = {"strided": False, "chunks": 1, "rows": 4, "threads": 32, "unroll": 4, "width": 8}
TILE = {
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
KERNELS: dict[str, tuple[str, dict[str, Any], str, dict[str, Value]]] = {
    "elementwise": ("elementwise", {"op": "add", "shape": (64, 512)}, "gpu_elementwise", {"threads": 128, "unroll": 1, "width": 8}),
    "softmax": ("softmax", {"shape": (64, 512)}, "gpu_rowwise", {"in_registers": True, "rows": 4, "threads": 32, "width": 8}),
    "sum": ("reduce", {"op": "sum", "shape": (64, 4096), "axes": (1,)}, "gpu_reduce", ROWS),
    "two kernels": ("reduce", {"op": "sum", "shape": (8, 65536), "axes": (1,)}, "gpu_reduce", {**ROWS, "chunks": 4}),
    "gemv_i4": ("gemv_i4", {"n": 64, "k": 2048}, "gpu_gemv", {**ROWS, "tile": 2}),
    "gemm": ("matmul", {"m": 128, "n": 128, "k": 128, "layout": "nt"}, "gpu_matmul_tc", TILE),
}
MEMORY = re.compile(r"^\s*(?:@%p\d+ )?(?:ld|st|cp|red|atom)\.(?!param)")


def scheduled(name: str, arch: Arch) -> Any:
    rule, attrs, template, params = KERNELS[name]
    mod = canonical.lower(load_rule(ROOT, rule).of(ROOT, {**attrs, "dtype": "float16"}))
    schedule = cpu.apply_candidate(ROOT, mod, Candidate.of(template, params), arch)
    assert schedule is not None
    return schedule.mod


def ptx(name: str, folder: Path) -> list[str]:
    """Return the PTX of each kernel."""
    (folder / "kernel.cu").write_text(cuda_source(scheduled(name, H200), H200, "kd_main"))
    flags = [flag for flag in nvcc.FAST_MATH_FLAGS if flag != "-cubin" and "ptxas" not in flag]
    subprocess.run([nvcc.compiler().path, "-ptx", *flags, "-arch=sm_90", "kernel.cu"], cwd=folder, check=True)
    return (folder / "kernel.ptx").read_text().split(".entry ")[1:]


@needs_nvcc
@pytest.mark.parametrize("name", only(("two kernels", "gemm"), KERNELS))
def test_a_kernel_waits_before_it_touches_memory(name: str, tmp_path: Path) -> None:
    """nvcc may move what is read only: it must not move it over the wait."""
    bodies = ptx(name, tmp_path)
    assert len(bodies) == (2 if name == "two kernels" else 1)
    for body in bodies:
        lines = body.splitlines()
        (wait,) = (at for at, line in enumerate(lines) if "griddepcontrol.wait" in line)
        (let_go,) = (at for at, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line)
        assert wait < let_go < min(at for at, line in enumerate(lines) if MEMORY.match(line))


@needs_nvcc
@pytest.mark.parametrize(("name", "loads"), at({1}, [("elementwise", 2), ("softmax", 2)]))
def test_a_kernel_prefetches_its_first_inputs_before_it_waits(name: str, loads: int, tmp_path: Path) -> None:
    """A softmax's row is still loaded once, and kept in registers."""
    (body,) = ptx(name, tmp_path)
    before, after = body.split("griddepcontrol.wait", 1)
    assert 1 <= before.count("prefetch.global.L2") <= loads
    assert "prefetch" not in after
    assert len(re.findall(r"\bld\.global", after)) == loads


def test_what_all_threads_share_is_not_prefetched() -> None:
    """Prefetches of one line by 1242 warps wait for each other in L2: a batch norm took twice as long as a product of as many elements."""
    mod = canonical.lower(load_rule(ROOT, "batch_norm").of(ROOT, {"shape": (24, 8, 8, 184), "axis": -1, "dtype": "bfloat16"}))
    schedule = cpu.apply_candidate(ROOT, mod, Candidate.of("gpu_elementwise", {"threads": 192, "unroll": 1, "width": 8}), H200)
    assert schedule is not None
    source = cuda_source(schedule.mod, H200, "kd_main")
    assert source.count("prefetch.global.L2") == 1, "of X alone, not of the four parameters of each channel"


def test_blocks_that_load_in_loops_prefetch_nothing() -> None:
    assert "prefetch" not in cuda_source(scheduled("sum", H200), H200, "kd_main")


# One thread a row: the emulator knows no exchange between lanes outside of mma.sync.
ALONE: dict[str, Value] = {"threads": 1, "rows": 32, "width": 8}
WHOLE: dict[str, Value] = {"strided": False, "chunks": 1}
EMULATED: dict[str, tuple[str, dict[str, Any], str, dict[str, Value]]] = {
    "rows": ("softmax", {"shape": (160, 48)}, "gpu_rowwise", {**ALONE, "in_registers": True}),
    "reduction": (
        "reduce",
        {"op": "sum", "shape": (160, 32), "axes": (1,)},
        "gpu_reduce",
        {**ALONE, **WHOLE, "unroll": 4},
    ),
    "the last block is a part of one": (
        "elementwise",
        {"op": "add", "shape": (37, 50)},
        "gpu_elementwise",
        {"threads": 128, "unroll": 2, "width": 2},
    ),
}


@needs_nvcc
@pytest.mark.parametrize("name", at({2}, EMULATED))
def test_prefetches_are_within_the_arguments(name: str) -> None:
    """The emulator checks every prefetch."""
    kind, attrs, template, params = EMULATED[name]
    rule = load_rule(ROOT, kind).of(ROOT, {**attrs, "dtype": "float16"})
    applied = cpu.apply_candidate(ROOT, canonical.lower(rule), Candidate.of(template, params), H200)
    assert applied is not None
    few = replace(H200.the_gpu, sm_count=1, max_threads_per_sm=128)
    kernel = Kernel(narrowed(applied.mod)["main"], lambda device: pdl_kernels(device, few))
    assert "blockIdx.x) < " in kernel.source, "later blocks prefetch nothing"
    assert "prefetch.global.L2" in kernel.source
    [out] = rule.signature().outputs
    inputs = rule.inputs(np.random.default_rng(1))
    result = kernel(*inputs, np.full(out.shape, np.nan, out.dtype))[-1]
    assert relative_error(result, np.asarray(rule.reference(*inputs))) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize("name", only(("two kernels", "gemm"), KERNELS))
def test_how_a_kernel_is_launched(name: str, tmp_path: Path) -> None:
    compiled = compile_cuda_object(scheduled(name, H200), H200, "kd_main", LocalStore(tmp_path))
    # In the table that TVM's runtime reads, each kernel has the tag once.
    assert compiled.content.count(TAG.encode()) == len(compiled.launches)
    without = compile_cuda_object(scheduled(name, A100), A100, "kd_main", LocalStore(tmp_path))
    assert TAG.encode() not in without.content
    assert [(launch.grid, launch.block) for launch in compiled.launches] == [(launch.grid, launch.block) for launch in without.launches]
    for launch, other in zip(compiled.launches, without.launches, strict=True):
        assert launch.dynamic_smem_bytes >= other.dynamic_smem_bytes
        assert bool(launch.dynamic_smem_bytes) == bool(other.dynamic_smem_bytes)


@needs_nvcc
@pytest.mark.parametrize(("dependent", "stream", "launches"), at({2}, [(0, 0, 1), (1, 0, 1), (1, 1, 2)]))
def test_a_kernel_that_declares_pdl_is_launched_with_it(dependent: int, stream: int, launches: int, tmp_path: Path) -> None:
    mod = canonical.lower(load_rule(ROOT, "matmul").of(ROOT, {"m": 1000, "n": 1000, "k": 256, "layout": "nt", "dtype": "float16"}))
    candidate = Candidate.of("wgmma_matmul", PLAIN | {"pdl": dependent, "stream_k": stream})
    schedule = cpu.apply_candidate(ROOT, mod, candidate, H200)
    assert schedule is not None
    compiled = compile_cuda_object(schedule.mod, H200, "kd_main", LocalStore(tmp_path))
    assert len(compiled.launches) == launches
    # The preceding kernel, which clears flags, is launched with PDL as well.
    assert compiled.content.count(TAG.encode()) == launches * dependent


@pytest.mark.parametrize("blocks", [1, 64, 132, 133, 256, 264, 265, 528, 1000, 5000])
@pytest.mark.parametrize("smem_bytes", [1024, 20_000, 49_152, 65_536, 98_304, 116_000, 232_448])
def test_blocks_launched_early_are_spread_over_sms(blocks: int, smem_bytes: int) -> None:
    """No SM holds more blocks than an even distribution where all fit at once; otherwise the request is unchanged."""
    gpu = H200.the_gpu
    per_sm, resident = -(-blocks // gpu.sm_count), occupancy(gpu, 32, 32, smem_bytes)
    requested = balanced_smem_bytes(gpu, blocks, smem_bytes)
    assert smem_bytes <= requested <= gpu.smem_per_block_optin_bytes
    assert occupancy(gpu, 32, 32, requested) == min(per_sm, resident)


@pytest.mark.parametrize("name", KERNELS)
def test_gpus_before_capability_9_have_no_such_instructions(name: str) -> None:
    assert WAIT not in cuda_source(scheduled(name, A100), A100, "kd_main")
