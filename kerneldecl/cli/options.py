"""Owns what the commands have in common: options before the command, arguments that several take, results on standard output.

Knows nothing of any one command.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerneldecl.errors import printable_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kerneldecl.planning.action import Action
    from kerneldecl.planning.workspace import Workspace

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _complete_override(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from kerneldecl.cli.completion import complete_override

    return complete_override(context, parameter, incomplete)


overrides_option = click.option(
    "-D",
    "overrides",
    shell_complete=_complete_override,
    multiple=True,
    metavar="KEY=VALUE",
    help="Try another top_k, policy, budget, timing, tolerance, dispatch. Repeatable.",
)


def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the words that complete a pattern or an entry's name."""
    from kerneldecl.cli.completion import complete_pattern

    return complete_pattern(context, parameter, incomplete)


patterns_argument = click.argument("patterns", nargs=-1, shell_complete=complete)


@dataclass(frozen=True)
class Settings:
    """Options that precede the command."""

    root: Path
    quiet: bool
    verbosity: int
    colour: str


def opened(settings: Settings, overrides: Sequence[str] = ()) -> Workspace:
    """Return the workspace that the command works in, with these settings in place of the declared ones."""
    from kerneldecl.planning.workspace import open_workspace

    workspace = open_workspace(settings.root)
    if not overrides:
        return workspace
    from kerneldecl.declare.overrides import overrides_of
    from kerneldecl.planning.workspace import with_overrides

    return with_overrides(workspace, overrides_of(overrides))


def chosen_entries(workspace: Workspace, patterns: tuple[str, ...]) -> list[str]:
    """Return the names of the entries that the patterns select, targets included."""
    if not patterns:
        return [workload.entry for workload in workspace.declaration.workloads]
    from kerneldecl.stages.chosen import chosen

    return [workload.entry for workload in chosen(workspace, patterns)]


def print_result(as_json: bool, value: Any, text: Callable[[Any], str]) -> None:
    # Names in artifacts, bundles and records may be anybody's: no control character of theirs reaches the terminal.
    print(json.dumps(value, indent=1) if as_json else printable_lines(text(value)))


def print_plan(as_json: bool, actions: Sequence[Action], root: Path) -> None:
    from kerneldecl.cli import pace, report
    from kerneldecl.cli.steps import steps_of
    from kerneldecl.cli.table import window
    from kerneldecl.store.local import LocalStore

    steps = steps_of(actions, LocalStore(root / "cache"))
    found = pace.expected(actions, steps, pace.read_paces(root / "cache"))
    text = "\n".join([report.plan_text(actions, steps, window()), *pace.expected_text(found)])
    print_result(as_json, {**report.plan_json(actions, steps), "expected": found}, lambda _: text)
