"""Owns elementwise functions on GPUs whose rows are no whole vectors, with broadcasts, margins, parts and indices: results in vectors.

Knows nothing of how its parameters are chosen or of any one operator.

Parameters:
  threads  threads of a block, whole warps
  unroll   vectors of a thread, of 16 bytes of the widest argument read or written in vectors: 1 to 8

A row is as many of the last axes as hold a vector, which is in two rows at most. What depends on the row alone is computed once for each
of both; what depends on the place in a row alone, such as a bias, once for all vectors of a thread, which begin at the same place.
Arguments of the result's shape are read in vectors.

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import IRModule, tirx

from kerneldecl.analysis.unaligned_elementwise import UnalignedParams, unaligned_sizes_of
from kerneldecl.compiler.canonical import signature_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.passes.nan import has_instruction
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.inlined_store import inlined_store
from kerneldecl.templates.gpu.unaligned_element import Element, UnknownPlaceError
from kerneldecl.templates.gpu.unaligned_elementwise_kernel import UnalignedKernel, build
from kerneldecl.templates.shared.fast_math import with_fast_activations
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the function as one kernel, or None where it is no elementwise one that can be divided."""
    chosen = UnalignedParams(**{name: params[name] for name in UnalignedParams._fields})  # type: ignore[arg-type]
    sizes = unaligned_sizes_of(iter_space(mod))
    found = inlined_store(mod)
    if sizes is None or found is None or not chosen.fits(sizes, arch.the_gpu):
        return None
    sch, store = found
    dtype = str(store.buffer.dtype)
    value = with_fast_activations(store.value, dtype) if has_instruction(arch.the_gpu) else store.value
    extents = [int(extent) for extent in store.buffer.shape]

    def element(flat_of: Mapping[Any, Any]) -> Element:
        return Element.of(list(store.indices), extents, sizes.trailing, flat_of, value)

    arguments, own = signature_of(mod["main"]), list(sch.mod["main"].params)
    flat = {param: tirx.decl_buffer((math.prod(shape),), dtype) for param, (shape, dtype) in zip(own, arguments, strict=True)}
    try:
        divided = element(flat)
    except UnknownPlaceError:
        return None
    # Of one row alone, vectors of a thread are at other places.
    if chosen.unroll > 1 and sizes.columns == sizes.elements and divided.has_column:
        return None
    return build(UnalignedKernel(sizes, chosen, element, supports_pdl(arch.the_gpu)), arguments, own)
