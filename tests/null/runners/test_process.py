"""Owns the tests of one worker process on its own: how it ends, what it may use, what of it is left.

Knows nothing of TVM: what workers run are policies that misbehave.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.iter_spaces import H200, matmul

from kerneldecl.runners.group import end_all
from kerneldecl.runners.process import PRINTED_BYTES, STDERR_TAIL_BYTES, Worker
from kerneldecl.serial import to_json

POLICY = """\
import os, signal, subprocess, sys, time
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ("plain",)


def propose(space, arch, top_k):
    {body}
    return [Proposal(Candidate.of("plain", {{"n": n}}), 1e-6) for n in range(3)]
"""
CHILD = """subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", MARK], start_new_session=True)"""


class Asked:
    """A workspace whose policies are asked: each has a body, and what it is to be asked with is its `top_k`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for folder in ("policies", "templates"):
            (root / folder).mkdir(parents=True)
        (root / "templates/plain.py").write_text("def apply(mod, params, arch):\n    return None\n")
        self._space, self._arch = to_json(matmul((64, 64, 64))), to_json(H200)

    def __call__(self, worker: Worker, body: str, with_: object = 1, limit_secs: float = 60) -> dict[str, Any]:
        name = f"p{len(list((self._root / 'policies').iterdir()))}"
        (self._root / f"policies/{name}.py").write_text(POLICY.format(body=body))
        request = {"policies": [[[name], None]], "space": self._space, "arch": self._arch, "top_k": with_}
        return worker.call({"device": "policy", "action": "propose", "root": str(self._root), **request}, limit_secs)


@pytest.fixture
def ask(tmp_path: Path) -> Asked:
    return Asked(tmp_path / "space")


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker({"TVM_MARK": "here"}, memory_bytes=1 << 30, output_bytes=1 << 18)
    yield worker
    worker.stop()


DEATHS = {
    "os._exit(3)": ("its process ended with exit code 3", False),
    "os.kill(os.getpid(), signal.SIGFPE)": ("its process was killed by SIGFPE (an integer was divided by 0)", False),
    "os.kill(os.getpid(), signal.SIGKILL)": ("its process was killed by SIGKILL", True),
    "os.write(2, b'std::bad_alloc'); os.abort()": ("its process was killed by SIGABRT: out of memory", True),
}


def test_a_death_is_an_answer_with_the_last_words_and_the_next_request_gets_a_new_process(ask: Asked, worker: Worker) -> None:
    for body, (failure, is_transient) in DEATHS.items():
        answer = ask(worker, f"os.write(2, b'x' * {STDERR_TAIL_BYTES} + b'last words '); {body}")
        assert (answer["failure"], answer.get("is_transient", False)) == (failure, is_transient)
        assert "last words" in answer["diagnostics"]
        assert len(answer["diagnostics"]) <= STDERR_TAIL_BYTES
    assert len(ask(worker, "pass")["groups"]) == 1


def test_what_a_dead_worker_has_started_and_held_is_gone_with_its_answer(ask: Asked, tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    child = CHILD.replace("MARK", repr(mark))
    before = psutil.Process().num_fds()
    worker = Worker({"TMPDIR": str(tmp_path)})
    for end in ("os._exit(3)", "time.sleep(1000)"):
        assert "failure" in ask(worker, f"{child}; {end}", limit_secs=2 if "sleep" in end else 60)
        assert not [each for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or [])]
        assert not list(tmp_path.glob("worker-*"))
        assert psutil.Process().num_fds() == before
    worker.stop()


def test_a_stop_ends_the_request_under_way_and_leaves_nothing(ask: Asked, tmp_path: Path) -> None:
    before, answers = psutil.Process().num_fds(), list[dict[str, Any]]()
    worker = Worker({"TMPDIR": str(tmp_path)})
    ask(worker, "pass")
    assert [list(folder.iterdir()) for folder in tmp_path.glob("worker-*")] == [[]], "a folder of its own, empty"
    thread = threading.Thread(
        target=lambda: answers.append(ask(worker, f"open({str(tmp_path / 'asked')!r}, 'w').close(); time.sleep(1000)"))
    )
    thread.start()
    while not (tmp_path / "asked").exists():
        thread.join(0.01)
        assert thread.is_alive()
    worker.stop()
    thread.join(20)
    assert [answer["failure"] for answer in answers] == ["interrupted"]
    assert not list(tmp_path.glob("worker-*"))
    assert psutil.Process().num_fds() == before


def test_answers_and_what_is_printed_are_bounded(ask: Asked) -> None:
    worker = Worker({}, output_bytes=PRINTED_BYTES * 2)
    try:
        printed = ask(worker, f"print('first'); sys.stderr.write('x' * {PRINTED_BYTES}); print('last')")["printed"]
        assert len(printed) <= PRINTED_BYTES
        assert (printed[0], printed[-4:]) == ("x", "last"), "its end is kept"
        assert ask(worker, f"print('x' * {PRINTED_BYTES * 3})")["failure"] == f"printed more than {PRINTED_BYTES * 2} bytes"
        many = f"return [Proposal(Candidate.of('plain', {{'n': n}}), 1e-6) for n in range({PRINTED_BYTES // 8})]"
        assert ask(worker, many) == {"failure": f"answered with more than {PRINTED_BYTES * 2} bytes"}
        large = "x" * (1 << 20)
        assert ask(worker, "print(len(top_k))", large)["printed"] == str(len(large)), "no more than this request printed"
        assert "printed" not in ask(worker, "pass")
    finally:
        worker.stop()


def test_a_worker_has_its_variables_folder_memory_and_session(ask: Asked, tmp_path: Path) -> None:
    worker = Worker({"TVM_MARK": "here"}, folder=tmp_path, memory_bytes=1 << 30)
    told = (
        "import resource; print(os.environ['TVM_MARK'], os.getcwd(), resource.getrlimit(resource.RLIMIT_DATA), os.getsid(0) == os.getpid())"
    )
    try:
        assert ask(worker, told)["printed"] == f"here {tmp_path} {(1 << 30, 1 << 30)} True"
        assert ask(worker, "bytearray(2 << 30)")["is_transient"]
    finally:
        worker.stop()


def test_a_worker_ends_where_its_parent_does(ask: Asked, worker: Worker) -> None:
    """By the pipe that the parent alone holds open, whatever the worker is doing."""
    ask(worker, "pass")
    process = worker._process
    assert process is not None
    os.close(worker._lifeline)
    worker._lifeline = -1
    assert process.wait(20) == -signal.SIGIO


class Stuck(subprocess.Popen[bytes]):
    """A process that a driver keeps after it was killed, as far as one sees that waits for it."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            raise subprocess.TimeoutExpired("stuck", timeout)
        return super().wait()


def test_a_build_does_not_wait_for_ever_for_a_process_that_was_killed() -> None:
    process = Stuck(["sleep", "1000"], start_new_session=True)
    end_all(process, "KERNELDECL_WORKER=none")
    assert process.wait() == -signal.SIGKILL
