"""Owns GEMM with quantised weights, and with quantised activations, with an optional epilogue in the same kernel.

Knows nothing of how weights came to be quantised, of tiles or targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from kerneldecl.arrays import Array, by_rows, numpy_dtype, random_array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature

from .shared.epilogue import Epilogue, RowStep, Step
from .shared.precision import accum_dtype, accum_tolerance, reference_dtype
from .shared.quantization import (
    BLOCKS,
    FLOAT4,
    TILE_K,
    TILE_ROWS,
    BlockScaleDtype,
    Granularity,
    WeightDtype,
    WeightLayout,
    Weights,
)

ROW_GROUP = 128
"""Elements of a row of activations that share a scale where `activation_scales` is "group"."""


@dataclass(frozen=True, kw_only=True)
class MatmulQuantized(Rule):
    """C = epilogue(A @ W^T) with quantised W, [n, k]: each weight is (value - zero point) * scale, rounded to dtype if that has 16 bits."""

    m: Extent
    """Rows of A and of C."""
    n: Extent
    """Rows of W, columns of C."""
    k: Extent
    """Extent of the reduction."""
    weights: WeightDtype = "int4"
    """Dtype of W. Of 4 bits, two weights share a byte along k, the low nibble first; int4 has values 0 to 15, of which 8 is subtracted."""
    scales: Granularity = "group"
    """What shares a scale: W (tensor), a row (column), `group` along k (group, [k / group, n]) or a block ([n / group, k / group])."""
    group: Extent = 128
    """Weights along k that share a scale, where scales are of groups or blocks; a divisor of k. 32 for MXFP4, 16 for NVFP4."""
    scale_dtype: BlockScaleDtype = ""
    """Dtype of the scales of float4_e2m1fn: float8_e8m0fnu (MXFP4; its bytes are passed as uint8) or float8_e4m3fn (NVFP4)."""
    tensor_scale: bool = False
    """Whether all of NVFP4's weights share one more scale, a float32 by which accumulators are multiplied."""
    zero_points: bool = False
    """Whether each scale has a zero point beside it, uint8 for int4 and int8 for int8; without, those are 8 and 0."""
    layout: WeightLayout = "rows"
    """rows stores W as [n, k]; packed as rule pack_weights returns it, of 4 bits alone, which tensor cores read fastest."""
    dtype: Literal["float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"] = "float16"
    """Dtype of A. With 16 bits it is the dtype of the scales too, but for scale_dtype; those of 8-bit activations are float32."""
    activation_scales: Literal["", "token", "group"] = ""
    """What shares a scale of A of 8 bits: a row (token, scales [m]), or 128 elements of it (group, [k / 128, m]); by default A has none."""
    out_dtype: Dtype | Literal[""] = ""
    """Dtype of C, the bias and the residual; by default dtype, bfloat16 for 8-bit activations."""
    epilogue: tuple[Step | RowStep, ...] = ()
    """Steps in order: bias adds a vector [n], add an operand like C, mul multiplies by one, scale, scale_columns, scale_rows by float32."""

    @property
    def _is_wide(self) -> bool:
        """Say whether activations have 16 bits."""
        return self.dtype in {"float16", "bfloat16"}

    @property
    def _compute_dtype(self) -> str:
        """Return the dtype of dequantised operands."""
        return self.dtype if self._is_wide else "float32"

    @property
    def _weights(self) -> Weights:
        return Weights(
            n=self.n,
            k=self.k,
            dtype=self.weights,
            scales=self.scales,
            group=self.group,
            layout=self.layout,
            has_zeros=self.zero_points,
            compute_dtype=self._compute_dtype,
            scale_dtype=self.scale_dtype or self._compute_dtype,
        )

    @property
    def _epilogue(self) -> Epilogue:
        out = self.out_dtype or (self.dtype if self._is_wide else "bfloat16")
        return Epilogue(self.epilogue, "float32", Arg("C", (self.m, self.n), out))

    @property
    def _scaled_epilogue(self) -> Epilogue:
        """Return the epilogue with the scale of the tensor as its first step."""
        first: tuple[Step | RowStep, ...] = ("scale",) if self.tensor_scale else ()
        return replace(self._epilogue, steps=(*first, *self.epilogue))

    @property
    def _tensor_scale(self) -> tuple[Arg, ...]:
        return (Arg("tensor_scale", (1,), "float32"),) if self.tensor_scale else ()

    @property
    def _activation_scales(self) -> tuple[Arg, ...]:
        shapes: dict[str, tuple[int, ...]] = {"token": (self.m,), "group": (self.k // ROW_GROUP, self.m)}
        return (Arg("activation_scales", shapes[self.activation_scales], "float32"),) if self.activation_scales else ()

    def problems(self) -> Iterator[str]:
        yield from self._weight_problems()
        if self.activation_scales and self._is_wide:
            yield f"activation_scales are for activations of 8 bits, not {self.dtype}; leave them out"
        elif self.activation_scales == "group" and self.k % ROW_GROUP:
            yield f"activation_scales group shares a scale among {ROW_GROUP} elements, which do not divide k {self.k}; write a multiple"
        if (self.out_dtype or "float16").startswith(("int", "uint")):
            yield f"out_dtype {self.out_dtype} would cut off the fractions that scales give; write one of floating point"
        yield from self._epilogue.problems()

    def _weight_problems(self) -> Iterator[str]:
        if self.scales in {"group", "block"} and self.k % self.group:
            yield f"group {self.group} does not divide k {self.k}; write one that does"
        if self._weights.has_nibbles and self.k % 2:
            yield f"k {self.k} is odd, but two weights of {self.weights} share a byte; write an even one"
        yield from self._block_problems()
        if self.zero_points and self.weights not in {"int4", "int8"}:
            yield f"zero_points are for integers, not {self.weights}; leave them out"
        if self.layout == "packed" and not self._weights.has_nibbles:
            yield f"layout packed is for int4 and {FLOAT4}, not {self.weights}; write another layout"
        elif self.layout == "packed" and (self.n % TILE_ROWS or self.k % TILE_K):
            yield f"layout packed has tiles of {TILE_ROWS} x {TILE_K}, and n {self.n} or k {self.k} is no multiple; write another layout"

    def _block_problems(self) -> Iterator[str]:
        """Yield what is wrong with the scales of float4_e2m1fn, or with theirs for other weights."""
        if self.tensor_scale and self.scale_dtype != "float8_e4m3fn":
            given = f"not {self.scale_dtype}" if self.scale_dtype else "which is not given"
            yield f"tensor_scale is for scale_dtype float8_e4m3fn, {given}; leave it out"
        if self.weights != FLOAT4:
            if self.scale_dtype:
                yield f"scale_dtype {self.scale_dtype} is for weights {FLOAT4}, not {self.weights}; leave it out"
            return
        if not self.scale_dtype:
            yield f"weights {FLOAT4} need a scale_dtype; write float8_e8m0fnu (MXFP4) or float8_e4m3fn (NVFP4)"
            return
        name, group = BLOCKS[self.scale_dtype]
        if self.scales != "group":
            yield f"{name} has scales of groups, not scales {self.scales}; leave out scales"
        elif self.group != group:
            yield f"{name} has groups of {group}, not group {self.group}; leave out group"

    def signature(self) -> Signature:
        a = Arg("A", (self.m, self.k), self.dtype)
        return Signature(
            (a, *self._weights.args, *self._tensor_scale, *self._activation_scales, *self._epilogue.args()), (self._epilogue.out,)
        )

    def lower(self) -> list[Any]:
        from tvm import te

        a, w, scale, *others = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]
        if self._scales_results:
            return [*inputs, self._lower_scaled(a, w, [scale, *others])]
        remaining = list(others)
        zeros = remaining.pop(0) if self.zero_points else None
        of_tensor = [remaining.pop(0) for _ in self._tensor_scale]
        weights = self._weights.lower(w, scale, zeros, self._compute_dtype)
        activations = self._activations(a, remaining.pop(0)) if self.activation_scales else a

        def element(row: Any, column: Any) -> Any:
            k = te.reduce_axis((0, self.k), "k")
            return te.sum(activations(row, k).astype("float32") * weights(column, k).astype("float32"), axis=k)

        epilogue = self._scaled_epilogue
        return [*inputs, epilogue.lower(lambda name: te.compute(epilogue.out.shape, element, name=name), [*of_tensor, *remaining])]

    @property
    def _scales_results(self) -> bool:
        """Say whether operands are multiplied as they are stored, and results scaled: no scale varies along k."""
        is_plain = self.weights == self.dtype and not self.zero_points
        return is_plain and self.scales in {"tensor", "column"} and self.activation_scales != "group"

    def _lower_scaled(self, a: Any, w: Any, operands: list[Any]) -> Any:
        """Return the GEMM of the stored values, with the scales as the first steps of its epilogue."""
        from tvm import te

        accum, out = accum_dtype(self.dtype), self._epilogue.out
        steps: tuple[Step | RowStep, ...] = ("scale" if self.scales == "tensor" else "scale_columns",)
        steps += ("scale_rows",) if self.activation_scales else ()

        def element(row: Any, column: Any) -> Any:
            k = te.reduce_axis((0, self.k), "k")
            return te.sum(a(row, k).astype(accum) * w(column, k).astype(accum), axis=k)

        return Epilogue((*steps, *self.epilogue), accum, out).lower(lambda name: te.compute(out.shape, element, name=name), operands)

    def _activations(self, a: Any, scale: Any) -> Any:
        from tvm import te

        def element(row: Any, k: Any) -> Any:
            at = (row,) if self.activation_scales == "token" else (k // ROW_GROUP, row)
            return a(row, k).astype("float32") * scale(*at)

        return te.compute((self.m, self.k), element, name="activations")

    def reference(self, *inputs: Array) -> Array:
        a, w, *others = inputs
        remaining = list(others)
        factors = [remaining.pop(0) for _ in self._weights.args[1:]]
        of_tensor = [remaining.pop(0) for _ in self._tensor_scale]
        dtype = reference_dtype(self._epilogue.out.dtype, self.dtype)
        lhs = a.astype(dtype)
        if self.activation_scales:
            of_rows = remaining.pop(0).astype(dtype)
            lhs = lhs * (of_rows[:, np.newaxis] if self.activation_scales == "token" else of_rows.T.repeat(ROW_GROUP, axis=1))
        weights, values = self._weights, self._weights.values(w)

        def part(rows: slice) -> Array:
            with np.errstate(all="ignore"):  # infinities among scales make infinite weights
                return np.asarray(weights.dequantised(values, rows, factors, dtype) @ lhs.T)

        columns = by_rows(np.empty((self.n, self.m), dtype), part, self.k)
        return self._scaled_epilogue.reference(columns.T, [*of_tensor, *remaining])

    def flops(self) -> int:
        """Return those of the GEMM and its epilogue; dequantising is not counted, since it is done once or m times."""
        return self.m * self.n * (2 * self.k + self._scaled_epilogue.flops_per_element())

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return operands whose GEMM has about unit variance."""
        a, *_ = self.signature().inputs
        size = 1 / math.sqrt(self.k)
        lhs = random_array(rng, a, size if self._is_wide else 1.0)
        if not self._is_wide and not self.activation_scales and self.dtype != "int8":
            lhs = (lhs.astype(np.float32) * 8 * size).astype(numpy_dtype(self.dtype))
        integers = 74.0 if self.dtype == "int8" else 1.0
        factors = [rng.uniform(0.5, 1.5, arg.shape).astype(np.float32) * np.float32(size / integers) for arg in self._activation_scales]
        of_tensor = [rng.uniform(0.5, 1.5, arg.shape).astype(np.float32) for arg in self._tensor_scale]
        return [lhs, *self._weights.inputs(rng), *of_tensor, *factors, *self._epilogue.inputs(rng, self.k, self.dtype)]

    def rows_vary(self) -> bool:
        """Return True: a huge scale makes results huge, and what rounding leaves of a difference between products with them."""
        return True

    def tolerance(self) -> float:
        rounded = accum_tolerance(self.dtype, "float32", self.k) if self._is_wide else 0.0
        return max(accum_tolerance(self._epilogue.out.dtype, "float32", self.k, self.dtype), rounded)
