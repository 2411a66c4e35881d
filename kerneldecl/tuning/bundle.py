"""Owns bundles: candidates that were built on one machine, to be verified and timed on another that has the device but no
compiler.

Knows nothing of how candidates are built or run, or of linking.

    bundle.json               the entries with their candidates in order of preference; SHA-256 of every other file
    bundle.sig                who has signed bundle.json, if anybody has
    lib/<code>.so             a library for each candidate's code
    blob/<digest>             objects, database lines and sources of the candidates: those of winners are kept if the bundle's signature is
                              that of somebody who is trusted; otherwise a build makes them again
    computation/<digest>.json the computation of each entry as TVM's JSON, the reference where no standard rule computes it
    rules/…                   the workspace's own rules and the files that attributes name: run with `--trust-rules` alone

Measuring a bundle leaves the records that tuning would have left: whoever has them links the measured winners. A bundle is data: it
names no key and no path. Keys are computed from what it says of an entry, and names of files from digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kerneldecl.errors import ArtifactError, KerneldeclError, printable
from kerneldecl.model import Arch, IterSpace, Trial, Workload, frozen
from kerneldecl.planning.plan import VERIFYING, Searched, tolerance, tune_manifest
from kerneldecl.plugins.find import STANDARD
from kerneldecl.rows import rows_field
from kerneldecl.runners.local import in_order
from kerneldecl.serial import arch_from_json, misfit, to_json, trial_from_json, trial_to_json
from kerneldecl.store.inside import is_digest, read_regular
from kerneldecl.store.keys import digest, key
from kerneldecl.store.local import LocalStore, Record
from kerneldecl.store.protocol import Store
from kerneldecl.store.result_types import wrong_field
from kerneldecl.store.results import BLOBS, Lowered
from kerneldecl.store.signing import Sign, Verify
from kerneldecl.timing import measuring
from kerneldecl.tuning.bundle_files import AGAIN, FILE, Content, read_files, write_files
from kerneldecl.tuning.loop import Outcome, Round, search
from kerneldecl.tuning.measure import Preparation, measure, measured_on
from kerneldecl.tuning.records import measured_here, write_result
from kerneldecl.tuning.search import after_final, groups, has_turns, keep_objects, preferred_first
from kerneldecl.tuning.task import BUILD_SECS, OnProgress, Runner, Task

MOST_GROUPS = 2
"""Policies of each turn whose candidates go into a bundle: the first that proposes any, and one more in case none of those is right."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Trust:
    """Whom to believe of a bundle."""

    rules: bool = False
    """Whether its own rules are run, which is Python code."""
    keys: tuple[str, ...] = ()
    """Public keys of which one must have signed it; empty: anybody may have written it."""


NOBODY = Trust()


@dataclass(frozen=True)
class Candidates:
    """What one policy proposed for an entry, built."""

    policy: str
    built: tuple[Trial, ...]
    blobs: tuple[Mapping[str, str], ...]
    """Digests of each candidate's object, database lines and source, as a tuning record names the winner's."""
    turn: int = 0
    """As `search.Round` has it."""


@dataclass(frozen=True)
class Entry:
    """One entry of a bundle. The libraries of its candidates are in the task's folder."""

    task: Task
    searched: Searched
    """What the key has of the candidates, of the templates behind them and of the reference."""
    groups: tuple[Candidates, ...]
    ir: str = ""
    """The computation as TVM's JSON, while the bundle is written."""
    held: Mapping[str, Content] = field(default_factory=dict)
    """Objects, database lines and sources of all candidates by their digests, while the bundle is written."""

    @property
    def manifest(self) -> str:
        """Manifest of the tuning: its key is that of the record to be, here as on the machine that built."""
        return tune_manifest(self.task.workload, self.task.lowered, self.searched, self.task.arch, self.task.toolchain)


