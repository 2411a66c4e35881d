// Owns the workspace allocator: it allocates kernels' workspaces in a GPU's global memory, in the place of TVM's pool.
// Knows nothing of kernels. Linked with kernels that allocate a workspace; see cuda_objects.py.
//
// TVM's pool frees its largest buffer to allocate a larger one, while CUDA graphs that were captured before still write into
// it. A buffer (`Page`) of this allocator stays until the process ends. Sizes are powers of two, so that all smaller buffers
// together take no more memory than the largest.
//
// As in TVM's pool, a buffer belongs to a thread, whose launches use it one after the other.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

extern "C" void* TVMBackendAllocWorkspace(int device_type, int device_id, uint64_t bytes, int type_code, int type_bits);
extern "C" int TVMBackendFreeWorkspace(int device_type, int device_id, void* data);

namespace {

constexpr int kCuda = 2;  // DLDeviceType
constexpr uint64_t kSmallest = 4096;  // page size of TVM's pool

struct Page {
  Page* next;
  pthread_t owner;  // a later thread may have the same id: it inherits the pages
  int device_id;
  uint64_t bytes;
  void* data;
  bool is_taken;  // read and written by the owner alone
};

}  // namespace

// Libraries of one process share this list where the compiler makes the symbol unique (g++ does); otherwise each has its own.
// A change of Page's layout needs another name.
inline void* kerneldecl_cuda_pages_1 = nullptr;

namespace {

Page* first() { return static_cast<Page*>(__atomic_load_n(&kerneldecl_cuda_pages_1, __ATOMIC_ACQUIRE)); }

void* take(int device_type, int device_id, uint64_t asked, int type_code, int type_bits) {
  if (device_type != kCuda) return TVMBackendAllocWorkspace(device_type, device_id, asked, type_code, type_bits);
  uint64_t bytes = kSmallest;
  while (bytes < asked) bytes *= 2;
  const pthread_t owner = pthread_self();
  Page* found = nullptr;
  for (Page* page = first(); page; page = page->next) {
    const bool fits = page->owner == owner && page->device_id == device_id && !page->is_taken && page->bytes >= bytes;
    if (fits && (!found || page->bytes < found->bytes)) found = page;
  }
  if (!found) {
    void* data = TVMBackendAllocWorkspace(device_type, device_id, bytes, type_code, type_bits);  // never freed
    if (!data) return nullptr;
    found = static_cast<Page*>(malloc(sizeof(Page)));
    if (!found) return nullptr;
    *found = {first(), owner, device_id, bytes, data, false};
    void* expected = found->next;
    while (!__atomic_compare_exchange_n(&kerneldecl_cuda_pages_1, &expected, found, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      found->next = static_cast<Page*>(expected);
    }
  }
  found->is_taken = true;
  return found->data;
}

int give_back(int device_type, int device_id, void* data) {
  if (device_type != kCuda) return TVMBackendFreeWorkspace(device_type, device_id, data);
  for (Page* page = first(); page; page = page->next) {
    if (page->data == data && page->device_id == device_id) {
      page->is_taken = false;
      return 0;
    }
  }
  return -1;
}

}  // namespace

// Host code calls these. TVM's loader would put its own functions into symbols of these names, but does not find hidden ones.
extern "C" {
__attribute__((visibility("hidden"))) void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = take;
__attribute__((visibility("hidden"))) int (*__TVMBackendFreeWorkspace)(int, int, void*) = give_back;
}
