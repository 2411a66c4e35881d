"""Owns a machine with GPUs that no machine has: their names, an nvcc that compiles nothing, workers that answer in process.

Knows nothing of what a test expects. Locks are real.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kerneldecl.hardware.cuda_driver import DriverGpu
from support.fakes import FakeRunner

MODEL = "Test GPU"
_FIELDS = {field.name: 1 for field in dataclasses.fields(DriverGpu) if field.name not in {"model", "uuid", "pci"}}
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{version}" ;;
  --list-gpu-code) echo "sm_75 sm_80 sm_90" ;;
esac
"""


def fake_gpu(number: int) -> DriverGpu:
    return DriverGpu(MODEL, **_FIELDS, uuid=f"GPU-{number:08x}-of-no-machine", pci=f"0000:{number:02x}:00.0")


def put_nvcc(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an nvcc of a version first on PATH."""
    folder.mkdir(exist_ok=True)
    (folder / "nvcc").write_text(NVCC.format(release=version.rpartition(".")[0], version=version), encoding="ascii")
    (folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


class FakeWorker:
    """Answers in process what a runner with real locks asks it."""

    pid = 7

    def __init__(self, environment: Mapping[str, str], *modules: str, **limits: Any) -> None:
        del modules, limits
        self.uuid = environment.get("CUDA_VISIBLE_DEVICES", "")
        self.call = FakeRunner().measure

    def start(self) -> None:
        pass

    stop = start
