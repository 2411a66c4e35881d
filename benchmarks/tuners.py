"""Owns the figures of tuners beside each other: what each reaches of the best that is known, and what it costs.

Knows nothing of how policies search: `kerneldecl.api.compare_policies` has them search, each in a store of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench_support.gpu.figures import figure
from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.compare.searches import Asked, Searched, by_entry, to_json

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "tuners"
Row = dict[str, Any]
OURS, TVM, YARDSTICK, COLD, WARM = "auto", "metaschedule", "yardstick", "cost_model 64", "warm 16"
WARM_POLICY = [{"name": "nearest", "count": 4}, {"name": "cost_model", "trials": 12}]
BLAS_SHARE, BLAS_SECS = 0.9, 60.0


@dataclass(frozen=True)
class Question:
    """A comparison: where its entries are declared, which policies search them, and how it is judged."""

    folder: Path
    patterns: tuple[str, ...]
    policies: Callable[[argparse.Namespace], Mapping[str, Any]]
    judge: Callable[[Sequence[Searched]], list[Row]]
    warm: frozenset[str] = frozenset()


def best_of(searches: Iterable[Searched]) -> float:
    """Return the time of the fastest winner of an entry; 0 where there is none."""
    return min((each.run_secs for each in searches if each.run_secs), default=0.0)


def shares(searches: Sequence[Searched], policy: str, secs: Callable[[Searched], float] = lambda each: each.run_secs) -> Row:
    """Return, by entry, the fastest winner's time by that of one policy; None where it has none."""
    found: Row = {}
    for entry, several in by_entry(searches).items():
        own = next((secs(each) for each in several if each.policy == policy), 0.0)
        found[entry] = best_of(several) / own if own else None
    return found


def quotients(searches: Sequence[Searched], one: str, other: str, value: Callable[[Searched], float]) -> Row:
    """Return, by entry, a value of one policy's search by that of another's; None where either found nothing."""
    found: Row = {}
    for entry, several in by_entry(searches).items():
        values = {each.policy: value(each) for each in several if each.run_secs}
        found[entry] = values[one] / values[other] if one in values and other in values else None
    return found


def beside_metaschedule(searches: Sequence[Searched]) -> list[Row]:
    times = quotients(searches, TVM, OURS, lambda each: each.run_secs)
    costs = quotients(searches, OURS, TVM, lambda each: each.search_secs)
    return [
        figure("MetaSchedule's time by ours: slowest", 1.0, min, times),
        figure("our search by MetaSchedule's: longest", 1 / 20, max, costs, is_most=True),
    ]


def beside_exhaustive(searches: Sequence[Searched]) -> list[Row]:
    best, first = shares(searches, OURS), shares(searches, OURS, lambda each: each.first_secs)
    return [
        figure("auto's best of 20, of the best known: geometric mean", 0.98, geometric_mean, best),
        figure("auto's best of 20, of the best known: least", 0.95, min, best),
        figure("first choice unmeasured, of the best known: geometric mean", 0.96, geometric_mean, first),
    ]


def beside_learned(searches: Sequence[Searched]) -> list[Row]:
    return [
        figure("cost_model after 64, of the best known: geometric mean", 0.98, geometric_mean, shares(searches, COLD)),
        figure("warm after 16, of the best known: geometric mean", 0.97, geometric_mean, shares(searches, WARM)),
    ]


def yardstick(given: argparse.Namespace) -> Any:
    """Return the policy that others are measured by: all candidates where the space has no more, else as many drawn."""
    return {"name": "random", "trials": given.count, "seed": 0}


def metaschedule(given: argparse.Namespace) -> Any:
    return {"name": "metaschedule", "trials": given.trials, "seed": 1, **({"seconds": given.seconds} if given.seconds else {})}


QUESTIONS: Mapping[str, Question] = {
    "metaschedule": Question(ROOT, ("tag:published",), lambda given: {OURS: "auto", TVM: metaschedule(given)}, beside_metaschedule),
    "exhaustive": Question(TABLE, ("tag:all_rules",), lambda given: {OURS: "auto", YARDSTICK: yardstick(given)}, beside_exhaustive),
    "cost_model": Question(
        TABLE,
        ("tag:all_rules",),
        lambda given: {
            OURS: "auto",
            YARDSTICK: yardstick(given),
            COLD: {"name": "cost_model", "trials": 64},
            WARM: WARM_POLICY,
        },
        lambda searches: [*beside_exhaustive(searches), *beside_learned(searches)],
        frozenset({WARM}),
    ),
}


def searched(question: Question, given: argparse.Namespace, root: Path) -> Iterator[Searched]:
    """Have the policies search the entries of the target; yield what came of it."""
    from kerneldecl.api import compare_policies, frozen_workspace
    from kerneldecl.tuning.events import Event, Finished, Note

    def say(event: Event) -> None:
        if isinstance(event, Finished | Note):
            print(f"  {event.text if isinstance(event, Note) else f'{event.entry}: {event.text[:150]}'}", file=sys.stderr, flush=True)

    (root / "workloads.toml").write_bytes((question.folder / "workloads.toml").read_bytes())
    if not (root / "cache").exists():
        (root / "cache").mkdir()
        (root / "cache" / "record").symlink_to(ROOT / "cache" / "record")
    patterns = [f"{pattern}@{given.target}" for pattern in given.only] if given.only else list(question.patterns)
    with frozen_workspace(root) as workspace:
        declaration = workspace.declaration
        kept = tuple(each for each in declaration.workloads if each.target == given.target)
        mine = replace(workspace, declaration=replace(declaration, workloads=kept))
        yield from compare_policies(mine, patterns, Asked(question.policies(given), warm=question.warm), jobs=given.jobs, report=say)


