"""Owns the comparison of tuned kernels on a GPU with TVM's default schedules, torch and Triton, and its goals.

Knows nothing of how kernels are timed or what a rival runs: it reads the entries of workloads.toml for a target, tunes
them, compares each, and prints the results.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench_support.gpu.comparison import Row, add_bytes_per_s, gpu_described
from bench_support.gpu.figures import bandwidth, dlight_ratio, figures, protocol_ratio, search_space_figure, torch_ratio, tuning_figures
from bench_support.gpu.kernels import Entry
from bench_support.gpu.run import Settings, comparisons, tuned_rows
from bench_support.own_process import OwnProcess
from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.timing import PROTOCOLS

ROOT = Path(__file__).resolve().parents[1]
TITLE = (
    "Kernels (us, torch, dlight, triton: back to back, in turns; their time by ours. cool, steady, isolated, chained: torch's time by ours "
    "under these protocols. first: the model's first choice, as a share of the best)"
)
SAID = ("steady", "isolated")
"""Protocols of which an entry's line has the times."""
QUICK_TOP_K = 4
QUICK_ROUNDS = 5


def entries_of(root: Path, target: str, patterns: Sequence[str], policy: str = "") -> list[Entry]:
    """Return the entries of a workspace for a target that the patterns select, tuned by another policy if one is named."""
    from kerneldecl.declare.document import declare
    from kerneldecl.declare.select import select
    from kerneldecl.plugins.load import load_arch

    declaration = declare(root)
    arch = load_arch(root, dict(declaration.targets)[target])
    chosen = select(declaration.workloads, [f"{pattern}@{target}" for pattern in patterns])
    return [Entry(root, replace(workload, policy=policy or workload.policy), arch) for workload in chosen]


def table_row(row: Row) -> Row:
    """Return the table's columns for a row: ratios are theirs by ours, over 1 means that ours is faster."""
    verified = sum("secs" in each for each in row["candidates"])
    if "rivals" not in row:
        return {"entry": row["entry"], "verified": f"{verified} of {len(row['candidates'])}", "failure": row["failure"]}
    is_gemm = row["rule"] in {"matmul", "matmul_gated", "conv2d"}
    rate = row["flops"] / row["secs"] / 1e12 if is_gemm else bandwidth(row) / 1e9
    triton = row["rivals"].get("triton")
    return {
        "entry": row["entry"],
        "us": row["secs"] * 1e6,
        "rate": rate,
        "unit": "TFLOP/s" if is_gemm else "GB/s",
        "torch": _rounded(torch_ratio(row)),
        **{protocol: _rounded(protocol_ratio(row, protocol)) for protocol in PROTOCOLS["cuda"]},
        "isolated us": row["protocols"]["isolated"]["best"] * 1e6,
        "dlight": _rounded(dlight_ratio(row)),
        "dlight steady": _rounded(protocol_ratio(row, "steady", "dlight")),
        "triton": _rounded(triton and triton["ratio"]),
        "first": _rounded(row["first_share"]),
        "rank": row["best"],
        "verified": f"{verified} of {len(row['candidates'])}",
        "candidate": row["label"],
    }


def _rounded(value: float | None) -> float | None:
    return value if value is None else round(value, 3)


def say(row: Row, seconds: float) -> None:
    """Print an entry's result, with every failure."""
    shown = table_row(row)
    times = "; ".join(_by_protocol(row, protocol) for protocol in SAID if "protocols" in row)
    result = shown.get("failure") or f"{shown['us']:.5g} us, {shown['rate']:.4g} {shown['unit']}; {times}; {row['label']}"
    print(f"[{seconds:.0f} s] {row['entry']}: {result}", flush=True)
    failures = [f"{each['label']}: {each['failure']}" for each in row["candidates"] if "failure" in each]
    failures += [f"{name}: {why}" for name, why in row.get("rival_failures", {}).items()]
    for failure in failures:
        print(f"    {failure}", flush=True)
    rivals = (f"{name} {rival['secs'] * 1e6:.5g} us" for name, rival in row.get("rivals", {}).items())
    print(f"    {', '.join(rivals)}", flush=True)
    phases = (f"{name} {secs:.1f} s" for name, secs in row.get("phase_secs", {}).items())
    print(f"    took: {', '.join(phases)}", flush=True)


def _by_protocol(row: Row, protocol: str) -> str:
    """Return a kernel's time under a protocol, and the ratio of torch's best to it."""
    ratio = protocol_ratio(row, protocol)
    return f"{protocol} {row['protocols'][protocol]['best'] * 1e6:.5g} us" + (f", torch / ours {ratio:.3f}" if ratio else "")


def clocks() -> str:
    """Return the GPU's clocks, power and throttling at this moment, as nvidia-smi reports them."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active,driver_version"
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time tuned kernels on this GPU beside TVM's default schedules, torch and Triton.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, as `kerneldecl build` takes them; default: all")
    parser.add_argument("--target", default="h200", help="target of workloads.toml that this GPU is")
    parser.add_argument("--policy", default="", help="the one policy to ask, such as gpu_matmul_tc, instead of each entry's own")
    parser.add_argument("--top-k", type=int, default=20, help="candidates that are built and timed for each entry")
    parser.add_argument(
        "--search-space", type=int, metavar="N", help="compare the best of --top-k candidates with the best of N; no rivals"
    )
    parser.add_argument("--rounds", type=int, default=15, help="replays of each contender in the final comparison")
    parser.add_argument("--rivals", default="torch,dlight,triton", help="what to compare with")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TOP_K} candidates and {QUICK_ROUNDS} replays each")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspace, which a later run reuses; default: a temporary folder")
    given = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("this needs torch, built for CUDA: it is a rival, and its graphs and events are used for timing")
    entries = entries_of(ROOT, given.target, given.only or ["*"], given.policy)
    top_k = QUICK_TOP_K if given.quick else given.top_k
    settings = Settings(top_k, QUICK_ROUNDS if given.quick else given.rounds, given.jobs, frozenset(given.rivals.split(",")))
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        most = given.search_space
        found = searched(entries, settings, most, Path(folder)) if most else compared(entries, settings, Path(folder), _judged)
    show("Figures", found["figures"])
    write_json(given.json, found.pop("machine"), {"asked": vars(settings) | {"rivals": given.rivals}, **found})


Judge = Callable[[Sequence[Row], float, Mapping[str, float]], list[dict[str, Any]]]
"""Makes figures of rows, of the bandwidth of torch's addition, and of the seconds of tuning by entry."""


