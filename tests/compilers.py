"""Owns what tests of device code need: nvcc, which `pip install -e '.[dev]'` brings along.

Knows nothing of what is compiled.
"""

from __future__ import annotations

import pytest

from kerneldecl import nvcc
from kerneldecl.errors import ToolchainError


def missing() -> str:
    """Return why there is no compiler for device code; empty where there is one."""
    try:
        nvcc.compiler()
    except ToolchainError as error:
        return str(error)
    return ""


needs_nvcc = pytest.mark.skipif(bool(missing()), reason=missing())
