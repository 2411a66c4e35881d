"""Owns the kernel of an elementwise function whose rows are no whole vectors: results in vectors over flat memory, terms once for many.

Knows nothing of how parameters are chosen or of what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.unaligned_elementwise import UnalignedParams, UnalignedSizes
from kerneldecl.templates.gpu.unaligned_element import Element, replaced


@dataclass(frozen=True)
class UnalignedKernel:
    """A function with the parameters of its kernel."""

    sizes: UnalignedSizes
    params: UnalignedParams
    element: Callable[[Mapping[Any, Any]], Element]
    """Divides the result's expression, given arguments of one dimension by the function's parameters."""
    pdl: bool

    @property
    def stride(self) -> int:
        return self.params.stride(self.sizes)

    @property
    def has_rows(self) -> bool:
        return self.sizes.columns < self.sizes.elements


@dataclass(frozen=True)
class _Registers:
    """What a thread holds: its first vector with that one's row and place in it, vectors, terms of rows, terms of columns, results."""

    place: Any
    vectors: dict[Any, Any]
    rows: list[Any]
    columns: list[Any]
    out: Any


def build(kernel: UnalignedKernel, arguments: Sequence[tuple[tuple[int, ...], str]], params: Sequence[Any]) -> tvm.IRModule:
    """Return a module whose `main` is the function, with arguments of these shapes and dtypes; the last is the result."""
    buffers = [tirx.decl_buffer(shape, dtype, f"x{at}") for at, (shape, dtype) in enumerate(arguments)]

    @T.prim_func(check_well_formed=False)
    def main() -> None:
        T.device_entry()
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.params.grid(kernel.sizes)])
        warp = T.warp_id([kernel.params.threads // WARP_LANES])
        lane = T.lane_id([WARP_LANES])
        args = T.meta_var(_flat(buffers))
        if kernel.pdl:
            T.ptx.griddepcontrol.launch_dependents()
            T.ptx.griddepcontrol.wait()
        _run(kernel, args, params, block * kernel.params.threads + warp * WARP_LANES + lane)

    func = tirx.PrimFunc(buffers, main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})


def _flat(buffers: Sequence[Any]) -> list[Any]:
    """Return the arguments with one dimension each."""
    return [T.decl_buffer((math.prod(map(int, each.shape)),), str(each.dtype), data=each.data) for each in buffers]


def _run(kernel: UnalignedKernel, args: Sequence[Any], params: Sequence[Any], thread: Any) -> None:
    """Emit the work of a thread: loads of all vectors and terms, results, stores; then the elements behind the last vector."""
    flat_of = dict(zip(params, args, strict=True))
    element, y = kernel.element(flat_of), args[-1]
    held = _held(kernel, element, y)
    _store(held.place, 0, tirx.min(thread, min(kernel.stride, kernel.sizes.vectors) - 1))
    first, columns = held.place[0] * kernel.sizes.width, tirx.const(kernel.sizes.columns, "int32")
    _store(held.place, 1, tirx.truncdiv(first, columns))
    _store(held.place, 2, tirx.truncmod(first, columns))
    for (_, term), cells in zip(element.columns, held.columns, strict=True):
        with T.unroll(kernel.sizes.width) as w:
            _store(cells, w, replaced(term, {element.column: _column(kernel, held, w)}))
    with T.unroll(kernel.params.unroll) as u:
        _load(kernel, element, held, flat_of, u)
    with T.unroll(kernel.params.unroll) as u, T.unroll(kernel.sizes.width) as w:
        _store(held.out, u * kernel.sizes.width + w, _result(kernel, element, held, (u, w)))
    with T.unroll(kernel.params.unroll) as u:
        vector = held.place[0] + u * kernel.stride
        exists = thread < kernel.stride if kernel.params.unroll == 1 else tirx.all(thread < kernel.stride, vector < kernel.sizes.vectors)
        with T.If(exists), T.Then(), T.vectorized(kernel.sizes.width) as w:
            _store(y, vector * kernel.sizes.width + w, held.out[u * kernel.sizes.width + w])
    if kernel.sizes.rest:
        with T.If(thread == kernel.stride), T.Then():
            for at in range(kernel.sizes.vectors * kernel.sizes.width, kernel.sizes.elements):
                _store(y, at, _single(kernel, element, flat_of, at))


def _held(kernel: UnalignedKernel, element: Element, y: Any) -> _Registers:
    """Allocate a thread's registers."""
    unroll, width = kernel.params.unroll, kernel.sizes.width
    return _Registers(
        T.alloc_local((3,), "int32"),
        {source: T.alloc_local((unroll * width,), str(own.ty.dtype)) for source, own in element.vectors.items()},
        [T.alloc_local((2 * unroll,), str(var.ty.dtype)) for var, _ in element.rows],
        [T.alloc_local((width,), str(var.ty.dtype)) for var, _ in element.columns],
        T.alloc_local((unroll * width,), str(y.dtype)),
    )


def _store(buffer: Any, at: Any, value: Any) -> None:
    T.buffer_store(buffer, value, [at])


def _column(kernel: UnalignedKernel, held: _Registers, w: Any) -> Any:
    """Return the place in its row of an element of a thread's vectors, all of which have the same."""
    column = held.place[2] + w
    return column - tirx.Select(_wraps(kernel, held, w), kernel.sizes.columns, 0) if kernel.has_rows else column


def _wraps(kernel: UnalignedKernel, held: _Registers, w: Any) -> Any:
    return held.place[2] + w >= kernel.sizes.columns


def _load(kernel: UnalignedKernel, element: Element, held: _Registers, flat_of: Mapping[Any, Any], u: Any) -> None:
    """Load a thread's `u`-th vector of each argument, and the terms of its rows. Behind the last vector, the first is read again."""
    width, stride = kernel.sizes.width, kernel.stride
    exists = held.place[0] + u * stride < kernel.sizes.vectors
    vector = held.place[0] + (tirx.Select(exists, u * stride, 0) if kernel.params.unroll > 1 else 0)
    for source, cells in held.vectors.items():
        with T.vectorized(width) as w:
            _store(cells, u * width + w, flat_of[source][vector * width + w])
    if not element.rows:
        return
    row = held.place[1]
    if kernel.params.unroll > 1:
        row = row + tirx.Select(exists, u * (stride * width // kernel.sizes.columns), 0)
    for (_, term), cells in zip(element.rows, held.rows, strict=True):
        _store(cells, 2 * u, replaced(term, element.digits_of(row)))
    if kernel.has_rows:
        for cells in held.rows:
            _store(cells, 2 * u + 1, cells[2 * u])
        with T.If(_wraps(kernel, held, width - 1)), T.Then():
            for (_, term), cells in zip(element.rows, held.rows, strict=True):
                _store(cells, 2 * u + 1, replaced(term, element.digits_of(row + 1)))


def _result(kernel: UnalignedKernel, element: Element, held: _Registers, at: tuple[Any, Any]) -> Any:
    """Return the result of one element of one vector."""
    u, w = at
    values: dict[Any, Any] = {element.column: _column(kernel, held, w)}
    values |= {own: held.vectors[source][u * kernel.sizes.width + w] for source, own in element.vectors.items()}
    values |= {var: cells[w] for (var, _), cells in zip(element.columns, held.columns, strict=True)}
    for (var, _), cells in zip(element.rows, held.rows, strict=True):
        both = cells[2 * u], cells[2 * u + 1]
        values[var] = tirx.Select(_wraps(kernel, held, w), both[1], both[0]) if kernel.has_rows else both[0]
    return replaced(element.value, values)


def _single(kernel: UnalignedKernel, element: Element, flat_of: Mapping[Any, Any], at: int) -> Any:
    """Return the result at one place that is known."""
    row, column = (tirx.const(each, "int32") for each in divmod(at, kernel.sizes.columns))
    digits = element.digits_of(row)
    values: dict[Any, Any] = {element.column: column}
    values |= {own: flat_of[source][at] for source, own in element.vectors.items()}
    values |= {var: replaced(term, values) for var, term in element.columns}
    values |= {var: replaced(term, digits) for var, term in element.rows}
    return replaced(element.value, values)
