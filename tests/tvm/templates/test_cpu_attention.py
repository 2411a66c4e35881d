"""Attention on the CPU: right results of every kind at uneven sizes, on special values too, and the same bits twice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.cpus import AVX2, AVX512, SSE, runnable
from support.thinned import at, only
from tvm.script import tirx as script
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

import kerneldecl
from kerneldecl.analysis.cpu_params import CpuAttentionParams
from kerneldecl.arrays import Array, poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import PIPELINE, target_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.prim_funcs import traceless_module
from kerneldecl.model import Arch, Cpu
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import cpu_attention as policy
from kerneldecl.runners.reference_data import make_reference_data
from kerneldecl.templates import cpu_attention
from kerneldecl.templates.cpu.vectors import load, power, store

ROOT = Path(kerneldecl.__file__).parent.parent
ARCH = runnable(SSE)
PARAMS: dict[str, Any] = {"block_m": 8, "block_n": 12, "tile_n": 3, "tile_e": 5, "pack": False}
SMALL: dict[str, Any] = {"batch": 2, "heads": 2, "queries": 65, "keys": 63, "head_dim": 20, "dtype": "float32"}
GQA = {"heads": 6, "kv_heads": 2, "batch": 1}
PACK = {"pack": True}
ATTENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "one of each": ({"queries": 1, "keys": 1}, {}),
    "one query": ({"queries": 1, "keys": 200}, {}),
    "one key": ({"queries": 7, "keys": 1}, {}),
    "7 of each, bshd": ({"queries": 7, "keys": 7, "layout": "bshd"}, {}),
    "whole tiles": ({"queries": 64, "keys": 72, "head_dim": 16}, {"tile_e": 4}),
    "values of 9": ({"value_dim": 9, "queries": 7}, {}),
    "causal": ({"causal": True, "queries": 200, "keys": 200, **GQA}, {}),
    "causal, more queries than keys": ({"causal": True, "queries": 129, "keys": 63}, {}),
    "causal, from the start": ({"causal": True, "queries": 63, "keys": 65, "align": "start"}, {}),
    "window": ({"window": 7, "causal": True, "queries": 200, "keys": 200, "batch": 1}, {}),
    "window on both sides": ({"window": 17, "queries": 65, "keys": 130}, {"tile_n": 4}),
    "mask, packed": ({"mask": True}, PACK),
    "mask of each, bool": ({"mask": True, "mask_axes": "bhqk", "mask_dtype": "bool", **GQA}, {}),
    "mask of keys": ({"mask": True, "mask_axes": "bk", "mask_dtype": "bool", "causal": True}, {}),
    "ALiBi": ({"alibi": True, "causal": True, "keys": 65}, {}),
    "ALiBi on both sides, softcap": ({"alibi": True, "softcap": 2.0}, {}),
    "logsumexp": ({"logsumexp": True, "causal": True, "queries": 130}, {}),
    "packed": ({"layout": "packed", "keys": 65, **GQA}, {}),
    "float16, bshd": ({"dtype": "float16", "layout": "bshd", "mask": True}, PACK),
    "bfloat16, causal": ({"dtype": "bfloat16", "causal": True, **GQA}, PACK),
    "float16 as it lies": ({"dtype": "float16", "head_dim": 16}, {}),
    "float8": ({"dtype": "float8_e4m3fn"}, PACK),
}
BY_DEFAULT = (
    "one of each",
    "window on both sides",
    "mask of each, bool",
    "ALiBi on both sides, softcap",
    "logsumexp",
    "float16, bshd",
)


def computation(attrs: dict[str, Any]) -> tvm.IRModule:
    return canonical.lower(load_rule(ROOT, "attention").of(ROOT, SMALL | attrs))


def built(attrs: dict[str, Any], params: dict[str, Any], arch: Arch = ARCH) -> Any:
    mod = computation(attrs)
    kernel = cpu_attention.apply(mod, PARAMS | params, arch)
    assert kernel is not None
    return tvm.tirx.build(traceless_module(kernel, mod), target=target_of(arch), pipeline=PIPELINE)["main"]


def results(kernel: Any, attrs: dict[str, Any], inputs: tuple[Array, ...]) -> list[Array]:
    rule = load_rule(ROOT, "attention").of(ROOT, SMALL | attrs)
    outputs = [tvm.runtime.tensor(poisoned(arg)) for arg in rule.signature().outputs]
    kernel(*map(tvm.runtime.tensor, inputs), *outputs)
    return [out.numpy() for out in outputs]


def check(attrs: dict[str, Any], params: dict[str, Any], arch: Arch = ARCH) -> None:
    """Compare with the reference on all inputs that verification makes, special values among them."""
    kernel = built(attrs, params, arch)
    data = make_reference_data({"root": ROOT, "rule": "attention", "attrs": SMALL | attrs, "seed": 0})
    tolerance = load_rule(ROOT, "attention").of(ROOT, SMALL | attrs).tolerance()
    for given in data.sets:
        got = results(kernel, attrs, given.inputs)
        for one, want in zip(got, given.expected, strict=True):
            error = relative_error(one, want, any_for_nan=given.any_for_nan)
            assert error <= tolerance, f"relative error {error:.2g}{given.where}"
    again = results(kernel, attrs, data.sets[-1].inputs)
    assert [one.tobytes() for one in again] == [one.tobytes() for one in got]


@pytest.mark.parametrize("name", only(BY_DEFAULT, ATTENTIONS))
def test_right_results(name: str) -> None:
    check(*ATTENTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("vector_bytes", [32, 64])
@pytest.mark.parametrize("length", [1, 7, 63, 65, 200])
def test_every_proposal_is_right_at_every_length(length: int, vector_bytes: int) -> None:
    cpu = {32: AVX2, 64: AVX512}[vector_bytes]
    arch = runnable(cpu)
    attrs = {"queries": length, "keys": length, "causal": True, "batch": 1}
    proposals = policy.propose(iter_space(computation(attrs)), arch, 20)
    assert proposals
    for proposal in proposals[::3]:
        check(attrs, dict(proposal.candidate.params), arch)


def test_growing_scores_shrink_earlier_results() -> None:
    """Scores of up to 1e4 grow from key to key, so that each block outgrows the last; then they fall, so that none does."""
    attrs = {"queries": 9, "keys": 200, "batch": 1, "heads": 1}
    rule = load_rule(ROOT, "attention").of(ROOT, SMALL | attrs)
    kernel = built(attrs, {})
    q, k, v = rule.inputs(np.random.default_rng(0))
    for sign in (1, -1):
        q[..., 0], k[..., 0] = 100, np.linspace(-450, 450, 200) * sign
        (got,) = results(kernel, attrs, (q, k, v))
        assert relative_error(got, rule.reference(q, k, v)) <= 1e-3  # half a unit in the last place of 1e4 is 5e-4


def test_rows_that_see_no_key_are_zero_and_a_mask_of_least_numbers_hides_nothing() -> None:
    attrs = {"mask": True, "batch": 1, "heads": 1}
    rule = load_rule(ROOT, "attention").of(ROOT, SMALL | attrs)
    kernel = built(attrs, {})
    q, k, v, mask = rule.inputs(np.random.default_rng(0))
    mask[3], mask[5] = -math.inf, np.finfo(np.float32).min
    (got,) = results(kernel, attrs, (q, k, v, mask))
    assert (got[0, 0, 3] == 0).all()
    # All scores are rounded to the mask: their powers are equal.
    np.testing.assert_allclose(got[0, 0, 5], v[0, 0].mean(axis=0), atol=1e-6)


def test_nan_stays_in_its_row_and_infinite_values_in_their_column() -> None:
    attrs = {"batch": 1, "heads": 1}
    rule = load_rule(ROOT, "attention").of(ROOT, SMALL | attrs)
    kernel = built(attrs, {})
    q, k, v = rule.inputs(np.random.default_rng(0))
    q.view(np.uint32)[0, 0, 4, 2] = 0xFFFFFFFF  # NaN with all bits of its payload
    v[0, 0, 7, 3] = math.inf
    (got,) = results(kernel, attrs, (q, k, v))
    others = [row for row in range(65) if row != 4]
    assert np.isnan(got[0, 0, 4]).all()
    assert np.isposinf(got[0, 0, others, 3]).all()
    assert np.isfinite(np.delete(got[0, 0, others], 3, axis=-1)).all()


def test_powers() -> None:
    lanes, count = 4, 4096
    with IRBuilder() as builder, prim_func():
        script.func_name("main")
        source, target = (script.arg(name, script.Buffer((count,), "float32")) for name in ("x", "y"))
        with script.serial(count // lanes) as at:
            store(target, (at * lanes,), power(load(source, (at * lanes,), lanes)))
    kernel = tvm.tirx.build(tvm.IRModule({"main": builder.get()}), target=target_of(ARCH), pipeline=PIPELINE)["main"]
    x = np.concatenate([[-math.inf, -3e38, -1000, -88.5], -np.geomspace(1e-30, 87, count - 6), [0.0, math.nan]]).astype(np.float32)
    out = tvm.runtime.tensor(np.empty_like(x))
    kernel(tvm.runtime.tensor(x), out)
    got = out.numpy()
    assert (got[:4] == 0).all()
    assert got[-2] == 1
    assert np.isnan(got[-1])
    finite = x[4:-2].astype(np.float64)
    error = np.abs(got[4:-2] / np.exp(finite) - 1)
    assert error[finite > -5].max() <= 2.4e-7
    assert error[finite > -80].max() <= 5e-6  # the argument is rounded


def innermost_loops(assembly: str) -> list[list[str]]:
    """Return the instructions of loops that have fused multiply-adds and no loop within."""
    lines = [line.strip() for line in assembly.splitlines()]
    labels = {line.partition(":")[0]: at for at, line in enumerate(lines) if line.startswith(".LBB")}
    jumps = [(at, line.split()[-1]) for at, line in enumerate(lines) if line.startswith("j") and line.split()[-1] in labels]
    loops = [lines[labels[label] + 1 : at] for at, label in jumps if labels[label] < at]
    return [loop for loop in loops if any("fmadd" in line for line in loop) and not any(line.startswith(".LBB") for line in loop)]


@pytest.mark.parametrize(("cpu", "processor", "register"), at({0}, [(AVX512, "x86-64-v4", "zmm"), (AVX2, "x86-64-v3", "ymm")]))
def test_accumulators_stay_in_registers(cpu: Cpu, processor: str, register: str) -> None:
    """What TVM puts on the heap stays there: the kernel would be a hundred times slower."""
    target = (("kind", "llvm"), ("mcpu", processor), ("mtriple", "x86_64-linux-gnu"), ("num-cores", 2))
    arch = Arch("any", "cpu", "", target, cpu)
    mod = computation({"queries": 512, "keys": 512, "head_dim": 64, "causal": True})
    (first,) = policy.propose(iter_space(mod), arch, 1)
    params = CpuAttentionParams(**dict(first.candidate.params))  # type: ignore[arg-type]
    kernel = cpu_attention.apply(mod, params._asdict(), arch)
    library = tvm.tirx.build(traceless_module(kernel, mod), target=target_of(arch), pipeline=PIPELINE)
    accumulators = min(params.tile_n, params.tile_e) * params.block_m * 4 // cpu.vector_bytes
    loops = [loop for loop in innermost_loops(library.inspect_source("asm")) if not any("vpslld" in line for line in loop)]  # powers shift
    products = [loop for loop in loops if sum("fmadd" in line and register in line for line in loop) >= accumulators]
    assert len(products) >= 2  # scores, values
    for loop in products:
        # AT&T syntax: the last operand is the destination, and memory is written (…).
        assert not [line for line in loop if line.startswith("vmov") and line.split("#")[0].rstrip().endswith(")")]
        assert not [line for line in loop if line.startswith("call")]


def test_what_it_does_not_take() -> None:
    softmax = canonical.lower(load_rule(ROOT, "softmax")(shape=(8, 16)))
    assert cpu_attention.apply(softmax, PARAMS, ARCH) is None
    assert policy.propose(iter_space(softmax), ARCH, 20) == ()
    mod = computation({})
    for params in ({"block_m": 6}, {"block_n": 10}, {"tile_e": 0}):
        assert cpu_attention.apply(mod, PARAMS | params, ARCH) is None
    assert cpu_attention.apply(mod, PARAMS, runnable(replace(SSE, vector_bytes=4))) is None
