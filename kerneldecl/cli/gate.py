"""Owns the commands that compare two states of a workspace: diff and gate.

Knows nothing of how entries are compared.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

import click

from kerneldecl.cli.options import Settings, json_option
from kerneldecl.errors import ExitCode, printable_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kerneldecl.compare.verdict import Comparison

_NOW = "workloads.lock"
_format_option = click.option(
    "--format", "form", type=click.Choice(["table", "junit", "markdown"]), default="table", help="How to print it."
)


class _Percentage(click.ParamType[float]):
    name = "percentage"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 <= found < 1:
            self.fail(f"{text!r} is no share of time; write 2% or 0.02", param, ctx)
        return found


@click.command()
@click.argument("before")
@click.argument("after", default=_NOW)
@_format_option
@json_option
@click.pass_obj
def diff(settings: Settings, before: str, after: str, form: str, as_json: bool) -> None:
    """Say what differs between two states: time, winner, code and reason of each entry.

    A state is an artifact's folder, a lock file, or a git revision with a workloads.lock. AFTER is the workspace's lock by default.
    """
    _show(settings, (before, after), form if not as_json else "json", None)


@click.command()
@click.argument("after", default=_NOW)
@click.option(
    "--against", required=True, metavar="BEFORE", help="What to compare with: an artifact's folder, a lock file, or a git revision."
)
@click.option("--budget", type=_Percentage(), default="2%", help="Slowdown of an entry that passes. Default: 2%.")
@_format_option
@json_option
@click.pass_obj
def gate(settings: Settings, /, after: str, against: str, budget: float, form: str, as_json: bool) -> int:
    """Exit with 1 if an entry is slower than before, missing or unverified.

    Noise does not count: an entry is slower if its samples say so, and by more than the budget.
    """
    compared = _show(settings, (against, after), form if not as_json else "json", budget)
    return ExitCode.FAILED if any(each.fails for each in compared) else ExitCode.DONE


def _show(settings: Settings, sides: tuple[str, str], form: str, budget: float | None) -> Sequence[Comparison]:
    from kerneldecl.cli.table import window
    from kerneldecl.compare.report import FORMATS, table, to_json
    from kerneldecl.compare.sides import read_side
    from kerneldecl.compare.verdict import BUDGET, compare

    before, after = (read_side(settings.root, named) for named in sides)
    allowed = BUDGET if budget is None else budget
    compared = compare(before, after, allowed)
    told = FORMATS.get(form, functools.partial(table, width=window()))
    print(json.dumps(to_json(compared, allowed), indent=1) if form == "json" else printable_lines(told(compared)))
    return compared
