// Owns the call of OpenBLAS's GEMM. Knows nothing of schedules. Linked with kernels that name it; see companions.py.
//
// The product of one thread count is the same in every call. OpenBLAS allocates buffers for packed panels once, when it is loaded.
#include "vendor.h"

namespace {

constexpr char kSoname[] = "libscipy_openblas.so";
constexpr int kColumnMajor = 102, kPlain = 111, kTransposed = 112;  // cblas.h

using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
using Dgemm = void (*)(int, int, int, int, int, int, double, const double*, int, const double*, int, double, double*, int);

struct OpenBlas {
  Sgemm sgemm;
  Dgemm dgemm;
  char version[32];
};

OpenBlas* blas = nullptr;
pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

int load(const char* version) {
  void* library = opened(kSoname);
  if (!library) return failed("OpenBLAS is missing: pip install \"scipy-openblas32==%s.*\" (%s)", version, dlerror());
  Lock lock(&loading);
  if (blas) return 0;
  static OpenBlas found;
  found.sgemm = reinterpret_cast<Sgemm>(dlsym(library, "scipy_cblas_sgemm"));
  found.dgemm = reinterpret_cast<Dgemm>(dlsym(library, "scipy_cblas_dgemm"));
  auto config = reinterpret_cast<const char* (*)()>(dlsym(library, "scipy_openblas_get_config"));
  auto set_threads = reinterpret_cast<void (*)(int)>(dlsym(library, "scipy_openblas_set_num_threads"));
  if (!found.sgemm || !found.dgemm || !config || !set_threads) return failed("%s lacks a function of scipy-openblas32", kSoname);
  if (sscanf(config(), "OpenBLAS %31s", found.version) != 1) return failed("%s does not say its version", kSoname);
  // As many threads as the kernels beside it; without a word, OpenBLAS takes all cores of the machine.
  const char* threads = getenv("TVM_NUM_THREADS");
  if (threads && atoi(threads) > 0) set_threads(atoi(threads));
  __atomic_store_n(&blas, &found, __ATOMIC_RELEASE);
  return 0;
}

}  // namespace

// C[i] = A[i] B[i] for i below `batch`, all in column-major order. Arguments: version, A, B, C, bytes of an element,
// whether A and B are transposed, m, n, k, batch, then lda, ldb, ldc and the strides of the batch in elements.
extern "C" __attribute__((visibility("hidden"))) int kerneldecl_openblas_gemm_1(void*, const Any* args, int32_t, Any*) {
  const char* version = args[0].text;
  if (!__atomic_load_n(&blas, __ATOMIC_ACQUIRE) && load(version) != 0) return -1;
  if (!is_version(blas->version, version)) {
    return failed("OpenBLAS %s is loaded, and this kernel was tuned with %s: pip install \"scipy-openblas32==%s.*\"", blas->version,
                  version, version);
  }
  const char *a = static_cast<char*>(args[1].pointer), *b = static_cast<char*>(args[2].pointer);
  char* c = static_cast<char*>(args[3].pointer);
  const int64_t bytes = args[4].number;
  const int trans_a = args[5].number ? kTransposed : kPlain, trans_b = args[6].number ? kTransposed : kPlain;
  const int m = args[7].number, n = args[8].number, k = args[9].number;
  const int lda = args[11].number, ldb = args[12].number, ldc = args[13].number;
  for (int64_t i = 0; i < args[10].number; ++i) {
    const void *ai = a + i * args[14].number * bytes, *bi = b + i * args[15].number * bytes;
    void* ci = c + i * args[16].number * bytes;
    if (bytes == 8) {
      blas->dgemm(kColumnMajor, trans_a, trans_b, m, n, k, 1.0, static_cast<const double*>(ai), lda, static_cast<const double*>(bi), ldb, 0.0,
                  static_cast<double*>(ci), ldc);
    } else {
      blas->sgemm(kColumnMajor, trans_a, trans_b, m, n, k, 1.0f, static_cast<const float*>(ai), lda, static_cast<const float*>(bi), ldb, 0.0f,
                  static_cast<float*>(ci), ldc);
    }
  }
  return 0;
}
