"""Owns small Relax modules for tests of graph passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})


def random(*shape: int, seed: int = 0) -> Any:
    """Return a constant; all its values are positive, as variances are."""
    return relax.const(np.random.default_rng(seed + sum(shape)).uniform(0.5, 1.5, shape).astype("float32"))
