"""Owns the import of torchvision beside a torch for CPUs, where torchvision's wheel is one for CUDA.

Knows nothing of which models are taken from it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_OPERATORS = [f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")]
"""Operators that torchvision registers the shapes of when it is imported, and no model calls."""
_kept: list[Any] = []


def models() -> ModuleType:
    """Return torchvision.models; skip the test where torch or torchvision is missing."""
    reason = "pip install -e '.[models]'"
    torch = pytest.importorskip("torch", reason=reason)
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        pytest.skip(reason)
    if not hasattr(torch.ops.torchvision, "nms") and not _operators_load(torch, Path(spec.origin).parent):
        library = torch.library.Library("torchvision", "DEF")
        for operator in _OPERATORS:
            library.define(operator)
        _kept.append(library)  # its end would take the operator back
    import torchvision.models

    found: ModuleType = torchvision.models
    return found


def _operators_load(torch: Any, package: Path) -> bool:
    """Say whether torchvision's compiled operators load beside this torch."""
    for library in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
        return True
    return False
