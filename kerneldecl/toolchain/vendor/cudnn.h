// Owns what calls of cuDNN share: the library, graphs of its backend interface, the choice of an engine, plans, their execution.
// Knows nothing of what a graph computes.
//
// An engine is named by its place in what cuDNN's heuristic (mode A) returns for the graph, those left out that are not deterministic, and
// for float32 those that round its operands to fewer bits. The workspace is that of our own kernels (workspace_pages.cpp): it stays for
// CUDA graphs. Numbers are those of cudnn_graph.h 9, which later releases keep.
#pragma once
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
            kApplyPointwise = 13, kGraph = 15, kVariantPack = 16, kTensor = 17, kMatmul = 18, kMultiply = 19, kReduction = 21, kReduce = 22 };
enum Note { kTensorCore = 0, kDownConverts = 1, kNondeterministic = 4, kMostNotes = 16 };
enum { kFloat32 = 0, kModeA = 3, kMostBound = 16 };

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

// The numbers of each problem begin with these two; then come its own.
enum { kEngineIndex, kTypeOf, kFirstOwn };
constexpr int kMostNumbers = 32;

struct Plan {
  Plan* next;
  int device;
  int64_t numbers[kMostNumbers];
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

  Descriptor tensor(int64_t id, int type, const int64_t (&dims)[4], const int64_t (&strides)[4], bool is_virtual, bool is_by_value = false) {
    Descriptor descriptor = made(kTensor);
    set_enum(descriptor, 901, kDataType, type);
    set(descriptor, 902, kInt64, 4, dims);
    set(descriptor, 903, kInt64, 4, strides);
    set_one(descriptor, 906, id);
    set_one(descriptor, 900, kAlignment);
    set(descriptor, 907, kBoolean, 1, &is_virtual);
    if (is_by_value) set(descriptor, 908, kBoolean, 1, &is_by_value);
    return finished(descriptor);
  }

  // The description of y = mode(x, …), still to be finished.
  Descriptor mode(int mode, int compute_type) {
    Descriptor what = made(kPointwise);
    set_enum(what, 0, kPointwiseMode, mode);
    set_enum(what, 1, kDataType, compute_type);
    return what;
  }

  // y = what(x, b), where t: those that are null are no operands.
  Descriptor pointwise(Descriptor what, Descriptor x, Descriptor b, Descriptor t, Descriptor y) {
    finished(what);
    Descriptor operation = made(kApplyPointwise);
    set_part(operation, 750, what);
    set_part(operation, 751, x);
    if (b) set_part(operation, 752, b);
    if (t) set_part(operation, 758, t);
    set_part(operation, 753, y);
    return finished(operation);
  }

  Descriptor graph(void* handle, int64_t count, const Descriptor* operations) {
    Descriptor graph = made(kGraph);
    set(graph, 800, kHandle, 1, &handle);
    set(graph, 801, kDescriptor, count, operations);
    return finished(graph);
  }
};

// What a library's call computes: its name in messages, and its graph, with or without what an engine need not promise.
struct Problem {
  const char* name;
  bool has_promises;
  Descriptor (*graph)(const Plan& plan, bool has_promises, Builder* builder);
};

struct Bound {  // a tensor's address, of a scalar the host's
  int64_t id;
  void* pointer;
};

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
int64_t configurations(const Plan& plan, const Problem& problem, bool has_promises, Descriptor (&configs)[kMostEngines], int* status) {
  Builder builder;
  Descriptor heuristic = builder.made(kHeuristic);
  builder.set_part(heuristic, 201, problem.graph(plan, has_promises, &builder));
  builder.set_enum(heuristic, 200, kHeuristicMode, kModeA);
  builder.finished(heuristic);
  for (Descriptor& config : configs) config = builder.made(kEngineConfig);
  int64_t count = 0;
  if (!builder.status) builder.status = library.get(heuristic, 202, kDescriptor, kMostEngines, &count, configs);
  *status = builder.status;
  return builder.status ? 0 : count;
}

// Chooses the engine; sets an error and returns -1 where there are fewer.
int chosen(Plan* plan, const Problem& problem) {
  Builder builder;
  Descriptor configs[kMostEngines];
  int64_t count = configurations(*plan, problem, problem.has_promises, configs, &builder.status);
  // Engines may do what they do not promise, as to propagate NaN; whether they do is for the kernel's verification to say.
  if (!count && problem.has_promises) count = configurations(*plan, problem, false, configs, &builder.status);
  if (builder.status) return failed("cuDNN %s: its heuristic for this %s gives %s", library.version, problem.name, library.status_name(builder.status));
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
  return failed("cuDNN %s has %d engines for this %s, not %d", library.version, static_cast<int>(taken), problem.name,
                static_cast<int>(plan->numbers[kEngineIndex]) + 1);
}

// Returns the plan of a problem on a device, made when it is first wanted and then kept; null with an error set.
Plan* plan_of(int device, const Problem& problem, const int64_t (&numbers)[kMostNumbers]) {
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
  if (chosen(plan, problem) != 0) return nullptr;
  plan->next = plans;
  plans = plan;
  return plan;
}

int executed(const Plan& plan, const Bound* bound, int count, void* workspace) {
  int64_t ids[kMostBound];
  void* pointers[kMostBound];
  for (int i = 0; i < count; ++i) {
    ids[i] = bound[i].id;
    pointers[i] = bound[i].pointer;
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

struct Unwanted {  // a result that the graph must have and nobody reads: it lies behind the workspace; none where `bytes` is 0
  int64_t id;
  uint64_t bytes;
};

// Computes a problem on the stream of this thread; returns -1 with an error set where it fails.
int computed(const Problem& problem, const char* version, const int64_t (&numbers)[kMostNumbers], std::initializer_list<Bound> operands,
             Unwanted unwanted = {}) {
  if (!__atomic_load_n(&is_loaded, __ATOMIC_ACQUIRE) && load(version) != 0) return -1;
  if (!is_version(library.version, version)) {
    return failed("cuDNN %s is loaded, and this kernel was tuned with %s: pip install \"nvidia-cudnn-cu13==%s.*\"", library.version, version,
                  version);
  }
  Bound bound[kMostBound];
  int count = 0;
  for (const Bound& each : operands) {
    if (reinterpret_cast<uintptr_t>(each.pointer) % kAlignment) return failed("cuDNN needs arguments that are aligned to 16 bytes");
    if (each.pointer) bound[count++] = each;
  }
  Lock lock(&mutex);
  int device = 0;
  if (library.current_device(&device) != 0) return failed("there is no CUDA context in this thread");
  Plan* plan = plan_of(device, problem, numbers);
  if (!plan) return -1;
  int status = library.set_stream(plan->handle, TVMFFIEnvGetStream(kCuda, device));
  if (status) return refused("its stream", status);
  const uint64_t used = (plan->workspace_bytes + kAlignment - 1) / kAlignment * kAlignment, bytes = used + unwanted.bytes;
  void* workspace = bytes ? __TVMBackendAllocWorkspace(kCuda, device, bytes, 1, 8) : nullptr;
  if (bytes && !workspace) return failed("out of memory: cuDNN's workspace of %zu bytes", static_cast<size_t>(bytes));
  if (unwanted.bytes) bound[count++] = {unwanted.id, static_cast<char*>(workspace) + used};
  status = executed(*plan, bound, count, workspace);
  if (workspace) __TVMBackendFreeWorkspace(kCuda, device, workspace);
  return status ? refused(problem.name, status) : 0;
}

}  // namespace
