"""Owns the tests of whether this machine can measure for an arch.

Knows nothing of measuring: the machine's CPU and GPUs are made up.
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from kerneldecl.hardware import gpu_lock, host
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.hardware.cuda_driver import DriverGpu
from kerneldecl.model import Arch
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch

FIELDS = {field.name: 1 for field in dataclasses.fields(DriverGpu) if field.name not in {"model", "uuid"}}
V3, V4 = (load_arch(STANDARD, f"x86-64-{level}") for level in ("v3", "v4"))
DETECTED = dataclasses.replace(V3, name="host", model="A CPU with AVX2 (6-94)", is_detected=True)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of x86-64 with one H200 and a CPU with vectors of 32 bytes."""
    monkeypatch.setattr(gpu_lock, "_here", lambda: (DriverGpu("NVIDIA H200", **FIELDS),))
    monkeypatch.setattr(host, "detect", lambda: DETECTED)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "here", "6.1", "#1", "x86_64")))


@pytest.mark.parametrize(
    "arch",
    [V3, DETECTED, load_arch(STANDARD, "h200")],
    ids=["any CPU of the level", "this CPU", "this GPU"],
)
def test_this_machine_measures_for_its_own_cpu_and_gpu(arch: Arch) -> None:
    assert why_not_measured_here(arch) == ""


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        (dataclasses.replace(V3, model="Another CPU"), "it must be measured on Another CPU; this is A CPU with AVX2 (6-94)"),
        (V4, "arch x86-64-v4 has vectors of 64 bytes; this machine's have 32"),
        (load_arch(STANDARD, "neoverse-n1"), "it must be measured on aarch64; this machine is x86_64"),
        (load_arch(STANDARD, "t4"), "it must be measured on Tesla T4; this machine has NVIDIA H200"),
    ],
    ids=["another CPU", "wider vectors", "another machine", "another GPU"],
)
def test_other_archs_are_refused_with_a_reason(arch: Arch, reason: str) -> None:
    assert why_not_measured_here(arch) == reason
