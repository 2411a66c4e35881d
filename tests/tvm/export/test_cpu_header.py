"""A record of a CPU's entry gives a header that g++ compiles to the artifact's kernel, without TVM."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.thinned import only

from kerneldecl.artifact.kernels import kernel_of, load_library
from kerneldecl.compiler import canonical, cpu
from kerneldecl.export.argument import Function, arguments_of
from kerneldecl.export.cpu_header import CpuKernel, cpu_header
from kerneldecl.hardware import host
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule
from kerneldecl.templates import cpu_matmul, cpu_rowwise
from kerneldecl.toolchain import cxx

GEMM = {"m": 96, "n": 64, "k": 128, "layout": "nt", "dtype": "float32", "epilogue": ["bias", "relu"]}
TILES = {"block_m": 32, "block_n": 64, "block_k": 64, "tile_m": 4, "tile_n": 16, "order": "nm", "pack_m": False, "pack_n": True}
CASES = {
    "packed GEMM": ("matmul", GEMM, cpu_matmul, TILES),
    "softmax": ("softmax", {"shape": [64, 100]}, cpu_rowwise, {"parallel": True, "vectors": 2}),
}
"""A GEMM with a workspace and parallel loops; rows with exponentials."""
_PROGRAM = """
#include "first.h"
#include "second.h"
extern "C" int run(void** a) {{ return first({arrays}) | second({arrays}); }}
"""


@pytest.mark.parametrize("case", only(("packed GEMM",), CASES))
def test_a_header_gives_what_the_artifact_gives(case: str, tmp_path: Path) -> None:
    """Two headers in two files of one library: no symbol of one is in the way of another."""
    mod, signature = _scheduled(case)
    library = _program(mod, signature, tmp_path)
    drawn = np.random.default_rng(1)
    arrays = [drawn.standard_normal(each["shape"]).astype(each["dtype"]) for each in signature["inputs"]]
    shape = signature["outputs"][0]["shape"]
    expected, found = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    _kernel(mod, tmp_path)(*arrays, expected)
    given = [*(array.ctypes.data for array in arrays), found.ctypes.data]
    assert library.run((ctypes.c_void_p * len(given))(*given)) == 0
    assert expected.any()
    assert (found == expected).all()
    assert library.run((ctypes.c_void_p * len(given))()) == -1


def test_a_kernel_that_needs_more_of_tvm_is_refused() -> None:
    assembly = "kerneldecl_f:\n\tcall\tTVMBackendParallelBarrier@PLT\n"
    with pytest.raises(ValueError, match="TVMBackendParallelBarrier of TVM's runtime, which headers do not provide"):
        cpu_header(CpuKernel(Function("f", (), {}, ()), assembly, "kerneldecl_f", "x86-64"))


def _scheduled(case: str) -> tuple[Any, dict[str, Any]]:
    rule, attrs, template, params = CASES[case]
    mod = canonical.lower(load_rule(STANDARD, rule).of(STANDARD, attrs))
    schedule = template.apply(mod, params, host.detect())
    assert schedule is not None
    shapes = canonical.signature_of(mod["main"])
    named = [{"name": f"array{at}", "shape": list(shape), "dtype": dtype} for at, (shape, dtype) in enumerate(shapes)]
    return schedule.mod, {"inputs": named[:-1], "outputs": named[-1:]}


def _program(mod: Any, signature: dict[str, Any], folder: Path) -> Any:
    for name in ("first", "second"):
        symbol = f"kerneldecl_{name}"
        assembly = cpu.assembly(mod, host.detect(), symbol)
        made = CpuKernel(Function(name, ("a test",), {"flops": 1.0}, arguments_of(signature)), assembly, symbol, "this CPU")
        (folder / f"{name}.h").write_text(cpu_header(made), encoding="utf-8")
    arrays = ", ".join(f"static_cast<float*>(a[{at}])" for at in range(len(signature["inputs"]) + 1))
    (folder / "one.cpp").write_text(_PROGRAM.format(arrays=arrays))
    (folder / "two.cpp").write_text(_PROGRAM.format(arrays=arrays).replace("run(", "run_again("))
    flags = ["-O1", "-g", "-std=c++17", "-pthread", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC"]
    cxx.run([cxx.compiler(), *flags, "-o", "program.so", "one.cpp", "two.cpp"], folder, "compiling headers")
    needed = subprocess.run(["ldd", str(folder / "program.so")], capture_output=True, text=True, check=True).stdout
    assert "tvm" not in needed
    return ctypes.CDLL(str(folder / "program.so"))


def _kernel(mod: Any, folder: Path) -> Any:
    (folder / "kernel.o").write_bytes(cpu.compile_object(mod, host.detect(), "kd_kernel"))
    cxx.link_shared_library(folder / "kernel.so", [folder / "kernel.o"])
    return kernel_of(load_library(folder / "kernel.so"), "kd_kernel")
