"""Owns the CUDA that multiplies a step of packed 4-bit weights in shared memory by activations.

Knows nothing of how either comes to shared memory or of how parameters are chosen.

Where a thread has few accumulators, sums of a group are scaled in float32; else weights are scaled and rounded before.
"""

from __future__ import annotations

from kerneldecl.analysis.matmul_packed import PackedParams, PackedSizes
from kerneldecl.analysis.packed_weights import TILE_K
from kerneldecl.compiler.intrinsics import float4_fragments, int4_fragments

WIDEN = {"float16": ("half", "__half2float"), "bfloat16": ("__nv_bfloat16", "__bfloat162float")}
"""CUDA's names of a dtype and of the function that makes float32 of it."""
ONES = {"float16": "0x3c003c00u", "bfloat16": "0x3f803f80u"}
"""A register of operand A that is 1 and 1."""


def step_source(sizes: PackedSizes, params: PackedParams, dtype: str) -> tuple[str, str]:
    """Return the CUDA of `multiply_step`, with the constants by which a lane multiplies its results, and of the functions that it calls."""
    if not params.scales_sums(sizes):
        return _scaled_weights(sizes, params, dtype)
    return _float4_sums(sizes, dtype) if sizes.is_float4 else _int4_sums(sizes, dtype)


def _float4_sums(sizes: PackedSizes, dtype: str) -> tuple[str, str]:
    """Return the multiplication of a step of 4-bit floats in which sums of a group are scaled, and the functions that it calls."""
    values, helper, factor = float4_fragments.values_source(dtype)
    widen, wide_scale = float4_fragments.wide_scale_source(sizes.scale_dtype)
    scale = "__shfl_sync(~0u, own[tile][group / 4][{row}], group % 4, 4)"
    text = f"""
constexpr float FACTOR = {factor}f, SECOND_FACTOR = FACTOR;
__device__ __forceinline__ void multiply_step(float (&acc)[TILES][FRAGMENTS][4], const unsigned char* stage,
                                              const unsigned char* activations, int lane) {{
  constexpr int GROUP_PARTS = STEP / 16 / STEP_SCALES;
{QUADS_SCALES.format(widen=widen)}
  float sums[TILES][FRAGMENTS][4];
  unsigned b[FRAGMENTS][4];
  uint4 words[TILES];
#pragma unroll
  for (int part = 0; part < STEP / 16; ++part) {{
    int group = part / GROUP_PARTS;
    if (part % 2 == 0) {{
#pragma unroll
      for (int fragment = 0; fragment < FRAGMENTS; ++fragment) load_activations(b[fragment], activations, fragment * 8, part * 16, lane);
    }}
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {{
      const unsigned char* from = stage + (part / 4 * TILES + tile) * 512 + lane * 16;
      if (part % 4 == 0) words[tile] = *reinterpret_cast<const uint4*>(from);
      if (part % GROUP_PARTS == 0) {{
#pragma unroll
        for (int i = 0; i < FRAGMENTS * 4; ++i) sums[tile][i / 4][i % 4] = 0.0f;
      }}
      const uint4 four = words[tile];
      unsigned a[4], word = part % 4 == 0 ? four.x : part % 4 == 1 ? four.y : part % 4 == 2 ? four.z : four.w;
      {values}(a, word);
#pragma unroll
      for (int fragment = 0; fragment < FRAGMENTS; ++fragment) mma(sums[tile][fragment], a, b[fragment] + part % 2 * 2);
      if ((part + 1) % GROUP_PARTS == 0) {{
        float first = {scale.format(row=0)}, second = {scale.format(row=1)};
#pragma unroll
        for (int i = 0; i < FRAGMENTS * 4; ++i) acc[tile][i / 4][i % 4] += sums[tile][i / 4][i % 4] * (i % 4 < 2 ? first : second);
      }}
    }}
  }}
}}
"""
    return text, helper + wide_scale


def _int4_sums(sizes: PackedSizes, dtype: str) -> tuple[str, str]:
    """Return the multiplication of a step in which codes of int4 are multiplied, and the functions that it calls.

    Zero points, and what operand A has besides codes, come off the sums of a group: tensor cores add up its activations too, once for
    all rows of weights.
    """
    ctype, widen = WIDEN[dtype]
    codes = int4_fragments.codes_source(dtype)
    zero = "static_cast<float>(zeros[place + {row}])" if sizes.has_zeros else "8.0f"
    first, second = (f"-{unit}f * ({codes.base}f + {zero.format(row=row)})" for unit, row in zip(codes.units, (0, 8), strict=True))
    values = {
        "ctype": ctype,
        "widen": widen,
        "ones": ONES[dtype],
        "name": codes.name,
        "first_factor": 1 / codes.units[0],
        "second_factor": 1 / codes.units[1],
        "first_bias": first,
        "second_bias": second,
    }
    return _INT4_SUMS.format(**values), codes.source


