"""Owns what tensor cores take: which operands, accumulators and tiles each instruction has, and since which compute capability.

Knows nothing of kernels, policies or how fast tensor cores are. These are the shapes that kernels here use, not all that the hardware has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kerneldecl.model import dtype_bytes

Unit = Literal["mma.sync", "wgmma"]
"""The instruction: of one warp on registers, or of a warpgroup on shared memory."""

PTX_TYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "tfloat32": "tf32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "s8",
    "float32": "f32",
    "int32": "s32",
}
"""Names of operand and accumulator types in PTX instructions (PTX ISA, "Fundamental Types" and "Alternate Floating-Point Data Formats")."""
K_BYTES = 32
"""Bytes of each operand row that one instruction multiplies, whatever the dtype: k16 of 16 bits, k32 of 8 bits, k8 of TF32."""
FRAGMENT = 16
"""Rows and columns of a warp's smallest tile of results: two mma.sync m16n8 side by side."""


@dataclass(frozen=True)
class TensorCoreShape:
    """What one instruction takes for operands of one dtype; both operands have the same."""

    unit: Unit
    dtype: str
    """Data type of the operands; "tfloat32" is float32 whose mantissa is cut to 10 bits."""
    accum_dtypes: tuple[str, ...]
    """Data types of accumulators, the usual one first."""
    tile: tuple[int, int, int]
    """Multiples of m, n and k in which operands are multiplied."""
    n_choices: tuple[int, ...]
    """Columns that one instruction multiplies."""
    first_capability: tuple[int, int]
    """Compute capability that brought the instruction in this shape."""
    needs_contiguous_k: bool
    """Whether both operands must have k contiguous where the instruction (or ldmatrix before it) reads them."""

    def __post_init__(self) -> None:
        m, n, k = self.tile
        assert k * dtype_bytes(self.dtype) == K_BYTES, f"{self}: k"
        assert self.n_choices == tuple(sorted(set(self.n_choices))), f"{self}: n_choices are sorted, each once"
        assert all(columns % n == 0 for columns in self.n_choices), f"{self}: n_choices are multiples of n"
        assert m == (64 if self.unit == "wgmma" else 16), f"{self}: m"
        assert self.accum_dtypes, f"{self}: accum_dtypes"
        assert all((dtype == "int32") == (self.dtype == "int8") for dtype in self.accum_dtypes), f"{self}: integers accumulate in integers"
        assert {self.dtype, *self.accum_dtypes} <= PTX_TYPES.keys(), f"{self}: PTX_TYPES"
        assert self.needs_contiguous_k or dtype_bytes(self.dtype) == 2, f"{self}: only 16-bit elements can be transposed on the way"


def _mma_sync(dtype: str, *accum_dtypes: str) -> TensorCoreShape:
    """Return the row of mma.sync.m16n8 with 32 bytes of k.

    PTX ISA, "Multiply-and-Accumulate Instruction: mma": .m16n8k16 for .f16 and .bf16, .m16n8k32 for .s8, all with sm_80. ldmatrix ("Warp
    Level Matrix Load Instruction: ldmatrix") transposes 16-bit elements alone in shape .m8n8, so 8-bit operands need k contiguous.
    """
    return _row("mma.sync", (dtype, *accum_dtypes), 16, (8,), (8, 0))


def _wgmma(dtype: str, *accum_dtypes: str, n_choices: tuple[int, ...] = tuple(range(8, 257, 8))) -> TensorCoreShape:
    """Return the row of wgmma.mma_async.m64 with 32 bytes of k.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Shape": m is 64, n a multiple of 8 up to 256, fewer for integers. "Asynchronous
    Multiply-and-Accumulate Instruction: wgmma.mma_async": sm_90a; imm-trans-a and imm-trans-b exist for .f16 and .bf16 alone. PTX has
    float16 accumulators for float8 as well; no template uses them.
    """
    return _row("wgmma", (dtype, *accum_dtypes), 64, n_choices, (9, 0))


def _row(unit: Unit, dtypes: tuple[str, ...], m: int, n_choices: tuple[int, ...], first_capability: tuple[int, int]) -> TensorCoreShape:
    """Return the row of an instruction with 32 bytes of k; `dtypes` are that of the operands and those of accumulators."""
    dtype, *accum_dtypes = dtypes
    item_bytes = dtype_bytes(dtype)
    return TensorCoreShape(
        unit=unit,
        dtype=dtype,
        accum_dtypes=tuple(accum_dtypes),
        tile=(m, 8, K_BYTES // item_bytes),
        n_choices=n_choices,
        first_capability=first_capability,
        needs_contiguous_k=item_bytes != 2,
    )


WGMMA_INT8_N = (8, 16, 24, *range(32, 225, 16))
"""Columns of wgmma on int8 that TVM 0.27 knows; PTX has 240 and 256 as well."""
TABLE = (
    _mma_sync("float16", "float32", "float16"),
    _mma_sync("bfloat16", "float32"),
    _mma_sync("int8", "int32"),
    _wgmma("float16", "float32", "float16"),
    _wgmma("bfloat16", "float32"),
    _wgmma("float8_e4m3fn", "float32"),
    _wgmma("float8_e5m2", "float32"),
    _wgmma("int8", "int32", n_choices=WGMMA_INT8_N),
    _wgmma("tfloat32", "float32"),
)


def _check(table: tuple[TensorCoreShape, ...]) -> None:
    pairs = [(shape.unit, shape.dtype) for shape in table]
    assert len(pairs) == len(set(pairs)), "one row for each unit and dtype"
    for unit in ("mma.sync", "wgmma"):
        shapes = [shape for shape in table if shape.unit == unit]
        assert len({shape.first_capability for shape in shapes}) == 1, f"{unit}: one first compute capability"


_check(TABLE)


def shape_of(unit: Unit, dtype: str) -> TensorCoreShape | None:
    """Return the row of a unit for operands of a dtype, None where it does not take them."""
    return next((shape for shape in TABLE if (shape.unit, shape.dtype) == (unit, dtype)), None)


def operand_dtypes(unit: Unit) -> tuple[str, ...]:
    """Return the dtypes of operands that a unit takes."""
    return tuple(shape.dtype for shape in TABLE if shape.unit == unit)


def accumulators(unit: Unit, dtype: str) -> tuple[str, ...]:
    """Return the dtypes that a unit accumulates products of a dtype in, the usual one first; none where it does not take the dtype."""
    shape = shape_of(unit, dtype)
    return () if shape is None else shape.accum_dtypes


def first_capability(unit: Unit) -> tuple[int, int]:
    """Return the compute capability that brought a unit. Kernels with wgmma run on this major version alone (sm_90a)."""
    return next(shape.first_capability for shape in TABLE if shape.unit == unit)


def n_choices(unit: Unit, dtype: str) -> tuple[int, ...]:
    """Return the columns that one instruction multiplies, in ascending order; none where the unit does not take the dtype."""
    shape = shape_of(unit, dtype)
    return () if shape is None else shape.n_choices


def wgmma_instructions(dtype: str, columns: int) -> int:
    """Return how many wgmmas side by side multiply so many columns: one, or two of half the width; 0 where neither do."""
    choices = n_choices("wgmma", dtype)
    return next((count for count in (1, 2) if columns % count == 0 and columns // count in choices), 0)


def accumulators_per_register(accum_dtype: str) -> int:
    """Return how many accumulators share a register of 32 bits: two of float16 (PTX ISA, .f16x2 fragments of matrix D)."""
    return 2 if accum_dtype == "float16" else 1
