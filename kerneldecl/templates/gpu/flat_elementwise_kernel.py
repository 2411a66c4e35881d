"""Owns the kernel of an elementwise function over flat memory: whole vectors, and what is left of them by one thread.

Knows nothing of how parameters are chosen or of what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.flat_elementwise import FlatParams, FlatSizes
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.templates.hopper.epilogue import meta_vars


@dataclass(frozen=True)
class FlatKernel:
    """A function with the parameters of its kernel, and what follows from both."""

    sizes: FlatSizes
    params: FlatParams
    result: Callable[[Sequence[Any], Any], Any]
    """Makes the result's expression of the inputs' registers and a place in them."""
    pdl: bool

    @property
    def vectors(self) -> int:
        return self.sizes.elements // self.sizes.width

    @property
    def rest(self) -> int:
        """Return the elements behind the last whole vector."""
        return self.sizes.elements % self.sizes.width

    @property
    def grid(self) -> int:
        return -(-(self.vectors + (self.rest > 0)) // (self.params.threads * self.params.unroll))


@T.inline
def _load(kernel, x, held, vector, u):
    """Load a thread's `u`-th vector of one input."""
    width = T.meta_var(kernel.sizes.width)
    if vector < kernel.vectors:
        for w in T.vectorized(width):
            held[u * width + w] = x[vector * width + w]
    elif vector == kernel.vectors:
        for w in T.unroll(kernel.rest):
            held[u * width + w] = x[vector * width + w]


@T.inline
def _store(kernel, y, held, vector, u):
    """Compute the results of a thread's `u`-th vector, and store them."""
    width = T.meta_var(kernel.sizes.width)
    out = T.alloc_local((kernel.sizes.width,), str(y.dtype))
    for w in T.unroll(width):
        out[w] = kernel.result(held, u * width + w)
    if vector < kernel.vectors:
        for w in T.vectorized(width):
            y[vector * width + w] = out[w]
    elif vector == kernel.vectors:
        for w in T.unroll(kernel.rest):
            y[vector * width + w] = out[w]


@T.inline
def _run(kernel, args, block, thread):
    """Load all vectors of a thread, then compute: neighbours take neighbours."""
    params, inputs, y = meta_vars((kernel.params, args[:-1], args[-1]))
    held = T.meta_var([T.alloc_local((params.unroll * kernel.sizes.width,), str(x.dtype)) for x in inputs])
    if kernel.pdl:
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
    for u in T.unroll(params.unroll):
        vector = T.meta_var((block * params.unroll + u) * params.threads + thread)
        _load(kernel, inputs[0], held[0], vector, u)
        if len(inputs) > 1:
            _load(kernel, inputs[1], held[1], vector, u)
        if len(inputs) > 2:
            _load(kernel, inputs[2], held[2], vector, u)
    for u in T.unroll(params.unroll):
        _store(kernel, y, held, (block * params.unroll + u) * params.threads + thread, u)


def build(kernel: FlatKernel, arguments: Sequence[tuple[tuple[int, ...], str]]) -> tvm.IRModule:
    """Return a module whose `main` is the function, with arguments of these shapes and dtypes; the last is the result."""
    buffers = [tirx.decl_buffer(shape, dtype, f"x{at}") for at, (shape, dtype) in enumerate(arguments)]

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.grid])
        warp = T.warp_id([kernel.params.threads // WARP_LANES])
        lane = T.lane_id([WARP_LANES])
        args = T.meta_var(_flat(buffers))
        _run(kernel, args, block, warp * WARP_LANES + lane)

    func = tirx.PrimFunc(buffers, main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})


def _flat(buffers: Sequence[Any]) -> list[Any]:
    """Return the arguments with one dimension each."""
    return [T.decl_buffer((math.prod(map(int, each.shape)),), str(each.dtype), data=each.data) for each in buffers]
