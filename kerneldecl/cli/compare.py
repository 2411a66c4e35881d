"""Owns the command that compares policies: what it is asked, and how the result is shown.

Knows nothing of how policies search.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerneldecl.cli.options import Settings, json_option, patterns_argument, print_result
from kerneldecl.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kerneldecl.limits import Budget

Json = dict[str, Any]
_SECS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        scale = _SECS.get(text[-1:], 1.0)
        try:
            found = float(text[:-1] if text[-1:] in _SECS else text) * scale
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and found > 0):
            self.fail(f"{text!r} is no time above 0; write 60s or 2m", param, ctx)
        return found


@click.command()
@patterns_argument
@click.option("--policies", required=True, metavar="A,B,…", help='Names, or a TOML list of what `policy` may be: ["auto", { name = … }].')
@click.option("--budget", type=_Duration(), help="Most time of each search: 60s, 2m. Default: what is declared.")
@click.option("--trials", type=click.IntRange(min=1), help="Most candidates of each search.")
@click.option("--warm", is_flag=True, help="Let policies see what the workspace's records say of other computations.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Processes that compile at once. Default: the cores.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw the best time over the seconds of the search.")
@json_option
@click.pass_obj
def compare(settings: Settings, /, patterns: tuple[str, ...], **options: Any) -> int:
    """Search entries by several policies, and say whose winners are fastest and what each search has cost.

    Each policy has a store of its own, so none profits from another. Nothing is kept in the workspace.
    """
    from kerneldecl.api import compare_policies, frozen_workspace
    from kerneldecl.cli.progress import display
    from kerneldecl.compare.curves import svg
    from kerneldecl.compare.searches import Asked, to_json

    policies = contenders(options["policies"])
    budget: Budget = tuple((name, float(options[key])) for name, key in (("seconds", "budget"), ("trials", "trials")) if options[key])
    asked = Asked(policies, budget, frozenset(policies if options["warm"] else ()))
    with (
        frozen_workspace(settings.root) as workspace,
        display(quiet=settings.quiet, verbosity=settings.verbosity, colour=settings.colour) as report,
    ):
        found = list(compare_policies(workspace, patterns, asked, jobs=options["jobs"], report=report))
    if options["svg"]:
        options["svg"].write_text(svg(found), encoding="utf-8")
    print_result(options["as_json"], to_json(found, asked), text)
    return ExitCode.FAILED if any(not each.run_secs for each in found) else ExitCode.DONE


def contenders(text: str) -> Mapping[str, Any]:
    """Return the values of `policy` that a text names, by how they are shown; raise DeclarationError for a mistake."""
    from kerneldecl.declare.overrides import value_of
    from kerneldecl.errors import DeclarationError, Problem

    items = value_of("--policies", text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
    named: dict[str, Any] = {}
    for item in items:
        shown = _shown(item)
        if shown in named:
            raise DeclarationError([Problem("--policies", f"{shown} stands there twice; expected each once")])
        named[shown] = item
    if len(named) < 2:
        raise DeclarationError([Problem("--policies", "one policy is no comparison", "name two or more: auto,random")])
    return named


def _shown(item: Any) -> str:
    """Return a value of `policy` in few words: `evolution(trials=64)`, `auto+evolution`."""
    if isinstance(item, list):
        return "+".join(map(_shown, item))
    if not isinstance(item, dict):
        return str(item)
    options = " ".join(f"{name}={value}" for name, value in item.items() if name != "name" and not isinstance(value, list | dict))
    return f"{item.get('name', '')}({options})" if options else str(item.get("name", ""))


def text(json: Json) -> str:
    """Return a table for each entry, the fastest winner marked, and how often each policy was the fastest."""
    from kerneldecl.cli.table import table, window
    from kerneldecl.diagnostics.units import duration

    head = ["", "policy", "time", "share", "right", "search", "compile", "measure", "ask", "winner"]
    lines = []
    for entry in json["entries"]:
        rows = []
        for row in entry["policies"]:
            cost = [f"{row[name]:.3g} s" for name in ("search_secs", "compile_secs", "measure_secs", "ask_secs")]
            is_right = bool(row["run_secs"])
            figures = [duration(row["run_secs"]), f"{row['share']:.0%}"] if is_right else ["-", "-"]
            by = f"{row['proposed_by']}: " if is_right and row["proposed_by"] != row["policy"] else ""
            told = f"{by}{_short(row['winner'])}" if is_right else row["failure"]
            mark = "*" if row["policy"] in entry["fastest"] else ""
            rows.append([mark, row["policy"], *figures, f"{row['right']} of {row['tried']}", *cost, told])
        lines += [entry["entry"], *table(head, rows, window()), ""]
    count = len(json["entries"])
    shares = json["of_best"]
    for policy, won in json["wins"].items():
        of_best = f"; geometric mean of the fastest's time by its own {shares[policy]:.3f}" if policy in shares else ""
        lines.append(f"{policy}: fastest, or as fast, on {won} of {count}{of_best}")
    return "\n".join(lines)


def _short(winner: str) -> str:
    return winner if len(winner) <= 160 else f"{winner[:157]}…"
