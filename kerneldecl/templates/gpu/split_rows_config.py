"""Owns what the kernels of split rows are made for, and a thread's view of its part of a row: which elements are its own.

Knows nothing of the kernels' statements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.split_rows import STATISTICS, RowSizes, SplitRowsParams
from kerneldecl.compiler.rowwise import RowSpec


@dataclass(frozen=True)
class SplitRowsKernel:
    """A function of rows with the parameters of its kernels, and what follows from both."""

    spec: RowSpec
    params: SplitRowsParams
    pdl: bool

    @property
    def sizes(self) -> RowSizes:
        return self.spec.sizes

    @property
    def steps(self) -> int:
        return self.params.steps(self.sizes)

    @property
    def kept(self) -> int:
        """Return the elements of a thread."""
        return self.steps * self.params.width

    @property
    def statistics(self) -> int:
        return STATISTICS[self.spec.kind]

    @property
    def has_weights(self) -> bool:
        return self.spec.kind in {"layer_norm", "rms_norm"}

    @property
    def is_softmax(self) -> bool:
        return self.spec.kind == "softmax"

    @property
    def is_ragged(self) -> bool:
        """Say whether rows begin and end within aligned vectors."""
        return self.params.is_ragged(self.sizes)

    @property
    def is_exact(self) -> bool:
        """Say whether every thread has a whole vector in every step."""
        return not self.is_ragged and self.params.parts * self.steps * self.params.threads == self.params.vectors(self.sizes)


class Args(NamedTuple):
    """Flat buffers of the function's arguments."""

    x: Any
    gamma: Any
    """None for softmax."""
    beta: Any
    """None without one."""
    y: Any


class Registers(NamedTuple):
    """A thread's registers."""

    held: Any
    """Elements as they were loaded."""
    gamma: Any
    beta: Any
    powers: Any
    """Of softmax: powers of the elements, as distances to the maximum of the warp or of the row."""
    stats: Any
    """What the thread, its warp, its part or the row has found, one after the other."""
    own: Any
    """Of softmax: what its powers are distances to."""


class Part(NamedTuple):
    """A thread's view of its part of a row."""

    kernel: SplitRowsKernel
    args: Args
    row: Any
    part: Any
    thread: Any

    @property
    def lane(self) -> Any:
        return self.thread % WARP_LANES

    @property
    def warp(self) -> Any:
        return self.thread // WARP_LANES

    @property
    def first(self) -> Any:
        """Return the offset of the row's first element."""
        return self.row * self.kernel.sizes.columns

    def vector(self, step: int) -> Any:
        """Return which of the vectors that the row touches the thread takes in a step: neighbours take neighbours."""
        return (self.part * self.kernel.steps + step) * self.kernel.params.threads + self.thread

    def column(self, step: int) -> Any:
        """Return the column of the thread's first element in a step; before the row's first one where that is within a vector."""
        width = self.kernel.params.width
        return self.vector(step) * width - self.first % width if self.kernel.is_ragged else self.vector(step) * width

    def offset(self, step: int) -> Any:
        """Return the offset of the thread's first element in a step, a multiple of the width: written so that TVM sees it."""
        width = self.kernel.params.width
        return (self.first // width + self.vector(step)) * width if self.kernel.is_ragged else self.first + self.column(step)

    def is_whole(self, step: int) -> Any:
        """Say whether the thread has a whole vector of the row in a step."""
        is_within = self.column(step) <= self.kernel.sizes.columns - self.kernel.params.width
        return T.And(self.column(step) >= 0, is_within) if self.kernel.is_ragged else is_within

    def has(self, step: int, w: int) -> Any:
        """Say whether an element of the thread's vector in a step is one of the row's."""
        return T.And(self.column(step) + w >= 0, self.column(step) + w < self.kernel.sizes.columns)

    def weight(self, step: int, w: int) -> Any:
        """Return the place of an element's weight, of any where there is no such element."""
        return T.max(T.min(self.column(step) + w, self.kernel.sizes.columns - 1), 0)
