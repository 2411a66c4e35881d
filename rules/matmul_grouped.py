"""Owns grouped GEMM: rows that belong to groups, as tokens do to experts, each group with a matrix of weights; sizes at run time.

Knows nothing of tiles, targets or how it is scheduled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, random_array, widened
from kerneldecl.lazy import np
from kerneldecl.model import dtype_bytes
from kerneldecl.rule import Arg, Extent, Rule, Signature, Size

from .shared.precision import accum_tolerance, reference_dtype

BLOCK = 128
"""Elements of k that share a scale of float8, and columns of B that do."""


@dataclass(frozen=True, kw_only=True)
class MatmulGrouped(Rule):
    """C[r] = A[r] B[g], where row r belongs to group g, as tokens do to experts (MoE); rows of no group give 0, whatever A holds there."""

    rows: Extent
    """Rows of A and C, of all groups; with `masked` the places of each group."""
    groups: Extent
    """Groups, each with a matrix of its own, such as experts."""
    n: Extent
    """Columns of C."""
    k: Extent
    """Extent of the reduction."""
    masked: bool = False
    """Whether A and C are [groups, rows, …], of which a group uses the first `counts`; else group g ends before row `offsets[g]`."""
    layout: Literal["nt", "nn"] = "nt"
    """Layout of A, then of B: t stores a group's B as [n, k], n as [k, n]."""
    dtype: Literal["float16", "bfloat16", "float32", "float8_e4m3fn"] = "bfloat16"
    """Dtype of A and B. float8 has float32 scales for each 128 elements of a row of A, and for each 128 x 128 block of B."""
    out_dtype: Literal["float16", "bfloat16", "float32", ""] = ""
    """Dtype of C; by default dtype, bfloat16 for float8."""
    used: Size = 0
    """Rows in use while kernels are tuned, groups being random; 0 for all, or half of them with `masked`. Kernels take any number."""

    @property
    def _out_dtype(self) -> str:
        return self.out_dtype or ("bfloat16" if self._is_scaled else self.dtype)

    @property
    def _is_scaled(self) -> bool:
        return self.dtype.startswith("float8")

    @property
    def _places(self) -> int:
        """Return the rows of A and C."""
        return self.rows * (self.groups if self.masked else 1)

    @property
    def _used(self) -> int:
        return self.used or max(1, self._places // (2 if self.masked else 1))

    def problems(self) -> Iterator[str]:
        if self.used > self._places:
            yield f"used {self.used} is over the {self._places} rows that there are; write fewer"
        if self._places >= 2**31:
            yield f"{self._places} rows are more than int32 counts; write fewer"
        if self._is_scaled and self.layout != "nt":
            yield f"layout {self.layout} is not for dtype {self.dtype}, whose blocks lie along k; nt is"

    def signature(self) -> Signature:
        outer = (self.groups, self.rows) if self.masked else (self.rows,)
        steps = -(-self.k // BLOCK)
        a = [Arg("A", (*outer, self.k), self.dtype)]
        b = [Arg("B", (self.groups, *((self.n, self.k) if self.layout == "nt" else (self.k, self.n))), self.dtype)]
        if self._is_scaled:
            a.append(Arg("A_scale", (*outer, steps), "float32"))
            b.append(Arg("B_scale", (self.groups, -(-self.n // BLOCK), steps), "float32"))
        sizes = Arg("counts" if self.masked else "offsets", (self.groups,), "int32")
        return Signature((*a, *b, sizes), (Arg("C", (*outer, self.n), self._out_dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.matmul_grouped import GroupedSpec, matmul_grouped

        spec = GroupedSpec(
            rows=self.rows,
            groups=self.groups,
            n=self.n,
            k=self.k,
            dtype=self.dtype,
            out_dtype=self._out_dtype,
            layout=self.layout,
            is_masked=self.masked,
        )
        return matmul_grouped(spec)

    def reference(self, *inputs: Array) -> Array:
        """Compute one group after another; raise ValueError where sizes are none."""
        *operands, sizes = inputs
        a, b = (operands[0], operands[1]) if not self._is_scaled else (self._scaled_a(*operands[:2]), operands[2])
        wide = reference_dtype(self._out_dtype, self.dtype)
        out = np.zeros((self._places, self.n), wide)
        flat = a.reshape(self._places, self.k)
        for group, rows in enumerate(self.rows_of_groups(sizes)):
            weights = b[group] if not self._is_scaled else self._scaled_b(b[group], operands[3][group])
            weights = widened(weights, wide)
            out[rows] = widened(flat[rows], wide) @ (weights.T if self.layout == "nt" else weights)
        return out.reshape(self.signature().outputs[0].shape)

    def rows_of_groups(self, sizes: Array) -> list[slice]:
        """Return the rows of each group among all of A; raise ValueError where offsets decrease, or a size is beyond the rows."""
        name = "counts" if self.masked else "offsets"
        for group, size in enumerate(sizes):
            if not 0 <= size <= self.rows:
                raise ValueError(f"{name}[{group}] is {size}; it must be 0 to {self.rows}, the rows that there are")
            if group and not self.masked and size < sizes[group - 1]:
                raise ValueError(f"offsets decrease: {sizes[group - 1]}, then {size} at group {group}; each is where a group ends")
        if self.masked:
            return [slice(group * self.rows, group * self.rows + int(count)) for group, count in enumerate(sizes)]
        ends = [0, *map(int, sizes)]
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def _scaled_a(self, a: Array, scales: Array) -> Array:
        return np.asarray(a.astype(np.float32) * np.repeat(scales, BLOCK, -1)[..., : self.k])

    def _scaled_b(self, b: Array, scales: Array) -> Array:
        whole = np.repeat(np.repeat(scales, BLOCK, 0), BLOCK, 1)
        return np.asarray(b.astype(np.float32) * whole[: self.n, : self.k])

    def rows_vary(self) -> bool:
        """Return True with scales: a huge one makes results huge, and what tensor cores leave of a difference between products with it."""
        return self._is_scaled

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return normal operands, B scaled so that C has unit variance, and groups of random size: one is empty, one has one row."""
        *operands, _ = self.signature().inputs
        arrays = []
        for arg in operands:
            if arg.name.endswith("_scale"):
                scale = 1 / math.sqrt(self.k) if arg.name == "B_scale" else 1.0
                arrays.append((rng.uniform(0.5, 1.5, arg.shape) * scale).astype(np.float32))
            else:
                arrays.append(random_array(rng, arg, 1 / math.sqrt(self.k) if arg.name == "B" and not self._is_scaled else 1.0))
        return [*arrays, self.sizes(rng)]

    def sizes(self, rng: np.random.Generator) -> Array:
        """Return random counts, or offsets."""
        counts = self._counts(rng)
        return np.asarray((counts if self.masked else np.cumsum(counts)).astype(np.int32))

    def _counts(self, rng: np.random.Generator) -> Array:
        """Return the rows of each group: each row goes to any group; where there are three, one has one row, and one none."""
        chosen = rng.permutation(self.groups)
        few = min(2, self.groups - 1) if self._used > 1 else 0
        counts = np.zeros(self.groups, np.int64)
        counts[chosen[:few]] = (1, 0)[:few]
        rest = chosen[few:]
        counts[rest] = rng.multinomial(self._used - int(few > 0), np.full(len(rest), 1 / len(rest)))
        return np.minimum(counts, self.rows) if self.masked else counts

    def flops(self) -> int:
        """Return the operations for the rows in use while kernels are tuned."""
        return 2 * self._used * self.n * self.k

    def least_bytes(self) -> int:
        """Return the bytes of the rows in use, of all weights, and of all of C, each once."""
        out = self._places * self.n * dtype_bytes(self._out_dtype)
        scales = 4 * (-(-self.k // BLOCK)) * (self._used + self.groups * -(-self.n // BLOCK)) if self._is_scaled else 0
        return out + (self._used + self.groups * self.n) * self.k * dtype_bytes(self.dtype) + scales + 4 * self.groups

    def tolerance(self) -> float:
        return accum_tolerance(self._out_dtype, "float32", self.k, self.dtype)
