"""Owns how an ONNX file becomes a Relax module.

Knows nothing of other formats, nor of what follows the import.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.compiler.graph.named_constants import name_by_value
from kerneldecl.compiler.model_import.model_error import ModelError, last_line


def from_onnx(path: Path) -> tvm.IRModule:
    try:
        import onnx
    except ImportError:
        raise ModelError("the package onnx is not installed", "pip install onnx") from None
    from google.protobuf.message import DecodeError
    from tvm.relax.frontend.onnx import from_onnx as import_onnx

    try:
        content = onnx.load(path)
        onnx.checker.check_model(content)
    except DecodeError as error:
        raise ModelError(f"not ONNX: {last_line(error)}") from None
    except onnx.checker.ValidationError as error:
        raise ModelError(f"ONNX's own checker objects: {last_line(error)}", "export the model again") from None
    try:
        return name_by_value(import_onnx(content), _weights(content.graph))
    except (NotImplementedError, tvm.error.OpError) as error:
        raise ModelError(f"TVM's importer does not take it: {last_line(error)}", "replace the operator in the model") from None


def _weights(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each weight in the order of the nodes that read it first.

    torch keeps no name for a weight that it transposed (onnx::MatMul_123); the path of the node (/encoder/dense/MatMul) has one.
    """
    from onnx import numpy_helper

    values = {each.name: each for each in graph.initializer}
    for node in graph.node:
        for name in node.input:
            if name not in values:
                continue
            *path, _ = node.name.strip("/").split("/")
            modules = [part for part, inner in zip(path, [*path, ""][1:], strict=True) if not inner.startswith(f"{part}.")]  # mlp/mlp.0
            is_named = "::" not in name and not name.startswith("/")
            yield name if is_named else ".".join([*modules, "weight"]) if modules else "", numpy_helper.to_array(values.pop(name))
