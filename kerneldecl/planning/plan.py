"""Owns the plan: which actions each entry needs, which of them are done, and why the others are not.

Knows nothing of files, TVM or processes: it is given digests and a function that reads records.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kerneldecl.model import SPECIALIZE, Arch, Options, Workload, uses
from kerneldecl.planning.action import Action, Changed, Difference, Kind, Subject
from kerneldecl.planning.beyond import why_outdated
from kerneldecl.planning.causes import Cause
from kerneldecl.planning.link import ArtifactOf, LinkPast, link_action
from kerneldecl.planning.rows import Ranges, with_rows, without_spare
from kerneldecl.store import keys
from kerneldecl.store.local import NEVER, Miss, Record
from kerneldecl.store.results import Group, Lowered, TuneResult, groups_from_json
from kerneldecl.timing import measuring

Manifests = Mapping[Kind, str]
"""An entry's manifests of now, as far as they are known."""
Before = Callable[[str, Kind, str], str]
"""Gives the manifest of an entry's (or target's) action in the last build, where that of now is given; empty where there was none."""
Read = Callable[[str, str, bool], Record | Miss]
"""Reads a record: kind, key, and whether it belongs to this kind of machine alone."""

VERIFYING: Mapping[str, str | int] = {"protocol": "several-calls-3", "seed": 20}
"""Protocol of verification, and the seed of inputs: it rises where kernels are to be verified again, and timed no more."""


ROWS = "rows"
"""What `Inputs.linked_with` calls entries of rows at run time, beside kinds of archs."""


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
    """The policies that a declared name stands for, in order, by (name, kind of arch)."""
    plugins: Mapping[tuple[str, str], Mapping[str, str]]
    """Digests of those policies by name, by (name, kind of arch); a tuner's with those of the policies whose space it searches."""
    template: Callable[[str], str]
    """Returns the digest of a template, by name."""
    specialize: Mapping[str, str] = field(default_factory=dict)
    """Digest of each file that an entry's `specialize` names with what it imports, by path."""
    tuners: frozenset[str] = frozenset()
    """The declared policies that are tuners."""
    readers: frozenset[str] = frozenset()
    """Those of them that are given what records tell of like computations."""
    linked_with: Mapping[str, str] = field(default_factory=dict)
    """Digest of the C++ that is linked with kernels whatever these are, by kind of arch, and for rows at run time; where there is any."""


class Asked(NamedTuple):
    """One item of an entry's `policy`, as a worker is asked it."""

    policies: tuple[str, ...]
    """The policies that it stands for, in order."""
    options: Options | None
    """What is declared of a tuner's options; None where it is no tuner."""


@dataclass(frozen=True)
class EntryPlan:
    """One workload with what is known of it so far."""

    workload: Workload
    arch: Arch
    asked: tuple[Asked, ...]
    actions: tuple[Action, ...]
    lowered: Lowered | None
    groups: tuple[Group, ...]
    """What its policies propose, in the order in which they are asked; empty while that is unknown."""
    tuned: TuneResult | None
    ranges: Ranges | None = None
    """Which kernels take which numbers of rows, where its own is one of several and that is known."""
    linked_with: str = ""
    """Digest of the sources that its kernel is linked with, whatever that is; empty where there are none."""

    @property
    def entry(self) -> str:
        return self.workload.entry

    def action(self, kind: Kind) -> Action:
        return next(action for action in self.actions if action.kind == kind)

    @functools.cached_property
    def link_digest(self) -> str:
        """Digest that stands for a tuned entry in the link's manifest: all that the artifact says of it or holds for it."""
        assert self.lowered is not None
        assert self.tuned is not None
        workload = self.workload
        declared = (self.arch.name, workload.rule, workload.attrs, workload.tags, *((workload.rows, self.ranges) if self.ranges else ()))
        linked = (self.linked_with,) if self.linked_with else ()
        return keys.digest(repr((declared, self.lowered.described(), self.tuned.described(), *linked)).encode())

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

    manifest: Before
    """The manifest of an entry's (or target's) action in the last build."""
    has_blob: Callable[[str], bool]
    artifact_defect: Callable[[str, str], str]
    """What is wrong with the artifact of a target for a link key; empty where nothing is."""
    is_wanted_again: Callable[[str, str], bool]
    """Whether an entry is to be tuned again, though there is a record under its key."""
    failure: Callable[[str, str], str]
    """Why an entry failed in the last build under the same key; empty where it did not."""
    causes: Callable[[Workload, Kind, Manifests], tuple[Cause, ...]]
    """Where the lines of an entry's manifest come from that differ from the last build's."""
    link_causes: Callable[[str, Changed, Mapping[str, EntryPlan]], tuple[Cause, ...]]
    """The same of a target's link: the target, the lines, and its entries that are tuned, by name."""
    failed: Collection[str] = ()  # entries that have failed in this build


