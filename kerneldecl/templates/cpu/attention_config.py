"""Owns what the parts of attention's kernel on CPUs share: the kernel, a task's place and its buffers.

Knows nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kerneldecl.analysis.cpu_params import CpuAttentionParams
from kerneldecl.compiler.attention import AttentionSpec


class Place(NamedTuple):
    """A task's sequence, head of queries, the head of keys that it sees, and first query."""

    batch: Any
    head: Any
    kv_head: Any
    row: Any


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
        return not self.spec.band.is_full or self.spec.keys % self.params.tile_n != 0

    @property
    def has_bias_columns(self) -> bool:
        """Say whether there is a mask whose rows differ by query."""
        return self.spec.has_mask and self.spec.mask[-2] > 1

    def operand(self, name: str, batch: Any, head: Any, row: Any, column: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the argument that holds Q, K or V, and the index of an element; the head is one of Q's or of those of K and V."""
        spec = self.spec
        if spec.layout == "packed":
            head = head + {"Q": 0, "K": spec.heads, "V": spec.heads + spec.kv_heads}[name]
            name = "QKV"
        return self.args[name], spec.index(batch, head, row, column)

    def mask_index(self, place: Place, row: Any, key: Any) -> tuple[Any, ...]:
        """Return the index of the mask's element; axes of one element are for all."""
        shape = self.spec.mask
        at = (place.batch, place.head, row, key)[4 - len(shape) :]
        return tuple(0 if extent == 1 else index for extent, index in zip(shape, at, strict=True))


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
    """What is added to the scores of a block of keys where it differs by query; None without."""
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
