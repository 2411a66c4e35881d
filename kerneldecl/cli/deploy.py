"""Owns the commands about compiled models: compile, run, bench; and the comparison of a whole model with its original.

Knows nothing of TVM: a worker process does the work, so that a model that crashes is an answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kerneldecl.cli.options import Settings, json_option, opened, print_result
from kerneldecl.cli.waiting import waiting
from kerneldecl.diagnostics.units import duration, sizes_text
from kerneldecl.errors import DeclarationError, ExitCode, Problem, TuningError

_LIMIT_SECS = 3600.0
_DOING = {"compile_model": "compiling", "run": "running", "bench": "timing", "compare": "comparing"}
artifact_option = click.option("--artifact", type=click.Path(path_type=Path), help="The artifact's folder; by default the workspace's.")
dims_option = click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE,…", help="Sizes that it was extracted with; repeatable.")
timed_option = click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE,…", help="Sizes that it was extracted with, or to time.")
dtype_option = click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), help="The half precision that it was extracted with.")
function_option = click.option("--function", default="main", show_default=True, help="The model's function.")


def asked(request: Mapping[str, Any], about: str) -> dict[str, Any]:
    """Have a worker do something with a model; raise DeclarationError for the user's mistakes, TuningError for what failed."""
    from kerneldecl.runners.process import Worker

    worker = Worker({}, folder=Path.cwd())  # what the user names is relative to it
    try:
        with waiting(f"{_DOING[request['action']]} {about}"):
            answer = worker.call({"device": "model", **request}, _LIMIT_SECS)
    finally:
        worker.stop()
    if "problem" in answer:
        raise DeclarationError([Problem(about, answer["problem"].removeprefix(f"{about}: "), answer["hint"])])
    if "failure" in answer:
        raise TuningError(f"{about}: {answer['failure']}")
    return answer


def chosen_artifact(settings: Settings, artifact: Path | None) -> Path | None:
    """Return the folder of the artifact that is meant: the given one, or the workspace's; None without a workspace."""
    from kerneldecl.artifact.manifest import MANIFEST, artifact_folder
    from kerneldecl.declare.toml_keys import FILE

    if artifact is not None or not (settings.root / FILE).is_file():
        return artifact
    declaration = opened(settings).declaration
    targets = list(dict.fromkeys(workload.target for workload in declaration.workloads))
    folders = [artifact_folder(settings.root, declaration.artifact, declaration.version, target) for target in targets]
    if len(folders) > 1:
        raise click.UsageError(f"choose one with --artifact: {', '.join(os.path.relpath(each) for each in folders)}")
    folder = folders[0]
    if not (folder / MANIFEST).is_file():
        raise DeclarationError([Problem(os.path.relpath(folder), "no such artifact", "`kerneldecl build` makes it")])
    return folder


def entry_names(artifact: Path | None) -> dict[str, str]:
    """Return the entry of each kernel of an artifact, by its symbol."""
    from kerneldecl.artifact.manifest import read_manifest

    manifest = read_manifest(artifact) if artifact else ""
    return {} if isinstance(manifest, str) else {entry["symbol"]: entry["name"] for entry in manifest["entries"]}


def workspace_names(settings: Settings) -> dict[str, str]:
    """Return the entry of each kernel of the workspace's artifacts, by its symbol, for a compiled model names no artifact."""
    from kerneldecl.artifact.manifest import artifact_folder
    from kerneldecl.declare.toml_keys import FILE

    if not (settings.root / FILE).is_file():
        return {}
    declaration = opened(settings).declaration
    targets = {workload.target for workload in declaration.workloads}
    folders = [artifact_folder(settings.root, declaration.artifact, declaration.version, target) for target in sorted(targets)]
    return {symbol: name for folder in folders for symbol, name in entry_names(folder).items()}


def _extracted_with(dims: tuple[str, ...], dtype: str | None) -> dict[str, Any]:
    from kerneldecl.extract.extract import sizes_of

    return {"sizes": sizes_of(dims), "dtype": dtype or ""}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


