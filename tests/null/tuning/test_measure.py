"""Owns the tests of measuring what was built: when inputs are made, who is verified in which order, what failures lead to.

Knows nothing of devices: a runner answers from a table.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.repository import REPOSITORY

from kerneldecl.errors import ToolchainError
from kerneldecl.model import Arch, Candidate, Proposal, Trial, Workload
from kerneldecl.plugins.load import load_arch
from kerneldecl.runners.process import Answer
from kerneldecl.store.keys import key, measure_manifest
from kerneldecl.store.local import LocalStore
from kerneldecl.store.results import Lowered, Proposed, groups_from_json, groups_to_json
from kerneldecl.timing import measuring
from kerneldecl.tuning import search
from kerneldecl.tuning.measure import FINALIST_SAMPLES, Preparation, judges, measure, measured_on, verify
from kerneldecl.tuning.no_winner import why_no_winner
from kerneldecl.tuning.task import Task

ROOT = REPOSITORY
H200, CPU = load_arch(ROOT, "h200"), load_arch(ROOT, "x86-64-v3")
LOWERED = {"computation": "c" * 64, "tolerance": 1e-3, "space": {"blocks": [], "inputs": [], "outputs": []}}
Request = Mapping[str, Any]


@dataclasses.dataclass
class TableRunner:
    """Answers verifications by code, samples with the same time for all, and remembers the order of requests."""

    verdicts: dict[str, Answer] = dataclasses.field(default_factory=dict)
    later: dict[str, Answer] = dataclasses.field(default_factory=dict)
    """Verdicts on winners, where they are others."""
    prepared: Callable[[], Answer] = dict
    asked: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    devices: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    sampled: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Protocol and code of each sample."""
    secs: dict[str, float] = dataclasses.field(default_factory=dict)
    """Times by protocol, where they are others."""
    priorities: set[int] = dataclasses.field(default_factory=set)

    def run_all(self, requests: Sequence[Request], limit_secs: float, priority: int = 0) -> Iterator[tuple[int, Answer]]:
        assert limit_secs > 0
        self.priorities.add(priority)
        for at, request in enumerate(requests):
            code = str(request["candidate"]["template"])
            Path(request["folder"], f"{code}.so").touch()
            yield at, {"schedule_digest": code, "code_digest": code, "code_bytes": 1}
            self.asked.append(("build", code))

    def measure(self, request: Request, limit_secs: float) -> Answer:
        assert limit_secs > 0
        code = Path(str(request.get("library", ""))).stem
        self.asked.append((request["action"], code))
        self.devices.add((request["device"], request["model"]))
        if request["action"] == "prepare":
            return self.prepared()
        if request["action"] == "sample":
            self.sampled.append((request["protocol"], code))
            if code in self.secs and request["protocol"] == "isolated":
                return {"failure": "it hangs"}
            return {"samples": [self.secs.get(request["protocol"], 1e-5)] * request["samples"]}
        if request["action"] == "confirm" and code in self.later:
            return self.later[code]
        return self.verdicts.get(code, {"error": 1e-6, "secs": 1e-5})

    def of(self, action: str) -> list[str]:
        return [code for done, code in self.asked if done == action]


def task_in(folder: Path, arch: Arch = H200) -> Task:
    workload = Workload("w", "box", "elementwise", (), "auto", 20, None, (), 1)
    return Task(
        root=ROOT,
        workload=workload,
        arch=arch,
        groups=(),
        lowered=Lowered(LOWERED),
        tolerance=1e-3,
        protocol=measuring(arch.kind),
        seed=20,
        reference_digest="reference",
        toolchain={},
        folder=folder,
        cache=folder,
    )


def built(code: str, spill_bytes: int = 0) -> Trial:
    return Trial(Candidate.of(code, {}), 1e-5, schedule_digest=code, code_digest=code, code_bytes=1, spill_bytes=spill_bytes)


def measured(task: Task, runner: TableRunner, *candidates: Trial) -> dict[str, Trial]:
    store = LocalStore(task.folder / "store")
    done = measure(task, candidates, Preparation(task, runner, store), runner, store, lambda *_: None)
    return {m.code_digest: m for m in done}


