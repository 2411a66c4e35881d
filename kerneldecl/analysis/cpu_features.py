"""Owns which instructions for dot products of bytes and of bfloat16 a CPU's target has.

Knows nothing of schedules, tiles or TVM.
"""

from __future__ import annotations

from kerneldecl.model import Arch

VNNI = "+avx512vnni"
VNNI_PROCESSORS = frozenset({"cascadelake", "icelake-server", "sapphirerapids", "emeraldrapids", "graniterapids", "znver4", "znver5"})
"""LLVM's names of processors with AVX512-VNNI, as in its X86.td. No level of x86-64 has it."""
INT16_PAIRS = frozenset({"haswell", "broadwell", "skylake", "skylake-avx512", "alderlake", "znver1", "znver2", "znver3"})
"""LLVM's names of other processors with AVX2, which add up products of pairs of int16."""
BFLOAT16 = "+avx512bf16"
BFLOAT16_PROCESSORS = frozenset({"cooperlake", "sapphirerapids", "emeraldrapids", "graniterapids", "znver4", "znver5"})
"""LLVM's names of processors with AVX512-BF16. No level of x86-64 has it."""
LEVELS = frozenset({"x86-64-v3", "x86-64-v4"})


def byte_dots(arch: Arch) -> tuple[str, ...]:
    """Return how a target multiplies bytes, fastest first: "vnni" by vpdpbusd, "pairs" by vpmaddwd; nothing where it has neither."""
    target = dict(arch.tvm_target)
    attributes, processor = target.get("mattr", ()), target.get("mcpu", "")
    assert isinstance(attributes, tuple)
    has_vnni = (processor in VNNI_PROCESSORS or VNNI in attributes) and arch.the_cpu.vector_bytes == 64
    if has_vnni:
        return ("vnni", "pairs")
    return ("pairs",) if processor in VNNI_PROCESSORS | INT16_PAIRS | LEVELS and arch.the_cpu.vector_bytes in {32, 64} else ()


def has_bfloat16_dots(arch: Arch) -> bool:
    """Say whether a target has vdpbf16ps for whole vectors: dot products of pairs of bfloat16, accumulated in float32."""
    target = dict(arch.tvm_target)
    attributes, processor = target.get("mattr", ()), target.get("mcpu", "")
    assert isinstance(attributes, tuple)
    return (processor in BFLOAT16_PROCESSORS or BFLOAT16 in attributes) and arch.the_cpu.vector_bytes == 64
