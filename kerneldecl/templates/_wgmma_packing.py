"""Owns copies of operands that TMA cannot read, in a workspace where it can: every row starts at a line of L2.

Knows nothing of tiles, of the product that follows or of when a copy is worth it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates._wgmma_gather import PIECE_BYTES, Source, element_at, hold, load_aligned, shifted
from kerneldecl.templates._wgmma_operands import Operand, gathered, pitches
from kerneldecl.templates._wgmma_product import Matrix

LINE_BYTES = 128
THREADS = 256
PIECES_AT_ONCE = (4, 2)
"""That a thread has on their way, where there are enough of them."""
ROUNDS = 2
"""Of blocks on each SM, that are worth fewer pieces a thread."""


@dataclass(frozen=True)
class Packing:
    """A copy of a matrix with its rows (its columns, where those lie side by side) further apart.

    What fills the copy's rows up is never written, nor read: TMA knows their length.
    """

    source: Operand
    """How threads read the matrix."""
    copy: Matrix
    line_pieces: int
    """Of 16 bytes, the last one with elements beyond the line."""
    lines: tuple[int, int]
    """Of one matrix and of all."""

    @property
    def pieces(self) -> int:
        return self.lines[1] * self.line_pieces

    @property
    def width(self) -> int:
        """Return the elements of a piece."""
        return PIECE_BYTES // self.source.item_bytes

    def start(self, piece: Any) -> Any:
        """Return where in memory a piece starts, in elements."""
        line, place = piece // self.line_pieces, piece % self.line_pieces * self.width
        at = (line % self.lines[0], place) if self.source.is_k_last else (place, line % self.lines[0])
        return element_at(self.source, line // self.lines[0], *at)

    def word(self, piece: Any) -> Any:
        """Return where in the copy a piece starts, in words of 4 bytes."""
        pitch = max(self.copy.rows[1], self.copy.columns[1]) * self.source.item_bytes
        return piece // self.line_pieces * (pitch // 4) + piece % self.line_pieces * (PIECE_BYTES // 4)


def packing_of(matrix: Matrix) -> Packing | None:
    """Return the copy of a matrix that TMA reads, None where it reads the matrix itself or cannot read its copy either."""
    (rows, row_step), (terms, step) = matrix.rows, matrix.columns
    is_k_last = step == 1 or terms == 1
    length, count, pitch = (terms, rows, row_step) if is_k_last else (rows, terms, step)
    own = tuple(dim for dim in matrix.batch if dim[1] != 0)
    source = gathered(replace(matrix, batch=own), 64, 1)
    if pitches(matrix, pitch, count, length) is not None or source is None or source.is_k_last != is_k_last:
        return None
    item = matrix.item_bytes
    wide = -(-length * item // LINE_BYTES) * LINE_BYTES // item
    matrices = math.prod(extent for extent, _ in own)
    buffer = tirx.decl_buffer((matrices * count * wide * item // 4,), "uint32", f"{matrix.buffer.name}_packed")
    strides, inner = [], count * wide
    for extent, stride in reversed(matrix.batch):
        strides.append((extent, inner if stride else 0))
        inner *= extent if stride else 1
    own_rows, own_columns = ((rows, wide), (terms, 1)) if is_k_last else ((rows, 1), (terms, wide))
    copy = Matrix(buffer, matrix.dtype, own_rows, own_columns, tuple(reversed(strides)))
    if pitches(copy, wide, count, length) is None or inner * item >= 2**31:
        return None
    return Packing(source, copy, -(-length * item // PIECE_BYTES), (count, matrices * count))


@T.inline
def _copy(packing, at_once, block, thread):
    """Have a block copy its share of pieces: neighbouring threads take neighbours, loads are aligned and shifted to where pieces start."""
    operand = T.meta_var(packing.source)
    source = T.meta_var(Source(operand))
    first = T.meta_var(block * (at_once * THREADS) + thread)
    raw = T.alloc_local((at_once * 8,), "uint32")
    for u in T.unroll(at_once):
        piece = T.meta_var(first + u * THREADS)
        if piece < packing.pieces:
            aligned = T.meta_var(packing.start(piece) // packing.width)
            load_aligned(operand, source, raw, u * 8, aligned)
            load_aligned(operand, source, raw, u * 8 + 4, aligned + 1)
    words = T.alloc_local((4,), "uint32")
    for u in T.unroll(at_once):
        piece = T.meta_var(first + u * THREADS)
        if piece < packing.pieces:
            offset = T.meta_var(packing.start(piece) % packing.width * operand.item_bytes)
            hold(words, shifted(raw, u * 8, offset, operand.gather.align_bytes))
            for v in T.vectorized(4):
                packing.copy.buffer[packing.word(piece) + v] = words[v]


def packed(packings: Sequence[Packing], sms: int, product: Any) -> Any:
    """Return the statements of a host function that make the copies, with one kernel for all, and then what `product` does.

    The product may start as soon as the last block here has; it is to wait before it reads.
    """
    pieces = sum(packing.pieces for packing in packings)
    at_once = next((count for count in PIECES_AT_ONCE if pieces >= count * THREADS * ROUNDS * sms), 1)
    blocks = [-(-packing.pieces // (at_once * THREADS)) for packing in packings]

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        block = T.cta_id([sum(blocks)])
        thread = T.thread_id([THREADS])
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
        if block < blocks[0]:
            _copy(packings[0], at_once, block, thread)
        elif len(packings) == 2:
            _copy(packings[1], at_once, block - blocks[0], thread)

    return tirx.SeqStmt([*(tirx.AllocBuffer(packing.copy.buffer) for packing in packings), main.body, product])
