// Owns kernels for the tests of verification: a right one for each computation, and wrong ones, each wrong in its own way.
// Knows nothing of how they are run.
//
// Every kernel gets inputs X and Z, then output Y; a computation with one input gets X and Y. n is the number of elements of Y.

#include <tvm/ffi/c_api.h>

#include <atomic>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

struct Tensor {
  void* data;
  long size;
};

static Tensor tensor(const TVMFFIAny& any) {
  const DLTensor* t = any.type_index == kTVMFFIDLTensorPtr
      ? static_cast<const DLTensor*>(any.v_ptr)
      : reinterpret_cast<const DLTensor*>(reinterpret_cast<const char*>(any.v_obj) + sizeof(TVMFFIObject));
  long size = 1;
  for (int at = 0; at < t->ndim; ++at) size *= t->shape[at];
  return {static_cast<char*>(t->data) + t->byte_offset, size};
}

#define EXPORT(NAME)                                                                                     \
  extern "C" int __tvm_ffi_##NAME(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result)

// Of two inputs.
#define BINARY(NAME, BODY)                                                                               \
  EXPORT(NAME) {                                                                                         \
    float* X = (float*)tensor(args[0]).data; float* Z = (float*)tensor(args[1]).data;                    \
    float* Y = (float*)tensor(args[2]).data; const long n = tensor(args[2]).size;                        \
    (void)X; (void)Z; (void)Y; (void)n; BODY; return 0;                                                  \
  }
#define ADD for (long i = 0; i < n; ++i) Y[i] = X[i] + Z[i]
#define SUM(i) (X[i] + Z[i])

static volatile float sink;
static float touch(volatile float* at) { return sink = *at; }

BINARY(add, ADD)
BINARY(add_writes_behind_output, ADD; Y[n] = 1)
BINARY(add_writes_before_output, ADD; Y[-1] = 1)
BINARY(add_writes_far_behind_output, ADD; Y[n + 100000] = 1)
BINARY(add_reads_behind_output, ADD; touch(Y + n))
BINARY(add_reads_before_output, ADD; touch(Y - 1))
BINARY(add_reads_behind_first, ADD; touch(X + n))
BINARY(add_reads_before_first, ADD; touch(X - 1))
BINARY(add_reads_behind_second, ADD; touch(Z + n))
BINARY(add_reads_before_second, ADD; touch(Z - 1))
BINARY(add_writes_behind_first, ADD; X[n] = 1)
BINARY(add_writes_before_first, ADD; X[-1] = 1)
BINARY(add_writes_behind_second, ADD; Z[n] = 1)
BINARY(add_writes_before_second, ADD; Z[-1] = 1)
BINARY(add_changes_an_input, ADD; X[3] = 0)
BINARY(add_changes_an_input_and_restores_it, float x = X[5]; *(volatile float*)(X + 5) = 9; ADD; X[5] = x; Y[5] = x + Z[5])
BINARY(add_writes_behind_in_a_thread, ADD; std::thread other([=] { Y[n] = 1; }); other.join())
BINARY(add_writes_anywhere, ADD; *(volatile float*)4096 = 1)
BINARY(add_aborts, ADD; abort())
BINARY(add_hangs, while (true) sink = 1)
EXPORT(add_raises) { TVMFFIErrorSetRaisedFromCStr("ValueError", "not today"); return -1; }

BINARY(add_keeps_a_larger_output, for (long i = 0; i < n; ++i) Y[i] = Y[i] > SUM(i) ? Y[i] : SUM(i))
BINARY(add_keeps_a_smaller_output, for (long i = 0; i < n; ++i) Y[i] = Y[i] < SUM(i) ? Y[i] : SUM(i))
BINARY(add_accumulates_into_the_output, for (long i = 0; i < n; ++i) Y[i] = (Y[i] == Y[i] ? Y[i] : 0) + SUM(i))
BINARY(add_looks_at_the_output, bool large = Y[0] > 1e8f; ADD; if (large) Y[n / 2] += 5)
BINARY(add_leaves_the_last_element, for (long i = 0; i < n - 1; ++i) Y[i] = SUM(i))
BINARY(add_leaves_the_first_element, for (long i = 1; i < n; ++i) Y[i] = SUM(i))
BINARY(add_leaves_a_tail_of_a_vector, for (long i = 0; i < n / 16 * 16; ++i) Y[i] = SUM(i))
BINARY(add_writes_nothing, (void)n)
BINARY(add_is_wrong_in_the_last_element, ADD; Y[n - 1] = SUM(n - 2))

