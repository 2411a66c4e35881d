"""GPUs that are not here: entries ranked by their policies, bundles measured elsewhere, and what the lock and the summary say."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_gpus import FakeWorker, fake_gpu, put_nvcc
from support.fakes import DieRunner, FakeLinker, FakeRunner
from support.spaces import Space
from support.thinned import second

from kerneldecl import api, flow
from kerneldecl.cli.report import show_json, show_text
from kerneldecl.cli.summary import build_json, build_text, measured_text
from kerneldecl.errors import ArtifactError, StaleError, ToolchainError
from kerneldecl.hardware import gpu_lock as machine
from kerneldecl.model import Trial
from kerneldecl.plugins.find import STANDARD
from kerneldecl.runners import local
from kerneldecl.runners.process import Answer
from kerneldecl.stages import session, turns
from kerneldecl.stages.lock import lock_of, lock_on_disk
from kerneldecl.stages.session import Options, Session
from kerneldecl.store.local import LocalStore
from kerneldecl.store.lock import exclusive
from kerneldecl.toolchain.versions import is_cuda
from kerneldecl.tuning import bundle, records
from kerneldecl.tuning.events import Event, Finished, Note, Report
from kerneldecl.tuning.search import BUILT_AT_ONCE, Built, preferred_first


def _with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "why_not_measured_here", lambda _: "")


class Noting(FakeRunner):
    """Notes in which order and turn what is asked of compilers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_of_compilers: list[tuple[int, str]] = []

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, turn: int = 0) -> Iterator[tuple[int, Answer]]:
        self.asked_of_compilers += [(turn, request["action"]) for request in requests[:1]]
        return super().run_all(requests, limit_secs, turn)


def _measure(space: Space, folder: Path) -> FakeRunner:
    """Measure every entry of a bundle, on fakes, into the cache of `space`."""
    runner = FakeRunner()
    for entry in bundle.read_bundle(folder):
        assert bundle.measure_entry(entry, runner, space.open().store, lambda *_: None).policy
    return runner


def test_without_its_gpu_an_entry_is_linked_by_its_policys_order(gpus: Space) -> None:
    built = gpus.build()
    assert not built.build.failures
    assert built.links == 1
    assert built.counts["verify"] == built.counts["sample"] == built.counts["prepare"] == 0
    manifest = json.loads((gpus.artifact("box") / "manifest.json").read_text())
    assert [entry["unmeasured"] for entry in manifest["entries"]] == [True] * 3
    assert [entry["verdict"]["verified"] for entry in manifest["entries"]] == [False] * 3
    # The fake policy's first candidate has the least expected time.
    assert {entry["winner"]["params"]["unroll"] for entry in manifest["entries"]} == {1}
    lock = gpus.read("workloads.lock")
    assert lock.count("unmeasured = true") == 3
    assert "time_us" not in lock
    assert "3 unmeasured" in build_text(build_json(built.build))
    shown = show_text(show_json(gpus.plan().entries[0]))
    assert "candidates: not measured\nthe first is linked: its policy ranks it first" in shown
    assert "of peak" not in shown, "nobody knows"


