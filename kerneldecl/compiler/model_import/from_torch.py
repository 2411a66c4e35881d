"""Owns how a torch.export program becomes a Relax module.

Knows nothing of other formats, nor of what follows the import.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import tvm

from kerneldecl.compiler.model_import.model_error import ModelError, last_line


def from_torch(path: Path) -> tvm.IRModule:
    try:
        import torch
    except ImportError:
        raise ModelError("the package torch is not installed", "pip install torch, or export the model as ONNX") from None
    from tvm.relax.frontend.torch import from_exported_program

    try:
        program = torch.export.load(path)
    except (zipfile.BadZipFile, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(
            f"not a program that torch {torch.__version__} can read: {last_line(error)}", "torch.export.save writes one"
        ) from None
    try:
        return from_exported_program(program, keep_params_as_input=False)
    except (NotImplementedError, AssertionError) as error:
        raise ModelError(f"TVM's importer does not take it: {last_line(error)}", "replace the operator in the model") from None
