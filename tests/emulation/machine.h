// Owns what a kernel, recompiled for the CPU, sees of the GPU: indices, shared memory, and a model of each PTX instruction.
// Knows nothing of how the kernel's text was translated.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

// What cuTensorMapEncodeTiled makes: extents and box in elements, pitches in bytes, fastest dimension first.
struct CUtensorMap {
  uint8_t* base;
  int rank;
  int element_bytes;
  int64_t extent[5], pitch[5];
  int box[5], box_stride[5];
  int swizzle;
};

namespace machine {

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

// What one thread of the kernel sees of itself; the emulator keeps the rest of it elsewhere.
struct Place {
  Index3 thread, block, block_extent, grid_extent;
  unsigned rank_in_cta, rank_in_cluster, ctas_in_cluster;
};
extern Place* self;

[[noreturn]] void fail(const char* format, ...);

// ---- host: buffers in global memory with nothing beside them, tensor maps, launches
void* argument(const char* file);
void* workspace(size_t bytes);
void save();
void seed(unsigned);
CUtensorMap tiled(const char* dtype, int rank, void* base, std::vector<int64_t> numbers);
struct Launch {
  Index3 grid, cluster, block;
  size_t shared_bytes;
  bool has_pdl;
};
void launch(const Launch&, std::function<void()> kernel);
inline uint64_t parameters[32];  // of the kernel, those that are addresses: what ld.param reads
template <class... Parameters, class... Arguments>
void call(void (*kernel)(Parameters...), Arguments... arguments) {
  unsigned at = 0;
  auto note = [&](const auto& argument) {
    if constexpr (std::is_pointer_v<std::decay_t<decltype(argument)>>) parameters[at] = (uint64_t)argument;
    at++;
  };
  (note(arguments), ...);
  kernel((Parameters)(arguments)...);
}

// ---- memory
uint8_t* dynamic_shared();
uint32_t to_shared(const void*);
void* from_shared(uint32_t);
uint64_t map_generic(uint64_t address, unsigned rank);
uint32_t map_shared(uint32_t address, unsigned rank);
void load(uint32_t address, void* to, unsigned bytes);
void store(uint32_t address, const void* from, unsigned bytes);
void store_async(uint32_t address, const void* from, unsigned bytes, uint32_t barrier);
void touch_global(const void* address, unsigned bytes, bool is_write);
// Accesses that other threads may race with, and what they order: what a release follows is known to whom acquires its value.
void strong_load(const void* address, void* to, unsigned bytes);
void strong_store(void* address, const void* from, unsigned bytes);
void release(const void* address);
void acquire(const void* address);
void give_way();
template <class T, class F>
T atomic(T* address, F change) {
  give_way();
  acquire(address);
  T before, after;
  strong_load(address, &before, sizeof(T));
  after = change(before);
  strong_store(address, &after, sizeof(T));
  release(address);
  return before;
}

// ---- synchronisation
void sync_named(unsigned id, unsigned threads, bool is_waiting);
void sync_cta();
int sync_and_count(bool counts);
void sync_warp();
void cluster_arrive(bool is_aligned);
void cluster_wait();
bool elected();
void barrier_init(uint32_t address, unsigned count);
void barrier_invalidate(uint32_t address);
void barrier_arrive(uint32_t address, unsigned count, int64_t expected_bytes);
bool barrier_wait(uint32_t address, unsigned parity);
bool barrier_test(uint32_t address, unsigned parity);
void shuffle(const void* mine, void* theirs, unsigned bytes, unsigned lane);
void fence_proxy();
void wait_for_preceding();
void prefetch(const void* address, unsigned bytes, unsigned alignment);
void set_registers(unsigned count, bool is_more);

// ---- copies
void tensor_load(int rank, uint32_t to, const void* map, std::initializer_list<int> at, uint32_t barrier, int mask);
void tensor_prefetch(int rank, const void* map, std::initializer_list<int> at);
void tensor_store(int rank, const void* map, std::initializer_list<int> at, uint32_t from, bool adds);
void bulk_load(uint32_t to, const void* from, unsigned bytes, uint32_t barrier, int mask);
void bulk_store(const void* to, uint32_t from, unsigned bytes);
void bulk_commit();
void bulk_wait(unsigned left, bool is_read_only);
void copy_async(uint32_t to, const void* from, unsigned bytes, unsigned source_bytes);
void copy_commit();
void copy_wait(unsigned left);
void copy_arrive(uint32_t barrier, bool is_counted);
void matrix_store(uint32_t row, const std::vector<uint32_t>& parts, bool is_transposed);
void matrix_load(const std::vector<uint32_t*>& parts, uint32_t row, bool is_transposed);

// ---- mma.sync: a lane's registers of A, B and C as bytes; C becomes D
enum class Type { f16, bf16, tf32, e4m3, e5m2, s8, u8, f32, s32, f64 };
struct MmaSync {
  int m, k;
  Type operand, accum;
};
void mma_sync(const MmaSync& shape, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, std::vector<uint8_t>& c);
template <class... Register>
std::vector<uint8_t> packed(const Register&... registers) {
  std::vector<uint8_t> bytes;
  (bytes.insert(bytes.end(), (const uint8_t*)&registers, (const uint8_t*)(&registers + 1)), ...);
  return bytes;
}
template <class... Register>
void unpack(const std::vector<uint8_t>& bytes, Register&... registers) {
  size_t at = 0;
  ((memcpy(&registers, bytes.data() + at, sizeof registers), at += sizeof registers), ...);
}

// ---- wgmma
struct Operand {
  uint64_t descriptor;
  std::array<uint32_t, 4> registers;
  bool in_registers;
  Operand(uint64_t value) : descriptor(value), registers{}, in_registers(false) {}
  Operand(std::array<uint32_t, 4> values) : descriptor(0), registers(values), in_registers(true) {}
};
struct Mma {
  int n, k;
  Type accum, a, b;
  bool accumulates, a_by_mn = false, b_by_mn = false;
  int sign_a = 1, sign_b = 1;
};
void wgmma_fence();
void wgmma(const Mma&, std::vector<void*> accumulators, Operand a, uint64_t b);
void wgmma_commit();
void wgmma_wait(unsigned left);

// ---- arithmetic
template <class T>
uint32_t bits(T value) {
  static_assert(sizeof(T) <= 4);
  uint32_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
// Each bit looks up its three inputs' bits in a table of eight.
inline int32_t dot_of_bytes(uint32_t a, uint32_t b, int32_t sum, bool is_a_signed, bool is_b_signed) {
  auto byte = [](uint32_t word, int i, bool is_signed) { return is_signed ? int(int8_t(word >> 8 * i)) : int(uint8_t(word >> 8 * i)); };
  for (int i = 0; i < 4; i++) sum += byte(a, i, is_a_signed) * byte(b, i, is_b_signed);
  return sum;
}
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline uint32_t look_up(uint32_t a, uint32_t b, uint32_t c, unsigned table) {
  uint32_t found = 0;
  for (unsigned row = 0; row < 8; row++)
    if (table >> row & 1) found |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  return found;
}
template <class T>
uint32_t pack(T high, T low) {
  return bits(high) << (8 * sizeof(T)) | bits(low);
}
template <class Float8>
uint32_t widened(uint16_t pair) {
  Float8 low, high;
  low.__x = pair & 0xff, high.__x = pair >> 8;
  return pack(__half(float(high)), __half(float(low)));
}
}  // namespace machine

#define threadIdx (machine::self->thread)
#define blockIdx (machine::self->block)
#define blockDim (machine::self->block_extent)
#define gridDim (machine::self->grid_extent)
#define CUDART_INF_F INFINITY
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __grid_constant__
#undef __cluster_dims__
#define __cluster_dims__(...)

namespace cooperative_groups {
struct Block {
  unsigned thread_rank() const { return machine::self->rank_in_cta; }
  void sync() const { machine::sync_cta(); }
};
inline Block this_thread_block() { return {}; }
}  // namespace cooperative_groups

inline uint32_t __cvta_generic_to_shared(const void* address) { return machine::to_shared(address); }
inline void __syncthreads() { machine::sync_cta(); }
inline int __syncthreads_count(int counts) { return machine::sync_and_count(counts); }
inline void __syncwarp(unsigned = ~0u) { machine::sync_warp(); }
inline void __threadfence() { machine::give_way(); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { machine::give_way(); }
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T shuffled(T value, unsigned lane) {
  T theirs;
  machine::shuffle(&value, &theirs, sizeof(T), lane);
  return theirs;
}
inline uint32_t matrix_transposed(uint32_t value) {  // movmatrix: lane 4 r + c / 2 has elements c and c + 1 of row r
  unsigned lane = machine::self->rank_in_cta % 32, column = lane / 4, row = lane % 4 * 2;
  uint32_t even = shuffled(value, row * 4 + column / 2), odd = shuffled(value, (row + 1) * 4 + column / 2);
  unsigned shift = column % 2 * 16;
  return (even >> shift & 0xffff) | (odd >> shift & 0xffff) << 16;
}
// All lanes of a block's warp have to come to a shuffle, so that all are active where its mask is asked for.
inline unsigned __activemask() { return ~0u; }
template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  unsigned own = machine::self->rank_in_cta % 32;
  return shuffled(value, own / width * width + lane % width);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return shuffled(value, (machine::self->rank_in_cta % 32) ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by, int width = 32) {
  unsigned own = machine::self->rank_in_cta % 32;
  return shuffled(value, own % width + by < width ? own + by : own);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by, int width = 32) {
  unsigned own = machine::self->rank_in_cta % 32;
  return shuffled(value, int(own % width) >= by ? own - by : own);
}
inline int __any_sync(unsigned mask, int value) {
  for (int by = 16; by; by /= 2) value |= __shfl_xor_sync(mask, value, by);
  return value != 0;
}
inline unsigned __ballot_sync(unsigned mask, int value) {
  unsigned votes = unsigned(value != 0) << machine::self->rank_in_cta % 32;
  for (int by = 16; by; by /= 2) votes |= __shfl_xor_sync(mask, votes, by);
  return votes;
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
template <class T>
T atomicAdd(T* address, T value) {
  return machine::atomic(address, [=](T before) { return before + value; });
}
template <class T>
T atomicExch(T* address, T value) {
  return machine::atomic(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, T compare, T value) {
  return machine::atomic(address, [=](T before) { return before == compare ? value : before; });
}
inline int __float_as_int(float x) {
  int word;
  std::memcpy(&word, &x, sizeof word);
  return word;
}
// Each of four selectors names one of eight bytes, those of the first word first.
inline unsigned __byte_perm(unsigned first, unsigned second, unsigned selectors) {
  uint64_t bytes = uint64_t(second) << 32 | first;
  unsigned found = 0;
  for (int at = 0; at < 4; at++) found |= unsigned(bytes >> (selectors >> 4 * at & 7) * 8 & 0xff) << 8 * at;
  return found;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __float_as_uint(float x) { return __float_as_int(x); }
inline float __int_as_float(int x) {
  float value;
  std::memcpy(&value, &x, sizeof value);
  return value;
}
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __tanhf(float x) { return std::tanh(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
using std::max;
using std::min;
