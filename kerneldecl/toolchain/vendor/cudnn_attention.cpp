// Owns the call of cuDNN's attention, as the graph of two products and a softmax that its fused engines take. Knows nothing of schedules.
// Linked with kernels that name it; see companions.py.
#include <math.h>

#include "cudnn.h"

namespace {

enum Mode { kAdd = 0, kMul = 1, kDiv = 6, kSub = 9, kExp = 13, kLog = 15, kNotLess = 303, kIndex = 501, kSelect = 601 };
enum { kReductionOperator = 18, kSum = 0, kMax = 3, kInt32 = 4, kBool = 11 };
enum Number {
  kIsRowMajor = kFirstOwn,  // heads inside of rows: [batch, row, head, element]
  kBatch, kHeads, kKvHeads, kQueries, kKeys, kHeadDim, kValueDim,
  kCausal,  // what a query's last key is: 0 any, 1 the key of its own number, 2 counted from the last query and the last key
};
enum Id : int64_t { kQ = 1, kK, kV, kO, kSums, kScale, kMinusInfinity, kKeyCount, kQueryCount, kVirtual };

constexpr int64_t kScalar[4] = {1, 1, 1, 1};

struct Attention {
  const Plan& plan;
  Builder* builder;
  Descriptor operations[16] = {};
  int64_t count = 0, id = kVirtual;
  const int64_t* of = plan.numbers;
  const int64_t scores[4] = {of[kBatch], of[kHeads], of[kQueries], of[kKeys]}, rows[4] = {of[kBatch], of[kHeads], of[kQueries], 1};

