"""Owns how an ONNX file becomes a Relax module.

Knows nothing of other formats, nor of what follows the import.
"""

from __future__ import annotations

from pathlib import Path

import tvm

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
        return import_onnx(content)
    except (NotImplementedError, tvm.error.OpError) as error:
        raise ModelError(f"TVM's importer does not take it: {last_line(error)}", "replace the operator in the model") from None
