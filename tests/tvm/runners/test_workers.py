"""Owns the tests of worker processes: candidates that crash, hang, print or compute wrongly, and parents that die.

Knows nothing of policies: templates misbehave on purpose.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fake_gpus import MODEL, fake_gpu
from support.spaces import REAL, Space, clean_environment
from support.thinned import only

from kerneldecl.compiler.actions import lower
from kerneldecl.errors import LostGpuError
from kerneldecl.hardware import gpu_lock
from kerneldecl.hardware.host import detect
from kerneldecl.runners.local import LocalRunner
from kerneldecl.runners.process import Worker
from kerneldecl.serial import to_json
from kerneldecl.toolchain.versions import PINS

HEAD = REAL["workloads.toml"].partition("[[workload]]")[0].replace("top_k = 2", "top_k = 9")
ENTRY = '[[workload]]\nname = "relu"\nrule = "elementwise"\nop = "relu"\nshape = [{n}, 8]\n'
MISBEHAVING = """\
import os
import signal
import sys
import time

import tvm
from tvm import te


def wrong(mod):
    x = te.placeholder(mod["main"].params[0].shape, "float32", "X")
    y = te.compute(x.shape, lambda *i: x(*i) + 1.0, name="Y")
    func = te.create_prim_func([x, y], index_dtype_override="int64")
    return tvm.IRModule({"main": func.with_attr({"global_symbol": "main", "tirx.noalias": True, "s_tir": True})})


def apply(mod, params, arch):
    match params["way"]:
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("no such loop\\nBoom")
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                pass
        case "print":
            print('{"code": "nonsense"}', flush=True)
            os.write(1, b"more nonsense\\n")
            sys.stderr.write("and an error\\n")
        case "wrong":
            return tvm.s_tir.Schedule(wrong(mod))
        case "none":
            return None
        case "divide":
            os.kill(os.getpid(), signal.SIGFPE)
    return tvm.s_tir.Schedule(mod)
"""
POLICY = """\
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ("misbehaving",)
WAYS = {ways}


def propose(space, arch, top_k):
    return tuple(Proposal(Candidate.of("misbehaving", {{"way": way}}), 1e-6) for way in WAYS)
