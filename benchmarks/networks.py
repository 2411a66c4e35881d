"""Owns the comparison of whole networks on a GPU: with tuned kernels, with TVM's default schedules, and in torch.

Knows nothing of how they are timed: it tunes each network by the commands that users run, compares, and prints the
results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from fnmatch import fnmatch
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench_support.gpu.comparison import GpuProcess, gpu_described
from bench_support.networks.comparison import Job, Row, compare, kernels
from bench_support.networks.definitions import Network, networks
from bench_support.table import machine, show, show_machine, write_json

MODES = {"torch": "eager", "compile": "compile", "max-autotune": "max-autotune"}
COMPARISON_SECS = 900.0
WORKSPACE = """\
edition = 1

[artifact]
name = "{name}"
version = "0.1.0"

[target.gpu]
arch = "{arch}"

[defaults]
top_k = {top_k}
"""


def name_of(network: Network) -> str:
    return f"{network.name}.{network.dtype}"


def tuned(network: Network, arch: str, top_k: int, folder: Path) -> Row:
    """Extract and build the network's workloads, and link the network; return seconds by phase, and which functions have kernels."""
    from bench_support.networks.relax_ops import module_of
    from tvm.ir import save_json

    name = name_of(network)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(save_json(module_of(network)), encoding="utf-8")
    if not (folder / "workloads.toml").is_file():
        (folder / "workloads.toml").write_text(WORKSPACE.format(name=name, arch=arch, top_k=top_k), encoding="utf-8")
    secs = {}
    for phase, *command in (
        ("extract", "extract", "model.json", "-q"),
        ("tuning", "build", "--require-measured"),
        ("second", "build", "-q"),
    ):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "kerneldecl", *command], cwd=folder, check=False)
        secs[phase] = time.perf_counter() - start
        if done.returncode:
            return {"network": name, "failure": f"kerneldecl {' '.join(command)} ended with {done.returncode}", "took_secs": secs}
    (artifact,) = (folder / "dist").glob("*/gpu")
    start = time.perf_counter()
    report = linked(network, artifact, folder / "ours.so")
    secs["compile"] = time.perf_counter() - start
    outcomes = [match.outcome for match in report.matches]
    missed = {match.function: str(match) for match in report.missed}
    return {
        "network": name,
        "took_secs": secs,
        "functions": {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)},
        "missed": missed,
        "library": str(folder / "ours.so"),
        "artifact": str(artifact),
        "entries": entries_of(artifact),
    }


def entries_of(artifact: Path) -> dict[str, str]:
    """Return the names of an artifact's entries by their symbols."""
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    return {entry["symbol"]: entry["name"] for entry in manifest["entries"]}


def linked(network: Network, artifact: Path, library: Path) -> Any:
    """Compile the network with calls of the artifact's kernels; return the report on its functions."""
    from bench_support.networks.relax_ops import module_of
    from tvm import relax

    from kerneldecl.relax import export_model, pipeline, target_of

    target = target_of(artifact)
    passes = pipeline(artifact, target, "binary")
    export_model(relax.build(module_of(network), target, relax_pipeline=passes), library)
    return passes.report


def default_library(network: Network, folder: Path) -> tuple[str, float, str]:
    """Compile the network by TVM's own default pipeline; return the library or nothing, the seconds, and why there is none."""
    import tvm
    import tvm.support.nvcc  # registers what compiles device code
    from bench_support.networks.relax_ops import module_of
    from tvm import relax

    start = time.perf_counter()
    library = folder / f"{name_of(network)}.dlight.so"
    # TVM's default schedules use no tensor cores on sm_90a.
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152})
    try:
        relax.build(module_of(network), target).export_library(str(library))
    except Exception as error:  # noqa: BLE001  a contender that cannot be compared is a result
        return "", time.perf_counter() - start, f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[-1][:300]}"
    return str(library), time.perf_counter() - start, ""


def table_row(row: Row) -> Row:
    """Return the table's columns: milliseconds, and others' time by ours, over 1 ours is faster."""
    took = row.get("took_secs", {})
    shown: Row = {"network": row["network"], "tuning s": took.get("tuning"), "second s": took.get("second")}
    secs = row.get("secs")
    if not secs or "ours" not in secs:
        return {**shown, "failure": row.get("failure") or str(row.get("failures"))}
    best = min(secs[name] for name in secs if name.startswith("ours"))
    torch_ms = [value for name, value in secs.items() if name.startswith("torch")]
    dlight_ms = [value for name, value in secs.items() if name.startswith("dlight")]
    shown |= {"ours ms": secs["ours"] * 1e3, "graph ms": secs["ours, graph"] * 1e3}
    shown |= {"dlight/ours": min(dlight_ms) / best if dlight_ms else None, "torch/ours": min(torch_ms) / best if torch_ms else None}
    return {**shown, "functions": " ".join(f"{count} {outcome}" for outcome, count in row["functions"].items())}


