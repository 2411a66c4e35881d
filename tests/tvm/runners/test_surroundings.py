"""Owns the tests of what workers get and may use: modules, variables, folder, memory, output, processes; and of second tries.

Knows nothing of policies: templates misbehave on purpose.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.spaces import REAL, Space, clean_environment
from support.thinned import at

from kerneldecl.compiler import actions
from kerneldecl.compiler.canonical import lower, module_digest
from kerneldecl.errors import ToolchainError
from kerneldecl.hardware.host import detect
from kerneldecl.limits import Limits
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule
from kerneldecl.runners import environment
from kerneldecl.runners.events import Printed, Ran
from kerneldecl.runners.local import LocalRunner, in_order
from kerneldecl.runners.process import Worker
from kerneldecl.serial import to_json
from kerneldecl.toolchain import cxx
from kerneldecl.toolchain.versions import PINS

SHADOWED = ("json", "numpy", "tvm", "tvm_ffi", "random", "tempfile", "signal", "select", "pathlib", "fcntl", "tomli", "__future__")
"""Modules that this package or TVM imports."""
STARTS = {
    # For `-m`, Python imports contextlib and others itself before it comes to any package.
    "module": (["-m", "kerneldecl"], SHADOWED),
    "script": (["-P", "-c", "import sys; from kerneldecl.__main__ import main; sys.exit(main())"], (*SHADOWED, "contextlib", "kerneldecl")),
}
HOSTILE = """\
import os
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ran"), "a") as file:
    file.write(__name__ + "\\n")
raise SystemExit(7)
"""
TEMPLATE = """\
import json
import os
import subprocess
import sys
import time

import tvm


def apply(mod, params, arch):
    match params["way"]:
        case "tell":
            print(json.dumps({"folder": os.listdir(), "names": sorted(os.environ), "path": sys.path}))
        case "chatter":
            while True:
                print("x" * 1000)
        case "allocate":
            bytearray(3 << 30)
        case "children":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "MARK"], start_new_session=True)
            time.sleep(1000)
        case "killed once" | "killed":
            marker = "MARKER"
            if params["way"] == "killed" or not os.path.exists(marker):
                open(marker, "w").close()
                os.kill(os.getpid(), 9)
    return tvm.s_tir.Schedule(mod)
