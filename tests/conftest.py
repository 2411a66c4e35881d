"""Owns what all tests share: golden texts and workspaces made of strings.

Knows nothing of what is tested.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import os
import signal
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings
from support.spaces import FAKES, REAL, Space

# The same examples on every run and no deadline: a busy machine must not fail a build.
settings.register_profile("thorough", derandomize=True, deadline=None)
settings.register_profile("fixed", settings.get_profile("thorough"), max_examples=20)
settings.load_profile("fixed")

MOST_AT_ONCE = 8
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden texts instead of comparing; review the diff")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many tests run side by side with `-n auto`: each has compilers of its own, a gigabyte at times."""
    return min(MOST_AT_ONCE, len(os.sched_getaffinity(0)))


THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TVM_THREAD_POOL_SPIN_COUNT": "0"}
"""Each process that runs tests has a core, and so have the workers of builds: further threads would wait in loops for work."""


def pytest_configure() -> None:
    """Have tests find threads, interrupts and `inspect` as they need them.

    `inspect` describes frames without looking for their modules among thousands: TVMScript asks for the stack at each function.
    """
    for name, value in THREADS.items():
        os.environ.setdefault(name, value)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background; tests interrupt themselves
        signal.signal(signal.SIGINT, signal.default_int_handler)
    inspect.getframeinfo = _frame_info  # type: ignore[assignment]


def _frame_info(frame: Any, context: int = 1) -> inspect.Traceback:
    is_traceback = isinstance(frame, TracebackType)
    code, line = (frame.tb_frame.f_code, frame.tb_lineno) if is_traceback else (frame.f_code, frame.f_lineno)
    lines = [linecache.getline(code.co_filename, line)] if context else None
    return inspect.Traceback(code.co_filename, line, code.co_name, lines, 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, of which there is none: each process that runs tests collects all, a million objects.

    Later garbage is looked for seldom: what tests import and keep is large beside what each of them leaves.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with tests/golden/NAME.txt."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden text {path}; make it with --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def write_files(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """Return a function that writes files into a fresh folder and returns the folder."""

    def write(files: Mapping[str, str]) -> Path:
        root = tmp_path / "workspace"
        root.mkdir(exist_ok=True)
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")
        return root

    return write


@pytest.fixture
def space(tmp_path: Path) -> Space:
    """Return an empty workspace folder."""
    root = tmp_path / "space"
    root.mkdir()
    return Space(root)


@pytest.fixture
def fakes(space: Space, monkeypatch: pytest.MonkeyPatch) -> Space:
    """Return a workspace of three entries whose plug-ins are text, for builds with a fake runner."""
    monkeypatch.setattr("os.fsync", lambda _: None)  # nobody pulls the plug
    return space.write(FAKES)


@pytest.fixture(scope="session")
def built_real(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace that the real command has built; not to be changed, but to be copied.

    One job here and in other fixtures: each imports TVM, which takes longer than to compile a few small kernels. Processes that run
    tests side by side have one workspace: the first of them builds it.
    """
    has_others = "PYTEST_XDIST_WORKER" in os.environ
    folder = tmp_path_factory.getbasetemp().parent if has_others else tmp_path_factory.getbasetemp()
    with FileLock(folder / "built-real.lock"):
        real, done = Space(folder / "built-real"), folder / "built-real.done"
        if not done.exists():
            real.write(REAL).run("build", "--jobs", "1")
            done.touch()
    return real


@pytest.fixture
def real(built_real: Space, tmp_path: Path) -> Space:
    """Return a workspace of one's own that is up to date but for its stamp."""
    return built_real.copy_of(tmp_path / "real", "cache", "dist", "workloads.lock")
