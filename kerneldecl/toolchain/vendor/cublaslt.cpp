// Owns the call of cuBLASLt's matmul. Knows nothing of schedules. Linked with kernels that name it; see companions.py.
//
// An algorithm is named by its place in what cuBLASLt's heuristic returns for the problem, which one version answers the same on one model
// of GPU. The workspace is that of our own kernels (workspace_pages.cpp): it stays for CUDA graphs, and cuBLASLt allocates nothing.
// The call is launched on the stream of tvm_ffi's environment. Types and numbers are those of cublasLt.h 13, which later releases keep.
#include "vendor.h"

extern "C" void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
extern "C" int (*__TVMBackendFreeWorkspace)(int, int, void*);

namespace {

constexpr char kSoname[] = "libcublasLt.so.13";
constexpr int kCuda = 2;  // DLDeviceType
constexpr uint64_t kMostWorkspace = uint64_t{32} << 20;  // what NVIDIA recommends for Hopper
constexpr uint32_t kAlignment = 16;
constexpr int kMostAlgorithms = 8;

enum { kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8 };                                  // cublasLtMatmulDescAttributes_t
enum { kBatchCount = 5, kBatchStride = 6 };                                                          // cublasLtMatrixLayoutAttribute_t
enum { kWorkspaceBytes = 1, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8 };    // cublasLtMatmulPreferenceAttributes_t
enum { kR32F = 0, kR64F = 1, kR16F = 2, kR32I = 10 };                                                // cudaDataType

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

struct Library {
  int (*create)(void**);
  int (*desc_create)(void**, int, int);
  int (*desc_set)(void*, int, const void*, size_t);
  int (*layout_create)(void**, int, uint64_t, uint64_t, int64_t);
  int (*layout_set)(void*, int, const void*, size_t);
  int (*preference_create)(void**);
  int (*preference_set)(void*, int, const void*, size_t);
  int (*preference_destroy)(void*);
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, Heuristic*, int*);
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*,
                const Algorithm*, void*, size_t, void*);
  const char* (*status_name)(int);
  int (*current_device)(int*);
  char version[32];
};

// The numbers of a problem, in the order of the arguments; matrices are in column-major order, as cuBLASLt has them.
enum Number {
  kAlgorithm, kTypeA, kTypeB, kTypeD, kCompute, kScale, kEpilogueOf, kTransposeA, kTransposeB,
  kM, kN, kK, kBatch, kLdA, kLdB, kLdD, kStrideA, kStrideB, kStrideD, kNumbers,
};

struct Plan {
  Plan* next;
  int device;
  int64_t numbers[kNumbers];
  void *handle, *desc, *a, *b, *d;
  Heuristic chosen;
};

Library library;
bool is_loaded = false;
constexpr int kBuckets = 256;
Plan* plans[kBuckets];
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // a plan's description holds the bias's address, so one call at a time is launched

template <typename Function>
bool find(void* from, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(from, name));
  return *function != nullptr;
}

int load(const char* version) {
  void* lt = opened(kSoname);
  if (!lt) return failed("cuBLASLt is missing: pip install \"nvidia-cublas==%s.*\" (%s)", version, dlerror());
  Lock lock(&mutex);
  if (is_loaded) return 0;
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) return failed("there is no NVIDIA driver (%s)", dlerror());
  size_t (*get_version)();
  const bool has_all = find(lt, "cublasLtGetVersion", &get_version) && find(lt, "cublasLtCreate", &library.create) &&
                       find(lt, "cublasLtMatmulDescCreate", &library.desc_create) &&
                       find(lt, "cublasLtMatmulDescSetAttribute", &library.desc_set) &&
                       find(lt, "cublasLtMatrixLayoutCreate", &library.layout_create) &&
                       find(lt, "cublasLtMatrixLayoutSetAttribute", &library.layout_set) &&
                       find(lt, "cublasLtMatmulPreferenceCreate", &library.preference_create) &&
                       find(lt, "cublasLtMatmulPreferenceSetAttribute", &library.preference_set) &&
                       find(lt, "cublasLtMatmulPreferenceDestroy", &library.preference_destroy) &&
                       find(lt, "cublasLtMatmulAlgoGetHeuristic", &library.heuristic) && find(lt, "cublasLtMatmul", &library.matmul) &&
                       find(lt, "cublasLtGetStatusName", &library.status_name) && find(driver, "cuCtxGetDevice", &library.current_device);
  if (!has_all) return failed("%s lacks a function of cuBLASLt 13", kSoname);
  const unsigned long found = get_version();
  snprintf(library.version, sizeof(library.version), "%lu.%lu.%lu", found / 10000, found / 100 % 100, found % 100);
  __atomic_store_n(&is_loaded, true, __ATOMIC_RELEASE);
  return 0;
}

