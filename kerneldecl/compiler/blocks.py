"""Owns questions to blocks of TensorIR that readers and schedules ask alike.

Knows nothing of schedules, iteration spaces or operators.
"""

from __future__ import annotations

from typing import Any

from tvm.tirx import IterVar


def is_reduction(block: Any) -> bool:
    """Say whether a block has a reduction axis."""
    return any(axis.iter_type == IterVar.CommReduce for axis in block.iter_vars)
