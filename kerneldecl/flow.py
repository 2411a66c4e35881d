"""Owns the order of a build's stages and what is handed from one to the next.

Knows nothing of TVM: what needs it runs behind the runner.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kerneldecl import host, link, lockfile, state
from kerneldecl.errors import StaleError, ToolchainError
from kerneldecl.key import key
from kerneldecl.lock import exclusive
from kerneldecl.model import Arch, Candidate
from kerneldecl.planning import BLOBS, MEASURING, Action, EntryPlan, Past, Plan, plan, tolerance
from kerneldecl.progress import Finished, Note, Report, Started, Step
from kerneldecl.runners.local import in_order
from kerneldecl.serial import to_json
from kerneldecl.stores.local import Miss, Record
from kerneldecl.toolchain import PACKAGES, installed
from kerneldecl.tune import BUILD_SECS, Runner, Task, ceilings, record_result, tune, winner_object
from kerneldecl.workspace import LOCK, Workspace

Runners = Callable[[], AbstractContextManager[Runner]]


@dataclass(frozen=True)
class Options:
    """What the user asked of this build."""

    keep_going: bool = True
    locked: bool = False
    wait: bool = True
    selected: frozenset[str] | None = None
    """Entries to build; None: all."""


@dataclass
class Build:
    """A build under way: its collaborators, the plan as it stands, and what went wrong so far."""

    workspace: Workspace
    options: Options
    runners: Runners
    linkers: Mapping[str, link.Linker]
    """By kind of arch."""
    report: Report
    plan: Plan
    first_plan: Plan
    runner: Runner | None = None
    failures: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)
    ran: list[Action] = field(default_factory=list)
    """What was run, as the plan of that moment has it: with its key and reason."""

    @property
    def entries(self) -> list[EntryPlan]:
        """The entries to work on: selected, and not failed yet."""
        chosen = self.options.selected
        return [e for e in self.plan.entries if (chosen is None or e.entry in chosen) and e.entry not in self.failures]

    @property
    def is_over(self) -> bool:
        return bool(self.failures) and not self.options.keep_going


def build(workspace: Workspace, options: Options, runners: Runners, linkers: Mapping[str, link.Linker], report: Report) -> Build:
    """Bring the workspace's artifacts up to date, as far as no entry fails, and return what came of it."""
    first = make_plan(workspace)
    if _drop_damaged(workspace, first):
        first = make_plan(workspace)
    at_work = Build(workspace, options, runners, linkers, report, first, first)
    needs_runner = any(not action.is_hit for entry in at_work.entries for action in entry.actions)
    report(Started(len(first.entries), *(_misses(at_work.entries, kind) for kind in ("lower", "tune", "build"))))
    if needs_runner:
        with runners() as at_work.runner:
            _run(at_work, STAGES)
    else:
        _run(at_work, (check_lock, link_artifacts, write_lock))
    at_work.plan = make_plan(workspace)
    remember(at_work)
    return at_work


def _drop_damaged(workspace: Workspace, planned: Plan) -> bool:
    """Remove the blobs that a link would stumble over, for plans go by their names alone; say whether any is missing."""
    targets = {action.target for action in planned.links if not action.is_hit}
    results = [e.tuned.result for e in planned.entries if e.tuned and e.workload.target in targets]
    found = [workspace.store.read_blob(result[name]) for result in results for name in BLOBS]
    return any(isinstance(blob, Miss) for blob in found)


def _run(at_work: Build, stages: Sequence[Callable[[Build], None]]) -> None:
    for stage in stages:
        stage(at_work)
        if at_work.is_over:
            break


def _misses(entries: Iterable[EntryPlan], kind: str) -> int:
    return len({action.key or action.entry for e in entries for action in e.actions if action.kind == kind and not action.is_hit})


def make_plan(workspace: Workspace) -> Plan:
    """Return the plan of the whole workspace as its store stands."""
    declaration = workspace.declaration
    read = _reader(workspace)
    return plan(declaration.workloads, workspace.inputs, read, _past(workspace), (declaration.artifact, declaration.version))


def _reader(workspace: Workspace) -> Callable[[str, str, bool], Record | Miss]:
    def read(kind: str, record_key: str, is_local: bool) -> Record | Miss:
        return workspace.store.read(kind, record_key, is_local=is_local)

    return read