int refused(const char* what, int status) { return failed("cuBLASLt %s: %s gives %s", library.version, what, library.status_name(status)); }

int made_layout(void** layout, int type, int64_t rows, int64_t columns, int64_t pitch, const int64_t* numbers, int64_t stride) {
  int status = library.layout_create(layout, type, rows, columns, pitch);
  const int32_t count = numbers[kBatch];
  if (!status && count > 1) status = library.layout_set(*layout, kBatchCount, &count, sizeof(count));
  if (!status && count > 1) status = library.layout_set(*layout, kBatchStride, &stride, sizeof(stride));
  return status;
}

int described(Plan* plan, bool has_bias) {
  const int64_t* of = plan->numbers;
  const int32_t trans_a = of[kTransposeA], trans_b = of[kTransposeB], epilogue = of[kEpilogueOf];
  int status = library.desc_create(&plan->desc, of[kCompute], of[kScale]);
  if (!status) status = library.desc_set(plan->desc, kTransA, &trans_a, sizeof(trans_a));
  if (!status) status = library.desc_set(plan->desc, kTransB, &trans_b, sizeof(trans_b));
  if (!status) status = library.desc_set(plan->desc, kEpilogue, &epilogue, sizeof(epilogue));
  void* anywhere = reinterpret_cast<void*>(uintptr_t{256});  // the heuristic wants an address, and does not read there
  if (!status && has_bias) status = library.desc_set(plan->desc, kBiasPointer, &anywhere, sizeof(anywhere));
  if (!status) status = made_layout(&plan->a, of[kTypeA], trans_a ? of[kK] : of[kM], trans_a ? of[kM] : of[kK], of[kLdA], of, of[kStrideA]);
  if (!status) status = made_layout(&plan->b, of[kTypeB], trans_b ? of[kN] : of[kK], trans_b ? of[kK] : of[kN], of[kLdB], of, of[kStrideB]);
  if (!status) status = made_layout(&plan->d, of[kTypeD], of[kM], of[kN], of[kLdD], of, of[kStrideD]);
  return status;
}

// Chooses the algorithm; sets an error and returns -1 where the heuristic has fewer.
int chosen(Plan* plan) {
  void* preference = nullptr;
  int status = library.preference_create(&preference);
  if (!status) status = library.preference_set(preference, kWorkspaceBytes, &kMostWorkspace, sizeof(kMostWorkspace));
  for (int which : {kAlignmentA, kAlignmentB, kAlignmentC, kAlignmentD}) {
    if (!status) status = library.preference_set(preference, which, &kAlignment, sizeof(kAlignment));
  }
  Heuristic found[kMostAlgorithms] = {};
  int count = 0;
  if (!status) {
    status = library.heuristic(plan->handle, plan->desc, plan->a, plan->b, plan->d, plan->d, preference, kMostAlgorithms, found, &count);
  }
  if (preference) library.preference_destroy(preference);
  if (status) return refused("its heuristic for this product", status);
  const int64_t wanted = plan->numbers[kAlgorithm];
  if (wanted >= count) return failed("cuBLASLt %s has %d algorithms for this product, not %d", library.version, count, static_cast<int>(wanted) + 1);
  plan->chosen = found[wanted];
  return 0;
}

