"""Owns the kernel of matrix products on wgmma: TMA into a ring of tiles, warpgroups that multiply them, a fused epilogue.

Knows nothing of how its parameters are chosen, and recognises a product by its structure, never by its names.

wgmma multiplies rows by columns. Rows are those of the product and columns its columns, or the other way round with `swap`.

Parameters:
  block_m      rows of a tile: 64 or 128 for each consumer that works on it
  block_n      columns of a tile: a multiple of 8 up to 256; of 64 with cluster_m or cluster_n of 2 where the columns' operand has columns
               side by side in memory. A consumer's block_m * block_n / 128 sums of each thread are at most 128 (192 with one consumer)
  consumers    1 to 3 warpgroups of 128 threads that multiply; one more loads
  stages       2 to 12 tiles of both operands in shared memory at once; a tile has 128 bytes of the reduction
  cluster_m    1 or 2: neighbouring tiles along the rows whose blocks share the columns' operand by multicast
  cluster_n    1 or 2: along the columns, sharing the rows' operand
  raster       rows of tiles (of clusters of them) that are walked before the next column
  split        1, 2, 4 or 8 parts of the reduction, summed by the blocks of one cluster in each other's shared memory; then clusters are 1
               and there is one tile for each cluster
  schedule     "cooperative": all consumers share a tile; "pingpong": two consumers with tiles of their own, where one's results leave while
               the other multiplies (block_m is then one consumer's)
  swap         1 exchanges the operands: the product's n become rows of tiles (block_m, cluster_m, raster), its m columns (block_n)
  dependent    1 starts before the previous kernel has ended and waits for it before the first load

Shared memory: stages * (block_m + block_n) * 128 bytes (columns side by side in memory: block_n rounded up to 64), 8192 bytes for each
consumer's buffer of 16-bit results of 64 x 64 (as many of 1, 2, 4 as fit and divide the tile), block_m * block_n * 4 bytes where the
reduction is split, 1 KiB of barriers and alignment. Operands whose rows are no multiples of 16 bytes long, and 8-bit ones whose
reduction is not last, come through registers; that takes clusters of 1.

Returns a specialised function of TIRx, not a schedule.
"""
