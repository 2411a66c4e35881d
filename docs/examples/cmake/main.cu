// Calls, checks and times an exported GEMM, C = A B^T in float16, as a program would: with CUDA alone.
// The record's time is that of a GPU that has rested; here it works without a pause, and may lower its clock.
#include "projection.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kM = 8192, kN = 8192, kK = 8192;
constexpr int kSets = 3;       // argument sets that launches rotate over: more than twice the L2, so that inputs come from DRAM
constexpr int kLaunches = 12;  // launches of a graph
constexpr int kRounds = 15;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Values in [-1, 1) that depend on their place and the seed alone.
__global__ void fill(__half* values, std::size_t count, unsigned seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += std::size_t{gridDim.x} * blockDim.x) {
    unsigned bits = (static_cast<unsigned>(i) * 2654435761u) ^ (seed * 2246822519u);
    bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;  // MurmurHash3's finalizer
    bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
    bits ^= bits >> 16;
    values[i] = __float2half(static_cast<float>(bits >> 8) * (2.0f / 16777216.0f) - 1.0f);
  }
}

// The largest error of C against sums in float64, relative to the sum or to sqrt(k), for elements that are `step` apart.
__global__ void compare(const __half* a, const __half* b, const __half* c, std::size_t step, float* worst) {
  const std::size_t at = (blockIdx.x * std::size_t{blockDim.x} + threadIdx.x) * step;
  if (at >= std::size_t{kM} * kN) return;
  const std::size_t row = at / kN, column = at % kN;
  double sum = 0;
  for (int k = 0; k < kK; ++k) sum += double{__half2float(a[row * kK + k])} * double{__half2float(b[column * kK + k])};
  const float error = fabsf(__half2float(c[at]) - static_cast<float>(sum)) / fmaxf(fabsf(static_cast<float>(sum)), sqrtf(kK));
  atomicMax(reinterpret_cast<int*>(worst), __float_as_int(error));  // floats that are not negative are ordered as their bits
}

struct Arguments {
  __half *a, *b, *c;
};

Arguments made(unsigned seed, cudaStream_t stream) {
  Arguments made{};
  check(cudaMalloc(&made.a, sizeof(__half) * kM * kK), "cudaMalloc");
  check(cudaMalloc(&made.b, sizeof(__half) * kN * kK), "cudaMalloc");
  check(cudaMalloc(&made.c, sizeof(__half) * kM * kN), "cudaMalloc");
  fill<<<1024, 256, 0, stream>>>(made.a, std::size_t{kM} * kK, seed);
  fill<<<1024, 256, 0, stream>>>(made.b, std::size_t{kN} * kK, seed + 1);
  return made;
}

float median_secs(const std::vector<Arguments>& sets, void* workspace, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t launches;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kLaunches; ++i) {
    const Arguments& set = sets[i % sets.size()];
    check(projection(stream, set.a, set.b, set.c, workspace), "projection");
  }
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&launches, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> found;
  for (int round = -3; round < kRounds; ++round) {  // the first ones warm up
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    check(cudaGraphLaunch(launches, stream), "cudaGraphLaunch");
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    if (round >= 0) found.push_back(milliseconds * 1e-3f / kLaunches);
  }
  std::sort(found.begin(), found.end());
  return found[found.size() / 2];
}

}  // namespace

int main() {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  std::vector<Arguments> sets;
  for (int i = 0; i < kSets; ++i) sets.push_back(made(1 + 2 * i, stream));
  void* workspace = nullptr;
  if (projection_workspace_bytes > 0) check(cudaMalloc(&workspace, projection_workspace_bytes), "cudaMalloc");
  check(projection(stream, sets[0].a, sets[0].b, sets[0].c, workspace), "projection");

  float *worst, error = 0;
  check(cudaMalloc(&worst, sizeof(float)), "cudaMalloc");
  check(cudaMemsetAsync(worst, 0, sizeof(float), stream), "cudaMemsetAsync");
  compare<<<64, 256, 0, stream>>>(sets[0].a, sets[0].b, sets[0].c, std::size_t{kM} * kN / (64 * 256) - 1, worst);
  check(cudaMemcpyAsync(&error, worst, sizeof(float), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "projection");

  namespace known = kerneldecl_projection;
  const float secs = median_secs(sets, workspace, stream);
  std::printf("relative error %.2g; %.1f us, %.0f GFLOP/s, %.1f %% of the GPU's peak; the record has %.1f us\n", error, secs * 1e6,
              known::flops / secs * 1e-9, known::least_secs / secs * 100, known::recorded_secs * 1e6);
  return error < 1e-3f ? 0 : 1;  // half an ulp of float16 is 4.9e-4
}
