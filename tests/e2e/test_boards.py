"""Owns the test of measuring behind TVM's RPC: a real tracker and a real server, which is all that the board has.

Knows nothing of how a board is talked to.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.spaces import REAL, Space, clean_environment

pytest.importorskip("tornado", reason="TVM's tracker needs tornado")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running(*arguments: str) -> Iterator[None]:
    """Run a module of TVM's with all that it starts."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        import os

        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def awaited(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens at {port}")


@pytest.mark.slow
def test_a_board_measures_what_this_machine_compiles(tmp_path: Path) -> None:
    text = REAL["workloads.toml"].replace('arch = "host"', 'arch = "x86-64-v3"')
    for name in ("here", "board"):
        (tmp_path / name).mkdir()
    files = {**REAL, "workloads.toml": text}
    here, space = Space(tmp_path / "here").write(files), Space(tmp_path / "board").write(files)
    tracker, server = free_port(), free_port()
    with ExitStack() as held:
        listening = ("--host", "127.0.0.1", "--port")
        held.enter_context(running("tvm.exec.rpc_tracker", *listening, str(tracker), "--port-end", str(tracker + 1)))
        awaited(tracker)
        where = ("--tracker", f"127.0.0.1:{tracker}", "--key", "board")
        held.enter_context(running("tvm.exec.rpc_server", *listening, str(server), "--port-end", str(server + 1), *where))
        awaited(server)
        refused = space.run("build", "--rpc", f"127.0.0.1:{tracker}/other", "--require-measured", "relu", code=1)
        assert "knows no board of key other; it knows board" in refused.stdout + refused.stderr
        built = space.run("build", "--jobs", "1", "--rpc", f"127.0.0.1:{tracker}/board", "--require-measured")
        assert "4 entries: 4 tuned in " in built.stdout
    here.run("build", "--jobs", "1")
    assert {path.name for path in (space.root / "cache/record/tune").iterdir()} == {
        path.name for path in (here.root / "cache/record/tune").iterdir()
    }
    for path in (space.root / "cache/record/measure").iterdir():
        ours = json.loads((here.root / "cache/record/measure" / path.name).read_text())["result"]
        theirs = json.loads(path.read_text())["result"]
        assert (theirs["error"], theirs["failure"], theirs["reference"]) == (ours["error"], ours["failure"], ours["reference"])
        assert theirs["samples"], "the board has timed it"
    (record, *_) = (space.root / "cache/record/tune").iterdir()
    assert json.loads(record.read_text())["result"]["provenance"]["board"] == "board"
    space.run("verify")


def test_what_is_no_tracker_with_a_key_is_a_sentence(space: Space) -> None:
    space.write(REAL)
    assert "is not HOST:PORT/KEY" in space.run("build", "--rpc", "127.0.0.1:9190", code=10).stderr
    assert "give one of them" in space.run("build", "--rpc", "h:1/k", "--scheduler", "tcp://h:1", code=2).stderr
