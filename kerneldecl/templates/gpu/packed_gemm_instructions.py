"""Owns the CUDA of the instructions that kernels of GEMMs with packed 4-bit weights are made of: copies, their ends, ldmatrix, mma.sync.

Knows nothing of sizes, but by the names of constants that kernels define, or of what is copied.
"""

from __future__ import annotations

import hashlib


def in_namespace(prefix: str, helper: str, body: str) -> tuple[str, str]:
    """Return a namespace that is named after what is in it, and CUDA of it behind functions that other kernels may have, too."""
    space = f"{prefix}_{hashlib.sha256((helper + body).encode()).hexdigest()[:12]}"
    text = f"""#ifndef {space}_text
#define {space}_text
#include <cuda_fp16.h>
#include <cuda_bf16.h>
{helper}
namespace {space} {{{body}}}
#endif
"""
    return space, text


def mma_source(dtype: str) -> str:
    """Return CUDA of `load_activations`, which loads four registers of operand B, and of `mma` for a dtype."""
    mma = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    return f"""\
__device__ __forceinline__ void load_activations(unsigned* b, const unsigned char* activations, int column, int k, int lane) {{
  const unsigned char* from = activations + min(column + lane % 8, M - 1) * PITCH + (k + lane / 8 * 8) * 2;
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(from));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
}}
__device__ __forceinline__ void mma(float* c, const unsigned* a, const unsigned* b) {{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.{mma}.{mma}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
"""


COPY = """\
__device__ __forceinline__ void copy(const void* to, const void* from) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(at), "l"(from) : "memory");
}
"""
"""A copy of 16 bytes to shared memory."""

NO_BARRIERS = """\
__device__ __forceinline__ void start_copies(Warp&, unsigned char*, int) {}
__device__ __forceinline__ void wait_for_weights(const Warp&, int, unsigned) {}
"""
"""What a warp does before its first copy and before it reads a stage, where lanes copy what they read."""

BARRIERS = """\
__device__ __forceinline__ void start_copies(Warp& warp, unsigned char* shared, int number) {
  warp.barriers = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + BARRIERS + number * STAGES * 8;
  if (warp.lane == 0) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(warp.barriers + stage * 8) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  __syncwarp();
}
__device__ __forceinline__ void wait_for_weights(const Warp& warp, int stage, unsigned turn) {
  unsigned is_done = 0;
  while (!is_done) {
    asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.b32 %0, 1, 0, done; }"
                 : "=r"(is_done) : "r"(warp.barriers + stage * 8), "r"(turn) : "memory");
  }
}
__device__ __forceinline__ void copy_bulk(const void* to, const void* from, int bytes, unsigned barrier) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               : : "r"(at), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
"""
"""The same where copies are bulk, and such a copy."""

COMMITS = """\
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory"); }
"""
"""The ends of groups of copies by cp.async."""

PREFETCH_LINE = """\
__device__ __forceinline__ void prefetch_line(const unsigned char* from) { asm volatile("prefetch.global.L2 [%0];" : : "l"(from)); }
"""
"""A prefetch of a line to L2."""
