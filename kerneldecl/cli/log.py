"""Owns the command that tells what the last build did, and for how long.

Knows nothing of builds but their log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kerneldecl.cli.options import Settings, json_option, print_result
from kerneldecl.diagnostics.units import counted
from kerneldecl.errors import ExitCode, ToolchainError


@click.command()
@click.argument("which", type=click.Choice(["last"]))
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a trace for Perfetto or Chrome.")
@json_option
@click.pass_obj
def log(settings: Settings, /, which: str, trace: Path | None, as_json: bool) -> int:
    """Say what the last build did, and for how long each process was busy."""
    from kerneldecl.cli.event_log import FILE, read_log
    from kerneldecl.report.spans import chrome_trace, spans, summary

    path = settings.root / "cache" / FILE
    if not path.is_file():
        raise ToolchainError(f"{path} is not there: no build has run here; `kerneldecl build` writes it")
    found = spans(read_log(path))
    if not found:
        raise ToolchainError(f"{path} holds no events; `kerneldecl build` writes it again")
    if trace:
        trace.write_text(json.dumps(chrome_trace(found)), encoding="utf-8")
    print_result(as_json, {"build": which, **summary(found)}, _text)
    return ExitCode.DONE


def _text(told: Mapping[str, Any]) -> str:
    from kerneldecl.cli.table import table, window

    ending = f", ended by {told['failure']}" if told["failure"] else ""
    parts = [f"{told['build']} build: {told['secs']:.2f} s, {counted(len(told['entries']), 'entry', 'entries')} tuned{ending}"]
    if told["requests"]:
        rows = [
            [r["request"], str(r["count"]), str(r["failed"]), *(f"{r[name]:.3f}" for name in ("secs", "median_secs", "longest_secs"))]
            for r in told["requests"]
        ]
        parts.append("\n".join(table(("request", "count", "failed", "s", "median s", "longest s"), rows, window())))
        busy = [[each["process"], str(each["requests"]), f"{each['busy']:.0%}"] for each in told["processes"]]
        parts.append("\n".join(table(("process", "requests", "busy"), busy, window())))
    if told["entries"]:
        slowest = sorted(told["entries"], key=lambda each: -each["secs"])[:20]
        rows = [[each["entry"], f"{each['secs']:.2f}", each["text"]] for each in slowest]
        parts.append("\n".join(table(("entry", "s", "what came of it"), rows, window())))
    return "\n\n".join(parts)
