"""Owns compiling CUDA source to cubins: which nvcc, with which flags, and what it says a kernel uses.

Knows nothing of TVM, of what kernels compute or of where cubins are kept.

Arithmetic is CUDA's default: IEEE division and square root, denormals kept, library functions of full precision. TVM
compiles with --use_fast_math instead; here results are verified against a reference in float64, and who declares a
float32 exp expects one. QUICK_FLAGS are for what is float32 only in between: some units in the last place of 24 bits are
lost in the rounding to 16 bits, and a softmax of float16 takes a fourth of the instructions.

NVRTC could compile as well, without a host compiler. It is not used: it takes other headers, gives other cubins, and
linking needs a host compiler anyway. PyPI's nvidia-cuda-nvcc is a compiler for machines without a toolkit.
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
QUICK_FLAGS = (*FLAGS, "--use_fast_math")
TIRX_FLAGS = ("--ptxas-options=--register-usage-level=10",)
"""Beside the others for TIRx, with which TVM compiles it: ptxas may use more registers where that hides latencies."""

_LOSS = re.compile(r"\(C75\d\d\) Potential Performance Loss: (?P<words>[^\n]*)")
"""What ptxas says where it takes from wgmma what it is for: multiplications wait for one another, or setmaxnreg is ignored."""
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?Used (?P<registers>\d+) registers(?:[^\n]*?, (?P<smem>\d+) bytes smem)?", re.DOTALL
)
_RANK = re.compile(r"namespace cg = cooperative_groups;\s*return cg::this_thread_block\(\)\.thread_rank\(\);")
"""What TVM makes of a thread's rank in its block."""
_RANK_BY_HAND = "return threadIdx.z * blockDim.y * blockDim.x + threadIdx.y * blockDim.x + threadIdx.x;"
_SLOW_HEADERS = (("#include <cuda/barrier>", "cuda::"), ("#include <cooperative_groups.h>", "cooperative_groups"))
"""Headers that TVM includes for TIRx and that take nvcc two seconds, with what stands where something of them is used."""
_FOR_NVRTC = re.compile(r"#ifdef __CUDACC_RTC__.*?#else", re.DOTALL)
_EXTREME = re.compile(r"return __h(?P<than>[gl])t\((?:__half\()?a\)?, (?:__half\()?b\)?\) \? a : b;")
"""What TVM makes of the larger and of the smaller of two numbers of 16 bits: a comparison and a choice, which waits for it."""
_WHERE_THERE_IS_ONE = """#if __CUDA_ARCH__ >= 800  // PTX ISA, "max"
  return __h{}(a, b);
#else
  {}
#endif"""
_STACK = re.compile(r"Function properties for (?P<name>\w+)\n\s*(?P<stack>\d+) bytes stack frame, (?P<spill>\d+) bytes spill stores")


@dataclass(frozen=True)
class Compiler:
    """An nvcc that was found, and what it says of itself."""

    path: str
    version: str
    """Such as 13.0.88."""
    archs: tuple[str, ...]
    """Every sm_NN that it makes code for, without the letters that some of them may carry."""


@dataclass(frozen=True)
class Usage:
    """What one kernel uses as ptxas sees it; shared memory that is asked for at launch is not in it."""

    registers: int
    """Of 32 bits, by each thread."""
    stack_bytes: int
    """Of local memory, by each thread: arrays with indices that vary, and spills."""
    spill_bytes: int
    """Stored by each thread because registers did not suffice."""
    smem_bytes: int
    """Static, by each block."""


@dataclass(frozen=True)
class Cubin:
    """Device code for one arch, and what each of its kernels uses."""

    content: bytes = field(repr=False)
    usage: Mapping[str, Usage]


def compiler() -> Compiler:
    """Return the nvcc on PATH, of CUDA_PATH or CUDA_HOME, of /usr/local/cuda* or from PyPI; raise ToolchainError without one."""
    for path in _places():
        if found := shutil.which("nvcc", path=str(path)):
            return _examined(found)
    places = "PATH, CUDA_PATH, CUDA_HOME, /usr/local/cuda* and PyPI's nvidia-cuda-nvcc"
    raise ToolchainError(f'no CUDA compiler: no nvcc in {places}; install a CUDA toolkit, or `pip install "kerneldecl[cuda]"`')


def compiler_for(arch: str) -> Compiler:
    """Return the compiler if it makes code for the arch (`sm_90`, `sm_90a`); raise ToolchainError otherwise."""
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
        raise ToolchainError(f"`{' '.join(command)}` failed: {_last_words(result)}")
    return result.stdout


def compile_cubin(source: str, arch: str, flags: Sequence[str] = FLAGS) -> Cubin:
    """Compile CUDA C++; raise ToolchainError without a compiler for the arch, ValueError with its words if the source is wrong
    or its use of wgmma is undone.

    One source, arch, set of flags and version of nvcc give one content, in whichever folder or process.
    """
    command = [compiler_for(arch).path, *flags, f"-arch={arch}", "-o", "kernel.cubin", "kernel.cu"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.cu").write_text(prepared(source), encoding="utf-8")
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ValueError(f"nvcc: {_last_words(result)}")
        if loss := _LOSS.search(result.stderr):
            raise ValueError(f"ptxas: {loss['words'].strip()}")
        content = (Path(folder) / "kernel.cubin").read_bytes()
    return Cubin(content, _usage(result.stderr))


def prepared(source: str) -> str:
    """Return the source as it is compiled: `lean` and `direct`."""
    return lean(direct(source))


def direct(source: str) -> str:
    """Return the source with the larger (smaller) of two numbers of 16 bits in one instruction; as in float32, what is none loses.

    GPUs that have no such instruction keep the comparison: nvcc knows what it compiles for.
    """
    return _EXTREME.sub(lambda found: _WHERE_THERE_IS_ONE.format("max" if found["than"] == "g" else "min", found[0]), source)


def lean(source: str) -> str:
    """Return the source without slow headers of which nothing is used but a thread's rank; instructions stay, some name other registers."""
    source = _RANK.sub(_RANK_BY_HAND, source)
    for header, word in _SLOW_HEADERS:
        rest = source.replace(header, "")
        if word not in _FOR_NVRTC.sub("", rest):
            source = rest
    return source


def _last_words(result: subprocess.CompletedProcess[str]) -> str:
    lines = f"{result.stderr}\n{result.stdout}".strip().splitlines() or [f"exit code {result.returncode}, no message"]
    return next((line for line in lines if "error" in line or "fatal" in line), lines[-1]).strip()


def _usage(report: str) -> dict[str, Usage]:
    """Read what `ptxas -v` writes of each kernel."""
    stacks = {match["name"]: (int(match["stack"]), int(match["spill"])) for match in _STACK.finditer(report)}
    return {
        match["name"]: Usage(int(match["registers"]), *stacks[match["name"]], int(match["smem"] or 0)) for match in _ENTRY.finditer(report)
    }
