"""Owns the way from a model to libraries: exported, tuned by the commands that users run, compiled; and by TVM's defaults.

Knows nothing of how libraries are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_support.own_process import OwnProcess

Row = dict[str, Any]
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
LIMIT_SECS = 1800.0


@dataclass(frozen=True)
class Choice:
    """What is tuned: a model in a dtype, read from a .pt2 or .onnx file, for an arch."""

    model: str
    dtype: str
    source: str
    arch: str
    top_k: int
    rivals: Sequence[str]
    """Of those, onnxruntime needs an ONNX file, and tvm a library."""


def tuned(choice: Choice, folder: Path, process: OwnProcess) -> Row:
    """Export the model, extract, build and compile it; return seconds by phase, what its functions run on, and libraries by contender."""
    folder.mkdir(parents=True, exist_ok=True)
    file = f"model.{choice.source}"
    row: Row = {"model": choice.model, "secs_of": {}, "failures": {}, "libraries": {}}
    try:
        process.ask(export, choice, folder, limit_secs=LIMIT_SECS)
        (folder / "workloads.toml").write_text(WORKSPACE.format(name=choice.model, arch=choice.arch, top_k=choice.top_k), encoding="utf-8")
        row["coverage"] = _timed(row, "extract", folder, "extract", file)["coverage"]
        _timed(row, "tuning", folder, "build")
        built = _timed(row, "second", folder, "build")
        row |= {"entries": built["entries"], "failed": built["failed"], "fallbacks": built["fallbacks"]}
        artifact = _artifact(built)
        row["functions"] = _asked(row, "compile", process, compiled, (folder / file, artifact, folder / "model.so"))
        row["libraries"]["ours"] = (str(folder / "model.so"), artifact)
    except RuntimeError as error:
        process.close()
        return {**row, "failure": str(error)}
    if "tvm" in choice.rivals:
        try:
            _asked(row, "tvm", process, default_library, (folder / file, artifact, folder / "by_default.so"))
            row["libraries"]["tvm"] = (str(folder / "by_default.so"), "")
        except RuntimeError as error:
            row["failures"]["tvm"] = str(error)
    process.close()
    return {**row, "onnx": str(folder / "model.onnx") if "onnxruntime" in choice.rivals else ""}


def _artifact(built: Row) -> str:
    if "here" not in built["artifacts"]:
        raise RuntimeError("no artifact was linked")
    return str(built["artifacts"]["here"])


def _asked(row: Row, phase: str, process: OwnProcess, question: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    start = time.perf_counter()
    try:
        return process.ask(question, *given, limit_secs=LIMIT_SECS)
    finally:
        row["secs_of"][phase] = time.perf_counter() - start


def _timed(row: Row, phase: str, folder: Path, *command: str) -> Any:
    """Run a command of kerneldecl and return what it says as JSON; raise RuntimeError where it fails as a whole."""
    start = time.perf_counter()
    run = subprocess.run([sys.executable, "-m", "kerneldecl", *command, "--json"], cwd=folder, check=False, stdout=subprocess.PIPE)
    row["secs_of"][phase] = time.perf_counter() - start
    if run.returncode > 1:  # 1: an artifact without some entries
        raise RuntimeError(f"kerneldecl {' '.join(command)} ended with {run.returncode}")
    return json.loads(run.stdout)


def export(choice: Choice, folder: Path) -> None:
    """Write model.pt2, as a user would, and model.onnx where it is asked for."""
    import torch
    from bench_support.models.comparison import made

    module, args = made(choice.model, choice.dtype)
    with torch.no_grad():
        torch.export.save(torch.export.export(module, args), folder / "model.pt2")
        if "onnxruntime" in choice.rivals or choice.source == "onnx":
            torch.onnx.export(module, args, str(folder / "model.onnx"), dynamo=True, external_data=False)


def compiled(model: Path, artifact: str, library: Path) -> Row:
    """Compile the model with calls of the artifact's kernels; return how many functions have which outcome, and what the others say."""
    from tvm import relax

    from kerneldecl.compiler.model_import.read_model import read_model
    from kerneldecl.relax import TIR_PIPELINE, export_model, pipeline, target_of

    target = target_of(artifact)
    passes = pipeline(artifact, target, "binary")
    export_model(relax.build(read_model(str(model)), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE), library)
    report = passes.report
    assert report is not None
    return {
        "outcomes": dict(Counter(match.outcome for match in report.matches)),
        "without": [str(match) for match in report.missed],
    }


def default_library(model: Path, artifact: str, library: Path) -> None:
    """Compile the model by TVM's own default pipeline, for the target of an artifact."""
    import tvm.support.nvcc  # noqa: F401  registers what compiles device code
    from tvm import relax
    from tvm.target import Target

    from kerneldecl.compiler.model_import.read_model import read_model
    from kerneldecl.relax import target_of

    target = dict(target_of(artifact).export())
    if target["kind"] == "cuda":  # what every block can have: TVM's schedules allocate shared memory statically
        target["max_shared_memory_per_block"] = 49152
    relax.build(read_model(str(model)), Target(target)).export_library(str(library))


def entries_of(artifact: str) -> dict[str, str]:
    """Return the names of an artifact's entries by their symbols."""
    manifest = json.loads((Path(artifact) / "manifest.json").read_text(encoding="utf-8"))
    return {entry["symbol"]: entry["name"] for entry in manifest["entries"]}
