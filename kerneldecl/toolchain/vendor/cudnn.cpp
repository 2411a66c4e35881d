// Owns the call of cuDNN's convolution, as a graph with its epilogue. Knows nothing of schedules. Linked with kernels that name it; see
// companions.py.
//
// An engine is named by its place in what cuDNN's heuristic (mode A) returns for the graph, those left out that are not deterministic, and
// for float32 those that round its operands to fewer bits. The workspace is that of our own kernels (workspace_pages.cpp): it stays for
// CUDA graphs. Numbers are those of cudnn_graph.h 9, which later releases keep.
#include "vendor.h"

extern "C" void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
extern "C" int (*__TVMBackendFreeWorkspace)(int, int, void*);

namespace {

constexpr char kSoname[] = "libcudnn.so.9";
constexpr int kCuda = 2;  // DLDeviceType
constexpr int64_t kAlignment = 16;
constexpr int kMostEngines = 16;

using Descriptor = void*;

enum Type { kHandle = 0, kDataType = 1, kBoolean = 2, kInt64 = 3, kFloat = 4, kPointer = 6, kConvolutionMode = 7, kHeuristicMode = 8,
            kNumericalNote = 11, kPointwiseMode = 14, kDescriptor = 15 };
enum Kind { kPointwise = 0, kConvolution = 1, kEngine = 2, kEngineConfig = 3, kHeuristic = 4, kPlanKind = 5, kConvolve = 10,
            kApplyPointwise = 13, kGraph = 15, kVariantPack = 16, kTensor = 17 };
enum Note { kTensorCore = 0, kDownConverts = 1, kNondeterministic = 4, kMostNotes = 16 };
enum Mode { kAdd = 0, kRelu = 100 };
enum { kFloat32 = 0, kCrossCorrelation = 1, kModeA = 3, kPropagateNan = 1 };

struct Library {
  int (*create)(void**);
  int (*set_stream)(void*, void*);
  int (*make)(int, Descriptor*);
  int (*destroy)(Descriptor);
  int (*finalize)(Descriptor);
  int (*set)(Descriptor, int, int, int64_t, const void*);
  int (*get)(Descriptor, int, int, int64_t, int64_t*, void*);
  int (*execute)(void*, Descriptor, Descriptor);
  const char* (*status_name)(int);
  int (*current_device)(int*);
  char version[32];
};

enum Number {
  kEngineIndex, kTypeOf, kTypeOfY, kPropagatesNan, kActivation, kImages, kChannels, kFilters,
  kHeight, kWidth, kRows, kColumns, kTapRows, kTapColumns, kStrideH, kStrideW, kDilationH, kDilationW, kPadTop, kPadLeft, kPadBottom, kPadRight,
  kHasAdd, kHasBias, kNumbers,
};
enum Id : int64_t { kX = 1, kW, kAddend, kBias, kY, kVirtual };

struct Plan {
  Plan* next;
  int device;
  int64_t numbers[kNumbers];
  void* handle;
  Descriptor plan;
  int64_t workspace_bytes;
};

Library library;
bool is_loaded = false;
Plan* plans = nullptr;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // a handle has one stream at a time

template <typename Function>
bool find(void* from, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(from, name));
  return *function != nullptr;
}

int load(const char* version) {
  void* cudnn = opened(kSoname);
  if (!cudnn) return failed("cuDNN is missing: pip install \"nvidia-cudnn-cu13==%s.*\" (%s)", version, dlerror());
  Lock lock(&mutex);
  if (is_loaded) return 0;
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) return failed("there is no NVIDIA driver (%s)", dlerror());
  size_t (*get_version)();
  const bool has_all = find(cudnn, "cudnnGetVersion", &get_version) && find(cudnn, "cudnnCreate", &library.create) &&
                       find(cudnn, "cudnnSetStream", &library.set_stream) && find(cudnn, "cudnnBackendCreateDescriptor", &library.make) &&
                       find(cudnn, "cudnnBackendDestroyDescriptor", &library.destroy) &&
                       find(cudnn, "cudnnBackendFinalize", &library.finalize) && find(cudnn, "cudnnBackendSetAttribute", &library.set) &&
                       find(cudnn, "cudnnBackendGetAttribute", &library.get) && find(cudnn, "cudnnBackendExecute", &library.execute) &&
                       find(cudnn, "cudnnGetErrorString", &library.status_name) && find(driver, "cuCtxGetDevice", &library.current_device);
  if (!has_all) return failed("%s lacks a function of cuDNN 9", kSoname);
  const unsigned long found = get_version();
  snprintf(library.version, sizeof(library.version), "%lu.%lu.%lu", found / 10000, found / 100 % 100, found % 100);
  __atomic_store_n(&is_loaded, true, __ATOMIC_RELEASE);
  return 0;
}

