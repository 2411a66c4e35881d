"""Owns bundles: candidates that were built on one machine, to be verified and timed on another that has the GPU but no compiler.

Knows nothing of how candidates are built or run, or of linking.

    bundle.json     the entries, each with the manifest of its tuning and its candidates in order of preference
    lib/<code>.so   a library for each candidate's code
    rules/…         the workspace's own files that inputs and references come from, and files that attributes name

Measuring a bundle leaves the records that tuning would have left: whoever has them links the measured winners.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneldecl.errors import ArtifactError
from kerneldecl.model import Trial, Workload, frozen
from kerneldecl.runners.local import in_order
from kerneldecl.serial import arch_from_json, to_json, trial_from_json, trial_to_json
from kerneldecl.store.keys import digest, key
from kerneldecl.store.local import Record
from kerneldecl.store.protocol import Store
from kerneldecl.store.results import Lowered
from kerneldecl.tuning.measure import Preparation, measure, measured_on
from kerneldecl.tuning.records import measured_here, write_result
from kerneldecl.tuning.search import Outcome, groups, keep_objects, preferred_first, search
from kerneldecl.tuning.task import BUILD_SECS, OnProgress, Runner, Task

SCHEMA = 3
FILE = "bundle.json"
MOST_GROUPS = 2
"""Policies whose candidates go into a bundle: the first that proposes any, and one more in case none of those is right."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Candidates:
    """What one policy proposed for an entry, built."""

    policy: str
    built: tuple[Trial, ...]
    blobs: tuple[Mapping[str, str], ...]
    """Digests of each candidate's object, database lines and source, as a tuning record names the winner's."""


@dataclass(frozen=True)
class Entry:
    """One entry of a bundle. The libraries of its candidates are in the task's folder."""

    task: Task
    manifest: str
    """Manifest of the tuning: its key is that of the record to be."""
    groups: tuple[Candidates, ...]


def bundle_folder(root: Path, name: str, version: str, target: str) -> Path:
    return root / "dist" / f"{name}-{version}" / f"{target}.bundle"


def build_entry(task: Task, manifest: str, runner: Runner, on_progress: OnProgress) -> tuple[Entry, Outcome]:
    """Build an entry's candidates; return them with the outcome to link until they are measured, as `search.rank` has it."""
    found = list(itertools.islice(groups(task, runner, on_progress), MOST_GROUPS))
    bundled: list[Candidates] = []
    outcome = Outcome([trial for group in found for trial in group.built], 0, "")
    for group in found:
        keep_objects(task, group.built, runner)
        compiled = tuple(trial for trial in group.built if not trial.failure and task.has_object(trial.code_digest))
        bundled.append(Candidates(group.policy, compiled, tuple(_blobs(task, compiled, runner))))
        if not outcome.policy and (preferred := preferred_first(group, is_complete=True)):
            outcome = Outcome(preferred, 0, group.policy)
    return Entry(task, manifest, tuple(bundled)), outcome


def _blobs(task: Task, compiled: Sequence[Trial], runner: Runner) -> list[dict[str, str]]:
    requests = [task.describe_request(trial.candidate) for trial in compiled]
    answers = in_order(runner.run_all(requests, BUILD_SECS), len(compiled))
    texts = [{name: digest(answer[name].encode()) for name in ("database", "source")} for answer in answers]
    objects = [digest(task.object_path(trial.code_digest).read_bytes()) for trial in compiled]
    return [{"object": held, **text} for held, text in zip(objects, texts, strict=True)]


