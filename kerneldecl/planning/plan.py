"""Owns the plan: which actions each entry needs, which of them are done, and why the others are not.

Knows nothing of files, TVM or processes: it is given digests and a function that reads records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kerneldecl.model import SPECIALIZE, Arch, Workload
from kerneldecl.store import keys
from kerneldecl.store.local import NEVER, Miss, Record

Kind = Literal["lower", "tune", "build", "link"]
Read = Callable[[str, str, bool], Record | Miss]
"""Reads a record: kind, key, and whether it belongs to this kind of machine alone."""

MEASURING: Mapping[str, Mapping[str, str | int]] = {
    "cpu": {"protocol": "cpu-warm-1", "seed": 20},
    "cuda": {"protocol": "cuda-graph-cold-3", "seed": 20},
}
"""By kind of arch: how candidates are checked and timed (runners/, race.py) and what their random inputs start from."""


BLOBS = ("code", "database", "source")
"""What a tune record names of its winner: the object file, the lines for TVM's database, the scheduled TensorIR."""


@dataclass(frozen=True)
class Inputs:
    """Everything that keys are made of besides the workloads themselves."""

    toolchain: Mapping[str, str]
    archs: Mapping[str, Arch]
    """By target."""
    rules: Mapping[str, str]
    """Digest of each rule's files, by rule."""
    files: Mapping[tuple[str, str], str]
    """Digest of each file that an attribute names, by (rule, path)."""
    file_attrs: Mapping[str, tuple[str, ...]]
    """Names of a rule's attributes that name files."""
    policies: Mapping[tuple[str, str], tuple[str, ...]]
    """The policies that a declared policy stands for, in order, by (policy, kind of arch)."""
    plugins: Mapping[tuple[str, str], Mapping[str, str]]
    """Digests of those policies and of the templates they may use, by (policy, kind of arch)."""
    specialize: Mapping[str, str] = field(default_factory=dict)
    """Digest of each file that an entry's `specialize` names with what it imports, by path."""


class Action(NamedTuple):
    """Something with a key, done or not."""

    entry: str
    """Name and target; for a link the target alone."""
    target: str
    kind: Kind
    is_hit: bool
    key: str
    """Empty where the key depends on an action that is not done."""
    reason: str
    """Why it is a miss; empty for a hit."""
    manifest: str = ""
    changed: tuple[tuple[str, str | None, str | None], ...] = ()
    """Lines of the manifest that differ from the last build's: name, old value, new value."""


@dataclass(frozen=True)
class EntryPlan:
    """One workload with what is known of it so far."""

    workload: Workload
    arch: Arch
    policies: tuple[str, ...]
    actions: tuple[Action, ...]
    lowered: Mapping[str, Any] | None
    """Result of its lower record."""
    tuned: Record | None

    @property
    def entry(self) -> str:
        return self.workload.entry

    def action(self, kind: Kind) -> Action:
        return next(action for action in self.actions if action.kind == kind)

    @property
    def is_unmeasured(self) -> bool:
        """Whether its kernel is its policy's choice, which nobody has measured."""
        return self.tuned is not None and not is_measured(self.tuned)

    @property
    def is_done(self) -> bool:
        return all(action.is_hit for action in self.actions)


def is_measured(tuned: Record) -> bool:
    """Say whether a winner was measured, and not only expected to be the best."""
    return bool(tuned.result.get("is_measured", True))


@dataclass(frozen=True)
class Plan:
    """All entries, and the link of each target."""

    entries: tuple[EntryPlan, ...]
    links: tuple[Action, ...]

    @property
    def actions(self) -> tuple[Action, ...]:
        return (*(action for entry in self.entries for action in entry.actions), *self.links)

    @property
    def misses(self) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if not action.is_hit)


@dataclass(frozen=True)
class Past:
    """What earlier builds left to compare with: an entry's manifests by kind, and whether objects and artifacts are there."""

    manifest: Callable[[str, Kind], str]
    """The manifest of an entry's (or target's) action in the last build; empty where there was none."""
    has_blob: Callable[[str], bool]
    artifact_defect: Callable[[str, str], str]
    """What is wrong with the artifact of a target for a link key; empty where nothing is."""


def plan_entry(workload: Workload, inputs: Inputs, read: Read, past: Past) -> EntryPlan:
    """Return what the workload needs. Its tune key depends on the lowered computation, its object on the tuned winner."""
    arch = inputs.archs[workload.target]
    policies = inputs.policies[workload.policy, arch.kind]
    lower, lowered = _judged(workload, "lower", _lower_manifest(workload, inputs), read, past, arch)
    if lowered is None:
        waiting = tuple(
            Action(workload.entry, workload.target, kind, False, "", f"waits for {kind_before}") for kind, kind_before in _LATER
        )
        return EntryPlan(workload, arch, policies, (lower, *waiting), None, None)
    manifest = tune_manifest(workload, lowered.result, inputs)
    tune, tuned = _judged(workload, "tune", manifest, read, past, arch)
    if tuned is None and isinstance(ranked := read("rank", tune.key, True), Record):
        # Nobody has measured it yet; this machine has chosen by the policy's order.
        tune, tuned = Action(workload.entry, workload.target, "tune", True, tune.key, "", manifest), ranked
    build = _build_action(workload, tuned, past)
    return EntryPlan(workload, arch, policies, (lower, tune, build), lowered.result, tuned)


_LATER: tuple[tuple[Kind, Kind], ...] = (("tune", "lower"), ("build", "tune"))


def _lower_manifest(workload: Workload, inputs: Inputs) -> str:
    attrs = dict(workload.attrs)
    files = {name: inputs.files[workload.rule, str(attrs[name])] for name in inputs.file_attrs[workload.rule] if attrs[name]}
    return keys.lower_manifest(workload, inputs.rules[workload.rule], files, inputs.toolchain)


