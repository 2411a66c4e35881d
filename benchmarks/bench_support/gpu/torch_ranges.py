"""Owns by how much torch's inputs shrink where results of them would leave the range of the outputs' dtypes, as a build's own inputs do.

Knows nothing of rules, kernels or timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kerneldecl.runners.input_range import MOST, halvings
from kerneldecl.signature import Arg

Tensors = Sequence[Any]


def within_range(inputs: Tensors, results: Callable[[Tensors], Tensors], outputs: Sequence[Arg]) -> tuple[Tensors, Tensors]:
    """Return inputs whose results, all or the first outputs, stay inside of the range of their dtypes, and the results.

    Inputs whose results stay inside come back as they are, and so do those of a function that grows whatever they are.
    """
    first = results(inputs)
    made, wants, times = inputs, first, 0
    while (more := _halvings(wants, outputs)) and times + more <= MOST and any(x.is_floating_point() for x in inputs):
        times += more
        made = [(x.double() * 2.0**-times).to(x.dtype) if x.is_floating_point() else x for x in inputs]
        wants = results(made)
    return (inputs, first) if more else (made, wants)


def _halvings(wants: Tensors, outputs: Sequence[Arg]) -> int:
    return halvings([np.array([_largest(want)]) for want in wants], outputs[: len(wants)])


def _largest(want: Any) -> float:
    """Return the largest finite magnitude; 0 of a tensor without finite numbers."""
    if not want.numel() or not want.is_floating_point():
        return 0.0
    wide = want.double()
    return float(wide.where(wide.isfinite(), 0.0).abs().max())