def bundle_folder(root: Path, name: str, version: str, target: str) -> Path:
    return root / "dist" / f"{name}-{version}" / f"{target}.bundle"


def build_entry(task: Task, searched: Searched, runner: Runner, on_progress: OnProgress) -> tuple[Entry, Outcome]:
    """Build an entry's candidates; return them with the outcome to link until they are measured, as `search.rank` has it."""
    found = list(groups(task, runner, on_progress, MOST_GROUPS))
    bundled: list[Candidates] = []
    held: dict[str, Content] = {}
    outcome = Outcome([trial for group in found for trial in group.built], 0, "")
    for group in found:
        keep_objects(task, group.built, runner)
        compiled = tuple(trial for trial in group.built if not trial.failure and task.has_object(trial.code_digest))
        blobs = _blobs(task, compiled, runner)
        bundled.append(
            Candidates(group.policy, compiled, tuple({name: found for name, (found, _) in each.items()} for each in blobs), group.turn)
        )
        held |= {found: content for each in blobs for found, content in each.values()}
        if not outcome.policy and (preferred := preferred_first(group, is_complete=True)):
            outcome = Outcome(preferred, 0, group.policy)
    (answer,) = in_order(runner.run_all([task.computation_request()], BUILD_SECS), 1)
    return Entry(task, searched, tuple(bundled), answer.get("ir", ""), held), outcome


def _blobs(task: Task, compiled: Sequence[Trial], runner: Runner) -> list[dict[str, tuple[str, Content]]]:
    """Return digest and content of what a record names of each candidate."""
    requests = [task.describe_request(trial.candidate) for trial in compiled]
    answers = in_order(runner.run_all(requests, BUILD_SECS), len(compiled))
    texts = [{name: (digest(answer[name].encode()), answer[name]) for name in ("database", "source")} for answer in answers]
    paths = [task.object_path(trial.code_digest) for trial in compiled]
    objects = [(digest(path.read_bytes()), path) for path in paths]
    return [{"object": held, **text} for held, text in zip(objects, texts, strict=True)]


def write_bundle(folder: Path, rule_files: Mapping[str, Sequence[Path]], entries: Sequence[Entry], sign: Sign | None = None) -> None:
    """Write a bundle whole, in place of what was there. `rule_files` are the files behind each rule, and those that attributes name."""
    write_files(folder, _contents(rule_files, entries), [_entry_json(entry) for entry in entries], sign)


def _contents(rule_files: Mapping[str, Sequence[Path]], entries: Sequence[Entry]) -> Iterator[tuple[str, Content]]:
    """Yield the name of each file of a bundle, with the file that it is copied from or its text."""
    for entry in entries:
        root, libraries = entry.task.root, {trial.code_digest for group in entry.groups for trial in group.built}
        # The others come with kerneldecl.
        yield from ((str(file.relative_to(root)), file) for file in rule_files[entry.task.workload.rule] if file.is_relative_to(root))
        yield from ((library_name(code), entry.task.library_path(code)) for code in libraries)
        yield from ((blob_name(found), content) for found, content in entry.held.items())
        if entry.ir:
            yield computation_name(entry.task.lowered.computation), entry.ir


def library_name(code_digest: str) -> str:
    return f"lib/{code_digest}.so"


def blob_name(blob_digest: str) -> str:
    return f"blob/{blob_digest}"


def computation_name(computation: str) -> str:
    return f"computation/{computation}.json"


def _entry_json(entry: Entry) -> dict[str, Any]:
    task = entry.task
    return {
        "workload": to_json(task.workload),
        "arch": to_json(task.arch),
        "lowered": dict(task.lowered.json),
        "toolchain": dict(task.toolchain),
        "searched": entry.searched._asdict(),
        "groups": [{"policy": group.policy, "turn": group.turn, "candidates": _candidates_json(group)} for group in entry.groups],
    }


