// Owns the call of OpenBLAS's GEMM. Knows nothing of schedules. Linked with kernels that name it; see companions.py.
//
// OpenBLAS runs in one thread, and is called in each thread of our kernels' pool: its own threads would spin on the cores that the loops behind
// a product need. It allocates a buffer for packed panels for each thread that calls it, and keeps that.
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
  set_threads(1);
  __atomic_store_n(&blas, &found, __ATOMIC_RELEASE);
  return 0;
}

}  // namespace

// Loads OpenBLAS, which must have this version; returns -1 with an error set where it cannot.
extern "C" __attribute__((visibility("hidden"))) int kerneldecl_openblas_ready_1(const char* version) {
  if (!__atomic_load_n(&blas, __ATOMIC_ACQUIRE) && load(version) != 0) return -1;
  if (is_version(blas->version, version)) return 0;
  return failed("OpenBLAS %s is loaded, and this kernel was tuned with %s: pip install \"scipy-openblas32==%s.*\"", blas->version, version,
                version);
}

// D = A B in column-major order, once OpenBLAS is ready, on elements of so many bytes. Offsets are elements before A, B and D.
extern "C" __attribute__((visibility("hidden"))) int kerneldecl_openblas_gemm_1(
    const char* a, const char* b, char* d, int64_t bytes, int64_t a_offset, int64_t b_offset, int64_t d_offset, int64_t is_a_transposed,
    int64_t is_b_transposed, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldd) {
  a += a_offset * bytes;
  b += b_offset * bytes;
  d += d_offset * bytes;
  const int trans_a = is_a_transposed ? kTransposed : kPlain, trans_b = is_b_transposed ? kTransposed : kPlain;
  if (bytes == 8) {
    blas->dgemm(kColumnMajor, trans_a, trans_b, m, n, k, 1.0, reinterpret_cast<const double*>(a), lda, reinterpret_cast<const double*>(b), ldb,
                0.0, reinterpret_cast<double*>(d), ldd);
  } else {
    blas->sgemm(kColumnMajor, trans_a, trans_b, m, n, k, 1.0f, reinterpret_cast<const float*>(a), lda, reinterpret_cast<const float*>(b), ldb,
                0.0f, reinterpret_cast<float*>(d), ldd);
  }
  return 0;
}