def test_every_request_to_measure_names_its_device(tmp_path: Path) -> None:
    runner = TableRunner()
    measured(task_in(tmp_path), runner, built("a"))
    assert runner.devices == {("cuda", "NVIDIA H200")}
    assert runner.of("prepare") == [""]
    assert runner.of("verify") == ["a"]


def test_spilling_ones_are_verified_last(tmp_path: Path) -> None:
    runner = TableRunner()
    done = measured(task_in(tmp_path), runner, built("s", 8), built("a"), built("b"))
    assert runner.of("verify") == ["a", "b", "s"]
    assert all(m.samples for m in done.values())


def test_spilling_ones_are_left_out_when_time_is_up_and_others_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerneldecl.tuning.measure.SPILLING_SECS", -1.0)
    runner = TableRunner()
    done = measured(task_in(tmp_path), runner, built("s", 8), built("a"))
    assert runner.of("verify") == ["a"]
    assert done["s"].failure == "not run: it spills 8 bytes of registers, others do not"
    wrong = TableRunner({"b": {"error": 1.0, "secs": 1e-5}})
    done = measured(task_in(tmp_path), wrong, built("t", 8), built("b"))
    assert wrong.of("verify") == ["b", "t"]
    assert done["t"].samples


DEATH: Answer = {"failure": "its process was killed by SIGSEGV", "has_died": True}


class WithThreads(TableRunner):
    """Has a kernel whose threads end the process while the next one runs, once at each of some actions."""

    def __init__(self, guilty: str, *actions: str) -> None:
        super().__init__()
        self._guilty, self._actions, self._before = guilty, list(actions), ""

    def measure(self, request: Request, limit_secs: float) -> Answer:
        answer = super().measure(request, limit_secs)
        code, before = Path(str(request.get("library", ""))).stem, self._before
        self._before = code
        if before == self._guilty != code and request["action"] in self._actions:
            self._actions.remove(request["action"])
            self._before = ""
            return DEATH
        return answer


@pytest.mark.parametrize("action", ["verify", "sample"])
def test_a_kernel_is_blamed_for_a_death_only_if_it_dies_alone(tmp_path: Path, action: str) -> None:
    runner = WithThreads("a", action)
    done = measured(task_in(tmp_path, CPU), runner, built("a"), built("b"))
    assert not done["b"].failure
    assert done["b"].samples
    died = next(at for at, asked in enumerate(runner.asked) if asked == (action, "b"))
    assert runner.asked[died + 1 : died + 3] == [("prepare", ""), (action, "b")], "in a new process"


def test_a_kernel_that_dies_alone_is_blamed(tmp_path: Path) -> None:
    runner = TableRunner({"b": DEATH})
    done = measured(task_in(tmp_path, CPU), runner, built("a"), built("b"))
    assert done["b"].failure == "its process was killed by SIGSEGV"
    assert runner.of("verify") == ["a", "b", "b"]
    assert done["a"].samples


def test_after_one_that_fails_inputs_are_asked_for_again(tmp_path: Path) -> None:
    runner = TableRunner({"bad": {"failure": "CudaError: an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)"}})
    done = measured(task_in(tmp_path), runner, built("bad"), built("good"))
    assert runner.asked[:4] == [("prepare", ""), ("verify", "bad"), ("prepare", ""), ("verify", "good")]
    assert done["bad"].failure.endswith("(CUDA_ERROR_ILLEGAL_ADDRESS)")
    assert done["good"].samples


def test_a_winner_that_is_wrong_after_the_race_fails_and_the_next_one_wins(tmp_path: Path) -> None:
    wrong = {"error": 0.5, "secs": 1e-5, "where": " in a later call on the same inputs"}
    runner = TableRunner(later={"a": wrong, "b": {"failure": "its process was killed by SIGSEGV"}})
    done = measured(task_in(tmp_path), runner, built("a"), built("b"), built("c"), built("d"))
    assert runner.of("confirm") == ["a", "b", "c"]
    assert done["a"].failure == "after the race: wrong: relative error 0.5 over 0.001 in a later call on the same inputs"
    assert done["b"].failure == "after the race: its process was killed by SIGSEGV"
    assert not done["a"].samples
    assert (done["b"].samples, done["b"].error) == ((), None), "no record holds a crash"
    assert done["c"].samples
    assert runner.of("prepare") == ["", "", ""], "a process that died has its inputs no more"


