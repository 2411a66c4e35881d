"""Owns the kernel of matrix products on wgmma: TMA into a ring of tiles, warpgroups that multiply them, a fused epilogue.

Knows nothing of how its parameters are chosen, and recognises a product by its structure, never by its names.

wgmma multiplies rows by columns. Rows are those of the product and columns its columns, or the other way round with `swap`.

Parameters:
  block_m      rows of a tile: 64 or 128 for each consumer that works on it
  block_n      columns of a tile: a multiple of 8 up to 256. A thread has one sum for each 128 of its consumer's part of a tile, in at
               most 192, 192 or 104 registers with 1, 2 or 3 consumers; sums in float16 share a register by twos
  consumers    1 to 3 warpgroups of 128 threads that multiply; one more loads
  stages       2 to 12 tiles of both operands in shared memory at once; a tile has 128 bytes of the reduction
  cluster_m    1, 2 or 4: neighbouring tiles along the rows whose blocks share the columns' operand by multicast
  cluster_n    1, 2 or 4: along the columns, sharing the rows' operand; the two make at most 4. What blocks share is cut in boxes of 8
               rows or a multiple, 64 where they lie side by side in memory; a block brings at most four, and the last ones fewer
  raster_group rows of tiles (of clusters of them) that are walked before the next column
  split_k      1, 2, 4 or 8 parts of the reduction, summed by the blocks of one cluster in each other's shared memory; then cluster_m and
               cluster_n are 1 and there is one tile for each cluster
  kernel_schedule
               "cooperative": all consumers share a tile; "staggered": two do, the second some steps behind the first; "pingpong": two have
               tiles of their own (block_m is then one consumer's). With the latter two, one's results leave while the other multiplies
  swap_ab      1 exchanges the operands: the product's n become rows of tiles (block_m, cluster_m, raster), its m columns (block_n)
  pdl          1 starts as soon as the previous kernel leaves room and waits for its end before the first load
  pack         1 copies operands whose rows are no multiples of 16 bytes long to a workspace where they are, by a kernel of its own in
               front; the product, which starts while that one ends, has TMA read the copies
  stream_k     1 or 2 of the last waves of tiles, of which the very last is not full, have their steps dealt evenly over all SMs
               (stream-K): partial sums meet in global memory. That takes cooperative consumers, two or three, whose reduction is not
               split, sums of 32 bits, and dependent 1: a small kernel in front clears flags

Shared memory: stages * (block_m + block_n) * 128 bytes (columns side by side in memory: block_n rounded up to 64), 8192 bytes for each
consumer's buffer of 16-bit results of 64 x 64 (as many of 1, 2, 4 as fit and divide the tile), where the reduction is split
block_m * block_n * 4 bytes (2 of sums in float16), 1 KiB of barriers and alignment. Blocks of one consumer share an SM if it fits.
Operands whose rows are no multiples of 16 bytes long, and those of 8 or 32 bits whose reduction is not last, come through registers
(without `pack`); that takes clusters of 1.

Returns a specialised function of TIRx, not a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.epilogue import results_of
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.kernel_config import Kernel
from kerneldecl.templates.hopper.operands import ROW_BYTES, operand_of
from kerneldecl.templates.hopper.pack import packing_of
from kerneldecl.templates.hopper.params import Tiles
from kerneldecl.templates.hopper.read_gemm import Product, read_product
from kerneldecl.templates.shared.fast_parse import parsed_quickly

FIRST_CAPABILITY = (9, 0)
SUMS = {
    "float16": ("float32", "float16"),
    "bfloat16": ("float32",),
    "float8_e4m3fn": ("float32",),
    "float8_e5m2": ("float32",),
    "int8": ("int32",),
    "tfloat32": ("float32",),
}
"""By dtype of the factors: those of the sums."""


@parsed_quickly()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the product with its epilogue as one specialised kernel, or None where wgmma or these sizes do not take it."""
    tiles = Tiles.of(params)
    gemm = read_product(mod) if arch.the_gpu.compute_capability[0] == FIRST_CAPABILITY[0] else None
    if gemm is None or not takes(gemm):
        return None
    kernel = kernel_of(gemm, tiles, bool(params["pack"]), arch)
    return None if kernel is None else build(kernel)


def takes(gemm: Product) -> bool:
    """Say whether wgmma multiplies the product's dtypes."""
    a, b = gemm.a.dtype, gemm.b.dtype
    return a == b and gemm.contraction.accum_dtype in SUMS.get(a, ())


def kernel_of(gemm: Product, tiles: Tiles, is_packed: bool, arch: Arch) -> Kernel | None:
    """Return the kernel of these sizes, None where the operands or the sizes do not allow it."""
    batch, m, n, k = gemm.extents
    packings = [packing_of(matrix) if is_packed else None for matrix in (gemm.a, gemm.b)]
    if is_packed and not any(packings):
        return None
    a, b = (packing.copy if packing else matrix for packing, matrix in zip(packings, (gemm.a, gemm.b), strict=True))
    if tiles.swap_ab:
        a, b = b, a
    row_count, column_count = (n, m) if tiles.swap_ab else (m, n)
    rows = operand_of(a, tiles.block_m, tiles.cluster_n)
    columns = operand_of(b, tiles.block_n, tiles.cluster_m)
    steps = -(-k * a.item_bytes // ROW_BYTES)
    sums = gemm.contraction.accum_dtype
    if rows is None or columns is None or not tiles.fit(a.dtype, sums, steps, rows.stage_bytes + columns.stage_bytes):
        return None
    if tiles.cluster_m * tiles.cluster_n > 1 and (rows.gather or columns.gather):
        return None
    results = results_of(gemm, (tiles.block_m, tiles.block_n), is_swapped=bool(tiles.swap_ab))
    grid = batch, -(-row_count // tiles.block_m), -(-column_count // tiles.block_n)
    made = tuple(filter(None, packings))
    kernel = Kernel(gemm.params, a.dtype, sums, rows, columns, results, tiles, grid, steps, arch.the_gpu.sm_count, made)
    if tiles.stream_k > 0 and not kernel.is_dealt:
        return None
    return kernel if kernel.buffers or not results.is_staged or tiles.split_k > 1 else None
