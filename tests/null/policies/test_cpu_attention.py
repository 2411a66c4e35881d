"""The policy for attention on CPUs: what it chooses from and the times it predicts, without TVM."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from support.cpus import AVX2, AVX512

from kerneldecl.analysis.attention import AttentionSizes
from kerneldecl.analysis.band import Band
from kerneldecl.model import Cpu
from kerneldecl.policies.cpu_attention import choices, estimate

NEON = replace(AVX512, cores=4, vector_bytes=16, vector_registers=32, l1d_bytes=64 << 10, l3_bytes=0)
CPUS = pytest.mark.parametrize("cpu", [AVX512, AVX2, NEON], ids=["avx512", "avx2", "neon"])


def sizes(queries: int, keys: int, head_dim: int, **others: Any) -> AttentionSizes:
    given = {"value_dim": head_dim, "batch": 1, "heads": 12, "kv_heads": 12, "dtype": "float32", **others}
    return AttentionSizes(queries=queries, keys=keys, head_dim=head_dim, **given)


def best_secs(attention: AttentionSizes, cpu: Cpu) -> float:
    return min(estimate(attention, params, cpu).secs for params in choices(attention, cpu))


@CPUS
@pytest.mark.parametrize(
    "attention",
    [
        sizes(512, 512, 64),
        sizes(1, 1, 1),
        sizes(7, 200, 20, value_dim=9),
        sizes(2048, 2048, 128, kv_heads=2, band=Band(upper=0), dtype="float16"),
        sizes(200, 100, 64, band=Band(upper=-100)),
    ],
)
def test_accumulators_fit_the_registers_and_times_are_finite(attention: AttentionSizes, cpu: Cpu) -> None:
    found = list(choices(attention, cpu))
    lanes = cpu.vector_bytes // 4
    assert found
    for params in found:
        assert params.fits(lanes)
        vectors = params.block_m // lanes
        assert vectors * (max(params.tile_n, params.tile_e) + 1) < cpu.vector_registers
        assert params.pack or attention.dtype == "float32"
        assert 0 < estimate(attention, params, cpu).secs < math.inf


@CPUS
def test_no_time_beats_the_peak_and_a_causal_mask_saves_nearly_half(cpu: Cpu) -> None:
    full, causal = sizes(2048, 2048, 64), sizes(2048, 2048, 64, band=Band(upper=0))
    least = 4 * 12 * 2048 * 2048 * 64 / cpu.peak_flops_per_s("float32")
    assert least < best_secs(full, cpu) < 2 * least
    assert 0.5 < best_secs(causal, cpu) / best_secs(full, cpu) < 0.6