@click.command(name="compile")
@click.argument("model")
@click.option("-o", "output", type=click.Path(path_type=Path), help="The library to write; by default MODEL's name with .so, here.")
@artifact_option
@dims_option
@dtype_option
@json_option
@click.pass_obj
def compile_command(settings: Settings, /, model: str, output: Path | None, artifact: Path | None, as_json: bool, **given: Any) -> None:
    """Compile a MODEL into a library with an artifact's kernels linked in, its weights in a file beside it."""
    folder = chosen_artifact(settings, artifact)
    if folder is None:
        raise click.UsageError("there is no workspace here; name the artifact with --artifact")
    library = (output or Path(Path(model).stem or "model").with_suffix(".so")).resolve()
    request: dict[str, Any] = {"action": "compile_model", "model": model, "artifact": _text(folder), "library": str(library)}
    request |= {"options": _extracted_with(**given)}
    print_result(as_json, {"schema": 1, **asked(request, model)}, compiled_text)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--input", "inputs", multiple=True, metavar="FILE.npy|random", help="An input, in order; one `random` stands for all.")
@click.option("--output", "folder", type=click.Path(path_type=Path), default=Path(), help="Where to write output0.npy, …")
@click.option("--artifact", type=click.Path(path_type=Path), help="The artifact that has the kernels, unless they are linked in.")
@function_option
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", help="Size of a dynamic dimension of random inputs; repeatable.")
@json_option
def run(model: Path, inputs: tuple[str, ...], folder: Path, artifact: Path | None, as_json: bool, **given: Any) -> None:
    """Run a compiled MODEL (.so) once and write its outputs as .npy files."""
    from kerneldecl.extract.extract import sizes_of

    request = {"action": "run", "library": str(model), "artifact": _text(artifact), "function": given["function"]}
    answer = asked({**request, "given": list(inputs), "sizes": sizes_of(given["dims"]), "folder": str(folder)}, str(model))
    print_result(as_json, {"schema": 1, **answer}, run_text)


@click.command()
@click.argument("model")
@click.option("--against", type=click.Path(path_type=Path), help="A torch.export program to time beside it.")
@artifact_option
@function_option
@timed_option
@dtype_option
@json_option
@click.pass_obj
def bench(settings: Settings, /, model: str, against: Path | None, artifact: Path | None, as_json: bool, **given: Any) -> None:
    """Time a MODEL: a compiled one (.so), or one that is compiled for it with the workspace's artifact (.pt2, .onnx, .json).

    Or time the kernels of an artifact, or a package, again: here and now, by every protocol, beside the recorded times.
    """
    if _is_artifact(settings.root / model):
        _bench_artifact(settings, settings.root / model, as_json)
        return
    is_compiled = model.endswith(".so")
    folder = artifact if is_compiled else chosen_artifact(settings, artifact)
    request: dict[str, Any] = {"action": "bench", "model": model, "artifact": _text(folder), "function": given.pop("function")}
    request |= {"options": _extracted_with(**given)}
    answer = asked({**request, "against": None if against is None else str(against)}, model)
    names = entry_names(folder) if folder else workspace_names(settings)
    further = [_with_entries(each, names) for each in answer["further"]]
    print_result(as_json, {"schema": 1, **_with_entries(answer, names), "further": further}, bench_text)