int refused(const char* what, int status) { return failed("cuDNN %s: %s gives %s", library.version, what, library.status_name(status)); }

// Builds descriptors until one call fails; then `status` says how, and the others do nothing.
struct Builder {
  int status = 0;

  Descriptor made(int kind) {
    Descriptor descriptor = nullptr;
    if (!status) status = library.make(kind, &descriptor);
    return descriptor;
  }
  void set(Descriptor to, int name, int type, int64_t count, const void* values) {
    if (!status) status = library.set(to, name, type, count, values);
  }
  void set_one(Descriptor to, int name, int64_t value) { set(to, name, kInt64, 1, &value); }
  void set_enum(Descriptor to, int name, int type, int32_t value) { set(to, name, type, 1, &value); }
  void set_part(Descriptor to, int name, Descriptor part) { set(to, name, kDescriptor, 1, &part); }
  Descriptor finished(Descriptor descriptor) {
    if (!status) status = library.finalize(descriptor);
    return descriptor;
  }

  // A tensor with its channels innermost: dimensions are images, channels, rows, columns.
  Descriptor tensor(int64_t id, int type, const int64_t (&dims)[4], bool is_virtual = false) {
    const int64_t strides[4] = {dims[1] * dims[2] * dims[3], 1, dims[1] * dims[3], dims[1]};
    Descriptor descriptor = made(kTensor);
    set_enum(descriptor, 901, kDataType, type);
    set(descriptor, 902, kInt64, 4, dims);
    set(descriptor, 903, kInt64, 4, strides);
    set_one(descriptor, 906, id);
    set_one(descriptor, 900, kAlignment);
    set(descriptor, 907, kBoolean, 1, &is_virtual);
    return finished(descriptor);
  }

  // y = mode(x, b), without b of x alone.
  Descriptor pointwise(int mode, Descriptor x, Descriptor b, Descriptor y, bool propagates_nan) {
    Descriptor what = made(kPointwise);
    set_enum(what, 0, kPointwiseMode, mode);
    set_enum(what, 1, kDataType, kFloat32);
    if (propagates_nan) set_enum(what, 2, 10, kPropagateNan);
    finished(what);
    Descriptor operation = made(kApplyPointwise);
    set_part(operation, 750, what);
    set_part(operation, 751, x);
    if (b) set_part(operation, 752, b);
    set_part(operation, 753, y);
    return finished(operation);
  }
};

// Returns the graph of a convolution and its epilogue: add, then bias, then the activation.
Descriptor graph_of(const Plan& plan, bool propagates_nan, Builder* builder) {
  const int64_t* of = plan.numbers;
  const int64_t x_dims[4] = {of[kImages], of[kChannels], of[kHeight], of[kWidth]};
  const int64_t w_dims[4] = {of[kFilters], of[kChannels], of[kTapRows], of[kTapColumns]};
  const int64_t y_dims[4] = {of[kImages], of[kFilters], of[kRows], of[kColumns]}, bias_dims[4] = {1, of[kFilters], 1, 1};
  const int type = of[kTypeOf], out_type = of[kTypeOfY];
  int64_t left = of[kHasAdd] + of[kHasBias] + (of[kActivation] >= 0), id = kVirtual;
  auto next = [&] { return left-- ? builder->tensor(id++, kFloat32, y_dims, true) : builder->tensor(kY, out_type, y_dims); };
  Descriptor x = builder->tensor(kX, type, x_dims), w = builder->tensor(kW, type, w_dims), y = next();

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
    operations[count++] = builder->pointwise(mode, y, operand, result, propagates_nan);
    y = result;
  };
  if (of[kHasAdd]) append(kAdd, builder->tensor(kAddend, out_type, y_dims), false);
  if (of[kHasBias]) append(kAdd, builder->tensor(kBias, out_type, bias_dims), false);
  if (of[kActivation] >= 0) append(of[kActivation], nullptr, of[kActivation] == kRelu && propagates_nan);

  Descriptor graph = builder->made(kGraph);
  builder->set(graph, 800, kHandle, 1, &plan.handle);
  builder->set(graph, 801, kDescriptor, count, operations);
  return builder->finished(graph);
}