def plan_entry(workload: Workload, inputs: Inputs, read: Read, past: Past) -> EntryPlan:
    """Return what the workload needs. Its tune key depends on the lowered computation, its object on the tuned winner."""
    arch = inputs.archs[workload.target]
    asked = _asked(workload, inputs, arch.kind)
    entry = workload.entry
    manifests: dict[Kind, str] = {"lower": _lower_manifest(workload, inputs)}
    lower, found = _judged(Subject(entry, workload.target, "lower"), workload, manifests, read, past, arch)
    if found is None:
        return EntryPlan(workload, arch, asked, actions=(lower, *_later(workload, "lower")), lowered=None, groups=(), tuned=None)
    lowered = Lowered(found.result)
    manifests["propose"] = _propose_manifest(workload, lowered, inputs)
    propose, proposed = _judged(Subject(entry, workload.target, "propose"), workload, manifests, read, past, arch)
    if proposed is None:
        actions = (lower, propose, *_later(workload, "propose"))
        return EntryPlan(workload, arch, asked, actions=actions, lowered=lowered, groups=(), tuned=None)
    groups = groups_from_json(proposed.result)
    manifests["tune"] = tune_manifest(workload, lowered, searched(workload, groups, inputs), arch, inputs.toolchain)
    of_tune = Subject(entry, workload.target, "tune")
    tune, tuned = _judged(of_tune, workload, manifests, read, past, arch)
    if tuned and (reason := why_outdated(tuned.result, propose.key, inputs.template)):
        tune, tuned = Action.ready(of_tune, tune.key, reason, manifests["tune"]), None
    ranked = NEVER if tuned or past.is_wanted_again(entry, tune.key) else read("rank", tune.key, True)
    if isinstance(ranked, Record) and not why_outdated(ranked.result, propose.key, inputs.template):
        tune, tuned = Action.done(of_tune, tune.key, manifests["tune"]), ranked  # this machine's choice by the policy's order
    result = TuneResult(tuned.key, tuned.result) if tuned else None
    build = Subject(entry, workload.target, "build")  # judged once it is known whether the artifact is whole (`plan`)
    actions = (lower, propose, tune, Action.done(build, result.build_key) if result else Action.waiting(build, "tune"))
    linked_with = " ".join(filter(None, (inputs.linked_with.get(kind) for kind in (arch.kind, *([ROWS] if workload.rows else [])))))
    return EntryPlan(workload, arch, asked, actions, lowered=lowered, groups=groups, tuned=result, linked_with=linked_with)


ORDER: tuple[Kind, ...] = ("lower", "propose", "tune", "build")


def _later(workload: Workload, kind: Kind) -> Iterator[Action]:
    """Yield the actions behind one that is not done: each waits for the one before it."""
    for before, later in itertools.pairwise(ORDER[ORDER.index(kind) :]):
        yield Action.waiting(Subject(workload.entry, workload.target, later), before)


def _lower_manifest(workload: Workload, inputs: Inputs) -> str:
    return keys.lower_manifest(workload, inputs.rules[workload.rule], _files(workload, inputs), inputs.toolchain)


def _files(workload: Workload, inputs: Inputs) -> dict[str, str]:
    if not inputs.file_attrs[workload.rule]:
        return {}
    attrs = dict(workload.attrs)
    return {name: inputs.files[workload.rule, str(attrs[name])] for name in inputs.file_attrs[workload.rule] if attrs[name]}


