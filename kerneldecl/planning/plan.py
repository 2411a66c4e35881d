"""Owns the plan: which actions each entry needs, which of them are done, and why the others are not.

Knows nothing of files, TVM or processes: it is given digests and a function that reads records.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Literal, NamedTuple

from kerneldecl.model import SPECIALIZE, Arch, Workload
from kerneldecl.store import keys
from kerneldecl.store.local import NEVER, Miss, Record
from kerneldecl.store.results import Group, Lowered, TuneResult, groups_from_json

Kind = Literal["lower", "propose", "tune", "build", "link"]
Changed = tuple[tuple[str, str | None, str | None], ...]
Read = Callable[[str, str, bool], Record | Miss]
"""Reads a record: kind, key, and whether it belongs to this kind of machine alone."""

MEASURING: Mapping[str, str] = {"cpu": "cpu-warm-1", "cuda": "cuda-graph-cold-3"}
"""Protocol of timing by kind of arch (runners/, tuning/race): it rises where times are no longer comparable."""
VERIFYING: Mapping[str, str | int] = {"protocol": "several-calls-1", "seed": 20}
"""Protocol of verification, and the seed of inputs: it rises where kernels are to be verified again, and timed no more."""


@dataclass(frozen=True)
class Inputs:
    """Everything that keys are made of besides the workloads themselves."""

    toolchain: Mapping[str, str]
    archs: Mapping[str, Arch]
    """Arch of each target."""
    rules: Mapping[str, str]
    """Digest of each rule's files, by rule, without what only verification depends on."""
    references: Mapping[str, str]
    """Digest of what inputs and references come from, by rule."""
    files: Mapping[tuple[str, str], str]
    """Digest of each file that an attribute names, by (rule, path)."""
    file_attrs: Mapping[str, tuple[str, ...]]
    """Names of a rule's attributes that name files."""
    policies: Mapping[tuple[str, str], tuple[str, ...]]
    """The policies that a declared policy stands for, in order, by (policy, kind of arch)."""
    plugins: Mapping[tuple[str, str], Mapping[str, str]]
    """Digests of those policies by name, by (policy, kind of arch)."""
    template: Callable[[str], str]
    """Returns the digest of a template, by name."""
    specialize: Mapping[str, str] = field(default_factory=dict)
    """Digest of each file that an entry's `specialize` names with what it imports, by path."""


class Subject(NamedTuple):
    """What an action is of."""

    entry: str
    """Name and target; for a link the target alone."""
    target: str
    kind: Kind


class State(Enum):
    """How far an action is. Each state has its precondition, which `Action` holds to."""

    DONE = "done"
    """Its key is known and its result is there; there is no reason to run it."""
    READY = "ready"
    """Its key is known and its result is not there: it can run now, and there is a reason."""
    WAITING = "waiting"
    """Its key depends on an action that is not done; the reason names it."""


class Action(NamedTuple):
    """Something with a key, done or not: made by `done`, `ready` and `waiting`, which keep the states' preconditions."""

    entry: str
    """Name and target; for a link the target alone."""
    target: str
    kind: Kind
    state: State
    key: str
    """Empty while the action waits."""
    reason: str
    """Why it is a miss; empty for a hit."""
    manifest: str = ""
    changed: Changed = ()
    """Lines of the manifest that differ from the last build's: name, old value, new value."""

    @property
    def is_hit(self) -> bool:
        return self.state is State.DONE

    @classmethod
    def done(cls, subject: Subject, key: str, manifest: str = "") -> Action:
        return cls(*subject, state=State.DONE, key=key, reason="", manifest=manifest)

    @classmethod
    def ready(cls, subject: Subject, key: str, reason: str, manifest: str = "", changed: Changed = ()) -> Action:
        assert key, "what can run has a key"
        assert reason, "what is to run has a reason"
        return cls(*subject, state=State.READY, key=key, reason=reason, manifest=manifest, changed=changed)

    @classmethod
    def waiting(cls, subject: Subject, awaited: str) -> Action:
        return cls(*subject, state=State.WAITING, key="", reason=f"waits for {awaited}")


@dataclass(frozen=True)
class EntryPlan:
    """One workload with what is known of it so far."""

    workload: Workload
    arch: Arch
    policies: tuple[str, ...]
    actions: tuple[Action, ...]
    lowered: Lowered | None
    groups: tuple[Group, ...]
    """What its policies propose, in the order in which they are asked; empty while that is unknown."""
    tuned: TuneResult | None

    @property
    def entry(self) -> str:
        return self.workload.entry

    def action(self, kind: Kind) -> Action:
        return next(action for action in self.actions if action.kind == kind)

    @property
    def is_unmeasured(self) -> bool:
        """Whether its kernel is its policy's choice, which nobody has measured."""
        return self.tuned is not None and not self.tuned.is_measured

    @property
    def is_done(self) -> bool:
        return all(action.is_hit for action in self.actions)


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
    failure: Callable[[str, str], str]
    """Why an entry failed in the last build under the same key; empty where it did not."""