// Whether an engine gives the same bits each time, and for float32 reads all bits.
bool is_taken(Descriptor config, bool is_float32) {
  Descriptor engine = nullptr;
  int64_t count = 0;
  int notes[kMostNotes] = {};
  if (library.make(kEngine, &engine) || library.get(config, 301, kDescriptor, 1, &count, &engine)) return true;  // it does not say
  if (library.get(engine, 1303, kNumericalNote, kMostNotes, &count, notes)) count = 0;
  library.destroy(engine);
  for (int64_t i = 0; i < count; ++i) {
    if (notes[i] == kNondeterministic || (is_float32 && (notes[i] == kDownConverts || notes[i] == kTensorCore))) return false;
  }
  return true;
}

// Asks the heuristic for the engines of a graph; returns how many configurations it gave, none where it knows no engine or fails.
int64_t configurations(const Plan& plan, bool propagates_nan, Descriptor (&configs)[kMostEngines], int* status) {
  Builder builder;
  Descriptor heuristic = builder.made(kHeuristic);
  builder.set_part(heuristic, 201, graph_of(plan, propagates_nan, &builder));
  builder.set_enum(heuristic, 200, kHeuristicMode, kModeA);
  builder.finished(heuristic);
  for (Descriptor& config : configs) config = builder.made(kEngineConfig);
  int64_t count = 0;
  if (!builder.status) builder.status = library.get(heuristic, 202, kDescriptor, kMostEngines, &count, configs);
  *status = builder.status;
  return builder.status ? 0 : count;
}

// Chooses the engine; sets an error and returns -1 where there are fewer.
int chosen(Plan* plan) {
  Builder builder;
  Descriptor configs[kMostEngines];
  int64_t count = configurations(*plan, plan->numbers[kPropagatesNan], configs, &builder.status);
  // Engines may propagate NaN that do not promise it; whether they do is for the kernel's verification to say.
  if (!count && plan->numbers[kPropagatesNan]) count = configurations(*plan, false, configs, &builder.status);
  if (builder.status) return refused("its heuristic for this convolution", builder.status);
  int64_t taken = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!is_taken(configs[i], plan->numbers[kTypeOf] == kFloat32) || taken++ != plan->numbers[kEngineIndex]) continue;
    plan->plan = builder.made(kPlanKind);
    builder.set(plan->plan, 400, kHandle, 1, &plan->handle);
    builder.set_part(plan->plan, 401, configs[i]);
    builder.finished(plan->plan);
    if (!builder.status) builder.status = library.get(plan->plan, 402, kInt64, 1, &count, &plan->workspace_bytes);
    return builder.status ? refused("this engine", builder.status) : 0;
  }
  return failed("cuDNN %s has %d engines for this convolution, not %d", library.version, static_cast<int>(taken),
                static_cast<int>(plan->numbers[kEngineIndex]) + 1);
}

