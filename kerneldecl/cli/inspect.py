"""Owns the commands that only read: what is declared, planned, tuned, and why.

Knows nothing of how a plan is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kerneldecl.cli.listing import listed, query_text
from kerneldecl.cli.options import (
    Settings,
    chosen_entries,
    complete,
    json_option,
    opened,
    overrides_option,
    patterns_argument,
    print_plan,
    print_result,
)
from kerneldecl.cli.table import window
from kerneldecl.diagnostics.units import counted
from kerneldecl.errors import StaleError, TuningError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kerneldecl.planning.workspace import Workspace

_ALLOWED = 0.002
"""How much less of the fastest a policy's first k may give, as geometric mean over all entries, before `check --model` fails: a quarter of
the share by which two measurements of one kernel differ, averaged over dozens of entries."""


@click.command()
@patterns_argument
@click.option("--stale", is_flag=True, help="Exit with 3 if anything must be tuned, or the lock would change.")
@click.option("--model", is_flag=True, help="Exit with 1 if policies order the records' candidates worse than when these were written.")
@json_option
@click.pass_obj
def check(settings: Settings, patterns: tuple[str, ...], stale: bool, model: bool, as_json: bool) -> None:
    """Check the declarations, and with --stale whether the records hold what they declare. Builds nothing.

    With --stale, what was edited is lowered, and policies are asked, since only candidates that nobody has measured are out of date.
    With --model, policies are asked as well, and their order is judged by the recorded times: no GPU is needed.
    """
    from kerneldecl.api import look_ahead
    from kerneldecl.cli.stale import stale_entries, stale_json, stale_text
    from kerneldecl.planning.lockfile import unmeasured_keys
    from kerneldecl.stages.lock import lock_of, lock_on_disk

    workspace = opened(settings)
    chosen = chosen_entries(workspace, patterns)
    if model:
        _check_model(workspace, chosen, as_json)
    if not stale:
        if not model:
            declared = f"{counted(len(chosen), 'entry', 'entries')} declared, no mistakes"
            print_result(as_json, {"schema": 1, "entries": len(chosen)}, lambda _: declared)
        return
    ahead, lock = look_ahead(workspace, frozenset(chosen) if patterns else None), lock_on_disk(workspace)
    plan, entries = ahead.plan, [entry for entry in ahead.plan.entries if entry.entry in set(chosen)]
    found = stale_entries(entries, workspace.store, unmeasured_keys(lock), ahead.failures)
    print_result(as_json, stale_json(found), stale_text)
    if wanting := [each.entry for each in found if not each.is_accepted]:
        named = f"{', '.join(wanting[:5])}{' …' if len(wanting) > 5 else ''}"
        raise StaleError(f"{len(wanting)} out of date: {named}")
    if all(e.tuned for e in plan.entries if not e.arch.is_detected) and lock_of(ahead.workspace, plan) != lock:
        raise StaleError("workloads.lock is out of date; run `kerneldecl build` and commit it")


def _check_model(workspace: Workspace, chosen: Sequence[str], as_json: bool) -> None:
    """Print how the policies' orders of now compare with those of the records; raise TuningError where they are worse."""
    from kerneldecl.api import look_ahead
    from kerneldecl.cli.model_rank import changes_json, changes_of, changes_text
    from kerneldecl.tuning.model_rank import worse

    ahead = look_ahead(workspace, frozenset(chosen))
    changes = changes_of([entry for entry in ahead.plan.entries if entry.entry in set(chosen)], workspace.store)
    found = worse(changes, _ALLOWED)
    print_result(as_json, changes_json(changes, found), changes_text)
    if found:
        raise TuningError(f"policies order the recorded candidates worse than before: {'; '.join(found)}")


