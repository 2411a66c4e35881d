"""Owns the import of torchvision beside a torch for CPUs, where torchvision's wheel is one for CUDA.

Knows nothing of which models are taken from it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

_OPERATORS = [f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")]
"""Operators that torchvision registers the shapes of when it is imported, and no classifier calls."""
_kept: list[Any] = []


def torchvision_models() -> Any:
    """Return torchvision.models; raise ImportError where torchvision is missing.

    transformers imports torchvision where it is installed: call this before it.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ImportError("torchvision is not installed")
    if not hasattr(torch.ops.torchvision, "nms") and not _operators_load(Path(spec.origin).parent):
        library = torch.library.Library("torchvision", "DEF")
        for operator in _OPERATORS:
            library.define(operator)
        _kept.append(library)  # its end would take the operators back
    import torchvision.models

    return torchvision.models


def _operators_load(package: Path) -> bool:
    """Say whether torchvision's compiled operators load beside this torch."""
    for library in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
        return True
    return False
