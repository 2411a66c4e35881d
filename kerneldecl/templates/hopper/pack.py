"""Owns copies of operands that TMA cannot read, in a workspace where it can: every line of elements starts at a line of L2.

Knows nothing of tiles, of the GEMM that follows or of when a copy is worth it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.gather import PIECE_BYTES, FlatMemory, element_at, hold, load_aligned, shifted
from kerneldecl.templates.hopper.operands import Operand, is_tma_loadable, through_registers
from kerneldecl.templates.hopper.read_gemm import Matrix

LINE_BYTES = 128
MAX_BYTES = 2**31
"""Bytes of a copy that 32-bit offsets address."""
THREADS = 256
PIECES_AT_ONCE = (4, 2)
"""Pieces whose loads a thread has under way, most first, as far as there are enough pieces."""
ROUNDS = 2
"""CTAs on each SM below which threads take fewer pieces at once."""


@dataclass(frozen=True)
class Packing:
    """A copy of a matrix whose lines of contiguous elements are padded, or which is transposed, so that its rows are lines.

    Padding is never read: TMA knows the length of lines.
    """

    source: Operand
    """How threads read the matrix."""
    copy: Matrix
    lines: tuple[int, int]
    """Lines of the copy: those of one matrix of the batch, and all."""
    line_pieces: int
    """Pieces of 16 bytes in a line, the last one with elements beyond it."""

    @property
    def pieces(self) -> int:
        return self.lines[1] * self.line_pieces

    @property
    def width(self) -> int:
        """Return the elements of a piece."""
        return PIECE_BYTES // self.source.item_bytes

    def place(self, piece: Any) -> tuple[Any, Any]:
        """Return line and place in it of a piece, so that pieces that follow each other are contiguous in the matrix."""
        assert self.source.register_loads is not None
        if not self.source.register_loads.is_transposed:
            return piece // self.line_pieces, piece % self.line_pieces
        matrix, within = piece // (self.lines[0] * self.line_pieces), piece % (self.lines[0] * self.line_pieces)
        return matrix * self.lines[0] + within % self.lines[0], within // self.lines[0]

    def start(self, piece: Any) -> tuple[Any, Any, Any]:
        """Return batch, row and k of a piece's first element."""
        line, place = self.place(piece)
        at = line % self.lines[0], place * self.width
        return (line // self.lines[0], *(at if self.source.is_k_last else reversed(at)))

    def word(self, piece: Any) -> Any:
        """Return where in the copy a piece starts, in words of 4 bytes."""
        line, place = self.place(piece)
        pitch = max(self.copy.rows[1], self.copy.columns[1]) * self.source.item_bytes
        return line * (pitch // 4) + place * (PIECE_BYTES // 4)


def packing_of(matrix: Matrix) -> Packing | None:
    """Return the copy of a matrix that TMA reads, None where it reads the matrix itself or cannot read its copy either."""
    own = tuple(dim for dim in matrix.batch if dim[1] != 0)
    source = through_registers(replace(matrix, batch=own), MMA_TILE_ROWS, 1)
    if source is None or is_tma_loadable(matrix):
        return None
    rows, k, item = matrix.rows[0], matrix.columns[0], matrix.item_bytes
    length, count = (k, rows) if source.is_k_last else (rows, k)
    wide = -(-length * item // LINE_BYTES) * LINE_BYTES // item
    strides, inner = [], count * wide
    for extent, stride in reversed(matrix.batch):
        strides.append((extent, inner if stride else 0))
        inner *= extent if stride else 1
    if inner * item >= MAX_BYTES:
        return None
    buffer = tirx.decl_buffer((inner * item // 4,), "uint32", f"{matrix.buffer.name}_packed")
    own_rows, own_columns = ((rows, wide), (k, 1)) if source.is_k_last else ((rows, 1), (k, wide))
    copy = Matrix(buffer=buffer, dtype=matrix.dtype, rows=own_rows, columns=own_columns, batch=tuple(reversed(strides)))
    lines = count, count * math.prod(extent for extent, _ in own)
    return Packing(source, copy, lines, -(-length * item // PIECE_BYTES)) if is_tma_loadable(copy) else None


@T.inline
def _load(packing, memory, raw, at, piece):
    """Load a piece of a line of the matrix, which may start anywhere: the aligned 16 bytes that it starts in, and the next."""
    start = T.meta_var(element_at(packing.source, *packing.start(piece)))
    load_aligned(packing.source, memory, raw, at, start // packing.width)
    load_aligned(packing.source, memory, raw, at + 4, start // packing.width + 1)


@T.inline
def _load_across(packing, memory, raw, at, piece):
    """Load a piece of a line of the copy, whose elements are in as many lines of the matrix."""
    item = T.meta_var(packing.source.item_bytes)
    elements = T.decl_buffer((raw.shape[0] * 4 // item,), packing.source.dtype, data=raw.data, scope="local")
    batch, row, k = meta_vars(packing.start(piece))
    for e in T.unroll(packing.width):
        if k + e < packing.copy.columns[0]:
            elements[at * 4 // item + e] = memory.elements[element_at(packing.source, batch, row, k + e)]
        else:
            elements[at * 4 // item + e] = tirx.const(0, packing.source.dtype)


def words_of(packing: Packing, raw: Any, at: Any, piece: Any) -> list[Any]:
    """Return a piece's four words out of what was loaded."""
    loads = packing.source.register_loads
    assert loads is not None
    if loads.is_transposed:
        return [raw[at + word] for word in range(4)]
    start = element_at(packing.source, *packing.start(piece))
    return shifted(raw, at, start % packing.width * packing.source.item_bytes, loads.align_bytes)


@T.inline
def _copy(packing, at_once, cta, thread):
    """Have a CTA copy its pieces."""
    memory = T.meta_var(FlatMemory(packing.source))
    first = T.meta_var(cta * (at_once * THREADS) + thread)
    raw = T.alloc_local((at_once * 8,), "uint32")
    for u in T.unroll(at_once):
        piece = T.meta_var(first + u * THREADS)
        if piece < packing.pieces:
            if packing.source.register_loads.is_transposed:
                _load_across(packing, memory, raw, u * 8, piece)
            else:
                _load(packing, memory, raw, u * 8, piece)
    words = T.alloc_local((4,), "uint32")
    for u in T.unroll(at_once):
        piece = T.meta_var(first + u * THREADS)
        if piece < packing.pieces:
            hold(words, words_of(packing, raw, u * 8, piece))
            for v in T.vectorized(4):
                packing.copy.buffer[packing.word(piece) + v] = words[v]


def packed(packings: Sequence[Packing], sm_count: int, gemm: Any) -> Any:
    """Return the statements of a host function that make the copies, with one kernel for all, and then those of `gemm`.

    The GEMM kernel may start as soon as the last CTA here has (PDL); it must wait before it reads.
    """
    pieces = sum(packing.pieces for packing in packings)
    at_once = next((count for count in PIECES_AT_ONCE if pieces >= count * THREADS * ROUNDS * sm_count), 1)
    ctas = [-(-packing.pieces // (at_once * THREADS)) for packing in packings]

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([sum(ctas)])
        thread = T.thread_id([THREADS])
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
        if block < ctas[0]:
            _copy(packings[0], at_once, block, thread)
        elif len(packings) == 2:
            _copy(packings[1], at_once, block - ctas[0], thread)

    return tirx.SeqStmt([*(tirx.AllocBuffer(packing.copy.buffer) for packing in packings), main.body, gemm])
