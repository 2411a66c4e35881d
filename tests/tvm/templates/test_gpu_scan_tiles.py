"""Cumulative sums by tiles that look far back: right on the emulated GPU, the same bits whichever block is first, None for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.emulated_kernel import error
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.analysis.scan import GpuScanTilesParams
from kerneldecl.arrays import poisoned
from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_scan as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_scan_tiles as template

H200 = load_arch(REPOSITORY, "h200")


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "cumsum").of(REPOSITORY, attrs)


def params_of(*values: int) -> dict[str, Value]:
    """Return the parameters in the order of their class; those that are left out are 0."""
    return dict(zip(GpuScanTilesParams._fields, (*values, 0, 0), strict=False))


CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({"shape": (2, 17001), "exclusive": True}, params_of(32, 1, 1, 16, 2)),  # sums of many groups, a ragged last tile
    ({"shape": (1, 40000), "dtype": "bfloat16", "reverse": True}, params_of(32, 4, 0, 8, 1, 7, 1)),
    ({"shape": (3, 3000), "dtype": "float16"}, params_of(64, 2, 3, 64, 1, 0, 1)),  # three tiles of a row
    ({"shape": (2, 17001), "exclusive": True}, params_of(32, 2, 0, 16, 2, 20, 1)),
    ({"shape": (2, 3001), "dtype": "float16", "reverse": True}, params_of(64, 2, 0, 4, 1, 3, 1)),  # accesses of 2 bytes
    ({"shape": (2, 5002)}, params_of(32, 2, 2, 4, 2, 0, 1)),  # copies of 8 bytes
    ({"shape": (20000,), "exclusive": True}, params_of(64, 2, 3, 8, 1, 10, 1)),  # more vectors than a thread adds up at once
    ({"shape": (30000,), "dtype": "int32", "exclusive": True, "reverse": True}, params_of(64, 1, 0, 32, 1, 117)),  # all sums first
    ({"shape": (2, 5000), "dtype": "int32"}, params_of(64, 1, 3, 1, 1)),  # each tile a group
    ({"shape": (2, 9000), "dtype": "int32"}, params_of(64, 1, 0, 1, 1, 1)),  # whose sum its own block publishes, and not the one ahead
]


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({0}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert error(template, rule_of(**attrs), params, H200) <= 1


@needs_nvcc
@pytest.mark.parametrize(("kept", "ahead"), at({1}, [(1, 0), (0, 50)]))
def test_whichever_thread_block_is_first_the_bits_are_the_same(kept: int, ahead: int) -> None:
    rule = rule_of(shape=(20000,))
    kernel = template.apply(canonical.lower(rule), params_of(32, 1, kept, 16, 2, ahead, 1), H200)
    assert kernel is not None
    (x,), (out,) = rule.inputs(np.random.default_rng(0)), rule.signature().outputs
    found = [emulate(kernel["main"], x, poisoned(out), seed=seed)[-1] for seed in (1, 2, 3)]
    assert all((each == found[0]).all() for each in found)


@needs_nvcc
@pytest.mark.parametrize(
    "params", at({0}, [params_of(64, 1, 0, 2, 1, 1), params_of(64, 2, 2, 2, 1, 0, 1), params_of(64, 1, 1, 1, 1)]), ids=str
)
def test_words_that_come_late_are_waited_for(params: dict[str, Value], monkeypatch: pytest.MonkeyPatch) -> None:
    publishes = "  uint64_t word = THERE | *reinterpret_cast<const unsigned*>(&sum);"
    waits = "  if ((size_t)to / 8 % 3 == 0) for (int i = 0; i < 3000; i++) __nanosleep(1);\n"
    source = template.scan_tiles_source

    def late(*given: Any) -> str:
        text = source(*given)
        assert publishes in text
        return text.replace(publishes, waits + publishes)

    monkeypatch.setattr(template, "scan_tiles_source", late)
    assert error(template, rule_of(shape=(2, 9000), dtype="int32"), params, H200) == 0


TIMES = {
    (256, 8, 0, 64, 9, 264, 1): 79.0,
    (256, 8, 0, 64, 5, 264, 1): 81.8,
    (256, 8, 0, 64, 9, 264, 0): 84.6,
    (256, 8, 0, 64, 9, 528, 1): 82.5,
    (512, 8, 0, 64, 5, 132, 1): 81.7,
    (256, 4, 12, 64, 9, 132, 1): 83.4,
    (256, 4, 12, 64, 5, 0, 1): 81.3,
    (256, 4, 12, 64, 9, 0, 1): 83.5,
    (256, 4, 12, 64, 9, 0, 0): 84.6,
    (512, 4, 12, 64, 5, 0, 1): 82.8,
    (256, 8, 8, 64, 9, 0, 1): 83.6,
    (256, 8, 12, 64, 9, 0, 1): 83.7,
}
"""Microseconds of one row of 33 554 432 float32 (H200, 2026-11-29)."""


def test_what_was_fast_is_proposed_first_beside_other_templates_and_its_time_is_predicted() -> None:
    proposals = policy.propose(iter_space(canonical.lower(rule_of(shape=(1 << 25,)))), H200, 16)
    tiles = [each for each in proposals if each.candidate.template == "gpu_scan_tiles"]
    params = [GpuScanTilesParams(**dict(each.candidate.params)) for each in tiles]  # type: ignore[arg-type]
    assert {each.candidate.template for each in proposals} == {"gpu_scan_tiles", "gpu_scan_once", "gpu_scan"}
    assert [each.candidate.template for each in proposals[:2]] == ["gpu_scan_tiles"] * 2
    assert TIMES[params[0]] == min(TIMES.values())
    assert TIMES[params[1]] == min(secs for (_, _, _, _, _, ahead, _), secs in TIMES.items() if not ahead)
    for each, proposal in zip(params, tiles, strict=True):
        assert proposal.predicted_secs * 1e6 == pytest.approx(TIMES[each], rel=0.05), each


@needs_nvcc
@pytest.mark.parametrize("params", at({0}, [params_of(256, 8, 0, 64, 9, 264, 1), params_of(256, 4, 12, 64, 5, 0, 1)]), ids=str)
def test_elements_of_a_tile_are_kept_in_registers(params: dict[str, Value], tmp_path: Path) -> None:
    kernel = template.apply(canonical.lower(rule_of(shape=(1 << 25,))), params, H200)
    launches = cuda.compile_cuda_object(kernel, H200, "kernel", LocalStore(tmp_path)).launches
    # Some registers of 64 may go for addresses; a tile's elements, 8 x 4 of a thread, must not.
    assert all(launch.usage.spill_bytes <= 32 for launch in launches)


@pytest.mark.parametrize("shape", [(8192, 4096), (1 << 20,), (64, 2048)], ids=str)
def test_rows_whose_tiles_a_gpu_has_at_once_look_at_neighbours(shape: tuple[int, ...]) -> None:
    proposals = policy.propose(iter_space(canonical.lower(rule_of(shape=shape))), H200, 16)
    assert "gpu_scan_tiles" not in {proposal.candidate.template for proposal in proposals}


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"shape": (10001,), "dtype": "float16"}, params_of(64, 1, 1, 16, 1)),  # copies of 2 bytes
        ({"shape": (1 << 22,)}, params_of(512, 1, 32, 16, 1)),  # 256 KB of shared memory
        ({"shape": (10000,), "dtype": "float64"}, params_of(64, 1, 0, 16, 1)),
        ({"shape": (50, 1000), "axis": 0}, params_of(64, 1, 0, 16, 1)),
        ({"shape": (10000,)}, params_of(64, 1, 0, 0, 1)),
        ({"shape": (10000,)}, params_of(64, 1, 0, 16, 0)),
        ({"shape": (10000,)}, params_of(64, 1, 0, 16, 1, 41)),  # more than there are tiles
        ({"shape": (1 << 20,)}, params_of(32, 1, 0, 64, 2)),  # more words than a thread keeps
    ],
    ids=str,
)
def test_what_does_not_fit_is_none(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert template.apply(canonical.lower(rule_of(**attrs)), params, H200) is None
