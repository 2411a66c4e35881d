"""Owns what no converter may be asked: values that TVM has no arithmetic for, and nodes whose result TVM gets wrong.

Knows nothing of TVM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kerneldecl.compiler.model_import.onnx_types import STORED, type_name

DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "com.microsoft"})
_NUMBERS = frozenset(
    {f"{kind}INT{bits}" for kind in ("", "U") for bits in (8, 16, 32, 64)}
    | {"BOOL", "FLOAT16", "FLOAT", "DOUBLE", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"}
    | STORED.keys()
)
_WAY_OUT = "write it with other operators"


def refusal(model: Any, types: Mapping[str, Any]) -> tuple[str, str]:
    """Return why a model cannot be imported, and the way out; empty texts where nothing here speaks against it."""
    for each in model.graph.input:
        if problem := _problem(each.type) or ("of no dtype" if not _has_dtype(each.type) else ""):
            return f"its input {each.name} is {problem}", "give the model tensors of numbers"
    for node in model.graph.node:
        outputs = {name: types[name] for name in node.output if name in types and types[name].HasField("tensor_type")}
        found = [f"its output {name} is {problem}" for name, type_ in outputs.items() if (problem := _problem(type_))]
        if _attribute(node, "broadcast"):
            return f"ONNX's operator {place(node)} broadcasts as before opset 7", "convert the model with onnx.version_converter"
        found += [each for each in (_CONDITIONS.get(node.op_type, _fine)(node, types),) if each]
        if found:
            return f"ONNX's operator {place(node)} cannot be imported: {found[0]}", _WAY_OUT
    weights = (each for each in model.graph.initializer if type_name(each.data_type) not in _NUMBERS)
    return next(
        ((f"its weight {each.name} is of {type_name(each.data_type)}", "convert it to int8 or float32") for each in weights), ("", "")
    )


def place(node: Any) -> str:
    """Return how a node is called in a sentence."""
    operator = f"{node.domain}.{node.op_type}" if node.domain not in {"", "ai.onnx"} else node.op_type
    return f"{operator} (node {node.name or 'that gives ' + ', '.join(node.output)})"


def _problem(type_: Any) -> str:
    """Return what a value is that TVM's importer takes for something else."""
    kind = type_.WhichOneof("value") or "tensor_type"
    if kind != "tensor_type":
        return f"{'an' if kind == 'optional_type' else 'a'} {kind.removesuffix('_type').replace('_', ' ')}, not a tensor"
    element = type_.tensor_type.elem_type
    return (
        f"a tensor of {type_name(element)}, which kernels have no arithmetic for" if element and type_name(element) not in _NUMBERS else ""
    )


def _has_dtype(type_: Any) -> bool:
    return type_.WhichOneof("value") == "tensor_type" and bool(type_.tensor_type.elem_type)


def _attribute(node: Any, name: str) -> Any:
    import onnx

    return next((onnx.helper.get_attribute_value(each) for each in node.attribute if each.name == name), None)


def _fine(_: Any, __: Mapping[str, Any]) -> str:
    return ""


def _roi_align(node: Any, _: Mapping[str, Any]) -> str:
    return "TVM's mode max takes the maximum of other values" if _attribute(node, "mode") == b"max" else ""


_CONDITIONS: Mapping[str, Callable[[Any, Mapping[str, Any]], str]] = {"RoiAlign": _roi_align}
"""Why a node of an operator cannot be imported, though TVM has a converter for it; empty where it can."""
