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
    def is_softmax(self) -> bool:
        return self.spec.kind == "softmax"

    @property
    def is_exact(self) -> bool:
        """Say whether every thread has a vector in every step."""
        return self.params.parts * self.steps * self.params.threads == self.params.vectors(self.sizes)


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

    def vector(self, step: int) -> Any:
        """Return which of the row's vectors the thread takes in a step: neighbours take neighbours."""
        return (self.part * self.kernel.steps + step) * self.kernel.params.threads + self.thread

    def has(self, step: int) -> Any:
        return T.bool(True) if self.kernel.is_exact else self.vector(step) < self.kernel.params.vectors(self.kernel.sizes)

    def column(self, step: int) -> Any:
        return self.vector(step) * self.kernel.params.width

    def offset(self, step: int) -> Any:
        return self.row * self.kernel.sizes.columns + self.column(step)
