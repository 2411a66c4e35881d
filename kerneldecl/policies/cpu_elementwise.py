"""Owns which vectors and tiles of an elementwise function or a transpose a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from kerneldecl.model import Arch, Block, Cpu, IterSpace, Proposal, Value, dtype_bytes
from kerneldecl.policies.cpu.traffic_secs import LOOP_CYCLES, Stream, Timed, access_cycles, ranked, stream_secs, vector_cycles
from kerneldecl.policies.shared.traffic import axes_of, contiguous_axis, is_elementwise, moved_bytes, points

TEMPLATES = ("cpu_elementwise",)
AUTO = {"cpu": 60}

VECTORS = (4, 1, 2)
"""Vectors that are computed together."""
TILES = ((16, 16), (8, 16), (16, 32), (64, 16), (64, 64))
"""Elements along the transposed operand's contiguous axis by elements along the output's."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return vectors, or tiles where an operand is read transposed; nothing for a function with a reduction."""
    if not is_elementwise(space):
        return ()
    is_transposed = any(_is_transposed(block) for block in space.blocks)
    timed = _tiles(space, arch.the_cpu) if is_transposed else _vectors(space, arch.the_cpu)
    return ranked("cpu_elementwise", timed, top_k)


def _is_transposed(block: Block) -> bool:
    along = contiguous_axis(block, block.writes[0])
    found = (contiguous_axis(block, access) for access in block.reads)
    return along is not None and any(axis not in {None, along} for axis in found) and not _broadcasts(block, along)


def _broadcasts(block: Block, along: int) -> bool:
    """Say whether each operand that is contiguous along another axis leaves the output's axis out."""
    others = [access for access in block.reads if contiguous_axis(block, access) not in {None, along}]
    return all(along not in axes_of(access) for access in others)


def _vectors(space: IterSpace, cpu: Cpu) -> Iterator[Timed]:
    last = space.blocks[-1]
    lanes = max(1, cpu.vector_bytes // dtype_bytes(last.writes[0].dtype))
    nbytes = moved_bytes(space)
    arithmetic = sum(points(block) * block.flops_per_point for block in space.blocks) / lanes
    for vectors, is_parallel in itertools.product(VECTORS, (True, False)):
        width = lanes * vectors
        tasks = max(1, points(last) // width)
        cycles = max(access_cycles(cpu, nbytes), vector_cycles(cpu, arithmetic)) + tasks * LOOP_CYCLES
        if not is_parallel or tasks > 1:
            yield {"vectors": vectors, "parallel": is_parallel}, stream_secs(cpu, Stream(nbytes, cycles, tasks), is_parallel=is_parallel)


def _tiles(space: IterSpace, cpu: Cpu) -> Iterator[Timed]:
    last = space.blocks[-1]
    nbytes, element = moved_bytes(space), dtype_bytes(last.writes[0].dtype)
    for tile, is_packed, rows_outermost, is_parallel in itertools.product(TILES, (True, False), (True, False), (True, False)):
        # Every element is loaded and stored by itself; cache lines that a tile covers only partly are moved more than once.
        line_moves = sum(max(1.0, cpu.line_bytes / (side * element)) for side in tile) / 2
        cycles = points(last) * (1.0 + 0.5 * is_packed) * (1.0 if is_packed else line_moves)
        tasks = max(1, points(last) // (tile[0] * tile[1]))
        params: Mapping[str, Value] = {
            "vectors": 1, "tile": tile, "packed": is_packed, "rows_outermost": rows_outermost, "parallel": is_parallel,
        }  # fmt: skip
        if not is_parallel or tasks > 1:
            yield params, stream_secs(cpu, Stream(int(nbytes * line_moves), cycles, tasks), is_parallel=is_parallel)
