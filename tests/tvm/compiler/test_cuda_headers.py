"""What CUDA's headers declare: the same cubins as with the headers, kept between processes, never waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compilers import needs_nvcc
from support.thinned import at

from kerneldecl.compiler import cuda_headers
from kerneldecl.compiler.cuda_headers import headers_for
from kerneldecl.store.lock import exclusive
from kerneldecl.toolchain import nvcc

ARCH = "sm_90a"
NUMBERS = """
#ifdef __CUDACC_RTC__
  #include <cuda/std/cstdint>
#else
  #include <cstdint>
  #include <type_traits>
  #include <cuda.h>
#endif
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <math_constants.h>
#include <sm_61_intrinsics.h>
template <typename T> __device__ T larger(T a, T b) { return std::is_same<T, __half>::value ? __hmax(a, b) : a > b ? a : b; }
extern "C" __global__ void __launch_bounds__(128) numbers(
    __half* a, const __nv_bfloat16* __restrict__ b, float* c, int* d, __nv_fp8_e4m3* e, const __grid_constant__ CUtensorMap map) {
  __shared__ float held[128];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  held[threadIdx.x] = expf(c[i]) + max(__half2float(a[i]), 0.5f) + tanh(1.0 * c[i]);
  __syncthreads();
  a[i] = larger(a[i] * __float2half(held[threadIdx.x ^ 1]) + __half(CUDART_INF_F), a[0]);
  e[i] = __nv_fp8_e4m3(__bfloat162float(b[i] - __float2bfloat16(1.0f)));
  atomicAdd(d, __dp4a(d[i], d[i + 1], min(d[i + 2], (int)(uintptr_t)&map)));
  c[i] = __shfl_xor_sync(0xffffffff, held[i & 127], 1) + (i < INT32_MAX ? rsqrtf(c[i]) : __sinf(c[i]));
}
"""


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a place for what is kept, in which nothing is, to a process that has read nothing."""
    monkeypatch.setattr(cuda_headers, "_known", {})
    monkeypatch.setattr(cuda_headers, "temporary_folder", lambda: tmp_path)
    return tmp_path


def not_read(*_: object) -> str:
    raise AssertionError("the headers are read")


@needs_nvcc
@pytest.mark.parametrize(("arch", "flags"), at({0}, [("sm_80", nvcc.FLAGS), (ARCH, nvcc.FAST_MATH_FLAGS)]))
def test_a_source_gives_the_cubin_that_it_gives_with_the_headers(arch: str, flags: tuple[str, ...]) -> None:
    headers = headers_for(arch, flags)
    assert headers is not None
    short = nvcc.shortened(NUMBERS, headers)
    assert short is not None
    assert len(short) < 400_000, "a fraction of the headers' 1.5 MB"
    assert nvcc.compile_cubin(NUMBERS, arch, flags, headers) == nvcc.compile_cubin(NUMBERS, arch, flags)


@needs_nvcc
def test_a_source_with_another_header_is_compiled_with_all_of_them() -> None:
    source = (
        '#include <cooperative_groups.h>\nextern "C" __global__ void f(int* a) { a[cooperative_groups::this_grid().thread_rank()] = 1; }\n'
    )
    headers = headers_for(ARCH, nvcc.FLAGS)
    assert headers is not None
    assert nvcc.shortened(source, headers) is None
    assert "f" in nvcc.compile_cubin(source, ARCH, nvcc.FLAGS, headers).usage


@needs_nvcc
def test_a_wrong_source_is_refused_with_the_line_that_it_has() -> None:
    source = '#include <cstdint>\nextern "C" __global__ void f(int* a) {\n  a[0] = missing;\n}\n'
    with pytest.raises(ValueError, match=r'kernel\.cu\(3\): error: identifier "missing" is undefined'):
        nvcc.compile_cubin(source, ARCH, nvcc.FLAGS, headers_for(ARCH, nvcc.FLAGS))


@needs_nvcc
def test_the_next_process_reads_what_is_kept(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = headers_for(ARCH, nvcc.FLAGS)
    [kept] = empty.glob("*.json")
    monkeypatch.setattr(nvcc, "preprocessed_headers", not_read)
    assert headers_for(ARCH, (*nvcc.FLAGS, *nvcc.TIRX_FLAGS)) is first, "no header sees what ptxas is told"
    monkeypatch.setattr(cuda_headers, "_known", {})
    again = headers_for(ARCH, nvcc.FLAGS)
    assert again is not first
    assert again == first
    with pytest.raises(AssertionError, match="are read"):
        headers_for("sm_80", nvcc.FLAGS)
    assert list(empty.glob("*.json")) == [kept]


@needs_nvcc
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"blocks": [], "declarations": [["int x;", 0, [], 1, 2]], "macros": {}}'])
def test_what_is_damaged_is_read_again(content: str, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc, "preprocessed_headers", lambda *_: "int held;\n")
    first = headers_for(ARCH, nvcc.FLAGS)
    [kept] = empty.glob("*.json")
    whole = kept.read_text()
    kept.write_text(content)
    monkeypatch.setattr(cuda_headers, "_known", {})
    assert headers_for(ARCH, nvcc.FLAGS) == first
    assert kept.read_text() == whole


@needs_nvcc
def test_nothing_is_waited_for(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc, "preprocessed_headers", lambda *_: "int held;\n")
    headers_for(ARCH, nvcc.FLAGS)
    [kept] = empty.glob("*.json")
    kept.unlink()
    monkeypatch.setattr(cuda_headers, "_known", {})
    with exclusive(kept.with_suffix(".lock"), "testing", lambda _: None):
        assert headers_for(ARCH, nvcc.FLAGS) is None
    assert headers_for(ARCH, nvcc.FLAGS) is not None
