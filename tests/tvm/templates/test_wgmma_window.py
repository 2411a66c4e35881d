"""Convolutions of few channels on wgmma: right results of every kind on the emulated GPU, no spills, and None for what they do not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate, host
from support.compilers import compiled_cubin, needs_nvcc
from support.emulated_kernel import error
from support.thinned import at
from support.wgmma_cases import FEW_CHANNELS, SMEM_CONV_PARAMS, SMEM_CONVOLUTIONS, THREE_BY_THREE

import kerneldecl
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_matmul
from kerneldecl.policies import wgmma_window as policy
from kerneldecl.templates import wgmma_window
from kerneldecl.toolchain import nvcc

ROOT = Path(kerneldecl.__file__).parent.parent
H200 = load_arch(ROOT, "h200")


def rule_of(attrs: dict[str, Any]) -> Any:
    return load_rule(ROOT, "conv2d").of(ROOT, attrs)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({3}, SMEM_CONVOLUTIONS))
def test_right_results(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert error(wgmma_window, rule_of(attrs), SMEM_CONV_PARAMS | params, H200) <= 1


@needs_nvcc
@pytest.mark.parametrize("attrs", at({0}, [FEW_CHANNELS, THREE_BY_THREE]))
def test_what_is_beside_a_window_does_not_reach_its_result(attrs: dict[str, Any]) -> None:
    """Lanes load pairs of elements: one beside the window may be infinite, and no weight of zero would make that zero."""
    rule = rule_of(attrs | {"n": 1})
    mod = wgmma_window.apply(canonical.lower(rule), SMEM_CONV_PARAMS, H200)
    assert mod is not None
    x, w = rule.inputs(np.random.default_rng(0))
    x[0, 5, 9] = np.inf
    (out,) = rule.signature().outputs
    *_, got = emulate(mod["main"], x, w, np.empty(out.shape, np.float16))
    rows, columns = (np.arange(extent) * attrs["stride"] - attrs["padding"] for extent in out.shape[1:3])
    sees = ((rows <= 5) & (rows + attrs["kh"] > 5))[:, None] & ((columns <= 9) & (columns + attrs["kw"] > 9))
    assert (np.isfinite(got[0]) == ~sees[:, :, None]).all()


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("params", at({1}, [{"blocks": 4}, {"mma_tiles": 4, "blocks": 3}, {"block_n": 128, "blocks": 2}]))
def test_registers_suffice(params: dict[str, Any]) -> None:
    attrs = FEW_CHANNELS | {"n": 128, "h": 224, "w": 224, "f": 128, "epilogue": ("bias", "relu")}
    mod = wgmma_window.apply(canonical.lower(rule_of(attrs)), SMEM_CONV_PARAMS | params, H200)
    assert mod is not None
    source = host.lower(mod["main"]).source
    assert "wgmma.mma_async.sync.aligned.m64n" in source
    [usage] = compiled_cubin(source, "sm_90a", nvcc.FAST_MATH_FLAGS).usage.values()
    assert usage.spill_bytes == 0


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"w": 33}, {}),
        ({"f": 36}, {}),
        ({"groups": 3, "f": 96}, {}),
        ({"dtype": "int8"}, {}),
        ({"dtype": "float32"}, {}),
        ({"dilation": 2}, {}),
        ({}, {"tile_w": 64}),
        ({}, {"tile_w": 8}),
        ({}, {"mma_tiles": 3}),
        ({}, {"block_n": 136}),
        ({}, {"blocks": 8}),
    ],
)
def test_none_where_it_does_not_apply(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(FEW_CHANNELS | attrs))
    assert wgmma_window.apply(mod, SMEM_CONV_PARAMS | params, H200) is None


@pytest.mark.parametrize(
    "attrs", at({0}, [FEW_CHANNELS, FEW_CHANNELS | {"f": 200, "out_dtype": "float32"}, THREE_BY_THREE | {"c": 12, "f": 24}])
)
def test_the_policys_proposals_apply(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(attrs))
    proposals = policy.propose(iter_space(mod), H200, 20)
    assert proposals
    for proposal in proposals[::4]:
        assert wgmma_window.apply(mod, dict(proposal.candidate.params), H200) is not None, proposal.candidate


@pytest.mark.parametrize("attrs", [{"w": 33}, {"f": 36}, {"groups": 3, "f": 96}, {"dtype": "float32"}, {"dilation": 2}])
def test_the_policy_proposes_nothing_where_the_template_does_not_apply(attrs: dict[str, Any]) -> None:
    space = iter_space(canonical.lower(rule_of(FEW_CHANNELS | attrs)))
    assert not policy.propose(space, H200, 20)
    assert policy.why_not(space, H200)


def test_it_competes_with_the_other_convolutions() -> None:
    space = iter_space(canonical.lower(rule_of(FEW_CHANNELS | {"n": 128, "h": 224, "w": 224})))
    templates = {proposal.candidate.template for proposal in gpu_matmul.propose(space, H200, 20)}
    assert {"wgmma_window", "gpu_conv2d_tc"} <= templates
