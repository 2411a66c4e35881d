"""What policies for an H200 propose first, where measurements have shown which candidates lose by much (seed 43, H200, 2026-11)."""

from __future__ import annotations

import math
from typing import Any

from support.repository import REPOSITORY

from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Candidate, IterSpace, Proposal
from kerneldecl.plugins.load import load_arch, load_module, load_rule

H200 = load_arch(REPOSITORY, "h200")
VECTOR_BYTES, WARP = 16, 32


def space(rule: str, **attrs: Any) -> IterSpace:
    return iter_space(canonical.lower(load_rule(REPOSITORY, rule).of(REPOSITORY, attrs)))


def proposals(policy: str, computation: IterSpace, top_k: int = 20) -> tuple[Proposal, ...]:
    found: tuple[Proposal, ...] = load_module("policies", REPOSITORY, policy).propose(computation, H200, top_k)
    return found


def first(policy: str, computation: IterSpace) -> tuple[Candidate, dict[str, Any]]:
    candidate = proposals(policy, computation)[0].candidate
    return candidate, dict(candidate.params)


def test_odd_gemvs_leave_no_rest_behind_unrolled_turns() -> None:
    # 251 rows of 147: five loads by 32 threads, four at once, took 2.3 us, three loads by 64 threads 1.2.
    for n, k in ((502, 147), (1536, 2744), (3352, 1672)):
        _, params = first("gpu_gemv", space("gemv", n=n, k=k, dtype="float16"))
        steps = math.ceil(k / params["width"] / params["threads"])
        assert steps <= params["unroll"] or steps % params["unroll"] == 0


def test_large_rows_are_read_in_long_pieces() -> None:
    _, params = first("gpu_gemv", space("gemv", n=16384, k=16384, dtype="float16"))
    assert params["threads"] * params["width"] * 2 >= 1024


def test_wide_columns_of_windows_come_later() -> None:
    depthwise = space("conv2d", n=23, h=16, w=16, c=768, f=768, kh=3, kw=3, groups=768, stride=2, padding=1, dtype="float16")
    _, params = first("gpu_gemv", depthwise)
    assert params["width"] * 2 < VECTOR_BYTES


def test_few_heads_are_turned_together_where_threads_are_few() -> None:
    # 8 heads by vectors of 16 bytes took 3.8 us, one by 8 bytes 1.0.
    ranked = proposals("gpu_rotary", space("rotary", batch=1, heads=8, tokens=3, size=128, dtype="float16"))
    secs = {each.candidate: each.predicted_secs for each in ranked}
    many = Candidate.of("gpu_rotary", {"threads": 64, "width": 8, "heads": 8})
    assert dict(ranked[0].candidate.params)["heads"] <= 2
    assert secs.get(many, math.inf) > 2 * ranked[0].predicted_secs


def test_rows_that_threads_divide_evenly_come_before_more_threads_with_bounds() -> None:
    _, params = first("gpu_rowwise", space("softmax", shape=(4, 2, 220, 80), mask=(220, 80), scale=0.125, dtype="float16"))
    assert 80 % (params["threads"] * params["width"]) == 0


def test_norms_of_float32_are_not_predicted_to_divide_each_element() -> None:
    norm = proposals("gpu_rowwise", space("rms_norm", shape=(663, 88), dtype="float32"))[0].predicted_secs
    softmax = proposals("gpu_rowwise", space("softmax", shape=(663, 88), dtype="float32"))[0].predicted_secs
    assert norm < softmax


def test_large_depthwise_images_go_through_shared_memory_first() -> None:
    depthwise = space("conv2d", n=18, h=91, w=91, c=176, f=176, kh=3, kw=3, groups=176, dtype="bfloat16")
    assert first("gpu_grouped_conv2d", depthwise)[0].template == "gpu_grouped_conv2d_simt"


def test_attention_on_cuda_cores_has_several_warps_first() -> None:
    attention = space("attention", batch=2, heads=6, kv_heads=6, head_dim=128, queries=759, causal=False, dtype="float32")
    _, params = first("gpu_attention_simt", attention)
    assert params["warps_m"] * params["warps_n"] > 1


def test_odd_rows_of_results_go_through_shared_memory_first() -> None:
    # Lanes that store single results took 3.5 to 4.7 us where those tiles took 2.5 to 2.9 through shared memory.
    ranked = proposals("gpu_matmul_tc", space("matmul", m=5034, n=57, k=43, layout="nt", dtype="float16"), 10)
    assert all(dict(each.candidate.params)["smem_epilogue"] for each in ranked)


def test_short_gated_gemms_have_narrow_tiles_first() -> None:
    _, params = first("wgmma_matmul_gated", space("matmul_gated", m=3, n=2488, k=64, gate="silu", dtype="float16"))
    assert params["block_n"] <= 64


def test_weights_of_4_bits_are_converted_by_four_warps() -> None:
    """16 x 8192 x 8192 took 24.6 us with four warps, and 49.1 with two, of which each waits for its own instructions."""
    attrs = {"m": 16, "n": 8192, "k": 8192, "layout": "packed", "dtype": "int8", "activation_scales": "token"}
    _, params = first("gpu_matmul_scaled", space("matmul_quantized", **attrs))
    assert params["warps_m"] * params["warps_n"] == 4
    assert params["integers"]


def test_few_rows_of_experts_have_low_tiles_and_several_blocks_an_sm() -> None:
    """Tiles of 32 x 128, three blocks an SM, took 55 us, one 72, tiles of 64 x 128 75 and more: mma.sync converts float8 on Hopper."""
    attrs = {"rows": 512, "groups": 64, "n": 2048, "k": 1024, "dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
    found = proposals("gpu_matmul_grouped", space("matmul_grouped", **attrs))
    params = dict(found[0].candidate.params)
    assert params["block_m"] <= 32
    assert params["blocks"] > 1
    assert 40e-6 < found[0].predicted_secs < 70e-6


def test_caches_of_uneven_lengths_are_cut_into_several_parts() -> None:
    """8 sequences of 4096 keys at most took 48 us in two parts, and 41 to 42 in four to eight: the longest one's blocks end last."""
    attrs = {"batch": 8, "heads": 32, "kv_heads": 8, "head_dim": 128, "keys": 4096, "page_size": 16, "dtype": "float32"}
    _, params = first("gpu_attention_decode_simt", space("attention_decode", **attrs))
    assert params["split_k"] >= 4
