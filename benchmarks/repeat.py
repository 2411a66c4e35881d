"""Owns the question whether a tuning can be repeated: the same entries are tuned twice, into two stores, and the winners compared.

Tunings of half an hour are made once: `--again` takes the workspace that another benchmark has tuned as the first.
Knows nothing of how kernels are built or timed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_support.kept_rows import KeptRows
from bench_support.random_entries import DRAWN, drawn, toml_of
from bench_support.repeats import NEAR, OTHER, changes, quantiles, summary, verdict
from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.api import run_build
from kerneldecl.declare.document import Declaration, declare
from kerneldecl.declare.select import select
from kerneldecl.planning.workspace import FILE, workspace_of
from kerneldecl.plugins.load import load_arch
from kerneldecl.stages.session import Options
from kerneldecl.store.local import LocalStore
from kerneldecl.store.results import TuneResult

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
COMPILED = ("build", "cubin")
"""Kinds of records that the second tuning gets from the first: what schedules compile to is the same."""


def declaration_of(given: argparse.Namespace, folder: Path) -> Declaration:
    """Return a declaration of this repository's entries for the arch, those that --only selects, and of the random ones."""
    folder.mkdir(parents=True, exist_ok=True)
    operators = drawn(given.seed, given.random, tuple(DRAWN), load_arch(folder, given.arch).kind)
    (folder / FILE).write_text(toml_of(operators, given.arch, given.top_k), encoding="utf-8")
    random, own = declare(folder), declare(ROOT)
    targets = {target for target, arch in own.targets if arch == given.arch}
    chosen = [replace(workload, target=given.arch) for workload in own.workloads if workload.target in targets]
    every = select((*chosen, *random.workloads), given.only or ())
    last = given.first + given.count if given.count else None
    return replace(random, workloads=every[given.first : last], digest="")  # the declaration differs from the file


def tuned(folder: Path, declaration: Declaration, jobs: int) -> tuple[dict[str, TuneResult], dict[str, str], float]:
    """Tune in a workspace of its own; return results by entry, failures, and the seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    if declaration.path != folder / FILE:
        (folder / FILE).write_bytes(declaration.path.read_bytes())
    workspace = workspace_of(folder, replace(declaration, path=folder / FILE))
    begin = time.perf_counter()
    done = run_build(workspace, (), Options(require_measured=True, jobs=jobs), lambda _: None)
    secs = time.perf_counter() - begin
    return {entry.workload.name: entry.tuned for entry in done.plan.entries if entry.tuned}, done.failures, secs


def _give_compiled(source: Path, target: Path) -> None:
    """Copy what schedules compile to from one workspace to another, and no measurement."""
    for kind in COMPILED:
        if (folder := source / "cache" / "local" / kind).exists():
            shutil.copytree(folder, target / "cache" / "local" / kind)
    if (blobs := source / "cache" / "blob").exists():
        shutil.copytree(blobs, target / "cache" / "blob")


def compared(given: argparse.Namespace, folder: Path, kept: KeptRows) -> None:
    """Tune twice what is not kept yet, or once more what a workspace has tuned, and keep a row of each entry."""
    earlier = given.again.resolve() if given.again else folder / "first"
    declaration = declare(earlier) if given.again else declaration_of(given, folder / "all")
    chosen = select(declaration.workloads, given.only or ())
    declaration = replace(declaration, workloads=tuple(each for each in chosen if each.name not in kept.rows))
    if not declaration.workloads:
        return
    first, failed, first_secs = tuned(earlier, declaration, given.jobs)
    _give_compiled(earlier, folder / "second")
    second, failed_then, second_secs = tuned(folder / "second", declaration, given.jobs)
    count = len(declaration.workloads)
    print(f"{count} entries tuned twice: {first_secs / count:.2f} s each, then {second_secs / count:.2f} s (compiled before)", flush=True)
    kept.add_tuning(count, first_secs)
    for workload in declaration.workloads:
        name = workload.name
        if name in first and name in second:
            ours, theirs = first[name].trials, second[name].trials
            kept.add({"entry": name, "rule": workload.rule, **verdict(ours, theirs), "changes": changes(ours, theirs)})
        else:
            reason = {**failed, **failed_then}.get(workload.entry, "not tuned")
            print(f"{name}: {reason}", flush=True)


def of_stores(folders: Sequence[Path]) -> list[Row]:
    """Return a row of each tuning that two stores have, such as those of two machines: of one computation and the same arch."""
    first, second = (_tunings(folder) for folder in folders)
    both = [(first[symbol], second[symbol]) for symbol in sorted(first.keys() & second.keys())]
    print(f"{len(first)} and {len(second)} tunings, {len(both)} of them of the same computations", flush=True)
    gpus = [" and ".join(each.measured_on.get("gpu", "unknown") for each in pair) for pair in both]
    return [
        {"entry": one.symbol, "gpus": which, **verdict(one.trials, other.trials), "changes": changes(one.trials, other.trials)}
        for (one, other), which in zip(both, gpus, strict=True)
    ]


def _tunings(folder: Path) -> dict[str, TuneResult]:
    found = (TuneResult(record.key, record.result) for record in LocalStore(folder.resolve()).all("tune", is_local=False))
    return {each.symbol: each for each in found}


def _shown(rows: Sequence[Row]) -> list[Row]:
    others = [row for row in rows if row["verdict"] == OTHER]
    return [
        {
            "entry": row["entry"],
            "us": row["secs"][0] * 1e6,
            "then us": row["secs"][1] * 1e6,
            "apart": row["apart"],
            "first": row["first"],
            "second": row["second"],
        }
        for row in others
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the same entries twice, and compare the winners.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, as `kerneldecl build` takes them; default: all")
    parser.add_argument("--random", type=int, default=60, help="operators drawn at random that follow this repository's entries")
    parser.add_argument("--seed", type=int, default=1, help="what the random operators follow from")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="number of the first entry")
    parser.add_argument("--count", type=int, default=0, help="entries; default: all")
    parser.add_argument("--arch", default="h200", help="an arch of this machine's GPU, or host for its CPU")
    parser.add_argument("--top-k", type=int, default=20, help="candidates of random operators that are built and timed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="keep rows here, and count those of earlier runs as well")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="tune once more what this workspace has tuned")
    parser.add_argument("--stores", type=Path, nargs=2, metavar="CACHE", help="tune nothing: compare the records of two folders cache/")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspaces, which must be new; default: a temporary folder")
    given = parser.parse_args()
    asked = {name: vars(given)[name] for name in ("seed", "arch", "top_k")}
    try:
        kept = KeptRows(given.state, asked)
    except ValueError as error:
        sys.exit(str(error))
    about = machine()
    show_machine(about)
    if given.stores:
        rows = of_stores(given.stores)
    else:
        with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="repeat-") as folder:
            compared(given, Path(folder).resolve(), kept)
        rows = list(kept.rows.values())
    total = summary(rows)
    show("Two tunings of the same entries", [total])
    changed = quantiles([change for row in rows for change in row.get("changes", ())])
    show(f"Change of the ratio of two candidates, both within {NEAR:.0%} of the fastest, that so many pairs do not exceed", [changed])
    if others := _shown(rows):
        show("Other winners (apart: how much slower the one is than the other, in the race that saw less)", others)
    write_json(given.json, about, {"asked": asked, "summary": total, "changes": changed, "entries": rows})


if __name__ == "__main__":
    main()