def plan_entry(workload: Workload, inputs: Inputs, read: Read, past: Past) -> EntryPlan:
    """Return what the workload needs. Its tune key depends on the lowered computation, its object on the tuned winner."""
    arch = inputs.archs[workload.target]
    policies = inputs.policies[workload.policy, arch.kind]
    name, target = workload.entry, workload.target
    lower, found = _judged(Subject(name, target, "lower"), _lower_manifest(workload, inputs), read, past, arch)
    if found is None:
        return EntryPlan(workload, arch, policies, actions=(lower, *_later(workload, "lower")), lowered=None, groups=(), tuned=None)
    lowered = Lowered(found.result)
    propose, proposed = _judged(Subject(name, target, "propose"), _propose_manifest(workload, lowered, inputs), read, past, arch)
    if proposed is None:
        actions = (lower, propose, *_later(workload, "propose"))
        return EntryPlan(workload, arch, policies, actions=actions, lowered=lowered, groups=(), tuned=None)
    groups = groups_from_json(proposed.result)
    subject = Subject(name, target, "tune")
    manifest = tune_manifest(workload, lowered, searched(workload, groups, inputs), arch, inputs.toolchain)
    tune, tuned = _judged(subject, manifest, read, past, arch)
    if tuned is None and isinstance(ranked := read("rank", tune.key, True), Record):
        # Nobody has measured it yet; this machine has chosen by the policy's order.
        tune, tuned = Action.done(subject, tune.key, manifest), ranked
    result = TuneResult(tuned.key, tuned.result) if tuned else None
    # The object's action is judged once it is known whether the artifact is whole (`plan`).
    actions = (lower, propose, tune, _build_action(workload, result, is_missing=lambda _: False))
    return EntryPlan(workload, arch, policies, actions=actions, lowered=lowered, groups=groups, tuned=result)


_ORDER: tuple[Kind, ...] = ("lower", "propose", "tune", "build")


def _later(workload: Workload, kind: Kind) -> Iterator[Action]:
    """Yield the actions behind one that is not done: each waits for the one before it."""
    for before, later in itertools.pairwise(_ORDER[_ORDER.index(kind) :]):
        yield Action.waiting(Subject(workload.entry, workload.target, later), before)


def _lower_manifest(workload: Workload, inputs: Inputs) -> str:
    return keys.lower_manifest(workload, inputs.rules[workload.rule], _files(workload, inputs), inputs.toolchain)


def _files(workload: Workload, inputs: Inputs) -> dict[str, str]:
    attrs = dict(workload.attrs)
    return {name: inputs.files[workload.rule, str(attrs[name])] for name in inputs.file_attrs[workload.rule] if attrs[name]}


def _propose_manifest(workload: Workload, lowered: Lowered, inputs: Inputs) -> str:
    arch = inputs.archs[workload.target]
    return keys.propose_manifest(lowered.computation, arch, workload.top_k, inputs.plugins[workload.policy, arch.kind])


class Searched(NamedTuple):
    """What a search goes through, as its key has it."""

    candidates: Mapping[str, str]
    """Count and digest of what each policy proposes, by the policy's place and name."""
    templates: Mapping[str, str]
    """Digests of the templates that the candidates name, and of the file with the user's custom kernels."""
    reference: str
    """Digest of what verdicts depend on besides the kernel."""


def searched(workload: Workload, groups: Sequence[Group], inputs: Inputs) -> Searched:
    """Return what the search of a workload goes through."""
    templates = {name: inputs.template(name) for group in groups for name in group.templates}
    if workload.specialize:
        templates[SPECIALIZE] = inputs.specialize[workload.specialize]
    # The order of the policies matters as well as that of their candidates.
    candidates = {f"{place}.{group.policy}": f"{group.count} {group.digest}" for place, group in enumerate(groups, start=1)}
    return Searched(candidates, templates, reference(workload, inputs))


def tune_manifest(workload: Workload, lowered: Lowered, found: Searched, arch: Arch, toolchain: Mapping[str, str]) -> str:
    """Return the manifest of the workload's tuning, once its computation and its candidates are known."""
    search: keys.Fields = {
        "tolerance": tolerance(workload, lowered),
        "generation": workload.generation,
        "protocol": MEASURING[arch.kind],
        "reference": found.reference,
    }
    candidates = {"candidates": found.candidates, "templates": found.templates}
    return keys.tune_manifest(lowered.computation, arch, search, candidates, toolchain)


def reference(workload: Workload, inputs: Inputs) -> str:
    """Return the digest of what a verdict depends on besides the kernel: rule, attributes, files, seed and protocol."""
    files = _files(workload, inputs)
    attrs = {name: value for name, value in workload.attrs if name not in files}
    fields = {"rule": inputs.references[workload.rule], "attrs": attrs, "files": files, **VERIFYING}
    return keys.key(keys.manifest("verify", fields))


def tolerance(workload: Workload, lowered: Lowered) -> float:
    """Return the relative error allowed: the entry's own, else its rule's."""
    return lowered.tolerance if workload.tolerance is None else float(workload.tolerance)


