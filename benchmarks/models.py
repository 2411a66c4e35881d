"""Owns the comparison of exported models on a GPU or this CPU: tuned by the commands that users run, beside torch and onnxruntime.

Knows nothing of how they are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from fnmatch import fnmatch
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from bench_support.models.comparison import Job, Row, compare, export
from bench_support.models.zoo import EXAMPLES
from bench_support.table import machine, show, show_machine, write_json

WORKSPACE = """\
edition = 1

[artifact]
name = "{name}"
version = "0.1.0"

[target.here]
arch = "{arch}"

[defaults]
top_k = {top_k}
"""
KERNELDECL = (sys.executable, "-m", "kerneldecl")
FALLBACKS = ("cpu_fallback", "gpu_fallback")


def tuned(name: str, given: argparse.Namespace, folder: Path) -> Row:
    """Export the model, extract, build, and compile it; return seconds by phase, and what its functions run on."""
    folder.mkdir(parents=True, exist_ok=True)
    row: Row = {"model": name, "secs_of": {}}
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(export, name, given.dtype, folder, to_onnx=given.source == "onnx" or "onnxruntime" in given.rivals).result()
    source = f"model.{given.source}"
    (folder / "workloads.toml").write_text(WORKSPACE.format(name=name, arch=given.arch, top_k=given.top_k), encoding="utf-8")
    for phase, *command in (("extract", "extract", source, "-q"), ("tuning", "build", "-q"), ("second", "build", "-q")):
        start = time.perf_counter()
        done = subprocess.run([*KERNELDECL, *command], cwd=folder, check=False)
        row["secs_of"][phase] = time.perf_counter() - start
        if done.returncode > 1:
            return {**row, "failure": f"kerneldecl {' '.join(command)} ended with {done.returncode}"}
    artifacts = list((folder / "dist").glob("*/here"))
    if not artifacts:
        return {**row, "failure": "no artifact was linked"}
    start = time.perf_counter()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        row["matches"] = pool.submit(compiled, folder / source, artifacts[0], folder / "model.so").result()
    row["secs_of"]["compile"] = time.perf_counter() - start
    return {**row, "artifact": str(artifacts[0]), "library": str(folder / "model.so"), **_winners(artifacts[0], folder)}


def compiled(model: Path, artifact: Path, library: Path) -> list[str]:
    """Compile the model with calls of the artifact's kernels; return a line for each function."""
    from tvm import relax

    from kerneldecl.compiler.model_import.read_model import read_model
    from kerneldecl.relax import TIR_PIPELINE, export_model, pipeline, target_of

    target = target_of(artifact)
    passes = pipeline(artifact, target, "binary")
    export_model(relax.build(read_model(str(model)), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE), library)
    assert passes.report is not None
    return [str(match) for match in passes.report.matches]


def _winners(artifact: Path, folder: Path) -> Row:
    """Return how many entries there are, of standard rules, and on a fallback."""
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    lock = (folder / "workloads.lock").read_text(encoding="utf-8")
    rules = (folder / "workloads.toml").read_text(encoding="utf-8")
    return {
        "entries": len(manifest["entries"]),
        "standard": rules.count("\nrule = ") - rules.count('\nrule = "tensor_ir"'),
        "fallbacks": sum(lock.count(f'"{name}(') for name in FALLBACKS),
    }


def table_row(row: Row) -> Row:
    """Return the table's columns: milliseconds, and others' time by ours, over 1 ours is faster."""
    took, secs = row["secs_of"], row.get("secs", {})
    shown: Row = {"model": row["model"], **{f"{phase} s": took.get(phase) for phase in ("extract", "tuning", "second")}}
    ours = next((value for name, value in secs.items() if name.startswith("ours")), None)
    if ours is None:
        return {**shown, "failure": row.get("failure") or str(row.get("failures"))}
    torch_secs = [value for name, value in secs.items() if name.startswith("torch")]
    others = [value for name, value in secs.items() if name.startswith("onnxruntime")]
    shown |= {"entries": row["entries"], "standard": row["standard"], "fallback": row["fallbacks"], "ours ms": ours * 1e3}
    shown |= {"torch/ours": min(torch_secs) / ours if torch_secs else None, "ort/ours": min(others) / ours if others else None}
    return {**shown, "error": row["errors"]["ours"], "torch's error": row["errors"].get("torch eager")}


def say(row: Row) -> None:
    """Print a model's result."""
    print(f"\n{row['model']}: " + ", ".join(f"{name} {secs:.1f} s" for name, secs in row["secs_of"].items()), flush=True)
    for line in row.get("matches", ()):
        print(f"  {line[:200]}")
    for name, secs in row.get("secs", {}).items():
        print(f"  {name:32} {secs * 1e3:9.4f} ms   error {row['errors'].get(name.partition(',')[0], 0):.2g}", flush=True)
    for name, why in {"": row["failure"]} | row.get("failures", {}) if "failure" in row else row.get("failures", {}).items():
        print(f"  failed {name}: {why}", flush=True)


def compared(names: Sequence[str], given: argparse.Namespace, folder: Path) -> list[Row]:
    """Tune and compare all models; return a row for each."""
    from kerneldecl.hardware.host import detect
    from kerneldecl.plugins.find import STANDARD
    from kerneldecl.plugins.load import load_arch

    arch = detect() if given.arch == "host" else load_arch(STANDARD, given.arch)
    device, l2_bytes = ("cuda", arch.the_gpu.l2_bytes) if arch.gpu else ("cpu", 0)
    with ThreadPoolExecutor(given.jobs) as threads:
        rows = list(threads.map(lambda name: tuned(name, given, folder / name), names))
    for name, row in zip(names, rows, strict=True):
        if "failure" not in row:
            onnx = folder / name / "model.onnx"
            job = Job(
                model=name,
                dtype=given.dtype,
                library=row["library"],
                artifact=row["artifact"],
                onnx=str(onnx) if onnx.exists() else "",
                rivals=given.rivals.split(","),
                device=device,
                l2_bytes=l2_bytes,
                rounds=given.rounds,
            )
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                row.update(pool.submit(compare, job).result())
        say(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time exported models: tuned, in torch, and on a CPU in onnxruntime.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="models, such as 'resnet50.*'; default: all")
    parser.add_argument("--arch", default="host", help="arch of this GPU, or host")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--source", default="pt2", choices=("pt2", "onnx"), help="what the model is exported to")
    parser.add_argument("--top-k", type=int, default=10, help="candidates that are built and timed for each function")
    parser.add_argument("--jobs", type=int, default=1, help="models that are tuned at once; with over 1, phases take longer than alone")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each contender")
    parser.add_argument("--rivals", default="eager,compile", help="eager, compile, max-autotune, onnxruntime")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspaces, which a later run reuses; default: a temporary folder")
    given = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("this needs torch: it exports the models, and is a rival")
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    chosen = [each.name for each in EXAMPLES if any(fnmatch(each.name, pattern) for pattern in given.only or ["*"])]
    if not chosen:
        sys.exit(f"no model matches; there are {', '.join(each.name for each in EXAMPLES)}")
    described = machine()
    show_machine(described)
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="models-") as folder:
        rows = compared(chosen, given, Path(folder))
    show("Models (torch, ort: the best of theirs by ours; over 1 ours is faster)", [table_row(row) for row in rows])
    write_json(given.json, described, {"top_k": given.top_k, "dtype": given.dtype, "models": rows})


if __name__ == "__main__":
    main()
