"""Owns ONNX's own node tests: their models, what they expect, and how ours are compiled and compared.

Knows nothing of which of them are to pass.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import numpy_helper
from onnx.backend.test.case import node
from onnx.backend.test.loader import load_model_tests
from tvm import relax

from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.model_import.from_onnx import module_of_model
from kerneldecl.compiler.model_import.read_model import fused

CONSTANTS = frozenset(
    {
        *("axes", "axis", "depth", "k", "max_output_boxes_per_class", "iou_threshold", "score_threshold", "new_shape", "pads"),
        *("cond", "r", "roi", "scales", "shape", "size", "sizes", "split", "t", "trip_count", "value"),
    }
)
"""Inputs that models have as initializers and the tests as inputs: what depends on them is known when a model is compiled."""
HELD = {
    "int2": "int8",
    "int4": "int8",
    "uint2": "uint8",
    "uint4": "uint8",
    "float4_e2m1fn": "float16",
    "float8_e4m3fnuz": "float16",
    "float8_e5m2fnuz": "float16",
    "float8_e8m0fnu": "float32",
}
"""The dtype in which models take and return what kernels have no arithmetic for."""
_TWO_UNITS = {"bfloat16": 2**-6, "float16": 2**-9}
"""The relative difference of two units in the last place: the expected outputs are rounded after each operator. onnx's runner says so of
bfloat16."""


@functools.cache
def cases() -> dict[str, Any]:
    with np.errstate(all="ignore"):
        return {case.name: case for case in load_model_tests(kind="node")}


def case_of(name: str) -> Any:
    """Return one case. Its module computes what it expects when it is imported: those alone are imported that may have it."""
    flat = name.replace("_", "")
    with np.errstate(all="ignore"):
        for path in map(Path, sorted(_texts())):
            if path.stem.replace("_", "") in flat or f'"{name.removesuffix("_expanded")}"' in _texts()[str(path)]:
                importlib.import_module(f"{node.__name__}.{path.stem}")
    return next((case for case in node._NodeTestCases if case.name == name), None) or cases()[name]


@functools.cache
def _texts() -> dict[str, str]:
    """Return the text of each module with cases, by path."""
    paths = (path for folder in node.__path__ for path in Path(folder).glob("[!_]*.py"))
    return {str(path): path.read_text(encoding="utf-8") for path in paths}


def as_it_is(case: Any) -> tuple[Any, list[Any]]:
    """Return a case's model and its inputs."""
    return case.model, [_array(value) for value in case.data_sets[0][0]]


def with_constants(case: Any) -> tuple[Any, list[Any]]:
    """Return a case's model with initializers in place of the inputs that models have as such, and its other inputs."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    args = []
    inputs = list(case.model.graph.input)
    del model.graph.input[:]
    for info, value in zip(inputs, case.data_sets[0][0], strict=True):
        if info.name in CONSTANTS:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), info.name))
        else:
            model.graph.input.append(info)
            args.append(_array(value))
    return model, args


def has_constants(case: Any) -> bool:
    return any(info.name in CONSTANTS for info in case.model.graph.input)


def difference(case: Any, model: Any, args: Sequence[Any]) -> str:
    """Return how a model's outputs differ from what its case expects, empty where they do not; raise ModelError where it is refused."""
    # -O1: a fifth of the time to compile, for arithmetic that is the same.
    target = tvm.target.Target({"kind": "llvm", "opt-level": 1})
    executable = relax.build(fused(module_of_model(model), target), target, tir_pipeline=PIPELINE)
    return compared(case, relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, args)))


def compared(case: Any, found: Any) -> str:
    """Return how what a model returned differs from what its case expects, empty where it does not."""
    outputs, expected = _flat(found), [np.asarray(_array(each)) for each in _flat(case.data_sets[0][1])]
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs, not {len(expected)}"
    return next(filter(None, map(functools.partial(_difference, case), outputs, expected)), "")


def _difference(case: Any, output: Any, expected: Any) -> str:
    found = output.numpy()
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} of {found.shape}, not {expected.dtype} of {expected.shape}"
    tolerance = max(case.rtol, _TWO_UNITS.get(found.dtype.name, 0))
    if found.dtype.kind not in "biuf":
        found, expected = found.astype("float32"), expected.astype("float32")
    try:
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-5)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


def _array(value: Any) -> Any:
    array = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
    dtype = HELD.get(str(getattr(array, "dtype", "")))
    return array.astype(dtype) if dtype else array


def _flat(value: Any) -> list[Any]:
    """Return the tensors in what a model returns, or a case expects."""
    is_tensor = hasattr(value, "numpy") or isinstance(value, np.ndarray | np.generic | onnx.TensorProto)
    return [value] if is_tensor else [each for field in value for each in _flat(field)]
