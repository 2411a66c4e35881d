"""Owns the Python interface: plan, build and load, as the command line does them.

Knows nothing of how results are shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
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
from kerneldecl.runners.local import LocalRunner
from kerneldecl.stages.session import Options, Runners, Session, make_plan
from kerneldecl.stages.tidy import tidy
from kerneldecl.store.files import remove_parts, write_whole
from kerneldecl.store.local import LocalStore
from kerneldecl.store.lock import in_use
from kerneldecl.store.signing import verifier
from kerneldecl.toolchain.linkers import LINKERS, Linker
from kerneldecl.tuning import bundle
from kerneldecl.tuning.events import Event, Finished, Note, Printed, Report, Started, Step
from kerneldecl.tuning.search import why_no_winner
from kerneldecl.tuning.task import Task

if TYPE_CHECKING:
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

    def heard(request: str, text: str) -> None:
        printed.append(f"{request}:\n{text}\n\n")
        report(Printed(request, text))

    def local() -> LocalRunner:
        limits = workspace.declaration.limits
        return LocalRunner(options.jobs or here, threads, lambda text: report(Note(text)), heard, limits)

    with in_use(workspace.cache), _shared_store(workspace, report) as shared:
        done = flow.build(dataclasses.replace(workspace, shared=shared), options, runners or local, linkers, report)
        for store in done.imports.values():
            store.close()
    if done.ran:
        tidy(workspace, report)
    if printed:
        write_whole(workspace.cache / PRINTED, "".join(printed)[-_PRINTED_BYTES:], durable=False)
    if not done.failures and not done.plan.misses and not workspace.is_overridden:
        note_complete(done)
    return done


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
        for entry, next_entry in itertools.zip_longest(waiting, waiting[1:]):
            done.append(_measured(entry, next_entry.task if next_entry else None, runner, store, say, trust))
            if done[-1].has_failed and not keep_going:
                break
    failed = [{"entry": finished.entry, "reason": finished.text} for finished in done if finished.has_failed]
    references = {entry.task.workload.entry: bundle.reference_name(entry) for entry in waiting[: len(done)]}
    counts = {"entries": len(entries), "measured_before": len(entries) - len(waiting), "measured": len(done) - len(failed)}
    return {"schema": 1, **counts, "failed": failed, "references": references, "records": str(store.root / "record")}


def _measured(
    entry: bundle.Entry, next_task: Task | None, runner: LocalRunner, store: LocalStore, say: Report, trust: bundle.Trust
) -> Finished:
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
