"""GEMMs with stream-K are right, and the same in whatever order CTAs run, on the emulated GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation import EmulationError, Kernel, host
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at, only
from support.wgmma_cases import EIGHT_TILES, PLAIN, STREAM_K, STREAM_K_GEMMS

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.templates import wgmma_matmul

ROOT = REPOSITORY


def gemm(attrs: dict[str, Any]) -> Any:
    return load_rule(ROOT, "matmul").of(ROOT, {**EIGHT_TILES, **attrs})


def made(attrs: dict[str, Any], params: dict[str, Value], sms: int = 3) -> Any:
    arch = load_arch(ROOT, "h200")
    arch = replace(arch, gpu=replace(arch.the_gpu, sm_count=sms))
    return wgmma_matmul.apply(canonical.lower(gemm(attrs)), {**PLAIN, **STREAM_K, **params}, arch)


@needs_nvcc
@pytest.mark.parametrize("name", only(("float8 to float32, swapped",), STREAM_K_GEMMS))
def test_computes_what_the_rule_does_in_any_order(name: str) -> None:
    attrs, params, sms = STREAM_K_GEMMS[name]
    rule, mod = gemm(attrs), made(attrs, params, sms)
    assert mod is not None
    kernel = Kernel(mod["main"])
    inputs = rule.inputs(np.random.default_rng(1))
    [out] = rule.signature().outputs
    results = [np.asarray(kernel(*inputs, poisoned(out), seed=seed)[-1]) for seed in range(1, 5)]
    assert relative_error(results[0], np.asarray(rule.reference(*inputs))) <= rule.tolerance()
    assert all(result.tobytes() == results[0].tobytes() for result in results)


@pytest.mark.slow
@needs_nvcc
def test_partial_accumulators_are_added_without_spills() -> None:
    mod = made({"m": 8192, "n": 8192, "k": 8192}, {"block_n": 256, "stages": 4, "cluster_m": 2}, 132)
    usage = compiled_cubin(host.lower(mod["main"]).source, "sm_90a").usage.values()
    assert len(usage) == 2
    assert not any(each.spill_bytes for each in usage)


WAIT = r"ld\.acquire\.gpu\.global\.u32 %0, \[%1\];"
BEFORE = r"\w*warpgroup_sync\([^;]*\);\s*(if \([^{]*\) \{\s*tvm_builtin_ptx_st_release)"


@needs_nvcc
@pytest.mark.parametrize(
    ("flaw", "words"),
    at(
        {0},
        [
            (lambda source: re.sub(WAIT, "mov.u32 %0, 1;", source), "a workspace"),
            (lambda source: source.replace("ld.acquire.gpu", "ld.relaxed.gpu"), "without having waited"),
            (lambda source: source.replace("st.release.gpu", "st.relaxed.gpu"), "without having waited"),
            (lambda source: re.sub(BEFORE, r"\1", source), "without having waited"),
            (lambda source: re.sub(r"flags_ptr\[[^=;]*\] = \(uint\)0;", "", source), "which nobody has written"),
        ],
    ),
    ids=["no wait", "no acquire", "no release", "no barrier before the release", "no clearing"],
)
def test_a_missing_wait_is_noticed(flaw: Callable[[str], str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = host.lower

    def lower(func: Any, change: Callable[[Any], Any]) -> host.Lowered:
        lowered = sound(func, change)
        flawed = replace(lowered, source=flaw(lowered.source))
        assert flawed.source != lowered.source
        return flawed

    monkeypatch.setattr(host, "lower", lower)
    kernel = Kernel(made({}, {})["main"])
    inputs = gemm({}).inputs(np.random.default_rng(1))
    with pytest.raises(EmulationError, match=words):
        kernel(*inputs, np.zeros((512, 64), "float16"))


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({}, {"stream_k": 3}),
        ({}, {"pdl": 0}),
        ({}, {"split_k": 2}),
        ({}, {"kernel_schedule": "pingpong"}),
        ({}, {"consumers": 1, "block_m": 64}),
        ({"m": 384}, {}),
        ({"m": 128}, {"stream_k": 2}),
        ({"accum_dtype": "float16"}, {}),
    ],
    ids=["three waves", "no PDL", "split-K", "ping-pong", "one consumer", "full waves", "less than a wave", "float16 accumulators"],
)
def test_does_not_apply(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert made(attrs, params) is None
