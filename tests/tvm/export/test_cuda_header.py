"""A record gives one header: it compiles in programs by nvcc alone, to the code that was measured."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench_support.exported import compile_flags
from support.compilers import needs_nvcc, needs_nvdisasm, sass
from support.exports import OF_EACH_KIND, entries, exported, header, instructions, scheduled
from support.repository import REPOSITORY

from kerneldecl.compiler import canonical, cpu
from kerneldecl.compiler.cuda import cuda_program
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.declare.document import declare
from kerneldecl.export.host_calls import KernelCall, TensorMap, Workspace, host_calls
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import wgmma_attention
from kerneldecl.toolchain import nvcc

STREAM_K = "matmul_float16[layout=nt,m=8192,n=8192,k=8192]@h200"
_MANY = [name for name in OF_EACH_KIND if name != "softmax@h200"]


@pytest.mark.slow
def test_the_host_of_a_stream_k_gemm_is_read_whole() -> None:
    """Workspaces, a kernel in front, descriptors, and a launch with clusters and PDL, in TVM's order."""
    host = host_calls(cuda_program(scheduled(entries()[STREAM_K]), entries()[STREAM_K].arch, "k").host, ["A", "B", "C"])
    assert [type(each) for each in host.calls] == [KernelCall, TensorMap, TensorMap, TensorMap, KernelCall]
    assert host.workspaces == (Workspace("partial_sums_workspace", 4 * 4325376), Workspace("flags_workspace1", 4 * 264))
    zeroing, rows, columns, stored, gemm = host.calls
    assert isinstance(zeroing, KernelCall)
    assert isinstance(gemm, KernelCall)
    assert zeroing.arguments == ("flags_workspace1",)
    assert (gemm.cluster, gemm.grid, gemm.is_pdl) == ((2, 1, 1), (132, 1, 1), True)
    assert set(gemm.arguments) == {"flags_workspace1", "partial_sums_workspace", "rows_map", "columns_map", "store_map"}
    for each, address in ((rows, "A"), (columns, "B"), (stored, "C")):
        assert isinstance(each, TensorMap)
        assert (each.address, each.shape, each.strides_bytes) == (address, (8192, 8192), (16384,))


@pytest.mark.slow
def test_the_host_of_float8_attention_is_read_whole() -> None:
    """A kernel in front transposes V into a workspace, which a descriptor then names: its address is no argument's."""
    workload = next(each for each in declare(REPOSITORY / "benchmarks/attention").workloads if dict(each.attrs)["dtype"] == "float8_e4m3fn")
    arch, attrs = entries()[STREAM_K].arch, dict(workload.attrs)
    mod = canonical.lower(load_rule(REPOSITORY, "attention").of(REPOSITORY, attrs))
    [proposal] = wgmma_attention.propose(iter_space(mod), arch, 1)
    made = cpu.apply_candidate(REPOSITORY, mod, proposal.candidate, arch)
    assert made is not None
    names = [f"argument{at}" for at in range(len(canonical.signature_of(mod["main"])))]
    host = host_calls(cuda_program(made.mod, arch, "k").host, names)
    transpose, *maps, attention = host.calls
    assert isinstance(transpose, KernelCall)
    assert isinstance(attention, KernelCall)
    [workspace] = host.workspaces
    assert workspace.name in transpose.arguments
    addresses = [each.address for each in maps if isinstance(each, TensorMap)]
    assert len(addresses) == len(maps) == 4
    assert workspace.name in addresses
    assert {*addresses} - {workspace.name} <= {*names}


def test_what_the_host_does_beside_launches_is_not_exported() -> None:
    import tvm

    call = tvm.tirx.call_packed("somebody.elses.function", 1)
    with pytest.raises(ValueError, match="cannot be exported"):
        host_calls(tvm.tirx.Evaluate(call), [])


