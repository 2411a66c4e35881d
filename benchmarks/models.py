"""Owns the comparison of exported models on a GPU or this CPU: tuned by the commands that users run, beside torch and others.

Knows nothing of how models are tuned or timed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_support.own_process import OwnProcess
from bench_support.table import machine, show, show_machine, write_json

if TYPE_CHECKING:
    from kerneldecl.model import Arch

Row = dict[str, Any]
COMPARISON_SECS = 1200.0
MOST_KERNELS = 40


def arch_of(name: str) -> Arch:
    """Return the arch of a name, or this CPU's for host."""
    from kerneldecl.hardware.host import detect
    from kerneldecl.plugins.find import STANDARD
    from kerneldecl.plugins.load import load_arch

    return detect() if name == "host" else load_arch(STANDARD, name)


def described_machine(arch: Arch, process: OwnProcess) -> Mapping[str, Any]:
    """Return the machine's description; exit where its GPU is not of the arch."""
    if not arch.gpu:
        return machine()
    from bench_support.gpu.comparison import gpu_described

    described = machine() | process.ask(gpu_described)
    process.close()  # tuning needs the GPU alone
    if described["gpu"] != arch.model:
        sys.exit(f"arch {arch.name} is {arch.model}, this is {described['gpu']}")
    return described


def tuned_all(names: Sequence[str], given: argparse.Namespace, folder: Path) -> list[Row]:
    """Tune the models, and compile them by TVM's defaults where that is a rival; return their rows."""
    from bench_support.models.tuning import Choice, tuned

    def one(name: str) -> Row:
        rivals = given.rivals.split(",")
        choice = Choice(name, given.dtype, given.source, given.arch, given.top_k, rivals)
        return tuned(choice, folder / name, OwnProcess())

    with ThreadPoolExecutor(given.jobs) as threads:
        return list(threads.map(one, names))


def compared(row: Row, given: argparse.Namespace, arch: Arch) -> Row:
    """Compare a tuned model; return the fields for its row."""
    from bench_support.models.comparison import Job, compare, kernels
    from bench_support.models.tuning import entries_of

    process, l2_bytes = OwnProcess(), arch.the_gpu.l2_bytes if arch.gpu else 0
    job = Job(row["model"], given.dtype, row["libraries"], row["onnx"], given.rivals.split(","), l2_bytes, given.rounds)
    try:
        result = process.ask(compare, job, limit_secs=COMPARISON_SECS)
        theirs = [contender for contender in result["secs"] if contender.startswith("torch") and "," not in contender]
        for contender in ("ours", *theirs[-1:]) if given.kernels and arch.gpu else ():
            _, artifact = row["libraries"]["ours"]
            found = process.ask(kernels, job, contender, entries_of(artifact), limit_secs=COMPARISON_SECS)
            result[f"kernels of {contender}"] = found
            show(f"{row['model']}: kernels of {contender}", found[:MOST_KERNELS])
    except RuntimeError as error:
        return {"failures": {**row["failures"], "comparison": str(error)}}
    finally:
        process.close()
    return {**result, "failures": row["failures"] | result["failures"]}


def best(secs: Mapping[str, float], contender: str) -> float | None:
    """Return the least seconds of contenders whose names begin so, with a CUDA graph or without."""
    return min((value for name, value in secs.items() if name.startswith(contender)), default=None)


def ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


def table_row(row: Row) -> Row:
    """Return the columns of times: milliseconds, and others' time by ours, over 1 ours is faster."""
    took, secs = row["secs_of"], row.get("secs", {})
    shown: Row = {"model": row["model"], **{f"{phase} s": took.get(phase) for phase in ("extract", "tuning", "second")}}
    ours = best(secs, "ours")
    if ours is None:
        return {**shown, "failure": row.get("failure") or str(row.get("failures"))}
    if "ours, graph" in secs:
        shown |= {"call ms": secs["ours"] * 1e3}
    shown |= {"ours ms": ours * 1e3, "torch ms": (best(secs, "torch") or 0) * 1e3 or None}
    others = {"torch": "torch", "tvm": "tvm", "onnxruntime": "ort"}
    return shown | {f"{short}/ours": ratio(best(secs, name), ours) for name, short in others.items()}


