"""Owns measuring what was built: inputs and reference made, every candidate verified, those that are right raced.

Knows nothing of policies, of how candidates are built, or of who wins.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kerneldecl.errors import KerneldeclError
from kerneldecl.model import Candidate, Trial
from kerneldecl.runners.process import Answer
from kerneldecl.runners.verdict import judged
from kerneldecl.serial import timings_from_json, timings_to_json
from kerneldecl.store.keys import key, measure_manifest, symbol
from kerneldecl.store.local import Record
from kerneldecl.store.protocol import Store
from kerneldecl.timing import PROTOCOLS, Protocol, raced
from kerneldecl.tuning import earlier
from kerneldecl.tuning.race import budget_of, calls_in, excluded, finalists, race, ranking
from kerneldecl.tuning.task import PREPARE_SECS, VERIFY_SECS, OnProgress, Runner, Task, batches_of

SPILLING_SECS = 1.0
"""Candidates that spill registers come last, and only until verifying has taken so long, where one without spills has passed."""
KEPT_AT_ONCE = 16
"""Records that are written side by side: each waits milliseconds for the disk, and the device waits for all."""
FINALIST_SAMPLES, LEAST_SAMPLES = 5, 3
"""Samples of a finalist under each protocol that has not chosen it; of one that takes longer than a round of a race."""


OF_THE_RULE = "inputs or reference: "
"""What the failure of a candidate begins with that its rule is to blame for, and not the candidate."""


class Preparation:
    """The making of inputs and reference, which takes its time, while candidates are still being built.

    Those of `next_task`, which is measured next, are made while a GPU measures this one, if it measures both: a CPU they would disturb.
    """

    def __init__(self, task: Task, runner: Runner, store: Store, next_task: Task | None = None) -> None:
        self._task, self._runner, self._store = task, runner, store
        self._next = next_task if next_task and task.arch.gpu and next_task.arch == task.arch else None
        self._answer: Answer = {}
        self._is_elsewhere = batches_of(runner) is not None  # who measures there prepares there
        self._error: KerneldeclError | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless that is done."""
        if self._thread is None and not self._is_elsewhere:
            # A daemon: it may wait for a GPU that another process holds when the user gives up.
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def start_for(self, code_digest: str) -> None:
        """Begin if this code, which was just built, has to be measured."""
        if known(self._task, code_digest, self._store) is None:
            self.start()

    def answer(self) -> Answer:
        """Return the worker's answer, as soon as it is there."""
        self.start()
        if self._thread is not None:
            self._thread.join()
        if self._error:
            raise self._error
        return self._answer

    def defect(self) -> str:
        """Return what inputs or reference fail with, as a candidate's failure; empty where they do not, or are made elsewhere."""
        if self._is_elsewhere:
            return ""
        failure = self.answer().get("failure", "")
        return f"{OF_THE_RULE}{failure}" if failure else ""

    def _run(self) -> None:
        try:
            self._answer = prepare(self._task, self._runner)
            if self._next:
                self._runner.measure(self._next.measure_request("prepare_next", spec=self._next.measured_spec), PREPARE_SECS)
        except KerneldeclError as error:
            self._error = error


def measure(
    task: Task, built: Sequence[Trial], preparation: Preparation, runner: Runner, store: Store, on_progress: OnProgress
) -> list[Trial]:
    """Verify and time what was built, as far as no earlier run has measured the same code; return all, in their order.

    The library of each code is in the task's folder.
    """
    before = {trial.code_digest: known(task, trial.code_digest, store) for trial in built if trial.code_digest}
    first = {trial.code_digest: trial for trial in reversed(built) if trial.code_digest and before[trial.code_digest] is None}
    done = {trial.code_digest: trial for trial in timed(task, list(first.values())[::-1], preparation, runner, on_progress)}
    _keep_all(task, list(done.values()), store)
    return [_with_result(trial, done.get(trial.code_digest) or before.get(trial.code_digest)) for trial in built]


def recall(task: Task, built: Sequence[Trial], store: Store) -> list[Trial]:
    """Return what was built with what earlier runs have measured of the same code, as far as any did."""
    return [_with_result(trial, known(task, trial.code_digest, store) if trial.code_digest else None) for trial in built]


def prepare(task: Task, runner: Runner) -> Answer:
    """Have the measuring worker make the workload's inputs and reference; again, if it has them no more."""
    return runner.measure(task.measure_request("prepare", spec=task.measured_spec), PREPARE_SECS)


def _with_result(built: Trial, result: Trial | None) -> Trial:
    if not result:
        return built
    return replace(built, error=result.error, samples=result.samples, timings=result.timings, failure=result.failure)


def timed(task: Task, built: Sequence[Trial], preparation: Preparation, runner: Runner, on_progress: OnProgress) -> list[Trial]:
    """Verify each, race those that passed; return all. The library of each is in the task's folder."""
    if not built:
        return []
    if elsewhere := batches_of(runner):
        on_progress("racing", len(built), len(built), None)
        return elsewhere.measured("timed", task, built)
    if defect := preparation.defect():
        return [replace(trial, failure=defect) for trial in built]
    passed, failed = _verified(task, built, runner, on_progress)
    on_progress("racing", len(passed), len(built), min((secs for _, secs in passed), default=None))
    return [*_raced(task, passed, runner), *failed]


