"""Owns the Python interface: plan, build and load, as the command line does them.

Knows nothing of how results are shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kerneldecl import flow
from kerneldecl.artifact.load import Artifact, load
from kerneldecl.compare.searches import Asked, Searched
from kerneldecl.diagnostics.units import duration
from kerneldecl.errors import ToolchainError, TuningError
from kerneldecl.hardware import host
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.null_build import stamp
from kerneldecl.null_build.note import note_complete
from kerneldecl.planning.current import Looked
from kerneldecl.planning.plan import Plan
from kerneldecl.planning.snapshot import snapshot
from kerneldecl.planning.workspace import Workspace, open_workspace, with_overrides
from kerneldecl.runners.events import Heard
from kerneldecl.runners.local import LocalRunner
from kerneldecl.stages.chosen import chosen as select_entries
from kerneldecl.stages.session import Options, Runners, Session, make_plan
from kerneldecl.stages.tidy import tidy
from kerneldecl.store.files import remove_parts, write_whole
from kerneldecl.store.local import LocalStore
from kerneldecl.store.lock import in_use
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.store.signing import verifier
from kerneldecl.toolchain.linkers import LINKERS, Linker
from kerneldecl.tuning import bundle
from kerneldecl.tuning.events import Event, Finished, Note, Printed, Ran, Report, Started, Step
from kerneldecl.tuning.no_winner import why_no_winner
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
def frozen_workspace(root: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Workspace]:
    """Open a snapshot of a workspace: what is edited from here on belongs to the next build.

    `overrides` are settings, as workloads.toml has them, that stand in for those of every entry.
    """
    before = stamp.surroundings()
    with snapshot(root) as sources:
        opened = open_workspace(root, sources)
        if overrides:
            opened = with_overrides(opened, overrides)
        yield dataclasses.replace(opened, surroundings=before, is_current=Looked(lambda: stamp.surroundings() == before))


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

    Entries that are to be tuned again (`options.retuned`) are built in any case; of those whose best are to be timed again
    (`options.reverified`), the selected ones.
    """
    options = _selected(workspace, patterns, options)
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
        for store in done.imports.values():
            store.close()
    _leave(workspace, done, "".join(printed), report)
    return done


def _selected(workspace: Workspace, patterns: Sequence[str], options: Options) -> Options:
    """Return the options with the entries that the patterns select."""
    if not patterns:
        return options
    wanted = {workload.entry for workload in select_entries(workspace, patterns)}
    return dataclasses.replace(options, selected=options.retuned | wanted, reverified=options.reverified & wanted)


def _leave(workspace: Workspace, done: Session, printed: str, report: Report) -> None:
    """Leave the cache as the next build should find it."""
    if done.ran:
        tidy(workspace, report)
    if printed:
        write_whole(workspace.cache / PRINTED, printed[-_PRINTED_BYTES:], durable=False)
    if not done.failures and not done.plan.misses and not workspace.is_overridden:
        note_complete(done)


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


