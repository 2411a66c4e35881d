"""Owns the order of a build's stages and what is handed from one to the next.

Knows nothing of TVM: what needs it runs behind the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kerneldecl.artifact import link
from kerneldecl.errors import StaleError, ToolchainError
from kerneldecl.planning import last_build, lockfile
from kerneldecl.planning.plan import BLOBS, Action, EntryPlan, Kind, Past, Plan, plan
from kerneldecl.planning.workspace import LOCK, Workspace
from kerneldecl.store.files import write_whole
from kerneldecl.store.local import NEVER, Miss, Record
from kerneldecl.store.lock import exclusive
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.versions import PACKAGES, installed, is_cuda
from kerneldecl.tuning.events import Finished, Note, Report, Started
from kerneldecl.tuning.task import BUILD_SECS, Runner
from kerneldecl.winners import built_at_once, make_objects, tune_entries

Runners = Callable[[], AbstractContextManager[Runner]]


@dataclass(frozen=True)
class Options:
    """What the user asked of this build."""

    keep_going: bool = True
    locked: bool = False
    wait: bool = True
    selected: frozenset[str] | None = None
    """Entries to build; None: all."""
    measure: bool = True
    """Where False, what must be measured on a GPU goes into a bundle instead, also if there is such a GPU here."""
    require_measured: bool = False
    """Whether an entry that cannot be measured here fails instead of being linked by its policy's choice."""


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
    variants: dict[str, int] = field(default_factory=dict)
    """By entry: how many functions of the user's own compete."""
    bundles: dict[str, Path] = field(default_factory=dict)
    """By target: what was built to be measured elsewhere."""
    shows_ranked: bool = True
    """Whether entries that are linked by their policy's choice count as tuned. Not at first if the user wants them measured."""
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

    @property
    def the_runner(self) -> Runner:
        assert self.runner is not None, "stages that run something come after the runner"
        return self.runner

    def pending(self, kind: Kind) -> list[EntryPlan]:
        """Return entries whose action of this kind is a miss that can run now, one for each key; it counts as run from here on."""
        actions = [(e, e.action(kind)) for e in self.entries]
        self.ran += [action for _, action in actions if not action.is_hit and action.key]
        # A key may be wanted in both parts of the store, for a detected arch and for a declared one.
        wanted = {(action.key, e.arch.is_detected): e for e, action in reversed(actions) if not action.is_hit and action.key}
        return list(wanted.values())[::-1]

    def replan(self) -> None:
        self.plan = make_plan(self.workspace, shows_ranked=self.shows_ranked)

    def fail(self, action: Action, reason: str) -> None:
        """Note the failure of every entry that waits for this action."""
        for entry in self.entries:
            if entry.action(action.kind).key == action.key:
                self.failures[entry.entry] = reason
                self.report(Finished(entry.entry, action.kind, reason, has_failed=True))


def build(workspace: Workspace, options: Options, runners: Runners, linkers: Mapping[str, link.Linker], report: Report) -> Build:
    """Bring the workspace's artifacts up to date, as far as no entry fails, and return what came of it."""
    shows_ranked = options.measure and not options.require_measured
    first = make_plan(workspace, shows_ranked=shows_ranked)
    if _drop_damaged(workspace, first):
        first = make_plan(workspace, shows_ranked=shows_ranked)
    at_work = Build(workspace, options, runners, linkers, report, first, first, shows_ranked=shows_ranked)
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


def make_plan(workspace: Workspace, *, shows_ranked: bool = True) -> Plan:
    """Return the plan of the whole workspace as its store stands, entries that nobody has measured counting as tuned or not."""
    declaration = workspace.declaration
    read = _reader(workspace, shows_ranked=shows_ranked)
    return plan(declaration.workloads, workspace.inputs, read, _past(workspace), (declaration.artifact, declaration.version))


def _reader(workspace: Workspace, *, shows_ranked: bool) -> Callable[[str, str, bool], Record | Miss]:
    def read(kind: str, record_key: str, is_local: bool) -> Record | Miss:
        return NEVER if kind == "rank" and not shows_ranked else workspace.store.read(kind, record_key, is_local=is_local)

    return read