def _past(workspace: Workspace) -> Past:
    store, declaration = workspace.store, workspace.declaration
    last = state.read_state(store.root / "state.json")
    detected = {target: arch.is_detected for target, arch in workspace.inputs.archs.items()}

    def manifest(entry: str, kind: str) -> str:
        record_key = last.keys.get(entry, {}).get(kind, "")
        is_local = kind == "link" or detected.get(entry.rpartition("@")[2], True)
        found = store.read(kind, record_key, is_local=is_local) if record_key else None
        return found.manifest if isinstance(found, Record) else ""

    def defect(target: str, link_key: str) -> str:
        return link.artifact_defect(link.artifact_folder(workspace.root, declaration.artifact, declaration.version, target), link_key)

    return Past(manifest, store.has_blob, defect)


# Stages, in order. Each finds what is missing in the plan, does it, records it and plans again.


def check_lock(at_work: Build) -> None:
    """Stop before anything runs if the lock would change and the user forbade it."""
    if not at_work.options.locked:
        return
    stale = [a.entry for e in at_work.plan.entries if not e.arch.is_detected for a in e.actions if a.kind == "tune" and not a.is_hit]
    if stale:
        raise StaleError(
            f"{LOCK} would change: {', '.join(stale[:5])} would be tuned; run `kerneldecl build` without --locked and commit the lock"
        )
    if lock_of(at_work.workspace, at_work.plan) != _read(at_work.workspace.root / LOCK):
        raise StaleError(f"{LOCK} would change; run `kerneldecl build` without --locked and commit the lock")


def check_toolchain(at_work: Build) -> None:
    """Refuse to run with other tools than the declared ones: their results would stand under a wrong key."""
    for tool, package in PACKAGES.items():
        declared, found = at_work.workspace.inputs.toolchain[tool], installed(package)
        if declared != found:
            there = f"{package} {found} is installed" if found else f"{package} is not installed"
            sentence = f"workloads.toml asks for {tool} {declared}, but {there}"
            raise ToolchainError(f'{sentence}; run `pip install "{package}=={declared}"` or change [toolchain]')


def lower_entries(at_work: Build) -> None:
    """Lower what has no known computation."""
    wanted = _distinct(at_work, "lower")
    root = str(at_work.workspace.root)
    requests = [{"do": "lower", "root": root, "rule": e.workload.rule, "attrs": dict(e.workload.attrs)} for e in wanted]
    for index, answer in _runner(at_work).run_all(requests, BUILD_SECS):
        entry, action = wanted[index], wanted[index].action("lower")
        if "failure" in answer:
            _fail(at_work, action, f"lowering failed: {answer['failure']}")
        else:
            at_work.workspace.store.write("lower", action.manifest, answer, is_local=entry.arch.is_detected)
    _replan(at_work)


def tune_entries(at_work: Build) -> None:
    """Tune what has no record, one computation after the other: what is timed must have the machine for itself."""
    for entry in _distinct(at_work, "tune"):
        if at_work.is_over:
            break
        _tune_entry(at_work, entry)
    _replan(at_work)


def _tune_entry(at_work: Build, entry: EntryPlan) -> None:
    action, store = entry.action("tune"), at_work.workspace.store
    if reason := _cannot_measure(entry.arch):
        _fail(at_work, action, reason)
        return

    def say(text: str) -> None:
        at_work.report(Note(text))

    with exclusive(store.root / "tune.lock", "tuning in this workspace", say, wait=at_work.options.wait):
        if isinstance(store.read("tune", action.key, is_local=entry.arch.is_detected), Record):
            return  # another build has done it meanwhile
        with tempfile.TemporaryDirectory(prefix="kerneldecl-") as folder:
            _tune_in(Path(folder), at_work, entry)


def _tune_in(folder: Path, at_work: Build, entry: EntryPlan) -> None:
    action, workspace = entry.action("tune"), at_work.workspace
    task = _task(workspace, entry, folder)

    def step(doing: str, done: int, total: int, best_secs: float | None) -> None:
        at_work.report(Step(entry.entry, doing, done, total, best_secs))

    measurements, tied, policy = tune(task, _runner(at_work), workspace.store, step)
    if not measurements or not measurements[0].samples:
        _fail(at_work, action, _no_winner(measurements))
        return
    winner = measurements[0]
    code = workspace.store.write_blob(winner_object(task, winner, _runner(at_work)))
    blobs = _described(at_work, task, winner.candidate)
    if isinstance(blobs, str):
        _fail(at_work, action, blobs)
        return
    build_key = key(f"{winner.scheduled} {code}")
    result = record_result(
        task, measurements, tied, policy, {"code": code, "build_key": build_key, "ceilings": ceilings(_runner(at_work)), **blobs}
    )
    workspace.store.write("tune", action.manifest, result, is_local=entry.arch.is_detected)
    at_work.report(Finished(entry.entry, "tune", f"{lockfile.shown(winner.candidate)} {winner.run_secs * 1e6:.4g} us"))


