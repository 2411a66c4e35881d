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
from kerneldecl.serial import arch_from_json, to_json
from kerneldecl.store.keys import digest, key
from kerneldecl.store.local import LocalStore, Record
from kerneldecl.tuning.measure import Preparation, measure, measured_on
from kerneldecl.tuning.race import ranking
from kerneldecl.tuning.search import Outcome, chosen, groups, keep_objects, measurement_from_json, measurement_json, record_result
from kerneldecl.tuning.task import BUILD_SECS, Runner, Step, Task

SCHEMA = 1
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
    """Of each: digests of its object, its database lines and its source, as a tuning record names the winner's."""


@dataclass(frozen=True)
class Entry:
    """One entry of a bundle. The libraries of its candidates are in the task's folder."""

    task: Task
    manifest: str
    """Of the tuning: its key is that of the record to be."""
    groups: tuple[Candidates, ...]


def bundle_folder(root: Path, name: str, version: str, target: str) -> Path:
    return root / "dist" / f"{name}-{version}" / f"{target}.bundle"


def build_entry(task: Task, manifest: str, runner: Runner, step: Step) -> tuple[Entry, Outcome]:
    """Build an entry's candidates; return them with the outcome to link until they are measured, as `tune.rank` has it."""
    found = list(itertools.islice(groups(task, runner, step), MOST_GROUPS))
    made: list[Candidates] = []
    outcome = Outcome([m for group in found for m in group.built], 0, "")
    for group in found:
        keep_objects(task, group.built, runner)
        compiled = tuple(m for m in group.built if not m.failure and task.has_object(m.code))
        made.append(Candidates(group.policy, compiled, tuple(_blobs(task, compiled, runner))))
        if not outcome.policy and (measurements := chosen(group, is_complete=True)):
            outcome = Outcome(measurements, 0, group.policy)
    return Entry(task, manifest, tuple(made)), outcome


def _blobs(task: Task, compiled: Sequence[Trial], runner: Runner) -> list[dict[str, str]]:
    answers = in_order(runner.run_all([task.describe_request(m.candidate) for m in compiled], BUILD_SECS), len(compiled))
    texts = [{name: digest(answer[name].encode()) for name in ("database", "source")} for answer in answers]
    return [{"code": digest(task.object_path(m.code).read_bytes()), **text} for m, text in zip(compiled, texts, strict=True)]


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
            for measurement in (m for group in entry.groups for m in group.built):
                library = entry.task.library_path(measurement.code)
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
        "lowered": dict(task.lowered),
        "tolerance": task.tolerance,
        "protocol": dict(task.protocol),
        "toolchain": dict(task.toolchain),
        "manifest": entry.manifest.splitlines(),
        "groups": [{"policy": group.policy, "candidates": _candidates_json(group)} for group in entry.groups],
    }


def _candidates_json(group: Candidates) -> list[dict[str, Any]]:
    return [{**measurement_json(m), "blobs": dict(blobs)} for m, blobs in zip(group.built, group.blobs, strict=True)]


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
    given = (json["lowered"], json["tolerance"], json["protocol"], json["toolchain"])
    task = Task(folder, Workload(**fields), arch_from_json(json["arch"]), (), *given, folder / "lib")
    made = [(group["policy"], [dict(candidate) for candidate in group["candidates"]]) for group in json["groups"]]
    several = [(policy, [c.pop("blobs") for c in candidates], candidates) for policy, candidates in made]
    groups_read = (Candidates(policy, tuple(map(measurement_from_json, candidates)), tuple(blobs)) for policy, blobs, candidates in several)
    return Entry(task, "".join(f"{line}\n" for line in json["manifest"]), tuple(groups_read))


def measure_entry(entry: Entry, runner: Runner, store: LocalStore, step: Step, following: Task | None = None) -> Outcome:
    """Verify and time an entry's candidates and keep the record, as tuning does; if none passes, there is no record.

    `following` is measured next.
    """
    failed: list[Trial] = []
    for group in entry.groups:
        measured = measure(entry.task, group.built, Preparation(entry.task, runner, store, following), runner, store, step)
        if any(m.samples for m in measured):
            outcome = Outcome(*ranking([*measured, *failed]), group.policy)
            _keep(entry, group, outcome, runner, store)
            return outcome
        failed += measured
    return Outcome(failed, 0, "")


def is_measured(entry: Entry, store: LocalStore) -> bool:
    return isinstance(store.read("tune", key(entry.manifest), is_local=False), Record)


def _keep(entry: Entry, group: Candidates, outcome: Outcome, runner: Runner, store: LocalStore) -> None:
    winner = outcome.measurements[0]
    blobs = next(blobs for m, blobs in zip(group.built, group.blobs, strict=True) if m.candidate == winner.candidate)
    found = {**blobs, "build_key": key(f"{winner.scheduled} {blobs['code']}"), **measured_on(entry.task, runner)}
    store.write("tune", entry.manifest, record_result(entry.task, outcome, found), is_local=False)
