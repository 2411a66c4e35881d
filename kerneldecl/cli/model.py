"""Owns the commands about models and artifacts: extraction into a workspace, verification of what was built.

Knows nothing of how either is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from kerneldecl.cli.options import Settings, json_option, opened, print_result
from kerneldecl.cli.package import key_option
from kerneldecl.cli.waiting import waiting
from kerneldecl.errors import ExitCode


def how_read(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how a model is read: `dims`, `rows` and `dtype`."""
    for option in (
        click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), help="Make a half-precision model of a float32 one."),
        click.option("--rows", metavar="NAME=SIZE,…..MOST", help="Dynamic dimension of which entries take any size, tuned for some."),
        click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE,…", help="Sizes of a dynamic dimension that get entries."),
    ):
        command = option(command)
    return command


def extracted(model: str, root: Path, dims: tuple[str, ...], of: Mapping[str, str | None]) -> dict[str, Any]:
    """Declare in a workspace what a model calls, read as these options say; return what `extract` prints."""
    from kerneldecl.extract.extract import any_rows_of, extract_model, sizes_of

    rows = any_rows_of(of["rows"]) if of["rows"] else None
    with waiting(f"reading {model}"):
        return extract_model(model, root, sizes_of(dims), of["dtype"] or "", rows)


@click.command()
@click.argument("model")
@click.option("-o", "output", type=click.Path(path_type=Path), help="The workspace's workloads.toml, new or not.")
@how_read
@json_option
@click.pass_obj
def extract(settings: Settings, /, model: str, output: Path | None, dims: tuple[str, ...], as_json: bool, **of: str | None) -> None:
    """Declare what a MODEL calls: Relax IR (.json), ONNX (.onnx), torch.export (.pt2) or a Python module:attribute.

    Run again, it adds new entries, marks those no longer called and keeps every other line.
    """
    from kerneldecl.declare.toml_keys import FILE
    from kerneldecl.extract.extract import extracted_text

    if output is not None and output.name != FILE:
        raise click.UsageError(f"-o is {output}; expected a path that ends in {FILE}")
    root = settings.root if output is None else output.resolve().parent
    print_result(as_json, extracted(model, root, dims, of), extracted_text)


@click.command()
@click.argument("artifact", required=False, type=click.Path(path_type=Path))
@click.option("--against", help="The model that a compiled model (.so) was made of: .onnx, .pt2, Relax .json or module:attribute.")
@click.option("--artifact", "kernels", type=click.Path(path_type=Path), help="With --against: the artifact of a model without kernels.")
@click.option("--function", default="main", show_default=True, help="With --against: the model's function.")
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE,…", help="With --against: sizes of a dynamic dimension; repeatable.")
@key_option
@json_option
@click.pass_obj
def verify(settings: Settings, /, artifact: Path | None, against: str | None, keys: tuple[str, ...], as_json: bool, **model: Any) -> int:
    """Check an ARTIFACT's files against its manifest and run every kernel against its reference.

    Of a package (a folder, .tar or .whl), check all files, statements and signatures first.
    With --against, compare a compiled model (.so) as a whole with onnxruntime, torch or TVM at -O0, on random inputs.
    """
    if against is not None or (artifact is not None and artifact.suffix == ".so"):
        return _compare(artifact, against, model, as_json)
    from kerneldecl.cli.verify import artifacts_of, verify_artifact, verify_text
    from kerneldecl.package.folder import is_package
    from kerneldecl.package.place import is_packed

    if artifact and (is_packed(artifact) or is_package(artifact)):
        verdicts = [_verified_package(settings, artifact, keys)]
    elif keys:
        raise click.UsageError("--key is for packages: what `pull` or `export --format tar|wheel` has written")
    else:
        verdicts = [verify_artifact(folder, settings.root) for folder in ([artifact] if artifact else artifacts_of(opened(settings)))]
    found: dict[str, Any] = {"schema": 1, "artifacts": verdicts}
    print_result(as_json, found, verify_text)
    return int(max((a["exit_code"] for a in found["artifacts"]), default=ExitCode.DONE))


def _verified_package(settings: Settings, path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    from kerneldecl.cli.package import signed_text, trusted_by
    from kerneldecl.cli.verify import verify_artifact
    from kerneldecl.package.folder import ARTIFACT
    from kerneldecl.package.place import opened_package

    with opened_package(path, trusted_by(settings, keys)) as package:
        found = verify_artifact(package.folder / ARTIFACT, settings.root)
        return {**found, "artifact": str(path), "signed_by": list(package.signers), "signature": signed_text(package)}


def _compare(library: Path | None, against: str | None, model: Mapping[str, Any], as_json: bool) -> int:
    from kerneldecl.cli.deploy import compare_model, comparison_text

    if library is None or against is None:
        raise click.UsageError("a compiled model is compared with its original: kerneldecl verify MODEL.so --against MODEL.pt2")
    found = compare_model(library, against, model["kernels"], model["function"], model["dims"])
    print_result(as_json, found, comparison_text)
    return int(found["exit_code"])
