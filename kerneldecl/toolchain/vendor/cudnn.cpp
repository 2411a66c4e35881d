// Owns the call of cuDNN's convolution, as a graph with its epilogue. Knows nothing of schedules. Linked with kernels that name it; see
// companions.py.
#include "cudnn.h"

namespace {

enum Mode { kAdd = 0, kRelu = 100 };
enum { kNanPropagation = 10, kCrossCorrelation = 1, kPropagateNan = 1 };
enum Number {
  kTypeOfY = kFirstOwn, kPropagatesNan, kActivation, kImages, kChannels, kFilters,
  kHeight, kWidth, kRows, kColumns, kTapRows, kTapColumns, kStrideH, kStrideW, kDilationH, kDilationW, kPadTop, kPadLeft, kPadBottom, kPadRight,
  kHasAdd, kHasBias,
};
enum Id : int64_t { kX = 1, kW, kAddend, kBias, kY, kVirtual };

// Returns a tensor with its channels innermost: dimensions are images, channels, rows, columns.
Descriptor tensor(Builder* builder, int64_t id, int type, const int64_t (&dims)[4], bool is_virtual = false) {
  const int64_t strides[4] = {dims[1] * dims[2] * dims[3], 1, dims[1] * dims[3], dims[1]};
  return builder->tensor(id, type, dims, strides, is_virtual);
}

// Returns the graph of a convolution and its epilogue: add, then bias, then the activation.
Descriptor convolution(const Plan& plan, bool propagates_nan, Builder* builder) {
  const int64_t* of = plan.numbers;
  const int64_t x_dims[4] = {of[kImages], of[kChannels], of[kHeight], of[kWidth]};
  const int64_t w_dims[4] = {of[kFilters], of[kChannels], of[kTapRows], of[kTapColumns]};
  const int64_t y_dims[4] = {of[kImages], of[kFilters], of[kRows], of[kColumns]}, bias_dims[4] = {1, of[kFilters], 1, 1};
  const int type = of[kTypeOf], out_type = of[kTypeOfY];
  int64_t left = of[kHasAdd] + of[kHasBias] + (of[kActivation] >= 0), id = kVirtual;
  auto next = [&] { return left-- ? tensor(builder, id++, kFloat32, y_dims, true) : tensor(builder, kY, out_type, y_dims); };
  Descriptor x = tensor(builder, kX, type, x_dims), w = tensor(builder, kW, type, w_dims), y = next();

  Descriptor window = builder->made(kConvolution);
  builder->set_enum(window, 100, kDataType, kFloat32);
  builder->set_enum(window, 101, kConvolutionMode, kCrossCorrelation);
  builder->set(window, 102, kInt64, 2, &of[kDilationH]);
  builder->set(window, 103, kInt64, 2, &of[kStrideH]);
  builder->set(window, 104, kInt64, 2, &of[kPadBottom]);
  builder->set(window, 105, kInt64, 2, &of[kPadTop]);
  builder->set_one(window, 106, 2);
  builder->finished(window);
  Descriptor operations[4] = {builder->made(kConvolve)};
  const float one = 1.0f, zero = 0.0f;
  builder->set(operations[0], 700, kFloat, 1, &one);
  builder->set(operations[0], 701, kFloat, 1, &zero);
  builder->set_part(operations[0], 702, window);
  builder->set_part(operations[0], 703, w);
  builder->set_part(operations[0], 704, x);
  builder->set_part(operations[0], 705, y);
  builder->finished(operations[0]);
  int64_t count = 1;
  auto append = [&](int mode, Descriptor operand, bool propagates_nan) {
    Descriptor result = next();
    Descriptor what = builder->mode(mode, kFloat32);
    if (propagates_nan) builder->set_enum(what, 2, kNanPropagation, kPropagateNan);
    operations[count++] = builder->pointwise(what, y, operand, nullptr, result);
    y = result;
  };
  if (of[kHasAdd]) append(kAdd, tensor(builder, kAddend, out_type, y_dims), false);
  if (of[kHasBias]) append(kAdd, tensor(builder, kBias, out_type, bias_dims), false);
  if (of[kActivation] >= 0) append(of[kActivation], nullptr, of[kActivation] == kRelu && propagates_nan);
  return builder->graph(plan.handle, count, operations);
}

}  // namespace

// Y = epilogue(conv2d(X, W)), X [n, h, w, c], W [f, r, s, c]; add and bias are null where there is none. The numbers are those above.
// Returns -1 with an error set where it fails.
extern "C" __attribute__((visibility("hidden"))) int kerneldecl_cudnn_conv2d_1(
    const char* version, void* x, void* w, void* add, void* bias, void* y, int64_t engine, int64_t type, int64_t type_y, int64_t propagates_nan,
    int64_t activation, int64_t images, int64_t channels, int64_t filters, int64_t height, int64_t width, int64_t rows, int64_t columns,
    int64_t tap_rows, int64_t tap_columns, int64_t stride_h, int64_t stride_w, int64_t dilation_h, int64_t dilation_w, int64_t pad_top,
    int64_t pad_left, int64_t pad_bottom, int64_t pad_right) {
  const int64_t numbers[kMostNumbers] = {engine,     type,       type_y,  propagates_nan, activation,    images,   channels,       filters,
                                         height,     width,      rows,    columns,        tap_rows,      tap_columns, stride_h,    stride_w,
                                         dilation_h, dilation_w, pad_top, pad_left,       pad_bottom,    pad_right,
                                         add != nullptr, bias != nullptr};
  const Problem problem = {"convolution", propagates_nan != 0, convolution};
  return computed(problem, version, numbers, {{kX, x}, {kW, w}, {kAddend, add}, {kBias, bias}, {kY, y}});
}