def coverage_row(row: Row) -> Row:
    """Return the columns of coverage and numerics, shares in percent."""
    found, outcomes, errors = row["coverage"], row["functions"]["outcomes"], row.get("errors", {})
    here = row["fallbacks"][0] if row["fallbacks"] else {"fallbacks": (), "operations": 0.0, "bytes": 0.0}
    return {
        "model": row["model"],
        "with a kernel": f"{outcomes.get('hit', 0)} of {sum(outcomes.values()) - outcomes.get('view', 0)}",
        "entries": row["entries"],
        "failed": len(row["failed"]),
        "standard": found["standard"],
        "standard op %": 100 * found["flops"],
        "standard byte %": 100 * found["bytes"],
        "fallbacks": len(here["fallbacks"]),
        "fallback op %": 100 * here["operations"],
        "fallback byte %": 100 * here["bytes"],
        "error": errors.get("ours"),
        "by torch's": ratio(errors.get("ours"), errors.get("torch eager")),
    }


def say(row: Row) -> None:
    """Print a model's result."""
    print(f"\n{row['model']}: " + ", ".join(f"{name} {secs:.1f} s" for name, secs in row["secs_of"].items()), flush=True)
    for line in row.get("functions", {}).get("without", ()):
        print(f"  {line[:200]}")
    for name, secs in row.get("secs", {}).items():
        print(f"  {name:32} {secs * 1e3:9.4f} ms   error {row['errors'].get(name.partition(',')[0], 0):.2g}", flush=True)
    for name, why in ({"": row["failure"]} if "failure" in row else row["failures"]).items():
        print(f"  failed {name}: {why}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time exported models: tuned, in torch, by TVM's defaults, and on a CPU in onnxruntime.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="models, such as 'resnet50.*'; default: all")
    parser.add_argument("--arch", default="host", help="arch of this GPU, or host")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--source", default="pt2", choices=("pt2", "onnx"), help="what the model is exported to")
    parser.add_argument("--top-k", type=int, default=10, help="candidates that are built and timed for each function")
    parser.add_argument("--jobs", type=int, default=1, help="models that are tuned at once; with over 1, phases take longer than alone")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each contender")
    parser.add_argument("--rivals", default="eager,compile", help="some of eager, compile, max-autotune, tvm, onnxruntime")
    parser.add_argument("--kernels", action="store_true", help="on a GPU also print the time of each kernel, ours and torch's")
    parser.add_argument("--json", type=Path, help="write the results to this file, after each model")
    parser.add_argument("--folder", type=Path, help="folder of the workspaces, which a later run reuses; default: a temporary folder")
    return parser.parse_args()


def chosen(patterns: Sequence[str]) -> list[str]:
    from bench_support.models.zoo import EXAMPLES

    found = [each.name for each in EXAMPLES if any(fnmatch(each.name, pattern) for pattern in patterns)]
    return found or sys.exit(f"no model matches; there are {', '.join(each.name for each in EXAMPLES)}")


def main() -> None:
    given = arguments()
    if find_spec("torch") is None:
        sys.exit("this needs torch: it exports the models, and is a rival")
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    names, arch = chosen(given.only or ["*"]), arch_of(given.arch)
    described = described_machine(arch, OwnProcess())
    show_machine(described)
    rows: list[Row] = []
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="models-") as folder:
        for row in tuned_all(names, given, Path(folder)):
            rows.append(row if "failure" in row else row | compared(row, given, arch))
            say(rows[-1])
            write_json(given.json, described, {"top_k": given.top_k, "dtype": given.dtype, "models": rows})
    show("Models (torch, tvm, ort: the best of theirs by the best of ours; over 1 ours is faster)", [table_row(row) for row in rows])
    tuned_rows = [coverage_row(row) for row in rows if "functions" in row]
    if tuned_rows:
        show("What they run on (error: from torch in float32; by torch's: divided by torch eager's in the same dtype)", tuned_rows)


if __name__ == "__main__":
    main()
