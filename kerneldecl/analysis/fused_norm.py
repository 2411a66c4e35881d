"""Owns norms with a residual or a quantised output as policies see them: sizes read from an iteration space, and the kernel's parameters.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

NormKind = Literal["rms_norm", "layer_norm"]
LIMITS = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""The largest number of a dtype that rows are quantised to."""
LEAST_LARGEST = 1e-10
"""What the largest element of a row counts as at least, so that no row is divided by zero."""
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
MAX_KEPT = 64
"""Elements that one thread keeps in registers at most."""


class NormSizes(NamedTuple):
    """Sizes of one norm."""

    kind: NormKind
    rows: int
    columns: int
    dtype: str
    out_dtype: str
    has_residual: bool

    @property
    def is_quantized(self) -> bool:
        return self.out_dtype in LIMITS

    @property
    def statistics(self) -> int:
        """Return what the threads of a row find together: a sum, for a layer norm two, and the largest element."""
        return (2 if self.kind == "layer_norm" else 1) + self.is_quantized

    @property
    def exchanges(self) -> int:
        """Return how often the threads of a row exchange what they have found: sum and largest product of an RMS norm at once."""
        return self.statistics if self.kind == "layer_norm" else 1

    @property
    def moved_bytes(self) -> int:
        """Return the bytes of the operands that have the norm's shape."""
        element = dtype_bytes(self.dtype)
        return self.rows * self.columns * (element * (3 if self.has_residual else 1) + dtype_bytes(self.out_dtype))


class FusedNormParams(NamedTuple):
    """The parameters of `gpu_fused_norm`."""

    width: int
    """Elements of one access."""
    threads: int
    """Threads that share a row, whole warps."""
    rows: int
    """Rows of a thread block."""

    def steps(self, sizes: NormSizes) -> int:
        """Return the vectors of one thread."""
        return -(-sizes.columns // (self.width * self.threads))

    def smem_bytes(self, sizes: NormSizes) -> int:
        return 4 * sizes.statistics * self.rows * (self.threads // WARP_LANES)

    def fits(self, sizes: NormSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        if min(self) < 1 or self.threads % WARP_LANES or self.threads * self.rows > gpu.max_threads_per_block:
            return False
        widest = VECTOR_BYTES // dtype_bytes(sizes.dtype)
        return widest % self.width == 0 and sizes.columns % self.width == 0 and self.steps(sizes) * self.width <= MAX_KEPT


def takes(sizes: NormSizes) -> bool:
    """Say whether the kernel computes such rows."""
    is_known = sizes.dtype in {"float16", "bfloat16", "float32"} and (sizes.is_quantized or sizes.out_dtype == sizes.dtype)
    return is_known and sizes.rows * sizes.columns < MAX_OFFSET


def norm_sizes_of(space: IterSpace) -> NormSizes | None:
    """Return the sizes of the norm that an iteration space may be, None where it is none; the template reads it in full."""
    accesses = {access.operand: access for block in space.blocks for access in (*block.reads, *block.writes)}
    if not {*space.inputs, *space.outputs} <= accesses.keys():
        return None
    x, y = accesses[space.inputs[0]], accesses[space.outputs[0]]
    whole = [name for name in space.inputs if accesses[name].shape == x.shape and accesses[name].dtype == x.dtype]
    is_quantized, has_residual = y.dtype in LIMITS, len(whole) == 2
    weights = len(space.inputs) - 1 - has_residual
    if x.shape != y.shape or weights not in {1, 2} or len(space.outputs) != 1 + has_residual + is_quantized or len(space.outputs) < 1:
        return None
    kind: NormKind = "rms_norm" if weights == 1 else "layer_norm"
    sizes = NormSizes(kind, math.prod(x.shape[:-1]), x.shape[-1], x.dtype, y.dtype, has_residual)
    reductions = [block for block in space.blocks if block.is_reduction]
    if not (has_residual or is_quantized) or len(reductions) != sizes.statistics:
        return None
    return sizes if all(tuple(axis.extent for axis in block.axes) == x.shape for block in reductions) else None
