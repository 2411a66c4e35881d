"""Owns copies of operands that TMA cannot read, in a workspace where it can: every line of elements starts at one of L2.

Knows nothing of tiles, of the product that follows or of when a copy is worth it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import each
from kerneldecl.templates.hopper.gather import PIECE_BYTES, Source, element_at, hold, load_aligned, shifted
from kerneldecl.templates.hopper.operands import SLAB, Operand, gathered, is_copied
from kerneldecl.templates.hopper.read_gemm import Matrix

LINE_BYTES = 128
MAX_BYTES = 2**31
"""Of a copy, which 32 bits address."""
THREADS = 256
PIECES_AT_ONCE = (4, 2)
"""That a thread has on their way, where there are enough of them."""
ROUNDS = 2
"""Of blocks on each SM, that are worth fewer pieces a thread."""


@dataclass(frozen=True)
class Packing:
    """A copy of a matrix with its lines, which lie side by side in memory, further apart, or with rows as lines that were none.

    What fills lines up is never read: TMA knows their length.
    """

    source: Operand
    """How threads read the matrix."""
    copy: Matrix
    lines: tuple[int, int]
    """Of the copy: of one matrix and of all."""
    line_pieces: int
    """Of 16 bytes, the last one with elements beyond the line."""

    @property
    def pieces(self) -> int:
        return self.lines[1] * self.line_pieces

    @property
    def width(self) -> int:
        """Return the elements of a piece."""
        return PIECE_BYTES // self.source.item_bytes

    def place(self, piece: Any) -> tuple[Any, Any]:
        """Return line and place in it of a piece, so that neighbours lie side by side in the matrix."""
        assert self.source.gather is not None
        if not self.source.gather.is_transposed:
            return piece // self.line_pieces, piece % self.line_pieces
        matrix, within = piece // (self.lines[0] * self.line_pieces), piece % (self.lines[0] * self.line_pieces)
        return matrix * self.lines[0] + within % self.lines[0], within // self.lines[0]

    def start(self, piece: Any) -> tuple[Any, Any, Any]:
        """Return batch, row and term of a piece's first element."""
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
    source = gathered(replace(matrix, batch=own), SLAB, 1)
    if source is None or is_copied(matrix):
        return None
    rows, terms, item = matrix.rows[0], matrix.columns[0], matrix.item_bytes
    length, count = (terms, rows) if source.is_k_last else (rows, terms)
    wide = -(-length * item // LINE_BYTES) * LINE_BYTES // item
    strides, inner = [], count * wide
    for extent, stride in reversed(matrix.batch):
        strides.append((extent, inner if stride else 0))
        inner *= extent if stride else 1
    if inner * item >= MAX_BYTES:
        return None
    buffer = tirx.decl_buffer((inner * item // 4,), "uint32", f"{matrix.buffer.name}_packed")
    own_rows, own_columns = ((rows, wide), (terms, 1)) if source.is_k_last else ((rows, 1), (terms, wide))
    copy = Matrix(buffer, matrix.dtype, own_rows, own_columns, tuple(reversed(strides)))
    lines = count, count * math.prod(extent for extent, _ in own)
    return Packing(source, copy, lines, -(-length * item // PIECE_BYTES)) if is_copied(copy) else None


@T.inline
def _fetch(packing, source, raw, at, piece):
    """Load a piece of a line of the matrix, which may start anywhere: the aligned 16 bytes that it starts in, and the next."""
    start = T.meta_var(element_at(packing.source, *packing.start(piece)))
    load_aligned(packing.source, source, raw, at, start // packing.width)
    load_aligned(packing.source, source, raw, at + 4, start // packing.width + 1)


@T.inline
def _fetch_across(packing, source, raw, at, piece):
    """Load a piece of a line of the copy, whose elements lie in as many lines of the matrix."""
    item = T.meta_var(packing.source.item_bytes)
    elements = T.decl_buffer((raw.shape[0] * 4 // item,), packing.source.dtype, data=raw.data, scope="local")
    batch, row, term = each(packing.start(piece))
    for e in T.unroll(packing.width):
        if term + e < packing.copy.columns[0]:
            elements[at * 4 // item + e] = source.elements[element_at(packing.source, batch, row, term + e)]
        else:
            elements[at * 4 // item + e] = tirx.const(0, packing.source.dtype)


def words_of(packing: Packing, raw: Any, at: Any, piece: Any) -> list[Any]:
    """Return a piece's four words out of what was loaded."""
    gather = packing.source.gather
    assert gather is not None
    if gather.is_transposed:
        return [raw[at + word] for word in range(4)]
    start = element_at(packing.source, *packing.start(piece))
    return shifted(raw, at, start % packing.width * packing.source.item_bytes, gather.align_bytes)


@T.inline
def _copy(packing, at_once, block, thread):
    """Have a block copy its share of pieces."""
    source = T.meta_var(Source(packing.source))
    first = T.meta_var(block * (at_once * THREADS) + thread)
    raw = T.alloc_local((at_once * 8,), "uint32")
    for u in T.unroll(at_once):
        piece = T.meta_var(first + u * THREADS)
        if piece < packing.pieces:
            if packing.source.gather.is_transposed:
                _fetch_across(packing, source, raw, u * 8, piece)
            else:
                _fetch(packing, source, raw, u * 8, piece)
    words = T.alloc_local((4,), "uint32")
    for u in T.unroll(at_once):
        piece = T.meta_var(first + u * THREADS)
        if piece < packing.pieces:
            hold(words, words_of(packing, raw, u * 8, piece))
            for v in T.vectorized(4):
                packing.copy.buffer[packing.word(piece) + v] = words[v]


def packed(packings: Sequence[Packing], sms: int, gemm: Any) -> Any:
    """Return the statements of a host function that make the copies, with one kernel for all, and then what `product` does.

    The product may start as soon as the last block here has; it is to wait before it reads.
    """
    pieces = sum(packing.pieces for packing in packings)
    at_once = next((count for count in PIECES_AT_ONCE if pieces >= count * THREADS * ROUNDS * sms), 1)
    blocks = [-(-packing.pieces // (at_once * THREADS)) for packing in packings]

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([sum(blocks)])
        thread = T.thread_id([THREADS])
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
        if block < blocks[0]:
            _copy(packings[0], at_once, block, thread)
        elif len(packings) == 2:
            _copy(packings[1], at_once, block - blocks[0], thread)

    return tirx.SeqStmt([*(tirx.AllocBuffer(packing.copy.buffer) for packing in packings), main.body, gemm])
