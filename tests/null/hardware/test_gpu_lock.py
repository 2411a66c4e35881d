"""Owns the tests of choosing and locking a GPU, with real processes and locks, and a fake driver.

Knows nothing of measuring.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kerneldecl.errors import ToolchainError
from kerneldecl.hardware import gpu_lock
from kerneldecl.hardware.cuda_driver import DriverGpu
from kerneldecl.hardware.gpu_lock import gpus_of, held_gpu, lock_of, why_not_here
from kerneldecl.runners import nvml
from kerneldecl.runners.local import LocalRunner

FIELDS = {field.name: 1 for field in dataclasses.fields(DriverGpu) if field.name not in {"model", "uuid", "pci"}}
T4 = DriverGpu("Tesla T4", **FIELDS, uuid="GPU-0")
H200 = DriverGpu("NVIDIA H200", **FIELDS, uuid="GPU-1")
SECOND = dataclasses.replace(H200, uuid="GPU-2")
HOLDER = """
import sys
from pathlib import Path
from kerneldecl.store.lock import exclusive_of
with exclusive_of([Path(path) for path in sys.argv[1:]], "measuring on it", print) as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provide a machine with one T4 and two H200, and a temporary folder of its own."""
    monkeypatch.setattr(gpu_lock, "_here", lambda: (T4, H200, SECOND))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def holder(*held: DriverGpu) -> subprocess.Popen[str]:
    """Start a process that locks the first of the GPUs that is free."""
    command = [sys.executable, "-c", HOLDER, *(str(lock_of(gpu)) for gpu in held)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(lock_of(held[0]))
    return process


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    process = holder(H200)
    yield process
    process.communicate()


def test_a_gpu_is_chosen_by_its_name() -> None:
    assert gpus_of("NVIDIA H200") == (H200, SECOND)
    assert gpus_of("") == (T4, H200, SECOND)
    assert why_not_here("Tesla T4") == ""
    assert why_not_here("NVIDIA A100") == "it must be measured on NVIDIA A100; this machine has Tesla T4, NVIDIA H200"


def test_a_machine_without_a_gpu_or_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "_here", tuple)
    assert why_not_here("NVIDIA H200") == "it must be measured on NVIDIA H200; this machine shows no GPU"

    def no_driver() -> tuple[DriverGpu, ...]:
        raise ToolchainError("no NVIDIA driver here: libcuda.so.1 is not found")

    monkeypatch.setattr(gpu_lock, "_here", no_driver)
    sentence = "it must be measured on NVIDIA H200; no NVIDIA driver here: libcuda.so.1 is not found"
    assert why_not_here("NVIDIA H200") == sentence
    request = {"action": "prepare", "device": "cuda", "model": "NVIDIA H200", "spec": {}}
    with LocalRunner(1, 1) as runner, pytest.raises(ToolchainError, match="no NVIDIA driver here"):
        runner.measure(request, 1.0)


def test_readings_that_nvml_does_not_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml-of-no-machine.so")
    nvml._library.cache_clear()
    assert (nvml.conditions("GPU-1"), nvml.driver_version()) == ({}, "")
    nvml._library.cache_clear()


def test_a_busy_gpu_is_passed_over(busy: subprocess.Popen[str]) -> None:
    said: list[str] = []
    with held_gpu("NVIDIA H200", said.append) as gpu:
        assert gpu == SECOND
    assert said == []
    assert busy.poll() is None


def test_while_all_are_busy_the_awaited_process_is_named(busy: subprocess.Popen[str]) -> None:
    other = holder(SECOND)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        other.communicate()

    with held_gpu("NVIDIA H200", say) as gpu:
        assert gpu == SECOND, "whichever is free first"
    (sentence,) = said
    assert f"process {busy.pid} on " in sentence
    assert "is measuring on NVIDIA H200: waiting for it to finish" in sentence


def test_a_gpu_is_free_again_when_its_holder_is_gone_or_killed() -> None:
    for end in ("communicate", "kill"):
        process = holder(H200)
        getattr(process, end)()
        process.wait()
        with held_gpu("NVIDIA H200", print) as gpu:
            assert gpu == H200
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def test_a_runner_holds_its_gpu_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "_here", lambda: (H200,))
    request = {"action": "no such action", "device": "cuda", "model": "NVIDIA H200"}
    with LocalRunner(1, 1) as runner:
        assert "failure" in runner.measure(request, 60.0)
        said: list[str] = []
        other = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(lock_of(H200))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        said.append(other.stdout.readline())
        assert "is measuring on it: waiting" in said[0]
    assert other.stdout.readline().strip() == str(lock_of(H200))
    other.communicate()