"""


def misbehaving(space: Space, *ways: str) -> Space:
    files = {"policies/plain.py": POLICY.format(ways=ways), "templates/misbehaving.py": MISBEHAVING}
    return space.write({**files, "workloads.toml": HEAD + ENTRY.format(n=8)})


def case(space: Space) -> dict[str, Any]:
    return {"root": str(space.root), "rule": "elementwise", "attrs": {"op": "relu", "shape": [8, 8], "dtype": "float32"}}


def build_request(space: Space, way: str) -> dict[str, object]:
    candidate = {"template": "misbehaving", "params": {"way": way}}
    described = {**case(space), "cache": str(space.root / "cache"), "computation": lower(**case(space))["computation"]}
    where = {"arch": to_json(detect()), "toolchain": dict(PINS), "folder": str(space.root), "force": False}
    return {"action": "build", "spec": described, "candidate": candidate, **where}


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker({})
    yield worker
    worker.stop()


def test_a_dead_worker_is_an_answer_and_the_next_request_gets_a_new_one(space: Space, worker: Worker) -> None:
    misbehaving(space, "crash")
    assert worker.call(build_request(space, "crash"), 60)["failure"] == "its process was killed by SIGSEGV"
    assert worker.call(build_request(space, "exit"), 60)["failure"] == "its process ended with exit code 3"
    assert worker.call(build_request(space, "divide"), 60)["failure"] == "its process was killed by SIGFPE (an integer was divided by 0)"
    assert "code_digest" in worker.call(build_request(space, "good"), 60)


@pytest.mark.parametrize("way", only(("spin",), ["hang", "spin"]))
def test_a_request_has_a_limit(space: Space, worker: Worker, way: str) -> None:
    misbehaving(space, way)
    assert worker.call(build_request(space, "good"), 60)["code_digest"]
    assert worker.call(build_request(space, way), 0.5) == {"failure": "took more than 0.5 s", "is_transient": True}
    assert worker.call({"action": "lower", **case(space)}, 60)["computation"]


def test_an_exception_of_a_candidate_is_reported_by_its_last_line(space: Space, worker: Worker) -> None:
    misbehaving(space, "raise")
    assert worker.call(build_request(space, "raise"), 60)["failure"] == "templates/misbehaving.py:24: ValueError: Boom"


def test_what_a_candidate_prints_is_no_answer(space: Space, worker: Worker) -> None:
    misbehaving(space, "print")
    answer = worker.call(build_request(space, "print"), 60)
    assert len(answer["code_digest"]) == 64


def test_a_stopped_worker_runs_nothing(worker: Worker) -> None:
    worker.stop()
    assert worker.call({"action": "lower"}, 1) == {"failure": "interrupted"}


@pytest.mark.parametrize("hanging", [(), pytest.param(("hang",), marks=pytest.mark.slow)], ids=["none hangs", "one hangs"])
def test_bad_candidates_are_kept_with_their_reasons_and_a_good_one_wins(space: Space, hanging: tuple[str, ...]) -> None:
    from kerneldecl import api
    from kerneldecl.planning.workspace import open_workspace
    from kerneldecl.stages.session import Options

    misbehaving(space, "crash", "raise", "none", "wrong", *hanging, "print", "good")
    space.write({"workloads.toml": f"{HEAD}[limits]\nbuild_secs = 8\n\n{ENTRY.format(n=8)}"})
    done = api.run_build(open_workspace(space.root), (), Options(jobs=2), lambda _: None)
    assert not done.failures
    (path,) = space.records("tune")
    result = json.loads(path.read_text())["result"]
    assert (result["measured"], result["wanted"]) == (6, 6 + len(hanging)), "the one that hangs was tried twice"
    measurements = result["trials"]
    reasons = {m["candidate"]["params"]["way"]: m.get("failure", "") for m in measurements}
    assert reasons.pop("wrong").startswith("wrong: relative error ")
    assert reasons == {
        "crash": "its process was killed by SIGSEGV",
        "raise": "templates/misbehaving.py:24: ValueError: Boom",
        "none": "the template does not apply",
        **dict.fromkeys(hanging, ""),  # the machine may have been busy
        "print": "",
        "good": "",
    }
    assert measurements[0]["candidate"]["params"]["way"] in {"print", "good"}


@pytest.mark.slow
def test_an_entry_whose_candidates_are_all_wrong_fails_and_the_others_are_built(space: Space) -> None:
    misbehaving(space, "wrong", "none", "good")
    space.edit("templates/misbehaving.py", 'params["way"]:', '(params["way"] if mod["main"].params[0].shape[0] == 8 else "good"):')
    space.edit(
        "templates/misbehaving.py",
        "    return tvm.s_tir.Schedule(mod)",
        "    return None if params['way'] == 'good' and mod['main'].params[0].shape[0] == 8 else tvm.s_tir.Schedule(mod)",
    )
    space.write({"workloads.toml": HEAD + ENTRY.format(n="[8, 9]")})
    space.edit("workloads.toml", "shape = [[8, 9], 8]", "shape = [[8, 8], [9, 8]]")
    done = space.run("build", "--keep-going", code=1)
    assert "failed relu[shape=8x8]@host: none of 3 candidates passed: the template does not apply; wrong: relative error" in done.stdout
    assert "2 entries: 1 tuned, 1 failed in " in done.stdout
    assert len(space.records("tune")) == 1
    manifest = json.loads((space.artifact() / "manifest.json").read_text())
    assert [entry["name"] for entry in manifest["entries"]] == ["relu[shape=9x8]"]
    assert list(manifest["missing"]) == ["relu[shape=8x8]"]


PARENT = """
import json, sys, threading
from kerneldecl.runners.process import Worker
worker = Worker({})
good, bad = map(json.loads, sys.stdin.read().splitlines())
assert "code_digest" in worker.call(good, 60), "a first request, so that the next one is in its template soon"
print(worker._process.pid, flush=True)
worker.call(bad, 1000)
"""


@pytest.mark.parametrize("way", only(("spin",), ["hang", "spin"]))
def test_workers_vanish_with_a_parent_that_is_killed(space: Space, way: str) -> None:
    misbehaving(space, way)
    requests = f"{json.dumps(build_request(space, 'good'))}\n{json.dumps(build_request(space, way))}\n"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_environment(), text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(requests)
    parent.stdin.close()
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.3)
    assert worker.is_running()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert psutil.wait_procs([worker], timeout=10)[1] == []


def test_workers_end_with_their_runner(space: Space) -> None:
    misbehaving(space, "good")
    with LocalRunner(2, 1) as runner:
        list(runner.run_all([{"action": "lower", **case(space)}] * 3, 60))
        children = [child for child in psutil.Process().children() if "kerneldecl.runners.worker" in child.cmdline()]
        assert 1 <= len(children) <= 2
    assert not [child for child in children if child.is_running()]
    assert Path(space.root).is_dir()


def test_torch_is_not_imported_with_a_workers_modules_and_can_be_later(tmp_path: Path) -> None:
    """tvm_ffi imports torch where it is installed."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    script = """
import sys
from kerneldecl.runners import worker
worker.imported("kerneldecl.runners.cpu")
worker.imported("kerneldecl.compiler.actions")
assert "torch" not in sys.modules and "tvm" in sys.modules
try:
    import torch
except SystemExit as error:
    print(error)
"""
    environment = clean_environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tmp_path), environment.get("PYTHONPATH", ""))))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "torch was imported\n", done.stderr


def has_tvm(process: psutil.Process) -> bool:
    return any("tvm" in Path(mapped.path).name for mapped in process.memory_maps())


def test_workers_that_are_started_import_tvm_while_nobody_asks_them_and_end_with_their_runner() -> None:
    def workers() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if "kerneldecl.runners.worker" in child.cmdline()]

    with LocalRunner(3, 1) as runner:
        runner.start(2)
        deadline = time.monotonic() + 60
        while len(started := workers()) < 2 or not all(map(has_tvm, started)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(started) == 2
    assert not workers()
    with LocalRunner(3, 1) as runner:
        runner.start(2)
    assert not workers(), "one that has hardly begun ends, too"


@pytest.mark.slow
def test_each_gpus_process_sees_its_own_gpu_alone_and_is_lost_where_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lock, "_here", lambda: (fake_gpu(1), fake_gpu(2)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    request = {"action": "is_there", "device": "cuda", "model": MODEL}
    with LocalRunner(1, 1) as runner:
        both = runner.side_by_side(MODEL, 2)
        assert len(both) == 2
        assert runner.side_by_side(MODEL, 2) == both, "GPUs are locked once"
        for number, each in enumerate(both, start=1):
            with pytest.raises(LostGpuError, match=f"^{MODEL} GPU-0000000{number} at 0000:0{number}:00.0 no longer answers: "):
                each.measure(request, 60.0)
        seen = [process.environ().get("CUDA_VISIBLE_DEVICES") for process in psutil.Process().children()]
        assert {fake_gpu(1).uuid, fake_gpu(2).uuid} <= set(seen)
