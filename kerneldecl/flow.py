"""Owns the order of a build's stages.

Knows nothing of what the stages do. No stage calls another: each finds in the plan what is ready, runs it, records it and plans again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kerneldecl.planning.workspace import Workspace
from kerneldecl.stages.link import link_artifacts
from kerneldecl.stages.lock import check_lock, write_lock
from kerneldecl.stages.lower import lower_entries
from kerneldecl.stages.propose import propose_entries
from kerneldecl.stages.rebuild import rebuild_objects
from kerneldecl.stages.remember import remember
from kerneldecl.stages.session import Options, Runners, Session, drop_damaged, make_plan, misses
from kerneldecl.stages.toolchain import check_toolchain
from kerneldecl.stages.tune import tune_entries
from kerneldecl.toolchain.linkers import Linker
from kerneldecl.tuning.events import Report, Started

Stage = Callable[[Session], None]

STAGES: tuple[Stage, ...] = (
    check_lock,
    check_toolchain,
    lower_entries,
    propose_entries,
    check_lock,  # now the candidates are known
    tune_entries,
    rebuild_objects,
    link_artifacts,
    write_lock,
)
NOTHING_TO_RUN: tuple[Stage, ...] = (check_lock, link_artifacts, write_lock)
"""Stages where every entry is done, and links at most are missing: no process is started."""


def build(workspace: Workspace, options: Options, runners: Runners, linkers: Mapping[str, Linker], report: Report) -> Session:
    """Bring the workspace's artifacts up to date, as far as no entry fails, and return what came of it."""
    shows_ranked = options.measure and not options.require_measured
    first = make_plan(workspace, shows_ranked=shows_ranked)
    if drop_damaged(workspace, first):
        first = make_plan(workspace, shows_ranked=shows_ranked)
    session = Session(
        workspace=workspace,
        options=options,
        linkers=linkers,
        report=report,
        plan=first,
        first_plan=first,
        shows_ranked=shows_ranked,
    )
    needs_runner = not all(entry.is_done for entry in session.entries)
    to_lower, to_tune, to_build = (misses(session.entries, kind) for kind in ("lower", "tune", "build"))
    report(Started(len(first.entries), to_lower, to_tune, to_build))
    if needs_runner:
        with runners() as session.started_runner:
            _run(session, STAGES)
    else:
        _run(session, NOTHING_TO_RUN)
    if session.ran or needs_runner or not shows_ranked:
        session.plan = make_plan(workspace)
    remember(session)
    return session


def _run(session: Session, stages: Sequence[Stage]) -> None:
    for stage in stages:
        stage(session)
        if session.is_over:
            break
