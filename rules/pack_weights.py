"""Owns the order in which tensor cores read quantised weights: a kernel that is called once, when weights are loaded.

Knows nothing of what they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kerneldecl.arrays import Array
from kerneldecl.rule import Arg, Extent, Rule, Signature

from .shared.quantization import TILE_K, TILE_ROWS, packed, packed_shape


@dataclass(frozen=True, kw_only=True)
class PackWeights(Rule):
    """P = 4-bit weights in the order of matmul_quantized's layout packed: [k / 64, n / 16, 32 lanes, 16 bytes] of W, [n, k / 2]."""

    n: Extent
    """Rows of W; a multiple of 16."""
    k: Extent
    """Weights of a row, two a byte, the low nibble first; a multiple of 64."""

    def problems(self) -> Iterator[str]:
        if self.n % TILE_ROWS or self.k % TILE_K:
            yield f"packed weights lie in tiles of {TILE_ROWS} x {TILE_K}, and n {self.n} or k {self.k} is no multiple; write multiples"

    def signature(self) -> Signature:
        return Signature((Arg("W", (self.n, self.k // 2), "uint8"),), (Arg("P", packed_shape(self.n, self.k), "uint8"),))

    def lower(self) -> list[Any]:
        from tvm import te, tirx

        w = te.placeholder((self.n, self.k // 2), "uint8", "W")

        def byte(k_tile: Any, tile: Any, lane: Any, at: Any) -> Any:
            k = k_tile * TILE_K + at // 4 * 16 + at % 2 * 8 + lane % 4 * 2 + at // 2 % 2
            first = tile * TILE_ROWS + lane // 4
            low, high = (w(row, k // 2) >> (k % 2 * 4).astype("uint8") & tirx.const(15, "uint8") for row in (first, first + 8))
            return low | high << tirx.const(4, "uint8")

        return [w, te.compute(packed_shape(self.n, self.k), byte, name="P")]

    def reference(self, *inputs: Array) -> Array:
        return packed(inputs[0])

    def flops(self) -> int:
        return 0

    def tolerance(self) -> float:
        """Return 0: weights are moved."""
        return 0.0
