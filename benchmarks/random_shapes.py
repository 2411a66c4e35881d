"""Owns the comparison with torch on operators that nobody chose: drawn at random for every rule, built, verified, timed, summed up.

Knows nothing of how operators are drawn, kernels are built or timed. What fails is a row with its reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench_support.distribution import by_rule
from bench_support.gpu.comparison import described, gpu_described
from bench_support.gpu.kernels import Built, Entry, label_of
from bench_support.kept_rows import KeptRows
from bench_support.own_process import OwnProcess
from bench_support.random_entries import DRAWN, drawn, toml_of
from bench_support.random_rows import OURS, compared, why
from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.hardware.host import detect
from kerneldecl.model import Candidate
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.workspace import FILE
from kerneldecl.plugins.load import load_arch

Row = dict[str, Any]
PROTOCOLS = ("steady", "isolated")
WORST = 10
"""Entries of which the reason is printed."""
LIMIT_SECS = 60.0
"""Seconds after which an entry is given up: a kernel hangs."""


@dataclass(frozen=True)
class Comparing:
    """Where kernels are compared, and what that may take."""

    gpu: OwnProcess
    end: float
    """When none begins any more, by `time.perf_counter`."""
    rounds: int
    """Replays of each contender in each protocol."""


@dataclass(frozen=True)
class Kernel:
    """An entry's tuned kernel, and what its record says of the candidates."""

    built: Built
    policy: str
    winner: Candidate
    first_share: float
    """Speed of the model's first choice as a share of the best's, in the race."""


@dataclass(frozen=True)
class Tuning:
    """What a build of the workspace took."""

    entries: int
    """Entries that it tuned: others were up to date."""
    secs: float


def tuned(root: Path, arch: str, jobs: int) -> tuple[dict[str, Kernel], dict[str, str], Tuning]:
    """Build the workspace; return kernels by entry, why others failed, and what it took."""
    from kerneldecl.api import run_build
    from kerneldecl.planning.workspace import open_workspace
    from kerneldecl.stages.session import Options
    from kerneldecl.tuning.events import Event, Finished

    events: list[Event] = []
    start = time.perf_counter()
    done = run_build(open_workspace(root), (), Options(require_measured=True, jobs=jobs), events.append)
    secs = time.perf_counter() - start
    took = Tuning(sum(isinstance(event, Finished) and event.kind == "tune" for event in events), secs)
    folder = done.artifacts.get(arch)
    failures = {name.rpartition("@")[0]: reason for name, reason in done.failures.items()}
    if folder is None:
        return {}, failures, took
    from kerneldecl.artifact.manifest import read_manifest

    manifest = read_manifest(folder)
    assert not isinstance(manifest, str), manifest
    library, symbols = str(folder / manifest["library"]), {entry["name"]: entry["symbol"] for entry in manifest["entries"]}
    entries = {entry.workload.name: entry for entry in done.plan.entries if entry.tuned}
    found = {name: _kernel(entries[name], library, symbol) for name, symbol in symbols.items()}
    return found, {**manifest["missing"], **failures}, took


def _kernel(entry: EntryPlan, library: str, symbol: str) -> Kernel:
    from kerneldecl.serial import trial_from_json
    from kerneldecl.tuning.model_rank import model_rank

    assert entry.tuned is not None, "it has a symbol in the artifact"
    result = entry.tuned.json
    winner = Candidate.from_json(result["winner"])
    trials = [trial for trial in map(trial_from_json, result["trials"]) if trial.samples]
    secs = {trial.candidate: trial.run_secs for trial in trials}
    ranks = (model_rank(group, secs) for group in entry.groups if group.policy == result["policy"])
    share = next((rank.share(1) for rank in ranks if rank), 1.0)
    return Kernel(Built(label_of(winner), library, symbol), result["policy"], winner, share)


