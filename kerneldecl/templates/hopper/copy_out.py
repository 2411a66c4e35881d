"""Owns how a warpgroup copies a chunk of results out of shared memory, where TMA cannot store it: lines spread over lanes.

Knows nothing of how results came there, nor of what an element is, which is `epilogue`.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.templates.hopper.epilogue import Epilogue, is_swizzled, meta_vars


def smem_place(epilogue: Epilogue, line: Any, piece: Any) -> Any:
    """Return where in a chunk 8 elements of a line are: as the swizzle of so long lines permutes them."""
    pieces = epilogue.width // 8
    if not is_swizzled(epilogue.width):
        return line * epilogue.width + piece * 8
    return line * epilogue.width + T.bitwise_xor(piece, line * epilogue.width // MMA_TILE_ROWS % pieces) * 8


@T.inline
def _store_pair(epilogue, buffer, at, line, pair):
    """Store two neighbours of a line from shared memory."""
    batch, row, column = meta_vars(at)
    x = T.meta_var(row + pair if epilogue.is_swapped else row + line)
    y = T.meta_var(column + line if epilogue.is_swapped else column + pair)
    place = T.meta_var(smem_place(epilogue, line, pair // 8) + pair % 8)
    if epilogue.inside(x, y):
        for v in T.vectorized(2):
            xv = T.meta_var(x + v if epilogue.is_swapped else x)
            yv = T.meta_var(y if epilogue.is_swapped else y + v)
            epilogue.buffer[tuple(epilogue.index(batch, xv, yv))] = buffer[place + v]


@T.inline
def _store_element(epilogue, buffer, at, line, element):
    """Store an element of a line from shared memory."""
    batch, row, column = meta_vars(at)
    x = T.meta_var(row + element if epilogue.is_swapped else row + line)
    y = T.meta_var(column + line if epilogue.is_swapped else column + element)
    if epilogue.inside(x, y):
        epilogue.buffer[tuple(epilogue.index(batch, x, y))] = buffer[smem_place(epilogue, line, element // 8) + element % 8]


@T.inline
def _copy_out_narrow(epilogue, buffer, at, lanes):
    """Have a warpgroup store a chunk whose lines have fewer elements than a warp stores at once: a warp takes several lines."""
    warp, lane = meta_vars(lanes)
    of_line = T.meta_var(epilogue.width // (2 if epilogue.in_pairs else 1))
    at_once = T.meta_var(WARP_LANES // of_line)
    for r in T.unroll(-(-epilogue.lines // (4 * at_once))):
        line = T.meta_var((r * 4 + warp) * at_once + lane // of_line)
        if line < epilogue.lines:
            if epilogue.in_pairs:
                _store_pair(epilogue, buffer, at, line, lane % of_line * 2)
            else:
                _store_element(epilogue, buffer, at, line, lane % of_line)


@T.inline
def copy_out(epilogue, buffer, at, lanes):
    """Have a warpgroup store a chunk from shared memory, lines spread over lanes: in pairs, else one element after the other."""
    warp, lane = meta_vars(lanes)
    if epilogue.width < WARP_LANES * 2:
        _copy_out_narrow(epilogue, buffer, at, lanes)
    else:
        for r in T.unroll(epilogue.lines // 4):
            line = T.meta_var(r * 4 + warp)
            if lane < epilogue.width // 2:
                if epilogue.in_pairs:
                    _store_pair(epilogue, buffer, at, line, lane * 2)
                else:
                    for half in T.unroll(2):
                        # Neighbours are stored at once, so that L2 takes whole sectors.
                        _store_element(epilogue, buffer, at, line, half * (epilogue.width // 2) + lane)