def write_bundle(folder: Path, rule_files: Mapping[str, Sequence[Path]], entries: Sequence[Entry]) -> None:
    """Write a bundle whole, in place of what was there. `rule_files` are the files behind each rule, and those that attributes name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        (fresh / "lib").mkdir()
        for entry in entries:
            root = entry.task.root
            for file in rule_files[entry.task.workload.rule]:
                if file.is_relative_to(root):  # the others come with kerneldecl
                    place = fresh / file.relative_to(root)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, place)
            for trial in (trial for group in entry.groups for trial in group.built):
                library = entry.task.library_path(trial.code_digest)
                shutil.copyfile(library, fresh / "lib" / library.name)
        content = {"schema": SCHEMA, "entries": [_entry_json(entry) for entry in entries]}
        (fresh / FILE).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        fresh.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        fresh.replace(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _entry_json(entry: Entry) -> dict[str, Any]:
    task = entry.task
    return {
        "workload": to_json(task.workload),
        "arch": to_json(task.arch),
        "lowered": dict(task.lowered.json),
        "tolerance": task.tolerance,
        "protocol": task.protocol,
        "seed": task.seed,
        "reference": task.reference,
        "toolchain": dict(task.toolchain),
        "manifest": entry.manifest.splitlines(),
        "groups": [{"policy": group.policy, "candidates": _candidates_json(group)} for group in entry.groups],
    }


def _candidates_json(group: Candidates) -> list[dict[str, Any]]:
    return [{**trial_to_json(trial), "blobs": dict(blobs)} for trial, blobs in zip(group.built, group.blobs, strict=True)]


def read_bundle(folder: Path) -> list[Entry]:
    """Return a bundle's entries; raise ArtifactError where it is none, or not one of this version's."""
    try:
        content = json.loads((folder / FILE).read_bytes())
    except OSError as error:
        raise ArtifactError(f"{folder} is no bundle: {FILE}: {error.strerror}; `kerneldecl build --no-measure` writes one") from None
    except ValueError:
        raise ArtifactError(
            f"{folder / FILE} is not JSON (cut off?); write the bundle again with `kerneldecl build --no-measure`"
        ) from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ArtifactError(f"{folder / FILE} is not of schema {SCHEMA}; write it with this version's `kerneldecl build --no-measure`")
    return [_entry_from_json(folder, entry) for entry in content["entries"]]


def _entry_from_json(folder: Path, json: Json) -> Entry:
    fields: dict[str, Any] = {name: frozen(value) if isinstance(value, list) else value for name, value in json["workload"].items()}
    task = Task(
        root=folder,
        cache=folder / "cache",
        workload=Workload(**fields),
        arch=arch_from_json(json["arch"]),
        groups=(),
        lowered=Lowered(json["lowered"]),
        tolerance=json["tolerance"],
        protocol=json["protocol"],
        seed=json["seed"],
        reference=json["reference"],
        toolchain=json["toolchain"],
        folder=folder / "lib",
    )
    return Entry(task, "".join(f"{line}\n" for line in json["manifest"]), tuple(map(_candidates_from_json, json["groups"])))


def _candidates_from_json(json: Json) -> Candidates:
    candidates = [dict(candidate) for candidate in json["candidates"]]
    blobs = tuple(candidate.pop("blobs") for candidate in candidates)
    return Candidates(json["policy"], tuple(map(trial_from_json, candidates)), blobs)


def measure_entry(entry: Entry, runner: Runner, store: Store, on_progress: OnProgress, next_task: Task | None = None) -> Outcome:
    """Verify and time an entry's candidates and keep the record, as tuning does; if none passes, there is no record.

    `next_task` is measured next.
    """
    task = entry.task

    def evaluate(built: Sequence[Trial]) -> list[Trial]:
        return measure(task, built, Preparation(task, runner, store, next_task), runner, store, on_progress)

    outcome = search(((group.policy, group.built) for group in entry.groups), evaluate)
    assert outcome is not None, "a measurement is never unknown"
    if outcome.policy:
        blobs = _blobs_of(entry, outcome)
        write_result(store, entry.manifest, task, outcome, blobs, measured_here(measured_on(task, runner)))
    return outcome


def _blobs_of(entry: Entry, outcome: Outcome) -> Mapping[str, str]:
    candidates = ((trial, blobs) for group in entry.groups for trial, blobs in zip(group.built, group.blobs, strict=True))
    return next(blobs for trial, blobs in candidates if trial.candidate == outcome.trials[0].candidate)


def is_measured(entry: Entry, store: Store) -> bool:
    return isinstance(store.read("tune", key(entry.manifest), is_local=False), Record)
