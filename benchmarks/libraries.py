"""Owns the comparison of `dispatch = "fastest"` with a vendor's library alone, on the entries of a workspace, by its own records.

Knows nothing of kernels. In a copy of the workspace (its declarations and committed records; --folder DIR keeps it) every entry of
the target is built with `dispatch = "fastest"`. The library's best candidate and ours then stand in one race, whose times the table has.

    python benchmarks/libraries.py [--workspace benchmarks/hopper] [--target h200] [PATTERN …]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.api import run_build
from kerneldecl.declare.select import select
from kerneldecl.model import Trial
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.workspace import open_workspace
from kerneldecl.stages.session import Options, make_plan
from kerneldecl.timing import median
from kerneldecl.tuning.race import finalists

ROOT = Path(__file__).parents[1]
COPIED = ("workloads.toml", "rules", "policies", "templates", "archs", "cache/record")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="entries, as for `kerneldecl build`; all of the target by default")
    parser.add_argument("--workspace", type=Path, default=ROOT)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--policy", help='library with its versions, such as { name = "library", cublas = "13.0" }')
    parser.add_argument("--folder", type=Path, help="where the copy is kept")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    described = machine()
    show_machine(described)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "workspace"
        copy_workspace(options.workspace, folder, options.target, options.policy)
        rows = list(_rows(folder, tuple(options.patterns) or (f"*@{options.target}",)))
    slower = [row["entry"] for row in rows if row.get("beyond noise")]
    show('dispatch = "fastest": microseconds of one race', rows)
    print(
        f"{sum('library us' in row for row in rows)} of {len(rows)} entries have a library; slower than it: {', '.join(slower) or 'none'}"
    )
    write_json(options.json, described, {"rows": rows})
    return 1 if slower else 0


def copy_workspace(source: Path, folder: Path, target: str, policy: str | None) -> None:
    """Copy declarations and committed records, with the fastest of ours and the library's for a target."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)
        elif (source / name).is_file():
            shutil.copy(source / name, folder / name)
    text, head = (folder / "workloads.toml").read_text(encoding="utf-8"), f"[target.{target}]\n"
    text = text.replace(head, f'{head}dispatch = "fastest"\n')
    if policy:
        text = text.replace('\npolicy = "auto"', "").replace("[defaults]\n", f'[defaults]\npolicy = ["auto", {policy}]\n')
    (folder / "workloads.toml").write_text(text, encoding="utf-8")


def _rows(folder: Path, patterns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Build entries and yield the row of each."""
    workspace = open_workspace(folder)
    run_build(workspace, patterns, Options(), lambda _: None)
    chosen = {workload.entry for workload in select(workspace.declaration.workloads, patterns)}
    yield from (row_of(entry) for entry in make_plan(workspace).entries if entry.entry in chosen)


def row_of(entry: EntryPlan) -> dict[str, Any]:
    """Return an entry's fastest kernel beside the library's and ours, each as far as there is one."""
    if entry.tuned is None:
        return {"entry": entry.entry, "winner": "none"}
    timed = [trial for trial in entry.tuned.trials if trial.samples]
    library, own = ([trial for trial in timed if is_library(trial) == kind] for kind in (True, False))
    winner = timed[0]
    row: dict[str, Any] = {"entry": entry.entry, "winner": str(winner.candidate.template), "fastest us": _us(winner)}
    if own:
        row["own us"] = min(map(_us, own))
    if library:
        best = min(library, key=_us)
        row |= {"library us": _us(best), "fastest / library": _us(winner) / _us(best)}
        # Turn by turn, as the race judges: what changed in between met both.
        row |= {} if winner in finalists([winner, best]) else {"beyond noise": "slower"}
    failures = sorted({trial.failure for trial in entry.tuned.trials if is_library(trial) and trial.failure})
    return {**row, **({"library refused": failures[0][:80]} if failures and not library else {})}


def is_library(trial: Trial) -> bool:
    return trial.candidate.template.startswith("library_")


def _us(trial: Trial) -> float:
    return median(trial.samples) * 1e6


if __name__ == "__main__":
    sys.exit(main())