def final(task: Task, timed: Sequence[Trial], preparation: Preparation, runner: Runner, on_progress: OnProgress) -> list[Trial]:
    """Return candidates that were timed in different batches with the samples of one race, where what changes in between meets all.

    Their libraries are in the task's folder. One that fails now has a failure.
    """
    if elsewhere := batches_of(runner):
        return elsewhere.measured("final", task, timed)
    if preparation.defect():
        return list(timed)
    on_progress("racing", len(timed), len(timed), min(trial.run_secs for trial in timed))
    return _raced(task, [(replace(trial, samples=(), timings=()), trial.run_secs) for trial in timed], runner)


def _raced(task: Task, passed: Passed, runner: Runner) -> list[Trial]:
    """Return candidates after a race, each given with the seconds of a first run; its winner is right after all its calls."""
    protocols = raced(task.arch.kind, task.workload.timing)

    def sample(trial: Trial, calls: int) -> list[float] | str:
        found: list[float] = []
        for protocol in protocols:
            got = _samples(task, trial, runner, protocol, (calls, 1))
            if isinstance(got, str):
                return got
            found += got
        return [rounded(math.prod(found) ** (1 / len(found)))]

    ended = _confirmed(task, race(passed, sample, budget_of(task.arch.kind, task.workload.timing)), runner)
    return _with_timings(task, ended, runner) if task.times_finalists else ended


def _samples(task: Task, trial: Trial, runner: Runner, protocol: Protocol, count: tuple[int, int]) -> list[float] | str:
    """Return a kernel's samples under a protocol, or why there are none; `count` gives the calls of each sample, and the samples."""
    calls, samples = count
    got = _ran(task, trial, runner, {"action": "sample", "calls": calls, "samples": samples, "protocol": protocol})
    return str(got["failure"]) if "failure" in got else [rounded(secs) for secs in got["samples"]]


def rounded(secs: float) -> float:
    return float(f"{secs:.4g}")


def _with_timings(task: Task, raced_trials: Sequence[Trial], runner: Runner) -> list[Trial]:
    """Return the trials, the winner and those that tied with it with samples under the protocols that have not chosen it.

    A kernel that fails now has passed: it is left without them.
    """
    kind, timing = task.arch.kind, task.workload.timing
    chosen, budget, protocols = finalists(raced_trials), budget_of(kind, timing), raced(kind, timing)
    others = [protocol for protocol in PROTOCOLS[kind] if protocols != (protocol,)]
    found: dict[str, dict[str, tuple[float, ...]]] = {trial.code_digest: {} for trial in chosen}
    for protocol in others:
        for trial in chosen:
            samples = FINALIST_SAMPLES if trial.run_secs < budget.round_secs / FINALIST_SAMPLES else LEAST_SAMPLES
            got = _samples(task, trial, runner, protocol, (calls_in(budget.sample_secs, trial.run_secs), samples))
            if not isinstance(got, str):
                found[trial.code_digest][protocol] = tuple(got)
    return [replace(trial, timings=tuple(sorted(found.get(trial.code_digest, {}).items()))) for trial in raced_trials]


def _confirmed(task: Task, raced: Sequence[Trial], runner: Runner) -> list[Trial]:
    """Return the trials with a winner that is still right after all its calls: one that is not fails, and the next one is verified."""
    trials = list(raced)
    while any(trial.samples for trial in trials):
        (winner, *_), _ = ranking(trials)
        answer = _ran(task, winner, runner, {"action": "confirm"})
        failure = judged(answer, task.tolerance)
        if not failure:
            break
        place = next(at for at, trial in enumerate(trials) if trial is winner)
        error = winner.error if "error" in answer else None  # one that crashed is not kept
        trials[place] = excluded(replace(winner, error=error), f"after the race: {failure}")
        prepare(task, runner)
    return trials


Passed = list[tuple[Trial, float]]


def _verified(task: Task, built: Sequence[Trial], runner: Runner, on_progress: OnProgress) -> tuple[Passed, list[Trial]]:
    """Return those that compute what the reference does, with the seconds of a first run, and the others."""
    passed: Passed = []
    failed: list[Trial] = []
    start = time.monotonic()
    for count, trial in enumerate(sorted(built, key=lambda trial: trial.spill_bytes > 0), start=1):
        if trial.spill_bytes and passed and time.monotonic() - start > SPILLING_SECS:
            failed.append(replace(trial, failure=f"not run: it spills {trial.spill_bytes} bytes of registers, others do not"))
            continue
        verdict, secs = _verdict(task, trial, runner)
        if verdict.failure:
            failed.append(verdict)
            # Its process may have died with it: what the next one needs is prepared again within its own limit.
            prepare(task, runner)
        else:
            passed.append((verdict, secs))
        on_progress("verified", count, len(built), min((secs for _, secs in passed), default=None))
    return passed, failed


