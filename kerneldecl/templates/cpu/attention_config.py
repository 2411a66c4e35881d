"""Owns what the parts of attention's kernel on CPUs share: the kernel, a task's place and its buffers.

Knows nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kerneldecl.analysis.cpu_params import CpuAttentionParams
from kerneldecl.compiler.attention import AttentionSpec


@dataclass(frozen=True)
class AttentionKernel:
    """An attention, the parameters of its kernel, the float32 of a vector, and the arguments by name."""

    spec: AttentionSpec
    params: CpuAttentionParams
    lanes: int
    args: Mapping[str, Any]

    @property
    def vectors(self) -> int:
        """Return the vectors that hold one number of each query of a block."""
        return self.params.block_m // self.lanes

    @property
    def blocks(self) -> int:
        """Return the blocks of queries of a head."""
        return -(-self.spec.queries // self.params.block_m)

    @property
    def tasks(self) -> int:
        return self.spec.batch * self.spec.heads * self.blocks

    @property
    def has_uneven_tiles(self) -> bool:
        """Say whether some block of keys is no multiple of a tile."""
        return self.spec.is_causal or self.spec.keys % self.params.tile_n != 0


class Place(NamedTuple):
    """A task's sequence, head of queries, the head of keys that it sees, and first query."""

    batch: Any
    head: Any
    kv_head: Any
    row: Any


Element = Callable[[Place, Any, Any], Any]
"""Gives an element of keys or values in float32 by place, row and column."""


class Task(NamedTuple):
    """A block of queries of one head: queries are columns of all its buffers, so that a vector holds numbers of several."""

    kernel: AttentionKernel
    place: Place
    keys: Element
    values: Element
    queries: Any
    """Elements of queries, scaled."""
    powers: Any
    """Scores of a block of keys, and then their powers."""
    bias: Any
    """The mask of a block of keys; None without one."""
    results: Any
    """Sums of weighted values, relative to the highest score until then."""
    highest: Any
    """Each query's highest score, this block's included."""
    before: Any
    """The same without this block's."""
    shrink: Any
    """What earlier sums are multiplied by, since a higher score was found."""
    total: Any
    """Sums of powers."""
