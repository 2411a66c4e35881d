"""Owns the tests of how samples are taken under each protocol, on a GPU whose time passes by a table.

Knows nothing of drivers: graphs have the times of what they launch.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kerneldecl.errors import ToolchainError
from kerneldecl.runners import cuda, gpu_timing, neighbours
from kerneldecl.runners.gpu_arguments import Loaded
from kerneldecl.runners.neighbours import BEFORE, EARLY_COPY
from kerneldecl.timing import PROTOCOLS
from kerneldecl.toolchain import nvcc

KERNEL_SECS, NEIGHBOUR_SECS, L2_BYTES = 1e-3, 2e-4, 1000


@dataclasses.dataclass
class Clock:
    """Seconds of a fake process, and of the kernel at the clock that its power allows after so much work without a rest."""

    now: float = 0.0
    busy: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def work(self, secs: float) -> None:
        self.now += secs
        self.busy += secs

    @property
    def slowdown(self) -> float:
        return 1.0 + min(self.busy, 0.1)


class FakeGraph:
    def __init__(self, clock: Clock, secs: Callable[[], float]) -> None:
        self._clock, self._secs, self._last = clock, secs, 0.0

    def start(self) -> None:
        self._last = self._secs()
        self._clock.work(self._last)

    def finished(self) -> float:
        return self._last

    def run(self) -> float:
        self.start()
        return self.finished()


@dataclasses.dataclass
class FakeGpu:
    """Stands for a workload's arguments on a GPU."""

    clock: Clock
    set_count: int = 4
    sizes: tuple[int, ...] = (600,)
    flushes: int = 0
    graphs: list[tuple[bool, bool, int]] = dataclasses.field(default_factory=list)

    @property
    def gpu(self) -> Any:
        return self

    @property
    def l2_bytes(self) -> int:
        return L2_BYTES

    @property
    def touched_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def reuses_l2(self) -> bool:
        return self.set_count * self.touched_bytes < 2 * L2_BYTES

    def sets(self) -> list[None]:
        return [None] * self.set_count

    def flush(self) -> None:
        self.flushes += 1

    def graph(self, kernel: Loaded | None, calls: int, shift: int = 0, before: Callable[[], None] | None = None) -> FakeGraph:
        assert shift == 0
        self.graphs.append((kernel is not None, before is not None, calls))
        return FakeGraph(self.clock, lambda: calls * (KERNEL_SECS * self.clock.slowdown * bool(kernel) + NEIGHBOUR_SECS * bool(before)))

    def secs(self, graph: FakeGraph) -> float:
        self.clock.busy = 0.0  # it has rested
        return graph.run()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    clock = Clock()
    monkeypatch.setattr(gpu_timing, "time", clock)
    monkeypatch.setattr(gpu_timing, "_LAST", {})
    return FakeGpu(clock)


def sampled(gpu: FakeGpu, protocol: Any, library: str = "a.so", calls: int = 3) -> float:
    return gpu_timing.sample_secs(gpu, Loaded(library, "kernel", lambda: None), calls, protocol)  # type: ignore[arg-type]  # it stands for one


def test_a_cool_sample_is_of_a_gpu_that_has_rested(gpu: FakeGpu) -> None:
    gpu.clock.work(1.0)
    assert sampled(gpu, "cool") == pytest.approx(KERNEL_SECS)


def test_a_steady_sample_is_at_the_clock_that_the_kernel_comes_to(gpu: FakeGpu) -> None:
    assert sampled(gpu, "steady") == pytest.approx(1.1 * KERNEL_SECS)
    heated = gpu.clock.now
    assert sampled(gpu, "steady") == pytest.approx(1.1 * KERNEL_SECS)
    assert gpu.clock.now - heated < gpu_timing.HEAT_SECS, "it is still hot by the same kernel"
    sampled(gpu, "steady", "b.so")
    again = gpu.clock.now
    sampled(gpu, "steady", "a.so")
    assert gpu.clock.now - again > gpu_timing.HEAT_SECS, "another kernel came in between"


def test_a_kernel_that_no_power_limits_is_steady_at_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "slowdown", property(lambda _: 1.0))
    sampled(gpu, "steady")
    assert gpu.clock.now < gpu_timing.HEAT_SECS + 2 * gpu_timing.BURST_SECS


def test_heat_ends_where_the_clock_never_settles(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "slowdown", property(lambda clock: 1.0 + clock.busy))
    sampled(gpu, "steady")
    assert gpu_timing.MOST_HEAT_SECS < gpu.clock.now < 2 * gpu_timing.MOST_HEAT_SECS


