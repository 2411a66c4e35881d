"""Owns a build under way: what the user asked for, its collaborators, the plan as it stands, and what went wrong so far.

Knows nothing of what the stages do, nor of their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from kerneldecl.artifact.manifest import artifact_defect, artifact_folder
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.model import Arch, Trial
from kerneldecl.planning import last_build, sources
from kerneldecl.planning.action import Action, Changed, Kind, State
from kerneldecl.planning.causes import Cause
from kerneldecl.planning.earlier_manifests import EarlierManifests
from kerneldecl.planning.explain import Explainer, link_causes
from kerneldecl.planning.link import ArtifactOf
from kerneldecl.planning.plan import EntryPlan, Past, Plan, Read, plan, plan_entry, with_links
from kerneldecl.planning.sources import Sources, read_sources, sources_behind
from kerneldecl.planning.workspace import Workspace
from kerneldecl.store.local import NEVER, Miss, Record
from kerneldecl.tuning.events import Finished, Report

if TYPE_CHECKING:
    from kerneldecl.declare.document import Declaration
    from kerneldecl.store.protocol import Store
    from kerneldecl.store.shared import SharedStore
    from kerneldecl.toolchain.linkers import Linker
    from kerneldecl.tuning.counted import Counted
    from kerneldecl.tuning.earlier import Earlier
    from kerneldecl.tuning.task import Runner

Wanted = Callable[[str, str], bool]
"""Says of an entry and its tune key whether it is to be tuned again."""
Runners: TypeAlias = "Callable[[], AbstractContextManager[Runner]]"


@dataclass(frozen=True)
class Options:
    """What the user asked of this build."""

    keep_going: bool = True
    locked: bool = False
    wait: bool = True
    selected: frozenset[str] | None = None
    """Entries to build; None: all."""
    retuned: frozenset[str] = frozenset()
    """Entries to tune again, whatever is known of them."""
    reverified: frozenset[str] = frozenset()
    """Entries whose best candidates are to be verified and timed again, since what timed them was another device's setting."""
    measure: bool = True
    """Whether candidates are measured here. If not, what needs a GPU goes into a bundle, even where that GPU is here."""
    jobs: int | None = None
    """Processes that compile side by side; None: one a core."""
    scheduler: str = ""
    """Address of the Dask scheduler whose workers compile and measure; empty: this machine does."""
    rpc: str = ""
    """HOST:PORT/KEY of the tracker of TVM's RPC whose boards measure for declared archs; empty: this machine does."""
    patience_secs: float = 60.0
    """How long a worker is waited for that lends the wanted device."""
    require_measured: bool = False
    """Whether an entry that cannot be measured here fails instead of being linked by its policy's choice."""
    overwrite: bool = False
    """Whether other content may be linked under a version that was published."""
    require_all: bool = False
    """Whether an artifact that would lack a failed entry is not linked."""
    is_interrupted: Callable[[], bool] | None = None
    """Says whether the user wants what is there; None where an interrupt ends the build at once."""


_UNCHANGING = frozenset({"lower", "propose"})
"""Kinds of records that nothing replaces: what they hold follows from their keys."""


