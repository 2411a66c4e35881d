// Owns the memory of a GPU that kernels take beside their arguments, in the place of TVM's pool.
// Knows nothing of kernels. Linked with those that ask for such memory; see cudalink.py.
//
// TVM's pool frees its largest page where a larger one is asked for, while CUDA graphs that were captured before still write
// into it. A page from here stays until the process ends. Sizes are powers of two, so that pages that were outgrown are together
// no larger than the one that is used.
//
// As in TVM's pool, a page belongs to a thread, and what the thread launches uses it in turn.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

extern "C" void* TVMBackendAllocWorkspace(int device_type, int device_id, uint64_t bytes, int type_code, int type_bits);
extern "C" int TVMBackendFreeWorkspace(int device_type, int device_id, void* data);

namespace {

constexpr int kCuda = 2;  // DLDeviceType
constexpr uint64_t kSmallest = 4096;  // TVM's page

struct Page {
  Page* next;
  pthread_t owner;  // that of a thread that has ended may come again: then its pages do, too
  int device_id;
  uint64_t bytes;
  void* data;
  bool is_taken;  // owner's alone
};

}  // namespace

// Libraries of one process share the list where the compiler makes such symbols unique (g++ does), and else have one each.
// Another layout of Page needs another name.
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
    void* data = TVMBackendAllocWorkspace(device_type, device_id, bytes, type_code, type_bits);  // never given back
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

// What host code calls. TVM's loader puts its own functions where it finds these names: it does not find hidden ones.
extern "C" {
__attribute__((visibility("hidden"))) void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = take;
__attribute__((visibility("hidden"))) int (*__TVMBackendFreeWorkspace)(int, int, void*) = give_back;
}
