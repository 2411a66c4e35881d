"""Owns compiling CUDA source to cubins: which nvcc, with which flags, and the resources that it reports of a kernel.

Knows nothing of TVM, of what kernels compute or of where cubins are kept.

Arithmetic is CUDA's default: IEEE division and square root, denormals kept, library functions of full precision. TVM
compiles with --use_fast_math instead; here results are verified against a reference in float64, and a declared
float32 exp must be one. FAST_MATH_FLAGS are for kernels whose inputs and outputs have 16 bits: there fast math's error of
some ulp of float32 disappears in the rounding to 16 bits, and a float16 softmax takes a fourth of the instructions.

Most of the time of a small kernel goes into CUDA's headers, 1.5 MB with those of C++. Where `Headers` are given, the
declarations that the source needs are compiled in their place, without nvcc itself (`nvcc_steps`); the cubin is the same, byte for byte.

NVRTC, which has its headers built in, would be as fast, without a host compiler. It is not used: it gives other code, with addresses of 64
bits in shared memory (CUDA 13.0), and linking needs a host compiler anyway. PyPI's nvidia-cuda-nvcc is a compiler for machines without a
toolkit.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kerneldecl.errors import ToolchainError
from kerneldecl.toolchain import nvcc_steps
from kerneldecl.toolchain.declarations import Headers, needed
from kerneldecl.toolchain.last_words import last_words
from kerneldecl.toolchain.nvcc_steps import OUTPUT, SOURCE, Steps

# TVM's code calls operators of half and bfloat16, which CUDA's headers would otherwise leave out.
FLAGS = (
    "-cubin",
    "-O3",
    "-std=c++17",
    "--disable-warnings",
    "--expt-relaxed-constexpr",
    *(f"-U__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_OPERATORS", "BFLOAT16_CONVERSIONS")),
    "--ptxas-options=-v",
)
FAST_MATH_FLAGS = (*FLAGS, "--use_fast_math")
TIRX_FLAGS = ("--ptxas-options=--register-usage-level=10",)
"""Further flags for TIRx, as TVM uses: ptxas may use more registers where that hides latencies."""

_LOSS = re.compile(r"\(C75\d\d\) Potential Performance Loss: (?P<message>[^\n]*)")
"""ptxas's warning that wgmma loses its asynchrony: wgmma instructions are serialised, or setmaxnreg is ignored."""
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?Used (?P<registers>\d+) registers(?:[^\n]*?, (?P<smem>\d+) bytes smem)?", re.DOTALL
)
_RANK = re.compile(r"namespace cg = cooperative_groups;\s*return cg::this_thread_block\(\)\.thread_rank\(\);")
"""TVM's code for a thread's rank in its block."""
_PLAIN_RANK = "return threadIdx.z * blockDim.y * blockDim.x + threadIdx.y * blockDim.x + threadIdx.x;"
_SLOW_HEADERS = (
    ("#include <cuda/barrier>", "cuda::"),
    ("#include <cooperative_groups.h>", "cooperative_groups"),
    ("#include <mma.h>", "wmma"),
)
"""Headers that TVM includes, each with the text by which a use is recognised: those for TIRx take nvcc two seconds, mma.h a sixth of what a
GEMM takes it."""
_KERNEL = 'extern "C" __global__'
_MADE_OF_EIGHT = "make_ulonglong4("
_MAKE_EIGHT = """\
template <typename T>
__device__ __forceinline__ unsigned long long kd_pair(T low, T high) {
  static_assert(sizeof(T) == 4, "half of an element of ulonglong4");
  return *reinterpret_cast<unsigned*>(&low) | static_cast<unsigned long long>(*reinterpret_cast<unsigned*>(&high)) << 32;
}
template <typename T>
__device__ __forceinline__ ulonglong4 make_ulonglong4(T a, T b, T c, T d, T e, T f, T g, T h) {
  return make_ulonglong4(kd_pair(a, b), kd_pair(c, d), kd_pair(e, f), kd_pair(g, h));
}
"""
"""Elements keep their bits: one that is converted to an integer is another number, with floats nearly 0."""
_FOR_NVRTC = re.compile(r"#ifdef __CUDACC_RTC__.*?#else", re.DOTALL)
HEADERS = (
    "cstdint",
    "type_traits",
    "cuda.h",
    "cuda_fp16.h",
    "cuda_bf16.h",
    "cuda_fp8.h",
    "math_constants.h",
    "sm_61_intrinsics.h",
)
"""Headers that TVM and templates include, beside cuda_runtime.h, which nvcc includes itself."""
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"](?P<name>[^>"]*)[>"].*\n?', re.MULTILINE)
_NO_RUNTIME_HEADER = "-D__CUDA_RUNTIME_H__"
"""What cuda_runtime.h defines so that it is read once."""
_COMPARE_AND_SELECT = re.compile(r"return __h(?P<than>[gl])t\((?:__half\()?a\)?, (?:__half\()?b\)?\) \? a : b;")
"""TVM's code for max and min of 16-bit floats: compare and select."""
_MIN_MAX_INTRINSIC = """#if __CUDA_ARCH__ >= 800  // PTX ISA, "max"
  return __h{}(a, b);
#else
  {}
#endif"""
FLAGS_BESIDES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
"""Variables with further flags, which nvcc reads."""
_STACK = re.compile(r"Function properties for (?P<name>\w+)\n\s*(?P<stack>\d+) bytes stack frame, (?P<spill>\d+) bytes spill stores")


@dataclass(frozen=True)
class Compiler:
    """An nvcc on this machine."""

    path: str
    version: str
    """Version, such as 13.0.88."""
    archs: tuple[str, ...]
    """Targets that it compiles for, as sm_NN without the suffix letters."""


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel as ptxas reports them; dynamic shared memory is not among them."""

    registers: int
    """32-bit registers per thread."""
    stack_bytes: int
    """Local memory per thread: arrays with variable indices, and spills."""
    spill_bytes: int
    """Bytes that each thread spills to local memory for want of registers."""
    smem_bytes: int
    """Static shared memory per block."""


@dataclass(frozen=True)
class Cubin:
    """Device code for one arch, and the resources of each of its kernels."""

    content: bytes = field(repr=False)
    usage: Mapping[str, Usage]


def compiler() -> Compiler:
    """Return the first nvcc on PATH, in CUDA_PATH or CUDA_HOME, in /usr/local/cuda* or from PyPI; raise ToolchainError without one."""
    for path in _places():
        if found := shutil.which("nvcc", path=str(path)):
            return _examined(found)
    places = "PATH, CUDA_PATH, CUDA_HOME, /usr/local/cuda* and PyPI's nvidia-cuda-nvcc"
    raise ToolchainError(f'no CUDA compiler: no nvcc in {places}; install a CUDA toolkit, or `pip install "kerneldecl[cuda]"`')


def compiler_for(arch: str) -> Compiler:
    """Return the compiler if it compiles for the arch (`sm_90`, `sm_90a`); raise ToolchainError otherwise."""
    found = compiler()
    if arch.rstrip("af") not in found.archs:
        known = f"it knows {', '.join(found.archs)}"
        raise ToolchainError(f"CUDA {found.version} ({found.path}) makes no code for {arch}: {known}; use a toolkit that does")
    return found


def _places() -> Iterator[Path | str]:
    yield os.environ.get("PATH", "")
    for name in ("CUDA_PATH", "CUDA_HOME"):
        if folder := os.environ.get(name):
            yield Path(folder) / "bin"
    yield Path("/usr/local/cuda/bin")
    yield from (folder / "bin" for folder in sorted(Path("/usr/local").glob("cuda-*"), key=_release, reverse=True))
    # PyPI's packages share one folder for each major release of CUDA.
    spec = importlib.util.find_spec("nvidia")
    for packages in (spec and spec.submodule_search_locations) or ():
        yield from (folder / "bin" for folder in sorted(Path(packages).glob("cu[0-9]*"), key=_release, reverse=True))


def _release(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", folder.name))


@functools.cache
def _examined(path: str) -> Compiler:
    version = re.search(r"\bV(\d+(?:\.\d+)+)", _output(path, "--version"))
    archs = tuple(sorted(_output(path, "--list-gpu-code").split(), key=lambda arch: _release(Path(arch))))
    if version is None or not archs:
        raise ToolchainError(f"{path} does not say which CUDA it is of; is it NVIDIA's compiler?")
    return Compiler(path, version[1], archs)


def _output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ToolchainError(f"`{' '.join(command)}` failed: {last_words(result)}")
    return result.stdout


def compile_cubin(source: str, arch: str, flags: Sequence[str] = FLAGS, headers: Headers | None = None) -> Cubin:
    """Compile CUDA C++ to a cubin, faster with what `preprocessed_headers` gives for the arch and flags.

    Raise ToolchainError without a compiler for the arch, and ValueError with the compiler's message if the source is wrong
    or ptxas serialises its wgmma instructions. The content depends on source, arch, flags and nvcc's version alone.
    """
    short = shortened(source, headers) if headers else None
    content, report = (short and _compiled_short(short, arch, flags)) or _compiled(prepared(source), arch, flags)
    if loss := _LOSS.search(report):
        raise ValueError(f"ptxas: {loss['message'].strip()}")
    return Cubin(content, _usage(report))


def compile_ptx(source: str, arch: str, flags: Sequence[str] = FLAGS) -> str:
    """Return the PTX of CUDA C++, for reading; raise as `compile_cubin` does."""
    content, _ = _compiled(prepared(source), arch, ["-ptx", *(flag for flag in flags if flag != "-cubin")])
    return content.decode()


def preprocessed_headers(arch: str, flags: Sequence[str] = FLAGS) -> str:
    """Return HEADERS as nvcc reads them for the arch, with macros; raise as `compile_cubin` does."""
    source = "".join(f"#include <{name}>\n" for name in HEADERS)
    with tempfile.TemporaryDirectory() as folder:
        _run(source, arch, [*flags, "-Xcompiler", "-dD", "--keep"], Path(folder))
        return (Path(folder) / "kernel.cpp1.ii").read_text(encoding="utf-8")


def shortened(source: str, headers: Headers) -> str | None:
    """Return a source with the declarations that it needs in the place of headers; None where it includes others than HEADERS."""
    text = _FOR_NVRTC.sub("#ifndef __CUDACC__\n#else", prepared(source))
    if any(found["name"] not in HEADERS for found in _INCLUDE.finditer(text)):
        return None
    text = _INCLUDE.sub("", text)
    return needed(headers, text) + text


def _compiled_short(text: str, arch: str, flags: Sequence[str]) -> tuple[bytes, str] | None:
    """Return what `_compiled` does of a shortened source; None where it fails: the headers will tell whether the source is wrong."""
    steps = _steps(compiler_for(arch).path, arch, tuple(flags), tuple(os.environ.get(name, "") for name in FLAGS_BESIDES))
    if steps and nvcc_steps.suits(steps, text):
        return nvcc_steps.compiled(steps, text)
    try:
        return _compiled(text, arch, [*flags, _NO_RUNTIME_HEADER])
    except ValueError:
        return None


@functools.cache
def _steps(path: str, arch: str, flags: tuple[str, ...], besides: tuple[str, ...]) -> Steps | None:  # noqa: ARG001  part of the key
    """Return what an nvcc runs for a shortened source; None where it does not say so."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return nvcc_steps.steps_of(_run("", arch, [*flags, _NO_RUNTIME_HEADER, *nvcc_steps.LISTED], Path(folder)))
        except ValueError:
            return None


def _compiled(text: str, arch: str, flags: Sequence[str]) -> tuple[bytes, str]:
    """Return what nvcc makes of a text, and what it reports."""
    with tempfile.TemporaryDirectory() as folder:
        report = _run(text, arch, flags, Path(folder))
        return (Path(folder) / OUTPUT).read_bytes(), report


def _run(text: str, arch: str, flags: Sequence[str], folder: Path) -> str:
    """Have nvcc compile a text in a folder; return what it reports, raise ValueError where it fails."""
    command = [compiler_for(arch).path, *flags, f"-arch={arch}", "-o", OUTPUT, SOURCE]
    (folder / SOURCE).write_text(text, encoding="utf-8")
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ValueError(f"nvcc: {last_words(result)}")
    return result.stderr


def disassembled(cubin: bytes) -> str:
    """Return the SASS of a cubin; raise ToolchainError where there is no nvdisasm."""
    path = next(filter(None, (shutil.which("nvdisasm", path=str(place)) for place in _places())), None)
    if path is None:
        raise ToolchainError("no nvdisasm on PATH or beside nvcc; install a CUDA toolkit, or `pip install nvidia-cuda-nvdisasm`")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _output(path, "-c", file.name)


def prepared(source: str) -> str:
    """Return the source as it is compiled."""
    return with_vectors_of_eight(drop_slow_headers(use_min_max_intrinsics(source)))


def with_vectors_of_eight(source: str) -> str:
    """Return the source with the constructor that TVM calls for eight equal or counted 32-bit elements and CUDA lacks, where it is called.

    A constant of float32 becomes such a vector beside eight of float16; TVM 0.27 computes bfloat16 in such vectors on GPUs without it.
    """
    is_missing = _MADE_OF_EIGHT in source and _MAKE_EIGHT not in source
    return source.replace(_KERNEL, _MAKE_EIGHT + _KERNEL, 1) if is_missing else source


def use_min_max_intrinsics(source: str) -> str:
    """Return the source with max and min of 16-bit floats as intrinsics of one instruction, which ignore NaN as those of float32 do.

    Compare and select stays in an `#if` for GPUs without the instruction.
    """
    return _COMPARE_AND_SELECT.sub(lambda found: _MIN_MAX_INTRINSIC.format("max" if found["than"] == "g" else "min", found[0]), source)


def drop_slow_headers(source: str) -> str:
    """Return the source without slow headers of which nothing but a thread's rank is used; instructions stay, registers may differ."""
    source = _RANK.sub(_PLAIN_RANK, source)
    for header, used_by in _SLOW_HEADERS:
        rest = source.replace(header, "")
        if used_by not in _FOR_NVRTC.sub("", rest):
            source = rest
    return source


def _usage(report: str) -> dict[str, Usage]:
    """Return the resources of each kernel from the output of `ptxas -v`."""
    stacks = {match["name"]: (int(match["stack"]), int(match["spill"])) for match in _STACK.finditer(report)}
    return {
        match["name"]: Usage(int(match["registers"]), *stacks[match["name"]], smem_bytes=int(match["smem"] or 0))
        for match in _ENTRY.finditer(report)
    }
