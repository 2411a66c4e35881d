"""Owns the check of the machine: what kerneldecl needs, what was found, and what to do about the rest.

Knows nothing of what a workspace declares.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kerneldecl.errors import DeclarationError, ToolchainError
from kerneldecl.hardware import host
from kerneldecl.hardware.cuda_driver import read_gpus
from kerneldecl.hardware.propose_arch import proposed_arch
from kerneldecl.plugins.find import HOST, plugin_names
from kerneldecl.plugins.load import load_arch
from kerneldecl.toolchain import cxx, nvcc
from kerneldecl.toolchain.versions import is_cuda

LEAST_DISK_BYTES = 2 << 30
_PACKAGES = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}
# With a tvm-ffi that does not fit, TVM imports and compiles but dies when it serialises IR. Workers import TVM without torch, too.
_PAIR = """\
import sys
sys.modules["torch"] = None
import tvm
from tvm import te
tvm.ir.load_json(tvm.ir.save_json(tvm.tirx.IntImm("int32", 1)))
"""


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    is_ok: bool
    found: str
    advice: str = ""
    """Advice; empty where there is nothing to do."""
    is_needed: bool = True
    """False: a build on the host works without it."""


def examine(folder: Path, toolchain: Mapping[str, str]) -> list[Check]:
    """Return all checks. The pair of TVM and tvm-ffi is tried in a separate process, since a bad pair crashes."""
    versions = [_version(tool, toolchain[tool]) for tool in _PACKAGES]
    return [_python(), *versions, _pair(), _compiler(), _host(), _gpu(folder), _cuda_compiler(toolchain["cuda"]), _disk(folder)]


def proposal(folder: Path) -> str:
    """Return an arch file for the first GPU that has none, or else for the first one; raise ToolchainError where there is no GPU."""
    elsewhere = "run this where the GPU is, or start from a file that `kerneldecl archs` names"
    try:
        gpus = read_gpus()
    except ToolchainError as error:
        raise ToolchainError(f"{error}; {elsewhere}") from None
    if not gpus:
        raise ToolchainError(f"the NVIDIA driver shows no GPU to this process; {elsewhere}")
    known = _known_models(folder)
    return proposed_arch(next((gpu for gpu in gpus if gpu.model not in known), gpus[0]))


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 11), version, "" if sys.version_info >= (3, 11) else "use Python 3.11 or newer")


def _version(tool: str, declared: str) -> Check:
    package = _PACKAGES[tool]
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Check(tool, False, "not installed", f'pip install "{package}=={declared}"')
    same = installed == declared
    return Check(tool, same, installed, "" if same else f'{declared} is declared: pip install "{package}=={declared}"')


def _pair() -> Check:
    result = subprocess.run([sys.executable, "-P", "-c", _PAIR], capture_output=True, text=True, timeout=120, check=False)
    if result.returncode == 0:
        return Check("tvm with tvm_ffi", True, "serialise and read back IR")
    last_line = (result.stderr.strip().splitlines() or [""])[-1]
    found = f"killed by signal {-result.returncode}" if result.returncode < 0 else last_line[:200]
    return Check("tvm with tvm_ffi", False, found, "install the pair that kerneldecl pins: pip install --force-reinstall kerneldecl")


def _compiler() -> Check:
    try:
        path = cxx.compiler()
    except ToolchainError as error:
        return Check("C++ compiler", False, "none", str(error))
    lines = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines() or [""]
    return Check("C++ compiler", True, f"{path}: {lines[0]}")


def _host() -> Check:
    arch = host.detect()
    cpu = arch.the_cpu
    caches = f"L1d {cpu.l1d_bytes >> 10} KiB, L2 {cpu.l2_bytes >> 10} KiB a core, L3 {cpu.l3_bytes >> 20} MiB"
    level = dict(arch.tvm_target).get("mcpu", "")
    return Check("host", True, f"{arch.model}: {cpu.cores} cores, {level or 'x86-64'}, vectors of {cpu.vector_bytes} bytes, {caches}")


def _gpu(folder: Path) -> Check:
    path = shutil.which("nvidia-smi")
    if path is None:
        return Check("NVIDIA GPU", False, "no driver", is_needed=False)
    query = [path, "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    found = result.stdout.strip().replace("\n", "; ") or result.stderr.strip()
    models = [line.partition(",")[0].strip() for line in result.stdout.splitlines()] if result.returncode == 0 else []
    return Check("NVIDIA GPU", result.returncode == 0, found, unknown_models(models, _known_models(folder)), is_needed=False)


def _cuda_compiler(declared: str) -> Check:
    """Check the compiler of entries for GPUs; without it, only those cannot be built."""
    try:
        found = nvcc.compiler()
    except ToolchainError as error:
        return Check("CUDA compiler", False, "none", f"for entries for GPUs: {error}", is_needed=False)
    shown = f"{found.path}: CUDA {found.version}, {found.archs[0]} to {found.archs[-1]}"
    if is_cuda(found.version, declared):
        return Check("CUDA compiler", True, shown, is_needed=False)
    return Check("CUDA compiler", False, shown, f"{declared} is declared: put it first on PATH", is_needed=False)


def unknown_models(models: Sequence[str], known: set[str]) -> str:
    """Return what to do about GPUs without an arch; empty where each has one."""
    missing = [model for model in dict.fromkeys(models) if model not in known]
    return f"no arch is for {', '.join(missing)}: kerneldecl doctor --propose-arch > archs/NAME.toml" if missing else ""


def _known_models(folder: Path) -> set[str]:
    """Return the models of the arch files; mistakes in a file are reported by `check`."""
    models: set[str] = set()
    for name in plugin_names("archs", folder):
        if name != HOST:
            with contextlib.suppress(DeclarationError):
                models.add(load_arch(folder, name).model)
    return models


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    advice = "" if free >= LEAST_DISK_BYTES else f"free some space in {folder}: builds need {LEAST_DISK_BYTES >> 30} GiB"
    return Check("disk", not advice, f"{free / (1 << 30):.1f} GiB free in {folder}", advice)