BINARY(add_repeats_its_first_results, static std::vector<float> kept; if (kept.empty()) { ADD; kept.assign(Y, Y + n); }
       else memcpy(Y, kept.data(), n * 4))
BINARY(add_is_wrong_from_the_second_call, static int calls = 0; ADD; if (++calls > 1) Y[7] += 1)
BINARY(add_is_wrong_after_many_calls, static int calls = 0; ADD; if (++calls > 20) Y[7] += 1)
BINARY(add_keeps_the_address_of_an_input, static float* kept = X; for (long i = 0; i < n; ++i) Y[i] = kept[i] + Z[i])
BINARY(add_keeps_the_address_of_the_output, static float* kept = Y; for (long i = 0; i < n; ++i) kept[i] = SUM(i))
BINARY(add_takes_aligned_arguments_for_granted, ADD; if ((uintptr_t)X % 64) Y[0] = 0)
BINARY(add_takes_unaligned_arguments_for_granted, ADD; if ((uintptr_t)X % 64 == 0) Y[0] = 0)
BINARY(add_takes_two_arguments_for_one, for (long i = 0; i < n; ++i) Y[i] = X[i] + X[i])

BINARY(add_makes_nan_zero, ADD; for (long i = 0; i < n; ++i) if (Y[i] != Y[i]) Y[i] = 0)
BINARY(add_leaves_out_nan_of_the_first, for (long i = 0; i < n; ++i) Y[i] = X[i] != X[i] ? Z[i] : SUM(i))
BINARY(add_leaves_out_nan_of_the_second, for (long i = 0; i < n; ++i) Y[i] = Z[i] != Z[i] ? X[i] : SUM(i))
BINARY(add_bounds_infinity, ADD; for (long i = 0; i < n; ++i) Y[i] = Y[i] > FLT_MAX ? FLT_MAX : Y[i])
BINARY(add_bounds_negative_infinity, ADD; for (long i = 0; i < n; ++i) Y[i] = Y[i] < -FLT_MAX ? -FLT_MAX : Y[i])
BINARY(add_bounds_huge_numbers, ADD; for (long i = 0; i < n; ++i) Y[i] = Y[i] > 1e6f && Y[i] <= FLT_MAX ? 1e6f : Y[i])
BINARY(add_is_wrong_for_zero, for (long i = 0; i < n; ++i) Y[i] = X[i] == 0 ? 1 : SUM(i))
BINARY(add_is_wrong_for_zero_in_the_second, for (long i = 0; i < n; ++i) Y[i] = Z[i] == 0 ? 1 : SUM(i))
BINARY(add_is_wrong_for_tiny_numbers, for (long i = 0; i < n; ++i) Y[i] = X[i] != 0 && fabsf(X[i]) < 1e-30f ? 1 : SUM(i))

BINARY(add_is_not_deterministic, ADD; for (long i = 0; i < n; ++i) Y[i] *= 1 + 1e-6f * (rand() % 7))
BINARY(add_depends_on_where_it_runs, ADD; static int calls = 0; ++calls; for (long i = 0; i < n; ++i) Y[i] *= 1 + 1e-6f * calls)

// Sums, and maxima, of 64 rows of 100.
#define ROWS(NAME, BODY)                                                                                 \
  EXPORT(NAME) {                                                                                         \
    float* X = (float*)tensor(args[0]).data; float* Y = (float*)tensor(args[1]).data;                    \
    const long n = tensor(args[1]).size, k = tensor(args[0]).size / n;                                   \
    BODY; return 0;                                                                                      \
  }
#define EACH_ROW for (long i = 0; i < n; ++i)
#define ROW(START, END) for (long j = START; j < END; ++j)

