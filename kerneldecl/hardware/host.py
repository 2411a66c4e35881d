"""Owns the detection of this machine's CPU: the arch `host`, from /proc and /sys.

Knows nothing of TVM or of workloads. Fast enough (about a millisecond) for the path of a null build.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from kerneldecl.analysis.cpu_features import BFLOAT16, BFLOAT16_PROCESSORS, VNNI, VNNI_PROCESSORS
from kerneldecl.model import Arch, Cpu, Value
from kerneldecl.toolchain.machines import here, machine_of_triple

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MAX_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
QUOTA = Path("/sys/fs/cgroup/cpu.max")

# (vendor, family, models, LLVM's processor name), as in LLVM's Host.cpp.
_PROCESSORS = (
    ("AuthenticAMD", 23, range(0x30), "znver1"),
    ("AuthenticAMD", 23, range(0x30, 0x100), "znver2"),
    ("AuthenticAMD", 25, range(0x10, 0x20), "znver4"),
    ("AuthenticAMD", 25, range(0x60, 0x80), "znver4"),
    ("AuthenticAMD", 25, range(0xA0, 0xB0), "znver4"),
    ("AuthenticAMD", 25, range(0x100), "znver3"),
    ("AuthenticAMD", 26, range(0x100), "znver5"),
    ("GenuineIntel", 6, (0x3C, 0x3F, 0x45, 0x46), "haswell"),
    ("GenuineIntel", 6, (0x3D, 0x47, 0x4F, 0x56), "broadwell"),
    ("GenuineIntel", 6, (0x4E, 0x5E, 0x8E, 0x9E, 0xA5, 0xA6), "skylake"),
    ("GenuineIntel", 6, (0x55,), "skylake-avx512"),
    ("GenuineIntel", 6, (0x6A, 0x6C), "icelake-server"),
    ("GenuineIntel", 6, (0x8F,), "sapphirerapids"),
    ("GenuineIntel", 6, (0xCF,), "emeraldrapids"),
    ("GenuineIntel", 6, (0x97, 0x9A, 0xB7, 0xBA, 0xBF), "alderlake"),
)
# Arm's main ID register (implementer, part): (name, LLVM's processor name, FMAs a cycle of 16 bytes), as in LLVM's Host.cpp; FMAs by the
# pipelines for FMLA in Arm's software optimization guides.
_ARM_CORES = {
    ("0x41", "0xd08"): ("Cortex-A72", "cortex-a72", 1.0),
    ("0x41", "0xd0b"): ("Cortex-A76", "cortex-a76", 2.0),
    ("0x41", "0xd0c"): ("Neoverse-N1", "neoverse-n1", 2.0),
    ("0x41", "0xd40"): ("Neoverse-V1", "neoverse-v1", 4.0),
    ("0x41", "0xd42"): ("Cortex-A78AE", "cortex-a78ae", 2.0),
    ("0x41", "0xd49"): ("Neoverse-N2", "neoverse-n2", 2.0),
    ("0x41", "0xd4f"): ("Neoverse-V2", "neoverse-v2", 4.0),
}
# x86-64 psABI levels, highest first: (a flag that lower levels lack, LLVM's name).
_LEVELS = (("avx512bw", "x86-64-v4"), ("avx2", "x86-64-v3"), ("sse4_2", "x86-64-v2"))
_WITH_AVX512 = frozenset({"znver4", "znver5", "skylake-avx512", "icelake-server", "sapphirerapids", "emeraldrapids", "x86-64-v4"})
_DOTS = (("avx512_vnni", VNNI, VNNI_PROCESSORS), ("avx512_bf16", BFLOAT16, BFLOAT16_PROCESSORS))
"""Dot products of AVX-512: Linux's name, LLVM's, and the processors that have them."""
NO_SCATTER = "+prefer-no-scatter"
"""Keeps LLVM from storing vectors by AVX-512's scatters. Where its loop vectorizer does so, TVM 0.27's LLVM 22.1 reads wrapped indices,
such as i % 4, as if they went on (tile of (3,4,5) by (6,4,2)). Models are compiled for the arch's target, too."""


def detect() -> Arch:
    """Return the arch `host`. Sizes are read from the system; rates are documented ones of its kind of core."""
    blocks = _cpuinfo()
    first = blocks[0] if blocks else {}
    if here() == "aarch64":
        return _arm(first, _cores(blocks))
    flags = set(first.get("flags", "").split())
    target: dict[str, Value] = {"kind": "llvm", "num-cores": _cores(blocks)}
    if processor := _processor(first, flags):
        target["mcpu"] = processor
    if processor in _WITH_AVX512:
        # No level of x86-64 has dot products; a CPU that is known by its level alone may.
        dots = (attribute for flag, attribute, processors in _DOTS if processor not in processors and flag in flags)
        target["mattr"] = (*dots, NO_SCATTER)
    return Arch(
        name="host",
        kind="cpu",
        model=f"{first.get('model name', os.uname().machine)} ({first.get('cpu family', '')}-{first.get('model', '')})",
        tvm_target=tuple(sorted(target.items())),
        cpu=_cpu(first, flags, _cores(blocks)),
        is_detected=True,
    )