@dataclass(kw_only=True)
class Session:
    """A build under way. Stages read the plan, run what is ready, note what failed, and plan again."""

    workspace: Workspace
    options: Options
    linkers: Mapping[str, Linker]
    """Linkers by kind of arch."""
    report: Report
    plan: Plan
    first_plan: Plan
    started_runner: Counted | None = None
    failures: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)
    links: dict[str, Action] = field(default_factory=dict)
    """The links of the artifacts that are there, by target: some lack entries that failed."""
    failed_keys: dict[str, str] = field(default_factory=dict)
    """The key under which each entry failed."""
    failed_trials: dict[str, Sequence[Trial]] = field(default_factory=dict)
    """What became of the candidates of each entry of which none passed."""
    variants: dict[str, int] = field(default_factory=dict)
    """How many custom kernels of the user's compete, by entry."""
    bundles: dict[str, Path] = field(default_factory=dict)
    """What was built to be measured elsewhere, by target."""
    earlier: dict[bool, Earlier] = field(default_factory=dict)
    """What the tune records know, of detected archs (true) and of declared ones, once anybody has asked."""
    judges: dict[bool, frozenset[str]] = field(default_factory=dict)
    """References that have judged a kernel before this build, on detected archs (true) and on declared ones, once anybody has asked."""
    imports: dict[str, SharedStore] = field(default_factory=dict)
    """Imported packages to fetch from, by name, once anything was lacking."""
    shows_ranked: bool = True
    """Whether entries that are linked by their policy's choice count as tuned. Not at first if the user wants them measured."""
    tuned_again: set[str] = field(default_factory=set)
    """Keys under which entries of `Options.retuned` and `Options.reverified` were tuned in this build."""
    known: dict[tuple[str, bool], Record] = field(default_factory=dict)
    """Records of `_UNCHANGING` kinds that this build has read, by key and part of the store: it plans several times."""
    interim: dict[str, Record] = field(default_factory=dict)
    """Records, by key, of tunings that the user has interrupted: they make this build's artifact, and no store has them."""
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
    def is_interrupted(self) -> bool:
        """Whether the user wants what is there."""
        return self.options.is_interrupted is not None and self.options.is_interrupted()

    @property
    def runner(self) -> Runner:
        assert self.started_runner is not None, "stages that run something come after the runner"
        return self.started_runner

    def why_not_measured(self, arch: Arch) -> str:
        """Return why candidates for an arch can be measured neither here nor where the runner measures; empty where they can."""
        elsewhere = self.started_runner and self.started_runner.batches
        return elsewhere.why_not(arch) if elsewhere else why_not_measured_here(arch)

    def pending(self, kind: Kind) -> list[EntryPlan]:
        """Return entries whose action of this kind is ready to run, one for each key; it counts as run from here on."""
        return self.begun(kind, self.entries)

    def begun(self, kind: Kind, entries: Iterable[EntryPlan]) -> list[EntryPlan]:
        """Return those of some entries that `pending` would."""
        ready = [(e, action) for e in entries if (action := e.action(kind)).state is State.READY]
        self.ran += [action for _, action in ready]
        # A key may be wanted in both parts of the store, for a detected arch and for a declared one.
        wanted = {(action.key, e.arch.is_detected): e for e, action in reversed(ready)}
        return list(wanted.values())[::-1]

    def replan(self) -> None:
        self.plan = make_plan(
            self.workspace,
            shows_ranked=self.shows_ranked,
            is_wanted_again=self.is_wanted_again,
            interim=self.interim,
            failed=frozenset(self.failures),
            known=self.known,
        )

    def keep(self, action: Action, result: Mapping[str, Any], *, is_local: bool) -> None:
        """Keep what an action has found out, which follows from its key: no later plan has to read it again."""
        record_key = self.workspace.store.write(action.kind, action.manifest, result, is_local=is_local)
        self.known[record_key, is_local] = Record(record_key, action.manifest, result)

    def planner(self) -> Callable[[Sequence[EntryPlan]], list[EntryPlan]]:
        """Return what plans some entries again, each by itself, as long as `replan` has not looked at the whole."""
        store, inputs = self.workspace.store, self.workspace.inputs
        read, past = _reader(store, self.shows_ranked, self.interim, self.known), past_of(self.workspace, self.is_wanted_again)
        whole = list(self.plan.entries)
        places = {entry.entry: place for place, entry in enumerate(whole)}

        def planned_again(entries: Sequence[EntryPlan]) -> list[EntryPlan]:
            again = [plan_entry(entry.workload, inputs, read, past) for entry in entries if entry.entry not in self.failures]
            for entry in again:
                whole[places[entry.entry]] = entry
            self.plan = replace(self.plan, entries=tuple(whole))
            return again

        return planned_again

    def conclude(self) -> None:
        """Plan as the next build will; after the last stage, only links are others where nothing has failed or is held back."""
        is_again = bool(self.options.retuned or self.options.reverified)
        if self.interim or self.failures or is_again or not self.shows_ranked:
            self.plan = make_plan(self.workspace)
        else:
            self.plan = with_links(self.plan.entries, past_of(self.workspace), artifact_of(self.workspace.declaration))

    def is_wanted_again(self, entry: str, key: str) -> bool:
        """Say whether an entry is to be tuned again under a key, and was not yet."""
        return entry in self.options.retuned | self.options.reverified and key not in self.tuned_again

    def fail(self, action: Action, reason: str, trials: Sequence[Trial] = ()) -> None:
        """Note the failure of every entry that waits for this action, and what became of its candidates."""
        for entry in self.entries:
            if entry.action(action.kind).key == action.key:
                self.failures[entry.entry] = reason
                self.failed_trials[entry.entry] = trials
                self.failed_keys[entry.entry] = action.key
                self.report(Finished(entry.entry, action.kind, reason, has_failed=True))


