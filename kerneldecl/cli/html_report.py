"""Owns the command that writes a report of all entries as one HTML file.

Knows nothing of what stands in it.
"""

from __future__ import annotations

from pathlib import Path

import click

from kerneldecl.cli.options import Settings, chosen_entries, json_option, opened, patterns_argument, print_result
from kerneldecl.diagnostics.units import counted


@click.command()
@patterns_argument
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="The file to write. Default: dist/report.html.")
@click.option("--against", metavar="BEFORE", default="", help="An artifact, a package, a lock or a git revision to compare with.")
@click.option(
    "--searches",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="What `compare --json` has printed: others' times, and curves of searches.",
)
@json_option
@click.pass_obj
def report(settings: Settings, /, patterns: tuple[str, ...], **options: object) -> None:
    """Write one HTML file: rooflines, changes, models, history, the last build, and of each entry its candidates."""
    from kerneldecl.cli.event_log import FILE as EVENTS
    from kerneldecl.cli.event_log import read_log
    from kerneldecl.report.gather import Asked, gather, with_sources
    from kerneldecl.report.page import page
    from kerneldecl.stages.session import make_plan

    workspace = opened(settings)
    chosen = set(chosen_entries(workspace, patterns))
    plans = [entry for entry in make_plan(workspace).entries if entry.entry in chosen]
    events = workspace.cache / EVENTS
    lines = read_log(events) if events.is_file() else []
    searches = options["searches"] if isinstance(options["searches"], Path) else None
    found = with_sources(gather(workspace, plans, lines, Asked(str(options["against"]), searches)), plans, workspace)
    content = page(found).encode()
    path = options["output"] if isinstance(options["output"], Path) else workspace.root / "dist" / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    told = {"schema": 1, "report": str(path), "bytes": len(content), "entries": len(plans)}
    print_result(as_json=bool(options["as_json"]), value=told, text=lambda _: f"{counted(len(plans), 'entry', 'entries')}: {path}")
