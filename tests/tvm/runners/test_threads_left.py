"""Owns the test of a kernel that leaves a thread behind, which ends the worker while another kernel runs: that one is not blamed.

Knows nothing of how candidates are built: both are compiled from C++.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.repository import REPOSITORY
from tvm_ffi import libinfo

from kerneldecl.hardware import host
from kerneldecl.model import Candidate, Trial, Workload
from kerneldecl.runners.local import LocalRunner, Request
from kerneldecl.runners.process import Answer
from kerneldecl.store.keys import symbol
from kerneldecl.store.local import LocalStore
from kerneldecl.store.results import Lowered
from kerneldecl.timing import measuring
from kerneldecl.toolchain import cxx
from kerneldecl.tuning.measure import Preparation, measure
from kerneldecl.tuning.task import Task

KERNELS = Path(__file__).with_name("wrong_kernels.cpp")
LOWERED = {"computation": "c" * 64, "tolerance": 1e-4, "space": {"blocks": [], "inputs": [], "outputs": []}}
LEAVES_A_THREAD = """
static bool is_begun = false;
BINARY(SYMBOL, ADD; if (!is_begun) { is_begun = true; std::thread([] {
    while (!std::getenv("OTHER_RUNS")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    *(volatile int*)nullptr = 1; }).detach(); })
"""
"""Ends the process as soon as the other kernel runs."""
RIGHT = """
static bool is_begun = false;
BINARY(SYMBOL, setenv("OTHER_RUNS", "1", 1);
       if (!is_begun) { is_begun = true; std::this_thread::sleep_for(std::chrono::milliseconds(300)); } ADD)
"""


class Noting(LocalRunner):
    """Remembers in which action a process died."""

    died: list[str]

    def measure(self, request: Request, limit_secs: float) -> Answer:
        answer = super().measure(request, limit_secs)
        if answer.get("has_died"):
            self.died = [*getattr(self, "died", []), str(request["action"])]
        return answer


def test_a_right_kernel_is_not_blamed_for_a_thread_that_another_has_left(tmp_path: Path) -> None:
    for name, text in (("leaves", LEAVES_A_THREAD), ("right", RIGHT)):
        source = tmp_path / f"{name}.cpp"
        source.write_text(f'#include "{KERNELS}"\n' + text.replace("SYMBOL", symbol(str(LOWERED["computation"]))), encoding="utf-8")
        flags = ["-O0", "-w", "-shared", "-fPIC", f"-I{libinfo.find_include_path()}"]
        subprocess.run([cxx.compiler(), *flags, str(source), "-o", str(tmp_path / f"{name}.so"), "-lpthread"], check=True)
    arch = host.detect()
    task = Task(
        root=REPOSITORY,
        workload=Workload("w", "box", "elementwise", (("op", "add"), ("shape", (1003,))), "auto", 20, None, (), 1),
        arch=arch,
        groups=(),
        lowered=Lowered(LOWERED),
        tolerance=1e-4,
        protocol=measuring(arch.kind),
        seed=20,
        reference_digest="reference",
        toolchain={},
        folder=tmp_path,
        cache=tmp_path,
        times_finalists=False,
    )
    store = LocalStore(tmp_path / "store")
    built = [Trial(Candidate.of(name, {}), 1e-5, schedule_digest=name, code_digest=name, code_bytes=1) for name in ("leaves", "right")]
    with Noting(1, 1) as runner:
        done = measure(task, built, Preparation(task, runner, store), runner, store, lambda *_: None)
        assert runner.died[0] == "verify"
    right = next(trial for trial in done if trial.code_digest == "right")
    assert right.failure == ""
    assert right.samples
