"""Kernels whose static and dynamic shared memory together are more than a block has by default are launched so that it gets them."""

from __future__ import annotations

from pathlib import Path

from support.compilers import needs_nvcc
from support.repository import REPOSITORY

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import Launch, compile_cuda_object
from kerneldecl.model import Arch, Candidate
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.store.local import LocalStore

A100, H200 = load_arch(REPOSITORY, "a100-80gb"), load_arch(REPOSITORY, "h200")
DEFAULT_BYTES = 48 * 1024
TILE = {"block_k": 128, "warps_m": 2, "warps_n": 2, "stages": 2, "split_k": 1, "raster_group": 1, "smem_epilogue": 0, "integers": 1}


def launch(arch: Arch, store: LocalStore, block_m: int, block_n: int) -> Launch:
    attrs = {"m": 2048, "n": 1024, "k": 512, "layout": "packed", "dtype": "int8", "activation_scales": "token"}
    mod = canonical.lower(load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, attrs))
    made = apply_candidate(REPOSITORY, mod, Candidate.of("gpu_matmul_scaled", {**TILE, "block_m": block_m, "block_n": block_n}), arch)
    assert made is not None
    [found] = compile_cuda_object(made.mod, arch, "kernel", store).launches
    return found


@needs_nvcc
def test_more_than_48_kb_in_two_parts_are_asked_for_in_the_dynamic_one(tmp_path: Path) -> None:
    for arch in (A100, H200):
        found = launch(arch, LocalStore(tmp_path), 64, 128)
        # Values as multiplied: 192 rows of 128 bytes and their padding. As stored, in two stages: 64 x 128 and 128 x 64 bytes, and scales.
        assert found.usage.smem_bytes >= 2 * (64 * 128 + 128 * 64) > DEFAULT_BYTES - 192 * (128 + 16)
        assert found.dynamic_smem_bytes >= DEFAULT_BYTES


@needs_nvcc
def test_less_stays_as_it_is(tmp_path: Path) -> None:
    found = launch(A100, LocalStore(tmp_path), 64, 64)
    assert found.usage.smem_bytes + found.dynamic_smem_bytes <= DEFAULT_BYTES


@needs_nvcc
def test_static_memory_counts_among_what_spreads_blocks_evenly_over_sms(tmp_path: Path) -> None:
    found = launch(H200, LocalStore(tmp_path), 128, 64)
    blocks = found.grid[0]
    whole = found.usage.smem_bytes + found.dynamic_smem_bytes + H200.the_gpu.smem_reserved_per_block_bytes
    assert -(-blocks // H200.the_gpu.sm_count) <= H200.the_gpu.smem_per_sm_bytes // whole
