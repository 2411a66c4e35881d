"""Owns the resolution of targets to archs: whose figures the policies get.

Knows nothing of functions, policies or builds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.compiler.cpu import target_of
from kerneldecl.errors import ToolchainError
from kerneldecl.hardware.arch_file import read_arch
from kerneldecl.hardware.cuda_driver import DriverGpu, read_gpus
from kerneldecl.hardware.host import NO_SCATTER
from kerneldecl.hardware.propose_arch import proposed_arch
from kerneldecl.model import Arch, Gpu
from kerneldecl.plugins.find import HOST, plugin_names
from kerneldecl.plugins.load import load_arch

Target = Any
"""A GPU by TVM's Target, a mapping or text of one ({"kind": "cuda", "arch": "sm_90"}, "cuda -arch=sm_90"), an arch of ours
("h200"), or a CUDA."""
_ARCH = re.compile(r"sm_(\d+)(\d)[af]?")
_OPTION = re.compile(r"cuda(?P<options>(?:\s+-{1,2}\w+=\S+)*)\s*")
_PARTITIONS = 4
_DISTINCTIVE = {"l2_cache_size_bytes": "l2_bytes"}
"""Attributes of a target that distinguish GPUs of one compute capability, with the field of Gpu that each equals."""


class CUDA:
    """One NVIDIA GPU as policies see it. Figures come from kerneldecl's arch files; no GPU need be there.

    Attributes have the names that users of fast dlight know; `arch` holds all figures.
    """

    def __init__(self, target: Target = "cuda") -> None:
        """Take the GPU that the target names; where it names only a compute capability, this machine's GPU if it has that one.

        Raise ValueError, with the choices, where that is not exactly one arch.
        """
        self.arch = _one(target, archs_of(target))
        self.target = target_of(self.arch)
        self.is_for_wgmma: bool = target.is_for_wgmma if isinstance(target, CUDA) else _arch_name(target) == (self.gpu.wgmma_arch or None)
        """True where the target's arch name is the variant with wgmma: sm_90a."""

    def __repr__(self) -> str:
        return f"CUDA({self.arch.name!r})"

    @property
    def gpu(self) -> Gpu:
        return self.arch.the_gpu

    @property
    def platform(self) -> str:
        return "CUDA"

    @property
    def sm_version(self) -> int:
        """Compute capability as a number: 90."""
        major, minor = self.gpu.compute_capability
        return 10 * major + minor

    @property
    def compute_capability(self) -> str:
        return str(self.sm_version)

    @property
    def compute_max_core(self) -> int:
        """Streaming multiprocessors."""
        return self.gpu.sm_count

    @property
    def warp_size(self) -> int:
        return self.gpu.warp_size

    @property
    def sm_partition(self) -> int:
        """Schedulers of an SM, each with registers of its own."""
        return _PARTITIONS

    @property
    def smem_cap(self) -> int:
        """Bytes of shared memory that one block may have, with opt-in."""
        return self.gpu.smem_per_block_optin_bytes

    @property
    def max_smem_usage(self) -> int:
        """Bytes of shared memory that the blocks on one SM have together."""
        return self.gpu.smem_per_sm_bytes

    @property
    def reg_cap(self) -> int:
        """Registers of 32 bits that one block may have."""
        return self.gpu.registers_per_block

    @property
    def l2_cache_size_bytes(self) -> int:
        return self.gpu.l2_bytes

    @property
    def transaction_size(self) -> list[int]:
        """Bytes of a DRAM write transaction and of a read transaction."""
        return [32, 128]

    @property
    def bandwidth(self) -> list[float]:
        """Bytes a second of DRAM, and of the shared memory of all SMs."""
        gpu = self.gpu
        return [gpu.dram_bytes_per_s, gpu.smem_bytes_per_clock_per_sm * gpu.sm_count * gpu.clock_hz]


def arch_of(target: Target) -> Arch:
    """Return the arch that a target stands for: a GPU as in `CUDA`, or a CPU by the arch's name or by TVM's target of its processor.

    `host` is this machine's CPU. Raise ValueError where there is none, or more than one.
    """
    if target is None:
        raise ValueError('there is no target; give one, such as "h200" or "host", or run under `with target:`')
    if _is_name(target):
        return load_arch(Path.cwd(), target)
    if (attrs := _llvm_attrs(target)) is not None:
        return _cpu_arch(target, attrs)
    return CUDA(target).arch


def _is_name(target: Target) -> bool:
    return isinstance(target, str) and target in plugin_names("archs", Path.cwd())


def _llvm_attrs(target: Target) -> Mapping[str, Any] | None:
    """Return the attributes of a target for CPUs, None for any other."""
    if isinstance(target, Mapping):
        return target if target.get("kind") == "llvm" else None
    if isinstance(target, str) and target.startswith(("llvm", "{")):
        target = tvm.target.Target(target)
    return dict(target.attrs) if isinstance(target, tvm.target.Target) and target.kind.name == "llvm" else None


