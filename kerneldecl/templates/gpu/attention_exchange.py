"""Owns what warps with the same rows of queries tell each other through shared memory: maxima of rows, powers, sums of rows.

Knows nothing of how scores are multiplied, or of what becomes of powers.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.templates.gpu.attention_tile import Warp
from kerneldecl.templates.hopper.attention_softmax import highest_of


def _row(warp: Warp, number: int, half: int) -> Any:
    """Return which of the warp's rows is the thread's in a half of a fragment."""
    return number * FRAGMENT + warp.lane // 4 + half * 8


def _tell(warp: Warp, rows: list[list[Any]]) -> None:
    """Store a number for each row: one of the four threads that share it does so."""
    with T.If(warp.lane % 4 == 0), T.Then():
        for number, halves in enumerate(rows):
            for half, value in enumerate(halves):
                T.buffer_store(warp.smem.rows, value, [warp.group, warp.column, _row(warp, number, half)])


def tell_maxima(warp: Warp) -> None:
    """Store the maxima of the warp's scores."""
    _tell(warp, [[fragment.softmax.partial[half] for half in range(2)] for fragment in warp.fragments])


def take_maxima(warp: Warp) -> None:
    """Replace the maxima of the warp's scores by those of all its rows' scores."""
    for number, fragment in enumerate(warp.fragments):
        for half in range(2):
            told = [warp.smem.rows[warp.group, column, _row(warp, number, half)] for column in range(warp.kernel.params.column_warps)]
            highest = told[0]
            for other in told[1:]:
                highest = highest_of(highest, other)
            T.buffer_store(fragment.softmax.partial, highest, [half])


def tell_powers(warp: Warp) -> None:
    """Store the warp's powers, which are rounded to pairs."""
    for number, fragment in enumerate(warp.fragments):
        for i in range(warp.kernel.scores // 2):
            word = warp.column * (warp.kernel.params.warp_keys // 2) + i // 2 * 4 + warp.lane % 4
            T.buffer_store(warp.smem.powers, fragment.operand[i], [warp.smem_row + _row(warp, number, i % 2), word])


def tell_sums(warp: Warp) -> None:
    """Store the sums of the warp's powers, which its threads have added up."""
    _tell(warp, [[fragment.softmax.total[half * 2] for half in range(2)] for fragment in warp.fragments])


def take_sums(warp: Warp) -> None:
    """Replace the sums of the warp's powers by those of all its rows' powers."""
    for number, fragment in enumerate(warp.fragments):
        for half in range(2):
            value = tirx.const(0.0, "float32")
            for column in range(warp.kernel.params.column_warps):
                value = value + warp.smem.rows[warp.group, column, _row(warp, number, half)]
            T.buffer_store(fragment.softmax.total, value, [half * 2])
