"""Owns how a consumer's threads hold the accumulators of wgmma in registers.

Knows nothing of tiles, of pipelines or of what becomes of results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from kerneldecl.analysis.tensor_cores import accumulators_per_register


@dataclass(frozen=True)
class AccumulatorLayout:
    """How a consumer thread holds the accumulators of its MMA tiles in registers."""

    dtype: str
    block_n: int
    mma_tiles: int = 1

    @property
    def count(self) -> int:
        return self.mma_tiles * self.per_mma_tile

    @property
    def per_mma_tile(self) -> int:
        return self.block_n // 2

    @property
    def per_register(self) -> int:
        return accumulators_per_register(self.dtype)

    @property
    def registers(self) -> int:
        return self.count // self.per_register

    @property
    def register_dtype(self) -> str:
        """Return how TVM holds what wgmma accumulates in: float32 as it is, others as the bits they are."""
        return "float32" if self.dtype == "float32" else "uint32"

    @property
    def ptx_type(self) -> str:
        """Return how PTX loads and stores a register of accumulators."""
        return "f32" if self.register_dtype == "float32" else "u32"

    @property
    def reduce_dtype(self) -> str:
        """Return the data type in which split-K adds partial accumulators: float32 at least."""
        return "float32" if self.dtype == "float16" else self.dtype

    def of_registers(self, registers: Any) -> Any:
        """Return a local buffer of registers as one of accumulators."""
        if self.dtype == self.register_dtype:
            return registers
        return T.decl_buffer((registers.shape[0] * self.per_register,), self.dtype, data=registers.data, scope="local")