// Returns the plan of a problem on a device, made when it is first wanted and then kept; null with an error set.
Plan* plan_of(int device, const int64_t (&numbers)[kNumbers], bool has_bias) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (int64_t number : numbers) hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211u;
  Plan** bucket = &plans[(hash ^ hash >> 32) % kBuckets];
  void* handle = nullptr;
  for (Plan* plan = *bucket; plan; plan = plan->next) {
    if (plan->device == device && memcmp(plan->numbers, numbers, sizeof(numbers)) == 0) return plan;
  }
  for (Plan* plan : plans) {  // one handle for each device
    for (; plan && !handle; plan = plan->next) handle = plan->device == device ? plan->handle : nullptr;
  }
  Plan* plan = static_cast<Plan*>(calloc(1, sizeof(Plan)));
  if (!plan) return nullptr;
  plan->device = device;
  memcpy(plan->numbers, numbers, sizeof(numbers));
  plan->handle = handle;
  int status = handle ? 0 : library.create(&plan->handle);
  if (status) {
    refused("its start on this GPU", status);
    return nullptr;
  }
  status = described(plan, has_bias);
  if (status) refused("the description of this product", status);
  if (status || chosen(plan) != 0) return nullptr;
  plan->next = *bucket;
  *bucket = plan;
  return plan;
}

// Returns 1 or 0 as a scalar of the type that alpha and beta have.
const void* scalar(int type, bool is_one) {
  static const float singles[] = {0.0f, 1.0f};
  static const double doubles[] = {0.0, 1.0};
  static const uint16_t halves[] = {0, 0x3c00};
  static const int32_t integers[] = {0, 1};
  switch (type) {
    case kR64F: return &doubles[is_one];
    case kR16F: return &halves[is_one];
    case kR32I: return &integers[is_one];
    default: return &singles[is_one];
  }
}

}  // namespace

// D = epilogue(A B + C + bias) in column-major order; C and bias are null where there is none. The numbers are those above. Returns -1 with
// an error set where it fails.
extern "C" __attribute__((visibility("hidden"))) int kerneldecl_cublaslt_matmul_1(
    const char* version, const void* a, const void* b, const void* c, const void* bias, void* d, int64_t algorithm, int64_t type_a,
    int64_t type_b, int64_t type_d, int64_t compute, int64_t scale_type, int64_t epilogue, int64_t trans_a, int64_t trans_b, int64_t m, int64_t n,
    int64_t k, int64_t batch, int64_t lda, int64_t ldb, int64_t ldd, int64_t stride_a, int64_t stride_b, int64_t stride_d) {
  const int64_t numbers[kNumbers] = {algorithm, type_a, type_b, type_d, compute, scale_type, epilogue, trans_a,  trans_b, m,
                                     n,         k,      batch,  lda,    ldb,     ldd,        stride_a, stride_b, stride_d};
  if (!__atomic_load_n(&is_loaded, __ATOMIC_ACQUIRE) && load(version) != 0) return -1;
  if (!is_version(library.version, version)) {
    return failed("cuBLASLt %s is loaded, and this kernel was tuned with %s: pip install \"nvidia-cublas==%s.*\"", library.version, version,
                  version);
  }
  for (const void* each : {a, b, c, static_cast<const void*>(d)}) {
    if (reinterpret_cast<uintptr_t>(each) % kAlignment) return failed("cuBLASLt needs arguments that are aligned to 16 bytes");
  }
  Lock lock(&mutex);
  int device = 0;
  if (library.current_device(&device) != 0) return failed("there is no CUDA context in this thread");
  Plan* plan = plan_of(device, numbers, bias != nullptr);
  if (!plan) return -1;
  int status = bias ? library.desc_set(plan->desc, kBiasPointer, &bias, sizeof(bias)) : 0;
  if (status) return refused("the address of the bias", status);
  const size_t bytes = plan->chosen.workspace_bytes;
  void* workspace = bytes ? __TVMBackendAllocWorkspace(kCuda, device, bytes, 1, 8) : nullptr;
  if (bytes && !workspace) return failed("out of memory: cuBLASLt's workspace of %zu bytes", bytes);
  const int scale = plan->numbers[kScale];
  status = library.matmul(plan->handle, plan->desc, scalar(scale, true), a, plan->a, b, plan->b, scalar(scale, c != nullptr), c ? c : d,
                          plan->d, d, plan->d, &plan->chosen.algorithm, workspace, bytes, TVMFFIEnvGetStream(kCuda, device));
  if (workspace) __TVMBackendFreeWorkspace(kCuda, device, workspace);
  return status ? refused("the product", status) : 0;
}