// Lets another thread run between its read and its write.
static void add_slowly(volatile float* total, float value) {
  const float before = *total;
  std::this_thread::yield();
  *total = before + value;
}

ROWS(sum, EACH_ROW { Y[i] = 0; ROW(0, k) Y[i] += X[i * k + j]; })
ROWS(sum_leaves_out_the_last_column, EACH_ROW { Y[i] = 0; ROW(0, k - 1) Y[i] += X[i * k + j]; })
ROWS(sum_leaves_out_the_first_column, EACH_ROW { Y[i] = 0; ROW(1, k) Y[i] += X[i * k + j]; })
ROWS(sum_takes_an_element_of_the_next_row, EACH_ROW { Y[i] = 0; ROW(1, k + 1) Y[i] += X[(i * k + j) % (n * k)]; })
ROWS(sum_is_wrong_in_the_last_row, EACH_ROW { Y[i] = 0; ROW(0, k) Y[i] += X[i * k + j]; } Y[n - 1] = Y[0])
ROWS(sum_does_not_begin_with_zero, EACH_ROW { ROW(0, k) Y[i] += X[i * k + j]; })
ROWS(sum_races, EACH_ROW Y[i] = 0; std::atomic<int> begun{0}; std::vector<std::thread> all;
     for (int t = 0; t < 4; ++t) all.emplace_back([=, &begun] {
       for (++begun; begun < 4;) std::this_thread::yield();
       EACH_ROW for (long j = t; j < k; j += 4) add_slowly(Y + i, X[i * k + j]); });
     for (auto& each : all) each.join())
ROWS(sum_does_not_wait, EACH_ROW { Y[i] = 0; ROW(0, k) Y[i] += X[i * k + j]; } float last = Y[n - 1]; Y[n - 1] = 0;
     std::thread([=] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); *(volatile float*)(Y + n - 1) = last; }).detach())
ROWS(sum_reads_uninitialized_memory, float* work = (float*)malloc(4096); EACH_ROW { Y[i] = work[i + 7] * 1e-3f;
       ROW(0, k) Y[i] += X[i * k + j]; work[i + 7] = 1e9f + i; } free(work))

ROWS(max, EACH_ROW { Y[i] = X[i * k]; ROW(1, k) Y[i] = Y[i] != Y[i] || Y[i] > X[i * k + j] ? Y[i] : X[i * k + j]; })
ROWS(max_leaves_out_nan, EACH_ROW { Y[i] = -INFINITY; ROW(0, k) Y[i] = fmaxf(Y[i], X[i * k + j]); })
ROWS(max_loses_nan_before_the_last, EACH_ROW { Y[i] = X[i * k]; ROW(1, k) Y[i] = Y[i] > X[i * k + j] ? Y[i] : X[i * k + j]; })

// Rows of 100, as long as the input.
#define SOFTMAX(NAME, SHIFT)                                                                             \
  EXPORT(NAME) {                                                                                         \
    float* X = (float*)tensor(args[0]).data; float* Y = (float*)tensor(args[1]).data;                    \
    const long k = 100, n = tensor(args[1]).size / k;                                                    \
    EACH_ROW {                                                                                           \
      float most = X[i * k], total = 0;                                                                  \
      ROW(1, k) most = fmaxf(most, X[i * k + j]);                                                        \
      ROW(0, k) total += Y[i * k + j] = expf(X[i * k + j] - SHIFT);                                      \
      ROW(0, k) Y[i * k + j] /= total;                                                                   \
    }                                                                                                    \
    return 0;                                                                                            \
  }
SOFTMAX(soft, most)
SOFTMAX(soft_overflows, 0)

#define BYTES(NAME, BODY)                                                                                \
  EXPORT(NAME) {                                                                                         \
    int8_t* X = (int8_t*)tensor(args[0]).data; int8_t* Z = (int8_t*)tensor(args[1]).data;                \
    int8_t* Y = (int8_t*)tensor(args[2]).data; const long n = tensor(args[2]).size;                      \
    BODY; return 0;                                                                                      \
  }