@click.command()
@patterns_argument
@overrides_option
@json_option
@click.pass_obj
def plan(settings: Settings, patterns: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Report what a build would do, and why. Runs nothing."""
    from kerneldecl.null_build.quick_plan import quick_plan

    actions = None if patterns or overrides else quick_plan(settings.root)
    if actions is None:
        from kerneldecl.stages.session import make_plan

        workspace = opened(settings, overrides)
        chosen = set(chosen_entries(workspace, patterns))
        actions = [a for a in make_plan(workspace).actions if not patterns or a.entry in chosen]
    print_plan(as_json, actions, settings.root)


@click.command()
@click.argument("entry", shell_complete=complete)
@json_option
@click.pass_obj
def why(settings: Settings, entry: str, as_json: bool) -> None:
    """Report what changed: files and what of them, attributes and keys of entries, with old and new values."""
    from kerneldecl.cli import report
    from kerneldecl.cli.steps import steps_of
    from kerneldecl.planning.last_build import FILE as LAST_BUILD
    from kerneldecl.planning.last_build import read_state
    from kerneldecl.plugins.find import shadowed_file
    from kerneldecl.stages.session import make_plan

    workspace = opened(settings)
    found_plan, last = make_plan(workspace), read_state(workspace.cache / LAST_BUILD)
    found = []
    for name in chosen_entries(workspace, (entry,)):
        planned = next(e for e in found_plan.entries if e.entry == name)
        link = next(link for link in found_plan.links if link.target == planned.workload.target)
        standard = shadowed_file("rules", workspace.root, planned.workload.rule)
        steps = steps_of(planned.actions, workspace.store)
        found.append(report.why_json(planned, link, last, str(standard or ""), steps))
    print_result(as_json, found if len(found) > 1 else found[0], lambda _: "\n".join(map(report.why_text, found)))


@click.command()
@click.argument("entry", required=False, shell_complete=complete)
@click.option("--model", is_flag=True, help="Show where the fastest stood in the policy's order, and what its first k give.")
@click.option("--source", is_flag=True, help="Show the winner's source, as `export` writes it.")
@overrides_option
@json_option
@click.pass_obj
def show(settings: Settings, entry: str | None, model: bool, source: bool, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show an entry's candidates with their times, or all entries with their winners."""
    is_list = not (entry or model or source or overrides)
    if is_list and (known := listed(settings.root, ())):
        print_result(as_json, known, lambda found: query_text(found, window()))
        return
    from kerneldecl.cli import report
    from kerneldecl.cli.export import source_of
    from kerneldecl.cli.model_rank import ranks_json, ranks_of, ranks_text
    from kerneldecl.planning.last_build import FILE as LAST_BUILD
    from kerneldecl.planning.last_build import read_state
    from kerneldecl.serial import trials_from_json
    from kerneldecl.stages.chosen import failures
    from kerneldecl.stages.session import make_plan

    workspace = opened(settings, overrides)
    planned = make_plan(workspace).entries
    chosen = set(chosen_entries(workspace, (entry,) if entry else ()))
    entries = [e for e in planned if e.entry in chosen]
    if source:
        found_source = source_of(workspace, entries, entry)
        print_result(as_json, found_source, lambda found: found["source"])
        return
    if model:
        print_result(as_json, ranks_json(ranks_of(entries, workspace.store)), ranks_text)
        return
    if entry is None:
        found_list = report.query_json(entries, failures(workspace, entries))
        print_result(as_json, found_list, lambda found: query_text(found, window()))
        return
    last = read_state(workspace.cache / LAST_BUILD).failed
    names = {e.tuned.key: e.entry for e in planned if e.tuned}
    found = [report.show_json(e, trials_from_json(last.get(e.entry, {}).get("trials", ())), names) for e in entries]
    print_result(as_json, found if len(found) > 1 else found[0], lambda _: "\n\n".join(report.show_text(each, window()) for each in found))


@click.command()
@click.argument("patterns", nargs=-1, required=True, shell_complete=complete)
@json_option
@click.pass_obj
def query(settings: Settings, patterns: tuple[str, ...], as_json: bool) -> None:
    """List the entries that PATTERNS select, with times and winners; --json has their rules, attributes, tags and keys, too.

    Besides names: `rule:matmul`, `tag:fast`, `policy:random`, `arch:h200`; those in a state by `stale:`, `failed:`, `unmeasured:`.
    Behind `--`, a `-` in front of a pattern takes entries out: kerneldecl query unmeasured: -- '-*@host'.
    """
    if known := listed(settings.root, patterns):
        print_result(as_json, known, lambda told: query_text(told, window()))
        return
    from kerneldecl.cli import report
    from kerneldecl.stages.chosen import failures
    from kerneldecl.stages.session import make_plan

    workspace = opened(settings)
    chosen = set(chosen_entries(workspace, patterns))
    entries = [e for e in make_plan(workspace).entries if e.entry in chosen]
    found = report.query_json(entries, failures(workspace, entries))
    print_result(as_json, found, lambda told: query_text(told, window()))
