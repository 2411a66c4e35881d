"""Owns the kernel of a vector's product with 4-bit weights: weights stream through shared memory while tensor cores multiply earlier ones.

Knows nothing of how its parameters are chosen; it takes exactly one computation, which it writes down itself (`expected`).

Parameters:
  rows     1024 weights of each that a warp copies and multiplies together: 2, 4 or 8
  warps    of a block: 1 to 32
  stages   2 to 16 such pieces that a warp has in shared memory, or on their way to it
  blocks   that share an SM; their warps take rows in turn until none is left
  warps_k  warps that share rows, each with pieces of its own, so that a block reads more side by side; a divisor of the others

Shared memory: warps * stages * rows * (512 + 2048 / group) bytes of weights and scales, and 2 bytes for each of the vector's
elements, which a block keeps in the order in which tensor cores want them. A lane copies 16 bytes of a row, a warp 512 side by side;
what is on its way takes no registers. Scales belong to 128, 256, 512 or 1024 weights.

Returns a specialised function of TIRx, not a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import IRModule, te, tirx

from kerneldecl.analysis.contraction import FIRST_CAPABILITY
from kerneldecl.compiler.canonical import canonical_module, signature_of
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.gemv_i4_kernel import GROUPS, Kernel, build
from kerneldecl.templates.shared.fast_parse import parsed_quickly


@parsed_quickly()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the product as one specialised kernel, or None where it is another computation, or these sizes do not fit."""
    gpu = arch.the_gpu
    sizes = _sizes(mod)
    if sizes is None or gpu.compute_capability < FIRST_CAPABILITY or not gpu.async_copy:
        return None
    kernel = Kernel(*sizes, **params, sm_count=gpu.sm_count, overlaps=supports_pdl(gpu))  # type: ignore[arg-type]
    return build(kernel) if kernel.fits(gpu) else None


def _sizes(mod: IRModule) -> tuple[int, int, int] | None:
    """Return n, k and the weights that share a scale; None where the module computes something else."""
    signature = signature_of(mod["main"])
    if [dtype for _, dtype in signature] != ["uint8", "float16", "float16", "float16"]:
        return None
    shapes = [shape for shape, _ in signature]
    if [len(shape) for shape in shapes] != [2, 2, 1, 1]:
        return None
    n, k, groups = shapes[0][0], shapes[2][0], shapes[1][1]
    if k % groups or k // groups not in GROUPS or shapes != [(n, k // 2), (n, groups), (k,), (n,)]:
        return None
    return (n, k, k // groups) if match_digest(mod["main"]) == match_digest(expected(n, k, k // groups)) else None


def expected(n: int, k: int, group: int) -> Any:
    """Return the computation: two weights a byte, low nibble first, each (nibble - 8) * scale of its group; sums in float32."""
    packed, scale = te.placeholder((n, k // 2), "uint8"), te.placeholder((n, k // group), "float16")
    x = te.placeholder((k,), "float16")

    def element(row: Any) -> Any:
        g, byte, nibble = (te.reduce_axis((0, extent)) for extent in (k // group, group // 2, 2))
        bits = (packed[row, g * (group // 2) + byte] >> (nibble * 4).astype("uint8")) & tirx.const(15, "uint8")
        weight = (bits.astype("int32") - 8).astype("float32") * scale[row, g].astype("float32")
        return te.sum(weight * x[g * group + byte * 2 + nibble].astype("float32"), axis=[g, byte, nibble])

    sums = te.compute((n,), element)
    y = te.compute((n,), lambda row: sums[row].astype("float16"))
    return canonical_module(te.create_prim_func([packed, scale, x, y], index_dtype_override="int64"))["main"]
