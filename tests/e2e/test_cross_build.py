"""Kernels for CPUs of aarch64 are built on another machine, linked by its cross compiler, and are right where an emulator runs them.

Knows nothing of how fast they are.
"""

from __future__ import annotations

import functools
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.repository import REPOSITORY
from support.spaces import Space
from tvm_ffi.libinfo import find_include_path

from kerneldecl.artifact.load import load
from kerneldecl.errors import ToolchainError
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
PROCESSORS = {"neoverse-n1": "neoverse-n1", "neoverse-v2": "max"}
"""QEMU's processor for each arch: its own, or one that has all instructions."""
CODES = {"float": 2, "int": 0, "uint": 1}
"""DLPack's type codes (dlpack.h, DLDataTypeCode)."""
HEAD = """\
edition = 1
[artifact]
name = "arm"
version = "0.1.0"
[target.neoverse-n1]
arch = "neoverse-n1"
[target.neoverse-v2]
arch = "neoverse-v2"
[defaults]
top_k = 1
"""
ENTRIES: Mapping[str, Mapping[str, Any]] = {
    "gemm": {"rule": "matmul", "m": 33, "n": 64, "k": 100, "layout": "nt", "epilogue": ["bias", "gelu_tanh"]},
    "bytes": {"rule": "matmul", "m": 16, "n": 32, "k": 64, "dtype": "int8"},
    "rows": {"rule": "softmax", "shape": [12, 100], "dtype": "float16"},
    "norm": {"rule": "layer_norm", "shape": [6, 256]},
    "filters": {"rule": "conv2d", "n": 1, "h": 10, "w": 10, "c": 8, "f": 16, "kh": 3, "kw": 3, "padding": 1},
    "sums": {"rule": "reduce", "op": "sum", "shape": [16, 200], "axes": [1]},
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} missing: apt-get install g++-aarch64-linux-gnu qemu-user"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="builds across machines from x86-64"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace whose entries were built for two CPUs of aarch64."""
    blocks = ("\n".join(["[[workload]]", f'name = "{name}"', *_lines(attrs)]) for name, attrs in ENTRIES.items())
    space = Space(tmp_path_factory.mktemp("cross")).write({"workloads.toml": HEAD + "\n".join(blocks) + "\n"})
    space.run("build", "--jobs", "2")
    return space


def _lines(attrs: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in attrs.items()]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program that calls a kernel in place of TVM's runtime."""
    made = tmp_path_factory.mktemp("program") / "run_kernel"
    source = REPOSITORY / "tests/support/run_kernel.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-rdynamic", f"-I{find_include_path()}"]
    subprocess.run([COMPILER, *flags, "-o", str(made), str(source), "-ldl"], check=True)
    return made


@functools.cache
def _manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("arch", PROCESSORS)
def test_the_library_is_for_the_other_machine_and_no_other(built: Space, arch: str) -> None:
    folder = built.root / "dist/arm-0.1.0" / arch
    library = folder / _manifest(folder)["library"]
    said = subprocess.run(["readelf", "-h", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "AArch64" in said
    assert "DYN (Shared object file)" in said
    assert {each["name"] for each in _manifest(folder)["entries"]} == {*ENTRIES}
    with pytest.raises(ToolchainError, match=r"holds code for aarch64; this machine is x86_64$"):
        load(folder)


@pytest.mark.parametrize("arch", PROCESSORS)
@pytest.mark.parametrize("name", ENTRIES)
def test_kernels_are_right_where_an_emulator_runs_them(built: Space, program: Path, arch: str, name: str, tmp_path: Path) -> None:
    folder = built.root / "dist/arm-0.1.0" / arch
    entry = next(each for each in _manifest(folder)["entries"] if each["name"] == name)
    rule = load_rule(STANDARD, entry["rule"]).of(STANDARD, entry["attrs"])
    given = rule.inputs(np.random.default_rng(3))
    expected = np.asarray(rule.reference(*given))
    arrays = [*given, np.full(expected.shape, 77, entry["outputs"][0]["dtype"])]
    found = _run(program, PROCESSORS[arch], (folder / _manifest(folder)["library"], entry["symbol"]), arrays, tmp_path)
    difference = np.abs(found[-1].astype(np.float64) - expected.astype(np.float64)).max() / np.abs(expected.astype(np.float64)).max()
    assert difference <= rule.tolerance()
    for before, after in zip(given, found, strict=False):
        assert np.array_equal(before, after), "writes to an input"


def _run(program: Path, processor: str, kernel: tuple[Path, str], arrays: Sequence[Any], folder: Path) -> list[Any]:
    """Return what the arrays hold after the call of a kernel under the emulator."""
    described = []
    for at, array in enumerate(arrays):
        array.tofile(folder / f"{at}.bin")
        code = next(code for name, code in CODES.items() if array.dtype.name.startswith(name))
        described.append(f"{folder / f'{at}.bin'}:{code}:{8 * array.itemsize}:{','.join(map(str, array.shape))}")
    command = [EMULATOR, "-cpu", processor, "-L", LIBRARIES, str(program), str(kernel[0]), kernel[1], *described]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [np.fromfile(folder / f"{at}.bin", array.dtype).reshape(array.shape) for at, array in enumerate(arrays)]


PROGRAM = """
#include "gemm.h"
#include <cstdio>
#include <vector>
static std::vector<float> read(const char* name, int count) {
  std::vector<float> values(count);
  std::FILE* file = std::fopen(name, "rb");
  if (!file || std::fread(values.data(), 4, count, file) != static_cast<std::size_t>(count)) std::exit(2);
  std::fclose(file);
  return values;
}
int main() {
  auto a = read("a.bin", 33 * 100), b = read("b.bin", 64 * 100), bias = read("bias.bin", 64);
  std::vector<float> c(33 * 64);
  int failed = gemm(a.data(), b.data(), bias.data(), c.data());
  std::FILE* file = std::fopen("c.bin", "wb");
  std::fwrite(c.data(), 4, c.size(), file);
  std::fclose(file);
  return failed;
}
"""


def test_an_exported_header_is_for_the_other_machine_alone(built: Space, tmp_path: Path) -> None:
    built.run("export", "gemm@neoverse-n1", "-o", str(tmp_path / "gemm.h"))
    (tmp_path / "program.cpp").write_text(PROGRAM, encoding="utf-8")
    said = re.search(r"^// compile with: g\+\+ (.*)$", (tmp_path / "gemm.h").read_text(encoding="utf-8"), re.MULTILINE)
    assert said is not None
    flags = ["-o", "program", "program.cpp"]
    refused = subprocess.run(["g++", *flags], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert '"gemm is for aarch64"' in refused.stderr
    subprocess.run([COMPILER, *said[1].split(), *flags], cwd=tmp_path, check=True)
    rule = load_rule(STANDARD, "matmul").of(STANDARD, {name: value for name, value in ENTRIES["gemm"].items() if name != "rule"})
    given = rule.inputs(np.random.default_rng(5))
    for name, array in zip(("a", "b", "bias"), given, strict=True):
        array.tofile(tmp_path / f"{name}.bin")
    subprocess.run([EMULATOR, "-cpu", "neoverse-n1", "-L", LIBRARIES, "./program"], cwd=tmp_path, check=True)
    expected = np.asarray(rule.reference(*given))
    found = np.fromfile(tmp_path / "c.bin", "float32").reshape(expected.shape)
    assert np.abs(found - expected).max() <= rule.tolerance() * np.abs(expected).max()
