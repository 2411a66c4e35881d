"""Device code that TVM generates itself: it is compiled for the model's GPU, and a user's own compiler callback stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tvm
import tvm_ffi
from compilers import needs_nvcc

from kerneldecl.compiler import nvcc_callback

COMPILE = "tvm_callback_cuda_compile"
SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }\n'


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have each test begin and end without a function that compiles."""
    monkeypatch.setattr(nvcc_callback, "_registered", set())
    tvm_ffi.registry.remove_global_func(COMPILE)
    yield
    tvm_ffi.registry.remove_global_func(COMPILE)


def target(arch: str) -> tvm.target.Target:
    return tvm.target.Target({"kind": "cuda", "arch": arch})


@needs_nvcc
def test_what_tvm_generates_is_compiled_for_the_models_target() -> None:
    for arch in ("sm_80", "sm_90a"):
        nvcc_callback.compile_device_code(target(arch))
        code = bytes(tvm_ffi.get_global_func(COMPILE)(SOURCE))
        assert code.startswith(b"\x7fELF")
        assert arch.encode() in code
    with target("sm_89"):
        assert b"sm_89" in bytes(tvm_ffi.get_global_func(COMPILE)(SOURCE))


def test_a_users_own_compiler_stays() -> None:
    tvm_ffi.register_global_func(COMPILE, lambda _: b"own", override=True)
    nvcc_callback.compile_device_code(target("sm_90"))
    assert bytes(tvm_ffi.get_global_func(COMPILE)(SOURCE)) == b"own"
