"""Owns what tensor cores take: which operands, accumulators and tiles each instruction has, and since which compute capability.

Knows nothing of kernels, policies or how fast tensor cores are. These are the shapes that kernels here use, not all that the hardware has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    "uint8": "u8",
    "float64": "f64",
    "float32": "f32",
    "int32": "s32",
}
"""Names of operand and accumulator types in PTX instructions (PTX ISA, "Fundamental Types" and "Alternate Floating-Point Data Formats")."""
INTEGERS = frozenset({"int8", "uint8"})
K_BYTES = 32
"""Bytes of each operand row that are multiplied together, whatever the dtype: k16 of 16 bits, k32 of 8 bits, k8 of TF32, k4 of float64.
One instruction takes them; on compute capability 7.5 two take half each."""
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
    """Multiples of m, n and k in which operands are multiplied; for mma.sync the instruction's own shape."""
    n_choices: tuple[int, ...]
    """Columns that one instruction multiplies."""
    first_capability: tuple[int, int]
    """Compute capability that brought the instruction in this shape."""
    needs_contiguous_k: bool
    """Whether both operands must have k contiguous where the instruction (or ldmatrix before it) reads them."""
    converted_on: tuple[int, ...] = ()
    """Major compute capabilities that lack the instruction: the compiler converts operands to float16 and multiplies those."""

    def __post_init__(self) -> None:
        m, n, k = self.tile
        assert k * dtype_bytes(self.dtype) in ((K_BYTES,) if self.unit == "wgmma" else (K_BYTES // 2, K_BYTES)), f"{self}: k"
        assert self.n_choices == tuple(sorted(set(self.n_choices))), f"{self}: n_choices are sorted, each once"
        assert all(columns % n == 0 for columns in self.n_choices), f"{self}: n_choices are multiples of n"
        assert m in ((64,) if self.unit == "wgmma" else (8, 16)), f"{self}: m"
        assert self.accum_dtypes, f"{self}: accum_dtypes"
        assert all((dtype == "int32") == (self.dtype in INTEGERS) for dtype in self.accum_dtypes), (
            f"{self}: integers accumulate in integers"
        )
        assert {self.dtype, *self.accum_dtypes} <= PTX_TYPES.keys(), f"{self}: PTX_TYPES"
        is_transposable = self.unit == "mma.sync" or dtype_bytes(self.dtype) == 2
        assert self.needs_contiguous_k or is_transposable, f"{self}: wgmma transposes 16-bit elements alone"

    @property
    def name(self) -> str:
        """Return PTX's name for the shape of one mma.sync, such as m16n8k16."""
        return "m{}n{}k{}".format(*self.tile)


def _mma_sync(tile: tuple[int, int, int], first_capability: tuple[int, int], dtype: str, *accum_dtypes: str) -> TensorCoreShape:
    """Return the row of an mma.sync.

    PTX ISA, "Multiply-and-Accumulate Instruction: mma", target ISA notes: .m16n8k16 for .f16 and .bf16, .m16n8k32 for .s8 and .u8 and
    .m8n8k4 for .f64 with sm_80, .m16n8k32 for .e4m3 and .e5m2 with sm_89, .m16n8k8 for .f16 and .m8n8k16 for .s8 and .u8 with sm_75.
    No layout is refused: ldmatrix ("Warp Level Matrix Load Instruction: ldmatrix") transposes 16-bit elements, hence also 8-bit elements
    in pairs, which lanes take apart; elements of 64 bits are loaded one by one.
    """
    return TensorCoreShape("mma.sync", dtype, accum_dtypes, tile, (tile[1],), first_capability, needs_contiguous_k=False)


def _float8(dtype: str) -> TensorCoreShape:
    """Return the row of mma.sync for float8. nvcc 13.0 makes F2FP and HMMA of it for sm_90 and sm_100, QMMA for sm_89 and sm_120."""
    return replace(_mma_sync((16, 8, 32), (8, 9), dtype, "float32"), converted_on=(9, 10))


def _wgmma(dtype: str, *accum_dtypes: str, n_choices: tuple[int, ...] = tuple(range(8, 257, 8))) -> TensorCoreShape:
    """Return the row of wgmma.mma_async.m64 with 32 bytes of k.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Shape": m is 64, n a multiple of 8 up to 256, fewer for integers. "Asynchronous
    Multiply-and-Accumulate Instruction: wgmma.mma_async": sm_90a; imm-trans-a and imm-trans-b exist for .f16 and .bf16 alone. PTX has
    float16 accumulators for float8 as well; no template uses them.
    """
    item_bytes = dtype_bytes(dtype)
    tile = (64, 8, K_BYTES // item_bytes)
    return TensorCoreShape("wgmma", dtype, accum_dtypes, tile, n_choices, (9, 0), needs_contiguous_k=item_bytes != 2)


WGMMA_INT8_N = (8, 16, 24, *range(32, 225, 16))
"""Columns of wgmma on int8 that TVM 0.27 knows; PTX has 240 and 256 as well."""
TABLE = (
    _mma_sync((16, 8, 16), (8, 0), "float16", "float32", "float16"),
    _mma_sync((16, 8, 16), (8, 0), "bfloat16", "float32"),
    _mma_sync((16, 8, 32), (8, 0), "int8", "int32"),
    _mma_sync((16, 8, 32), (8, 0), "uint8", "int32"),
    _float8("float8_e4m3fn"),
    _float8("float8_e5m2"),
    _mma_sync((8, 8, 4), (8, 0), "float64", "float64"),
    _mma_sync((16, 8, 8), (7, 5), "float16", "float32", "float16"),
    _mma_sync((8, 8, 16), (7, 5), "int8", "int32"),
    _mma_sync((8, 8, 16), (7, 5), "uint8", "int32"),
    _wgmma("float16", "float32", "float16"),
    _wgmma("bfloat16", "float32"),
    _wgmma("float8_e4m3fn", "float32"),
    _wgmma("float8_e5m2", "float32"),
    _wgmma("int8", "int32", n_choices=WGMMA_INT8_N),
    _wgmma("tfloat32", "float32"),
)
"""All shapes; of one unit and dtype, those of newer GPUs come first."""


def _check(table: tuple[TensorCoreShape, ...]) -> None:
    rows = [(shape.unit, shape.dtype, shape.first_capability) for shape in table]
    assert len(rows) == len(set(rows)), "one row for each unit, dtype and compute capability"
    for unit, dtype, _ in rows:
        capabilities = [row[2] for row in rows if row[:2] == (unit, dtype)]
        assert capabilities == sorted(capabilities, reverse=True), f"{unit} of {dtype}: newer shapes come first"


_check(TABLE)


def shape_of(unit: Unit, dtype: str, capability: tuple[int, int] | None = None) -> TensorCoreShape | None:
    """Return the newest row of a unit for operands of a dtype on GPUs of a compute capability, or on any; None where there is none."""
    of_dtype = (shape for shape in TABLE if (shape.unit, shape.dtype) == (unit, dtype))
    return next((shape for shape in of_dtype if capability is None or shape.first_capability <= capability), None)


def operand_dtypes(unit: Unit) -> tuple[str, ...]:
    """Return the dtypes of operands that a unit takes."""
    return tuple(dict.fromkeys(shape.dtype for shape in TABLE if shape.unit == unit))


def accumulators(unit: Unit, dtype: str) -> tuple[str, ...]:
    """Return the dtypes that a unit accumulates products of a dtype in, the usual one first; none where it does not take the dtype."""
    shape = shape_of(unit, dtype)
    return () if shape is None else shape.accum_dtypes


def first_capability(unit: Unit) -> tuple[int, int]:
    """Return the compute capability that brought a unit's float16 with K_BYTES of k, which kernels need that issue it themselves.

    Kernels with wgmma run on this major version alone (sm_90a).
    """
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