def _judged(subject: Subject, manifest: str, read: Read, past: Past, arch: Arch) -> tuple[Action, Record | None]:
    action_key = keys.key(manifest)
    found = read(subject.kind, action_key, arch.is_detected)
    if isinstance(found, Record):
        return Action.done(subject, action_key, manifest if subject.kind == "tune" else ""), found
    old = past.manifest(subject.entry, subject.kind)
    changed = tuple(keys.changed_lines(old, manifest)) if old else ()
    failed = past.failure(subject.entry, action_key)
    reason = found.reason if found is not NEVER else failed or (_changes(changed) if changed else _never(subject))
    return Action.ready(subject, action_key, reason, manifest, changed), None


def _never(subject: Subject) -> str:
    name = subject.entry.removesuffix(f"@{subject.target}")
    reasons = {"lower": f"no record of {name} yet", "propose": "its policies were never asked about this computation"}
    return reasons.get(subject.kind, "these candidates were never measured")


def _changes(changed: Sequence[tuple[str, str | None, str | None]]) -> str:
    first = ", ".join(f"{name} {_short(old)} -> {_short(new)}" for name, old, new in changed[:2])
    return first if len(changed) <= 2 else f"{first} and {len(changed) - 2} more"


def _short(value: str | None) -> str:
    if value is None:
        return "(none)"
    return value if len(value) <= 24 else f"{value[:12]}…"


def _build_action(workload: Workload, tuned: TuneResult | None, is_missing: Callable[[str], bool]) -> Action:
    subject = Subject(workload.entry, workload.target, "build")
    if tuned is None:
        return Action.waiting(subject, "tune")
    missing = [name for name, blob in tuned.blobs.items() if is_missing(blob)]
    if missing:
        return Action.ready(subject, tuned.build_key, f"the winner's {' and '.join(missing)} is not in the store")
    return Action.done(subject, tuned.build_key)


def link_digest(entry: EntryPlan) -> str:
    """Return what stands for a tuned entry in the link's manifest: all that the artifact says of it or holds for it."""
    assert entry.lowered is not None
    assert entry.tuned is not None
    workload, tuned = entry.workload, entry.tuned
    declared = (entry.arch.name, workload.rule, workload.attrs, workload.tags)
    # What else a record holds follows from its key and its winner's code; but a tuning that is repeated has other times.
    found = (tuned.key, *tuned.blobs.values(), tuned.run_secs, tuned.error, tuned.coverage, sorted(tuned.provenance.items()))
    return keys.digest(repr((*declared, *entry.lowered.described(), *found)).encode())


def link_action(
    artifact: tuple[str, str, str],
    digests: Mapping[str, str],
    waiting: Sequence[str],
    defect: Callable[[str, str], str],
    old: Callable[[], str] = str,
    missing: Mapping[str, str] = MappingProxyType({}),
) -> Action:
    """Return the link of one target: `artifact` is name, version and target, `waiting` its entries that are not tuned yet.

    `missing` gives the reasons why entries have failed, which the artifact is linked without.
    """
    target = artifact[2]
    subject = Subject(target, target, "link")
    if waiting:
        more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        return Action.waiting(subject, f"{waiting[0]}{more}")
    manifest = keys.link_manifest(*artifact, digests, missing)
    link_key = keys.key(manifest)
    reason = defect(target, link_key)
    if not reason:
        return Action.done(subject, link_key, manifest)
    changed = tuple(keys.changed_lines(before, manifest)) if (before := old()) else ()
    return Action.ready(subject, link_key, _changes(changed) if changed else reason, manifest, changed)


def plan_link(artifact: tuple[str, str, str], entries: Sequence[EntryPlan], past: Past, failures: Mapping[str, str]) -> Action:
    """Return the link of the target that the entries are of, without those that failed: `failures` has their reasons."""
    missing = {entry.workload.name: failures[entry.entry] for entry in entries if entry.entry in failures}
    present = [entry for entry in entries if entry.entry not in failures]
    digests = {entry.workload.name: link_digest(entry) for entry in present if entry.tuned}
    waiting = [entry.entry for entry in present if entry.tuned is None]
    return link_action(artifact, digests, waiting, past.artifact_defect, lambda: past.manifest(artifact[2], "link"), missing)


def plan(workloads: Sequence[Workload], inputs: Inputs, read: Read, past: Past, artifact: tuple[str, str]) -> Plan:
    """Return the plan of all entries. `artifact` is the declared name and version."""
    entries = tuple(plan_entry(workload, inputs, read, past) for workload in workloads)
    by_target: dict[str, list[EntryPlan]] = {}
    for entry in entries:
        by_target.setdefault(entry.workload.target, []).append(entry)
    links = [plan_link((*artifact, target), several, past, {}) for target, several in by_target.items()]
    # Nobody needs the object of an entry while the artifact that holds it is whole.
    wanted = {link.target for link in links if not link.is_hit}
    return Plan(tuple(_with_build(entry, past) if entry.workload.target in wanted else entry for entry in entries), tuple(links))


def _with_build(entry: EntryPlan, past: Past) -> EntryPlan:
    if entry.tuned is None:
        return entry
    build = _build_action(entry.workload, entry.tuned, lambda blob: not past.has_blob(blob))
    return entry if build.is_hit else replace(entry, actions=(*entry.actions[:-1], build))
