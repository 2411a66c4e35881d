"""Owns the CUDA by which thread blocks of a cluster that share k give each other partial results of a GEMM with packed 4-bit weights.

Knows nothing of how they came about, or of what becomes of sums.

Each thread block adds up a share of the results. The others write to its shared memory without waiting, and its barrier counts the bytes:
thread blocks meet only for having begun, and none has its writes seen by the whole GPU first.
"""

from __future__ import annotations


def cluster_source(*, is_cluster: bool) -> str:
    """Return CUDA by which a thread block joins its cluster and by which all exchange results; else that of functions without effect."""
    return _CLUSTER if is_cluster else _ALONE


_ALONE = """
__device__ __forceinline__ void join_cluster(unsigned char*, int, int) {}
__device__ __forceinline__ void exchange(unsigned char*, const float*, int, int) {}
"""

_CLUSTER = """
__device__ __forceinline__ void join_cluster(unsigned char* shared, int rank, int thread) {
  unsigned barrier = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + RECEIVED_BARRIER;
  if (thread == 0) {
    int own = max(0, min(RESULTS - rank * SHARE, SHARE));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(own * SPLIT_K * 4) : "memory");
  }
  asm volatile("barrier.cluster.arrive.relaxed;" : : : "memory");
}
__device__ __forceinline__ void exchange(unsigned char* shared, const float* partials, int rank, int thread) {
  unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared)), barrier = base + RECEIVED_BARRIER;
  // All have begun.
  asm volatile("barrier.cluster.wait.acquire;" : : : "memory");
  for (int at = thread * 4; at < RESULTS; at += THREADS * 4) {
    const float* from = partials + at / BLOCK_ROWS * PARTIAL_PITCH + at % BLOCK_ROWS;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < WARPS_K; ++warp) {
      float4 part = *reinterpret_cast<const float4*>(from + warp * (M * PARTIAL_PITCH));
      total.x += part.x;
      total.y += part.y;
      total.z += part.z;
      total.w += part.w;
    }
    unsigned to, signal, owner = at / SHARE;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(base + RECEIVED + (rank * SHARE + at % SHARE) * 4), "r"(owner));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(signal) : "r"(barrier), "r"(owner));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 : : "r"(to), "f"(total.x), "f"(total.y), "f"(total.z), "f"(total.w), "r"(signal) : "memory");
  }
  unsigned is_done = 0;
  while (!is_done) {
    asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0; selp.b32 %0, 1, 0, done; }"
                 : "=r"(is_done) : "r"(barrier) : "memory");
  }
}
"""
