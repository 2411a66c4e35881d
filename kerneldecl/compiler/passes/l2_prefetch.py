"""Owns the L2 prefetch of a kernel's first inputs, issued before the preceding kernel has ended.

Knows nothing of schedules, policies or what a kernel computes.

Kernels launched with PDL (`dependent_launch`) wait, before they touch memory, until the preceding kernel has ended. While its last
blocks end one by one, DRAM bandwidth is idle. An L2 prefetch (PTX ISA, "prefetch") is safe before the wait: it changes nothing, and
what the preceding kernel still writes goes through the same L2, which all SMs share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tvm.ir import Call, TensorLoad, Var
from tvm.script import tirx
from tvm.sym import Analyzer
from tvm.tirx import AttrStmt, Bind, BufferStore, DeclBuffer, Evaluate, For, IfThenElse, IntImm, Ramp, SeqStmt
from tvm_ffi import structural, structural_equal

from kerneldecl.model import Gpu, dtype_bytes

PREFETCH_BYTES = 64 * 1024
"""Bytes that the blocks of one SM prefetch together. On an H200, with twice as much, rows of 2 KB were slower than without prefetch."""
MAX_SHARING = 4
"""Prefetches of one element at most, by all threads of the first wave: it seems that those of a few lines wait for each other in L2; not
timed without them yet. A batch norm of 40 000 threads with 184 channels took 3.0 us on an H200, an elementwise multiplication of as many
elements 1.6 (2026-11-28)."""
THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")


def prefetch_before_wait(func: Any, wait: Any, gpu: Gpu) -> Any:
    """Return a kernel's body that begins with `wait`, after L2 prefetches of the block's first loads where these are known.

    Blocks beyond the first wave prefetch nothing: they start after the wait is over and load at once.
    """
    extents = _extents(func.body)
    block = extents.get("blockIdx.x")
    if block is None or extents.keys() - {"blockIdx.x", *THREADS}:
        return SeqStmt([wait, func.body])
    threads = math.prod(int(extents[name].value) for name in THREADS if name in extents)
    resident = max(1, min(gpu.max_blocks_per_sm, gpu.max_threads_per_sm // threads))
    first_blocks = min(gpu.sm_count * resident, int(block.value.value)) if isinstance(block.value, IntImm) else gpu.sm_count * resident
    loads = [load for load in _unconditional_loads(func.body, {}) if not _is_shared(load[0], first_blocks * threads)]
    places = _first_loads(loads, block.node.var, PREFETCH_BYTES // (resident * threads))
    prefetches = [_prefetch(func, buffer, place) for buffer, place in places]
    if not prefetches:
        return SeqStmt([wait, func.body])
    prefetch: Any = SeqStmt(prefetches) if len(prefetches) > 1 else prefetches[0]
    if not isinstance(block.value, IntImm) or int(block.value) > gpu.sm_count * resident:
        prefetch = IfThenElse(block.node.var < gpu.sm_count * resident, prefetch, None)
    return _prepended(func.body, [prefetch, wait])


def _extents(body: Any) -> dict[str, Any]:
    """Return the statements that bind a kernel's threads and blocks, by thread tag."""
    found: dict[str, Any] = {}

    def note(stmt: Any) -> None:
        if stmt.attr_key == "thread_extent":
            found.setdefault(str(stmt.node.thread_tag), stmt)

    structural.structural_walk(body, [(AttrStmt, note)])
    return found


def _prepended(body: Any, first: list[Any]) -> Any:
    """Return the body with statements prepended to what its threads execute."""
    if isinstance(body, AttrStmt) and body.attr_key == "thread_extent":
        return AttrStmt(body.node, body.attr_key, body.value, _prepended(body.body, first))
    if isinstance(body, SeqStmt) and isinstance(body.seq[-1], AttrStmt) and body.seq[-1].attr_key == "thread_extent":
        return SeqStmt([*body.seq[:-1], _prepended(body.seq[-1], first)])
    return SeqStmt([*first, body])


def _prefetch(func: Any, buffer: Any, place: Any) -> Any:
    """Return the prefetch of an element of an argument.

    The address is read from the kernel's parameter space: if the pointer itself were an operand of the asm statement, nvcc would no
    longer treat the data as read-only, and would load it again for each reduction.
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
    """Return the index of the parameter that holds a buffer's address."""
    found: list[Any] = []

    def note(stmt: Any) -> None:
        if stmt.buffer.same_as(buffer):
            found.append(stmt.data)

    structural.structural_walk(func.body, [(DeclBuffer, note)])
    return next(at for at, param in enumerate(func.params) if param.same_as(found[0]))


def _is_shared(load: Any, threads: int) -> bool:
    """Say whether so many threads load the elements of an argument again and again, as those of a row or a column that is broadcast."""
    (index,), shape = load.indices, load.source.shape
    lanes = int(index.lanes) if isinstance(index, Ramp) else 1
    return all(isinstance(extent, IntImm) for extent in shape) and threads * lanes > MAX_SHARING * math.prod(int(n.value) for n in shape)


def _first_loads(loads: Iterable[tuple[Any, Any]], block: Any, thread_bytes: int) -> Iterator[tuple[Any, Any]]:
    """Yield (buffer, index) of a thread's first loads, of those given: up to `thread_bytes` together, at least one."""
    seen: list[tuple[Any, Any]] = []
    left = thread_bytes
    for load, place in loads:
        if not _is_given_by_block(place, block) or any(load.source.same_as(source) and structural_equal(place, at) for source, at in seen):
            continue
        (index,) = load.indices
        left -= dtype_bytes(str(load.source.dtype)) * (int(index.lanes) if isinstance(index, Ramp) else 1)
        if seen and left < 0:
            return
        seen.append((load.source, place))
        yield load.source, place


def _unconditional_loads(stmt: Any, values: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the loads of global memory whose value is stored unchanged, each with its index.

    Conditional loads are left out, as the condition may keep them within an argument. Loads in loops are left out, as blocks that
    load repeatedly end at different times, and the prefetches of the next kernel would delay the late ones.
    """
    if isinstance(stmt, SeqStmt):
        for part in stmt.seq:
            yield from _unconditional_loads(part, values)
    elif isinstance(stmt, AttrStmt):
        yield from _unconditional_loads(stmt.body, values)
    elif isinstance(stmt, For) and isinstance(stmt.extent, IntImm) and int(stmt.extent) == 1:
        yield from _unconditional_loads(stmt.body, {**values, stmt.loop_var: stmt.min})
    elif isinstance(stmt, Bind):
        values[stmt.var] = _resolved(stmt.value, values)
    elif isinstance(stmt, BufferStore) and isinstance(stmt.value, TensorLoad) and stmt.value.source.scope() == "global":
        (index,) = stmt.value.indices
        yield stmt.value, Analyzer().simplify(_resolved(index.base if isinstance(index, Ramp) else index, values))


def _resolved(index: Any, values: Mapping[Any, Any]) -> Any:
    """Return an index as an expression of threads and blocks."""
    return structural.structural_map(index, [(Var, lambda var: values.get(var, var))])


def _is_given_by_block(index: Any, block: Any) -> bool:
    """Say whether an index depends on the block, and on nothing in memory."""
    found: list[Any] = []
    structural.structural_walk(index, [(Var, found.append), (TensorLoad, found.append), (Call, found.append)])
    return any(node.same_as(block) for node in found) and all(isinstance(node, Var) for node in found)
