"""Owns the Python interface: plan, build and load, as the command line does them.

Knows nothing of how results are shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneldecl import flow
from kerneldecl.artifact.load import Artifact, load
from kerneldecl.declare.select import select
from kerneldecl.diagnostics.units import duration
from kerneldecl.errors import ToolchainError, TuningError
from kerneldecl.hardware import host
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.null_build import stamp
from kerneldecl.null_build.note import note_complete
from kerneldecl.planning.plan import Plan
from kerneldecl.planning.snapshot import snapshot
from kerneldecl.planning.workspace import Workspace, open_workspace, with_policy
from kerneldecl.runners.events import Heard
from kerneldecl.runners.local import LocalRunner
from kerneldecl.stages.session import Options, Runners, Session, make_plan
from kerneldecl.store.files import remove_parts, write_whole
from kerneldecl.store.local import LocalStore
from kerneldecl.store.lock import in_use
from kerneldecl.toolchain.linkers import LINKERS, Linker
from kerneldecl.tuning import bundle
from kerneldecl.tuning.events import Event, Finished, Note, Printed, Ran, Report, Started, Step
from kerneldecl.tuning.search import why_no_winner
from kerneldecl.tuning.side_by_side import by_device, measure_side_by_side
from kerneldecl.tuning.task import Runner, Task

if TYPE_CHECKING:
    from kerneldecl.cluster.runner import ClusterRunner
    from kerneldecl.store.shared import SharedStore

__all__ = ["Artifact", "build", "load", "measure_bundle", "plan", "run_build"]

PRINTED = "printed.log"
"""File in the cache with what plug-ins and tools have printed in the last build that had them print anything."""
_PRINTED_BYTES = 1 << 20


def plan(root: str | Path = ".") -> Plan:
    """Return what a build of the workspace would do, and why. Runs nothing and needs no TVM."""
    return make_plan(open_workspace(Path(root).resolve()))


def build(
    root: str | Path = ".", patterns: Sequence[str] = (), *, jobs: int | None = None, report: Report | None = None
) -> dict[str, Artifact]:
    """Build the workspace and return its artifacts by target; raise TuningError naming the entries that failed.

    The artifacts are linked without what failed, and can be loaded.
    """
    with frozen_workspace(Path(root).resolve()) as workspace:
        done = run_build(workspace, patterns, Options(jobs=jobs), report or _silent)
    if done.failures:
        raise TuningError("; ".join(f"{entry}: {reason}" for entry, reason in done.failures.items()))
    return {target: load(folder) for target, folder in done.artifacts.items()}


@contextlib.contextmanager
def frozen_workspace(root: Path, policy: str = "") -> Iterator[Workspace]:
    """Open a snapshot of a workspace: what is edited from here on belongs to the next build.

    `policy`, where it is given, stands in for that of every entry.
    """
    before = stamp.surroundings()
    with snapshot(root) as sources:
        opened = open_workspace(root, sources)
        if policy:
            opened = with_policy(opened, policy)
        yield dataclasses.replace(opened, surroundings=before, is_current=lambda: stamp.surroundings() == before)


def run_build(
    workspace: Workspace,
    patterns: Sequence[str],
    options: Options,
    report: Report,
    *,
    runners: Runners | None = None,
    linkers: Mapping[str, Linker] = LINKERS,
) -> Session:
    """Build the entries that the patterns select, all if there are none, and note the result for the next null build.

    Entries that are to be tuned again (`options.retuned`) are built in any case.
    """
    if patterns:
        chosen = select(workspace.declaration.workloads, patterns)
        options = dataclasses.replace(options, selected=options.retuned.union(workload.entry for workload in chosen))
    remove_parts(workspace.root, {workspace.cache.name})
    here = host.detect().the_cpu.cores
    threads = min(here, max((arch.cpu.cores for arch in workspace.inputs.archs.values() if arch.cpu), default=here))
    printed: list[str] = []

    def heard(event: Printed | Ran) -> None:
        if isinstance(event, Printed):
            printed.append(f"{event.request}:\n{event.text}\n\n")
        report(event)

    def local() -> LocalRunner:
        limits = workspace.declaration.limits
        return LocalRunner(options.jobs or here, threads, lambda text: report(Note(text)), heard, limits)

    started = runners or _runners(workspace, options, local, report, heard)
    with in_use(workspace.cache), _shared_store(workspace, report) as shared:
        done = flow.build(dataclasses.replace(workspace, shared=shared), options, started, linkers, report)
    if printed:
        write_whole(workspace.cache / PRINTED, "".join(printed)[-_PRINTED_BYTES:], durable=False)
    if not done.failures and not done.plan.misses and not workspace.is_overridden:
        note_complete(done)
    return done


def _runners(workspace: Workspace, options: Options, local: Callable[[], LocalRunner], report: Report, heard: Heard) -> Runners:
    """Return what starts the runner that the options name."""

    @contextlib.contextmanager
    def elsewhere() -> Iterator[Runner]:
        with local() as here:
            if options.rpc:
                from kerneldecl.cluster.boards import BoardRunner  # few builds have any

                yield BoardRunner(options.rpc, here, LocalStore(workspace.cache))
                return
            with cluster_runner(workspace, options, here, report, heard) as runner:
                yield runner

    return elsewhere if options.rpc or options.scheduler else local


def cluster_runner(workspace: Workspace, options: Options, here: Runner, report: Report, heard: Heard) -> ClusterRunner:
    """Return the runner of the cluster that the options name; raise ToolchainError where its library is not installed."""
    try:
        from kerneldecl.cluster.node import Home
        from kerneldecl.cluster.runner import Cluster, ClusterRunner
    except ImportError as error:
        raise ToolchainError(f"--scheduler needs {error.name}, which is not installed: `pip install 'kerneldecl[cluster]'`") from None
    home = Home(str(workspace.sources), str(workspace.cache), workspace.declaration.limits)
    return ClusterRunner(Cluster(options.scheduler, options.patience_secs), home, here, lambda text: report(Note(text)), heard)


@contextlib.contextmanager
def _shared_store(workspace: Workspace, report: Report) -> Iterator[SharedStore | None]:
    """Provide the store with the declared cache behind it; None where none is declared."""
    cache = workspace.declaration.cache
    if cache is None:
        yield None
        return
    from kerneldecl.store.shared import SharedStore, access_to  # what has no shared cache needs neither

    shared = SharedStore(LocalStore(workspace.cache), access_to(cache, workspace.root), lambda text: report(Note(text)))
    try:
        yield shared
    finally:
        shared.close()


def look_ahead(workspace: Workspace, selected: frozenset[str] | None = None) -> Session:
    """Return a build of the selected entries, all if None, once they are lowered and their policies asked, of which nothing is kept."""

    def local() -> LocalRunner:
        return LocalRunner(1, 1, limits=workspace.declaration.limits)

    return flow.look_ahead(workspace, Options(locked=True, selected=selected), local, lambda _: None)


def measure_bundle(
    folder: str | Path,
    cache: str | Path = "cache",
    report: Report | None = None,
    *,
    keep_going: bool = True,
    trust_rules: bool = False,
) -> dict[str, Any]:
    """Measure a bundle's entries on this machine and keep the records in `cache`; return what came of each, by entry.

    Its candidates run here, which is what measuring means. Python of its own, the rules of the workspace that it was built in, runs
    with `trust_rules` alone; otherwise references are those of standard rules, or the computations that the bundle holds.
    Raise ArtifactError for what is no bundle, ToolchainError where the entries' GPU is not here.
    """
    say, store = report or _silent, LocalStore(Path(cache).resolve())
    entries = bundle.read_bundle(Path(folder).resolve())
    waiting = [entry for entry in entries if not bundle.is_measured(entry, store)]
    for entry in waiting:
        if reason := why_not_measured_here(entry.task.arch):
            raise ToolchainError(f"{entry.task.workload.entry}: {reason}")
    say(Started(len(entries), 0, len(waiting), 0))
    done: list[Finished] = []
    with in_use(store.root), LocalRunner(1, host.detect().the_cpu.cores, lambda text: say(Note(text))) as runner:
        if not trust_rules:
            waiting = bundle.with_trusted_references(waiting, runner)

        def measure(place: int, following: int | None, on_device: Runner) -> None:
            if keep_going or not any(each.has_failed for each in done):
                next_task = None if following is None else waiting[following].task
                done.append(_measured(waiting[place], next_task, on_device, store, say))

        for places in by_device([entry.task.arch for entry in waiting]):
            runners = runner.side_by_side(waiting[places[0]].task.arch.model, len(places))
            measure_side_by_side(places, runners, measure, lambda text: say(Note(text)))
    failed = [{"entry": finished.entry, "reason": finished.text} for finished in done if finished.has_failed]
    names = {finished.entry for finished in done}
    references = {name: bundle.reference_name(entry) for entry in waiting if (name := entry.task.workload.entry) in names}
    counts = {"entries": len(entries), "measured_before": len(entries) - len(waiting), "measured": len(done) - len(failed)}
    return {"schema": 1, **counts, "failed": failed, "references": references, "records": str(store.root / "record")}


def _measured(entry: bundle.Entry, next_task: Task | None, runner: Runner, store: LocalStore, say: Report) -> Finished:
    name = entry.task.workload.entry

    def on_progress(doing: str, done: int, total: int, best_secs: float | None) -> None:
        say(Step(name, doing, done, total, best_secs))

    outcome = bundle.measure_entry(entry, runner, store, on_progress, next_task)
    winner = outcome.trials[0] if outcome.policy else None
    text = f"{winner.candidate} {duration(winner.run_secs)}" if winner else why_no_winner(outcome.trials)
    finished = Finished(name, "measure", text, has_failed=winner is None)
    say(finished)
    return finished


def _silent(event: Event) -> None:
    del event