def compare(entries: Sequence[Entry], kernels: Mapping[str, Kernel], failures: Mapping[str, str], kept: KeptRows, how: Comparing) -> None:
    """Compare entry by entry, as long as there is time; say and keep each row."""
    for entry in entries:
        if time.perf_counter() > how.end:
            print(f"no time for {entry.name} and what follows: run again with the same --state", flush=True)
            break
        row = described(entry)
        kernel = kernels.get(entry.name)
        if kernel is None:
            row["failure"] = failures.get(entry.name, "not built")
        else:
            row |= {"label": kernel.built.label, "policy": kernel.policy, "first_share": kernel.first_share}
            row["winner"] = kernel.winner.to_json()
            try:
                row |= how.gpu.ask(compared, entry, kernel.built, how.rounds, limit_secs=LIMIT_SECS)
            except RuntimeError as error:
                row["failure"] = str(error)
        kept.add(row)
        _say(row)


def _say(row: Row) -> None:
    shown = "; ".join(
        f"{protocol} {row['secs'][protocol][OURS] * 1e6:.5g} us, torch / ours {row['ratio'][protocol] or float('nan'):.3f}"
        for protocol in PROTOCOLS
        if "secs" in row
    )
    print(f"{row['entry']}: {row.get('failure') or shown}", flush=True)
    for name, reason in row.get("rival_failures", {}).items():
        print(f"    torch's {name}: {reason}", flush=True)


def ratio_of(row: Mapping[str, Any], protocol: str) -> float | None:
    """Return torch's best time by ours; None where either failed."""
    found: float | None = row.get("ratio", {}).get(protocol)
    return found


def worst(rows: Sequence[Row], entries: Sequence[Entry], gpu: OwnProcess) -> list[Row]:
    """Return the rows with the least ratio in either protocol, with what the time model says of their kernels."""

    def least(row: Row) -> float:
        return min(ratio_of(row, protocol) or float("inf") for protocol in PROTOCOLS)

    known = sorted((row for row in rows if least(row) < float("inf")), key=least)[:WORST]
    by_name = {entry.name: entry for entry in entries}
    found = []
    for row in known:
        try:
            winner = Candidate.from_json(row["winner"])
            reason = gpu.ask(why, by_name[row["entry"]], row["policy"], winner, limit_secs=LIMIT_SECS)
        except RuntimeError as error:
            reason = f"unknown: {error}"
        row["reason"] = reason
        us = {f"{protocol} us": row["secs"][protocol][OURS] * 1e6 for protocol in PROTOCOLS}
        columns = {protocol: round(ratio_of(row, protocol) or 0.0, 3) for protocol in PROTOCOLS}
        found.append({"entry": row["entry"], **us, **columns, "first": round(row["first_share"], 3), "reason": reason})
    return found


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description="Time kernels of operators drawn at random beside torch's best form of each.")
    parser.add_argument("--seed", type=int, default=1, help="what the operators follow from")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="number of the first operator; default: 0")
    parser.add_argument("--count", type=int, default=60, help="operators")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="keep rows here, and sum up those of earlier runs as well")
    parser.add_argument("--secs", type=float, default=float("inf"), help="begin no comparison later than this after the start")
    parser.add_argument("--rules", default=",".join(DRAWN), metavar="RULE,…", help=f"rules that are drawn; default: {', '.join(DRAWN)}")
    parser.add_argument("--entries", type=Path, metavar="FILE", help="compare what this workloads.toml declares for --arch instead")
    parser.add_argument("--arch", default="h200", help="an arch of this machine's GPU, or host for its CPU")
    parser.add_argument("--top-k", type=int, default=20, help="candidates that are built and timed for each entry")
    parser.add_argument("--rounds", type=int, default=9, help="replays of each contender in each protocol")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspace, which a later run reuses; default: a temporary folder")
    given = parser.parse_args()
    given.rules = given.rules.split(",")
    if unknown := [rule for rule in given.rules if rule not in DRAWN]:
        parser.error(f"--rules: {', '.join(unknown)} is drawn by nothing; there are {', '.join(DRAWN)}")
    return given