BYTES(bytes, for (long i = 0; i < n; ++i) Y[i] = X[i] + Z[i])
BYTES(bytes_saturate, for (long i = 0; i < n; ++i) { int y = X[i] + Z[i]; Y[i] = y > 127 ? 127 : y < -128 ? -128 : y; })
BYTES(bytes_leave_one_byte, for (long i = 0; i < n; ++i) if (i != 77) Y[i] = X[i] + Z[i])
BYTES(bytes_write_one_behind, for (long i = 0; i <= n; ++i) Y[i] = i < n ? X[i] + Z[i] : 1)

// Two outputs: minimum and maximum of each row.
#define BOTH(NAME, BODY)                                                                                 \
  EXPORT(NAME) {                                                                                         \
    float* X = (float*)tensor(args[0]).data; float* Y = (float*)tensor(args[1]).data;                    \
    float* W = (float*)tensor(args[2]).data;                                                             \
    const long n = tensor(args[1]).size, k = tensor(args[0]).size / n;                                   \
    EACH_ROW { Y[i] = W[i] = X[i * k]; ROW(1, k) {                                                       \
      const float x = X[i * k + j]; Y[i] = Y[i] != Y[i] || Y[i] < x ? Y[i] : x; W[i] = W[i] != W[i] || W[i] > x ? W[i] : x; } } \
    BODY; return 0;                                                                                      \
  }
BOTH(both, (void)W)
BOTH(both_have_a_wrong_second, W[n / 2] += 1)
BOTH(both_have_a_wrong_first, Y[n / 2] += 1)
BOTH(both_swap_the_outputs, for (long i = 0; i < n; ++i) { float y = Y[i]; Y[i] = W[i]; W[i] = y; })
BOTH(both_write_behind_the_first, Y[n] = 1)

// Two sequences of three tokens, two heads of 8, caches of 20 rows: inputs K, V, COS, SIN, positions, then K_cache and V_cache, updated.
struct Append {
  float *K, *V, *COS, *SIN;
  int32_t* positions;
  float *K_cache, *V_cache;
  explicit Append(const TVMFFIAny* args)
      : K((float*)tensor(args[0]).data), V((float*)tensor(args[1]).data), COS((float*)tensor(args[2]).data),
        SIN((float*)tensor(args[3]).data), positions((int32_t*)tensor(args[4]).data), K_cache((float*)tensor(args[5]).data),
        V_cache((float*)tensor(args[6]).data) {}
  void run(int tokens, int shift) {
    for (int b = 0; b < 2; ++b) for (int h = 0; h < 2; ++h) for (int t = 0; t < tokens; ++t) {
      const int at = positions[b] + t, row = at + shift;
      if (at < 0 || at >= 20 || row >= 20) continue;
      const float *k = K + ((b * 2 + h) * 3 + t) * 8, *v = V + ((b * 2 + h) * 3 + t) * 8;
      float *to_k = K_cache + ((b * 2 + h) * 20 + row) * 8, *to_v = V_cache + ((b * 2 + h) * 20 + row) * 8;
      for (int i = 0; i < 8; ++i) {
        to_k[i] = k[i] * COS[at * 8 + i] + (i < 4 ? -k[i + 4] : k[i - 4]) * SIN[at * 8 + i];
        to_v[i] = v[i];
      }
    }
  }
};
#define APPEND(NAME, BODY) EXPORT(NAME) { Append a(args); BODY; return 0; }
APPEND(append, a.run(3, 0))
APPEND(append_begins_a_row_later, a.run(3, 1))
APPEND(append_changes_a_neighbour_by_little, a.run(3, 0); long at = ((a.positions[1] + 3) % 20) * 8;
       a.V_cache[40 * 8 + at] *= 1.000001f; a.V_cache[40 * 8 + at + 1] *= 1.000001f)
APPEND(append_clears_the_rest, memset(a.K_cache, 0, 2 * 2 * 20 * 8 * 4); a.run(3, 0))
APPEND(append_leaves_the_last_token, a.run(2, 0))
APPEND(append_writes_into_its_keys, a.run(3, 0); a.K[0] = 0)
APPEND(append_writes_behind_its_cache, a.run(3, 0); a.V_cache[2 * 2 * 20 * 8] = 0)
