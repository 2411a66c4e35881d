"""Owns CPUs that policies and templates are asked about.

Knows nothing of the machine at hand.
"""

from __future__ import annotations

from dataclasses import replace

from kerneldecl.model import Arch, Cpu

AVX512 = Cpu(
    cores=2,
    vector_bytes=64,
    vector_registers=32,
    fma_per_cycle=1.0,
    l1d_bytes=32 << 10,
    l2_bytes=1 << 20,
    l3_bytes=32 << 20,
    line_bytes=64,
    clock_hz=3.5e9,
    l1_bytes_per_cycle=64.0,
    l2_bytes_per_cycle=32.0,
    l3_bytes_per_cycle=16.0,
    dram_bytes_per_s=3e10,
    parallel_secs=5e-6,
)
AVX2 = replace(AVX512, cores=8, vector_bytes=32, vector_registers=16, fma_per_cycle=2.0, l2_bytes=256 << 10)
SSE = replace(AVX512, vector_bytes=16, vector_registers=16, clock_hz=3e9, l1_bytes_per_cycle=32.0, dram_bytes_per_s=2e10)
"""What any x86-64 machine has, for kernels that are run."""


def runnable(cpu: Cpu) -> Arch:
    """Return an arch whose code any x86-64 machine runs; templates take the width of vectors from it."""
    return Arch("any", "cpu", "", (("kind", "llvm"), ("num-cores", 2)), cpu)
