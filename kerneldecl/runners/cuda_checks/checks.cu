// Owns the checks that run on a GPU: the error of outputs against their reference, checksums of memory, and the copy with
// which bandwidth is measured.
// Knows nothing of kernels under test.
//
// checks.ptx is nvcc's output for this file (tests/null/test_checks.py has the command). The driver compiles it for the
// current GPU, so that measuring needs no compiler. Compiled as C++, the same arithmetic runs on a CPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#else
#include <cmath>
#define DEVICE static inline
#endif

// In the order of DTYPES in checks.py.
enum Dtype { BOOL, UINT8, INT8, UINT16, INT16, UINT32, INT32, UINT64, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64, FLOAT8_E4M3FN, FLOAT8_E5M2 };

DEVICE double from_bits(u64 bits) {
  union { u64 bits; double value; } both;
  both.bits = bits;
  return both.value;
}

DEVICE double power_of_two(int exponent) { return from_bits((u64)(exponent + 1023) << 52); }

// The value of a float narrower than float32. A format without infinity has one NaN: all bits of exponent and mantissa set.
DEVICE double narrow(u32 bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const u32 mantissas = (1u << mantissa_bits) - 1, exponents = (1u << exponent_bits) - 1;
  const u32 mantissa = bits & mantissas, exponent = (bits >> mantissa_bits) & exponents;
  const int scale = 1 - (1 << (exponent_bits - 1)) + 1 - mantissa_bits;
  const bool negative = (bits >> (exponent_bits + mantissa_bits)) & 1;
  double size;
  if (exponent == exponents && (has_infinity || mantissa == mantissas))
    size = from_bits(has_infinity && mantissa == 0 ? 0x7ff0000000000000ull : 0x7ff8000000000000ull);
  else if (exponent == 0)
    size = mantissa * power_of_two(scale);
  else
    size = (mantissa + mantissas + 1) * power_of_two(scale + (int)exponent - 1);
  return negative ? -size : size;
}

DEVICE double element(const void* array, int dtype, u64 at) {
  switch (dtype) {
    case BOOL:  // the byte itself: one that is neither 0 nor 1 equals neither
    case UINT8: return ((const u8*)array)[at];
    case INT8: return ((const signed char*)array)[at];
    case UINT16: return ((const u16*)array)[at];
    case INT16: return ((const short*)array)[at];
    case UINT32: return ((const u32*)array)[at];
    case INT32: return ((const int*)array)[at];
    case UINT64: return (double)((const u64*)array)[at];
    case INT64: return (double)((const long long*)array)[at];
    case FLOAT16: return narrow(((const u16*)array)[at], 5, 10, true);
    case BFLOAT16: return narrow(((const u16*)array)[at], 8, 7, true);
    case FLOAT32: return ((const float*)array)[at];
    case FLOAT64: return ((const double*)array)[at];
    case FLOAT8_E4M3FN: return narrow(((const u8*)array)[at], 4, 3, false);
    default: return narrow(((const u8*)array)[at], 5, 2, true);
  }
}

DEVICE bool is_finite(double value) { return value - value == 0; }

// The error of one element, as in arrays.relative_error.
DEVICE double error_of(double got, double want, double scale, bool any_for_nan) {
  if (got == want || (got != got && want != want)) return 0;
  if (any_for_nan && (want != want || (got != got && !is_finite(want)))) return 0;
  const double error = fabs(got - want) / (fabs(want) + scale);
  return error == error ? error : from_bits(0x7ff0000000000000ull);
}

DEVICE double larger(double a, double b) { return a < b ? b : a; }

// A hash of a word and its index.
DEVICE u64 mixed(u64 word, u64 at) {
  u64 mix = (word ^ (at * 0x9e3779b97f4a7c15ull)) * 0xbf58476d1ce4e5b9ull;
  mix ^= mix >> 31;
  return mix * 0x94d049bb133111ebull;
}

#ifdef __CUDACC__

// Each block of 256 threads leaves one partial result; the host combines them.
template <typename T, typename Join>
DEVICE void leave(T value, T* partial, Join join) {
  __shared__ T values[256];
  values[threadIdx.x] = value;
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (threadIdx.x < half) values[threadIdx.x] = join(values[threadIdx.x], values[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) partial[blockIdx.x] = values[0];
}

#define EACH(at, count) (u64 at = (u64)blockIdx.x * 256 + threadIdx.x; at < count; at += (u64)gridDim.x * 256)

extern "C" __global__ __launch_bounds__(256) void square_sums(const void* want, int dtype, u64 count, double* partial) {
  double sum = 0;
  for EACH(at, count) {
    const double value = element(want, dtype, at);
    if (is_finite(value)) sum += value * value;
  }
  leave(sum, partial, [](double a, double b) { return a + b; });
}

extern "C" __global__ __launch_bounds__(256) void finite_counts(const void* want, int dtype, u64 count, u64* partial) {
  u64 found = 0;
  for EACH(at, count) found += is_finite(element(want, dtype, at));
  leave(found, partial, [](u64 a, u64 b) { return a + b; });
}

extern "C" __global__ __launch_bounds__(256) void largest_errors(
    const void* got, int got_dtype, const void* want, int want_dtype, u64 count, const double* scales, u64 columns, int any_for_nan, double* partial) {
  double largest = 0;
  for EACH(at, count)
    largest = larger(largest, error_of(element(got, got_dtype, at), element(want, want_dtype, at), scales[at / columns], any_for_nan));
  leave(largest, partial, [](double a, double b) { return larger(a, b); });
}

extern "C" __global__ __launch_bounds__(256) void checksums(const u64* words, u64 count, u64* partial) {
  u64 sum = 0;
  for EACH(at, count) sum += mixed(words[at], at);
  leave(sum, partial, [](u64 a, u64 b) { return a + b; });
}

// One thread copies 16 bytes, as in the fastest copy kernels.
extern "C" __global__ __launch_bounds__(256) void copy(const uint4* source, uint4* target) {
  const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
  target[at] = source[at];
}

extern "C" __global__ __launch_bounds__(256) void other_bytes(const u8* bytes, u64 count, int expected, u64* partial) {
  u64 found = 0;
  for EACH(at, count) found += bytes[at] != expected;
  leave(found, partial, [](u64 a, u64 b) { return a + b; });
}

#else

extern "C" void square_sums(const void* want, int dtype, u64 count, double* sum) {
  for (u64 at = 0; at < count; ++at) {
    const double value = element(want, dtype, at);
    if (is_finite(value)) *sum += value * value;
  }
}

extern "C" void finite_counts(const void* want, int dtype, u64 count, u64* found) {
  for (u64 at = 0; at < count; ++at) *found += is_finite(element(want, dtype, at));
}

extern "C" void largest_errors(
    const void* got, int got_dtype, const void* want, int want_dtype, u64 count, const double* scales, u64 columns, int any_for_nan, double* largest) {
  for (u64 at = 0; at < count; ++at)
    *largest = larger(*largest, error_of(element(got, got_dtype, at), element(want, want_dtype, at), scales[at / columns], any_for_nan));
}

extern "C" void checksums(const u64* words, u64 count, u64* sum) {
  for (u64 at = 0; at < count; ++at) *sum += mixed(words[at], at);
}

extern "C" void other_bytes(const u8* bytes, u64 count, int expected, u64* found) {
  for (u64 at = 0; at < count; ++at) *found += bytes[at] != expected;
}

#endif