  Descriptor packed(int64_t id, int type, const int64_t (&dims)[4], bool is_virtual) {
    const int64_t strides[4] = {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
    return builder->tensor(id, type, dims, strides, is_virtual);
  }
  Descriptor scalar(int64_t id, int type) { return builder->tensor(id, type, kScalar, kScalar, false, true); }

  // An argument [batch, heads, rows, elements] in the order that it has; its last two axes swapped for K.
  Descriptor argument(int64_t id, int64_t heads, int64_t length, int64_t elements, bool is_swapped = false) {
    const int64_t head = of[kIsRowMajor] ? elements : length * elements, row = of[kIsRowMajor] ? heads * elements : elements;
    const int64_t dims[4] = {of[kBatch], heads, is_swapped ? elements : length, is_swapped ? length : elements};
    const int64_t strides[4] = {heads * length * elements, head, is_swapped ? 1 : row, is_swapped ? row : 1};
    return builder->tensor(id, static_cast<int>(of[kTypeOf]), dims, strides, false);
  }

  Descriptor product(Descriptor a, Descriptor b, Descriptor c) {
    Descriptor what = builder->made(kMatmul);
    builder->set_enum(what, 1500, kDataType, kFloat32);
    builder->finished(what);
    Descriptor operation = builder->made(kMultiply);
    builder->set_part(operation, 1520, a);
    builder->set_part(operation, 1521, b);
    builder->set_part(operation, 1522, c);
    builder->set_part(operation, 1523, what);
    operations[count++] = builder->finished(operation);
    return c;
  }
  Descriptor step(int mode, Descriptor x, Descriptor b, Descriptor y, int compute_type = kFloat32, Descriptor t = nullptr) {
    operations[count++] = builder->pointwise(builder->mode(mode, compute_type), x, b, t, y);
    return y;
  }
  Descriptor index(Descriptor x, int64_t axis) {
    Descriptor what = builder->mode(kIndex, kFloat32), y = packed(id++, kInt32, scores, true);
    builder->set_one(what, 9, axis);
    operations[count++] = builder->pointwise(what, x, nullptr, nullptr, y);
    return y;
  }
  Descriptor reduced(int how, Descriptor x) {
    Descriptor what = builder->made(kReduction), y = packed(id++, kFloat32, rows, true);
    builder->set_enum(what, 1600, kReductionOperator, how);
    builder->set_enum(what, 1601, kDataType, kFloat32);
    builder->finished(what);
    Descriptor operation = builder->made(kReduce);
    builder->set_part(operation, 1610, x);
    builder->set_part(operation, 1611, y);
    builder->set_part(operation, 1612, what);
    operations[count++] = builder->finished(operation);
    return y;
  }
  Descriptor score(int type = kFloat32) { return packed(id++, type, scores, true); }

  // Returns scores with minus infinity for keys that are behind a query's last one.
  Descriptor masked(Descriptor x) {
    Descriptor last = index(x, 2), key = index(x, 3);
    if (of[kCausal] == 2) {
      last = step(kAdd, last, scalar(kKeyCount, kInt32), score(kInt32), kInt32);
      last = step(kSub, last, scalar(kQueryCount, kInt32), score(kInt32), kInt32);
    }
    Descriptor is_seen = step(kNotLess, last, key, score(kBool), kBool);
    return step(kSelect, x, scalar(kMinusInfinity, kFloat32), score(), kFloat32, is_seen);
  }
};

// The order of operations is the one that cuDNN's documentation gives for its fused attention. The logarithms of sums are always a result:
// cuDNN 9.19 has no engine for the graph without them.
Descriptor attention(const Plan& plan, bool, Builder* builder) {
  Attention a = {plan, builder};
  const int64_t* of = plan.numbers;
  Descriptor q = a.argument(kQ, of[kHeads], of[kQueries], of[kHeadDim]), k = a.argument(kK, of[kKvHeads], of[kKeys], of[kHeadDim], true);
  Descriptor x = a.product(q, k, a.score());
  x = a.step(kMul, x, a.scalar(kScale, kFloat32), a.score());
  if (of[kCausal]) x = a.masked(x);
  Descriptor most = a.reduced(kMax, x);
  Descriptor powers = a.step(kExp, a.step(kSub, x, most, a.score()), nullptr, a.score());
  Descriptor sums = a.reduced(kSum, powers);
  Descriptor logarithms = a.step(kLog, sums, nullptr, a.packed(a.id++, kFloat32, a.rows, true));
  a.step(kAdd, most, logarithms, a.packed(kSums, kFloat32, a.rows, false));
  Descriptor shares = a.step(kDiv, powers, sums, a.score(static_cast<int>(of[kTypeOf])));
  Descriptor v = a.argument(kV, of[kKvHeads], of[kKeys], of[kValueDim]);
  a.product(shares, v, a.argument(kO, of[kHeads], of[kQueries], of[kValueDim]));
  return builder->graph(plan.handle, a.count, a.operations);
}

}  // namespace

// O = softmax(scale Q K^T) V for each head, and the logarithms of its rows' sums where `sums` is not null. The numbers are those above.
// Returns -1 with an error set where it fails.
extern "C" __attribute__((visibility("hidden"))) int kerneldecl_cudnn_attention_1(
    const char* version, void* q, void* k, void* v, void* o, void* sums, double scale, int64_t engine, int64_t type, int64_t is_row_major,
    int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys, int64_t head_dim, int64_t value_dim, int64_t causal) {
  const int64_t numbers[kMostNumbers] = {engine,  type, is_row_major, batch,     heads,  kv_heads,
                                         queries, keys, head_dim,     value_dim, causal};
  alignas(kAlignment) float factor = static_cast<float>(scale);
  alignas(kAlignment) float minus_infinity = -INFINITY;
  alignas(kAlignment) int32_t key_count = static_cast<int32_t>(keys);
  alignas(kAlignment) int32_t query_count = static_cast<int32_t>(queries);
  const Problem problem = {"attention", false, attention};
  return computed(problem, version, numbers,
                  {{kQ, q}, {kK, k}, {kV, v}, {kO, o}, {kSums, sums}, {kScale, &factor},
                   {kMinusInfinity, causal ? &minus_infinity : nullptr}, {kKeyCount, causal == 2 ? &key_count : nullptr},
                   {kQueryCount, causal == 2 ? &query_count : nullptr}},
                  {kSums, sums ? 0 : sizeof(float) * batch * heads * queries});
}
