"""Owns a warp's view of the kernel of attention against a KV cache: arguments, shared memory, registers, its place.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.templates.gpu.attention_decode_combine import Args
from kerneldecl.templates.gpu.attention_decode_config import DecodeKernel

ALL_LANES = 0xFFFFFFFF


class Smem(NamedTuple):
    """Buffers in shared memory."""

    k: Any
    v: Any
    results: Any
    """In the place of both, once all warps are done: results by group and row."""
    references: Any
    """By group and row."""
    totals: Any


class Registers(NamedTuple):
    """A lane's registers."""

    q: Any
    acc: Any
    """Results, not yet divided by the sums of their rows."""
    scores: Any
    powers: Any
    """Powers, rounded: operand B."""
    reference: Any
    """What is subtracted from the scores of each row: their maximum, or what it was `MAX_POWER_LOG2` ago."""
    total: Any
    """Sums of powers of this lane alone."""
    partial: Any
    """Maxima of a block, then what earlier results are multiplied by."""
    limit: Any
    """The first key that a row does not see."""


class Warp(NamedTuple):
    """A warp's view of the kernel."""

    kernel: DecodeKernel
    args: Args
    smem: Smem
    registers: Registers
    place: tuple[Any, Any, Any]
    """Sequence, head of keys, and the thread block's first row of queries."""
    length: Any
    ids: tuple[Any, Any]
    """Warp, lane."""

    @property
    def lane(self) -> Any:
        return self.ids[1]

    @property
    def group(self) -> Any:
        """Return which of the groups of warps that share keys this one is in."""
        return self.ids[0] // self.kernel.params.warps_m

    @property
    def member(self) -> Any:
        return self.ids[0] % self.kernel.params.warps_m

    @property
    def first_row(self) -> Any:
        """Return its first row among those of the thread block."""
        return self.member * self.kernel.params.rows

    @property
    def first_stage(self) -> Any:
        return self.group * self.kernel.params.stages

    @property
    def thread(self) -> Any:
        return self.ids[0] * WARP_LANES + self.ids[1]