def compared(question: Question, given: argparse.Namespace, root: Path) -> Row:
    """Print each search as it ends, until time is over, and the figures; return the content of the JSON."""
    begun, found = time.perf_counter(), list[Searched]()
    try:
        for each in searched(question, given, root):
            found.append(each)
            print(line(each), flush=True)
            is_whole = len(found) % len(question.policies(given)) == 0
            if given.limit and is_whole and time.perf_counter() - begun > given.limit:
                print(f"no further entry after {given.limit:g} s", flush=True)
                break
    finally:
        rows = question.judge(found)
        show("Figures", rows)
    return {"figures": rows, **to_json(found, Asked(question.policies(given), warm=question.warm))}


def line(each: Searched) -> str:
    """Return one search in a line."""
    if not each.run_secs:
        return f"{each.entry} {each.policy}: {each.failure}"
    first = f", first {each.first_secs * 1e6:.4g} us" if each.first_secs else ""
    cost = f"{each.search_secs:.3g} s ({each.compile_secs:.3g} compile, {each.measure_secs:.3g} measure, {each.ask_secs:.3g} ask)"
    return (
        f"{each.entry} {each.policy}: {each.run_secs * 1e6:.4g} us{first}, {each.right} of {each.tried} right, {cost}, {each.winner[:150]}"
    )


def beside_triton(given: argparse.Namespace, root: Path) -> Row:
    """Compare with Triton's autotuned GEMM of thirty configurations and its softmax; return the content of the JSON."""
    from bench_support.gpu.run import Settings
    from gpu import compared as compared_on_gpu
    from gpu import entries_of

    if find_spec("triton") is None:
        sys.exit("this needs Triton, which comes with torch built for CUDA")

    def judged(rows: Sequence[Row], add_bytes_per_s: float, tuning_secs: Mapping[str, float]) -> list[Row]:
        del add_bytes_per_s, tuning_secs
        ratios = {row["entry"]: row.get("rivals", {}).get("triton30", {}).get("ratio") for row in rows}
        return [figure("Triton's time by ours: slowest", 1.0, min, {name: ratio for name, ratio in ratios.items() if ratio})]

    patterns = given.only or ["matmul_float16[*1024*]", "matmul_float16[*8192*]", "softmax", "softmax_128x10"]
    entries = entries_of(ROOT, given.target, patterns)
    found = compared_on_gpu(entries, Settings(given.top_k, 9, given.jobs, frozenset({"triton30"})), root, judged)
    show("Figures", found["figures"])
    return found


def beside_blas(given: argparse.Namespace, root: Path) -> Row:
    """Time MetaSchedule's GEMM on this CPU beside NumPy's, in turns; return the content of the JSON."""
    threads = str(os.cpu_count() or 1)
    os.environ.update(OPENBLAS_NUM_THREADS=threads, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, TVM_NUM_THREADS=threads)
    from host import blas, measured

    from kerneldecl.api import frozen_workspace, load, run_build
    from kerneldecl.stages.session import Options

    (root / "workloads.toml").write_bytes((TABLE / "workloads.toml").read_bytes())
    policy = f'{{ name = "metaschedule", trials = {given.trials}, seed = 1 }}'
    begun = time.perf_counter()
    with frozen_workspace(root, policy) as opened:
        own = tuple(each for each in opened.declaration.workloads if "blas" in each.tags)
        workspace = replace(opened, declaration=replace(opened.declaration, workloads=own))
        done = run_build(workspace, (), Options(jobs=given.jobs), lambda _: None)
    tuning_secs = time.perf_counter() - begun
    artifact = load(done.artifacts["host"])
    row = measured(artifact, artifact.manifest["entries"][0], root, 21)
    show(f"MetaSchedule, {given.trials} trials in {tuning_secs:.0f} s, beside {blas()}; {threads} threads each", [row])
    rows = [
        figure("its kernel, of OpenBLAS's speed", BLAS_SHARE, max, {"blas": row["of bests"]}),
        figure("its search, s", BLAS_SECS, max, {"blas": tuning_secs}, is_most=True),
    ]
    show("Figures", rows)
    return {"figures": rows, "tuning_secs": tuning_secs, "entries": [row]}


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description="Compare tuners: what each reaches, and what it costs.")
    parser.add_argument("what", choices=(*QUESTIONS, "triton", "blas"), help="the figure")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, without their target")
    parser.add_argument("--target", default="h200", help="h200, or host for this CPU")
    parser.add_argument("--trials", type=int, default=200, help="of MetaSchedule")
    parser.add_argument("--seconds", type=float, help="most seconds of MetaSchedule's search of an entry")
    parser.add_argument("--count", type=int, default=500, help="configurations of the yardstick: all of a space that has no more")
    parser.add_argument("--top-k", type=int, default=20, help="our candidates beside Triton")
    parser.add_argument("--limit", type=float, help="seconds after which no further entry begins")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspace; default: a temporary folder")
    return parser.parse_args()


def main() -> None:
    given, described = arguments(), machine()
    show_machine(described)
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="tuners-") as folder:
        root = Path(folder).resolve()
        root.mkdir(parents=True, exist_ok=True)
        if given.what in QUESTIONS:
            found = compared(QUESTIONS[given.what], given, root)
        else:
            found = {"triton": beside_triton, "blas": beside_blas}[given.what](given, root)
    described = found.pop("machine", described)
    write_json(given.json, described, {"asked_of": given.what, **found})


if __name__ == "__main__":
    main()
