"""Owns modules that are imported when they are first used: a plan imports rules for their attributes, and computes nothing.

Knows nothing of what they are used for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["ml_dtypes", "np"]


class Later:
    """A module that is imported when anything of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._name), name)
        vars(self)[name] = value  # which is found the next time
        return value


if TYPE_CHECKING:
    import ml_dtypes
    import numpy as np
else:
    ml_dtypes, np = Later("ml_dtypes"), Later("numpy")