_INT4_SUMS = """
constexpr float FACTOR = {first_factor}f, SECOND_FACTOR = {second_factor}f;
__device__ __forceinline__ void multiply_step(float (&acc)[TILES][FRAGMENTS][4], const unsigned char* stage,
                                              const unsigned char* activations, int lane) {{
  constexpr int GROUP_PARTS = STEP / 16 / STEP_SCALES;
  const unsigned char* zeros = stage + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES;
  const {ctype}* scales = reinterpret_cast<const {ctype}*>(stage + WEIGHT_BYTES);
  const unsigned ones[4] = {{{ones}, {ones}, {ones}, {ones}}};
  float sums[TILES][FRAGMENTS][4], totals[FRAGMENTS][4];
  unsigned b[FRAGMENTS][4];
  uint4 words[TILES];
#pragma unroll
  for (int part = 0; part < STEP / 16; ++part) {{
    int group = part / GROUP_PARTS;
    bool is_first = part % GROUP_PARTS == 0;
#pragma unroll
    for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {{
      if (part % 2 == 0) load_activations(b[fragment], activations, fragment * 8, part * 16, lane);
      if (is_first) {{
#pragma unroll
        for (int i = 0; i < 4; ++i) totals[fragment][i] = 0.0f;
      }}
      mma(totals[fragment], ones, b[fragment] + part % 2 * 2);
    }}
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {{
      const unsigned char* from = stage + (part / 4 * TILES + tile) * 512 + lane * 16;
      if (part % 4 == 0) words[tile] = *reinterpret_cast<const uint4*>(from);
      if (is_first) {{
#pragma unroll
        for (int i = 0; i < FRAGMENTS * 4; ++i) sums[tile][i / 4][i % 4] = 0.0f;
      }}
      const uint4 four = words[tile];
      unsigned a[4], word = part % 4 == 0 ? four.x : part % 4 == 1 ? four.y : part % 4 == 2 ? four.z : four.w;
      {name}(a, word);
#pragma unroll
      for (int fragment = 0; fragment < FRAGMENTS; ++fragment) mma(sums[tile][fragment], a, b[fragment] + part % 2 * 2);
      if ((part + 1) % GROUP_PARTS == 0) {{
        int place = group * ROWS + tile * 16 + lane / 4;
        float scale[2] = {{{widen}(scales[place]), {widen}(scales[place + 8])}}, bias[2] = {{{first_bias}, {second_bias}}};
#pragma unroll
        for (int i = 0; i < FRAGMENTS * 4; ++i) {{
          float sum = sums[tile][i / 4][i % 4] + bias[i % 4 / 2] * totals[i / 4][i % 4];
          acc[tile][i / 4][i % 4] += sum * scale[i % 4 / 2];
        }}
      }}
    }}
  }}
}}
"""


QUADS_SCALES = """  // Each of four lanes with the same rows widens the scales of every fourth group, and gives them to the others.
  float own[TILES][(STEP_SCALES + 3) / 4][2];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {{
#pragma unroll
    for (int i = 0; i < (STEP_SCALES + 3) / 4; ++i) {{
      const unsigned char* bytes = stage + WEIGHT_BYTES + min(i * 4 + lane % 4, STEP_SCALES - 1) * ROWS + tile * 16 + lane / 4;
      own[tile][i][0] = {widen}(bytes[0]);
      own[tile][i][1] = {widen}(bytes[8]);
    }}
  }}"""


def _scaled_weights(sizes: PackedSizes, params: PackedParams, dtype: str) -> tuple[str, str]:
    """Return the multiplication of a step in which weights are scaled, and the function that it calls."""
    scales = max(1, TILE_K // sizes.group)
    if sizes.is_float4:
        name, helper = float4_fragments.dequantise_source(dtype, sizes.scale_dtype, scales, params.rows)
        arguments = "scales"
    else:
        name, helper = int4_fragments.dequantise_source(dtype, scales, params.rows, has_zeros=sizes.has_zeros)
        arguments = f"reinterpret_cast<const {WIDEN[dtype][0]}*>(scales)" + ", zeros" * sizes.has_zeros
    text = f"""
constexpr float FACTOR = 1.0f, SECOND_FACTOR = 1.0f;
__device__ __forceinline__ void multiply_step(float (&acc)[TILES][FRAGMENTS][4], const unsigned char* stage,
                                              const unsigned char* activations, int lane) {{
#pragma unroll
  for (int k_tile = 0; k_tile < TILES_K; ++k_tile) {{
    unsigned a[TILES][16];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {{
      int at = k_tile * STEP_SCALES / TILES_K * ROWS + tile * 16 + lane / 4;
      const unsigned char* scales = stage + WEIGHT_BYTES + at * SCALE_BYTES;
      const unsigned char* zeros = stage + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES + at;
      {name}(a[tile], reinterpret_cast<const unsigned*>(stage + (k_tile * TILES + tile) * 512 + lane * 16), {arguments});
    }}
#pragma unroll
    for (int half = 0; half < 2; ++half) {{
#pragma unroll
      for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {{
        unsigned b[4];
        load_activations(b, activations, fragment * 8, k_tile * 64 + half * 32, lane);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {{
          mma(acc[tile][fragment], a[tile] + half * 8, b);
          mma(acc[tile][fragment], a[tile] + half * 8 + 4, b + 2);
        }}
      }}
    }}
  }}
}}
"""
    return text, helper
