"""Owns what kernels of attention on tensor cores have in common: arguments, tiles and their order, the registers of a thread.

Knows nothing of instructions, shared memory or the kernel's statements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tvm import tirx

from kerneldecl.analysis.tensor_cores import PTX_TYPES
from kerneldecl.compiler.attention import AttentionSpec

LOG2_E = math.log2(math.e)


class Tiling(Protocol):
    """What parameters of all templates have."""

    @property
    def block_m(self) -> int: ...

    @property
    def block_n(self) -> int: ...

    @property
    def fma_powers(self) -> int: ...


@dataclass(frozen=True)
class FusedAttention:
    """One kernel: tiles of `params.block_m` rows of queries go through blocks of `params.block_n` keys, from the last that they see."""

    arguments: Mapping[str, Any]
    """Buffers by the names that `AttentionSpec.arguments` gives them, in its order."""
    spec: AttentionSpec
    params: Tiling

    def argument(self, name: str) -> Any:
        """Return the buffer of an argument."""
        return self.arguments[name]

    @property
    def first_heads(self) -> tuple[int, int]:
        """Return the first heads of K and of V in their argument."""
        spec = self.spec
        return (spec.heads, spec.heads + spec.kv_heads) if spec.layout == "packed" else (0, 0)

    # ---- tiles

    @property
    def row_tiles(self) -> int:
        return -(-self.spec.queries // self.params.block_m)

    @property
    def all_heads(self) -> int:
        return self.spec.batch * self.spec.heads

    @property
    def key_blocks(self) -> int:
        return -(-self.spec.keys // self.params.block_n)

    @property
    def has_unseen_keys(self) -> bool:
        """Say whether some blocks, the last one among them, have keys that not all rows see, besides those that a mask hides."""
        return not self.spec.band.is_full or self.spec.keys % self.params.block_n != 0

    def place(self, linear: Any, grid: tuple[int, int], together: int) -> tuple[Any, Any]:
        """Return the tile of rows and the head that are the `linear`-th to be computed, of a grid of so many rows and heads.

        Heads that belong together come before others; of theirs, the tiles that see the most keys come first.
        """
        rows, heads = grid
        first = linear // (rows * together) * together
        size = together if heads % together == 0 else tirx.min(together, heads - first)
        index = linear % (rows * together)
        tile = rows - 1 - index // size if self.spec.is_causal else index // size
        return tile, first + index % size

    @property
    def fma_powers(self) -> int:
        """Return how many powers of each eight CUDA cores compute."""
        return self.params.fma_powers

    # ---- registers of a thread, for each of its fragments of rows

    @property
    def scores(self) -> int:
        return self.params.block_n // 2

    @property
    def results(self) -> int:
        return self.spec.value_dim // 2

    @property
    def scale_log2(self) -> float:
        """Return what scores are multiplied by before powers of two are taken of them: biased ones are scaled before."""
        return (1.0 if self.spec.sizes.has_bias else self.spec.scale) * LOG2_E

    @property
    def narrow(self) -> str:
        """Return the conversion of two float32 to a register of powers."""
        return narrow(self.spec.dtype)


def narrow(dtype: str) -> str:
    """Return the conversion of two float32 to a register."""
    return f"cvt.rn.{PTX_TYPES[dtype]}x2.f32"
