"""Owns the CUDA that multiplies a step of packed 4-bit weights in shared memory by activations in registers.

Knows nothing of how either comes there or of how parameters are chosen.

Sums of a group are scaled in float32.
"""

from __future__ import annotations

from kerneldecl.analysis.matmul_packed import PackedSizes
from kerneldecl.compiler.intrinsics import float4_fragments, int4_fragments
from kerneldecl.templates.gpu.packed_gemm_steps import ONES, QUADS_SCALES, WIDEN


def step_source(sizes: PackedSizes, dtype: str) -> tuple[str, str]:
    """Return the CUDA of `load_slice`, `add_slice`, `multiply_step` and the factors of a lane's results, and what they call."""
    parts, helper = _float4_parts(sizes, dtype) if sizes.is_float4 else int4_parts(sizes, dtype)
    return _STEP.format(ones=ONES[dtype], **parts), helper


def _float4_parts(sizes: PackedSizes, dtype: str) -> tuple[dict[str, str], str]:
    """Return what is particular to 4-bit floats."""
    name, helper, factor = float4_fragments.values_source(dtype)
    widen, wide_scale = float4_fragments.wide_scale_source(sizes.scale_dtype)
    first, second = (f"__shfl_sync(~0u, own[tile][run / 4][{row}], run % 4, 4)" for row in (0, 1))
    parts = {
        "name": name,
        "factors": f"constexpr float FACTOR = {factor}f, SECOND_FACTOR = FACTOR;",
        "scales": QUADS_SCALES.format(widen=widen),
        "scale": f"      float scale[2] = {{{first}, {second}}}, bias[2] = {{}};",
    }
    return parts, helper + wide_scale


def int4_parts(sizes: PackedSizes, dtype: str) -> tuple[dict[str, str], str]:
    """Return what is particular to int4: codes are multiplied, and zero points come off sums, as what operand A has besides codes.

    `name` gives fragments of codes, `factors` are those of results, `scales` finds those of a stage, and `scale` reads those of a
    lane's two rows in `tile` and `run`, and what comes off their sums.
    """
    ctype, widen = WIDEN[dtype]
    codes = int4_fragments.codes_source(dtype)
    zero = "static_cast<float>(zeros[place + {row}])" if sizes.has_zeros else "8.0f"
    first, second = (f"-{unit}f * ({codes.base}f + {zero.format(row=row)})" for unit, row in zip(codes.units, (0, 8), strict=True))
    parts = {
        "name": codes.name,
        "factors": f"constexpr float FACTOR = {1 / codes.units[0]}f, SECOND_FACTOR = {1 / codes.units[1]}f;",
        "scales": f"""  const unsigned char* zeros = stage + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES;
  const {ctype}* scales = reinterpret_cast<const {ctype}*>(stage + WEIGHT_BYTES);""",
        "scale": f"""      int place = run * ROWS + tile * 16 + lane / 4;
      float scale[2] = {{{widen}(scales[place]), {widen}(scales[place + 8])}}, bias[2] = {{{first}, {second}}};""",
    }
    return parts, codes.source


_STEP = """
{factors}
// A thread's fragments of a slice of activations, and their sums: those of as many elements along k as share a scale in a step.
struct Slice {{
  unsigned parts[FRAGMENTS][SLICE_STEPS * STEP / 8];
  float totals[FRAGMENTS][SLICE_STEPS * STEP_SCALES][2];
}};
__device__ __forceinline__ void load_slice(Slice& slice, const Warp& warp, const unsigned char* activations) {{
#pragma unroll
  for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {{
#pragma unroll
    for (int part = 0; part < SLICE_STEPS * STEP / 16; part += 2) {{
      bool is_own = has_step(warp, part / (STEP / 16));
      if (is_own) load_activations(slice.parts[fragment] + part * 2, activations, fragment * 8, part * 16, warp.lane);
    }}
  }}
}}
__device__ __forceinline__ void add_slice(Slice& slice, const Warp& warp) {{
  const unsigned ones[4] = {{{ones}, {ones}, {ones}, {ones}}};
#pragma unroll
  for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {{
#pragma unroll
    for (int run = 0; run < SLICE_STEPS * STEP_SCALES; ++run) {{
      float sums[4] = {{}};
      if (has_step(warp, run / STEP_SCALES)) {{
#pragma unroll
        for (int part = run * RUN_PARTS; part < (run + 1) * RUN_PARTS; ++part) mma(sums, ones, slice.parts[fragment] + part * 2);
      }}
      slice.totals[fragment][run][0] = sums[0];
      slice.totals[fragment][run][1] = sums[1];
    }}
  }}
}}
__device__ __forceinline__ void multiply_step(float (&acc)[TILES][FRAGMENTS][4], const Slice& slice, int step, const unsigned char* stage,
                                              int lane) {{
{scales}
  uint4 words[TILES];
#pragma unroll
  for (int run = 0; run < STEP_SCALES; ++run) {{
    // Chains of MMAs, none of which waits for another one.
    float sums[TILES][FRAGMENTS][CHAINS][4] = {{}};
#pragma unroll
    for (int part = run * RUN_PARTS; part < (run + 1) * RUN_PARTS; ++part) {{
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {{
        if (part % 4 == 0) words[tile] = *reinterpret_cast<const uint4*>(stage + (part / 4 * TILES + tile) * 512 + lane * 16);
        const uint4 four = words[tile];
        unsigned a[4], word = part % 4 == 0 ? four.x : part % 4 == 1 ? four.y : part % 4 == 2 ? four.z : four.w;
        {name}(a, word);
#pragma unroll
        for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {{
          mma(sums[tile][fragment][part % CHAINS], a, slice.parts[fragment] + (step * (STEP / 16) + part) * 2);
        }}
      }}
    }}
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {{
{scale}
#pragma unroll
      for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {{
#pragma unroll
        for (int i = 0; i < 4; ++i) {{
          float sum = sums[tile][fragment][0][i];
          if (CHAINS == 2) sum += sums[tile][fragment][CHAINS - 1][i];
          if (ADDS_ACTIVATIONS) sum += bias[i / 2] * slice.totals[fragment][step * STEP_SCALES + run][i % 2];
          acc[tile][fragment][i] += sum * scale[i / 2];
        }}
      }}
    }}
  }}
}}
"""