def _arm(first: dict[str, str], cores: int) -> Arch:
    """Return the arch of a machine of aarch64: vectors of NEON, whose 16 bytes every core has; code for SVE has no fixed width."""
    ids = first.get("CPU implementer", ""), first.get("CPU part", "")
    name, processor, fmas = _ARM_CORES.get(ids, ("aarch64", "", 2.0))
    target: dict[str, Value] = {"kind": "llvm", "num-cores": cores, **({"mcpu": processor} if processor else {})}
    cpu = replace(_cpu(first, set(), cores), vector_registers=32, fma_per_cycle=fmas)
    return Arch(
        name="host",
        kind="cpu",
        model=f"{name} ({'-'.join(filter(None, ids))})",
        tvm_target=tuple(sorted(target.items())),
        cpu=cpu,
        is_detected=True,
    )


def runs(processor: str, triple: str = "") -> bool:
    """Say whether this machine runs code for a processor by LLVM's name: its own, its kind's first, or a level of x86-64 that it has."""
    flags = set((_cpuinfo() or [{}])[0].get("flags", "").split())
    levels = {name for flag, name in _LEVELS if flag in flags}
    known = {"", "x86-64", "generic", dict(detect().tvm_target).get("mcpu", ""), *levels}
    return machine_of_triple(triple) == here() and processor in known


def _cpuinfo() -> list[dict[str, str]]:
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    blocks = (block.splitlines() for block in text.strip().split("\n\n"))
    return [{name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block)} for block in blocks]


def _processor(first: dict[str, str], flags: set[str]) -> str:
    family, model = int(first.get("cpu family", 0)), int(first.get("model", 0))
    for vendor, known_family, models, name in _PROCESSORS:
        # A hypervisor may hide instructions of its CPU: the flags decide.
        if (vendor, known_family) == (first.get("vendor_id"), family) and model in models and _has_level(name, flags):
            return name
    return next((name for flag, name in _LEVELS if flag in flags), "")


def _has_level(processor: str, flags: set[str]) -> bool:
    if any(processor in processors and flag not in flags for flag, _, processors in _DOTS):
        return False
    return ("avx512bw" if processor in _WITH_AVX512 else "avx2") in flags


def _cores(blocks: list[dict[str, str]]) -> int:
    """Count the physical cores this process may use, a container's CPU quota included."""
    allowed = os.sched_getaffinity(0)
    cores = {(b.get("physical id", ""), b.get("core id", b.get("processor", ""))) for b in blocks if int(b.get("processor", -1)) in allowed}
    count = len(cores) or len(allowed)
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, math.ceil(int(quota) / int(period))))


def _cpu(first: dict[str, str], flags: set[str], cores: int) -> Cpu:
    vector_bytes = 64 if "avx512bw" in flags else 32 if "avx2" in flags else 16
    caches = _caches()
    clock_hz = _clock_hz(first)
    return Cpu(
        cores=cores,
        vector_bytes=vector_bytes,
        vector_registers=32 if vector_bytes == 64 else 16,
        fma_per_cycle=_fma_per_cycle(first, vector_bytes),
        l1d_bytes=caches.get(1, 32 << 10),
        l2_bytes=caches.get(2, 512 << 10),
        l3_bytes=caches.get(3, 0),
        line_bytes=64,
        clock_hz=clock_hz,
        # Two vector loads a cycle up to 32 bytes, one of 64 bytes on cores that split them; L2 and L3: sustained reads in the
        # vendors' optimisation guides.
        l1_bytes_per_cycle=64.0 if vector_bytes >= 32 else 32.0,
        l2_bytes_per_cycle=32.0,
        l3_bytes_per_cycle=12.0,
        dram_bytes_per_s=12e9 * min(cores, 16),
        parallel_secs=5e-6,
    )


def _fma_per_cycle(first: dict[str, str], vector_bytes: int) -> float:
    """Return full-width vector FMAs per cycle: one for AVX-512 on Zen 4, whose 512-bit operations take two passes; else two."""
    splits = first.get("vendor_id") == "AuthenticAMD" and first.get("cpu family") == "25" and vector_bytes == 64
    return 1.0 if splits else 2.0


def _clock_hz(first: dict[str, str]) -> float:
    """Return the maximum clock in /sys; the time stamp counter's rate where there is none (virtual machines)."""
    try:
        return int(MAX_CLOCK.read_text(encoding="ascii")) * 1e3
    except (OSError, ValueError):
        return round(float(first.get("bogomips", 4000)) / 2, -2) * 1e6


def _caches() -> dict[int, int]:
    """Return the bytes of the data and unified caches by level."""
    sizes: dict[int, int] = {}
    for index in sorted(CACHES.glob("index*")):
        try:
            kind, level, size = ((index / name).read_text(encoding="ascii").strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            sizes[int(level)] = int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]
    return sizes
