"""Owns the actions about compiled models, as plain functions of JSON values: compile, run, compare, bench.

Knows nothing of processes or of the command line. A worker calls them, for a model may crash its process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from kerneldecl.arrays import Array, is_float, relative_error
from kerneldecl.compiler.model_import.model_error import IMPORT_ERRORS, ModelError
from kerneldecl.compiler.model_import.read_model import read_model, read_sized
from kerneldecl.deploy import bench as timing
from kerneldecl.deploy.compile import compile_module
from kerneldecl.deploy.error import DeployError
from kerneldecl.deploy.inputs import inputs_of, on_device, outputs_of, random_inputs, write_outputs
from kerneldecl.deploy.references import reference_of
from kerneldecl.deploy.sizes import each_choice, with_sizes
from kerneldecl.diagnostics.units import sizes_text
from kerneldecl.errors import KerneldeclError
from kerneldecl.relax.deployment import Model, load_model
from kerneldecl.store.scratch import scratch_folder

TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest relative error of an output by its dtype; errors of a network's layers add up."""
_RANDOM_RUNS = 2
Answer = dict[str, Any]


def _answering(action: Callable[..., Answer]) -> Callable[..., Answer]:
    """Have an action answer with the sentence of the user's mistake."""

    def answer(**request: Any) -> Answer:
        try:
            return action(**request)
        except (DeployError, ModelError) as error:
            return {"problem": error.sentence, "hint": error.hint}
        except KerneldeclError as error:
            return {"problem": str(error), "hint": "", "exit_code": int(error.exit_code)}

    return answer


@_answering
def compile_model(model: str, artifact: str, library: str, options: Mapping[str, Any]) -> Answer:
    """Compile a model with an artifact's kernels into a library; `options` are those that it was extracted with."""
    made = compile_module(_read(model, **options), Path(artifact), Path(library))
    return {"library": str(made.library), "report": str(made.report), "without": [each.function for each in made.report.missed]}


@_answering
def run(library: str, artifact: str | None, function: str, given: Sequence[str], sizes: Mapping[str, Sequence[int]], folder: str) -> Answer:
    """Run a compiled model once and write its outputs; `sizes` are those of dynamic dimensions of random inputs."""
    model = _loaded(library, artifact)
    signature = _signature(model, library, function)
    outputs = _called(model, function, inputs_of(function, signature, given, sizes))
    paths = write_outputs(outputs, Path(folder))
    described = [{"shape": list(array.shape), "dtype": array.dtype.name} for array in outputs]
    return {"outputs": [{"file": path, **each} for path, each in zip(paths, described, strict=True)]}


@_answering
def compare(library: str, artifact: str | None, function: str, against: str, sizes: Mapping[str, Sequence[int]]) -> Answer:
    """Compare a compiled model's outputs with those of the model it was compiled from, on random inputs of all sizes that are given."""
    model = _loaded(library, artifact)
    signature = _signature(model, library, function)
    choices = list(each_choice(function, signature, sizes))
    by, reference = reference_of(against)
    found: list[Answer] = []
    for choice, seed in itertools.product(choices, range(_RANDOM_RUNS)):
        arrays = random_inputs(with_sizes(signature, choice), seed)
        with _at(choice, library):
            got = _called(model, function, arrays)
        with _at(choice, against):
            want = reference(arrays)
        if len(got) != len(want):
            raise DeployError(f"the model has {len(got)} outputs, {against} has {len(want)}", "give the model that it was compiled from")
        found = [_worse(found, at, {**_verdict(at, *pair), "sizes": choice}) for at, pair in enumerate(zip(got, want, strict=True))]
    return {"by": by, "sizes": choices if choices[0] else [], "outputs": found}


