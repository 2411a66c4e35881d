"""Owns the kernel of a GEMV with 4-bit weights: weights stream through shared memory while tensor cores multiply earlier ones.

Knows nothing of how its parameters are chosen; it takes exactly one computation, which it defines itself (`expected`).

Parameters:
  rows     rows of weights that a warp computes together: 2, 4 or 8
  warps    warps of a thread block: 1 to 32
  stages   pieces of `rows` x 1024 weights that a warp has in shared memory or on their way to it: 2 to 16
  blocks   thread blocks that share an SM; their warps compute one group of rows after another until none is left
  warps_k  warps that share rows, each with pieces of its own, so that a block reads more contiguous weights; a divisor of `warps`

Shared memory: warps * stages * rows * (512 + 2048 / group) bytes of weights and scales, and 2 bytes for each element of the vector, which
a block keeps in the order of the tensor cores' fragments. A lane copies 16 bytes of a row by cp.async, a warp 512 contiguous ones; copies
in flight occupy no registers. A scale belongs to 128, 256, 512 or 1024 weights.

Returns a TIRx function, not a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import IRModule, te, tirx

from kerneldecl.analysis.params import I4_GROUPS, GemvI4Params, read_params
from kerneldecl.analysis.tensor_cores import first_capability
from kerneldecl.compiler.canonical import canonical_module, signature_of
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.gemv_i4_config import Kernel
from kerneldecl.templates.gpu.gemv_i4_kernel import build
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMV as one TIRx kernel, or None where the module computes something else, or these sizes do not fit."""
    gpu = arch.the_gpu
    sizes = _sizes(mod)
    if sizes is None or gpu.compute_capability < first_capability("mma.sync") or not gpu.async_copy:
        return None
    n, k, group = sizes
    kernel = Kernel(n=n, k=k, group=group, params=read_params(GemvI4Params, params), sm_count=gpu.sm_count, pdl=supports_pdl(gpu))
    return build(kernel) if kernel.fits(gpu) else None


def _sizes(mod: IRModule) -> tuple[int, int, int] | None:
    """Return n, k and the number of weights that share a scale; None where the module computes something else."""
    signature = signature_of(mod["main"])
    if [dtype for _, dtype in signature] != ["uint8", "float16", "float16", "float16"]:
        return None
    shapes = [shape for shape, _ in signature]
    if [len(shape) for shape in shapes] != [2, 2, 1, 1]:
        return None
    n, k, groups = shapes[0][0], shapes[2][0], shapes[1][1]
    if k % groups or k // groups not in I4_GROUPS or shapes != [(n, k // 2), (n, groups), (k,), (n,)]:
        return None
    return (n, k, k // groups) if match_digest(mod["main"]) == match_digest(expected(n, k, k // groups)) else None


def expected(n: int, k: int, group: int) -> Any:
    """Return the computation: two weights per byte, low nibble first, each (nibble - 8) * scale of its group; accumulators in float32."""
    packed, scale = te.placeholder((n, k // 2), "uint8"), te.placeholder((n, k // group), "float16")
    x = te.placeholder((k,), "float16")

    def element(row: Any) -> Any:
        g, byte, nibble = (te.reduce_axis((0, extent)) for extent in (k // group, group // 2, 2))
        bits = (packed[row, g * (group // 2) + byte] >> (nibble * 4).astype("uint8")) & tirx.const(15, "uint8")
        weight = (bits.astype("int32") - 8).astype("float32") * scale[row, g].astype("float32")
        return te.sum(weight * x[g * group + byte * 2 + nibble].astype("float32"), axis=[g, byte, nibble])

    accum = te.compute((n,), element)
    y = te.compute((n,), lambda row: accum[row].astype("float16"))
    return canonical_module(te.create_prim_func([packed, scale, x, y], index_dtype_override="int64"))["main"]
