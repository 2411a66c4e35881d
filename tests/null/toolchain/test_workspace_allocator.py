"""Workspaces are never freed: a CUDA graph that has captured one may use it later."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kerneldecl.errors import ToolchainError
from kerneldecl.toolchain import cuda_objects
from kerneldecl.toolchain.cuda_objects import link_cuda_candidate, link_cuda_library
from kerneldecl.toolchain.cxx import compiler

HOST_CODE = """
#include <cstdint>
extern "C" {
__attribute__((weak)) void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
__attribute__((weak)) int (*__TVMBackendFreeWorkspace)(int, int, void*);
// TVM's host code of a kernel: allocate the workspace, launch, free it.
void NAME(int device_type, uint64_t first, uint64_t second, void** got) {
  got[0] = __TVMBackendAllocWorkspace(device_type, 0, first, 2, 8);
  if (second) got[1] = __TVMBackendAllocWorkspace(device_type, 0, second, 2, 8);
  if (second) __TVMBackendFreeWorkspace(device_type, 0, got[1]);
  __TVMBackendFreeWorkspace(device_type, 0, got[0]);
}
}
"""
RUNTIME = """
#include <cstdint>
#include <cstdlib>
extern "C" {
int freed;
void* TVMBackendAllocWorkspace(int, int, uint64_t bytes, int, int) { return malloc(bytes); }
int TVMBackendFreeWorkspace(int, int, void*) { ++freed; return 0; }
}
"""
CALLS = """
import ctypes, json, sys, threading
runtime, one, other = (ctypes.CDLL(path, mode=mode) for path, mode in zip(sys.argv[1:], (ctypes.RTLD_GLOBAL, 0, 0)))
def call(kernel, first, second=0, device_type=2):
    got = (ctypes.c_void_p * 2)()
    kernel(device_type, ctypes.c_uint64(first), ctypes.c_uint64(second), got)
    return list(got)
def elsewhere():
    found["thread"] = call(one.kd_a, 10_000)[0]
found = {"small": call(one.kd_a, 10_000)[0], "large": call(one.kd_b, 1_000_000)[0], "again": call(one.kd_a, 10_000)[0]}
found |= {"two": call(one.kd_b, 10_000, 10_000), "third": call(other.kd_c, 9_000)[0], "freed": ctypes.c_int.in_dll(runtime, "freed").value}
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
call(one.kd_a, 10_000, device_type=1)
found["freed of the host's"] = ctypes.c_int.in_dll(runtime, "freed").value
print(json.dumps(found))
"""


def compiled(folder: Path, name: str, text: str, *flags: str) -> Path:
    source, output = folder / f"{name}.cpp", folder / f"{name}.o"
    source.write_text(text, encoding="ascii")
    subprocess.run([compiler(), *flags, "-fPIC", "-o", str(output), str(source)], check=True)
    return output


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a fake of TVM's runtime, a library with two kernels' host code and one with a third's, linked as a candidate."""
    folder = tmp_path_factory.mktemp("workspaces")
    a, b, c = (compiled(folder, name, HOST_CODE.replace("NAME", name), "-c") for name in ("kd_a", "kd_b", "kd_c"))
    one, other = folder / "one.so", folder / "other.so"
    link_cuda_library(one, [a, b])
    link_cuda_candidate(other, [c])
    return [compiled(folder, "runtime", RUNTIME, "-shared"), one, other]


def test_workspaces_stay_and_are_used_again(libraries: list[Path]) -> None:
    result = subprocess.run([sys.executable, "-c", CALLS, *map(str, libraries)], capture_output=True, text=True, check=True)
    found = json.loads(result.stdout)
    assert found["large"] != found["small"]
    assert found["again"] == found["small"]
    first, second = found["two"]
    assert first != second
    assert found["thread"] not in {found["small"], found["large"], second}
    assert found["freed"] == 0
    assert found["freed of the host's"] == 1, "TVM's own pool serves CPUs"
    if Path(compiler()).name == "g++":
        assert found["third"] == found["small"], "libraries of a process share a thread's workspaces"


def test_tvms_loader_does_not_find_the_symbols_for_its_own_pool(libraries: list[Path]) -> None:
    ctypes.CDLL(str(libraries[0]), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(libraries[1]))
    assert library.kd_a
    for name in ("__TVMBackendAllocWorkspace", "__TVMBackendFreeWorkspace"):
        with pytest.raises(AttributeError):
            library[name]


def test_kernels_without_a_workspace_are_linked_without_the_allocator(tmp_path: Path) -> None:
    plain = compiled(tmp_path, "plain", 'extern "C" int kd_plain() { return 1; }', "-c")
    link_cuda_library(tmp_path / "plain.so", [plain])
    assert b"kerneldecl_cuda_pages" not in (tmp_path / "plain.so").read_bytes()


def test_a_candidate_without_a_workspace_names_no_library(tmp_path: Path) -> None:
    plain = compiled(tmp_path, "plain", 'extern "C" int kd_plain() { return 1; }', "-c")
    link_cuda_candidate(tmp_path / "plain.so", [plain])
    assert ctypes.CDLL(str(tmp_path / "plain.so")).kd_plain() == 1
    assert b"libstdc++" not in (tmp_path / "plain.so").read_bytes()


def test_a_candidate_is_refused_with_what_the_compiler_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.cpp").write_text("missing\n", encoding="ascii")
    monkeypatch.setattr(cuda_objects, "companion_sources", lambda *_: [str(tmp_path / "wrong.cpp")])
    plain = compiled(tmp_path, "plain", 'extern "C" int kd_plain() { return 1; }', "-c")
    with pytest.raises(ToolchainError, match=r"compiling wrong\.cpp failed: .*missing"):
        link_cuda_candidate(tmp_path / "plain.so", [plain])