def _verdict(task: Task, trial: Trial, runner: Runner) -> tuple[Trial, float]:
    answer = _ran(task, trial, runner, {"action": "verify"})
    failure = judged(answer, task.tolerance)
    if "error" not in answer:
        return replace(trial, failure=failure), 0.0
    # JSON holds no infinity, which is the error of a NaN.
    error = min(float(f"{answer['error']:.3g}"), sys.float_info.max)
    return replace(trial, error=error, failure=failure), answer["secs"]


def verify(task: Task, trial: Trial, preparation: Preparation, runner: Runner) -> Trial:
    """Return a candidate that was timed before with a verdict by the reference of now; its library is in the task's folder."""
    if elsewhere := batches_of(runner):
        (judged_there,) = elsewhere.measured("verify", task, [trial])
        return judged_there
    if defect := preparation.defect():
        return excluded(trial, defect)
    verdict, _ = _verdict(task, trial, runner)
    return excluded(verdict, verdict.failure) if verdict.failure else verdict


def _ran(task: Task, trial: Trial, runner: Runner, asked: Mapping[str, Any]) -> Answer:
    """Return the answer of the worker that runs a kernel; where its process died, that of a new one, in which no other kernel has run.

    Threads of a kernel that ran before may have ended the process: they may write after it has returned.
    """
    fields = {name: value for name, value in asked.items() if name != "action"}
    request = task.measure_request(asked["action"], spec=task.measured_spec, **fields, **_kernel(task, trial))
    limit_secs = PREPARE_SECS if asked["action"] == "sample" else VERIFY_SECS
    answer = runner.measure(request, limit_secs)
    if not answer.get("has_died"):
        return answer
    prepare(task, runner)
    return runner.measure(request, limit_secs)


def _kernel(task: Task, trial: Trial) -> dict[str, str]:
    return {"library": str(task.library_path(trial.code_digest)), "symbol": symbol(task.lowered.computation)}


def _manifest(task: Task, code_digest: str) -> str:
    return measure_manifest(code_digest, task.arch, {"protocol": task.protocol, "generation": task.workload.generation})


def known(task: Task, code_digest: str, store: Store) -> Trial | None:
    """Return what an earlier run measured of the same code under the same protocol, judged by the tolerance of now.

    That is nothing where the task is to be measured again.
    """
    if task.is_again:
        return None
    found = store.read("measure", key(_manifest(task, code_digest)), is_local=task.arch.is_detected)
    if not isinstance(found, Record):
        return None
    result = found.result
    trial = Trial(
        candidate=Candidate("", ()),
        predicted_secs=0.0,
        code_digest=code_digest,
        error=result["error"],
        samples=tuple(result["samples"]),
        timings=timings_from_json(result.get("timings", {})),
        failure=result["failure"],
    )
    return earlier.judged(trial, task.tolerance, is_same_reference=result["reference"] == task.reference_digest)


def judges(store: Store, *, is_local: bool) -> frozenset[str]:
    """Return the digests of the references that have judged a kernel before: their inputs and they themselves can be made."""
    return frozenset(str(record.result.get("reference", "")) for record in store.all("measure", is_local=is_local))


def _keep_all(task: Task, trials: Sequence[Trial], store: Store) -> None:
    """Keep records of trials, side by side where there are several."""
    if len(trials) < 2:
        for trial in trials:
            keep(task, trial, store)
        return
    with ThreadPoolExecutor(KEPT_AT_ONCE, "keep") as pool:
        for _ in pool.map(lambda trial: keep(task, trial, store), trials):
            pass


def keep(task: Task, trial: Trial, store: Store) -> None:
    """Keep what was measured of a candidate's code, with the verdict by the reference of now, in place of what was known of it.

    A candidate that crashed or hung may have met a busy machine: only verdicts and timings are kept.
    """
    if trial.error is None:
        return
    timings = {"timings": timings_to_json(trial.timings)} if trial.timings else {}
    judged_by = {"failure": trial.failure, "reference": task.reference_digest}
    result = {"error": trial.error, "samples": list(trial.samples), **timings, **judged_by}
    manifest, is_local = _manifest(task, trial.code_digest), task.arch.is_detected
    store.forget("measure", key(manifest), is_local=is_local)  # a verdict by another tolerance or reference
    store.write("measure", manifest, result, is_local=is_local)


def measured_on(task: Task, runner: Runner) -> dict[str, Any]:
    """Return what the record says of the device: the peaks that it reaches now, to judge figures by, and its conditions meanwhile.

    Fields of what cannot be found out are empty or missing.
    """
    if elsewhere := batches_of(runner):
        return elsewhere.measured_on(task)
    answer = runner.measure(task.measure_request("measured_peaks"), PREPARE_SECS)
    reached = {name: float(f"{value:.3g}") for name, value in answer.items() if isinstance(value, float)}
    device = {"provenance": answer["device"], "conditions": answer["conditions"]} if "conditions" in answer else {}
    return {"measured_peaks": reached, **device}
