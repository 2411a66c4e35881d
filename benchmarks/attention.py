"""Owns the comparison of attention kernels with torch's back ends and a kernel in Triton, and its goals.

Knows nothing of how kernels are built or timed: attention/workloads.toml declares the entries, a policy proposes candidates, each is
verified against torch in float64, and all contenders are timed, interleaved. On the host CPU, `bench_support.host_attention` does that.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench_support.gpu.attention_space import sample
from bench_support.gpu.comparison import ERRORS, Row, arguments_of, described, gpu_described, kernel_call
from bench_support.gpu.figures import each, figure
from bench_support.gpu.kernels import Built, Entry, build_candidate, label_of, proposals
from bench_support.host_attention import compare
from bench_support.own_process import OwnProcess
from bench_support.table import machine, show, show_machine, write_json
from gpu import clocks, entries_of

ROOT = Path(__file__).parent / "attention"
POLICIES = ("wgmma_attention", "gpu_attention_tc")
"""Policies whose candidates can be timed; each has one template, of the same name."""
RIVALS = ("torch ", "triton")
"""How the names of contenders begin that are not ours."""
DECODES = ("gpu_attention_decode", "wgmma_attention_decode")
"""Templates of one computation: a candidate of either is timed for entries of both."""
LIMIT_SECS = 60.0
"""Seconds after which an entry is given up: a kernel hangs."""
FIGURES = (
    ("prefill", "prefill of 4096 and more: slowest, of cuDNN", 1.00, min),
    ("prefill", "prefill of 4096 and more: geometric mean, of cuDNN", 1.03, geometric_mean),
    ("short", "prefill of 512 to 2048: slowest, of cuDNN", 1.10, min),
    ("head64", "heads of 64: slowest, of cuDNN", 1.05, min),
    ("head256", "heads of 256: slowest, of cuDNN", 1.00, min),
    ("encoder", "encoders and diffusion: slowest, of torch's best", 1.15, min),
)
"""Tag, name of the figure, goal for their time by ours, and how the entries are combined."""
DECODE = (("under 40 us", 1.2, 0.0, 40e-6), ("of 40 us and more", 1.0, 40e-6, float("inf")))
"""Decode: name, goal for cuDNN's time by ours, and the least and most seconds of cuDNN."""
BANDWIDTHS = (("decode", 4.3, 256e6), ("decode_latent", 0.85 * 4.8, 0.0), ("decode_latent_rank", 0.85 * 4.8, 0.0))
"""Tag, TB/s asked, and the least bytes from which they are asked."""
TENSOR_RATES = (("decode_latent", 550.0),)
"""Tag, and TFLOP/s asked where tensor cores are the limit."""
FLOAT8_TFLOPS = {False: 1023.0, True: 964.0}
"""cuDNN's published TFLOP/s for heads of 128 in float8, by whether a mask is causal; torch has no attention in float8 to time beside."""
PAGED_SHARE = 0.97
"""Time of a contiguous cache by that of pages, at least."""
FIRST = {True: 0.93, False: 0.95}
"""Share of the first choice's speed of the best's, asked where candidates are a sample of all, and where they are the policy's."""
TC_FIGURES = tuple((tag, f"{tag}: slowest, of FlashAttention", 0.95, min) for tag in ("prefill", "short", "head64", "head256", "encoder"))
"""The same for kernels on mma.sync, as FlashAttention-2's are."""


def policy_of(entry: Entry, policy: str) -> str:
    """Return the policy that an entry names, else the given one. Policies have the names of their templates."""
    return policy if entry.workload.policy == "auto" else entry.workload.policy


def candidate_of(policy: str, text: str) -> Any:
    """Return the candidate that a line of parameters describes: `consumers=2 block_n=128 …`, behind a template's name or of a policy."""
    from kerneldecl.model import Candidate

    first, *others = text.split()
    template, pairs = (policy, [first, *others]) if "=" in first else (first, others)
    return Candidate.of(template, {name: int(value) if value.isdigit() else value for name, value in (pair.split("=") for pair in pairs)})


def candidates(entry: Entry, policy: str, given: argparse.Namespace) -> list[Any]:
    """Return what a policy proposes, best first, and a sample of what its template takes."""
    return [*proposals(entry, policy, given.top_k), *(sample(entry, policy, given.sample) if given.sample else ())]


def built(entry: Entry, candidate: Any, folder: str) -> Built:
    """Return a candidate's library, or why there is none."""
    try:
        return build_candidate(entry, candidate, folder)
    except Exception as error:  # noqa: BLE001  a candidate that cannot be built is a result
        return Built(label_of(candidate), failure=f"{type(error).__name__}: {str(error)[:200]}")


