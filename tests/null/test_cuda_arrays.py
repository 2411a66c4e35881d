"""Local arrays in CUDA source: which are split, where, and which are not."""

from __future__ import annotations

import pytest

from kerneldecl.toolchain import scalarize_arrays
from kerneldecl.toolchain.scalarize_arrays import scalarized

KERNEL = """\
__device__ float helper() {
  float sums_ptr[8];
  return sums_ptr[0] + sums_ptr[4];
}
extern "C" __global__ void kernel(float* Y_ptr) {
  alignas(64) float sums_ptr[8];
  sums_ptr[0] = (sums_ptr[0] + sums_ptr[5]);
  *(float4*)(Y_ptr + 4) = *(float4*)(sums_ptr + 4);
  %s
}
"""


@pytest.fixture(autouse=True)
def _splits_kernels_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalarize_arrays, "MANY_ACCESSES", 1)


def test_elements_of_a_vector_stay_together_and_the_last_array_is_declared_first() -> None:
    kernel = scalarized(KERNEL % "Y_ptr[0] = sums_ptr[0];")
    assert kernel.partition("extern")[2].splitlines() == [
        ' "C" __global__ void kernel(float* Y_ptr) {',
        "  alignas(64) float sums_ptr_from_4[4];",
        "  alignas(64) float sums_ptr_from_0[1];",
        "  sums_ptr_from_0[0] = (sums_ptr_from_0[0] + sums_ptr_from_4[1]);",
        "  *(float4*)(Y_ptr + 4) = *(float4*)(sums_ptr_from_4 + 0);",
        "  Y_ptr[0] = sums_ptr_from_0[0];",
        "}",
    ]


def test_other_functions_are_left_alone() -> None:
    kernel = KERNEL % ""
    assert scalarized(kernel).partition("extern")[0] == kernel.partition("extern")[0]


@pytest.mark.parametrize(
    "use",
    [
        pytest.param("Y_ptr[0] = sums_ptr[threadIdx.x];", id="variable index"),
        pytest.param("Y_ptr[0] = *(half2*)(sums_ptr + 2);", id="another type"),
        pytest.param("load(sums_ptr);", id="whole"),
        pytest.param("Y_ptr[0] = *(sums_ptr + 1);", id="pointer"),
        pytest.param("{\n  float sums_ptr[2];\n  sums_ptr[1] = Y_ptr[0];\n  }", id="another array of that name"),
    ],
)
def test_an_array_with_another_use_is_not_split(use: str) -> None:
    kernel = KERNEL % use
    assert scalarized(kernel) == kernel


def test_kernels_of_one_source_are_split_one_by_one() -> None:
    first, second = KERNEL % "", 'extern "C" __global__ void other(float* Y_ptr) {\n  float sums_ptr[8];\n  load(sums_ptr);\n}\n'
    assert scalarized(first + second) == scalarized(first) + second


def test_few_accesses_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalarize_arrays, "MANY_ACCESSES", 100)
    kernel = KERNEL % ""
    assert scalarized(kernel) == kernel
