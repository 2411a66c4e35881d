"""Owns the order of a build's stages, and of those that only look ahead.

Knows nothing of what the stages do. No stage calls another: each finds in the plan what is ready, runs it, records it and plans again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kerneldecl.compare.searches import Searched
from kerneldecl.planning.workspace import Workspace
from kerneldecl.stages.contest import Contender, contest, copy_others
from kerneldecl.stages.exchange import exchange, share_all
from kerneldecl.stages.headers import lacks_headers, write_headers
from kerneldecl.stages.link import link_artifacts
from kerneldecl.stages.lock import check_lock, write_lock
from kerneldecl.stages.lower import lower_entries
from kerneldecl.stages.pipeline import tune_as_proposed
from kerneldecl.stages.propose import propose_entries
from kerneldecl.stages.rebuild import rebuild_objects
from kerneldecl.stages.remember import remember
from kerneldecl.stages.retune import check_retuned
from kerneldecl.stages.rows import choose_rows
from kerneldecl.stages.session import Options, Runners, Session, drop_damaged, make_plan, misses
from kerneldecl.stages.toolchain import check_toolchain
from kerneldecl.stages.tune import tune_entries
from kerneldecl.store.overlay import Overlay
from kerneldecl.store.protocol import Store
from kerneldecl.toolchain.linkers import Linker
from kerneldecl.tuning.counted import Counted
from kerneldecl.tuning.events import Report, Started

Stage = Callable[[Session], None]

STAGES: tuple[Stage, ...] = (
    check_lock,
    check_toolchain,
    tune_as_proposed,
    lower_entries,
    exchange,
    propose_entries,
    exchange,
    check_lock,  # now the candidates are known
    tune_entries,
    rebuild_objects,
    write_headers,
    choose_rows,
    link_artifacts,
    write_lock,
)
OF_A_TRY: tuple[Stage, ...] = (
    check_toolchain,
    tune_as_proposed,
    lower_entries,
    exchange,
    propose_entries,
    exchange,
    tune_entries,
)
"""Stages where entries have other settings than the declared ones: nothing of it is linked or locked."""
NOTHING_TO_RUN: tuple[Stage, ...] = (check_lock, link_artifacts, write_lock)
"""Stages where every entry is done, and links at most are missing: no process is started."""


def build(workspace: Workspace, options: Options, runners: Runners, linkers: Mapping[str, Linker], report: Report) -> Session:
    """Bring the workspace's artifacts up to date, as far as no entry fails, and return what came of it."""
    shows_ranked = options.measure and not options.require_measured
    first = make_plan(workspace, shows_ranked=shows_ranked)
    check_retuned(first, options)
    is_again = drop_damaged(workspace, first)
    session = Session(
        workspace=workspace,
        options=options,
        linkers=linkers,
        report=report,
        plan=first,
        first_plan=first,
        shows_ranked=shows_ranked,
    )
    if is_again or options.retuned or options.reverified:
        session.replan()
        session.first_plan = session.plan
    exchange(session)
    needs_runner = not all(entry.is_done for entry in session.entries) or lacks_headers(session)
    to_lower, to_tune, to_build = (misses(session.entries, kind) for kind in ("lower", "tune", "build"))
    report(Started(len(session.plan.entries), to_lower, to_tune, to_build))
    if needs_runner:
        with runners() as runner:
            session.started_runner = Counted(runner)
            _run(session, OF_A_TRY if workspace.is_overridden else STAGES)
    elif not workspace.is_overridden:
        _run(session, NOTHING_TO_RUN)
    if session.ran or needs_runner or not shows_ranked:
        session.conclude()
    if not workspace.is_overridden:
        remember(session)
    share_all(session)
    return session


def look_ahead(workspace: Workspace, options: Options, runners: Runners, report: Report) -> Session:
    """Lower and ask policies, as a build would, and keep nothing: its plan then tells what has to be tuned."""
    workspace = replace(workspace, overlay=Overlay(workspace.store))
    first = make_plan(workspace)
    session = Session(workspace=workspace, options=options, linkers={}, report=report, plan=first, first_plan=first)
    if misses(session.entries, "lower") or misses(session.entries, "propose"):
        with runners() as runner:
            session.started_runner = Counted(runner)
            _run(session, (lower_entries, propose_entries))
    return session


def compare(
    contenders: Mapping[str, Workspace], options: Options, runners: Runners, report: Report, known: Mapping[str, Store]
) -> Iterator[Searched]:
    """Search the entries of one declaration by several policies, each in a workspace of its own; yield what came of it.

    Those of which `known` has a store see what its records say of other computations.
    """
    with runners() as runner:
        asked: list[Contender] = []
        for policy, workspace in contenders.items():
            first = make_plan(workspace)
            session = Session(workspace=workspace, options=options, linkers={}, report=report, plan=first, first_plan=first)
            session.started_runner = Counted(runner)
            _run(session, (check_toolchain, lower_entries))
            if policy in known:
                own = {entry.lowered.computation for entry in session.plan.entries if entry.lowered}
                copy_others(known[policy], workspace.own_store, own)
            _run(session, (propose_entries,))
            asked.append(Contender(policy, session))
        yield from contest(asked, runner)


def _run(session: Session, stages: Sequence[Stage]) -> None:
    for stage in stages:
        stage(session)
        if session.is_over:
            break
