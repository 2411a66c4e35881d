"""Grouped GEMM on wgmma computes what the rule does, whatever the sizes of groups: on a real GPU."""

from __future__ import annotations

import pytest
from support.gpu_kernels import Case, Checked, given, proposed
from support.grouped_cases import GROUPED, OFFSETS, PLAIN, RULE, SMALL, SMS

pytestmark = pytest.mark.gpu

TEMPLATE = "wgmma_matmul_grouped"
EDGES = """
from dataclasses import dataclass

import numpy as np

from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule


@dataclass(frozen=True, kw_only=True)
class Edges(load_rule(STANDARD, "matmul_grouped")):
    offsets: tuple[int, ...] = ()

    def sizes(self, rng):
        return np.array(self.offsets, np.int32)
"""

EMULATED = [Case(name, RULE, SMALL | attrs, given(TEMPLATE, PLAIN | params), SMS) for name, (attrs, params) in GROUPED.items()]
SEVERAL = given(
    TEMPLATE,
    PLAIN,
    PLAIN | {"block_n": 128, "cluster_n": 2, "block_m": 256, "raster_group": 16},
    PLAIN | {"block_n": 128, "cluster_n": 2, "kernel_schedule": "pingpong"},
    PLAIN | {"kernel_schedule": "staggered"},
)
AT_EDGES = [
    Case(name, "edges", SMALL | {"n": 264, "offsets": offsets}, SEVERAL, files={"rules/edges.py": EDGES})
    for name, offsets in OFFSETS.items()
]
LARGE = [
    Case("the policy's", RULE, {"rows": 32768, "groups": 128, "n": 2048, "k": 768}, proposed(TEMPLATE, step=3)),
    Case("few rows", RULE, {"rows": 256, "groups": 64, "n": 1024, "k": 1024, "dtype": "float16"}, proposed(TEMPLATE, step=5)),
    Case("float8", RULE, {"rows": 4096, "groups": 32, "n": 2048, "k": 768, "dtype": "float8_e4m3fn"}, proposed(TEMPLATE, step=3)),
    Case("masked", RULE, {"rows": 200, "groups": 32, "n": 1000, "k": 712, "masked": True}, proposed(TEMPLATE, step=5)),
]


@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", AT_EDGES, ids=str)
def test_sizes_at_the_edges(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_ones(case: Case, check: Checked) -> None:
    check(case)