def _past(workspace: Workspace) -> Past:
    store, declaration = workspace.store, workspace.declaration
    last = last_build.read_state(store.root / "state.json")
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
    """Stop before anything runs if the lock would change and the user forbade it.

    An entry that the lock holds unmeasured may be ranked again: that gives what it gave, or `write_lock` finds it out.
    """
    if not at_work.options.locked:
        return
    text = lock_on_disk(at_work.workspace)
    unmeasured = lockfile.unmeasured_keys(text)
    misses = [a for e in at_work.plan.entries if not e.arch.is_detected for a in e.actions if a.kind == "tune" and not a.is_hit]
    if stale := [a.entry for a in misses if a.key not in unmeasured]:
        raise StaleError(
            f"{LOCK} would change: {', '.join(stale[:5])} would be tuned; run `kerneldecl build` without --locked and commit the lock"
        )
    if not misses and lock_of(at_work.workspace, at_work.plan) != text:
        raise _lock_would_change()


def _lock_would_change() -> StaleError:
    return StaleError(f"{LOCK} would change; run `kerneldecl build` without --locked and commit the lock")


def check_toolchain(at_work: Build) -> None:
    """Refuse to run with other tools than the declared ones: their results would stand under a wrong key."""
    toolchain = at_work.workspace.inputs.toolchain
    for tool, package in PACKAGES.items():
        declared, found = toolchain[tool], installed(package)
        if declared != found:
            there = f"{package} {found} is installed" if found else f"{package} is not installed"
            sentence = f"workloads.toml asks for {tool} {declared}, but {there}"
            raise ToolchainError(f'{sentence}; run `pip install "{package}=={declared}"` or change [toolchain]')
    for entry in at_work.entries:
        if entry.arch.gpu and not entry.is_done:
            _check_cuda(entry, toolchain["cuda"])


def _check_cuda(entry: EntryPlan, declared: str) -> None:
    """Raise ToolchainError if there is no compiler for the entry's GPU, or one of another release than declared."""
    instead = "; `kerneldecl build PATTERNS` builds other entries alone"
    try:
        compiler = nvcc.compiler_for(str(dict(entry.arch.tvm_target)["arch"]))
    except ToolchainError as error:
        raise ToolchainError(f"{entry.entry}: {error}{instead}") from None
    if not is_cuda(compiler.version, declared):
        sentence = f"workloads.toml asks for cuda {declared}, but {compiler.path} is of CUDA {compiler.version}"
        raise ToolchainError(f"{entry.entry}: {sentence}; put the other one first on PATH or change [toolchain]{instead}")


def lower_entries(at_work: Build) -> None:
    """Lower what has no known computation, while the workers start that candidates will want."""
    wanted = at_work.pending("lower")
    root = str(at_work.workspace.root)
    requests = [{"do": "lower", "root": root, "rule": e.workload.rule, "attrs": dict(e.workload.attrs)} for e in wanted]
    answers = at_work.the_runner.run_all(requests, BUILD_SECS)
    at_work.the_runner.start(built_at_once(at_work))  # they import while the first ones lower
    for index, answer in answers:
        entry, action = wanted[index], wanted[index].action("lower")
        if "failure" in answer:
            at_work.fail(action, f"lowering failed: {answer['failure']}")
        else:
            at_work.workspace.store.write("lower", action.manifest, answer, is_local=entry.arch.is_detected)
    at_work.replan()


def link_artifacts(at_work: Build) -> None:
    """Link the targets whose entries are all there."""
    workspace, declaration = at_work.workspace, at_work.workspace.declaration
    without_objects = {e.workload.target for e in at_work.plan.entries if not e.action("build").is_hit}
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
        if at_work.options.locked:
            raise _lock_would_change()
        write_whole(path, text, durable=False)


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
    last = last_build.read_state(path)
    final = at_work.plan
    keys: dict[str, dict[str, str]] = {e.entry: {a.kind: a.key for a in e.actions if a.is_hit and a.kind != "build"} for e in final.entries}
    for linked in final.links:
        keys[linked.entry] = {"link": linked.key} if linked.is_hit else last.keys.get(linked.entry, {})
    for entry, before in last.keys.items():
        keys[entry] = {**before, **keys[entry]} if entry in keys else keys.get(entry, {})
    last_build.write_state(path, replace(last, keys={entry: k for entry, k in keys.items() if k}, why=_reasons(at_work, last)))


def _reasons(at_work: Build, last: last_build.State) -> dict[str, list[dict[str, Any]]]:
    why = dict(last.why)
    ran: dict[str, list[dict[str, Any]]] = {}
    for action in at_work.ran:
        ran.setdefault(action.entry, []).append({"kind": action.kind, "reason": action.reason, "changed": action.changed})
    return {**why, **ran}


STAGES = (check_lock, check_toolchain, lower_entries, tune_entries, make_objects, link_artifacts, write_lock)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