def say(row: Row) -> None:
    """Print a network's result."""
    print(f"\n{row['network']}: {row.get('functions', row.get('failure'))}", flush=True)
    print("  took " + ", ".join(f"{name} {secs:.1f} s" for name, secs in row["took_secs"].items()))
    for name, secs in row.get("secs", {}).items():
        print(f"  {name:32} {secs * 1e3:9.4f} ms   error {row['errors'].get(name.partition(',')[0], 0):.2g}", flush=True)
    for name, why in {**row.get("missed", {}), **row.get("failures", {})}.items():
        print(f"  {name}: {why}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time whole networks on this GPU: tuned, with TVM's default schedules, and in torch.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="networks, such as 'resnet18.*' or '*.float16'; default: all")
    parser.add_argument("--arch", default="h200", help="arch that this GPU is")
    parser.add_argument("--top-k", type=int, default=20, help="candidates that are built and timed for each function")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each contender")
    parser.add_argument("--rivals", default="torch,compile,max-autotune,dlight", help="what to compare with")
    parser.add_argument("--kernels", action="store_true", help="also print the time of each kernel, ours and torch's")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspaces, which a later run reuses; default: a temporary folder")
    given = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("this needs torch, built for CUDA: it is a rival, and its graphs and events are used for timing")
    chosen = [network for network in networks() if any(fnmatch(name_of(network), pattern) for pattern in given.only or ["*"])]
    if not chosen:
        sys.exit(f"no network matches; there are {', '.join(map(name_of, networks()))}")
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="networks-") as folder:
        described, rows = compared(chosen, given, Path(folder))
    show("Networks (dlight, torch: the best of theirs by the best of ours; over 1 ours is faster)", [table_row(row) for row in rows])
    write_json(given.json, described, {"top_k": given.top_k, "networks": rows})


def compared(chosen: Sequence[Network], given: argparse.Namespace, folder: Path) -> tuple[Mapping[str, Any], list[Row]]:
    """Tune and compare all networks; return the machine's description, and a row for each."""
    from kerneldecl.plugins.find import STANDARD
    from kerneldecl.plugins.load import load_arch

    gpu, rivals, arch = GpuProcess(), given.rivals.split(","), load_arch(STANDARD, given.arch)
    described = machine() | gpu.ask(gpu_described)
    gpu.close()  # tuning needs the GPU alone
    if described["gpu"] != arch.model:
        sys.exit(f"arch {given.arch} is {arch.model}, this is {described['gpu']}")
    show_machine(described)
    rows = []
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for network in chosen:
            row = tuned(network, given.arch, given.top_k, folder / name_of(network))
            if "failure" not in row:
                # Not during tuning, which is timed and needs all cores; in a process of its own, where TVM compiles by itself.
                default = pool.submit(default_library, network, folder).result() if "dlight" in rivals else None
                row |= result_of(network, row, default, given, gpu)
            rows.append(row)
            say(row)
            gpu.close()
    return described, rows


def result_of(network: Network, row: Row, default: tuple[str, float, str] | None, given: argparse.Namespace, gpu: GpuProcess) -> Row:
    """Compare a tuned network; return the fields for its row."""
    from kerneldecl.plugins.find import STANDARD
    from kerneldecl.plugins.load import load_arch

    libraries, failures = {"ours": (row["library"], row["artifact"])}, {}
    if default is not None:
        library, secs, failure = default
        row["took_secs"]["dlight"] = secs
        if library:
            libraries["dlight"] = (library, "")
        else:
            failures["dlight"] = failure
    modes = [mode for name, mode in MODES.items() if name in given.rivals.split(",")]
    l2_bytes = load_arch(STANDARD, given.arch).the_gpu.l2_bytes
    job = Job(network=network, libraries=libraries, modes=modes, l2_bytes=l2_bytes, rounds=given.rounds, entries=row["entries"])
    try:
        result: Row = gpu.ask(compare, job, limit_secs=COMPARISON_SECS)
        for name in ("ours", f"torch {modes[-1]}")[: 1 + bool(modes)] if given.kernels else ():
            result[f"kernels of {name}"] = gpu.ask(kernels, job, name, limit_secs=COMPARISON_SECS)
            show(f"{name_of(network)}: kernels of {name}", result[f"kernels of {name}"][:40])
    except RuntimeError as error:
        return {"failures": {**failures, "comparison": str(error)}}
    return {**result, "failures": {**failures, **result["failures"]}}


if __name__ == "__main__":
    main()
