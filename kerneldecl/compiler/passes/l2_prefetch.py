"""Owns what a kernel asks for before the kernel before it has ended: its first inputs, which come to the second-level cache.

Knows nothing of schedules, policies or what a kernel computes.

Kernels that overlap (`overlap_cuda`) wait, before they touch memory, until the one before them has ended. While its last blocks end one
by one, DRAM has less and less to do. A prefetch to the second-level cache (PTX ISA, "prefetch") is no access: it changes nothing, and
what the kernel before still writes goes through the same cache, which all multiprocessors share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tvm.ir import Call, TensorLoad, Var
from tvm.script import tirx
from tvm.sym import Analyzer
from tvm.tirx import AttrStmt, Bind, BufferStore, DeclBuffer, Evaluate, For, IfThenElse, IntImm, Ramp, SeqStmt
from tvm_ffi import structural, structural_equal

from kerneldecl.model import Gpu, dtype_bytes

AHEAD_BYTES = 64 * 1024
"""That a multiprocessor's blocks ask for together. Measured on an H200: with twice as much, rows of 2 KB were slower than with nothing."""
THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")


def asks_ahead(func: Any, wait: Any, gpu: Gpu) -> Any:
    """Return a kernel's body that begins with `wait`, and where it can be said what its blocks load first, with prefetches before.

    Blocks for which there is no room at once ask for nothing: they would load it in the same moment.
    """
    extents = _extents(func.body)
    block = extents.get("blockIdx.x")
    if block is None or extents.keys() - {"blockIdx.x", *THREADS}:
        return SeqStmt([wait, func.body])
    threads = math.prod(int(extents[name].value) for name in THREADS if name in extents)
    resident = max(1, min(gpu.max_blocks_per_sm, gpu.max_threads_per_sm // threads))
    places = _first_places(func.body, block.node.var, AHEAD_BYTES // (resident * threads))
    asked = [_prefetch(func, buffer, place) for buffer, place in places]
    if not asked:
        return SeqStmt([wait, func.body])
    asking: Any = SeqStmt(asked) if len(asked) > 1 else asked[0]
    if int(block.value) > gpu.sm_count * resident:
        asking = IfThenElse(block.node.var < gpu.sm_count * resident, asking, None)
    return _begun(func.body, [asking, wait])


def _extents(body: Any) -> dict[str, Any]:
    """Return the statements that bind a kernel's threads and blocks, by their names."""
    found: dict[str, Any] = {}

    def note(stmt: Any) -> None:
        if stmt.attr_key == "thread_extent":
            found.setdefault(str(stmt.node.thread_tag), stmt)

    structural.structural_walk(body, [(AttrStmt, note)])
    return found


def _begun(body: Any, first: list[Any]) -> Any:
    """Return the body with statements before all that its threads do."""
    if isinstance(body, AttrStmt) and body.attr_key == "thread_extent":
        return AttrStmt(body.node, body.attr_key, body.value, _begun(body.body, first))
    if isinstance(body, SeqStmt) and isinstance(body.seq[-1], AttrStmt) and body.seq[-1].attr_key == "thread_extent":
        return SeqStmt([*body.seq[:-1], _begun(body.seq[-1], first)])
    return SeqStmt([*first, body])


def _prefetch(func: Any, buffer: Any, place: Any) -> Any:
    """Return the prefetch of an element of an argument.

    The address comes from where the kernel's parameters are: of one that is given to an asm statement, nvcc no longer knows that what
    is there stays the same, and would load it anew for each reduction.
    """
    kernel, at = str(func.attrs["global_symbol"]), _parameter(func, buffer)
    name = f"{kernel}_prefetch_{at}"
    source = f"""
__device__ __forceinline__ void {name}(long long byte) {{
  unsigned long long argument;
  asm("ld.param.u64 %0, [{kernel}_param_{at}];" : "=l"(argument));
  asm volatile("prefetch.global.L2 [%0];" : : "l"(argument + byte));
}}
"""
    byte = place.astype("int64") * dtype_bytes(str(buffer.dtype))
    return Evaluate(tirx.cuda.func_call(name, byte, source_code=source, return_type="void"))


def _parameter(func: Any, buffer: Any) -> int:
    """Return which parameter a buffer's address is."""
    found: list[Any] = []

    def note(stmt: Any) -> None:
        if stmt.buffer.same_as(buffer):
            found.append(stmt.data)

    structural.structural_walk(func.body, [(DeclBuffer, note)])
    return next(at for at, param in enumerate(func.params) if param.same_as(found[0]))


def _first_places(body: Any, block: Any, thread_bytes: int) -> Iterator[tuple[Any, Any]]:
    """Yield which places of its block a thread copies first: of so many bytes together, but one at least."""
    seen: list[tuple[Any, Any]] = []
    left = thread_bytes
    for load, place in _copies(body, {}):
        if not _is_of_block(place, block) or any(load.source.same_as(source) and structural_equal(place, at) for source, at in seen):
            continue
        (index,) = load.indices
        left -= dtype_bytes(str(load.source.dtype)) * (int(index.lanes) if isinstance(index, Ramp) else 1)
        if seen and left < 0:
            return
        seen.append((load.source, place))
        yield load.source, place


def _copies(stmt: Any, values: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the loads of global memory that are copied as they are, and from where.

    Neither those on a condition, which may keep them within an argument, nor those in loops: blocks that load again and again end at
    different times, and those that are late would come later for what the next kernel asks.
    """
    if isinstance(stmt, SeqStmt):
        for part in stmt.seq:
            yield from _copies(part, values)
    elif isinstance(stmt, AttrStmt):
        yield from _copies(stmt.body, values)
    elif isinstance(stmt, For) and isinstance(stmt.extent, IntImm) and int(stmt.extent) == 1:
        yield from _copies(stmt.body, {**values, stmt.loop_var: stmt.min})
    elif isinstance(stmt, Bind):
        values[stmt.var] = _known(stmt.value, values)
    elif isinstance(stmt, BufferStore) and isinstance(stmt.value, TensorLoad) and stmt.value.source.scope() == "global":
        (index,) = stmt.value.indices
        yield stmt.value, Analyzer().simplify(_known(index.base if isinstance(index, Ramp) else index, values))


def _known(index: Any, values: Mapping[Any, Any]) -> Any:
    """Return an index in terms of threads and blocks."""
    return structural.structural_map(index, [(Var, lambda var: values.get(var, var))])


def _is_of_block(index: Any, block: Any) -> bool:
    """Say whether an index depends on the block, and on nothing that is in memory."""
    found: list[Any] = []
    structural.structural_walk(index, [(Var, found.append), (TensorLoad, found.append), (Call, found.append)])
    return any(node.same_as(block) for node in found) and all(isinstance(node, Var) for node in found)
