"""The table of tensor-core shapes checks itself, and its lookups answer for what is not in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.repository import REPOSITORY

from kerneldecl.analysis import hopper_limits, tensor_cores
from kerneldecl.analysis.tensor_cores import TABLE, TensorCoreShape
from kerneldecl.plugins.load import load_arch

ROOT = REPOSITORY
FLOAT16 = tensor_cores.shape_of("wgmma", "float16")
INT8 = tensor_cores.shape_of("wgmma", "int8")


@pytest.mark.parametrize(
    ("shape", "flaw"),
    [
        (FLOAT16, {"tile": (64, 8, 32)}),
        (FLOAT16, {"tile": (16, 8, 16)}),
        (FLOAT16, {"n_choices": (16, 8)}),
        (FLOAT16, {"n_choices": (8, 8)}),
        (FLOAT16, {"n_choices": (12,)}),
        (FLOAT16, {"accum_dtypes": ()}),
        (FLOAT16, {"accum_dtypes": ("int32",)}),
        (INT8, {"accum_dtypes": ("float32",)}),
        (INT8, {"needs_contiguous_k": False}),
    ],
)
def test_a_wrong_row_is_refused(shape: TensorCoreShape, flaw: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        replace(shape, **flaw)


def test_a_row_that_stands_twice_is_refused() -> None:
    with pytest.raises(AssertionError, match="one row"):
        tensor_cores._check((*TABLE, TABLE[0]))


def test_lookups_answer_for_what_is_in_the_table() -> None:
    assert tensor_cores.accumulators("mma.sync", "float16") == ("float32", "float16")
    assert tensor_cores.accumulators("wgmma", "tfloat32") == ("float32",)
    assert tensor_cores.first_capability("mma.sync") == (8, 0)
    assert tensor_cores.first_capability("wgmma") == (9, 0)
    assert tensor_cores.n_choices("wgmma", "bfloat16") == tuple(range(8, 257, 8))
    assert {"float16", "bfloat16", "int8", "uint8", "float64"} < set(tensor_cores.operand_dtypes("mma.sync"))
    assert "tfloat32" not in tensor_cores.operand_dtypes("mma.sync")


def test_lookups_answer_for_what_is_not_in_the_table() -> None:
    assert tensor_cores.shape_of("wgmma", "float64") is None
    assert tensor_cores.accumulators("mma.sync", "tfloat32") == ()
    assert tensor_cores.n_choices("mma.sync", "float32") == ()


@pytest.mark.parametrize(("columns", "count"), [(8, 1), (32, 1), (48, 1), (64, 1), (224, 1), (256, 2), (40, 0), (72, 0), (240, 0)])
def test_int8_columns_take_one_wgmma_or_two_of_half_the_width(columns: int, count: int) -> None:
    """240 would be two of 120, which is no multiple of 16, and 72 three of 24."""
    assert tensor_cores.wgmma_instructions("int8", columns) == count


@pytest.mark.parametrize("arch", ["h200", "a100-80gb", "rtx-4090"])
def test_gpus_have_rates_for_the_operands_of_their_unit(arch: str) -> None:
    gpu = load_arch(ROOT, arch).the_gpu
    assert gpu.compute_capability >= tensor_cores.first_capability("mma.sync")
    unit: tensor_cores.Unit = "wgmma" if gpu.wgmma_arch else "mma.sync"
    of_every_chip = set(tensor_cores.operand_dtypes(unit)) - {"float64"}
    for dtype in of_every_chip:
        has_shape = tensor_cores.shape_of(unit, dtype, gpu.compute_capability) is not None
        assert (gpu.tensor_rate(dtype) > 0) == has_shape


@pytest.mark.parametrize(
    ("dtype", "capability", "shape"),
    [
        ("float16", (7, 5), "m16n8k8"),
        ("float16", (8, 6), "m16n8k16"),
        ("int8", (7, 5), "m8n8k16"),
        ("uint8", (9, 0), "m16n8k32"),
        ("float64", (8, 0), "m8n8k4"),
        ("float8_e5m2", (8, 9), "m16n8k32"),
    ],
)
def test_a_gpu_gets_the_newest_shape_that_it_has(dtype: str, capability: tuple[int, int], shape: str) -> None:
    found = tensor_cores.shape_of("mma.sync", dtype, capability)
    assert found is not None
    assert found.name == shape


@pytest.mark.parametrize(
    ("dtype", "capability"), [("bfloat16", (7, 5)), ("float16", (7, 0)), ("float64", (7, 5)), ("float8_e4m3fn", (8, 6))]
)
def test_older_gpus_lack_the_instruction(dtype: str, capability: tuple[int, int]) -> None:
    assert tensor_cores.shape_of("mma.sync", dtype, capability) is None


def test_preferred_limits_are_within_the_hard_ones() -> None:
    hard = hopper_limits.MAX_ACCUM_REGISTERS
    assert hopper_limits.PREFERRED_ACCUM_REGISTERS.keys() == hard.keys()
    assert all(preferred <= hard[consumers] for consumers, preferred in hopper_limits.PREFERRED_ACCUM_REGISTERS.items())


def test_accumulators_of_all_warpgroups_fit_an_sm() -> None:
    for consumers, registers in hopper_limits.MAX_ACCUM_REGISTERS.items():
        threads = consumers * hopper_limits.WARPGROUP_THREADS
        assert threads * registers < hopper_limits.SM_REGISTERS


@pytest.mark.parametrize(
    ("chunks", "free_bytes", "count"), [(8, 8 * 8192, 4), (6, 8 * 8192, 2), (4, 8 * 8192 - 1, 2), (3, 8 * 8192, 1), (4, 2 * 8192 - 1, 0)]
)
def test_epilogue_buffers_divide_the_chunks_and_fit(chunks: int, free_bytes: int, count: int) -> None:
    assert hopper_limits.fitting_epilogue_buffers(chunks, consumers=2, free_bytes=free_bytes) == count