def test_one_whose_results_differ_from_call_to_call_fails(tmp_path: Path) -> None:
    runner = TableRunner({"a": {"error": 1e-6, "where": "", "secs": 1e-5, "differs": True}})
    done = measured(task_in(tmp_path), runner, built("a"), built("b"))
    assert done["a"].failure.startswith("its results differ from call to call")
    assert done["b"].samples


PROPOSED = [search.Proposal(Candidate.of(code, {}), 1e-5) for code in ("a", "b")]
TWO = groups_from_json(groups_to_json([Proposed("any", PROPOSED, searches=False)]))


@pytest.mark.parametrize(("arch", "built_before"), [(H200, 0), (CPU, 1)], ids=["gpu", "cpu"])
def test_inputs_are_made_while_candidates_are_built(arch: Arch, built_before: int, tmp_path: Path) -> None:
    """At once for a GPU; for a CPU, when there is code that nobody has measured."""
    has_begun, may_end = threading.Event(), threading.Event()

    def prepared() -> Answer:
        has_begun.set()
        assert may_end.wait(60)
        return {}

    class Waiting(TableRunner):
        def run_all(self, requests: Sequence[Request], limit_secs: float, priority: int = 0) -> Iterator[tuple[int, Answer]]:
            for count, answer in enumerate(super().run_all(requests, limit_secs, priority)):
                assert count < built_before or has_begun.wait(60)
                yield answer
            may_end.set()

    task = dataclasses.replace(task_in(tmp_path, arch), groups=TWO)
    runner = Waiting(prepared=prepared)
    outcome = search.tune(task, runner, LocalStore(tmp_path / "store"), lambda *_: None)
    assert runner.of("prepare") == [""]
    assert outcome.trials[0].samples


def test_what_is_asked_ahead_is_asked_once_and_in_its_turn(tmp_path: Path) -> None:
    task = dataclasses.replace(task_in(tmp_path), groups=TWO, priority=3)
    runner, store = TableRunner(), LocalStore(tmp_path / "store")
    answers = search.request_first(task, runner)
    outcome = search.tune(task, runner, store, lambda *_: None, lambda: answers)
    assert runner.of("build") == ["a", "b"]
    assert runner.priorities == {3}
    assert {m.code_digest for m in outcome.trials if m.samples} == {"a", "b"}