def _task(workspace: Workspace, entry: EntryPlan, folder: Path) -> Task:
    assert entry.lowered is not None
    limit = tolerance(entry.workload, entry.lowered)
    given = (entry.workload, entry.arch, entry.policies, entry.lowered)
    return Task(workspace.root, *given, limit, MEASURING, workspace.inputs.toolchain, folder)


def _no_winner(measurements: Sequence[Any]) -> str:
    if not measurements:
        return "no policy proposes a candidate for it"
    reasons = sorted({m.failure for m in measurements})
    return f"none of {len(measurements)} candidates passed: {'; '.join(reasons[:3])}"


def _cannot_measure(arch: Arch) -> str:
    here = host.detect()
    if arch.model and arch.model != here.model:
        return f"it must be measured on {arch.model}; this is {here.model}"
    if arch.cpu and arch.cpu.vector_bytes > here.the_cpu.vector_bytes:
        return f"arch {arch.name} has vectors of {arch.cpu.vector_bytes} bytes; this machine's have {here.the_cpu.vector_bytes}"
    return ""


def make_objects(at_work: Build) -> None:
    """Make winners' objects, database lines and sources that the store has lost, or never had, from their records."""
    wanted = _distinct(at_work, "build")
    with tempfile.TemporaryDirectory(prefix="kerneldecl-") as folder:
        tasks = [_task(at_work.workspace, e, Path(folder)) for e in wanted]
        requests = [task.build_request(_winner(e), afresh=True) for task, e in zip(tasks, wanted, strict=True)]
        for index, answer in _runner(at_work).run_all(requests, BUILD_SECS):
            _made(at_work, wanted[index], tasks[index], answer)
    _replan(at_work)


def _winner(entry: EntryPlan) -> Candidate:
    assert entry.tuned is not None
    return Candidate.from_json(entry.tuned.result["winner"])


def _made(at_work: Build, entry: EntryPlan, task: Task, answer: Mapping[str, Any]) -> None:
    assert entry.tuned is not None
    action, result = entry.action("build"), entry.tuned.result
    if "failure" in answer:
        _fail(at_work, action, f"the recorded winner cannot be built: {answer['failure']}")
        return
    blobs = {"code": at_work.workspace.store.write_blob((task.folder / f"{answer['code']}.o").read_bytes())}
    described = _described(at_work, task, _winner(entry))
    if isinstance(described, str):
        _fail(at_work, action, described)
    elif differing := [name for name, blob in {**blobs, **described}.items() if blob != result[name]]:
        other = " and ".join(differing)
        _fail(at_work, action, f"the recorded winner gives another {other} here; raise `generation` on the entry to tune it again")
    else:
        at_work.report(Finished(entry.entry, "build", "built from its record"))


def _described(at_work: Build, task: Task, candidate: Candidate) -> dict[str, str] | str:
    """Return the digests of the candidate's database lines and source, now in the store, or a failure."""
    request = {"do": "describe", "case": task.case, "candidate": candidate.to_json(), "arch": to_json(task.arch)}
    (answer,) = in_order(_runner(at_work).run_all([request], BUILD_SECS), 1)
    if "failure" in answer:
        return f"the winner cannot be described: {answer['failure']}"
    store = at_work.workspace.store
    return {"database": store.write_blob(answer["database"].encode()), "source": store.write_blob(answer["source"].encode())}


def link_artifacts(at_work: Build) -> None:
    """Link the targets whose entries are all there."""
    workspace, declaration = at_work.workspace, at_work.workspace.declaration
    without_objects = {entry.workload.target for entry in at_work.plan.entries if not entry.action("build").is_hit}
    for action in at_work.plan.links:
        folder = link.artifact_folder(workspace.root, declaration.artifact, declaration.version, action.target)
        if action.is_hit:
            at_work.artifacts[action.target] = folder
        elif action.key and action.target not in without_objects:
            _link_artifact(at_work, action, folder)