def raced(entry: Entry, kernels: Sequence[Built], rounds: int, *, in_triton: bool = False) -> Row:
    """Return the times of all candidates and rivals, in Triton or not, that are right, and why the others are not timed."""
    from bench_support.gpu.timing import interleaved, median, ratio
    from bench_support.gpu.torch_baselines import baselines

    arguments = arguments_of(entry)
    asked = (entry.workload.rule, dict(entry.workload.attrs), arguments.sets)
    calls = {f"torch {name}": call for name, call in baselines(*asked).items()}
    if in_triton:
        from bench_support.gpu.triton_baselines import baselines as triton_calls

        calls |= triton_calls(*asked)
    failures = {kernel.label: kernel.failure for kernel in kernels if kernel.failure}
    calls |= {kernel.label: kernel_call(kernel, arguments.sets) for kernel in kernels if not kernel.failure}
    errors, replays = {}, {}
    for name, call in calls.items():
        try:
            errors[name] = arguments.error(call)
            replays[name] = arguments.replay(call)
        except ERRORS as error:
            failures[name] = f"{type(error).__name__}: {str(error)[:200]}"
    samples = interleaved(replays, rounds)
    secs = {name: median(each) for name, each in samples.items()}
    ours = {name: secs[name] for name in secs if not name.startswith(RIVALS)}
    best = min(ours, key=ours.__getitem__, default="")
    ratios = {name: ratio(samples[name], samples[best]) for name in secs if best and name.startswith(RIVALS)}
    row = {
        "all_secs": secs,
        "errors": errors,
        "failures": failures,
        "best": best,
        "ratios": ratios,
        "first": kernels[0].label if kernels else "",
    }
    return {**row, "secs": secs[best]} if best else row


def table_row(row: Row) -> Row:
    """Return the table's columns for a row: ratios are theirs by ours, over 1 means that ours is faster."""
    best, secs = row.get("best", ""), row.get("all_secs", {})
    if not best:
        return {"entry": row["entry"], "failure": row.get("failure") or next(iter(row.get("failures", {}).values()), "")}
    return {
        "entry": row["entry"],
        "us": secs[best] * 1e6,
        "TFLOP/s": row["flops"] / secs[best] / 1e12,
        "GB/s": row["least_bytes"] / secs[best] / 1e9,
        **{name.removeprefix("torch "): round(value, 3) for name, value in row["ratios"].items()},
        "first": round(first_share(row), 3),
        "error": row["errors"][best],
        "candidate": best.partition(" ")[2],
    }


def rival(row: Row, name: str = "") -> float | None:
    """Return the time of torch's back end of this name, or of its best, by ours."""
    found = [value for each_name, value in row.get("ratios", {}).items() if name in each_name]
    return min(found, default=None)


def first_share(row: Row) -> float:
    """Return the best candidate's time by that of the policy's first, which comes before the others."""
    ours = [value for name, value in row["all_secs"].items() if not name.startswith(RIVALS)]
    return float(min(ours) / ours[0])


def judged_first(rows: Sequence[Row], *, sampled: bool) -> list[dict[str, Any]]:
    """Return the figure of the policies' first choices, of rows that have one."""
    chosen = [row for row in rows if row.get("best") and row["first"] in row["all_secs"]]
    most = max((len(row["all_secs"]) for row in chosen), default=0)
    what = f"first choice, of the best of {'a sample of all' if sampled else 'the policy'}, up to {most}: geometric mean"
    return [figure(what, FIRST[sampled], geometric_mean, each(chosen, first_share))] if chosen else []


def judged(rows: Sequence[Row], policy: str = POLICIES[0]) -> list[dict[str, Any]]:
    """Return the figures whose entries are among the rows."""
    found = []
    for tag, what, settings, combine in FIGURES if policy == POLICIES[0] else TC_FIGURES:
        tagged = [row for row in rows if tag in row["tags"]]
        name = "cudnn" if "cuDNN" in what else "flash" if "Flash" in what else ""
        if tagged:
            found.append(figure(what, settings, combine, each(tagged, lambda row, name=name: rival(row, name))))
    return found + _judged_decode(rows)


