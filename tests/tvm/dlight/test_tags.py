"""Owns the tests of TVM's target tags: each names the very GPU, or is refused with the nearest archs.

Knows nothing of functions or of policies.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.target import Target

from kerneldecl.dlight import CUDA, device
from kerneldecl.plugins.find import HOST, STANDARD, plugin_names
from kerneldecl.plugins.load import load_arch

GPU_OF_TAG = {
    "nvidia/geforce-rtx-2080-ti": "rtx-2080-ti",
    "nvidia/geforce-rtx-3080": "rtx-3080",
    "nvidia/geforce-rtx-3090": "rtx-3090",
    "nvidia/geforce-rtx-4090": "rtx-4090",
    "nvidia/jetson-agx-orin-64gb": "orin",
    "nvidia/nvidia-a10": "a10",
    "nvidia/nvidia-a100": "a100-40gb",
    "nvidia/nvidia-a30": "a30",
    "nvidia/nvidia-a40": "a40",
    "nvidia/nvidia-b100": "b100",
    "nvidia/nvidia-t4": "t4",
    "nvidia/rtx-a6000": "a6000",
}
"""Every tag of TVM's that one arch is for; the others are refused. "nvidia/nvidia-h100" is for two boards with different chips."""
OWN_ATTRIBUTES = {"nvidia/geforce-rtx-4090", "nvidia/nvidia-a100", "nvidia/nvidia-a30", "nvidia/nvidia-b100"}
"""Tags whose targets have attributes that no other tag's have: a Target made of them still names one GPU."""
CUDA_TAGS = [tag for tag in sorted(tvm.target.list_tags()) if Target(tag).kind.name == "cuda"]


@pytest.fixture(autouse=True)
def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_here", lambda: None)
    monkeypatch.setattr(device, "_declared", functools.cache(device._declared))  # a thousand targets are resolved below


def named(target: Any) -> str:
    """Return the arch that a target leads to; empty where it is refused with the name of an arch."""
    try:
        return CUDA(target).arch.name
    except ValueError as error:
        return "" if any(name in str(error) for name in device._declared()) else f"refused without a choice: {error}"


def test_every_tag_leads_to_its_own_gpu_or_is_refused() -> None:
    assert len(CUDA_TAGS) > 200
    assert {tag: name for tag in CUDA_TAGS if (name := named(tag))} == GPU_OF_TAG


@pytest.mark.parametrize("target_of", [Target, lambda tag: {"tag": tag}, lambda tag: Target({"tag": tag})])
def test_a_target_made_of_a_tag_never_leads_to_another_gpu(target_of: Callable[[str], Any]) -> None:
    found = {tag: name for tag in CUDA_TAGS if (name := named(target_of(tag)))}
    assert found == {tag: GPU_OF_TAG[tag] for tag in (OWN_ATTRIBUTES if target_of is Target else GPU_OF_TAG)}


def test_every_tag_that_an_arch_names_is_tvms() -> None:
    archs = [load_arch(STANDARD, name) for name in plugin_names("archs", STANDARD) if name != HOST]
    tags = {tag for arch in archs for tag in arch.tvm_tags}
    assert tags <= set(CUDA_TAGS)
    assert tags == {*GPU_OF_TAG, "nvidia/nvidia-h100"}
    for arch in archs:
        for tag in arch.tvm_tags:
            capability = "sm_{}{}".format(*arch.the_gpu.compute_capability)
            assert str(Target(tag).attrs["arch"]).rstrip("af") == capability


def test_of_boards_that_differ_in_memory_alone_the_smaller_is_taken_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cuda = CUDA(Target("nvidia/nvidia-a100"))
    assert cuda.arch.name == "a100-40gb"
    assert "a100-40gb, a100-80gb, which differ in memory alone; a100-40gb, the smaller one, is taken" in cuda.note
    assert caplog.messages == [cuda.note]
    assert not CUDA("a100-80gb").note


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nvidia/nvidia-v100", "no arch has compute capability 7.0; expected one of a10, "),
        ("nvidia/geforce-rtx-2080", "no arch describes nvidia/geforce-rtx-2080; of the same compute capability are rtx-2080-ti, t4;"),
        ("nvidia/nvidia-h100", "can be h100-pcie, h100-sxm; name one of them"),
        (Target("nvidia/nvidia-t4"), 'nvidia/nvidia-t4, .* name the GPU by the tag\'s text or an arch\'s, one of "rtx-2080-ti", "t4"'),
        ("nvidia/geforce-gtx-1080", "no arch has compute capability 6.1; expected one of a10, "),
    ],
)
def test_a_tag_of_another_gpu_is_refused_with_the_nearest_archs(target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CUDA(target)


def test_archs_of_a_workspace_can_have_tags(write_files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    text = (STANDARD / "archs" / "t4.toml").read_text(encoding="utf-8").replace("nvidia/nvidia-t4", "nvidia/geforce-rtx-2080")
    monkeypatch.chdir(write_files({"archs/rtx-2080.toml": text}))
    assert CUDA("nvidia/geforce-rtx-2080").arch.name == "rtx-2080"