def _link_artifact(at_work: Build, action: Action, folder: Path) -> None:
    at_work.ran.append(action)
    workspace, declaration = at_work.workspace, at_work.workspace.declaration
    entries = [e for e in at_work.plan.entries if e.workload.target == action.target]
    parts = tuple(link.Part(e.workload, e.lowered, e.tuned) for e in entries if e.lowered is not None and e.tuned is not None)
    arch, toolchain = workspace.inputs.archs[action.target], workspace.inputs.toolchain
    linked = link.Linked(declaration.artifact, declaration.version, action.target, arch, toolchain, action.key, parts)
    with exclusive(workspace.store.root / "link.lock", "linking in this workspace", lambda text: at_work.report(Note(text))):
        if link.artifact_defect(folder, action.key):  # another build may have linked it while we waited
            link.link(linked, workspace.store, folder, at_work.linkers[arch.kind])
    workspace.store.write("link", action.manifest, {}, is_local=True)
    at_work.artifacts[action.target] = folder
    at_work.report(Finished(action.target, "link", str(folder.relative_to(workspace.root))))


def write_lock(at_work: Build) -> None:
    """Write workloads.lock if every declared arch's entry has its record."""
    path, text = at_work.workspace.root / LOCK, lock_of(at_work.workspace, at_work.plan)
    if all(e.tuned for e in at_work.plan.entries if not e.arch.is_detected) and text != _read(path):
        state.write_whole(path, text)


def lock_of(workspace: Workspace, current: Plan) -> str:
    """Return the lock that the records make."""
    declaration = workspace.declaration
    entries = [(e.workload, e.arch, e.tuned) for e in current.entries if e.tuned]
    return lockfile.lock_text(declaration.artifact, declaration.version, dict(workspace.inputs.toolchain), entries)


def lock_on_disk(workspace: Workspace) -> str:
    return _read(workspace.root / LOCK)


def remember(at_work: Build) -> None:
    """Keep the keys and the reasons of this build for the next one's explanations."""
    path = at_work.workspace.store.root / "state.json"
    last = state.read_state(path)
    final = at_work.plan
    keys: dict[str, dict[str, str]] = {e.entry: {a.kind: a.key for a in e.actions if a.is_hit and a.kind != "build"} for e in final.entries}
    for linked in final.links:
        keys[linked.entry] = {"link": linked.key} if linked.is_hit else last.keys.get(linked.entry, {})
    for entry, before in last.keys.items():
        keys[entry] = {**before, **keys[entry]} if entry in keys else keys.get(entry, {})
    state.write_state(path, replace(last, keys={entry: k for entry, k in keys.items() if k}, why=_reasons(at_work, last)))


def _reasons(at_work: Build, last: state.State) -> dict[str, list[dict[str, Any]]]:
    why = dict(last.why)
    ran: dict[str, list[dict[str, Any]]] = {}
    for action in at_work.ran:
        ran.setdefault(action.entry, []).append({"kind": action.kind, "reason": action.reason, "changed": action.changed})
    return {**why, **ran}


STAGES = (check_lock, check_toolchain, lower_entries, tune_entries, make_objects, link_artifacts, write_lock)


def _distinct(at_work: Build, kind: Any) -> list[EntryPlan]:
    """Return entries whose action of this kind is a miss that can run now, one for each key; it counts as run from here on."""
    actions = [(e, e.action(kind)) for e in at_work.entries]
    at_work.ran += [action for _, action in actions if not action.is_hit and action.key]
    # A key may be wanted in both parts of the store, for a detected arch and for a declared one.
    wanted = {(action.key, e.arch.is_detected): e for e, action in reversed(actions) if not action.is_hit and action.key}
    return list(wanted.values())[::-1]


def _replan(at_work: Build) -> None:
    at_work.plan = make_plan(at_work.workspace)


def _fail(at_work: Build, action: Action, reason: str) -> None:
    """Note the failure of every entry that waits for this action."""
    for entry in at_work.entries:
        if entry.action(action.kind).key == action.key:
            at_work.failures[entry.entry] = reason
            at_work.report(Finished(entry.entry, action.kind, reason, has_failed=True))


def _runner(at_work: Build) -> Runner:
    assert at_work.runner is not None, "stages that run something come after the runner"
    return at_work.runner


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