def _judged_decode(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the figures of few queries against many keys: beside cuDNN, by bandwidth, and of pages beside a contiguous cache."""
    found = []
    for what, asked, least, most in DECODE:
        tagged = [row for row in rows if "decode" in row["tags"] and least <= row.get("all_secs", {}).get("torch cudnn", 0.0) < most]
        found += [figure(f"decode {what}: slowest, of cuDNN", asked, min, each(tagged, lambda row: rival(row, "cudnn")))] if tagged else []
    for tag, asked, least in BANDWIDTHS:
        tagged = [row for row in rows if tag in row["tags"] and row["least_bytes"] >= least]
        found += [figure(f"{tag}: TB/s", asked, min, each(tagged, lambda row: row["least_bytes"] / row["secs"] / 1e12))] if tagged else []
    for tag, asked in TENSOR_RATES:
        tagged = [row for row in rows if tag in row["tags"]]
        found += [figure(f"{tag}: TFLOP/s", asked, min, each(tagged, lambda row: row["flops"] / row["secs"] / 1e12))] if tagged else []
    found += _judged_float8([row for row in rows if "float8" in row["tags"]])
    contiguous = {_sizes(row): row.get("secs") for row in rows if "decode_lengths" in row["tags"]}
    paged = [row for row in rows if "decode_paged" in row["tags"] and contiguous.get(_sizes(row))]
    shares = each(paged, lambda row: contiguous[_sizes(row)] / row["secs"])
    return found + ([figure("decode in pages: of a contiguous cache", PAGED_SHARE, min, shares)] if paged else [])


def _judged_float8(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the figure of float8: arithmetic by cuDNN's published, where a head has 128 elements."""
    published = {row["entry"]: FLOAT8_TFLOPS["causal=true" in row["entry"]] for row in rows if row["entry"].startswith("float8[")}
    tagged = [row for row in rows if row["entry"] in published]
    rates = each(tagged, lambda row: row["flops"] / row["secs"] / 1e12 / published[row["entry"]])
    return [figure("float8, heads of 128: TFLOP/s by cuDNN's published", 1.00, min, rates)] if tagged else []


def _sizes(row: Row) -> tuple[int, int]:
    return row["attrs"]["batch"], row["attrs"]["keys"]


def say(row: Row, seconds: float) -> None:
    """Print every time and failure of an entry."""
    print(f"[{seconds:.0f} s] {row['entry']}: {row.get('failure', '')}", flush=True)
    for name, secs in row.get("all_secs", {}).items():
        rates = f"{row['flops'] / secs / 1e12:6.1f} TFLOP/s {row['least_bytes'] / secs / 1e9:5.0f} GB/s"
        print(f"    {secs * 1e6:9.2f} us {rates}  error {row['errors'][name]:.2g}  {name}", flush=True)
    for name, why in row.get("failures", {}).items():
        print(f"    {name}: {why}", flush=True)


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description="Time attention kernels of a GPU with wgmma, or of the host CPU, beside torch's.")
    parser.add_argument("--arch", choices=("h200", "host"), default="h200", help="where: a GPU with wgmma, or this machine's CPU")
    parser.add_argument("--folder", type=Path, help="with --arch host: the workspace, which a later run reuses; default: a temporary one")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, or tag:NAME, as in `kerneldecl build`")
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="whose candidates are timed")
    parser.add_argument("--top-k", type=int, default=6, help="candidates that are built and timed for each entry")
    parser.add_argument("--also", action="append", default=[], metavar="PARAMS", help="one more candidate: [template] name=value …")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N candidates more, drawn from all that the template takes")
    parser.add_argument("--rounds", type=int, default=15, help="replays of each contender")
    parser.add_argument("--triton", action="store_true", help="also time attention in Triton, which tunes it for some 20 s an entry")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further entry after so many seconds")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.arch == "host":
        compare(given.only or ["*"], given.top_k, given.rounds, given.folder, given.json)
        return
    if find_spec("torch") is None:
        sys.exit("this needs torch, built for CUDA: it is a rival, and its graphs and events are used for timing")
    start = time.perf_counter()
    entries = entries_of(ROOT, "h200", given.only or ["*"])
    gpu = OwnProcess()
    about: Row = machine() | gpu.ask(gpu_described)
    show_machine(about)
    print(f"{about['gpu']}, torch {about['torch']}, cuDNN {about['cudnn']}; {clocks()}", flush=True)
    also = [candidate_of(given.policy, text) for text in given.also]
    rows, race = [], partial(raced, in_triton=given.triton)
    with tempfile.TemporaryDirectory(prefix="attention-") as folder, ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        policies = [policy_of(entry, given.policy) for entry in entries]
        asked = [pool.submit(candidates, entry, policy, given) for entry, policy in zip(entries, policies, strict=True)]
        others = [[one for one in also if one.template == policy or {one.template, policy} == {*DECODES}] for policy in policies]
        chosen = [dict.fromkeys([*one.result(), *more]) for one, more in zip(asked, others, strict=True)]
        waiting = [[pool.submit(built, entry, one, folder) for one in many] for entry, many in zip(entries, chosen, strict=True)]
        for entry, kernels in zip(entries, waiting, strict=True):
            if time.perf_counter() - start > given.seconds:
                print(f"{entry.name}: not run, the time is over", flush=True)
                continue
            row = described(entry)
            try:
                row |= gpu.ask(race, entry, [kernel.result() for kernel in kernels], given.rounds, limit_secs=LIMIT_SECS)
            except RuntimeError as error:
                row |= {"failure": str(error)}
            rows.append(row)
            say(row, time.perf_counter() - start)
        pool.shutdown(cancel_futures=True)
    gpu.close()
    print(f"all in {time.perf_counter() - start:.0f} s; {clocks()}")
    show("Attention (cudnn, flash: their time by ours; first: the model's first choice, as a share of the best)", [*map(table_row, rows)])
    figures = judged(rows, given.policy) + judged_first(rows, sampled=given.sample > 0)
    show("Figures", figures)
    write_json(given.json, about, {"figures": figures, "entries": rows})


if __name__ == "__main__":
    main()
