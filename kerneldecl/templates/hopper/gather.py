"""Owns loading an operand of wgmma through registers: what TMA does not take, such as rows of odd length or 8-bit elements to transpose.

Knows nothing of pipelines, epilogues or how tiles are chosen.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS, WARPGROUP_THREADS
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.operands import Operand

PIECE_BYTES = 16
ROW_PIECES = K_TILE_BYTES // PIECE_BYTES
PIECES_AT_ONCE = {4: 4, 2: 4, 1: 2}
"""Pieces whose loads a thread has under way, by the bytes of an element."""
TRANSPOSED_AT_ONCE = {4: 8, 1: 2}
"""The same, where a thread loads them element by element."""


def place_of(operand: Operand, piece: Any) -> tuple[Any, Any, Any]:
    """Return the operand's row and the k at which a piece of 16 bytes of a stage begins, and where it is in the stage, in elements.

    Neighbouring threads take neighbours in memory: along a row of shared memory, or across rows where elements are transposed.
    """
    assert operand.register_loads is not None
    width = PIECE_BYTES // operand.item_bytes
    if operand.register_loads.is_transposed:
        line, at = piece % operand.stage_rows, piece // operand.stage_rows
    else:
        line, at = piece // ROW_PIECES, piece % ROW_PIECES
    place = line * operand.row_elements + T.bitwise_xor(at, line % ROW_PIECES) * width
    if operand.is_k_last:
        return line, at * width, place
    return line // MMA_TILE_ROWS * MMA_TILE_ROWS + at * width, line % MMA_TILE_ROWS, place


def element_at(operand: Operand, batch: Any, row: Any, k: Any) -> Any:
    """Return the offset of an element in memory, in elements."""
    assert operand.register_loads is not None
    matrix = operand.register_loads.matrix
    strides = [stride for _, stride in reversed(matrix.batch)]
    outer = sum((index * stride for index, stride in zip(matrix.batch_index(batch), strides, strict=True)), tirx.const(0, "int32"))
    return outer + row * matrix.rows[1] + k * matrix.columns[1]


class FlatMemory:
    """An operand's memory as one row of elements, and as one of words of 4 bytes."""

    def __init__(self, operand: Operand) -> None:
        assert operand.register_loads is not None
        buffer = operand.register_loads.matrix.buffer
        self.count = math.prod(int(extent) for extent in buffer.shape)
        self.bytes = self.count * operand.item_bytes
        self.elements = T.decl_buffer((self.count,), operand.dtype, data=buffer.data)
        self.words = T.decl_buffer((-(-self.bytes // PIECE_BYTES) * 4,), "uint32", data=buffer.data)


def shifted(raw: Any, first: Any, offset: Any, align_bytes: int) -> list[Any]:
    """Return the four words that start `offset` bytes into eight, by choosing words twice and shifting once."""
    words = [raw[first + n] for n in range(8 if align_bytes < PIECE_BYTES else 4)]
    for step, unit in ((2, 8), (1, 4)):
        if align_bytes <= unit:
            skips = T.bitwise_and(offset, unit) != 0
            words = [T.Select(skips, words[n + step], words[n]) for n in range(len(words) - step)]
    if align_bytes < 4:
        bits = T.cast(T.bitwise_and(offset, 3) * 8, "uint64")
        pairs = [T.bitwise_or(T.shift_left(T.cast(words[n + 1], "uint64"), T.uint64(32)), T.cast(words[n], "uint64")) for n in range(4)]
        return [T.cast(T.shift_right(pair, bits), "uint32") for pair in pairs]
    return words[:4]


def hold(buffer: Any, values: list[Any]) -> None:
    """Store values one after the other."""
    for at, value in enumerate(values):
        T.buffer_store(buffer, value, [at])


@T.inline
def load_aligned(operand, memory, raw, at, place):
    """Load the 16 bytes that a multiple of 16 bytes into memory start with, beyond its end element by element."""
    width = T.meta_var(PIECE_BYTES // operand.item_bytes)
    elements = T.decl_buffer((raw.shape[0] * 4 // operand.item_bytes,), operand.dtype, data=raw.data, scope="local")
    if place * width + width <= memory.count:
        for v in T.vectorized(4):
            raw[at + v] = memory.words[place * 4 + v]
    else:
        for e in T.unroll(width):
            if place * width + e < memory.count:
                elements[at * 4 // operand.item_bytes + e] = memory.elements[place * width + e]
            else:
                elements[at * 4 // operand.item_bytes + e] = tirx.const(0, operand.dtype)


@T.inline
def _load_pieces(operand, memory, raw, first, at):
    """Load the aligned 16 bytes in which each of a thread's next pieces starts, and where that is amid them the next 16; zeros beyond."""
    batch, first_row, first_k = meta_vars(first)
    number, thread = meta_vars(at)
    matrix = T.meta_var(operand.register_loads.matrix)
    width = T.meta_var(PIECE_BYTES // operand.item_bytes)
    for u in T.unroll(raw.shape[0] // 8):
        place = T.meta_var(place_of(operand, (number + u) * WARPGROUP_THREADS + thread))
        row = T.meta_var(first_row + place[0])
        k = T.meta_var(first_k + place[1])
        start = T.meta_var(element_at(operand, batch, row, k))
        if T.And(row < matrix.rows[0], k < matrix.columns[0]):
            load_aligned(operand, memory, raw, u * 8, start // width)
            if operand.register_loads.align_bytes < PIECE_BYTES:
                load_aligned(operand, memory, raw, u * 8 + 4, start // width + 1)
        else:
            for v in T.unroll(8):
                raw[u * 8 + v] = T.uint32(0)


@T.inline
def _store_pieces(operand, raw, target, first, at):
    """Store a thread's next pieces to a stage; `target` is its buffer and number."""
    batch, first_row, first_k = meta_vars(first)
    number, thread = meta_vars(at)
    buffer, stage = meta_vars(target)
    columns = T.meta_var(operand.register_loads.matrix.columns[0])
    width = T.meta_var(PIECE_BYTES // operand.item_bytes)
    packed = T.alloc_local((4,), "uint32")
    elements = T.decl_buffer((width,), operand.dtype, data=packed.data, scope="local")
    for u in T.unroll(raw.shape[0] // 8):
        piece = T.meta_var((number + u) * WARPGROUP_THREADS + thread)
        place = T.meta_var(place_of(operand, piece))
        k = T.meta_var(first_k + place[1])
        start = T.meta_var(element_at(operand, batch, first_row + place[0], k))
        hold(packed, shifted(raw, u * 8, start % width * operand.item_bytes, operand.register_loads.align_bytes))
        if operand.is_k_last:
            if k + width > columns:
                for e in T.unroll(width):
                    if k + e >= columns:
                        elements[e] = tirx.const(0, operand.dtype)
        if piece < operand.stage_rows * ROW_PIECES:
            T.ptx["st.shared.v4.u32"](
                T.cuda.cvta_generic_to_shared(buffer.ptr_to([stage, place[2]])), packed[0], packed[1], packed[2], packed[3]
            )


@T.inline
def _load_contiguous(operand, memory, buffer, stage, first, thread):
    """Load pieces of 16 contiguous bytes, from wherever they start."""
    pieces = T.meta_var(operand.stage_rows * ROW_PIECES)
    at_once = T.meta_var(min(PIECES_AT_ONCE[operand.item_bytes], max(1, pieces // WARPGROUP_THREADS)))
    for i in T.serial(-(-pieces // (WARPGROUP_THREADS * at_once))):
        raw = T.alloc_local((at_once * 8,), "uint32")
        at = T.meta_var((i * at_once, thread))
        _load_pieces(operand, memory, raw, first, at)
        _store_pieces(operand, raw, (buffer, stage), first, at)


@T.inline
def _load_transposed(operand, memory, buffer, stage, first, thread):
    """Load pieces of 16 bytes element by element."""
    batch, first_row, first_k = meta_vars(first)
    matrix = T.meta_var(operand.register_loads.matrix)
    pieces = T.meta_var(operand.stage_rows * ROW_PIECES)
    width = T.meta_var(PIECE_BYTES // operand.item_bytes)
    at_once = T.meta_var(min(TRANSPOSED_AT_ONCE[operand.item_bytes], max(1, pieces // WARPGROUP_THREADS)))
    for i in T.serial(-(-pieces // (WARPGROUP_THREADS * at_once))):
        words = T.alloc_local((at_once * 4,), "uint32")
        elements = T.decl_buffer((at_once * width,), operand.dtype, data=words.data, scope="local")
        for u in T.unroll(at_once):
            place = T.meta_var(place_of(operand, (i * at_once + u) * WARPGROUP_THREADS + thread))
            row = T.meta_var(first_row + place[0])
            for e in T.unroll(width):
                k = T.meta_var(first_k + place[1] + e)
                if T.And(row < matrix.rows[0], k < matrix.columns[0]):
                    elements[u * width + e] = memory.elements[element_at(operand, batch, row, k)]
                else:
                    elements[u * width + e] = tirx.const(0, operand.dtype)
        for u in T.unroll(at_once):
            piece = T.meta_var((i * at_once + u) * WARPGROUP_THREADS + thread)
            place = T.meta_var(place_of(operand, piece))
            if piece < pieces:
                T.ptx["st.shared.v4.u32"](
                    T.cuda.cvta_generic_to_shared(buffer.ptr_to([stage, place[2]])), *[words[u * 4 + w] for w in range(4)]
                )


@T.inline
def load_through_registers(operand, memory, buffer, stage, first, thread):
    """Have the threads of a warpgroup load a tile to a stage; `first` is its batch, row and k."""
    if operand.register_loads.is_transposed:
        _load_transposed(operand, memory, buffer, stage, first, thread)
    else:
        _load_contiguous(operand, memory, buffer, stage, first, thread)