def _cpu_arch(target: Target, attrs: Mapping[str, Any]) -> Arch:
    """Return the arch of the target's processor, this machine's before the declared ones."""
    cpus = [arch for name in (HOST, *_cpu_names()) if (arch := load_arch(Path.cwd(), name)).cpu]

    def identity(named: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
        return str(named.get("mcpu", "")), frozenset(map(str, named.get("mattr", ()))) - {NO_SCATTER}

    for arch in cpus:
        if identity(dict(arch.tvm_target)) == identity(attrs):
            return arch
    choices = ", ".join(f"{arch.name} ({dict(arch.tvm_target).get('mcpu', 'no mcpu')})" for arch in cpus)
    raise ValueError(f"no arch is for the processor of target {target}; expected one of {choices}")


def _cpu_names() -> tuple[str, ...]:
    return tuple(name for name in plugin_names("archs", Path.cwd()) if name != HOST)


def archs_of(target: Target) -> tuple[Arch, ...]:
    """Return the archs that a target can stand for; this machine's GPU alone if it is one of them.

    Raise TypeError or ValueError where it is no CUDA target, or no arch has its compute capability.
    """
    if isinstance(target, CUDA):
        return (target.arch,)
    if isinstance(target, str) and target in plugin_names("archs", Path.cwd()) and target != HOST:
        return (_cuda_arch(target),)
    attrs = _attrs(target)
    here = _here()
    if "arch" not in attrs:
        if here is None:
            raise ValueError(f"target {target} names no GPU and this machine has none; expected one of {', '.join(_declared())}")
        return (here,)
    capability = _capability(attrs["arch"])
    if here is not None and here.the_gpu.compute_capability == capability and _agrees(here.the_gpu, attrs):
        return (here,)
    same = [arch for arch in _declared().values() if arch.the_gpu.compute_capability == capability]
    if not same:
        raise ValueError(f"no arch has compute capability {capability[0]}.{capability[1]}; expected one of {', '.join(_declared())}")
    closer = [arch for arch in same if _agrees(arch.the_gpu, attrs)]
    return tuple(closer or same)


def gpu_here() -> DriverGpu | None:
    """Return the first GPU that the driver shows to this process, None where there is none."""
    try:
        return next(iter(read_gpus()), None)
    except ToolchainError:
        return None


def _one(target: Target, archs: tuple[Arch, ...]) -> Arch:
    if len(archs) > 1:
        names = ", ".join(arch.name for arch in archs)
        raise ValueError(f'target {target} can be {names}; name one of them, such as CUDA("{archs[0].name}")')
    return archs[0]


def _cuda_arch(name: str) -> Arch:
    arch = load_arch(Path.cwd(), name)
    if arch.gpu is None:
        raise ValueError(f"arch {name} is a CPU; expected one of {', '.join(_declared())}")
    return arch


def _declared() -> dict[str, Arch]:
    """Return the declared archs of GPUs, by name."""
    archs = (load_arch(Path.cwd(), name) for name in plugin_names("archs", Path.cwd()) if name != HOST)
    return {arch.name: arch for arch in archs if arch.gpu is not None}


def _here() -> Arch | None:
    """Return the arch of this machine's GPU: the declared one of its model, else the driver's figures with assumed rates."""
    gpu = gpu_here()
    if gpu is None:
        return None
    declared = (arch for arch in _declared().values() if arch.model == gpu.model)
    return next(declared, None) or read_arch("here", proposed_arch(gpu).encode(), "the driver's figures of this GPU")


def _arch_name(target: Target) -> str:
    """Return the name of the arch that a target gives; empty where it gives none."""
    return "" if isinstance(target, str) and not _OPTION.fullmatch(target) else str(_attrs(target).get("arch", ""))


def _attrs(target: Target) -> Mapping[str, Any]:
    """Return the attributes of a CUDA target, however it is written."""
    if isinstance(target, str) and (options := _OPTION.fullmatch(target)):
        # TVM no longer parses options after the kind, the form of targets in older releases.
        return dict(option.lstrip("-").split("=", 1) for option in options["options"].split())
    if isinstance(target, Mapping):
        kind, attrs = target.get("kind"), dict(target)
    elif isinstance(target, str | tvm.target.Target):
        try:
            read = tvm.target.Target(target)
        except ValueError:
            raise ValueError(f"{target!r} is no target of TVM's and no arch; expected one of {', '.join(_declared())}") from None
        kind, attrs = read.kind.name, dict(read.attrs)
    else:
        raise TypeError(f"a target is TVM's Target, a mapping or a string; this is {type(target).__name__}")
    if kind != "cuda":
        raise ValueError(f'target {target} is of kind {kind}; expected kind "cuda"')
    return attrs


def _capability(arch: Any) -> tuple[int, int]:
    found = _ARCH.fullmatch(str(arch))
    if found is None:
        raise ValueError(f'arch {arch} is none of NVIDIA\'s; expected such as "sm_90"')
    return int(found[1]), int(found[2])


def _agrees(gpu: Gpu, attrs: Mapping[str, Any]) -> bool:
    return all(int(attrs.get(name, getattr(gpu, figure))) == getattr(gpu, figure) for name, figure in _DISTINCTIVE.items())
