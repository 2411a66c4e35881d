"""Owns what a kernel asks for before the kernel before it has ended: its first inputs, which come to the second-level cache.

Knows nothing of schedules, policies or what a kernel computes.

Kernels that overlap (`overlap_cuda`) wait, before they touch memory, until the one before them has ended. Meanwhile DRAM has less and
less to do, as its last blocks end one by one. A prefetch to the second-level cache (PTX ISA, "prefetch") is no access: it changes
nothing, all multiprocessors share that cache, and what the kernel before writes yet goes there, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import tvm
from tvm.ir import Call, TensorLoad, Var
from tvm.sym import Analyzer
from tvm.tirx import AttrStmt, Bind, BufferStore, DeclBuffer, Evaluate, For, IfThenElse, SeqStmt
from tvm_ffi import structural, structural_equal

from kerneldecl.model import Gpu, dtype_bytes

AHEAD_BYTES = 64 * 1024
"""That a multiprocessor's blocks ask for together."""
NEXT = False
BULK = False
_THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")


def with_prefetch(func: Any, wait: Any, gpu: Gpu) -> Any:
    """Return a kernel's body that begins with `wait`, and where it can be said what its blocks load first, with prefetches before.

    Only blocks that find room all at once ask for something: later ones would load it in the same moment.
    """
    body, threads = func.body, _bound(func.body)
    block = threads.get("blockIdx.x")
    if block is None or "blockIdx.y" in threads or "blockIdx.z" in threads:
        return SeqStmt([wait, body])
    count = math.prod(int(threads[name].value) for name in _THREADS if name in threads)
    resident = min(gpu.max_blocks_per_sm, gpu.max_threads_per_sm // count)
    places = list(_first_copies(body, block.node.var, AHEAD_BYTES // (resident * count)))
    asked = _bulk(func, places, threads) if BULK else [_prefetch(func, *place) for place in places]
    if not asked:
        return SeqStmt([wait, body])
    first = gpu.sm_count * resident
    guarded = SeqStmt(asked) if len(asked) > 1 else asked[0]
    if int(block.value) > first:
        guarded = IfThenElse(block.node.var < first, guarded, None)
    if NEXT and int(block.value) > first:
        later = [_prefetch(func, buffer, structural.structural_map(place, [(Var, lambda var: var + first if var.same_as(block.node.var) else var)])) for buffer, place in _first_copies(body, block.node.var, AHEAD_BYTES // (resident * count))]
        return _inside(body, [guarded, wait, IfThenElse(block.node.var < int(block.value) - first, SeqStmt(later) if len(later) > 1 else later[0], None)])
    return _inside(body, [guarded, wait])


def _prefetch(func: Any, buffer: Any, place: Any) -> Any:
    """Return the prefetch of a place in an argument.

    It takes the argument's address from where the kernel's parameters are: of an address that goes to an asm statement, nvcc no longer knows
    that what is there stays the same, and would load it again for each reduction.
    """
    kernel = str(func.attrs["global_symbol"])
    at = _param(func, buffer)
    name = f"{kernel}_prefetch_{at}"
    source = f"""
__device__ __forceinline__ void {name}(long long byte) {{
  unsigned long long argument;
  asm("ld.param.u64 %0, [{kernel}_param_{at}];" : "=l"(argument));
  asm volatile("prefetch.global.L2 [%0];" : : "l"(argument + byte));
}}
"""
    byte = place.astype("int64") * dtype_bytes(str(buffer.dtype))
    return Evaluate(tvm.script.tirx.cuda.func_call(name, byte, source_code=source, return_type="void"))


def _bound(body: Any) -> dict[str, Any]:
    """Return what a kernel's body binds to threads and blocks."""
    found: dict[str, Any] = {}

    def note(stmt: Any) -> None:
        if stmt.attr_key == "thread_extent":
            found.setdefault(stmt.node.thread_tag, stmt)

    structural.structural_walk(body, [(AttrStmt, note)])
    return found


def _inside(body: Any, first: list[Any]) -> Any:
    """Return the body with statements before all that its threads do."""
    if isinstance(body, AttrStmt) and body.attr_key == "thread_extent":
        return AttrStmt(body.node, body.attr_key, body.value, _inside(body.body, first))
    if isinstance(body, SeqStmt) and isinstance(body.seq[-1], AttrStmt) and body.seq[-1].attr_key == "thread_extent":
        return SeqStmt([*body.seq[:-1], _inside(body.seq[-1], first)])
    return SeqStmt([*first, body])


def _bulk(func: Any, places: list[Any], threads: Any) -> list[Any]:
    thread = threads["threadIdx.x"]
    analyzer = Analyzer()
    runs: list[Any] = []
    for buffer, place in places:
        first = structural.structural_map(place, [(Var, lambda var: tvm.tirx.const(0, str(var.ty.dtype)) if var.same_as(thread.node.var) else var)])
        step = analyzer.simplify(structural.structural_map(place, [(Var, lambda var: tvm.tirx.const(1, str(var.ty.dtype)) if var.same_as(thread.node.var) else var)]) - first)
        size = int(thread.value) * int(step)
        if runs and runs[-1][0].same_as(buffer) and structural_equal(analyzer.simplify(first - runs[-1][1]), tvm.tirx.const(runs[-1][2], "int32")):
            runs[-1][2] += size
        else:
            runs.append([buffer, first, size])
    asked = []
    for buffer, first, size in runs:
        kernel = str(func.attrs["global_symbol"])
        at = _param(func, buffer)
        name = f"{kernel}_prefetch_{at}"
        source = f"""
__device__ __forceinline__ void {name}(long long byte, int bytes) {{
  unsigned long long argument;
  asm("ld.param.u64 %0, [{kernel}_param_{at}];" : "=l"(argument));
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(argument + byte), "r"(bytes));
}}
"""
        nbytes = dtype_bytes(str(buffer.dtype))
        asked.append(Evaluate(tvm.script.tirx.cuda.func_call(name, first.astype("int64") * nbytes, size * nbytes, source_code=source, return_type="void")))
    return [IfThenElse(thread.node.var == 0, SeqStmt(asked) if len(asked) > 1 else asked[0], None)]


def _param(func: Any, buffer: Any) -> int:
    """Return which parameter a buffer's address is."""
    found: list[Any] = []

    def note(stmt: Any) -> None:
        if stmt.buffer.same_as(buffer):
            found.append(stmt.data)

    structural.structural_walk(func.body, [(DeclBuffer, note)])
    return next(at for at, param in enumerate(func.params) if param.same_as(found[0]))


def _first_copies(body: Any, block: Any, thread_bytes: int) -> Iterator[tuple[Any, Any]]:
    """Yield where a thread copies first from its block's own places: so many bytes at most, but one vector at least."""
    seen: list[tuple[Any, Any]] = []
    total = 0
    for load, place in _copies(body, {}, Analyzer()):
        nbytes = dtype_bytes(str(load.source.dtype)) * _lanes(load)
        if not _depends(place, block) or any(load.source.same_as(source) and structural_equal(place, at) for source, at in seen):
            continue
        if seen and total + nbytes > thread_bytes:
            return
        seen.append((load.source, place))
        total += nbytes
        yield load.source, place


def _lanes(load: Any) -> int:
    (index,) = load.indices
    return int(index.lanes) if isinstance(index, tvm.tirx.Ramp) else 1


def _copies(stmt: Any, values: dict[Any, Any], analyzer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the loads of global memory that are copied as they are, each with its place in the first turn of all loops.

    What is copied on a condition is left out.
    """
    if isinstance(stmt, SeqStmt):
        for part in stmt.seq:
            yield from _copies(part, values, analyzer)
    elif isinstance(stmt, AttrStmt):
        yield from _copies(stmt.body, values, analyzer)
    elif isinstance(stmt, For):
        yield from _copies(stmt.body, {**values, stmt.loop_var: stmt.min}, analyzer)
    elif isinstance(stmt, Bind):
        values[stmt.var] = _placed(stmt.value, values)
    elif isinstance(stmt, BufferStore) and isinstance(stmt.value, TensorLoad) and stmt.value.source.scope() == "global":
        (index,) = stmt.value.indices
        place = _placed(index.base if isinstance(index, tvm.tirx.Ramp) else index, values)
        yield stmt.value, analyzer.simplify(place)


def _placed(index: Any, values: dict[Any, Any]) -> Any:
    return structural.structural_map(index, [(Var, lambda var: values.get(var, var))])


def _depends(index: Any, var: Any) -> bool:
    """Say whether an index depends on a variable, and on nothing that is in memory."""
    found: list[Any] = []
    structural.structural_walk(index, [(Var, found.append), (TensorLoad, found.append), (Call, found.append)])
    return any(node.same_as(var) for node in found) and all(isinstance(node, Var) for node in found)