"""


@functools.cache
def relu_computation() -> str:
    return module_digest(lower(load_rule(STANDARD, "elementwise").of(STANDARD, {"op": "relu", "shape": [8, 8]})))


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker({}, memory_bytes=2 << 30, output_bytes=1 << 20)
    yield worker
    worker.stop()


def request(space: Space, way: str) -> dict[str, Any]:
    """Return a request to build a candidate whose template behaves in a way."""
    text = TEMPLATE.replace("MARKER", str(space.root / "killed")).replace("MARK", str(space.root))
    space.write({"templates/ways.py": text})
    spec = {"root": str(space.root), "rule": "elementwise", "attrs": {"op": "relu", "shape": [8, 8], "dtype": "float32"}}
    spec |= {"cache": str(space.root / "cache"), "computation": relu_computation()}
    where = {"arch": to_json(detect()), "toolchain": dict(PINS), "folder": str(space.root)}
    return {"action": "build", "spec": spec, "candidate": {"template": "ways", "params": {"way": way}}, **where}


@pytest.mark.parametrize(("start", "place"), at({0}, [("module", "-C"), ("script", ".")]))
def test_nothing_in_the_current_folder_is_imported(tmp_path: Path, start: str, place: str) -> None:
    """By workers and by the command itself, whether the folder is the workspace or not."""
    python, shadowed = STARTS[start]
    space = Space(tmp_path / "space").write({**REAL, "workloads.toml": REAL["workloads.toml"].partition("[[workload]]")[0] + ENTRY})
    folder = space.root if place == "." else tmp_path / "hostile"
    folder.mkdir(exist_ok=True)
    for name in shadowed:
        (folder / f"{name}.py").write_text(HOSTILE)
    options = [] if place == "." else ["-C", str(space.root)]
    command = [sys.executable, *python, *options, "build"]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "ran").exists(), (folder / "ran").read_text()


ENTRY = '[[workload]]\nname = "relu"\nrule = "elementwise"\nop = "relu"\nshape = [24, 32]\n'


def test_a_worker_has_an_empty_folder_and_few_variables(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("TVM_LOG_DEBUG", "0")
    worker = Worker({})
    try:
        answer = worker.call(request(space, "tell"), 60)
    finally:
        worker.stop()
    assert "code_digest" in answer
    told = json.loads(answer["printed"].splitlines()[-1])
    assert told["folder"] == []
    assert {"PATH", "TVM_LOG_DEBUG"} <= set(told["names"])
    assert {"SECRET_TOKEN", "LD_PRELOAD"}.isdisjoint(told["names"])
    assert "" not in told["path"]


def test_entries_of_pythonpath_are_folders_that_somebody_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = environment.clean_environment({"PYTHONPATH": f"/a{os.pathsep}{os.pathsep}b"}, {"MORE": "1"})
    assert found == {"PYTHONPATH": f"/a{os.pathsep}{tmp_path / 'b'}", "MORE": "1"}
    assert environment.clean_environment({"PYTHONPATH": os.pathsep}, {}) == {}


def test_memory_and_output_are_bounded(space: Space, worker: Worker) -> None:
    answer = worker.call(request(space, "allocate"), 60)
    assert "MemoryError" in answer["failure"]
    assert answer["is_transient"]
    assert worker.call(request(space, "chatter"), 60)["failure"] == f"printed more than {1 << 20} bytes"
    assert "code_digest" in worker.call(request(space, "good"), 60)


def test_what_a_worker_has_started_ends_with_it_in_whatever_session(space: Space, worker: Worker) -> None:
    def started() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if str(space.root) in (each.info["cmdline"] or [])]

    worker.call(request(space, "good"), 60)
    assert worker.call(request(space, "children"), 3)["failure"] == "took more than 3 s"
    deadline = time.monotonic() + 10
    while started() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not started()


@pytest.mark.slow
def test_a_request_whose_worker_is_killed_from_outside_is_tried_once_more(space: Space) -> None:
    once, always = request(space, "killed once"), request(space, "killed")
    heard: list[Printed | Ran] = []
    with LocalRunner(1, 1, heard=heard.append, limits=Limits(build_secs=30)) as runner:
        (answer,) = in_order(runner.run_all([once], 60), 1)
        assert "code_digest" in answer
        (answer,) = in_order(runner.run_all([always], 60), 1)
        assert answer["failure"] == "its process was killed by SIGKILL"
        (answer,) = in_order(runner.run_all([request(space, "tell")], 60), 1)
        assert "code_digest" in answer
    assert [event.request for event in heard if isinstance(event, Printed)][-1:] == ["build elementwise ways"]


LINKER = """\
#!/bin/sh
if [ ! -e {marker} ]; then
    touch {marker}
    kill -9 $$
fi
exec {compiler} "$@"
"""


def test_a_request_whose_linker_is_killed_from_outside_is_tried_once_more(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    (space.root / "bin").mkdir()
    linker = space.root / "bin" / "g++"
    linker.write_text(LINKER.format(marker=space.root / "killed", compiler=cxx.compiler()))
    linker.chmod(0o755)
    monkeypatch.setenv("PATH", str(linker.parent), prepend=os.pathsep)
    with LocalRunner(1, 1) as runner:
        (answer,) = in_order(runner.run_all([request(space, "good")], 60), 1)
    assert (space.root / "killed").exists()
    assert "code_digest" in answer


def test_a_library_that_is_made_again_is_whole_at_any_moment(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two candidates may have the same code: who makes it a second time may be killed while the first one is measured."""
    asked = request(space, "good")
    fields = {name: value for name, value in asked.items() if name != "action"}
    code = actions.build(**fields)["code_digest"]
    before = {path.name: path.read_bytes() for path in space.root.glob(f"{code}*")}
    assert set(before) == {f"{code}.o", f"{code}.so"}

    def halfway(library: Path, _: object) -> None:
        library.write_bytes(b"half")
        assert {path.name: path.read_bytes() for path in space.root.glob(f"{code}*")} == before
        raise ToolchainError("interrupted")

    monkeypatch.setattr(actions, "CANDIDATE_LINKERS", {"cpu": halfway})
    with pytest.raises(ToolchainError):
        actions.build(**fields, force=True)
    assert {path.name: path.read_bytes() for path in space.root.glob(f"{code}*")} == before


def test_declared_limits_replace_those_of_callers(space: Space) -> None:
    with LocalRunner(1, 1, limits=Limits(build_secs=0.01)) as runner:
        (answer,) = in_order(runner.run_all([request(space, "good")], 60), 1)
    assert answer["failure"] == "took more than 0.01 s"