def _propose_manifest(workload: Workload, lowered: Lowered, inputs: Inputs) -> str:
    arch = inputs.archs[workload.target]
    digests = [inputs.plugins[use.name, arch.kind] for use in uses(workload.policy)]
    policies = digests[0] if len(digests) == 1 else {name: found for several in digests for name, found in several.items()}
    return keys.propose_manifest(lowered.computation, arch, workload.top_k, policies, _declared(workload, inputs))


def reads_records(workload: Workload, inputs: Inputs) -> bool:
    """Say whether a policy of the workload is given what records tell of like computations."""
    return any(use.name in inputs.readers for use in uses(workload.policy))


def _declared(workload: Workload, inputs: Inputs) -> keys.Fields:
    """Return what a list of candidates depends on of what is declared, besides the policies' digests.

    What a record once told a policy stands in its list: `generation` is how it is asked to read them anew.
    """
    asked = {} if isinstance(workload.policy, str) else {"asked": workload.policy}
    return {**asked, **({"generation": workload.generation} if workload.generation and reads_records(workload, inputs) else {})}


def _asked(workload: Workload, inputs: Inputs, kind: str) -> tuple[Asked, ...]:
    used = uses(workload.policy)
    return tuple(Asked(inputs.policies[use.name, kind], use.options if use.name in inputs.tuners else None) for use in used)


class Searched(NamedTuple):
    """What a search goes through, as its key has it."""

    candidates: Mapping[str, str]
    """Count and digest of what each policy proposes, by the policy's place and name."""
    templates: Mapping[str, str]
    """Digests of the templates that the candidates name, and of the file with the user's custom kernels."""
    reference: str
    """Digest of what verdicts depend on besides the kernel."""
    turns: tuple[int, ...] = ()
    """The turn in which each policy is asked."""


def searched(workload: Workload, groups: Sequence[Group], inputs: Inputs) -> Searched:
    """Return what the search of a workload goes through."""
    candidates, names = _listed(tuple(groups))
    templates = {name: inputs.template(name) for name in names}
    if workload.specialize:
        templates[SPECIALIZE] = inputs.specialize[workload.specialize]
    return Searched(candidates, templates, reference(workload, inputs), tuple(group.turn for group in groups))


@functools.lru_cache(maxsize=256)
def _listed(groups: tuple[Group, ...]) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return count and digest of each list of candidates by its place and policy, and the names of the templates in them."""
    # The order of the policies matters as well as that of their candidates.
    candidates = {f"{place}.{group.policy}": group.in_key for place, group in enumerate(groups, start=1)}
    return candidates, tuple(dict.fromkeys(name for group in groups for name in group.templates))


def tune_manifest(workload: Workload, lowered: Lowered, found: Searched, arch: Arch, toolchain: Mapping[str, str]) -> str:
    """Return the manifest of the workload's tuning, once its computation and its candidates are known."""
    search: keys.Fields = {
        "tolerance": tolerance(workload, lowered),
        "generation": workload.generation,
        "protocol": measuring(arch.kind, workload.timing),
        "reference": found.reference,
        **({"turns": found.turns} if any(found.turns) else {}),
        **{f"budget.{name}": value for name, value in workload.budget},
    }
    candidates = keys.Candidates(found.candidates, found.templates, lowered.names)
    return keys.tune_manifest(lowered.computation, arch, search, candidates, toolchain)


def reference(workload: Workload, inputs: Inputs) -> str:
    """Return the digest of what a verdict depends on besides the kernel: rule, attributes, files, seed and protocol."""
    return keys.verify_key(workload, inputs.references[workload.rule], _files(workload, inputs), VERIFYING)


def tolerance(workload: Workload, lowered: Lowered) -> float:
    """Return the relative error allowed: the entry's own, else its rule's."""
    return lowered.tolerance if workload.tolerance is None else float(workload.tolerance)


