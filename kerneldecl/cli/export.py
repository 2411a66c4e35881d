"""Owns the command `export`: an entry's winner as source that programs compile without TVM, or as machine code to read.

Knows nothing of TVM: a worker process makes the text from the entry's record.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kerneldecl.cli.options import Settings, chosen_entries, complete, opened
from kerneldecl.cli.package import FORMS, export_package
from kerneldecl.errors import TuningError, printable_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kerneldecl.planning.plan import EntryPlan
    from kerneldecl.planning.workspace import Workspace

FORMATS = {"cuda": ("cuda", "ptx", "cubin", "sass"), "cpu": ("c", "asm")}
"""Formats by kind of arch; the first is that which is meant where none is given."""
_LIMIT_SECS = 300.0


@click.command()
@click.argument("entry", required=False, shell_complete=complete)
@click.option(
    "--format", "form", type=click.Choice([each for forms in FORMATS.values() for each in forms] + [*FORMS]), help="What to write."
)
@click.option("--name", help="Name of the function or the module; by default the entry's or artifact's, in letters that are allowed.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="What to write: a file, of a wheel its folder; default: output, here."
)
@click.pass_obj
def export(settings: Settings, entry: str | None, form: str | None, name: str | None, output: Path | None) -> None:
    """Write a tuned entry as source that needs no TVM: a CUDA or C++ header with one function. Needs its record, and no GPU.

    tar, wheel and hf-kernel write an artifact instead: that of the folder ENTRY, or the workspace's.
    """
    from kerneldecl.stages.headers import function_name, is_function_name
    from kerneldecl.stages.session import make_plan

    if form in FORMS:
        print(f"wrote {export_package(settings, entry, form, name, output)}")
        return
    if entry is None:
        raise click.UsageError("name the entry to export; --format tar, wheel or hf-kernel exports the artifact")
    if name is not None and not is_function_name(name):
        raise click.UsageError(f"--name {name!r} is no name of a function in C++; write letters, digits and underscores, such as my_kernel")
    if form == "cubin" and output is None:
        raise click.UsageError("a cubin is no text: name a file with -o")
    workspace = opened(settings)
    chosen = set(chosen_entries(workspace, (entry,)))
    planned = only([each for each in make_plan(workspace).entries if each.entry in chosen], entry)
    answer = exported(workspace, planned, form or FORMATS[planned.arch.kind][0], name or function_name(planned.workload.name))
    content = answer["text"].encode() if "text" in answer else base64.b64decode(answer["base64"])
    if output is None:
        print(printable_lines(content.decode()), end="")
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(content)
        print(f"wrote {output}")


def only(entries: Sequence[EntryPlan], pattern: str) -> EntryPlan:
    """Return the one entry that a pattern has selected; raise UsageError where it has selected several."""
    if len(entries) > 1:
        names = ", ".join(each.entry for each in entries[:5])
        raise click.UsageError(f"{pattern} selects {len(entries)} entries, and one is exported at a time: {names}")
    return entries[0]


def source_of(workspace: Workspace, entries: Sequence[EntryPlan], pattern: str | None) -> dict[str, str]:
    """Return the source of the one entry that is selected, as its first format has it."""
    from kerneldecl.stages.headers import function_name

    if pattern is None:
        raise click.UsageError("--source shows one entry: name it")
    entry = only(entries, pattern)
    form = FORMATS[entry.arch.kind][0]
    return {"entry": entry.entry, "format": form, "source": exported(workspace, entry, form, function_name(entry.workload.name))["text"]}


def exported(workspace: Workspace, entry: EntryPlan, form: str, name: str) -> dict[str, str]:
    """Return what a worker makes of an entry's winner; raise TuningError where it has none, or has no such form."""
    from kerneldecl.runners.process import Worker
    from kerneldecl.stages.headers import export_request

    if entry.lowered is None or entry.tuned is None:
        raise TuningError(f"{entry.entry} is not tuned: run `kerneldecl build {entry.entry}` first")
    if form not in FORMATS[entry.arch.kind]:
        raise click.UsageError(f"{entry.entry} is for {entry.arch.name}: its formats are {', '.join(FORMATS[entry.arch.kind])}")
    worker = Worker({}, folder=workspace.root)
    try:
        answer = worker.call(export_request(workspace, entry, form, name), _LIMIT_SECS)
    finally:
        worker.stop()
    if "failure" in answer:
        raise TuningError(f"{entry.entry} cannot be exported: {answer['failure']}")
    return answer