@pytest.mark.parametrize("protocol", BEFORE)
def test_the_neighbours_own_time_is_taken_away(gpu: FakeGpu, protocol: str) -> None:
    assert sampled(gpu, protocol) == pytest.approx(KERNEL_SECS, rel=0.01)
    assert gpu.graphs == [(True, True, 3), (False, True, 3)]


def test_a_kernel_that_its_neighbour_hides_takes_next_to_nothing(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGpu, "secs", lambda gpu, _: 1.0 - 0.1 * len(gpu.graphs))
    assert sampled(gpu, "chained") == gpu_timing.LEAST_SECS


@pytest.mark.parametrize(("sets", "flushes"), [(4, False), (3, True)])
def test_l2_is_flushed_between_replays_where_arguments_would_be_found_in_it(gpu: FakeGpu, sets: int, flushes: bool) -> None:
    gpu.set_count = sets
    sampled(gpu, "steady")
    assert bool(gpu.flushes) == flushes
    assert gpu.graphs[0][2] <= sets or not flushes, "no arguments are used twice in one graph either"


def test_every_protocol_of_a_gpu_has_its_sampler_and_neighbour() -> None:
    assert set(gpu_timing._SAMPLERS) == set(PROTOCOLS["cuda"])
    assert {"isolated": neighbours.foreign, "chained": neighbours.own} == BEFORE


class Process:
    """A measuring process whose GPU only counts how often it is warmed up."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.warmed = clock, 0
        self.busy_secs = 0.0
        """What the next request takes."""

    def warm(self) -> None:
        self.warmed += 1
        self.clock.work(cuda.WARM_SECS)

    def loaded(self, *_: str) -> None:
        pass

    def take(self, *_: object) -> float:
        self.clock.work(self.busy_secs)
        return 1e-6


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process(Clock(now=1000.0))
    monkeypatch.setattr(cuda, "time", made.clock)
    monkeypatch.setattr(cuda, "_BUSY", {"since": 0.0, "until": 0.0})
    monkeypatch.setattr(cuda, "_CONDITIONS", {"before": {}})
    monkeypatch.setattr(cuda._RESIDENT, "of", lambda _: made)
    monkeypatch.setattr(cuda, "sample_secs", made.take)
    monkeypatch.setattr(cuda, "_verified", lambda *given: {"secs": made.take(*given)})
    return made


def requested(process: Process, action: Callable[..., Any], busy_secs: float, idle_secs: float = 0.0, **count: int) -> int:
    """Ask the process for something after a pause; return how often the GPU was warmed up so far."""
    process.clock.now += idle_secs
    process.busy_secs = busy_secs
    action({}, "a.so", "kd_main", **count)
    return process.warmed


def test_an_idle_gpu_is_warmed_up_before_it_is_timed_and_one_that_works_is_not(process: Process) -> None:
    sample = {"calls": 1, "samples": 1}
    assert requested(process, cuda.sample, 0.001, **sample) == 1
    assert requested(process, cuda.sample, 0.001, idle_secs=0.01, **sample) == 1
    assert requested(process, cuda.sample, 0.001, idle_secs=1.0, **sample) == 2


def test_verifying_warms_a_gpu_up_if_it_takes_long_enough(process: Process) -> None:
    sample = {"calls": 1, "samples": 1}
    requested(process, cuda.verify, 0.03)
    assert requested(process, cuda.sample, 0.001, **sample) == 1, "one candidate is verified too fast for that"
    for idle_secs in (1.0, 0.01, 0.01, 0.01):
        requested(process, cuda.verify, 0.03, idle_secs=idle_secs)
    assert requested(process, cuda.sample, 0.001, **sample) == 1


def has_ptxas() -> bool:
    try:
        return Path(nvcc.compiler().path).with_name("ptxas").exists()
    except ToolchainError:
        return False


@pytest.mark.skipif(not has_ptxas(), reason="ptxas is not here")
def test_our_small_kernel_is_ptx_that_compiles_and_lets_the_next_one_start(tmp_path: Path) -> None:
    ptxas = Path(nvcc.compiler().path).with_name("ptxas")
    subprocess.run([str(ptxas), "-arch=sm_90", "-o", str(tmp_path / "copy.cubin"), str(EARLY_COPY)], check=True)
    text = EARLY_COPY.read_text(encoding="ascii")
    assert text.index("griddepcontrol.wait") < text.index("griddepcontrol.launch_dependents") < text.index("ld.global")
