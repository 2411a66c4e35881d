"""Attention against a KV cache on CUDA cores: right results on the emulated GPU, nothing read beyond a length, no spills, no fallback."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.attention_decode_simt_cases import DECODES, PLAIN, SMALL
from support.compilers import needs_nvcc
from support.emulated_decode import decoded
from support.repository import REPOSITORY
from support.thinned import only

from kerneldecl.arrays import relative_error
from kerneldecl.plugins.load import load_rule
from kerneldecl.templates import gpu_attention_decode_simt


def rule_of(name: str, attrs: dict[str, Any]) -> Any:
    return load_rule(REPOSITORY, name).of(REPOSITORY, SMALL | attrs)


def results(rule: Any, params: dict[str, Any], inputs: list[Any], seed: int = 1) -> Any:
    return decoded(gpu_attention_decode_simt, rule, PLAIN | params, inputs, seed)


@needs_nvcc
@pytest.mark.parametrize("name", only(("parts shorter than a block", "pages of three keys", "latent, in pages"), DECODES))
def test_right_results(name: str) -> None:
    rule_name, attrs, params = DECODES[name]
    rule = rule_of(rule_name, attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    assert relative_error(results(rule, params, inputs, seed=len(name)), rule.reference(*inputs)) <= rule.tolerance()