def tune_manifest(workload: Workload, lowered: Mapping[str, Any], inputs: Inputs) -> str:
    """Return the manifest of the workload's tuning, once its computation is known."""
    arch = inputs.archs[workload.target]
    search: keys.Fields = {"top_k": workload.top_k, "tolerance": tolerance(workload, lowered), "generation": workload.generation}
    search = {**search, **MEASURING[arch.kind]}
    plugins = inputs.plugins[workload.policy, arch.kind]
    if workload.specialize:
        plugins = {**plugins, SPECIALIZE: inputs.specialize[workload.specialize]}
    return keys.tune_manifest(lowered["computation"], arch, search, plugins, inputs.toolchain)


def tolerance(workload: Workload, lowered: Mapping[str, Any]) -> float:
    """Return the relative error allowed: the entry's own, else its rule's."""
    return float(lowered["tolerance"] if workload.tolerance is None else workload.tolerance)


def _judged(workload: Workload, kind: Kind, manifest: str, read: Read, past: Past, arch: Arch) -> tuple[Action, Record | None]:
    action_key = keys.key(manifest)
    found = read(kind, action_key, arch.is_detected)
    if isinstance(found, Record):
        return Action(workload.entry, workload.target, kind, True, action_key, "", manifest), found
    old = past.manifest(workload.entry, kind)
    changed = tuple(keys.changed_lines(old, manifest)) if old else ()
    reason = _changes(changed) if changed and found is NEVER else found.reason if found is not NEVER else _new(workload, kind)
    return Action(workload.entry, workload.target, kind, False, action_key, reason, manifest, changed), None


def _new(workload: Workload, kind: Kind) -> str:
    return f"no record of {workload.name} yet" if kind == "lower" else "this computation was never tuned with these settings"


def _changes(changed: Sequence[tuple[str, str | None, str | None]]) -> str:
    first = ", ".join(f"{name} {_short(old)} -> {_short(new)}" for name, old, new in changed[:2])
    return first if len(changed) <= 2 else f"{first} and {len(changed) - 2} more"


def _short(value: str | None) -> str:
    if value is None:
        return "(none)"
    return value if len(value) <= 24 else f"{value[:12]}…"


def _build_action(workload: Workload, tuned: Record | None, past: Past) -> Action:
    if tuned is None:
        return Action(workload.entry, workload.target, "build", False, "", "waits for tune")
    missing = [name for name in BLOBS if not past.has_blob(tuned.result[name])]
    reason = f"the winner's {' and '.join(missing)} is not in the store" if missing else ""
    return Action(workload.entry, workload.target, "build", not missing, tuned.result["build_key"], reason)


def link_digest(entry: EntryPlan) -> str:
    """Return what stands for a tuned entry in the link's manifest: all that the artifact tells of it, or holds for it."""
    assert entry.lowered is not None
    assert entry.tuned is not None
    workload, result = entry.workload, entry.tuned.result
    lowered = sorted((name, str(value)) for name, value in entry.lowered.items() if name != "space")
    declared = (entry.arch.name, workload.rule, workload.attrs, workload.tags)
    # What else a record holds follows from its key and its winner's code; but a tuning that is repeated has other times.
    found = (entry.tuned.key, *(result[name] for name in BLOBS), result["run_secs"], result["error"], sorted(result["provenance"].items()))
    return keys.digest(repr((*declared, *lowered, *found)).encode())


def link_action(
    artifact: tuple[str, str, str],
    digests: Mapping[str, str],
    waiting: Sequence[str],
    defect: Callable[[str, str], str],
    old: Callable[[], str] = str,
) -> Action:
    """Return the link of one target: `artifact` is name, version and target, `waiting` its entries that are not tuned yet."""
    target = artifact[2]
    if waiting:
        more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        return Action(target, target, "link", False, "", f"waits for {waiting[0]}{more}")
    manifest = keys.link_manifest(*artifact, digests)
    link_key = keys.key(manifest)
    reason = defect(target, link_key)
    changed = tuple(keys.changed_lines(before, manifest)) if reason and (before := old()) else ()
    return Action(target, target, "link", not reason, link_key, _changes(changed) if changed else reason, manifest, changed)


def _plan_link(artifact: tuple[str, str, str], entries: Sequence[EntryPlan], past: Past) -> Action:
    digests = {entry.workload.name: link_digest(entry) for entry in entries if entry.tuned}
    waiting = [entry.entry for entry in entries if entry.tuned is None]
    return link_action(artifact, digests, waiting, past.artifact_defect, lambda: past.manifest(artifact[2], "link"))


def plan(workloads: Sequence[Workload], inputs: Inputs, read: Read, past: Past, artifact: tuple[str, str]) -> Plan:
    """Return the plan of all entries. `artifact` is the declared name and version."""
    entries = tuple(plan_entry(workload, inputs, read, past) for workload in workloads)
    by_target: dict[str, list[EntryPlan]] = {}
    for entry in entries:
        by_target.setdefault(entry.workload.target, []).append(entry)
    links = [_plan_link((*artifact, target), several, past) for target, several in by_target.items()]
    # Nobody needs the object of an entry while the artifact that holds it is whole.
    linked = {link.target for link in links if link.is_hit}
    return Plan(tuple(_without_build(e) if e.workload.target in linked else e for e in entries), tuple(links))


def _without_build(entry: EntryPlan) -> EntryPlan:
    actions = tuple(Action(a.entry, a.target, a.kind, True, a.key, "", a.manifest) if a.kind == "build" else a for a in entry.actions)
    return EntryPlan(entry.workload, entry.arch, entry.policies, actions, entry.lowered, entry.tuned)