def _candidates_json(group: Candidates) -> list[dict[str, Any]]:
    return [{**trial_to_json(trial), "blobs": dict(blobs)} for trial, blobs in zip(group.built, group.blobs, strict=True)]


def read_bundle(folder: Path, verify: Verify | None = None) -> list[Entry]:
    """Return a bundle's entries; raise ArtifactError where it is none, not one of this version's, or any file or field is wrong.

    Where there is something to verify signatures by, somebody who is trusted must have signed it.
    """
    content = read_files(folder, verify)
    return [_entry_of(folder, content["files"], position, entry) for position, entry in enumerate(content["entries"])]


def part_of(entries: Sequence[Entry], part: int, parts: int) -> list[Entry]:
    """Return the entries that one of several machines measures; the parts, counted from 1, have all entries between them."""
    ranked = sorted(entries, key=lambda entry: key(entry.manifest))
    chosen = {id(entry) for entry in ranked[part - 1 :: parts]}
    return [entry for entry in entries if id(entry) in chosen]


def _entry_of(folder: Path, files: Json, position: int, json: Any) -> Entry:
    try:
        entry = _entry_from_json(folder, json)
        wrong = _wrong_entry(entry, files)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, KerneldeclError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        raise ArtifactError(f"{folder / FILE}: entries[{position}] is malformed ({printable(wrong)[:200]}); {AGAIN}")
    return entry


def _entry_from_json(folder: Path, json: Json) -> Entry:
    fields: dict[str, Any] = {name: frozen(value) if isinstance(value, list) else value for name, value in json["workload"].items()}
    workload, arch, lowered = Workload(**fields), arch_from_json(json["arch"]), json["lowered"]
    if not isinstance(lowered, dict) or wrong_field("lower", lowered):
        raise TypeError("lowered is no lower record's result")
    texts = {name: {str(key): str(value) for key, value in json["searched"][name].items()} for name in ("candidates", "templates")}
    turns = tuple(int(turn) for turn in json["searched"].get("turns", ()))
    searched = Searched(**texts, reference=str(json["searched"]["reference"]), turns=turns)
    task = Task(
        root=folder,
        cache=folder / "cache",
        workload=workload,
        arch=arch,
        groups=(),
        lowered=Lowered(lowered),
        tolerance=tolerance(workload, Lowered(lowered)),
        protocol=measuring(arch.kind, workload.timing),
        seed=int(VERIFYING["seed"]),
        reference_digest=searched.reference,
        toolchain={str(tool): str(version) for tool, version in json["toolchain"].items()},
        folder=folder / "lib",
    )
    return Entry(task, searched, tuple(map(_candidates_from_json, json["groups"])))


def _candidates_from_json(json: Json) -> Candidates:
    candidates = [dict(candidate) for candidate in json["candidates"]]
    blobs = tuple(candidate.pop("blobs") for candidate in candidates)
    return Candidates(json["policy"], tuple(map(trial_from_json, candidates)), blobs, int(json.get("turn", 0)))


def _wrong_entry(entry: Entry, files: Json) -> str:
    """Return what of an entry is not what was annotated, or names a file that is not there."""
    task = entry.task
    checked = ((task.workload, Workload, "workload"), (task.arch, Arch, "arch"), (task.lowered.space, IterSpace, "lowered.space"))
    if wrong := next(filter(None, (misfit(value, hint, where) for value, hint, where in checked)), ""):
        return f"{wrong} has another type"
    if task.arch.is_detected:
        return "its arch is detected, not declared"
    entry.manifest  # noqa: B018  it names every tool that it needs, or raises
    candidates = ((group, trial, blobs) for group in entry.groups for trial, blobs in zip(group.built, group.blobs, strict=True))
    return next(filter(None, (_wrong_candidate(*each, files) for each in candidates)), "")


