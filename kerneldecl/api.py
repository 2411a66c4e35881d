"""Owns the Python interface: plan, build and load, as the command line does them.

Knows nothing of how results are shown.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneldecl import flow
from kerneldecl.artifact.link import LINKERS, Linker
from kerneldecl.artifact.load import Artifact, load
from kerneldecl.declare.select import select
from kerneldecl.errors import ToolchainError, TuningError
from kerneldecl.hardware import host
from kerneldecl.null_build import memo, stamp
from kerneldecl.planning.lockfile import shown
from kerneldecl.planning.plan import Plan, link_digest
from kerneldecl.planning.workspace import FILE, Workspace, open_workspace, plugins_key
from kerneldecl.runners.local import LocalRunner
from kerneldecl.store.keys import digest
from kerneldecl.store.local import LocalStore
from kerneldecl.tuning import bundle
from kerneldecl.tuning.events import Event, Finished, Note, Report, Started, Step
from kerneldecl.tuning.task import Task
from kerneldecl.winners import cannot_measure, no_winner

__all__ = ["Artifact", "build", "load", "measure_bundle", "plan", "run_build"]


def plan(root: str | Path = ".") -> Plan:
    """Return what a build of the workspace would do, and why. Runs nothing and needs no TVM."""
    return flow.make_plan(open_workspace(Path(root).resolve()))


def build(
    root: str | Path = ".", patterns: Sequence[str] = (), *, jobs: int | None = None, report: Report | None = None
) -> dict[str, Artifact]:
    """Build the workspace and return its artifacts by target; raise TuningError naming the entries that failed."""
    done = run_build(open_workspace(Path(root).resolve()), patterns, flow.Options(), jobs, report or _silent)
    if done.failures:
        raise TuningError("; ".join(f"{entry}: {reason}" for entry, reason in done.failures.items()))
    return {target: load(folder) for target, folder in done.artifacts.items()}


def run_build(  # noqa: PLR0913  the last two are for those who bring their own
    workspace: Workspace,
    patterns: Sequence[str],
    options: flow.Options,
    jobs: int | None,
    report: Report,
    *,
    runners: flow.Runners | None = None,
    linkers: Mapping[str, Linker] = LINKERS,
) -> flow.Build:
    """Build the entries that the patterns select, all if there are none, and note the result for the next null build."""
    if patterns:
        chosen = select(workspace.declaration.workloads, patterns)
        options = dataclasses.replace(options, selected=frozenset(workload.entry for workload in chosen))
    here = host.detect().the_cpu.cores
    threads = min(here, max((arch.cpu.cores for arch in workspace.inputs.archs.values() if arch.cpu), default=here))
    local = functools.partial(LocalRunner, jobs or here, threads, lambda text: report(Note(text)))
    done = flow.build(workspace, options, runners or local, linkers, report)
    if not done.failures and not done.plan.misses:
        _note_complete(done)
    return done


def measure_bundle(
    folder: str | Path, cache: str | Path = "cache", report: Report | None = None, *, keep_going: bool = True
) -> dict[str, Any]:
    """Measure a bundle's entries on this machine and keep the records in `cache`; return what came of each, by entry.

    Raise ArtifactError for what is no bundle, ToolchainError where the entries' GPU is not here.
    """
    say, store = report or _silent, LocalStore(Path(cache).resolve())
    entries = bundle.read_bundle(Path(folder).resolve())
    waiting = [entry for entry in entries if not bundle.is_measured(entry, store)]
    for entry in waiting:
        if objection := cannot_measure(entry.task.arch):
            raise ToolchainError(f"{entry.task.workload.entry}: {objection}")
    say(Started(len(entries), 0, len(waiting), 0))
    done: list[Finished] = []
    with LocalRunner(1, host.detect().the_cpu.cores, lambda text: say(Note(text))) as runner:
        for entry, following in itertools.zip_longest(waiting, waiting[1:]):
            done.append(_measured(entry, following.task if following else None, runner, store, say))
            if done[-1].has_failed and not keep_going:
                break
    failed = [{"entry": finished.entry, "reason": finished.text} for finished in done if finished.has_failed]
    counts = {"entries": len(entries), "measured_before": len(entries) - len(waiting), "measured": len(done) - len(failed)}
    return {"schema": 1, **counts, "failed": failed, "records": str(store.root / "record")}


def _measured(entry: bundle.Entry, following: Task | None, runner: LocalRunner, store: LocalStore, say: Report) -> Finished:
    name = entry.task.workload.entry

    def step(doing: str, done: int, total: int, best_secs: float | None) -> None:
        say(Step(name, doing, done, total, best_secs))

    outcome = bundle.measure_entry(entry, runner, store, step, following)
    winner = outcome.measurements[0] if outcome.policy else None
    text = f"{shown(winner.candidate)} {winner.run_secs * 1e6:.4g} us" if winner else no_winner(outcome.measurements)
    finished = Finished(name, "measure", text, has_failed=winner is None)
    say(finished)
    return finished


def _note_complete(done: flow.Build) -> None:
    """Leave the stamp and the memo that make the next null build and the next plan quick."""
    root = done.workspace.root
    document = memo.parse((root / FILE).read_bytes())
    if document is None or digest((root / FILE).read_bytes()) != done.workspace.declaration.digest:
        return  # edited while we built: the next build looks again
    extra, folders = (sorted(_relative(root, paths)) for paths in (done.workspace.extra_files, done.artifacts.values()))
    rows: dict[int, list[memo.Row]] = {}
    for entry in done.plan.entries:
        lower, tune, build = (action.key for action in entry.actions)
        row = memo.Row(
            name=entry.workload.name,
            target=entry.workload.target,
            lower_key=lower,
            tune_key=tune,
            build_key=build,
            link_digest=link_digest(entry),
            entry_digest=memo.entry_digest(entry.workload),
        )
        rows.setdefault(entry.workload.line, []).append(row)
    digests = [memo.table_digest(table) for table in document["workload"]]
    if len(digests) == len(rows):  # inline tables share a line, which tells tables apart elsewhere
        plugins = {plugins_key(*chosen): found for chosen, found in done.workspace.inputs.plugins.items()}
        links = {link.target: link.key for link in done.plan.links}
        known = memo.Memo(dict(zip(digests, rows.values(), strict=True)), links, plugins)
        memo.write_memo(root, document, known, extra, folders)
    stamp.write_stamp(str(root), extra, folders, len(done.plan.entries))


def _relative(root: Path, paths: Iterable[Path]) -> list[str]:
    return [os.path.relpath(path, root) for path in paths]


def _silent(event: Event) -> None:
    del event