def test_two_machines_make_one_artifact_of_what_nobody_has_measured(gpus: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = gpus.copy_of(tmp_path / "elsewhere")
    gpus.build()
    there = ("Linux", "another-host", "7.0", "#1", "x86_64")
    monkeypatch.setattr(records.os, "uname", lambda: os.uname_result(there))
    monkeypatch.setattr(records.dt, "datetime", SimpleNamespace(now=lambda _: dt.datetime(2031, 5, 6, tzinfo=dt.UTC)))
    elsewhere.build()
    assert elsewhere.artifact_files() == gpus.artifact_files()


def test_what_was_ranked_is_not_ranked_again(gpus: Space) -> None:
    gpus.build()
    again = gpus.build(DieRunner())
    assert not again.build.failures
    assert again.links == 0
    assert "3 unmeasured" in gpus.command("build").out
    assert gpus.command("build").out == "3 entries: 3 up to date\n"


def test_nothing_unmeasured_counts_where_measurements_are_required(gpus: Space) -> None:
    gpus.build()
    built = gpus.build(require_measured=True)
    assert len(built.build.failures) == 3
    assert all("it must be measured on Test GPU" in reason and "kerneldecl measure" in reason for reason in built.build.failures.values())
    assert built.counts["compile"] == 0


def test_a_machine_that_has_the_gpu_measures_what_was_ranked_when_it_is_asked_to(gpus: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.build()
    _with_gpu(monkeypatch)
    built = gpus.build(require_measured=True)
    assert not built.build.failures
    assert built.links == 1
    assert built.counts["sample"] > 0
    assert "unmeasured" not in gpus.read("workloads.lock")
    assert not any(entry.is_unmeasured for entry in gpus.plan().entries)


def test_while_one_entry_is_measured_the_inputs_of_the_next_are_made(gpus: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_gpu(monkeypatch)
    runner = FakeRunner()
    gpus.build(runner)
    _assert_prepared_next(runner)


def test_while_one_entry_of_a_bundle_is_measured_the_inputs_of_the_next_are_made(gpus: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = gpus.build(measure=False).build.bundles.values()
    runner = FakeRunner()
    monkeypatch.setattr(api, "why_not_measured_here", lambda _: "")
    monkeypatch.setattr(api, "LocalRunner", lambda *_: contextlib.nullcontext(runner))
    assert api.measure_bundle(folder, gpus.root / "cache")["measured"] == 3
    _assert_prepared_next(runner)


@pytest.mark.parametrize(
    ("trust", "named"),
    [(False, "the computation that the bundle carries"), (True, "rule scale of the bundle, or the standard one where it holds none")],
)
def test_measuring_says_what_kernels_were_verified_against(gpus: Space, monkeypatch: pytest.MonkeyPatch, trust: bool, named: str) -> None:
    (folder,) = gpus.build(measure=False).build.bundles.values()
    monkeypatch.setattr(api, "why_not_measured_here", lambda _: "")
    monkeypatch.setattr(api, "LocalRunner", lambda *_: contextlib.nullcontext(FakeRunner()))
    found = api.measure_bundle(folder, gpus.root / "cache", trust=bundle.Trust(trust))
    assert found["references"]["small@box"] == named
    assert f"verified against {named}: small@box" in measured_text(found)
    assert api.measure_bundle(folder, gpus.root / "cache")["references"] == {}, "what was measured before is not verified now"


def test_a_standard_rule_is_named_as_the_reference(gpus: Space) -> None:
    (folder,) = gpus.build(measure=False).build.bundles.values()
    entry = bundle.read_bundle(folder)[0]
    standard = {"root": str(STANDARD), "rule": entry.task.workload.rule, "attrs": {}}
    assert (
        bundle.reference_name(dataclasses.replace(entry, task=dataclasses.replace(entry.task, reference=standard)))
        == "the standard rule scale"
    )


def _assert_prepared_next(runner: FakeRunner) -> None:
    """Check that all entries but the first went through `prepare_next` before `prepare`."""
    asked = [(request["action"], request["spec"]["attrs"]) for request in runner.asked if request["action"] in {"prepare", "prepare_next"}]
    prepared = [attrs for action, attrs in asked if action == "prepare"]
    assert len(prepared) == 3
    assert [attrs for action, attrs in asked if action == "prepare_next"] == prepared[1:]
    assert all(asked.index(("prepare_next", attrs)) < asked.index(("prepare", attrs)) for attrs in prepared[1:])


@pytest.mark.parametrize("unrolls", ["(4, 2, 1, 8)", "(1, 2, 4, 8)  # as before"], ids=["other order", "same"])
def test_an_edited_policy_is_tuned_from_what_was_measured_of_the_same_code(gpus: Space, unrolls: str) -> None:
    (folder,) = gpus.build(measure=False).build.bundles.values()
    _measure(gpus, folder)
    gpus.build()
    before = [winner["winner"] for winner in _entries(gpus)]
    gpus.edit("policies/plain.py", "(1, 2, 4, 8)", unrolls)
    built = gpus.build(require_measured=True)
    assert not built.build.failures
    assert built.counts["verify"] == built.counts["sample"] == 0
    assert [winner["winner"] for winner in _entries(gpus)] == before
    assert "unmeasured" not in gpus.read("workloads.lock")


@pytest.fixture
def measured(gpus: Space) -> Space:
    """Return a workspace without the GPU whose entries were measured elsewhere, as a clone without artifacts and objects has it."""
    (folder,) = gpus.build(measure=False).build.bundles.values()
    _measure(gpus, folder)
    assert not gpus.build(require_measured=True).build.failures
    for name in ("dist", "cache/blob", "cache/local", "cache/stamp.txt", "cache/memo.json", "cache/state.json"):
        path = gpus.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return gpus


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("workloads.toml", "n = 64", "n = 64\ngeneration = 1", "[3 candidates wait for Test GPU, which is not here]"),
        ("workloads.toml", "n = 64", "n = 64\ntolerance = 0.5", "[from records]"),
        ("rules/scale.py", "return x *", "return 1 * x *", "[the winner is to be verified on Test GPU, which is not here]"),
    ],
)
def test_a_plan_tells_what_waits_for_a_gpu_elsewhere(measured: Space, file: str, old: str, new: str, told: str) -> None:
    measured.edit(file, old, new)
    (line,) = [line for line in measured.command("plan").out.splitlines() if line.startswith("tune") and " large@box " in line]
    assert line.endswith(told)


def test_what_a_gpu_elsewhere_has_measured_is_not_tuned_again_here(measured: Space) -> None:
    before = {path: path.read_bytes() for path in measured.records("tune")}
    refused = measured.command("build", "--retune", "small")
    assert refused.code == 10
    assert "small@box cannot be tuned again here" in refused.err
    assert {path: path.read_bytes() for path in measured.records("tune")} == before


def _chosen(space: Space) -> list[Any]:
    return [(entry.entry, entry.tuned.winner, entry.tuned.run_secs) for entry in space.plan().entries if entry.tuned]


POLICY_EDITS: Mapping[str, tuple[str, str, str, str]] = {
    "one candidate more": ("policies/plain.py", "(1, 2, 4, 8)", "(1, 2, 4, 8, 16, 32, 64)", "3 of 5"),
    "one candidate less": ("policies/plain.py", "UNROLLS[:top_k]", "UNROLLS[:top_k - 1]", ""),
    "none of them": ("policies/plain.py", "(1, 2, 4, 8)", "(16, 32, 64)", "0 of 3"),
    "other words": ("policies/plain.py", "(1, 2, 4, 8)", "(1, 2, 4, 2 * 4)", ""),
    "a comment": ("policies/plain.py", "UNROLLS =", "# factors\nUNROLLS =", ""),
    "top_k": ("workloads.toml", "top_k = 3", "top_k = 4", "3 of 4"),
    "tolerance": ("workloads.toml", "top_k = 3", "top_k = 3\ntolerance = 0.25", ""),
    "an arch's figure": ("archs/test-gpu.toml", "launch_secs = 1.5e-6", "launch_secs = 2.5e-6", ""),
    "a tag": ("workloads.toml", 'name = "small"', 'name = "small"\ntags = ["fast"]', ""),
}


@pytest.mark.parametrize("what", second(POLICY_EDITS))
def test_without_the_gpu_no_edit_of_a_search_loses_a_measured_winner(measured: Space, what: str) -> None:
    before = _chosen(measured)
    assert len(before) == 3
    name, old, new, coverage = POLICY_EDITS[what]
    measured.edit(name, old, new)
    if coverage == "3 of 5":
        measured.edit("workloads.toml", "top_k = 3", "top_k = 5")
    built = measured.build()
    assert not built.build.failures
    assert built.counts["verify"] == built.counts["sample"] == 0
    assert built.counts["compile"] <= 3, "the winners' objects alone"
    found = _chosen(measured)
    assert what == "one candidate less" or found == before
    assert [entry["unmeasured"] for entry in _entries(measured)] == [False] * 3
    assert [entry["measured"] for entry in _entries(measured)] == [coverage] * 3
    assert measured.read("workloads.lock").count(f'measured = "{coverage}"') == (3 if coverage else 0)
    assert ("3 partly measured" in build_text(build_json(built.build))) == bool(coverage)
    assert "3 entries: 3 up to date" in measured.command("build").out
    assert measured.command("build", "--locked").code == 0


def test_in_a_clone_with_records_and_lock_nothing_is_stale(measured: Space) -> None:
    """Objects are to be compiled and an artifact to be linked, which the committed files can make."""
    found = measured.command("check", "--stale")
    assert (found.code, found.out) == (0, "nothing has to be tuned\n")
    assert {action.kind for action in measured.plan().misses} == {"build", "link"}
    assert measured.command("build", "--locked", runner=FakeRunner()).code == 0


def test_what_a_gpu_would_have_to_measure_is_told_and_accepted_once_it_is_in_the_lock(measured: Space) -> None:
    measured.edit("workloads.toml", "top_k = 3", "top_k = 4")
    assert measured.command("check", "--stale").code == 3
    assert measured.command("build", "--locked", runner=FakeRunner()).code == 3
    measured.build()
    clone = measured.copy_of(measured.root / "clone", "cache/record", "workloads.lock")
    assert measured.command("check", "--stale").out.count(" of 4 candidates measured\n") == 3
    for space in (measured, clone):
        found = space.command("check", "--stale")
        assert found.code == 0, found.err
        assert "Test GPU would have to measure 3 candidates" in found.out
        assert json.loads(space.command("check", "--stale", "--json").out)["devices"]["Test GPU"]["candidates"] == 3
    assert clone.command("build", "--locked", runner=FakeRunner()).code == 0


def test_a_machine_with_the_gpu_measures_what_is_wanting_and_no_more(measured: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    measured.edit("workloads.toml", "top_k = 3", "top_k = 4")
    clone = measured.copy_of(measured.root / "clone", "cache/record", "workloads.lock")
    measured.build()
    _with_gpu(monkeypatch)
    for space, options in ((measured, {"require_measured": True}), (clone, {})):
        built = space.build(**options)
        assert not built.build.failures
        assert built.counts["verify"] == built.counts["sample"] == 3, "one new candidate of each entry"
        assert [entry["measured"] for entry in _entries(space)] == [""] * 3


def test_an_edited_template_that_schedules_the_same_keeps_its_measurements(measured: Space) -> None:
    before = _chosen(measured)
    measured.edit("templates/unrolled.py", "def", "BY_HAND = True\ndef")
    built = measured.build()
    assert not built.build.failures
    assert built.counts["compile"] <= 3, "the winners' objects alone: what the others compile to is known by their schedules"
    assert _chosen(measured) == before
    assert [entry["measured"] for entry in _entries(measured)] == [""] * 3


def test_without_the_gpu_an_edited_reference_leaves_the_winner_and_says_so(measured: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _chosen(measured)
    for rule in ("scale", "lookup"):
        measured.edit(f"rules/{rule}.py", "return x * self.factor", "return self.factor * x")
    built = measured.build()
    assert not built.build.failures
    assert built.counts["lower"] == 0
    assert _chosen(measured) == before
    assert [entry["verdict"]["verified"] for entry in _entries(measured)] == [False] * 3
    assert measured.read("workloads.lock").count("unverified = true") == 3
    assert "3 unverified" in build_text(build_json(built.build))
    _with_gpu(monkeypatch)
    built = measured.build(require_measured=True)
    assert (built.counts["verify"], built.counts["sample"]) == (3, 0), "the winners are verified again, and nothing is timed"
    assert [entry["verdict"]["verified"] for entry in _entries(measured)] == [True] * 3
    assert _chosen(measured) == before


def test_a_winner_that_was_verified_again_stays_so_where_its_template_is_edited_and_its_code_is_not(
    measured: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rule in ("scale", "lookup"):
        measured.edit(f"rules/{rule}.py", "return x * self.factor", "return self.factor * x")
    with monkeypatch.context() as there:
        _with_gpu(there)
        assert not measured.build(require_measured=True).build.failures
    before = _chosen(measured)
    measured.edit("templates/unrolled.py", "def", "BY_HAND = True\ndef")
    built = measured.build()
    assert (built.counts["verify"], built.counts["sample"]) == (0, 0)
    assert _chosen(measured) == before
    assert [entry["verdict"]["verified"] for entry in _entries(measured)] == [True] * 3


def test_of_a_gpu_the_next_entrys_candidates_are_built_ahead_and_none_twice(gpus: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_gpu(monkeypatch)
    built = gpus.build()
    assert not built.build.failures
    assert isinstance(built.runner, FakeRunner)
    cases = [
        (request["spec"]["computation"], json.dumps(request["candidate"])) for request in built.runner.asked if request["action"] == "build"
    ]
    assert len(cases) == len(set(cases)) == 9


def test_entries_are_asked_for_in_their_order_and_what_one_asks_has_its_turn(gpus: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_gpu(monkeypatch)
    runner = Noting()
    gpus.build(runner)
    for action in ("build", "describe"):
        assert [turn for turn, asked in runner.asked_of_compilers if asked == action] == [0, 1, 2]


@pytest.mark.parametrize(
    ("has_gpu", "measure", "started"), [(True, True, 18), (False, True, BUILT_AT_ONCE), (False, False, 6)], ids=["tune", "rank", "bundle"]
)
def test_as_many_workers_start_at_once_as_build_side_by_side(
    gpus: Space, has_gpu: bool, measure: bool, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three entries with six candidates each."""
    if has_gpu:
        _with_gpu(monkeypatch)
    gpus.edit("workloads.toml", "top_k = 3", "top_k = 6")
    runner = FakeRunner()
    gpus.build(runner, measure=measure)
    assert runner.started == started


@pytest.fixture
def one_gpu(gpus: Space, monkeypatch: pytest.MonkeyPatch) -> Space:
    """Return a workspace on a machine with its GPU, where the locks are real and what workers do is not."""
    monkeypatch.setattr(machine, "_here", lambda: (fake_gpu(0),))
    monkeypatch.setattr(tempfile, "tempdir", str(gpus.root.parent))
    monkeypatch.setattr(local, "Worker", FakeWorker)
    return gpus


def _build_on_gpu(space: Space, entries: set[str], report: Report) -> Session:
    runners = functools.partial(local.LocalRunner, 1, 1, lambda text: report(Note(text)))
    return flow.build(space.open(), Options(selected=frozenset(entries)), runners, {"cuda": FakeLinker()}, report)


def test_of_two_builds_none_waits_for_the_other_while_that_waits_for_it(one_gpu: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first keeps its GPU to its end; the second comes while it tunes, and has `tune.lock` as soon as the first lets go of it."""
    second_waits, second_tunes = threading.Event(), threading.Event()
    said: list[Event] = []
    second: list[Future[Session]] = []

    @contextlib.contextmanager
    def handed_over(*arguments: Any, **options: Any) -> Iterator[None]:
        is_first = threading.current_thread() is threading.main_thread()
        with exclusive(*arguments, **options):
            if not is_first:
                second_tunes.set()
            yield
        assert not is_first or second_tunes.wait(60)

    def first_says(event: Event) -> None:
        assert not isinstance(event, Note), f"who holds the GPU waits for nobody: {event}"
        said.append(event)
        if isinstance(event, Finished) and not second:
            second.append(other.submit(_build_on_gpu, one_gpu, {"large@box", "tabled@box"}, second_says))
            assert second_waits.wait(60)

    def second_says(event: Event) -> None:
        said.append(event)
        if isinstance(event, Note):
            second_waits.set()

    monkeypatch.setattr(turns, "exclusive", handed_over)
    with ThreadPoolExecutor(1) as other:
        builds = [_build_on_gpu(one_gpu, {"small@box", "large@box"}, first_says), second[0].result()]
    assert not any(build.failures for build in builds)
    tuned = [event.entry for event in said if isinstance(event, Finished) and event.kind == "tune"]
    assert tuned == ["small@box", "large@box", "tabled@box"]


def test_a_bundle_measured_elsewhere_gives_the_artifact_that_measuring_here_gives(
    gpus: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = gpus.build(measure=False)
    assert not built.build.failures
    assert built.counts["verify"] == 0
    (folder,) = built.build.bundles.values()
    # Elsewhere there is the bundle alone, at another place.
    moved = tmp_path / "elsewhere" / "some.bundle"
    shutil.copytree(folder, moved)
    hidden = tmp_path / "hidden"
    (gpus.root / "rules").rename(hidden)
    other = Space(tmp_path / "elsewhere")
    runner = FakeRunner()
    for entry in bundle.read_bundle(moved):
        assert bundle.measure_entry(entry, runner, _store(other), lambda *_: None).policy
    assert runner.counts["compile"] == 0
    hidden.rename(gpus.root / "rules")
    # The records are all that comes back.
    shutil.copytree(other.root / "cache/record", gpus.root / "cache/record", dirs_exist_ok=True)
    linked = gpus.build()
    assert linked.links == 1
    assert linked.counts["verify"] == linked.counts["sample"] == 0
    assert "unmeasured" not in gpus.read("workloads.lock")
    # A machine that has the GPU finds the same winners.
    direct = gpus.copy_of(tmp_path / "direct")
    _with_gpu(monkeypatch)
    direct.build()
    assert _chosen(direct) == _chosen(gpus)
    assert direct.read("workloads.lock") == gpus.read("workloads.lock")


def _store(space: Space) -> LocalStore:
    return LocalStore(space.root / "cache")


def _winners(space: Space) -> list[object]:
    return [(entry["name"], entry["winner"], entry["run_secs"], entry["key"]) for entry in _entries(space)]


def _entries(space: Space) -> list[dict[str, Any]]:
    return list(json.loads((space.artifact("box") / "manifest.json").read_text())["entries"])


def test_what_was_measured_before_is_in_no_later_bundle(gpus: Space) -> None:
    (folder,) = gpus.build(measure=False).build.bundles.values()
    _measure(gpus, folder)
    assert gpus.build(measure=False).build.bundles == {}


def test_measuring_a_bundle_again_measures_nothing(gpus: Space) -> None:
    (folder,) = gpus.build(measure=False).build.bundles.values()
    store = gpus.open().store
    entries = bundle.read_bundle(folder)
    assert not any(bundle.is_measured(entry, store) for entry in entries)
    _measure(gpus, folder)
    assert all(bundle.is_measured(entry, store) for entry in entries)


def test_a_candidate_that_is_wrong_elsewhere_leaves_the_next_best(gpus: Space) -> None:
    gpus.edit(
        "templates/unrolled.py",
        "unrolled {params['unroll']} times\"",
        "unrolled {params['unroll']} times\" + ' wrong' * (params['unroll'] == 1)",
    )
    (folder,) = gpus.build(measure=False).build.bundles.values()
    _measure(gpus, folder)
    gpus.build()
    winners_now = [dict(entry.tuned.winner.params)["unroll"] for entry in gpus.plan().entries if entry.tuned]
    assert len(winners_now) == 3
    assert 1 not in winners_now


def _bundled(folder: Path) -> set[int]:
    """Return the unrolls of all candidates in a bundle."""
    trials = [trial for entry in bundle.read_bundle(folder) for group in entry.groups for trial in group.built]
    return {int(dict(trial.candidate.params)["unroll"]) for trial in trials}


def test_what_does_not_build_is_in_no_bundle_and_what_is_wrong_does_not_win(gpus: Space) -> None:
    wrong_or_none = """if params["unroll"] == 2:
        return None
    wrong = " wrong" * (params["unroll"] == 1)
    return wrong + """
    gpus.edit("templates/unrolled.py", "return ", wrong_or_none)
    (folder,) = gpus.build(measure=False).build.bundles.values()
    assert _bundled(folder) == {1, 4}
    _measure(gpus, folder)
    assert gpus.build().links == 1
    assert {dict(entry.tuned.winner.params)["unroll"] for entry in gpus.plan().entries if entry.tuned} == {4}


def test_a_bundle_is_written_whole_or_not_at_all(gpus: Space) -> None:
    """The old one stays, and nothing else lies beside it."""
    built = gpus.build(measure=False).build
    (folder,) = built.bundles.values()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder.parent / f".{folder.name}-killed").mkdir()
    entries = bundle.read_bundle(folder)
    beside = [path.name for path in folder.parent.iterdir() if not path.name.startswith(f".{folder.name}-")]
    with pytest.raises(FileNotFoundError):
        bundle.write_bundle(folder, {entry.task.workload.rule: [folder / "rules/none.py"] for entry in entries}, entries)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in folder.parent.iterdir()] == beside
    assert len(bundle.read_bundle(folder)) == len(entries)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is no bundle"), ("{", "is not JSON"), ('{"schema": 99}', "is not of schema 4")],
    ids=["absent", "cut", "other"],
)
def test_what_is_no_bundle_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "bundle.json").write_text(content)
    with pytest.raises(ArtifactError, match=words):
        bundle.read_bundle(tmp_path)


def test_measuring_without_the_gpu_says_which_one_it_takes(gpus: Space) -> None:
    (folder,) = gpus.build(measure=False).build.bundles.values()
    done = gpus.run("measure", str(folder), code=10)
    assert "it must be measured on Test GPU" in done.stderr


def test_the_lock_may_be_frozen_with_unmeasured_entries_in_it(gpus: Space, tmp_path: Path) -> None:
    gpus.build()
    fresh = gpus.copy_of(tmp_path / "fresh", "workloads.lock", "cache/record")
    assert not fresh.build(locked=True).build.failures
    assert lock_of(fresh.open(), fresh.plan()) == lock_on_disk(fresh.open())


def test_a_frozen_lock_whose_unmeasured_entries_come_out_otherwise_is_refused(gpus: Space, tmp_path: Path) -> None:
    gpus.build()
    fresh = gpus.copy_of(tmp_path / "fresh", "workloads.lock", "cache/record")
    text = fresh.read("workloads.lock")
    fresh.write({"workloads.lock": text.replace("unroll=1", "unroll=2")})
    with pytest.raises(StaleError, match=r"workloads.lock would change"):
        fresh.build(locked=True)
    assert "unroll=2" in fresh.read("workloads.lock")


def test_a_compiler_of_another_release_stops_the_build_before_anything_runs(
    gpus: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvcc(tmp_path / "old", "12.4.131", monkeypatch)
    with pytest.raises(ToolchainError, match=r"workloads.toml asks for cuda 13.0, but \S+/old/nvcc is of CUDA 12.4.131"):
        gpus.build(DieRunner())


def test_a_compiler_that_does_not_know_the_arch_stops_the_build(gpus: Space) -> None:
    gpus.edit("archs/test-gpu.toml", 'arch = "sm_90"', 'arch = "sm_100"')
    gpus.edit("archs/test-gpu.toml", "compute_capability = [9, 0]", "compute_capability = [10, 0]")
    with pytest.raises(ToolchainError, match=r"makes no code for sm_100: it knows sm_75, sm_80, sm_90"):
        gpus.build(DieRunner())


@pytest.mark.parametrize(
    ("found", "declared", "same"),
    [
        ("13.0.88", "13.0", True),
        ("13.0.88", "13.0.88", True),
        ("13.0.48", "13.0.88", False),
        ("13.1.10", "13.0", False),
        ("12.9.1", "13", False),
    ],
)
def test_a_declared_release_takes_its_patch_releases(found: str, declared: str, same: bool) -> None:
    assert is_cuda(found, declared) is same


def _built(name: str, **fields: object) -> Trial:
    from kerneldecl.model import Candidate

    return Trial(Candidate.of(name, {}), 1e-6, code_digest=name, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("built", "winner"),
    [
        ([_built("first"), _built("second")], "first"),
        ([_built("spills", spill_bytes=8), _built("second")], "second"),
        ([_built("spills", spill_bytes=8), _built("fails", failure="no")], "spills"),
        ([_built("fails", failure="no")], ""),
    ],
    ids=["first", "spilling ones last", "rather than nothing", "nothing"],
)
def test_the_choice_without_measurements(built: Sequence[Trial], winner: str) -> None:
    measurements = preferred_first(Built("policy", tuple(built)), is_complete=True)
    assert (measurements[0].code_digest if measurements else "") == winner
    assert len(measurements) in (0, len(built))
