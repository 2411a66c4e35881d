"""Owns the resolution of targets to archs: whose figures the policies get.

Knows nothing of functions, policies or builds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.compiler.cpu import target_of
from kerneldecl.dlight.tags import named_tag, tags_like
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
_LOG = logging.getLogger(__name__)
_DISTINCTIVE = {"l2_cache_size_bytes": "l2_bytes"}
"""Attributes of a target that distinguish GPUs of one compute capability, with the field of Gpu that each equals."""


class CUDA:
    """One NVIDIA GPU as policies see it. Figures come from kerneldecl's arch files; no GPU need be there.

    Attributes have the names that users of fast dlight know; `arch` holds all figures.
    """

    def __init__(self, target: Target = "cuda") -> None:
        """Take the GPU that the target names; where it names only a compute capability, this machine's GPU if it has that one.

        Of archs that differ in memory alone it is the one with the slower memory, and `note` says so. Raise ValueError, with the
        choices, where that is not exactly one arch.
        """
        self.arch, self.note = _one(target, archs_of(target))
        if self.note:
            _LOG.warning("%s", self.note)
        self.target = _with_name(self.arch)
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

    Raise TypeError or ValueError where it is no CUDA target, or one of a GPU that no arch describes.
    """
    return _named(target) or _by_attributes(target)


def _named(target: Target) -> tuple[Arch, ...]:
    """Return the archs that a target names, by an arch's name or by TVM's tag; none where it has attributes alone."""
    if isinstance(target, CUDA):
        return (target.arch,)
    if isinstance(target, str) and target in plugin_names("archs", Path.cwd()) and target != HOST:
        return (_cuda_arch(target),)
    attrs, declared = _attrs(target), _declared()
    named = tuple(declared[key] for key in _keys(target) if key in declared)
    tag = "" if named else named_tag(target)
    return _tagged(tag, attrs) if tag else named


def _by_attributes(target: Target) -> tuple[Arch, ...]:
    attrs, here = _attrs(target), _here()
    if "arch" not in attrs:
        if here is None:
            raise ValueError(f"target {target} names no GPU and this machine has none; expected one of {', '.join(_declared())}")
        return (here,)
    capability = _capability(attrs["arch"])
    if here is not None and here.the_gpu.compute_capability == capability and _agrees(here.the_gpu, attrs):
        return (here,)
    if tags := tags_like(attrs):
        return _of_one_tag(tags, attrs)
    same = _of_capability(capability)
    return tuple(arch for arch in same if _agrees(arch.the_gpu, attrs)) or tuple(same)


def _tagged(tag: str, attrs: Mapping[str, Any]) -> tuple[Arch, ...]:
    """Return the archs of the GPUs that a tag of TVM's is for; raise ValueError, with the archs that are nearest, if there is none."""
    archs = tuple(arch for arch in _declared().values() if tag in arch.tvm_tags)
    if not archs:
        near = ", ".join(arch.name for arch in _of_capability(_capability(attrs["arch"])))
        advice = "docs/guides/adding-a-gpu.md says how to add one"
        raise ValueError(f"no arch describes {tag}; of the same compute capability are {near}; {advice}")
    here = _here() if len(archs) > 1 else None
    return (here,) if here is not None and here in archs else archs


def _of_one_tag(tags: tuple[str, ...], attrs: Mapping[str, Any]) -> tuple[Arch, ...]:
    """Return the archs of the one tag that a target comes from; raise ValueError where it can come from several."""
    if len(tags) == 1:
        return _tagged(tags[0], attrs)
    near = ", ".join(f'"{arch.name}"' for arch in _of_capability(_capability(attrs["arch"])))
    raise ValueError(f"TVM has one target for {', '.join(tags)}; name the GPU by the tag's text or an arch's, one of {near}")


def _of_capability(capability: tuple[int, int]) -> list[Arch]:
    declared = _declared()
    same = [arch for arch in declared.values() if arch.the_gpu.compute_capability == capability]
    if not same:
        raise ValueError(f"no arch has compute capability {capability[0]}.{capability[1]}; expected one of {', '.join(declared)}")
    return same


def _keys(target: Target) -> tuple[str, ...]:
    keys = target.get("keys", ()) if isinstance(target, Mapping) else getattr(target, "keys", ())
    return tuple(map(str, keys))


def _with_name(arch: Arch) -> tvm.target.Target:
    """Return the arch's target with its name among the keys: TVM takes no notice of it, and no other attribute tells all GPUs apart."""
    target = target_of(arch)
    return tvm.target.Target({**target.export(), "keys": [*target.keys, arch.name]})


def gpu_here() -> DriverGpu | None:
    """Return the first GPU that the driver shows to this process, None where there is none."""
    try:
        return next(iter(read_gpus()), None)
    except ToolchainError:
        return None


def _one(target: Target, archs: tuple[Arch, ...]) -> tuple[Arch, str]:
    """Return the arch, with a note where it was chosen of several that differ in memory alone."""
    if len(archs) == 1:
        return archs[0], ""
    names = ", ".join(arch.name for arch in archs)
    if len({_without_memory(arch) for arch in archs}) > 1:
        raise ValueError(f'target {target} can be {names}; name one of them, such as CUDA("{archs[0].name}")')
    smaller = min(archs, key=lambda arch: arch.the_gpu.dram_bytes_per_s)
    return smaller, f"target {target} can be {names}, which differ in memory alone; {smaller.name}, the smaller one, is taken"


def _without_memory(arch: Arch) -> Arch:
    return replace(arch, name="", model="", tvm_tags=(), gpu=replace(arch.the_gpu, dram_bytes_per_s=0.0))


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
    if isinstance(target, Mapping) and "tag" not in target:
        kind, attrs = target.get("kind"), dict(target)
    elif isinstance(target, str | Mapping | tvm.target.Target):
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