def _wrong_candidate(group: Candidates, trial: Trial, blobs: object, files: Json) -> str:
    if wrong := misfit(trial, Trial, "candidate") or misfit(group.policy, str, "policy"):
        return f"{wrong} has another type"
    if not is_digest(trial.code_digest) or library_name(trial.code_digest) not in files:
        return f"there is no library of {trial.candidate}"
    if not isinstance(blobs, dict) or {*blobs} != {*BLOBS} or not all(map(is_digest, blobs.values())):
        return f"blobs of {trial.candidate} are no digests"
    is_there = all(files.get(blob_name(found)) == found for found in blobs.values())
    return "" if is_there else f"blobs of {trial.candidate} are not there"


def with_trusted_references(entries: Sequence[Entry], runner: Runner) -> list[Entry]:
    """Return the entries with references that need no code of the bundle: standard rules that compute the same, else its own computation.

    Raise ArtifactError where an entry has neither.
    """
    requests = []
    for entry in entries:
        workload, computation = entry.task.workload, entry.task.lowered.computation
        file = str(entry.task.root / computation_name(computation))
        said = {"rule": workload.rule, "attrs": dict(workload.attrs), **workload.nan_field, **rows_field(workload.rows, workload.attrs)}
        asked = {"roots": [str(STANDARD)], "asked": said, "computation": computation}
        requests.append({"action": "reference_of", **asked, "file": file})
    answers = in_order(runner.run_all(requests, BUILD_SECS), len(requests))
    for entry, answer in zip(entries, answers, strict=True):
        if "failure" in answer:
            why = f"{entry.task.workload.entry}: the bundle holds no reference ({answer['failure']})"
            raise ArtifactError(f"{printable(why)}; --trust-rules runs its rules instead")
    return [replace(entry, task=replace(entry.task, reference=answer)) for entry, answer in zip(entries, answers, strict=True)]


CARRIED = "the computation that the bundle carries"


def reference_name(entry: Entry) -> str:
    """Return what an entry's kernels are compared with, as a phrase."""
    asked, rule = entry.task.reference, entry.task.workload.rule
    if not asked:
        return f"rule {rule} of the bundle, or the standard one where it holds none"
    return f"the standard rule {rule}" if asked["root"] == str(STANDARD) and asked["rule"] == rule else CARRIED


def measure_entry(entry: Entry, runner: Runner, store: Store, on_progress: OnProgress, next_task: Task | None = None) -> Outcome:
    """Verify and time an entry's candidates and keep the record, as tuning does; if none passes, there is no record.

    `next_task` is measured next.
    """
    task = entry.task

    def evaluate(built: Sequence[Trial]) -> list[Trial]:
        return measure(task, built, Preparation(task, runner, store, next_task), runner, store, on_progress)

    outcome = search((Round(group.policy, group.built, group.turn) for group in entry.groups), evaluate)
    assert outcome is not None, "a measurement is never unknown"
    if has_turns(group.turn for group in entry.groups):
        outcome = after_final(task, outcome, Preparation(task, runner, store), runner, on_progress)
    if outcome.policy:
        blobs = _blobs_of(entry, outcome)
        write_result(store, entry.manifest, task, outcome, blobs, measured_here(measured_on(task, runner)))
    return outcome


def keep_blobs(entry: Entry, outcome: Outcome, store: LocalStore) -> None:
    """Keep the winner's object, database lines and source, so that it can be linked here and shared: it is code that nobody makes again."""
    for found in _blobs_of(entry, outcome).values():
        store.write_blob(read_regular(entry.task.root / blob_name(found)))


def _blobs_of(entry: Entry, outcome: Outcome) -> Mapping[str, str]:
    candidates = ((trial, blobs) for group in entry.groups for trial, blobs in zip(group.built, group.blobs, strict=True))
    return next(blobs for trial, blobs in candidates if trial.candidate == outcome.trials[0].candidate)


def is_measured(entry: Entry, store: Store) -> bool:
    return isinstance(store.read("tune", key(entry.manifest), is_local=False), Record)
