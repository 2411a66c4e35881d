"""Owns softmax, norms and reductions of few long rows on GPUs: several thread blocks share a row.

Knows nothing of how its parameters are chosen, and recognises a function by its computation, never by its names.

Parameters:
  width    elements of one access: a divisor of 16 bytes' elements; a row that it does not divide has vectors between its first and its last
           elements, which are accessed one by one
  threads  threads of a block, whole warps
  parts    thread blocks that share a row; each keeps its part in registers, 32 elements a thread at most
  cluster  as parts, up to 8 on GPUs with clusters: the blocks of a row exchange statistics through shared memory; or 1: two kernels,
           of which the second reads the row again, from L2 as far as it holds it

Returns TIRx kernels, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.split_rows import SplitRowsParams, takes
from kerneldecl.compiler.canonical import signature_of
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.rowwise import read_rowwise
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.split_rows_config import SplitRowsKernel
from kerneldecl.templates.gpu.split_rows_kernel import build
from kerneldecl.templates.shared.fast_parse import fast_parsing

NAMES = {2: ("X", "Y"), 3: ("X", "gamma", "Y"), 4: ("X", "gamma", "beta", "Y")}
"""Names of the arguments, by their number."""


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the function as one of one or two kernels, or None where these do not take it."""
    chosen = SplitRowsParams(**{name: params[name] for name in SplitRowsParams._fields})  # type: ignore[arg-type]
    spec = read_rowwise(mod)
    if spec is None or not takes(spec.sizes) or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    args = signature_of(mod["main"])
    named = [(name, shape, dtype) for name, (shape, dtype) in zip(NAMES[len(args)], args, strict=True)]
    return build(SplitRowsKernel(spec, chosen, supports_pdl(arch.the_gpu)), named)