@pytest.mark.parametrize(
    ("arch", "next_arch", "prepared_next"),
    [(H200, H200, [("prepare_next", "softmax")]), (H200, CPU, []), (CPU, H200, []), (CPU, CPU, [])],
    ids=["gpu", "gpu then cpu", "cpu then gpu", "cpu"],
)
def test_inputs_of_the_next_are_begun_when_those_at_hand_are_there(
    arch: Arch, next_arch: Arch, prepared_next: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Where one GPU measures both."""
    asked: list[tuple[str, str]] = []

    class Noting(TableRunner):
        def measure(self, request: Request, limit_secs: float) -> Answer:
            asked.append((request["action"], request["spec"]["rule"]))
            return super().measure(request, limit_secs)

    task = task_in(tmp_path, arch)
    following = dataclasses.replace(task, arch=next_arch, workload=dataclasses.replace(task.workload, rule="softmax"))
    runner, store = Noting(), LocalStore(tmp_path / "store")
    measure(task, [built("a")], Preparation(task, runner, store, following), runner, store, lambda *_: None)
    before_samples = asked[: asked.index(("sample", "elementwise"))]
    assert before_samples == [("prepare", "elementwise"), *prepared_next, ("verify", "elementwise")]


def test_nothing_is_measured_twice(tmp_path: Path) -> None:
    first, again = TableRunner(), TableRunner()
    done = measured(task_in(tmp_path), first, built("a"), built("b"))
    assert measured(task_in(tmp_path), again, built("a"), built("b")) == done
    assert again.asked == []
    measured(task_in(tmp_path), again, built("a"), built("c"))
    assert again.of("verify") == ["c"]


def timed_by(task: Task, timing: str) -> Task:
    workload = dataclasses.replace(task.workload, timing=timing)
    return dataclasses.replace(task, workload=workload, protocol=measuring(task.arch.kind, timing))


@pytest.mark.parametrize(
    ("arch", "timing", "raced", "others"),
    [
        (H200, "cool", ["cool"], ["steady", "isolated", "chained"]),
        (H200, "steady", ["steady"], ["cool", "isolated", "chained"]),
        (H200, "isolated", ["isolated"], ["cool", "steady", "chained"]),
        (H200, "both", ["steady", "isolated"], ["cool", "steady", "isolated", "chained"]),
        (CPU, "cool", ["steady"], ["isolated"]),
        (CPU, "isolated", ["isolated"], ["steady"]),
    ],
)
def test_candidates_race_under_the_chosen_protocol_and_finalists_are_timed_under_all(
    tmp_path: Path, arch: Arch, timing: str, raced: list[str], others: list[str]
) -> None:
    runner = TableRunner(secs={"steady": 4e-5, "isolated": 9e-5, "cool": 2e-5, "chained": 3e-5})
    done = measured(timed_by(task_in(tmp_path, arch), timing), runner, built("a"), built("b"))
    confirmed = runner.asked.index(("confirm", "a"))
    in_race = sum(action == "sample" for action, _ in runner.asked[:confirmed])
    assert {protocol for protocol, _ in runner.sampled[:in_race]} == set(raced)
    assert [protocol for protocol, code in runner.sampled[in_race:] if code == "a"] == others
    for trial in done.values():
        assert trial.run_secs == pytest.approx(6e-5 if timing == "both" else runner.secs[raced[0]])
        assert dict(trial.timings) == {protocol: (runner.secs[protocol],) * FINALIST_SAMPLES for protocol in others}


def test_a_finalist_that_fails_under_another_protocol_keeps_its_place_without_that_time(tmp_path: Path) -> None:
    runner = TableRunner(secs={"a": 0.0})
    done = measured(task_in(tmp_path), runner, built("a"), built("b"))
    assert done["a"].samples
    assert not done["a"].failure
    assert dict(done["a"].timings).keys() == {"steady", "chained"}
    assert dict(done["b"].timings).keys() == {"steady", "isolated", "chained"}


def test_only_the_finalists_are_timed_under_all_protocols(tmp_path: Path) -> None:
    class Slow(TableRunner):
        def measure(self, request: Request, limit_secs: float) -> Answer:
            answer = super().measure(request, limit_secs)
            is_slow = str(request.get("library", "")).endswith("slow.so") and "samples" in answer
            return {"samples": [1.1 * secs for secs in answer["samples"]]} if is_slow else answer

    done = measured(task_in(tmp_path), Slow(), built("a"), built("slow"))
    assert done["a"].timings
    assert done["slow"].samples
    assert not done["slow"].timings


def test_a_record_from_before_there_were_protocols_is_read(tmp_path: Path) -> None:
    task, store = task_in(tmp_path), LocalStore(tmp_path / "store")
    manifest = measure_manifest("a", task.arch, {"protocol": "cuda-graph-cold-3", "generation": 0})
    result = {"error": 1e-6, "samples": [2e-5], "failure": "", "reference": "reference"}
    store.write("measure", manifest, result, is_local=False)
    runner = TableRunner()
    assert measured(task, runner, built("a"))["a"].samples == (2e-5,)
    assert not runner.asked
    store.forget("measure", key(manifest), is_local=False)
    store.write("measure", manifest, {**result, "timings": {"steady": ["soon"]}}, is_local=False)
    assert measured(task, runner, built("a"))["a"].run_secs == 1e-5, "a record that holds no times is none"


def test_inputs_that_cannot_be_made_are_every_candidates_failure(tmp_path: Path) -> None:
    done = measured(task_in(tmp_path), TableRunner(prepared=lambda: {"failure": "ValueError: no"}), built("a"), built("b"))
    assert {m.failure for m in done.values()} == {"inputs or reference: ValueError: no"}


RULE = """
from dataclasses import dataclass
from kerneldecl.rule import Rule

@dataclass(frozen=True, kw_only=True)
class Mine(Rule):
    pass
"""


def own_task(folder: Path) -> Task:
    """Return a task of a rule of the user's, with two candidates."""
    (folder / "rules").mkdir()
    (folder / "rules" / "mine.py").write_text(RULE, encoding="utf-8")
    proposals = [Proposal(Candidate.of(code, {}), 1e-5) for code in ("a", "b")]
    groups = tuple(groups_from_json(groups_to_json([Proposed("plain", proposals, searches=False)])))
    task = task_in(folder, CPU)
    return dataclasses.replace(task, root=folder, workload=dataclasses.replace(task.workload, rule="mine"), groups=groups)


def test_a_rule_of_the_users_that_fails_does_so_before_anything_is_compiled(tmp_path: Path) -> None:
    runner = TableRunner(prepared=lambda: {"failure": "rules/mine.py:9: ValueError: no"})
    task = own_task(tmp_path)
    assert search.request_first(task, runner) is None
    outcome = search.tune(task, runner, LocalStore(tmp_path / "store"), lambda *_: None)
    assert not runner.of("build")
    assert why_no_winner(outcome.trials) == "inputs or reference: rules/mine.py:9: ValueError: no"


def test_a_reference_that_has_judged_is_not_made_for_code_that_is_known(tmp_path: Path) -> None:
    task, store = own_task(tmp_path), LocalStore(tmp_path / "store")
    assert search.tune(task, TableRunner(), store, lambda *_: None).policy == "plain"
    runner, known = TableRunner(), judges(store, is_local=False)
    task = dataclasses.replace(task, has_judged=lambda: task.reference_digest in known)
    assert search.tune(task, runner, store, lambda *_: None).policy == "plain"
    assert not runner.of("prepare")


@pytest.mark.parametrize(
    ("prepared", "verdict", "failure"),
    [
        ({"failure": "ValueError: no"}, {}, "inputs or reference: ValueError: no"),
        ({}, {"error": 0.5, "secs": 1e-5}, "wrong: relative error 0.5 over 0.001"),
        ({}, {"failure": "its process was killed by SIGSEGV"}, "its process was killed by SIGSEGV"),
        ({}, {"error": 1e-5, "secs": 1e-5}, ""),
    ],
)
def test_a_time_stays_only_where_the_reference_of_now_agrees(tmp_path: Path, prepared: Answer, verdict: Answer, failure: str) -> None:
    task, runner = task_in(tmp_path), TableRunner({"a": verdict}, prepared=lambda: prepared)
    timed = dataclasses.replace(built("a"), samples=(1e-5,))
    found = verify(task, timed, Preparation(task, runner, LocalStore(tmp_path / "store")), runner)
    assert (found.failure, found.samples) == (failure, () if failure else timed.samples)


def test_a_gpu_that_is_not_there_ends_the_build(tmp_path: Path) -> None:
    def prepared() -> Answer:
        raise ToolchainError("it must be measured on NVIDIA H200; this machine shows no GPU")

    with pytest.raises(ToolchainError, match="shows no GPU"):
        measured(task_in(tmp_path), TableRunner(prepared=prepared), built("a"))


def test_the_record_tells_the_device_and_how_it_was(tmp_path: Path) -> None:
    told = {"dram_bytes_per_s": 4.26789e12, "device": {"gpu": "NVIDIA H200", "driver": "580"}, "conditions": {"after": {}}}

    class Told(TableRunner):
        def measure(self, request: Request, limit_secs: float) -> Answer:
            assert (request["action"], limit_secs > 0) == ("measured_peaks", True)
            return told

    found = measured_on(task_in(tmp_path), Told())
    assert found == {"measured_peaks": {"dram_bytes_per_s": 4.27e12}, "provenance": told["device"], "conditions": told["conditions"]}


def test_a_winner_that_compiles_to_other_code_here_is_told(tmp_path: Path) -> None:
    task, runner = task_in(tmp_path), TableRunner()
    (tmp_path / "here.o").write_bytes(b"code")
    assert search.winner_object(task, built("here"), runner) == b"code"
    assert runner.of("build") == []
    told = search.winner_object(task, built("elsewhere"), runner)
    assert runner.of("build") == ["elsewhere"]
    assert isinstance(told, str)
    assert "compiles to other code here than where it was measured" in told