def make_plan(
    workspace: Workspace,
    *,
    shows_ranked: bool = True,
    is_wanted_again: Wanted = lambda *_: False,
    interim: Mapping[str, Record] = MappingProxyType({}),
    failed: Collection[str] = (),
    known: dict[tuple[str, bool], Record] | None = None,
) -> Plan:
    """Return the plan of the whole workspace as its store stands, entries that nobody has measured counting as tuned or not.

    `interim` are tune records that no store has, `failed` entries of which this build knows that they have no kernel. `known` are records
    that need not be read again; what is read joins them.
    """
    declaration = workspace.declaration
    read = _reader(workspace.store, shows_ranked, interim, {} if known is None else known)
    return plan(
        declaration.workloads, workspace.inputs, read, replace(past_of(workspace, is_wanted_again), failed=failed), artifact_of(declaration)
    )


def _reader(store: Store, shows_ranked: bool, interim: Mapping[str, Record], known: dict[tuple[str, bool], Record]) -> Read:
    """Return what reads records for a plan, as `make_plan` has it."""

    def read(kind: str, record_key: str, is_local: bool) -> Record | Miss:
        if kind == "tune" and record_key in interim:
            return interim[record_key]
        if kind == "rank" and not shows_ranked:
            return NEVER
        if (place := (record_key, is_local)) in known:
            return known[place]
        found = store.read(kind, record_key, is_local=is_local)
        if kind in _UNCHANGING and isinstance(found, Record):
            known[place] = found
        return found

    return read


def artifact_of(declaration: Declaration) -> ArtifactOf:
    """Return what a declaration says of its artifacts."""
    return ArtifactOf(declaration.artifact, declaration.version, declaration.has_headers)


def past_of(workspace: Workspace, is_wanted_again: Wanted = lambda *_: False) -> Past:
    """Return what earlier builds left in the workspace."""
    declaration = workspace.declaration
    last = last_build.read_state(workspace.cache / last_build.FILE)
    earlier = EarlierManifests(workspace, last)

    def defect(target: str, link_key: str) -> str:
        return artifact_defect(artifact_folder(workspace.root, declaration.artifact, declaration.version, target), link_key)

    def failure(entry: str, failed_key: str) -> str:
        before = last.failed.get(entry, {})
        return f"it failed in the last build: {before['reason']}" if before.get("key") == failed_key else ""

    def reference(entry: str) -> str:
        return last.keys.get(entry, {}).get(last_build.REFERENCE, "")

    known = functools.cache(lambda: read_sources(workspace.cache / sources.FILE))

    @functools.cache
    def now(joint: str) -> Sources:
        return sources_behind({joint: workspace.behind.get(joint, ())}, known())

    def of_link(target: str, changed: Changed, entries: Mapping[str, EntryPlan]) -> tuple[Cause, ...]:
        return link_causes(target, changed, entries, known().links)

    explainer = Explainer(workspace.inputs, earlier.manifest, reference, known, now)
    return Past(earlier.manifest, workspace.store.blobs_there(), defect, is_wanted_again, failure, explainer.causes, of_link)


def drop_damaged(workspace: Workspace, planned: Plan) -> bool:
    """Remove the blobs that a link would stumble over, for plans go by their names alone; say whether any is missing."""
    targets = {action.target for action in planned.links if not action.is_hit}
    results = [e.tuned for e in planned.entries if e.tuned and e.workload.target in targets]
    found = [workspace.store.read_blob(blob) for result in results for blob in result.blobs.values()]
    return any(isinstance(blob, Miss) for blob in found)


def misses(entries: Iterable[EntryPlan], kind: str) -> int:
    """Return how many actions of a kind have to run."""
    return len({action.key or action.entry for e in entries for action in e.actions if action.kind == kind and not action.is_hit})
