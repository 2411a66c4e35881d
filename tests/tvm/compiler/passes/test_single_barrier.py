"""Pipelined loops of GEMMs on tensor cores have one barrier per iteration with three stages or more, and two barriers with two stages.

With register double buffering there is one barrier as well, between the last loads of an iteration and the first ones of the next.
"""

from __future__ import annotations

import pytest
from support.repository import REPOSITORY
from support.thinned import only

from kerneldecl.compiler import canonical, cpu
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.model import Candidate, Value
from kerneldecl.plugins.load import load_arch, load_rule

ROOT = REPOSITORY
ARCH = load_arch(ROOT, "h200")
WAIT = "tvm_builtin_ptx_cp_async_wait_group"
TILE: dict[str, Value] = {
    "block_m": 64,
    "block_n": 64,
    "block_k": 32,
    "warps_m": 2,
    "warps_n": 2,
    "raster_group": 1,
    "smem_epilogue": 0,
    "split_k": 1,
}


def main_loop(source: str) -> str:
    """Return the text of the one loop that both copies and multiplies."""
    found = [loop for loop in loops(source) if "ptx_cp_async_legacy" in loop and "mma.sync" in loop]
    return min(found, key=len)


def loops(source: str) -> list[str]:
    """Return each loop with its body, to the brace that closes it."""
    starts = [at for at in range(len(source)) if source.startswith("for (int", at)]
    return [source[at : closing(source, source.index("{", at))] for at in starts]


def closing(source: str, opening: int) -> int:
    depth = 0
    for at in range(opening, len(source)):
        depth += {"{": 1, "}": -1}.get(source[at], 0)
        if depth == 0:
            return at + 1
    raise AssertionError("braces match")


def loop_of(params: dict[str, Value], layout: str) -> str:
    attrs = {"m": 256, "n": 256, "k": 1024, "layout": layout, "dtype": "float16"}
    mod = canonical.lower(load_rule(ROOT, "matmul").of(ROOT, attrs))
    applied = cpu.apply_candidate(ROOT, mod, Candidate.of("gpu_matmul_tc", {**TILE, **params}), ARCH)
    assert applied is not None
    return main_loop(cuda_source(applied.mod, ARCH, "kd_product"))


@pytest.mark.parametrize("layout", only(("nt",), ["nn", "nt", "tn", "tt"]))
@pytest.mark.parametrize(("stages", "barriers"), [(2, 2), (3, 1), (4, 1)])
def test_barriers_per_iteration(layout: str, stages: int, barriers: int) -> None:
    loop = loop_of({"stages": stages}, layout)
    assert loop.count("__syncthreads()") == barriers
    assert loop.count(WAIT) == 1
    if barriers == 1:
        # The wait is for the tile that is multiplied next; the copies overwrite a tile that all threads have read.
        assert loop.index(WAIT) < loop.index("__syncthreads()") < loop.index("ptx_cp_async_legacy")


@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("stages", [3, 4])
def test_the_barrier_with_register_double_buffering(layout: str, stages: int) -> None:
    loop = loop_of({"stages": stages, "double_buffer": 1}, layout)
    assert loop.count("__syncthreads()") == loop.count(WAIT) == 1
    # Copies follow the barrier of the previous iteration; the next iteration's first loads and the last mma follow this one's.
    copied, waited, met = loop.index("ptx_cp_async_legacy"), loop.index(f"wait_group_{stages - 2}("), loop.index("__syncthreads()")
    assert copied < loop.index("ldmatrix") < loop.index("mma.sync") < waited < met < loop.rindex("ldmatrix") < loop.rindex("mma.sync")