def compare_workspace(root: Path, description: str, judge: Judge, top_k: int) -> None:
    """Be the command that compares the entries of a folder of the benchmarks with torch, as a rule with `top_k` candidates each."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, rule:NAME or tag:NAME, as in `kerneldecl build`")
    parser.add_argument("--top-k", type=int, default=top_k, help="candidates that are built and timed for each entry")
    parser.add_argument("--rounds", type=int, default=15, help="replays of each contender in the final comparison")
    parser.add_argument("--rivals", default="torch", help="what to compare with: torch, triton, dlight")
    parser.add_argument("--secs", type=float, default=math.inf, help="begin no comparison later than this after the start")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspace, which a later run reuses; default: a temporary folder")
    given = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("this needs torch, built for CUDA: it is a rival, and its graphs and events are used for timing")
    entries = entries_of(root, "h200", given.only or ["*"])
    settings = Settings(given.top_k, given.rounds, given.jobs, frozenset(given.rivals.split(",")))
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix=f"{root.name}-") as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = compared(entries, settings, Path(folder), judge, given.secs)
    show("Figures", found["figures"])
    write_json(given.json, found.pop("machine"), {"asked": vars(settings) | {"rivals": given.rivals}, **found})


def compared(entries: Sequence[Entry], settings: Settings, folder: Path, judge: Judge, limit_secs: float = math.inf) -> dict[str, Any]:
    """Tune all entries, compare those that a limit leaves time for, print their rows; return the content of the JSON."""
    start = time.perf_counter()
    gpu = OwnProcess()
    described = _described(entries[0], gpu)
    peak = gpu.ask(add_bytes_per_s, entries[0])
    print(f"torch's addition: {peak / 1e9:.0f} GB/s; {len(entries)} entries, {settings.top_k} candidates each", flush=True)
    rows, found, tuning_secs = tuned_rows(entries, settings, folder)
    print(f"tuned in {time.perf_counter() - start:.0f} s", flush=True)
    for name, result in comparisons(entries, found, settings, gpu, folder):
        row = next(row for row in rows if row["entry"] == name)
        row.update(result)
        say(row, time.perf_counter() - start)
        if time.perf_counter() - start > limit_secs:
            break
    gpu.close()
    rows = [row for row in rows if "rivals" in row or "failure" in row]
    print(f"{len(rows)} of {len(entries)} entries, all in {time.perf_counter() - start:.0f} s; {clocks()}")
    show(TITLE, [table_row(row) for row in rows])
    verdicts = judge(rows, peak, tuning_secs)
    return {"machine": described, "add_bytes_per_s": peak, "tuning_secs": tuning_secs, "figures": verdicts, "entries": rows}


def _judged(rows: Sequence[Row], add_bytes_per_s: float, tuning_secs: Mapping[str, float]) -> list[dict[str, Any]]:
    return [*figures(rows, add_bytes_per_s), *tuning_figures(tuning_secs, rows)]


def searched(entries: Sequence[Entry], settings: Settings, most: int, folder: Path) -> dict[str, Any]:
    """Tune all entries with the usual number of candidates and with `most`, and compare both winners."""
    gpu = OwnProcess()
    described = _described(entries[0], gpu)
    gpu.close()
    _, few, _ = tuned_rows(entries, settings, folder / "few")
    rows, many, tuning_secs = tuned_rows(entries, replace(settings, top_k=most), folder / "many")
    found = {name: replace(many[name], first=few[name].winner) for name in few.keys() & many.keys()}
    for name, result in comparisons(entries, found, replace(settings, rivals=frozenset()), gpu, folder):
        next(row for row in rows if row["entry"] == name).update(result)
    gpu.close()
    show(f"Best of {most} candidates (first: the best of {settings.top_k}, as a share of it)", [table_row(row) for row in rows])
    return {"machine": described, "tuning_secs": tuning_secs, "figures": [search_space_figure(rows)], "entries": rows}


def _described(entry: Entry, gpu: OwnProcess) -> Row:
    """Return and print the machine's description; exit if its GPU is not the entry's."""
    try:
        described: Row = machine() | gpu.ask(gpu_described)
    except RuntimeError as error:
        sys.exit(f"no GPU that torch can use: {error}")
    if described["gpu"] != entry.arch.model:
        sentence = f"target {entry.workload.target} is {entry.arch.model}, this is {described['gpu']}"
        sys.exit(f"{sentence}: declare a target for it in workloads.toml and name it by --target")
    show_machine(described)
    print(f"{described['gpu']}, torch {described['torch']}, cuDNN {described['cudnn']}, TVM {described['tvm']}; {clocks()}", flush=True)
    return described


if __name__ == "__main__":
    main()