@contextlib.contextmanager
def _at(sizes: Mapping[str, int], model: str) -> Iterator[None]:
    """Have what fails in a model at chosen sizes say so: it may have been exported for others."""
    try:
        yield
    except DeployError:
        raise
    except IMPORT_ERRORS as error:
        if not sizes:
            raise
        (reason, *_) = str(error).strip().splitlines() or [type(error).__name__]
        raise DeployError(f"{model} does not run with {sizes_text(sizes)}: {reason}", "choose sizes that it was exported for") from error


@_answering
def bench(model: str, artifact: str | None, function: str, against: str | None, options: Mapping[str, Any]) -> Answer:
    """Time a compiled model, or one that is compiled for it, beside torch where a torch.export program and torch are there.

    It is timed at each combination of the sizes of dynamic dimensions in `options`: all but the first are `further`.
    """
    with scratch_folder() as folder:
        library, report = model, ""
        if not model.endswith(".so"):
            if artifact is None:
                raise DeployError(f"{model}: there is no artifact to compile it with", "run `kerneldecl extract` and `kerneldecl build`")
            made = compile_module(_read(model, **options), Path(artifact), Path(folder) / "model.so")
            library, artifact, report = str(made.library), None, str(made.report)
            against = against or (model if model.endswith(".pt2") else None)
        signature = _signature(_loaded(library, artifact), library, function)
        timed: list[Answer] = []
        for choice in each_choice(function, signature, options["sizes"]):
            arrays = random_inputs(with_sizes(signature, choice))
            loaded = _loaded(library, artifact)  # again: one whose kernels were timed is slower
            with _at(choice, model):
                timed.append({"sizes": choice, **timing.bench(loaded, function, arrays, against)})
        first, *further = timed
        return {"model": model, "report": report, **first, "further": further}


def _read(model: str, sizes: Mapping[str, Sequence[int]], dtype: str) -> tvm.IRModule:
    """Return a model as `kerneldecl extract` reads it with the same sizes of dynamic dimensions and the same half precision."""
    return read_sized(model, sizes, dtype) if sizes else read_model(model, dtype=dtype)


def _loaded(library: str, artifact: str | None) -> Model:
    if not Path(library).is_file():
        raise DeployError(f"{library}: no such file", "`kerneldecl compile` writes one")
    model = load_model(library, artifact)
    if model.device_kind != "cuda":
        return model
    if not tvm.cuda(0).exist:
        raise DeployError(f"{library} is for a GPU, and there is none here", "run it on a machine that has one")
    return load_model(library, artifact, tvm.cuda(0))


def _signature(model: Model, library: str, function: str) -> Any:
    signatures = model.signatures
    if not signatures:
        raise DeployError(f"{library} does not say what inputs it takes", "compile it with `kerneldecl compile`")
    if function not in signatures:
        raise DeployError(f"{library} has no function {function}", f"it has {', '.join(signatures)}: choose with --function")
    return signatures[function]


def _called(model: Model, function: str, arrays: Sequence[Array]) -> list[Array]:
    try:
        return outputs_of(model[function](*on_device(arrays, model.device)))
    except ValueError as error:
        raise DeployError(str(error)) from None


def _verdict(at: int, got: Array, want: Array) -> Answer:
    """Return whether an output is right; integers and booleans must be equal."""
    if got.shape != want.shape:
        return {"output": at, "ok": False, "error": None, "tolerance": 0.0, "failure": f"shape {list(got.shape)}, not {list(want.shape)}"}
    dtype = got.dtype.name
    tolerance = TOLERANCES.get(dtype, 0.0) if is_float(dtype) else 0.0
    error = relative_error(got, want)
    return {"output": at, "ok": bool(np.isfinite(error)) and error <= tolerance, "error": error, "tolerance": tolerance, "failure": ""}


def _worse(before: Sequence[Answer], at: int, verdict: Answer) -> Answer:
    """Return the worse of an output's verdicts so far."""
    if len(before) <= at or not verdict["ok"]:
        return verdict
    earlier = before[at]
    return verdict if earlier["ok"] and verdict["error"] > earlier["error"] else earlier