def main() -> None:
    given = arguments()
    if find_spec("torch") is None:
        sys.exit("this needs torch: it is the rival")
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="random-") as folder:
        found = ran(given, Path(folder).resolve())
    write_json(given.json, found.pop("machine"), found)


def ran(given: argparse.Namespace, root: Path) -> Row:
    """Draw, build, compare and print; return the content of the JSON."""
    start = time.perf_counter()
    threads = str(detect().the_cpu.cores)
    os.environ.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, TVM_NUM_THREADS=threads)  # before torch and TVM start threads
    asked = {name: vars(given)[name] for name in ("seed", "rules", "arch", "top_k", "rounds")} | {"entries": str(given.entries or "")}
    try:
        kept = KeptRows(given.state, asked)
    except ValueError as error:
        sys.exit(str(error))
    gpu = OwnProcess()
    about: Row = machine() | (gpu.ask(gpu_described) if load_arch(root, given.arch).gpu else {})
    show_machine(about)
    every, text = _declared(given, root / "all")
    wanted = [entry for entry in every[given.first :] if entry.name not in kept.rows]
    if wanted:
        root.mkdir(parents=True, exist_ok=True)
        (root / FILE).write_text(text({entry.name for entry in wanted}), encoding="utf-8")
        kernels, failures, took = tuned(root, given.arch, given.jobs)
        if took.entries:
            kept.add_tuning(took.entries, took.secs)
        print(f"{len(wanted)} operators built in {took.secs:.0f} s, {took.entries} of them tuned", flush=True)
        compare(wanted, kernels, failures, kept, Comparing(gpu, start + given.secs, given.rounds))
    found = summed_up(list(kept.rows.values()), every, gpu)
    gpu.close()
    count, tuning_secs = sum(count for count, _ in kept.tunings), sum(secs for _, secs in kept.tunings)
    tuning = f"{count} operators tuned in {tuning_secs:.0f} s, {tuning_secs / max(1, count):.2f} s each"
    print(f"\n{tuning}; this run took {time.perf_counter() - start:.0f} s")
    return {"machine": about, "asked": asked, "tuned": count, "tuning_secs": tuning_secs, **found}


def _declared(given: argparse.Namespace, folder: Path) -> tuple[list[Entry], Callable[[Collection[str]], str]]:
    """Return all entries up to the last that is asked for, and what makes the text of workloads.toml of some of them.

    What the user declares in a file is built whole.
    """
    from kerneldecl.declare.document import declare

    folder.mkdir(parents=True, exist_ok=True)
    arch = load_arch(folder, given.arch)
    operators = [] if given.entries else drawn(given.seed, given.first + given.count, given.rules, arch.kind)

    def text(names: Collection[str]) -> str:
        if given.entries:
            return str(given.entries.read_text(encoding="utf-8"))
        return toml_of([operator for operator in operators if operator[0] in names], given.arch, given.top_k)

    (folder / FILE).write_text(text({name for name, _, _ in operators}), encoding="utf-8")
    return [Entry(folder, workload, arch) for workload in declare(folder).workloads], text


def summed_up(rows: Sequence[Row], entries: Sequence[Entry], gpu: OwnProcess) -> Row:
    """Print what all rows come to; return it with them."""
    tables = {protocol: by_rule(rows, lambda row, protocol=protocol: ratio_of(row, protocol)) for protocol in PROTOCOLS}
    for protocol, table in tables.items():
        show(f"torch's best by ours, {protocol} (above 1: ours is faster)", table)
    first = by_rule(rows, lambda row: row.get("first_share"))
    show("First choice of the model, as a share of the best of --top-k", first)
    show(f"Worst {WORST}, and what their time model says", worst(rows, entries, gpu))
    failed = [{"entry": row["entry"], "failure": row["failure"]} for row in rows if "failure" in row]
    if failed:
        show("Failed", failed)
    return {"summary": tables, "first": first, "entries": list(rows)}


if __name__ == "__main__":
    main()
