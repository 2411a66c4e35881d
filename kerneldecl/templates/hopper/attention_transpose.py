"""Owns the kernel before attention in float8 that transposes values: wgmma takes 8-bit operands with their reduction contiguous only.

Knows nothing of what reads them but the order in which it has keys.

Of four threads that share a row, the one at place q has scores 2 q and 2 q + 1 of each eight keys. As operand A of 8 bits it holds
elements 4 q to 4 q + 3 of each 16. So of each 16 keys, 2 q, 2 q + 1, 8 + 2 q and 9 + 2 q are put at 4 q to 4 q + 3, in this order:
powers need not move between threads.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.templates.hopper.attention_config import AttentionKernel

KEYS, COLUMNS = 32, 4
"""Keys and columns of a thread: it writes 32 bytes of each column, what DRAM and L2 write at once."""
WARPS = 4
SOURCE = """
__device__ __forceinline__ void tvm_attention_transpose(const void* from, long long stride, void* to, long long to_stride, int keys) {
  unsigned words[32];
#pragma unroll
  for (int key = 0; key < 32; key++)
    words[key] = key < keys ? *(const unsigned*)((const char*)from + key * stride) : 0u;
  unsigned columns[4][8];
#pragma unroll
  for (int at = 0; at < 8; at++) {
    const unsigned* first = words + at / 4 * 16 + at % 4 * 2;
    unsigned lower = __byte_perm(first[0], first[1], 0x5140), upper = __byte_perm(first[0], first[1], 0x7362);
    unsigned lower_8 = __byte_perm(first[8], first[9], 0x5140), upper_8 = __byte_perm(first[8], first[9], 0x7362);
    columns[0][at] = __byte_perm(lower, lower_8, 0x5410);
    columns[1][at] = __byte_perm(lower, lower_8, 0x7632);
    columns[2][at] = __byte_perm(upper, upper_8, 0x5410);
    columns[3][at] = __byte_perm(upper, upper_8, 0x7632);
  }
#pragma unroll
  for (int column = 0; column < 4; column++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned* w = columns[column] + half * 4;
      ((uint4*)((char*)to + column * to_stride))[half] = make_uint4(w[0], w[1], w[2], w[3]);
    }
}
"""
"""Four words of four columns become four of four keys by two rounds of byte permutes. Keys from `keys` on are zeros."""


def transposed_of(kernel: AttentionKernel) -> Any:
    """Return the buffer of values transposed, [batch, head, column, key], keys up to a multiple of 32."""
    spec = kernel.spec
    return tirx.decl_buffer((spec.batch, spec.kv_heads, spec.value_dim, -(-spec.keys // KEYS) * KEYS), "uint8", "transposed_values")


def transposing(kernel: AttentionKernel, transposed: Any) -> Any:
    """Return the body of the kernel."""
    spec = kernel.spec
    is_packed = spec.layout == "packed"
    values = kernel.argument("QKV" if is_packed else "V")
    heads, first_head = (spec.heads + 2 * spec.kv_heads, spec.heads + spec.kv_heads) if is_packed else (spec.kv_heads, 0)
    stride = spec.value_dim if spec.layout == "bhsd" else heads * spec.value_dim
    columns, keys = spec.value_dim // COLUMNS, int(transposed.shape[3])
    units = spec.batch * spec.kv_heads * (keys // KEYS) * columns

    @T.prim_func(check_well_formed=False)
    def before():
        T.device_entry()
        if kernel.params.pdl == 1:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([-(-units // (WARPS * WARP_LANES))])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([WARP_LANES])
        if kernel.params.pdl == 1:
            T.ptx.griddepcontrol.launch_dependents()
            T.ptx.griddepcontrol.wait()
        unit: T.let = (block * WARPS + warp) * WARP_LANES + lane
        if unit < units:
            column: T.let = unit % columns * COLUMNS
            key: T.let = unit // columns % (keys // KEYS) * KEYS
            head: T.let = unit // (columns * (keys // KEYS)) % spec.kv_heads
            batch: T.let = unit // (columns * (keys // KEYS) * spec.kv_heads)
            T.cuda.func_call(
                "tvm_attention_transpose",
                T.address_of(values[tuple(spec.index(batch, head + first_head, key, column))]),
                T.int64(stride),
                T.address_of(transposed[batch, head, column, key]),
                T.int64(keys),
                spec.keys - key,
                source_code=SOURCE,
            )

    return before.body