def _with_entries(timed: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return what was timed, with the entry of each kernel."""
    return {**timed, "kernels": [{**row, "entry": names.get(row["name"], "")} for row in timed["kernels"]]}


def _is_artifact(path: Path) -> bool:
    from kerneldecl.package.place import is_packed

    return path.is_dir() or is_packed(path)


def _bench_artifact(settings: Settings, path: Path, as_json: bool) -> None:
    from kerneldecl.artifact.load import checked_artifact
    from kerneldecl.cli.bench_artifact import bench_artifact
    from kerneldecl.cli.package import trusted_by
    from kerneldecl.compare.report import table, to_json
    from kerneldecl.compare.sides import read_side
    from kerneldecl.compare.verdict import BUDGET
    from kerneldecl.package.folder import ARTIFACT, is_package
    from kerneldecl.package.place import is_packed, opened_package

    if is_packed(path) or is_package(path):
        with opened_package(path, trusted_by(settings, ())) as package:
            compared, device = bench_artifact(package.folder / ARTIFACT, settings.root, read_side(settings.root, str(path)))
    else:
        folder, _ = checked_artifact(path)
        compared, device = bench_artifact(folder, settings.root, read_side(settings.root, str(folder)))
    elsewhere = (
        "" if device["timed_on"] == device["recorded_on"] else f"recorded on {device['recorded_on']}, timed on {device['timed_on']}\n"
    )
    print_result(as_json, {**to_json(compared, BUDGET), **device}, lambda _: f"{elsewhere}{table(compared, is_whole=True)}")


def compare_model(library: Path, against: str, artifact: Path | None, function: str, dims: tuple[str, ...]) -> dict[str, Any]:
    """Return a comparison of a compiled model with the model that it was made of, at sizes of dynamic dimensions such as n=1,16."""
    from kerneldecl.extract.extract import sizes_of

    request = {"action": "compare", "library": str(library), "artifact": _text(artifact), "function": function, "against": against}
    answer = asked({**request, "sizes": sizes_of(dims)}, str(library))
    code = ExitCode.DONE if all(each["ok"] for each in answer["outputs"]) else ExitCode.FAILED
    return {"schema": 1, "model": str(library), "against": against, **answer, "exit_code": int(code)}


def compiled_text(found: Mapping[str, Any]) -> str:
    """Return a compilation as text."""
    return f"{found['report']}\nwrote {os.path.relpath(found['library'])}"


def run_text(found: Mapping[str, Any]) -> str:
    """Return a line for each output."""
    return "\n".join(f"{each['file']}  {each['dtype']}{each['shape']}" for each in found["outputs"])


def comparison_text(found: Mapping[str, Any]) -> str:
    """Return a line for each output, and one for the model."""
    lines = []
    for each in found["outputs"]:
        fact = each["failure"] or f"relative error {each['error']:.2g} (allowed {each['tolerance']:g})"
        where = f" at {sizes_text(each['sizes'])}" if each["sizes"] else ""
        lines.append(f"{'ok   ' if each['ok'] else 'WRONG'}  output {each['output']}  {fact}{where}")
    right = sum(each["ok"] for each in found["outputs"])
    sizes = f", at {'; '.join(map(sizes_text, found['sizes']))}" if found["sizes"] else ""
    lines.append(f"{found['model']}: {right} of {len(found['outputs'])} outputs agree with {found['by']} ({found['against']}){sizes}")
    return "\n".join(lines)


def bench_text(found: Mapping[str, Any]) -> str:
    """Return times and shares as text, for each choice of sizes."""
    return "\n".join(_timed_text(found["model"], each) for each in (found, *found["further"]))


def _timed_text(model: str, found: Mapping[str, Any]) -> str:
    where = f" with {sizes_text(found['sizes'])}" if found["sizes"] else ""
    lines = [f"{model}{where}: {duration(found['secs'])} a call"]
    if found["graph_secs"]:
        lines.append(f"in a CUDA graph: {duration(found['graph_secs'])}")
    if found["torch_secs"]:
        best = min(found["secs"], found["graph_secs"] or found["secs"])
        lines.append(f"torch (eager): {duration(found['torch_secs'])}, torch / ours {found['torch_secs'] / best:.2f}")
    elif found["why_no_torch"]:
        lines.append(f"torch: not timed, {found['why_no_torch']}")
    lines += [
        f"  {row['share']:6.1%} {duration(row['secs']):>10}  {row['calls']:>3} x {row['entry'] or row['name']}" for row in found["kernels"]
    ]
    return "\n".join(lines)