// Returns the plan of a problem on a device, made when it is first wanted and then kept; null with an error set.
Plan* plan_of(int device, const int64_t (&numbers)[kNumbers]) {
  void* handle = nullptr;
  for (Plan* plan = plans; plan; plan = plan->next) {
    if (plan->device != device) continue;
    if (memcmp(plan->numbers, numbers, sizeof(numbers)) == 0) return plan;
    handle = plan->handle;
  }
  Plan* plan = static_cast<Plan*>(calloc(1, sizeof(Plan)));
  if (!plan) return nullptr;
  plan->device = device;
  plan->handle = handle;
  memcpy(plan->numbers, numbers, sizeof(numbers));
  const int status = handle ? 0 : library.create(&plan->handle);
  if (status) {
    refused("its start on this GPU", status);
    return nullptr;
  }
  if (chosen(plan) != 0) return nullptr;
  plan->next = plans;
  plans = plan;
  return plan;
}

int executed(const Plan& plan, void* const (&tensors)[5], void* workspace) {
  int64_t ids[5];
  void* pointers[5];
  int64_t count = 0;
  for (int i = 0; i < 5; ++i) {
    if (!tensors[i]) continue;
    ids[count] = kX + i;
    pointers[count++] = tensors[i];
  }
  Builder builder;
  Descriptor pack = builder.made(kVariantPack);
  builder.set(pack, 1000, kInt64, count, ids);
  builder.set(pack, 1001, kPointer, count, pointers);
  builder.set(pack, 1003, kPointer, 1, &workspace);
  builder.finished(pack);
  if (!builder.status) builder.status = library.execute(plan.handle, plan.plan, pack);
  if (pack) library.destroy(pack);
  return builder.status;
}

}  // namespace

// Y = epilogue(conv2d(X, W)), X [n, h, w, c], W [f, r, s, c]; add and bias are null where there is none. The numbers are those above.
// Returns -1 with an error set where it fails.
extern "C" __attribute__((visibility("hidden"))) int kerneldecl_cudnn_conv2d_1(
    const char* version, void* x, void* w, void* add, void* bias, void* y, int64_t engine, int64_t type, int64_t type_y, int64_t propagates_nan,
    int64_t activation, int64_t images, int64_t channels, int64_t filters, int64_t height, int64_t width, int64_t rows, int64_t columns,
    int64_t tap_rows, int64_t tap_columns, int64_t stride_h, int64_t stride_w, int64_t dilation_h, int64_t dilation_w, int64_t pad_top,
    int64_t pad_left, int64_t pad_bottom, int64_t pad_right) {
  const int64_t numbers[kNumbers] = {engine,     type,       type_y,  propagates_nan, activation,    images,         channels,       filters,
                                     height,     width,      rows,    columns,        tap_rows,   tap_columns,    stride_h,       stride_w,
                                     dilation_h, dilation_w, pad_top, pad_left,       pad_bottom, pad_right,      add != nullptr, bias != nullptr};
  void* const tensors[5] = {x, w, add, bias, y};
  if (!__atomic_load_n(&is_loaded, __ATOMIC_ACQUIRE) && load(version) != 0) return -1;
  if (!is_version(library.version, version)) {
    return failed("cuDNN %s is loaded, and this kernel was tuned with %s: pip install \"nvidia-cudnn-cu13==%s.*\"", library.version, version,
                  version);
  }
  for (void* each : tensors) {
    if (reinterpret_cast<uintptr_t>(each) % kAlignment) return failed("cuDNN needs arguments that are aligned to 16 bytes");
  }
  Lock lock(&mutex);
  int device = 0;
  if (library.current_device(&device) != 0) return failed("there is no CUDA context in this thread");
  Plan* plan = plan_of(device, numbers);
  if (!plan) return -1;
  int status = library.set_stream(plan->handle, TVMFFIEnvGetStream(kCuda, device));
  if (status) return refused("its stream", status);
  const uint64_t bytes = plan->workspace_bytes;
  void* workspace = bytes ? __TVMBackendAllocWorkspace(kCuda, device, bytes, 1, 8) : nullptr;
  if (bytes && !workspace) return failed("out of memory: cuDNN's workspace of %zu bytes", static_cast<size_t>(bytes));
  status = executed(*plan, tensors, workspace);
  if (workspace) __TVMBackendFreeWorkspace(kCuda, device, workspace);
  return status ? refused("the convolution", status) : 0;
}