@needs_nvcc
@needs_nvdisasm
@pytest.mark.parametrize("name", ["softmax@h200", *(pytest.param(name, marks=pytest.mark.slow) for name in _MANY)])
def test_a_header_compiles_to_the_code_that_was_measured(name: str, tmp_path: Path) -> None:
    entry = entries()[name]
    program = cuda_program(scheduled(entry), entry.arch, "kernel")
    measured = nvcc.compile_cubin(program.source, program.arch, program.flags).content
    made = _compiled([header(entry, tmp_path)], tmp_path, "-cubin")
    assert instructions(sass(made.read_bytes(), tmp_path)) == instructions(sass(measured, tmp_path))


@pytest.mark.slow
@needs_nvcc
def test_two_files_of_a_program_include_two_headers_each(tmp_path: Path) -> None:
    """No name of one is in the way of another's, of its own in another file, or of the program's own macros."""
    headers = [header(entries()[entry], tmp_path, name) for entry, name in (("softmax@h200", "first"), ("gemv_i4@h200", "second"))]
    included = "".join(f'#include "{each.name}"\n' for each in headers)
    kept = "#define uint 7\n" + included + "static_assert(uint == 7 && first_workspace_bytes == 0);\n"
    calls = "first(0, nullptr, nullptr) + second(0, nullptr, nullptr, nullptr, nullptr)"
    (tmp_path / "one.cu").write_text(f"{kept}int other();\nint main() {{ return {calls} + other(); }}\n")
    (tmp_path / "two.cu").write_text(f"{included}int other() {{ return {calls}; }}\n")
    command = [nvcc.compiler().path, *compile_flags(headers[0]), "-Werror", "all-warnings", "-o", "program", "one.cu", "two.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not _needs_driver(tmp_path / "program")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on PATH")
def test_the_example_project_compiles(tmp_path: Path) -> None:
    made = header(entries()[STREAM_K], tmp_path, "projection")
    example = REPOSITORY / "docs/examples/cmake"
    settings = [f"-DHEADER={made}", f"-DCMAKE_CUDA_COMPILER={nvcc.compiler().path}"]
    for command in (["cmake", "-S", str(example), "-B", "build", *settings], ["cmake", "--build", "build"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not _needs_driver(tmp_path / "build/projection")


@pytest.mark.slow
def test_every_recorded_winner_is_exported() -> None:
    """Not a case for each: to know the entries takes a plan, which every process that collects tests would make."""
    declared = "static inline cudaError_t exported(cudaStream_t stream, "
    assert entries()
    assert [name for name, entry in entries().items() if declared not in exported(entry)] == []


@needs_nvcc
@pytest.mark.slow
def test_host_code_of_all_headers_compiles(tmp_path: Path) -> None:
    """All in one program, whose device code stays PTX; machine code of each kind is compiled by another test."""
    headers = [header(entry, tmp_path, f"kernel_{at}") for at, entry in enumerate(entries().values())]
    locked = tomllib.loads((REPOSITORY / "workloads.lock").read_text())["entry"]
    # One whose policy proposes what no GPU has measured yet has no record: a build ranks what was, and keeps that to itself.
    whole = {entry["name"] for entry in locked if entry["name"].endswith("@h200") and not {"measured", "unmeasured"} & entry.keys()}
    assert len(whole) > 50
    assert {*entries()} >= whole
    sized = [f"kernel_{at}_workspace_bytes" for at, path in enumerate(headers) if f"kernel_{at}_workspace_bytes" in path.read_text()]
    made = _compiled(
        headers, tmp_path, "-cuda", ["-std=c++17", "--expt-relaxed-constexpr", "-gencode", "arch=compute_90a,code=compute_90a"]
    )
    assert sized
    assert all(name in made.read_text() for name in sized)


def _compiled(headers: list[Path], folder: Path, form: str, flags: Sequence[str] = ()) -> Path:
    """Return what nvcc makes of a file that includes the headers: a cubin, or the host's code; by default with the first one's flags."""
    source, made = folder / "program.cu", folder / "program.out"
    source.write_text("".join(f'#include "{each.name}"\n' for each in headers))
    command = [nvcc.compiler().path, *(flags or compile_flags(headers[0])), form, "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def _needs_driver(program: Path) -> bool:
    return "libcuda.so" in subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