def compare_policies(
    workspace: Workspace, patterns: Sequence[str], asked: Asked, *, jobs: int | None = None, report: Report | None = None
) -> Iterator[Searched]:
    """Have policies search the entries that the patterns select; yield what came of it, entry by entry.

    Each has a store of its own, so none profits from another; their winners then race in one process. Nothing is kept. Raise
    ToolchainError where an entry's device is not here.
    """
    say = report or _silent
    chosen = select_entries(workspace, patterns)
    for workload in chosen:
        if reason := why_not_measured_here(workspace.inputs.archs[workload.target]):
            raise ToolchainError(f"{workload.entry}: {reason}; a comparison is measured here")
    limited = tuple(dataclasses.replace(each, budget=tuple(sorted({**dict(each.budget), **dict(asked.budget)}.items()))) for each in chosen)
    targets = tuple(target for target in workspace.declaration.targets if target[0] in {each.target for each in chosen})
    declaration = dataclasses.replace(workspace.declaration, workloads=limited, targets=targets, cache=None)
    here = host.detect().the_cpu.cores

    def local() -> LocalRunner:
        return LocalRunner(jobs or here, here, lambda text: say(Note(text)), limits=declaration.limits)

    with scratch_folder() as folder:
        contenders = {}
        for place, (name, value) in enumerate(asked.policies.items()):
            declared = with_overrides(dataclasses.replace(workspace, declaration=declaration), {"policy": value}, "--policies")
            contenders[name] = dataclasses.replace(declared, root=folder / str(place), is_current=workspace.is_current)
        yield from flow.compare(contenders, Options(jobs=jobs), local, say, dict.fromkeys(asked.warm, workspace.store))


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
    trust: bundle.Trust = bundle.NOBODY,
    part: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    """Measure a bundle's entries on this machine and keep the records in `cache`; return what came of each, by entry.

    Its candidates run here, which is what measuring means. Python of its own, the rules of the workspace that it was built in, runs
    with `trust.rules` alone; otherwise references are those of standard rules, or the computations that the bundle holds.
    What was measured before is not measured again. `part` (2, 3) measures the second third: machines that each have another part have
    all entries between them. Where there are public keys in `trust.keys`, one of them must have signed the bundle.
    Raise ArtifactError for what is no bundle, ToolchainError where the entries' GPU is not here.
    """
    say, store = report or _silent, LocalStore(Path(cache).resolve())
    with bundle_folder(Path(folder).resolve()) as place:
        entries = bundle.part_of(bundle.read_bundle(place, verifier(trust.keys) if trust.keys else None), *part)
        return _measured_all(entries, store, say, keep_going=keep_going, trust=trust)


@contextlib.contextmanager
def bundle_folder(path: Path) -> Iterator[Path]:
    """Provide the folder of a bundle that is one, or a tar of one."""
    if path.suffix != ".tar":
        yield path
        return
    from kerneldecl.package.tar import unpack_tar
    from kerneldecl.store.scratch import scratch_folder

    with scratch_folder() as scratch:
        unpack_tar(path, scratch)
        yield scratch


def _measured_all(
    entries: Sequence[bundle.Entry], store: LocalStore, say: Report, *, keep_going: bool, trust: bundle.Trust
) -> dict[str, Any]:
    waiting = [entry for entry in entries if not bundle.is_measured(entry, store)]
    for entry in waiting:
        if reason := why_not_measured_here(entry.task.arch):
            raise ToolchainError(f"{entry.task.workload.entry}: {reason}")
    say(Started(len(entries), 0, len(waiting), 0))
    done: list[Finished] = []
    with in_use(store.root), LocalRunner(1, host.detect().the_cpu.cores, lambda text: say(Note(text))) as runner:
        if not trust.rules:
            waiting = bundle.with_trusted_references(waiting, runner)

        def measure(place: int, following: int | None, on_device: Runner) -> None:
            if keep_going or not any(each.has_failed for each in done):
                next_task = None if following is None else waiting[following].task
                done.append(_measured(waiting[place], next_task, on_device, store, say, trust))

        for places in by_device([entry.task.arch for entry in waiting]):
            runners = runner.side_by_side(waiting[places[0]].task.arch.model, len(places))
            measure_side_by_side(places, runners, measure, lambda text: say(Note(text)))
    failed = [{"entry": finished.entry, "reason": finished.text} for finished in done if finished.has_failed]
    names = {finished.entry for finished in done}
    references = {name: bundle.reference_name(entry) for entry in waiting if (name := entry.task.workload.entry) in names}
    counts = {"entries": len(entries), "measured_before": len(entries) - len(waiting), "measured": len(done) - len(failed)}
    return {"schema": 1, **counts, "failed": failed, "references": references, "records": str(store.root / "record")}


def _measured(entry: bundle.Entry, next_task: Task | None, runner: Runner, store: LocalStore, say: Report, trust: bundle.Trust) -> Finished:
    name = entry.task.workload.entry

    def on_progress(doing: str, done: int, total: int, best_secs: float | None) -> None:
        say(Step(name, doing, done, total, best_secs))

    outcome = bundle.measure_entry(entry, runner, store, on_progress, next_task)
    winner = outcome.trials[0] if outcome.policy else None
    if winner and trust.keys:
        bundle.keep_blobs(entry, outcome, store)
    text = f"{winner.candidate} {duration(winner.run_secs)}" if winner else why_no_winner(outcome.trials)
    finished = Finished(name, "measure", text, has_failed=winner is None)
    say(finished)
    return finished


def _silent(event: Event) -> None:
    del event
