"""Owns elementwise functions on GPUs whose arguments have odd extents: vectors over flat memory, and what is left of them.

Knows nothing of how its parameters are chosen or of any one operator.

Parameters:
  threads  threads of a block, whole warps
  unroll   vectors of a thread, of 16 bytes of the widest argument: 1 to 8

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import IRModule
from tvm.ir import TensorLoad

from kerneldecl.analysis.flat_elementwise import FlatParams, flat_sizes_of
from kerneldecl.compiler.canonical import signature_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.passes.nan import has_instruction
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.flat_elementwise_kernel import FlatKernel, build
from kerneldecl.templates.gpu.inlined_store import inlined_store
from kerneldecl.templates.shared.fast_math import with_fast_activations
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the function as one kernel, or None where it is no elementwise one over flat memory."""
    chosen = FlatParams(**{name: params[name] for name in FlatParams._fields})  # type: ignore[arg-type]
    sizes = flat_sizes_of(iter_space(mod))
    if sizes is None or not chosen.fits(sizes, arch.the_gpu):
        return None
    result = _result(mod, is_fast=has_instruction(arch.the_gpu))
    return None if result is None else build(FlatKernel(sizes, chosen, result, supports_pdl(arch.the_gpu)), signature_of(mod["main"]))


def _result(mod: IRModule, *, is_fast: bool) -> Callable[[Sequence[Any], Any], Any] | None:
    """Return what makes the result of the inputs' registers: the last block's expression, with all others inlined."""
    if (found := inlined_store(mod)) is None:
        return None
    sch, store = found
    places = {param.name: at for at, param in enumerate(sch.mod["main"].params)}
    dtype = str(store.buffer.dtype)

    def result(held: Sequence[Any], at: Any) -> Any:
        replaced = tvm_ffi.structural_map(store.value, [(TensorLoad, lambda load: held[places[load.source.name]][at])], order="pre")
        return with_fast_activations(replaced, dtype) if is_fast else replaced

    return result