def _judged(subject: Subject, workload: Workload, manifests: Manifests, read: Read, past: Past, arch: Arch) -> tuple[Action, Record | None]:
    """Return an action of an entry, whose manifest is the last of these, with its record where it is done."""
    kind = subject.kind
    manifest = manifests[kind]
    action_key = keys.key(manifest)
    if kind == "tune" and past.is_wanted_again(subject.entry, action_key):
        return Action.ready(subject, action_key, "it is to be timed again (--retune, --reverify)", manifest), None
    found = read(kind, action_key, arch.is_detected)
    if isinstance(found, Record):
        return Action.done(subject, action_key, manifest if kind == "tune" else ""), found
    old = past.manifest(subject.entry, kind, manifest)
    changed = tuple(keys.changed_lines(old, manifest)) if old else ()
    difference = Difference(changed, past.causes(workload, kind, manifests) if changed else ())
    failed = past.failure(subject.entry, action_key)
    reason = found.reason if found is not NEVER else failed or str(difference) or _never(subject)
    return Action.ready(subject, action_key, reason, manifest, difference), None


def _never(subject: Subject) -> str:
    name = subject.entry.removesuffix(f"@{subject.target}")
    reasons = {"lower": f"no record of {name} yet", "propose": "its policies were never asked about this computation"}
    return reasons.get(subject.kind, "these candidates were never measured")


def link_parts(entry: EntryPlan) -> dict[str, str]:
    """Return a checksum of each part of what an entry's `link_digest` stands for, so that a difference has a name."""
    assert entry.lowered is not None
    assert entry.tuned is not None
    workload, tuned = entry.workload, entry.tuned
    parts = {
        "rule": workload.rule,
        "attributes": workload.attrs,
        "tags": workload.tags,
        "computation": entry.lowered.described(),
        "kernel": tuned.blobs,
        "C++ that kernels are linked with": entry.linked_with,
        "what its tuning depends on": tuned.key,
        "figures": (tuned.run_secs, tuned.error, tuned.coverage, sorted(tuned.provenance.items())),
    }
    return {name: f"{zlib.crc32(repr(part).encode()):08x}" for name, part in parts.items()}


def plan_link(artifact: ArtifactOf, target: str, entries: Sequence[EntryPlan], past: Past, failures: Mapping[str, str]) -> Action:
    """Return the link of a target with these entries, without those that failed: `failures` has their reasons."""
    missing = {entry.workload.name: failures[entry.entry] for entry in entries if entry.entry in failures}
    present = [entry for entry in entries if entry.entry not in failures]
    tuned = {entry.workload.name: entry for entry in present if entry.tuned}
    digests = {name: entry.link_digest for name, entry in tuned.items()}
    waiting = [entry.entry for entry in present if entry.tuned is None or (entry.workload.rows and entry.ranges is None)]

    def difference(manifest: str) -> Difference:
        old = past.manifest(target, "link", manifest)
        changed = tuple(keys.changed_lines(old, manifest)) if old else ()
        return Difference(changed, past.link_causes(target, changed, tuned) if changed else ())

    return link_action(artifact, target, digests, waiting, LinkPast(lambda key: past.artifact_defect(target, key), difference), missing)


def plan(workloads: Sequence[Workload], inputs: Inputs, read: Read, past: Past, artifact: ArtifactOf) -> Plan:
    """Return the plan of all entries."""
    planned = without_spare(tuple(plan_entry(workload, inputs, read, past) for workload in workloads))
    return with_links(with_rows(planned, lambda workload: reference(workload, inputs), read, past.failed), past, artifact)


def with_links(entries: Sequence[EntryPlan], past: Past, artifact: ArtifactOf) -> Plan:
    """Return the plan of entries that are planned already, with the link of each target as it is now."""
    targets = dict.fromkeys(entry.workload.target for entry in entries)
    links = [plan_link(artifact, target, [e for e in entries if e.workload.target == target], past, {}) for target in targets]
    wanted = {link.target for link in links if not link.is_hit}  # nobody needs an object while the artifact that holds it is whole
    return Plan(tuple(_with_build(entry, past) if entry.workload.target in wanted else entry for entry in entries), tuple(links))


def _with_build(entry: EntryPlan, past: Past) -> EntryPlan:
    if entry.tuned is None or not (missing := [name for name, blob in entry.tuned.blobs.items() if not past.has_blob(blob)]):
        return entry
    subject = Subject(entry.entry, entry.workload.target, "build")
    build = Action.ready(subject, entry.tuned.build_key, f"the winner's {' and '.join(missing)} is not in the store")
    return replace(entry, actions=tuple(build if action.kind == "build" else action for action in entry.actions))
