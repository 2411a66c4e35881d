// Owns the model of a GPU of compute capability 9.0: threads, clusters, barriers, the asynchronous proxy, tensor maps, wgmma.
// Knows nothing of kernels. Threads are coroutines of one OS thread that run until they must wait, in an order that a seed
// decides. What is asynchronous happens as late as it may, and memory knows who still reads or fills it, so that a missing
// wait is an error and not a matter of luck. Sources: PTX ISA 9.x, sections on asynchronous copies, mbarrier and wgmma.
#include "machine.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <unordered_map>

namespace machine {
namespace {

constexpr size_t SLOT = 256 << 10;        // of shared memory, a CTA
constexpr uint32_t BASE = 1024;           // where dynamic shared memory begins; the system keeps what is before
constexpr size_t GAP = 1 << 20;           // between buffers in global memory
constexpr size_t ARENA = size_t(8) << 30; // reserved, not used
constexpr size_t STACK = 256 << 10;
constexpr size_t RESIDENT = 3072;         // threads that run at a time, if a cluster is not larger
constexpr unsigned PATIENCE = 64;         // polls of what others may do, before a copy arrives
constexpr int TAG = 24;                   // bits of an address within a CTA; above: rank in the cluster, and one

struct Cta;
struct Cluster;
struct Thread;

// What a warp knows has happened: of each warp of the launch, how many of its writes to workspaces.
using Clock = std::vector<uint32_t>;

// What is known of four bytes of a workspace: its last write, by a warp of a launch.
struct Word {
  uint32_t launch = 0, warp = 0, time = 0;
};

// What is known of a byte of shared memory.
struct Byte {
  uint8_t state = 0;
  uint16_t writer = 0;    // rank in its CTA
  uint16_t readers = 0;   // asynchronous reads under way
  uint16_t fillers = 0;   // asynchronous writes under way
  uint32_t time = 0;      // of the last write by an ordinary instruction
};
enum : uint8_t { WRITTEN = 1, UNFENCED = 2, BARRIER = 4 };

struct Mbarrier {
  unsigned count, pending;
  int64_t bytes = 0;
  unsigned phase = 0;
  std::vector<Thread*> waiting;
  Clock clock;
};

struct Rendezvous {
  unsigned expected = 0, arrived = 0;
  std::vector<Thread*> waiting;
  Clock clock;
};

struct Range {
  uint8_t* begin;
  size_t size;
};

struct Wgmma {
  Mma mma;
  uint64_t a, b;
  bool in_registers;
  unsigned issued = 0;
  std::array<std::vector<void*>, 128> accumulators;
  std::array<std::array<uint32_t, 4>, 128> registers;
  std::vector<Range> reads;
  bool is_done = false;
  std::vector<Thread*> waiting;
};

struct Warpgroup {
  std::vector<std::unique_ptr<Wgmma>> mmas;  // in order of issue
  size_t done = 0;
};

struct BulkStore {
  std::vector<Range> reads;
  std::function<void()> read, write;
};

struct Copy {
  uint8_t* to;
  const uint8_t* from;
  unsigned bytes, source_bytes;
};

struct Thread : Place {
  Cta* cta = nullptr;
  ucontext_t context;  // where it begins
  jmp_buf place;  // where it goes on
  bool has_begun = false;
  std::function<void()>* kernel = nullptr;
  void* stack = nullptr;
  std::function<std::string()> waits_for;  // reported when nobody can go on
  std::vector<Range> unfenced;
  uint32_t fence_time = 0;
  size_t issued = 0, committed_mmas = 0;
  std::deque<size_t> mma_groups;  // how many MMAs were issued when each was committed
  bool has_wgmma_fence = false;
  std::vector<BulkStore> stores;
  std::deque<std::vector<BulkStore>> store_groups, read_groups;
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> copy_groups;
  unsigned spins = 0;
  unsigned waits = 0;  // for barriers in shared memory, since the lanes of the warp last met
  bool arrived_in_cluster = false;
  unsigned cluster_round = 0;
};

struct Warp {
  Rendezvous rendezvous;
  unsigned id = 0;  // in the launch
  Clock clock;
  unsigned round = 0;
  unsigned aligned = 0, waits = 0;  // lanes that came to an aligned barrier, and how often they had waited before
  std::array<std::vector<uint8_t>, 32> slots[2];
  std::array<uint32_t, 32> rows;
  std::array<std::vector<uint32_t>, 32> parts;
  std::array<std::vector<uint32_t*>, 32> targets;
};

struct Cta {
  Cluster* cluster;
  unsigned rank, alive = 0;
  uint8_t* shared;
  std::vector<Byte> bytes = std::vector<Byte>(SLOT);
  std::map<uint32_t, Mbarrier> barriers;
  std::map<unsigned, Rendezvous> named;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::vector<std::unique_ptr<Thread>> threads;
  bool has_waited_for_preceding = false;
  unsigned loads = 0;
  int counted = 0, reached = 0;  // by __syncthreads_count: so far, and at the last one
  std::set<std::pair<const void*, std::array<int, 5>>> prefetched;  // boxes of tensor maps that it has not loaded yet
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  Rendezvous rendezvous;
  unsigned round = 0, alive = 0;
};

struct Buffer {
  std::string name;
  uint8_t* begin;
  size_t size;
  bool is_file;
  std::vector<Word> words;                   // of a workspace
  std::map<const uint8_t*, Clock> released;  // with a value, for whom acquires it
};

struct State {
  bool has_tails = false;  // whether a tensor has two maps, the second one for its last rows
  std::set<std::pair<const void*, int64_t>> mapped;
  uint8_t *shared = nullptr, *global = nullptr, *global_end = nullptr;
  std::vector<bool> slots;
  std::vector<Cta*> owners;
  std::vector<Buffer> buffers;
  std::vector<Thread*> ready;
  std::vector<std::function<void()>> late;  // asynchronous writes that have not happened yet
  std::vector<void*> stacks;
  jmp_buf scheduler;
  unsigned launches = 0, warps = 0;
  bool has_workspace = false;
  unsigned polls = 0;  // of what others may do, since the last copy arrived
  Thread* thread = nullptr;
  Launch launch;
  uint32_t time = 1;
  std::mt19937 random{1};
} machine_;
State& it = machine_;

Thread& me() { return *it.thread; }

// ---- scheduling

[[noreturn]] void stop(const std::string& message) {
  fprintf(stderr, "%s\n", message.c_str());
  fflush(stderr);
  _exit(3);
}

void wake(std::vector<Thread*>& threads) {
  it.ready.insert(it.ready.end(), threads.begin(), threads.end());
  threads.clear();
}

// Contexts save the signal mask, a system call at each change of threads: they begin threads, which jump from then on.
void leave() {
  Thread* thread = it.thread;
  if (!_setjmp(thread->place)) _longjmp(it.scheduler, 1);
}

__attribute__((noinline)) void go_on(Thread& thread) {
  if (_setjmp(it.scheduler)) return;
  if (thread.has_begun) _longjmp(thread.place, 1);
  thread.has_begun = true;
  setcontext(&thread.context);
}

void wait_in(std::vector<Thread*>& queue, std::function<std::string()> why) {
  me().waits_for = std::move(why);
  queue.push_back(it.thread);
  leave();
}

// ---- who knows of whose writes to workspaces

Warp& my_warp() { return me().cta->warps[me().rank_in_cta / 32]; }

void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}

void tell(Clock& clock) {
  if (it.has_workspace) join(clock, my_warp().clock);
}

void learn(const Clock& clock) {
  if (it.has_workspace) join(my_warp().clock, clock);
}

Buffer* workspace_at(const uint8_t* address) {
  for (Buffer& buffer : it.buffers)
    if (!buffer.words.empty() && address >= buffer.begin && address < buffer.begin + buffer.size) return &buffer;
  return nullptr;
}

// Checks that an ordinary access to a workspace comes after the last write.
void ordinary_workspace(const uint8_t* address, size_t size, bool is_write) {
  Buffer* buffer = it.has_workspace && it.thread ? workspace_at(address) : nullptr;
  if (!buffer) return;
  Warp& warp = my_warp();
  size_t first = (address - buffer->begin) / 4, last = (address - buffer->begin + size - 1) / 4;
  if (warp.clock.size() <= warp.id) warp.clock.resize(warp.id + 1);
  if (is_write) warp.clock[warp.id]++;
  for (size_t i = first; i <= last; i++) {
    Word& word = buffer->words[i];
    bool is_known = word.launch != it.launches || (word.warp < warp.clock.size() && word.time <= warp.clock[word.warp]);
    if (!is_write && !word.launch) fail("reads byte %zu of a workspace, which nobody has written", i * 4);
    if (!is_known) fail("%s byte %zu of a workspace, without having waited for another warp's write to it", is_write ? "writes" : "reads", i * 4);
    if (is_write) word = {it.launches, warp.id, warp.clock[warp.id]};
  }
}

// Return whether the caller came last; all others have waited for it.
template <class Last>
void meet(Rendezvous& rendezvous, unsigned expected, const std::string& name, Last last, bool is_waiting = true) {
  if (rendezvous.arrived == 0) rendezvous.expected = expected;
  if (rendezvous.expected != expected) fail("%s is waited for by %u threads and by %u", name.c_str(), rendezvous.expected, expected);
  tell(rendezvous.clock);
  if (++rendezvous.arrived < expected) {
    if (is_waiting) wait_in(rendezvous.waiting, [&] { return name; }), learn(rendezvous.clock);
    return;
  }
  learn(rendezvous.clock);
  last();
  rendezvous.arrived = 0;
  wake(rendezvous.waiting);
}

// ---- memory

Cta* owner_of(const void* address) {
  size_t offset = (const uint8_t*)address - it.shared;
  return offset < it.owners.size() * SLOT ? it.owners[offset / SLOT] : nullptr;
}

Byte* known(const uint8_t* address) {
  Cta* cta = owner_of(address);
  return &cta->bytes[address - cta->shared];
}

void check_shared(const uint8_t* address, size_t size, const char* what) {
  Cta* cta = owner_of(address);
  if (!cta || !cta->alive) fail("%s shared memory of a CTA that has left", what);
  size_t offset = address - cta->shared;
  if (offset < BASE || offset + size > BASE + it.launch.shared_bytes)
    fail("%s shared memory at byte %ld of %zu", what, long(offset) - long(BASE), it.launch.shared_bytes);
}

void check_data(const uint8_t* address, size_t size, const char* what, bool is_write) {
  check_shared(address, size, what);
  Byte* bytes = known(address);
  long offset = long(address - owner_of(address)->shared) - long(BASE);
  for (size_t i = 0; i < size; i++) {
    const Byte& byte = bytes[i];
    if (byte.state & BARRIER) fail("%s shared memory at byte %ld, where a barrier is", what, offset + long(i));
    if (byte.fillers) fail("%s shared memory at byte %ld, which an asynchronous copy still fills", what, offset + long(i));
    if (is_write && byte.readers) fail("%s shared memory at byte %ld, which is still being read asynchronously", what, offset + long(i));
    if (!is_write && !(byte.state & WRITTEN)) fail("%s shared memory at byte %ld, which nobody has written", what, offset + long(i));
  }
}

void mark_written(uint8_t* address, size_t size) {
  Byte* bytes = known(address);
  it.time++;
  for (size_t i = 0; i < size; i++) bytes[i].state = WRITTEN | UNFENCED, bytes[i].writer = me().rank_in_cta, bytes[i].time = it.time;
  auto& list = me().unfenced;
  if (!list.empty() && list.back().begin + list.back().size == address) list.back().size += size;
  else list.push_back({address, size});
}

void ordinary_shared(uint8_t* address, size_t size, bool is_write) {
  check_data(address, size, is_write ? "writes" : "reads", is_write);
  if (is_write) mark_written(address, size);
}

void check_argument(const uint8_t* address, size_t size, const char* what) {
  for (const Buffer& buffer : it.buffers) {
    long offset = address - buffer.begin;
    if (offset >= -long(GAP / 2) && offset < long(buffer.size + GAP / 2)) {
      if (offset < 0 || offset + size > buffer.size) fail("%s byte %ld of %s, which has %zu", what, offset, buffer.name.c_str(), buffer.size);
      return;
    }
  }
  fail("%s global memory where no argument is", what);
}

void check_global(const uint8_t* address, size_t size, bool is_write) {
  const char* what = is_write ? "writes" : "reads";
  if (it.launch.has_pdl && it.thread && !me().cta->has_waited_for_preceding)
    fail("%s global memory before griddepcontrol.wait, in a kernel that may start before the last one ends", what);
  check_argument(address, size, what);
}

// Called before each load and store of the kernel's code.
void access(void* where, size_t size, bool is_write, bool is_aligned) {
  auto* address = (uint8_t*)where;
  bool is_shared = size_t(address - it.shared) < it.owners.size() * SLOT;
  bool is_global = !is_shared && size_t(address - it.global) < ARENA;
  if (!is_shared && !is_global) return;
  if (is_aligned && size_t(address) % size) fail("%s %zu bytes at an address that is no multiple of it", is_write ? "writes" : "reads", size);
  if (is_shared) ordinary_shared(address, size, is_write);
  else check_global(address, size, is_write), ordinary_workspace(address, size, is_write);
}

// What the asynchronous proxy reads must be there, and visible to it.
void begin_read(const Range& range, const char* what) {
  check_data(range.begin, range.size, what, false);
  Byte* bytes = known(range.begin);
  long offset = long(range.begin - owner_of(range.begin)->shared) - long(BASE);
  for (size_t i = 0; i < range.size; i++) {
    if ((bytes[i].state & UNFENCED) && bytes[i].time >= me().fence_time)
      fail("%s shared memory at byte %ld, which thread %u wrote without fence.proxy.async", what, offset + long(i), bytes[i].writer);
    bytes[i].readers++;
  }
}

void end_read(const Range& range) {
  Byte* bytes = known(range.begin);
  for (size_t i = 0; i < range.size; i++) bytes[i].readers--;
}

void begin_fill(const Range& range, const char* what) {
  check_data(range.begin, range.size, what, true);
  Byte* bytes = known(range.begin);
  for (size_t i = 0; i < range.size; i++) bytes[i].fillers++;
}

void end_fill(const Range& range) {
  Byte* bytes = known(range.begin);
  for (size_t i = 0; i < range.size; i++) bytes[i].fillers--, bytes[i].state = WRITTEN;
}

// ---- barriers in shared memory

Cta* target_of(uint32_t address) {
  unsigned tag = address >> TAG;
  if (tag == 0) return me().cta;
  if (tag > me().cta->cluster->ctas.size()) fail("addresses CTA %u of a cluster of %zu", tag - 1, me().cta->cluster->ctas.size());
  return me().cta->cluster->ctas[tag - 1].get();
}

uint32_t offset_of(uint32_t address) { return address & ((1u << TAG) - 1); }

Mbarrier& barrier_at(Cta* cta, uint32_t offset, const char* what) {
  auto found = cta->barriers.find(offset);
  if (found == cta->barriers.end()) fail("%s a barrier at byte %ld of shared memory, where none was initialised", what, long(offset) - long(BASE));
  return found->second;
}

void finish_phase(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++;
  barrier.pending = barrier.count;
  wake(barrier.waiting);
}

void complete(Cta* cta, uint32_t offset, int64_t bytes) {
  Mbarrier& barrier = barrier_at(cta, offset, "completes a copy at");
  barrier.bytes -= bytes;
  finish_phase(barrier);
}

uint32_t swizzled(uint32_t address, int swizzle) {
  static const unsigned masks[] = {0, 1, 3, 7};
  return address ^ (((address >> 7) & masks[swizzle]) << 4);
}

}  // namespace

Place* self = nullptr;

void fail(const char* format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (!it.thread) stop(text);
  const Thread& thread = me();
  char place[160];
  snprintf(place, sizeof place, "thread %u of block (%u, %u, %u) ", thread.rank_in_cta, thread.block.x, thread.block.y, thread.block.z);
  stop(place + std::string(text));
}

// ---- host

namespace {
uint8_t* buffer(const char* name, size_t bytes, bool is_file) {
  if (!it.global) {
    it.global = (uint8_t*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    it.global_end = it.global + GAP;
  }
  uint8_t* begin = it.global_end;
  it.global_end = begin + (bytes + 2 * GAP) / 256 * 256;
  if (it.global_end > it.global + ARENA) stop("the arguments are too large to emulate");
  it.buffers.push_back({name, begin, bytes, is_file});
  return begin;
}
}  // namespace

void* argument(const char* name) {
  FILE* file = fopen(name, "rb");
  if (!file) stop(std::string("cannot read ") + name);
  fseek(file, 0, SEEK_END);
  size_t bytes = ftell(file);
  rewind(file);
  uint8_t* begin = buffer(name, bytes, true);
  if (fread(begin, 1, bytes, file) != bytes) stop(std::string("cannot read ") + name);
  fclose(file);
  return begin;
}

void* workspace(size_t bytes) {
  uint8_t* begin = buffer("a workspace", bytes, false);
  it.buffers.back().words.resize((bytes + 3) / 4);
  it.has_workspace = true;
  return memset(begin, 0xA5, bytes);
}

void seed(unsigned value) { it.random.seed(value); }

void save() {
  for (const Buffer& buffer : it.buffers) {
    if (!buffer.is_file) continue;
    FILE* file = fopen(buffer.name.c_str(), "wb");
    if (!file || fwrite(buffer.begin, 1, buffer.size, file) != buffer.size) stop("cannot write " + buffer.name);
    fclose(file);
  }
}

CUtensorMap tiled(const char* dtype, int rank, void* base, std::vector<int64_t> numbers) {
  static const std::map<std::string, int> sizes = {{"float16", 2}, {"bfloat16", 2}, {"float32", 4},       {"int32", 4},       {"uint8", 1},
                                                   {"int8", 1},    {"uint32", 4},   {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"uint16", 2}};
  auto size = sizes.find(dtype);
  if (size == sizes.end()) fail("a tensor map of %s", dtype);
  if (rank < 1 || rank > 5 || numbers.size() != size_t(4 * rank - 1 + 4)) fail("a tensor map of rank %d with %zu numbers", rank, numbers.size());
  CUtensorMap map{};
  map.base = (uint8_t*)base;
  map.rank = rank;
  map.element_bytes = size->second;
  auto next = numbers.begin();
  for (int i = 0; i < rank; i++) map.extent[i] = *next++;
  map.pitch[0] = map.element_bytes;
  for (int i = 1; i < rank; i++) map.pitch[i] = *next++;
  for (int i = 0; i < rank; i++) map.box[i] = *next++;
  for (int i = 0; i < rank; i++) map.box_stride[i] = *next++;
  if (*next++ != 0) fail("a tensor map with an interleaved layout");
  map.swizzle = *next++;
  int promotion = *next++, fill = *next++;
  if (map.swizzle < 0 || map.swizzle > 3 || promotion < 0 || promotion > 3 || fill < 0 || fill > 1) fail("a tensor map with an unknown swizzle, promotion or fill");
  if (size_t(base) % 16) fail("a tensor map's base is no multiple of 16 bytes");
  it.has_tails |= !it.mapped.insert({base, map.extent[0]}).second;
  int64_t last = map.element_bytes;
  for (int i = 0; i < rank; i++) {
    if (map.extent[i] < 1 || map.extent[i] > int64_t(1) << 32) fail("extent %d of a tensor map is %ld", i, long(map.extent[i]));
    if (map.box[i] < 1 || map.box[i] > 256) fail("side %d of a tensor map's box is %d; it may be 1 to 256", i, map.box[i]);
    if (map.box_stride[i] < 1 || map.box_stride[i] > 8) fail("stride %d of a tensor map's box is %d; it may be 1 to 8", i, map.box_stride[i]);
    if (i && (map.pitch[i] % 16 || map.pitch[i] >= int64_t(1) << 40)) fail("pitch %d of a tensor map is %ld bytes, no multiple of 16", i, long(map.pitch[i]));
    last += (map.extent[i] - 1) * map.pitch[i];
  }
  if (map.box_stride[0] != 1) fail("a tensor map's box has a stride along its fastest dimension, which needs an interleaved layout");
  int row = map.box[0] * map.element_bytes;
  if (row % 16) fail("rows of a tensor map's box have %d bytes, no multiple of 16", row);
  if (map.swizzle && row > 16 << map.swizzle) fail("rows of a tensor map's box have %d bytes, more than its swizzle spans", row);
  for (const Buffer& buffer : it.buffers) {
    if (map.base < buffer.begin || map.base >= buffer.begin + buffer.size) continue;
    if (map.base + last > buffer.begin + buffer.size) fail("a tensor map reaches %ld bytes into %s, which has %zu", long(map.base + last - buffer.begin), buffer.name.c_str(), buffer.size);
    return map;
  }
  fail("a tensor map of memory where no argument is");
}

namespace {

void run_thread(unsigned high, unsigned low) {
  auto* thread = (Thread*)((uint64_t(high) << 32) | low);
  (*thread->kernel)();
  Cta* cta = thread->cta;
  if (thread->mma_groups.size() || thread->issued > thread->committed_mmas) fail("ends without waiting for its wgmma");
  if (thread->stores.size() || thread->store_groups.size()) fail("ends while its copies from shared memory have not been waited for");
  for (auto& group : thread->read_groups)
    for (auto& store : group) store.write();
  if (thread->copies.size() || thread->copy_groups.size()) fail("ends without waiting for its cp.async");
  if (--cta->alive == 0) {
    if (cta->loads) fail("is the last of its CTA to end, while copies into its shared memory are under way");
    if (cta->prefetched.size()) fail("is the last of its CTA to end, which has prefetched %zu boxes that it did not load", cta->prefetched.size());
  }
  cta->cluster->alive--;
  it.stacks.push_back(thread->stack);
  thread->stack = nullptr;
  _longjmp(it.scheduler, 1);
}

void start_thread(Thread& thread) {
  if (it.stacks.empty()) {
    void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) stop("no memory for the stacks of the emulated threads");
    it.stacks.push_back(stack);
  }
  thread.stack = it.stacks.back();
  it.stacks.pop_back();
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack;
  thread.context.uc_stack.ss_size = STACK;
  thread.context.uc_link = nullptr;
  auto address = uint64_t(&thread);
  makecontext(&thread.context, (void (*)())run_thread, 2, unsigned(address >> 32), unsigned(address));
  it.ready.push_back(&thread);
}

std::unique_ptr<Cluster> start_cluster(Index3 first, std::function<void()>& kernel) {
  const Launch& launch = it.launch;
  auto cluster = std::make_unique<Cluster>();
  unsigned threads = launch.block.x * launch.block.y * launch.block.z;
  unsigned size = launch.cluster.x * launch.cluster.y * launch.cluster.z;
  for (unsigned rank = 0; rank < size; rank++) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get();
    cta->rank = rank;
    size_t slot = std::find(it.owners.begin(), it.owners.end(), nullptr) - it.owners.begin();
    it.owners[slot] = cta.get();
    cta->shared = it.shared + slot * SLOT;
    memset(cta->shared, 0xA5, SLOT);
    cta->warps.resize((threads + 31) / 32);
    for (Warp& warp : cta->warps) warp.id = it.warps++;
    cta->warpgroups.resize((threads + 127) / 128);
    cta->alive = threads;
    Index3 block{first.x + rank % launch.cluster.x, first.y + rank / launch.cluster.x % launch.cluster.y, first.z + rank / launch.cluster.x / launch.cluster.y};
    for (unsigned i = 0; i < threads; i++) {
      auto thread = std::make_unique<Thread>();
      thread->thread = {i % launch.block.x, i / launch.block.x % launch.block.y, i / launch.block.x / launch.block.y};
      thread->block = block;
      thread->block_extent = launch.block;
      thread->grid_extent = launch.grid;
      thread->rank_in_cta = i;
      thread->rank_in_cluster = rank;
      thread->ctas_in_cluster = size;
      thread->cta = cta.get();
      thread->kernel = &kernel;
      start_thread(*thread);
      cta->threads.push_back(std::move(thread));
    }
    cluster->ctas.push_back(std::move(cta));
  }
  cluster->alive = threads * size;
  return cluster;
}

[[noreturn]] void deadlock(const std::vector<std::unique_ptr<Cluster>>& clusters) {
  std::map<std::string, std::pair<unsigned, std::string>> reasons;
  for (auto& cluster : clusters)
    for (auto& cta : cluster->ctas)
      for (auto& thread : cta->threads) {
        if (!thread->stack) continue;
        auto& [count, first] = reasons[thread->waits_for()];
        if (count++ == 0) first = "thread " + std::to_string(thread->rank_in_cta) + " of block " + std::to_string(thread->block.x);
      }
  std::string text = "deadlock:";
  for (auto& [why, found] : reasons) text += " " + std::to_string(found.first) + " threads (first " + found.second + ") wait for " + why + ";";
  stop(text);
}

}  // namespace

void launch(const Launch& launch, std::function<void()> kernel) {
  it.launch = launch;
  it.launches++, it.warps = 0;
  for (Buffer& buffer : it.buffers) buffer.released.clear();
  if (launch.shared_bytes > (227 << 10)) stop("the kernel asks for " + std::to_string(launch.shared_bytes) + " bytes of shared memory; there are 232448");
  unsigned size = launch.cluster.x * launch.cluster.y * launch.cluster.z, threads = launch.block.x * launch.block.y * launch.block.z;
  if (threads > 1024 || size > 8) stop("a block of " + std::to_string(threads) + " threads in a cluster of " + std::to_string(size));
  if (launch.grid.x % launch.cluster.x || launch.grid.y % launch.cluster.y || launch.grid.z % launch.cluster.z) stop("the grid is no multiple of the cluster");
  size_t resident = std::max<size_t>(1, RESIDENT / (size * threads));
  if (!it.shared) {
    it.shared = (uint8_t*)mmap(nullptr, 64 * SLOT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  it.owners.assign(std::min<size_t>(64, resident * size), nullptr);
  resident = it.owners.size() / size;
  std::deque<Index3> todo;
  for (unsigned z = 0; z < launch.grid.z; z += launch.cluster.z)
    for (unsigned y = 0; y < launch.grid.y; y += launch.cluster.y)
      for (unsigned x = 0; x < launch.grid.x; x += launch.cluster.x) todo.push_back({x, y, z});
  std::vector<std::unique_ptr<Cluster>> running;
  while (true) {
    std::erase_if(running, [](auto& cluster) {
      if (cluster->alive) return false;
      for (auto& cta : cluster->ctas) *std::find(it.owners.begin(), it.owners.end(), cta.get()) = nullptr;
      return true;
    });
    while (running.size() < resident && !todo.empty()) {
      running.push_back(start_cluster(todo.front(), kernel));
      todo.pop_front();
    }
    if (running.empty()) break;
    // Who polls in a loop is always ready: copies arrive all the same.
    if (it.ready.empty() || (it.polls > PATIENCE && !it.late.empty())) {
      it.polls = 0;
      if (it.late.empty()) deadlock(running);
      size_t pick = it.random() % it.late.size();
      auto happens = std::move(it.late[pick]);
      it.late.erase(it.late.begin() + pick);
      happens();
      continue;
    }
    std::swap(it.ready[it.random() % it.ready.size()], it.ready.back());
    it.thread = it.ready.back();
    it.ready.pop_back();
    self = it.thread;
    go_on(*it.thread);
    it.thread = nullptr;
    self = nullptr;
  }
}

// ---- memory

uint8_t* dynamic_shared() { return me().cta->shared + BASE; }

uint32_t to_shared(const void* address) {
  Cta* cta = owner_of(address);
  if (!cta) fail("takes for shared memory what is none");
  uint32_t offset = (const uint8_t*)address - cta->shared;
  return cta == me().cta ? offset : offset | ((cta->rank + 1) << TAG);
}

void* from_shared(uint32_t address) { return target_of(address)->shared + offset_of(address); }

uint32_t map_shared(uint32_t address, unsigned rank) {
  if (rank >= me().ctas_in_cluster) fail("maps an address into CTA %u of a cluster of %u", rank, me().ctas_in_cluster);
  return offset_of(address) | ((rank + 1) << TAG);
}

uint64_t map_generic(uint64_t address, unsigned rank) { return (uint64_t)from_shared(map_shared(to_shared((void*)address), rank)); }

void load(uint32_t address, void* to, unsigned bytes) {
  auto* from = (uint8_t*)from_shared(address);
  if (size_t(from) % bytes) fail("reads %u bytes at an address that is no multiple of it", bytes);
  ordinary_shared(from, bytes, false);
  memcpy(to, from, bytes);
}

void store(uint32_t address, const void* from, unsigned bytes) {
  auto* to = (uint8_t*)from_shared(address);
  if (size_t(to) % bytes) fail("writes %u bytes at an address that is no multiple of it", bytes);
  ordinary_shared(to, bytes, true);
  memcpy(to, from, bytes);
}

void touch_global(const void* address, unsigned bytes, bool is_write) { access((void*)address, bytes, is_write, true); }

namespace {
void strong(const void* address, unsigned bytes, bool is_write) {
  if (owner_of(address)) return ordinary_shared((uint8_t*)address, bytes, is_write);
  auto* at = (const uint8_t*)address;
  if (size_t(at) % bytes) fail("%s %u bytes at an address that is no multiple of it", is_write ? "writes" : "reads", bytes);
  check_global(at, bytes, is_write);
  Buffer* buffer = workspace_at(at);
  if (!buffer) return;
  Word& word = buffer->words[(at - buffer->begin) / 4];
  if (!is_write && !word.launch) fail("reads byte %ld of a workspace, which nobody has written", long(at - buffer->begin));
  // A plain value is nobody's release.
  if (is_write) buffer->released.erase(at), word = {it.launches, my_warp().id, 0};
}
}  // namespace

void strong_load(const void* address, void* to, unsigned bytes) {
  if (it.launch.has_pdl && it.thread && !me().cta->has_waited_for_preceding && !owner_of(address)) {
    // The preceding kernel may still write there: any value comes, now and then the last one. A kernel may use it as a hint alone.
    check_argument((const uint8_t*)address, bytes, "reads");
    memcpy(to, address, bytes);
    for (unsigned i = 0, any = it.random() % 2; any && i < bytes; i++) ((uint8_t*)to)[i] = it.random();
    return;
  }
  strong(address, bytes, false);
  memcpy(to, address, bytes);
}

void strong_store(void* address, const void* from, unsigned bytes) {
  strong(address, bytes, true);
  memcpy(address, from, bytes);
}

void release(const void* address) {
  if (Buffer* buffer = workspace_at((const uint8_t*)address)) tell(buffer->released[(const uint8_t*)address]);
}

void acquire(const void* address) {
  Buffer* buffer = workspace_at((const uint8_t*)address);
  auto found = buffer ? buffer->released.find((const uint8_t*)address) : std::map<const uint8_t*, Clock>::iterator();
  if (buffer && found != buffer->released.end()) learn(found->second);
}

void give_way() {
  if (++me().spins > 1000000) fail("has looked a million times for what nobody does");
  it.polls++;
  it.ready.push_back(it.thread);
  leave();
}

// ---- synchronisation

void sync_named(unsigned id, unsigned threads, bool is_waiting) {
  Cta* cta = me().cta;
  if (id > 15) fail("uses named barrier %u; there are 16", id);
  if (threads == 0) threads = cta->threads.size();
  if (threads % 32) fail("uses named barrier %u for %u threads, no multiple of a warp", id, threads);
  meet(cta->named[id], threads, "named barrier " + std::to_string(id), [] {}, is_waiting);
}

void sync_cta() { sync_named(0, 0, true); }

int sync_and_count(bool counts) {
  Cta* cta = me().cta;
  cta->counted += counts;
  meet(cta->named[0], cta->threads.size(), "named barrier 0", [cta] { cta->reached = std::exchange(cta->counted, 0); }, true);
  return cta->reached;
}

namespace {
template <class Last>
void meet_warp(const char* name, Last last) {
  Cta* cta = me().cta;
  unsigned first = me().rank_in_cta / 32 * 32, lanes = std::min<unsigned>(32, cta->threads.size() - first);
  meet(my_warp().rendezvous, lanes, std::string("the rest of its warp at ") + name, [&] {
    for (unsigned lane = 0; lane < lanes; lane++) cta->threads[first + lane]->waits = 0;
    last();
  });
}
}  // namespace

void sync_warp() { meet_warp("__syncwarp", [] {}); }

void cluster_arrive(bool is_aligned) {
  Cluster* cluster = me().cta->cluster;
  if (is_aligned) {
    // A lane that has waited alone may come back later than the others.
    Warp& warp = my_warp();
    if (warp.aligned == 0) warp.waits = me().waits;
    if (warp.waits != me().waits) fail("comes to an aligned barrier of the cluster without its warp, since only some lanes have waited before");
    warp.aligned = (warp.aligned + 1) % std::min<unsigned>(32, me().cta->threads.size());
  }
  if (me().arrived_in_cluster) fail("arrives twice at the cluster's barrier without waiting");
  me().arrived_in_cluster = true;
  me().cluster_round = cluster->round;
  unsigned all = 0;
  for (auto& cta : cluster->ctas) all += cta->threads.size();
  meet(cluster->rendezvous, all, "the cluster", [&] { cluster->round++; }, false);
}

void cluster_wait() {
  Cluster* cluster = me().cta->cluster;
  if (!me().arrived_in_cluster) fail("waits for the cluster without having arrived");
  me().arrived_in_cluster = false;
  if (cluster->round == me().cluster_round) wait_in(cluster->rendezvous.waiting, [] { return "the cluster"; });
  learn(cluster->rendezvous.clock);
}

bool elected() { return me().rank_in_cta % 32 == 0; }

void barrier_init(uint32_t address, unsigned count) {
  if (count == 0 || count >= 1u << 20) fail("initialises a barrier for %u arrivals", count);
  if (address % 8) fail("initialises a barrier at an address that is no multiple of 8");
  uint8_t* place = me().cta->shared + address;
  check_data(place, 8, "initialises a barrier in", true);
  for (int i = 0; i < 8; i++) known(place)[i].state |= BARRIER;
  me().cta->barriers[address] = Mbarrier{count, count};
}

void barrier_invalidate(uint32_t address) {
  barrier_at(me().cta, address, "invalidates");
  me().cta->barriers.erase(address);
  for (int i = 0; i < 8; i++) known(me().cta->shared + address)[i].state &= ~BARRIER;
}

void barrier_arrive(uint32_t address, unsigned count, int64_t expected_bytes) {
  Cta* cta = target_of(address);
  if (!cta->alive) fail("arrives at a barrier of a CTA that has left");
  Mbarrier& barrier = barrier_at(cta, offset_of(address), "arrives at");
  if (count > barrier.pending) fail("arrives at the barrier at byte %ld of shared memory more often than its %u times", long(offset_of(address)) - long(BASE), barrier.count);
  barrier.bytes += expected_bytes;
  barrier.pending -= count;
  tell(barrier.clock);
  finish_phase(barrier);
}

bool barrier_wait(uint32_t address, unsigned parity) {
  if (parity > 1) fail("waits for parity %u of a barrier", parity);
  while ((barrier_at(me().cta, address, "waits for").phase & 1) == parity) {
    Mbarrier& barrier = barrier_at(me().cta, address, "waits for");
    auto why = [&barrier, address, parity] {
      char text[200];
      snprintf(text, sizeof text, "parity %u of the barrier at byte %ld of shared memory (phase %u, %u of %u arrivals and %ld bytes missing)", parity,
               long(address) - long(BASE), barrier.phase, barrier.pending, barrier.count, long(barrier.bytes));
      return std::string(text);
    };
    wait_in(barrier.waiting, why);
  }
  me().spins = 0;
  me().waits++;
  learn(barrier_at(me().cta, address, "waits for").clock);
  return true;
}

bool barrier_test(uint32_t address, unsigned parity) {
  bool is_over = (barrier_at(me().cta, address, "looks at").phase & 1) != parity;
  if (!is_over) return barrier_wait(address, parity);
  learn(barrier_at(me().cta, address, "looks at").clock);
  return true;
}

void shuffle(const void* mine, void* theirs, unsigned bytes, unsigned lane) {
  Warp& warp = my_warp();
  // Two rounds of slots: nobody can be two ahead of a lane that still reads.
  unsigned round = warp.round & 1;
  warp.slots[round][me().rank_in_cta % 32].assign((const uint8_t*)mine, (const uint8_t*)mine + bytes);
  meet_warp("a shuffle", [&] { warp.round++; });
  // What a lane gets of one that its block's last warp lacks is undefined: its own.
  bool is_there = me().rank_in_cta / 32 * 32 + lane % 32 < me().cta->threads.size();
  memcpy(theirs, is_there ? warp.slots[round][lane % 32].data() : mine, bytes);
}

void fence_proxy() {
  for (const Range& range : me().unfenced) {
    Cta* cta = owner_of(range.begin);
    if (!cta) continue;
    Byte* bytes = known(range.begin);
    for (size_t i = 0; i < range.size; i++)
      if (bytes[i].writer == me().rank_in_cta) bytes[i].state &= ~UNFENCED;
  }
  me().unfenced.clear();
  me().fence_time = ++it.time;
}

// No access: it may come before the wait, but names an argument's bytes.
void prefetch(const void* address, unsigned bytes, unsigned alignment) {
  if (size_t(address) % alignment || bytes % alignment) fail("prefetches %u bytes at an address, where both should be multiples of %u", bytes, alignment);
  check_argument((const uint8_t*)address, bytes, "prefetches");
}

void wait_for_preceding() { me().cta->has_waited_for_preceding = true; }

void set_registers(unsigned count, bool) {
  if (count < 24 || count > 256 || count % 8) fail("sets its registers to %u", count);
  meet_warp("setmaxnreg", [] {});
}

// ---- copies by the asynchronous proxy

namespace {

struct Box {
  int sides[5] = {1, 1, 1, 1, 1};
  int64_t elements = 1;
};

Box box_of(const CUtensorMap& map) {
  Box box;
  for (int i = 0; i < map.rank; i++) box.sides[i] = (map.box[i] + map.box_stride[i] - 1) / map.box_stride[i], box.elements *= box.sides[i];
  return box;
}

// Calls f(element's place in the box, its address in global memory or null) for each element.
template <class F>
void each(const CUtensorMap& map, const std::array<int, 5>& at, F f) {
  Box box = box_of(map);
  for (int64_t element = 0; element < box.elements; element++) {
    int64_t rest = element, offset = 0;
    bool is_inside = true;
    for (int i = 0; i < map.rank; i++) {
      int64_t index = at[i] + rest % box.sides[i] * map.box_stride[i];
      rest /= box.sides[i];
      is_inside &= index >= 0 && index < map.extent[i];
      offset += index * map.pitch[i];
    }
    f(element, is_inside ? map.base + offset : nullptr);
  }
}

std::array<int, 5> place_of(const CUtensorMap& map, int rank, std::initializer_list<int> at) {
  if (map.rank != rank) fail("copies by %dd with a tensor map of rank %d", rank, map.rank);
  std::array<int, 5> place{};
  std::copy(at.begin(), at.end(), place.begin());
  if (place[0] * map.element_bytes % 16)  // an illegal instruction on an H200
    fail("a copy starts %d bytes into its tensor's rows, no multiple of 16", place[0] * map.element_bytes);
  return place;
}

std::vector<Cta*> targets_of(uint32_t address, int mask) {
  if (mask < 0) return {target_of(address)};
  std::vector<Cta*> targets;
  auto& ctas = me().cta->cluster->ctas;
  if (mask >> ctas.size()) fail("multicasts to CTA mask %x of a cluster of %zu", mask, ctas.size());
  for (size_t rank = 0; rank < ctas.size(); rank++)
    if (mask >> rank & 1) targets.push_back(ctas[rank].get());
  return targets;
}

void check_place(const CUtensorMap& map, uint32_t offset) {
  if (offset % 128) fail("copies a box to or from shared memory at byte %ld, no multiple of 128", long(offset) - long(BASE));
  (void)map;
}

void fill_late(std::vector<Cta*> targets, uint32_t offset, size_t bytes, uint32_t barrier, std::function<void(uint8_t*)> fill) {
  for (Cta* cta : targets) {
    if (!cta->alive) fail("copies into shared memory of a CTA that has left");
    barrier_at(cta, barrier, "copies towards");
    begin_fill({cta->shared + offset, bytes}, "copies into");
    cta->loads++;
    it.late.push_back([=] {
      fill(cta->shared);
      end_fill({cta->shared + offset, bytes});
      cta->loads--;
      complete(cta, barrier, bytes);
    });
  }
}

void note_global(const void* address, size_t bytes, bool is_write) {
  if (bytes) check_global((const uint8_t*)address, bytes, is_write);
}

}  // namespace

void tensor_load(int rank, uint32_t to, const void* tensor, std::initializer_list<int> at, uint32_t barrier, int mask) {
  auto& map = *(const CUtensorMap*)tensor;
  auto place = place_of(map, rank, at);
  me().cta->prefetched.erase({tensor, place});
  note_global(map.base, map.element_bytes, false);
  uint32_t offset = offset_of(to);
  check_place(map, offset);
  size_t bytes = box_of(map).elements * map.element_bytes;
  fill_late(targets_of(to, mask), offset, bytes, offset_of(barrier), [map, place, offset](uint8_t* shared) {
    each(map, place, [&](int64_t element, const uint8_t* from) {
      uint8_t* target = shared + swizzled(offset + element * map.element_bytes, map.swizzle);
      if (from) memcpy(target, from, map.element_bytes);
      else memset(target, 0, map.element_bytes);
    });
  });
}

// No access, also before griddepcontrol.wait; a kernel should ask for nothing but what it loads.
void tensor_prefetch(int rank, const void* tensor, std::initializer_list<int> at) {
  me().cta->prefetched.insert({tensor, place_of(*(const CUtensorMap*)tensor, rank, at)});
}

void store_async(uint32_t to, const void* from, unsigned bytes, uint32_t barrier) {
  if (target_of(to) != target_of(barrier)) fail("stores to one CTA and completes a barrier of another");
  std::vector<uint8_t> value((const uint8_t*)from, (const uint8_t*)from + bytes);
  uint32_t offset = offset_of(to);
  if (offset % bytes) fail("writes %u bytes at an address that is no multiple of it", bytes);
  fill_late({target_of(to)}, offset, bytes, offset_of(barrier), [=](uint8_t* shared) { memcpy(shared + offset, value.data(), bytes); });
}

void bulk_load(uint32_t to, const void* from, unsigned bytes, uint32_t barrier, int mask) {
  if (bytes % 16 || offset_of(to) % 16 || size_t(from) % 16) fail("copies %u bytes in bulk; size and addresses must be multiples of 16", bytes);
  note_global(from, bytes, false);
  uint32_t offset = offset_of(to);
  fill_late(targets_of(to, mask), offset, bytes, offset_of(barrier), [=](uint8_t* shared) { memcpy(shared + offset, from, bytes); });
}

namespace {
template <class T>
void add_to(uint8_t* to, const uint8_t* value) {
  T a, b;
  memcpy(&a, to, sizeof a);
  memcpy(&b, value, sizeof b);
  a = T(a + b);
  memcpy(to, &a, sizeof a);
}
}  // namespace

void tensor_store(int rank, const void* tensor, std::initializer_list<int> at, uint32_t from, bool adds) {
  auto map = *(const CUtensorMap*)tensor;
  auto place = place_of(map, rank, at);
  note_global(map.base, map.element_bytes, true);
  int64_t line = map.extent[0] * map.element_bytes;
  if (line % 16) fail("stores lines of %ld bytes by a tensor map; TMA writes 16 bytes at once, also beyond the last of them", long(line));
  if (adds && map.element_bytes != 4) fail("adds elements of %d bytes; the emulator adds float32", map.element_bytes);
  check_place(map, from);
  uint8_t* shared = me().cta->shared;
  size_t bytes = box_of(map).elements * map.element_bytes;
  auto kept = std::make_shared<std::vector<uint8_t>>();
  BulkStore store;
  store.reads = {{shared + from, bytes}};
  begin_read(store.reads[0], "copies from");
  store.read = [=] {
    kept->resize(bytes);
    for (int64_t i = 0; i < int64_t(bytes); i += map.element_bytes) memcpy(kept->data() + i, shared + swizzled(from + i, map.swizzle), map.element_bytes);
  };
  store.write = [=] {
    each(map, place, [&](int64_t element, uint8_t* to) {
      const uint8_t* value = kept->data() + element * map.element_bytes;
      if (to && adds) add_to<float>(to, value);
      else if (to) memcpy(to, value, map.element_bytes);
    });
  };
  me().stores.push_back(std::move(store));
}

void bulk_store(const void* to, uint32_t from, unsigned bytes) {
  if (bytes % 16 || from % 16 || size_t(to) % 16) fail("copies %u bytes in bulk; size and addresses must be multiples of 16", bytes);
  note_global(to, bytes, true);
  uint8_t* shared = me().cta->shared;
  auto kept = std::make_shared<std::vector<uint8_t>>(bytes);
  BulkStore store;
  store.reads = {{shared + from, bytes}};
  begin_read(store.reads[0], "copies from");
  store.read = [=] { memcpy(kept->data(), shared + from, bytes); };
  store.write = [=] { memcpy((void*)to, kept->data(), bytes); };
  me().stores.push_back(std::move(store));
}

void bulk_commit() {
  me().store_groups.push_back(std::move(me().stores));
  me().stores.clear();
}

void bulk_wait(unsigned left, bool is_read_only) {
  Thread& thread = me();
  while (thread.store_groups.size() > left) {
    for (auto& store : thread.store_groups.front()) {
      store.read();
      for (const Range& range : store.reads) end_read(range);
    }
    thread.read_groups.push_back(std::move(thread.store_groups.front()));
    thread.store_groups.pop_front();
  }
  if (is_read_only) return;
  for (auto& group : thread.read_groups)
    for (auto& store : group) store.write();
  thread.read_groups.clear();
}

// ---- copies by threads

namespace {
void do_copies(std::vector<Copy>& copies) {
  for (Copy& copy : copies) {
    end_fill({copy.to, copy.bytes});
    memset(copy.to, 0, copy.bytes);
    memcpy(copy.to, copy.from, copy.source_bytes);
  }
}
}  // namespace

void copy_async(uint32_t to, const void* from, unsigned bytes, unsigned source_bytes) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("copies %u bytes by cp.async", bytes);
  if (offset_of(to) % bytes || (source_bytes && size_t(from) % bytes)) fail("copies %u bytes by cp.async between addresses that are no multiples of it", bytes);
  if (source_bytes > bytes) fail("copies %u of %u bytes by cp.async", source_bytes, bytes);
  if (source_bytes) check_global((const uint8_t*)from, source_bytes, false);
  auto* target = (uint8_t*)from_shared(to);
  begin_fill({target, bytes}, "copies into");
  me().copies.push_back({target, (const uint8_t*)from, bytes, source_bytes});
}

void copy_commit() {
  me().copy_groups.push_back(std::move(me().copies));
  me().copies.clear();
}

void copy_wait(unsigned left) {
  while (me().copy_groups.size() > left) {
    do_copies(me().copy_groups.front());
    for (Copy& copy : me().copy_groups.front()) mark_written(copy.to, copy.bytes);
    me().copy_groups.pop_front();
  }
}

void copy_arrive(uint32_t address, bool is_counted) {
  Thread* thread = it.thread;
  Cta* cta = thread->cta;
  Mbarrier& barrier = barrier_at(cta, address, "arrives at");
  if (!is_counted) barrier.pending++;
  auto copies = std::make_shared<std::vector<Copy>>();
  for (auto& group : thread->copy_groups) copies->insert(copies->end(), group.begin(), group.end());
  copies->insert(copies->end(), thread->copies.begin(), thread->copies.end());
  thread->copy_groups.clear();
  thread->copies.clear();
  cta->loads++;
  it.late.push_back([=] {
    do_copies(*copies);
    it.thread = thread;
    for (Copy& copy : *copies) mark_written(copy.to, copy.bytes);
    it.thread = nullptr;
    cta->loads--;
    Mbarrier& late = barrier_at(cta, address, "arrives at");
    if (late.pending == 0) stop("cp.async arrives at a barrier more often than it may");
    late.pending--;
    finish_phase(late);
  });
}

// ---- matrices of 8 x 8 elements of 16 bits

void matrix_store(uint32_t row, const std::vector<uint32_t>& parts, bool is_transposed) {
  Warp& warp = my_warp();
  unsigned lane = me().rank_in_cta % 32;
  warp.rows[lane] = row;
  warp.parts[lane] = parts;
  meet_warp("stmatrix", [&] {
    for (size_t i = 0; i < parts.size(); i++)
      for (int r = 0; r < 8; r++) {
        uint32_t at = warp.rows[8 * i + r];
        if (at % 16) fail("stores a row of a matrix at an address that is no multiple of 16");
        auto* to = (uint8_t*)from_shared(at);
        check_data(to, 16, "writes", true);
        for (int c = 0; c < 8; c++) {
          int holder = is_transposed ? c * 4 + r / 2 : r * 4 + c / 2, half = is_transposed ? r % 2 : c % 2;
          uint16_t value = warp.parts[holder][i] >> (16 * half);
          memcpy(to + 2 * c, &value, 2);
        }
        // Each row counts as written by the lane that gave its address.
        Thread* last = it.thread;
        it.thread = last->cta->threads[last->rank_in_cta / 32 * 32 + 8 * i + r].get();
        mark_written(to, 16);
        it.thread = last;
      }
  });
}

void matrix_load(const std::vector<uint32_t*>& parts, uint32_t row, bool is_transposed) {
  Warp& warp = my_warp();
  unsigned lane = me().rank_in_cta % 32;
  warp.rows[lane] = row;
  warp.targets[lane] = parts;
  meet_warp("ldmatrix", [&] {
    for (size_t i = 0; i < parts.size(); i++)
      for (int r = 0; r < 8; r++) {
        uint32_t at = warp.rows[8 * i + r];
        if (at % 16) fail("loads a row of a matrix from an address that is no multiple of 16");
        auto* from = (uint8_t*)from_shared(at);
        ordinary_shared(from, 16, false);
        for (int c = 0; c < 8; c++) {
          int holder = is_transposed ? c * 4 + r / 2 : r * 4 + c / 2, half = is_transposed ? r % 2 : c % 2;
          memcpy((uint8_t*)warp.targets[holder][i] + 2 * half, from + 2 * c, 2);
        }
      }
  });
}

// ---- wgmma

namespace {

int bytes_of(Type type) {
  switch (type) {
    case Type::f16:
    case Type::bf16: return 2;
    case Type::tf32: return 4;
    case Type::f64: return 8;
    default: return 1;
  }
}

float value_of(const uint8_t* from, Type type) {
  switch (type) {
    case Type::f16: return __half2float(*(const __half*)from);
    case Type::bf16: return __bfloat162float(*(const __nv_bfloat16*)from);
    case Type::e4m3: return float(*(const __nv_fp8_e4m3*)from);
    case Type::e5m2: return float(*(const __nv_fp8_e5m2*)from);
    case Type::s8: return *(const int8_t*)from;
    case Type::u8: return *from;
    case Type::tf32: {
      uint32_t word;
      memcpy(&word, from, 4);
      word &= ~0x1fffu;  // the tensor core ignores the lower bits of the mantissa
      float value;
      memcpy(&value, &word, 4);
      return value;
    }
    default: fail("multiplies operands of a type that wgmma does not take");
  }
}

struct Descriptor {
  uint32_t start, leading, stride;
  int swizzle;  // as in tensor maps
};

Descriptor decoded(uint64_t word) {
  static const int swizzles[] = {0, 3, 2, 1};
  if (word >> 49 & 7) fail("uses a matrix descriptor with a base offset");
  return {uint32_t(word & 0x3fff) << 4, uint32_t(word >> 16 & 0x3fff) << 4, uint32_t(word >> 32 & 0x3fff) << 4, swizzles[word >> 62]};
}

// Address within the CTA of the 16 bytes that begin at row (of m or n) and byte along k, or the other way round.
uint32_t chunk_at(const Descriptor& d, bool is_by_mn, int mn, int k, int bytes) {
  uint32_t address;
  if (!is_by_mn) {
    int along = k * bytes;
    address = d.swizzle ? d.start + mn / 8 * d.stride + mn % 8 * (16 << d.swizzle) + along
                        : d.start + mn / 8 * d.stride + mn % 8 * 16 + along / 16 * d.leading + along % 16;
  } else if (d.swizzle) {
    int span = (16 << d.swizzle) / bytes;
    address = d.start + mn / span * d.leading + k / 8 * d.stride + k % 8 * (16 << d.swizzle) + mn % span * bytes;
  } else {
    address = d.start + mn / 8 * d.stride + k / 8 * d.leading + k % 8 * 16 + mn % 8 * bytes;
  }
  return swizzled(address, d.swizzle);
}

std::vector<Range> ranges_of(Cta* cta, uint64_t word, bool is_by_mn, int rows, int k, int bytes) {
  Descriptor d = decoded(word);
  std::vector<Range> ranges;
  int step = 16 / bytes;
  for (int mn = 0; mn < rows; mn += is_by_mn ? step : 1)
    for (int j = 0; j < k; j += is_by_mn ? 1 : step) ranges.push_back({cta->shared + chunk_at(d, is_by_mn, mn, j, bytes), 16});
  return ranges;
}

// rows x k, from shared memory.
std::vector<float> operand_of(Cta* cta, uint64_t word, bool is_by_mn, int rows, int k, Type type) {
  Descriptor d = decoded(word);
  int bytes = bytes_of(type);
  float anything = type == Type::s8 || type == Type::u8 ? 77 : NAN;
  std::vector<float> values(size_t(rows) * k);
  for (int mn = 0; mn < rows; mn++)
    for (int j = 0; j < k; j++) {
      const uint8_t* at = cta->shared + chunk_at(d, is_by_mn, mn, j, bytes);
      values[size_t(mn) * k + j] = known(at)->state & WRITTEN ? value_of(at, type) : anything;
    }
  return values;
}

void multiply(Cta* cta, Wgmma& wgmma) {
  const Mma& p = wgmma.mma;
  int bytes = bytes_of(p.a);
  std::vector<float> a(64 * p.k), b = operand_of(cta, wgmma.b, p.b_by_mn, p.n, p.k, p.b);
  if (wgmma.in_registers) {
    int each = 4 / bytes;
    for (int t = 0; t < 128; t++)
      for (int r = 0; r < 4; r++)
        for (int e = 0; e < each; e++)
          a[(t / 32 * 16 + t % 32 / 4 + 8 * (r % 2)) * p.k + (r / 2) * p.k / 2 + t % 4 * each + e] = value_of((uint8_t*)&wgmma.registers[t][r] + e * bytes, p.a);
  } else {
    a = operand_of(cta, wgmma.a, p.a_by_mn, 64, p.k, p.a);
  }
  std::vector<float> transposed(b.size());
  for (int n = 0; n < p.n; n++)
    for (int k = 0; k < p.k; k++) transposed[size_t(k) * p.n + n] = b[size_t(n) * p.k + k];
  std::vector<float> row_d(p.n);
  for (int m = 0; m < 64; m++) {
    std::fill(row_d.begin(), row_d.end(), 0.0f);
    for (int k = 0; k < p.k; k++) {
      float element_a = a[m * p.k + k] * float(p.sign_a * p.sign_b);
      const float* row_b = &transposed[size_t(k) * p.n];
      for (int n = 0; n < p.n; n++) row_d[n] += element_a * row_b[n];
    }
    for (int n = 0; n < p.n; n++) {
      int thread = m / 16 * 32 + m % 8 * 4 + n % 8 / 2, element = n / 8 * 4 + m % 16 / 8 * 2 + n % 2;
      if (p.accum == Type::f16) {
        auto* to = (__half*)wgmma.accumulators[thread][element / 2] + element % 2;
        *to = __float2half(p.accumulates ? __half2float(*to) + row_d[n] : row_d[n]);
      } else if (p.accum == Type::s32) {
        auto* to = (int32_t*)wgmma.accumulators[thread][element];
        *to = (p.accumulates ? *to : 0) + int32_t(row_d[n]);
      } else {
        auto* to = (float*)wgmma.accumulators[thread][element];
        *to = p.accumulates ? *to + row_d[n] : row_d[n];
      }
    }
  }
}

Warpgroup& my_warpgroup() { return me().cta->warpgroups[me().rank_in_cta / 128]; }

}  // namespace

// ---- mma.sync

void mma_sync(const MmaSync& shape, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, std::vector<uint8_t>& c) {
  Warp& warp = my_warp();
  unsigned lane = me().rank_in_cta % 32, round = warp.round & 1;
  warp.slots[round][lane].assign(a.begin(), a.end());
  warp.slots[round][lane].insert(warp.slots[round][lane].end(), b.begin(), b.end());
  meet_warp("mma.sync", [&] { warp.round++; });
  int bytes = bytes_of(shape.operand), width = std::max(4, bytes), each = width / bytes, bands = shape.m / 8;
  auto element = [&](int holder, int reg, int place) {
    const uint8_t* from = warp.slots[round][holder].data() + width * reg + bytes * place;
    return shape.operand == Type::f64 ? *(const double*)from : double(value_of(from, shape.operand));
  };
  for (int i = 0; i < 2 * bands; i++) {
    int row = lane / 4, band = i / 2, column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < shape.k; k++) {
      int part = k / (4 * each), holder = k % (4 * each) / each, place = k % each;
      sum += element(row * 4 + holder, part * bands + band, place) * element(column * 4 + holder, int(a.size()) / width + part, place);
    }
    switch (shape.accum) {
      case Type::f32: ((float*)c.data())[i] += sum; break;
      case Type::f16: ((__half*)c.data())[i] = __float2half(__half2float(((__half*)c.data())[i]) + float(sum)); break;
      case Type::s32: ((int32_t*)c.data())[i] += int32_t(sum); break;
      case Type::f64: ((double*)c.data())[i] += sum; break;
      default: fail("accumulates in a type that mma.sync does not have");
    }
  }
}

void wgmma_fence() { me().has_wgmma_fence = true; }

void wgmma(const Mma& mma, std::vector<void*> accumulators, Operand a, uint64_t b) {
  Thread& thread = me();
  if (!thread.has_wgmma_fence) fail("multiplies without wgmma.fence after its accumulators were waited for");
  size_t expected = mma.accum == Type::f16 ? mma.n / 4 : mma.n / 2;
  if (accumulators.size() != expected || mma.n % 8 || mma.k * bytes_of(mma.a) != 32) fail("multiplies m64n%dk%d with %zu accumulator registers", mma.n, mma.k, accumulators.size());
  if ((mma.a_by_mn || mma.b_by_mn) && bytes_of(mma.a) != 2) fail("transposes operands that have no 16 bits");
  Warpgroup& group = my_warpgroup();
  if (thread.issued == group.mmas.size()) {
    auto made = std::make_unique<Wgmma>();
    made->mma = mma;
    made->a = a.descriptor;
    made->b = b;
    made->in_registers = a.in_registers;
    Cta* cta = thread.cta;
    if (!a.in_registers) made->reads = ranges_of(cta, a.descriptor, mma.a_by_mn, 64, mma.k, bytes_of(mma.a));
    auto more = ranges_of(cta, b, mma.b_by_mn, mma.n, mma.k, bytes_of(mma.b));
    made->reads.insert(made->reads.end(), more.begin(), more.end());
    // Rows beyond a tensor's last one, which a map with smaller boxes leaves out, may hold anything.
    if (it.has_tails) std::erase_if(made->reads, [](const Range& range) { return !known(range.begin)->fillers && !(known(range.begin)->state & WRITTEN); });
    for (const Range& range : made->reads) begin_read(range, "multiplies out of");
    group.mmas.push_back(std::move(made));
  }
  Wgmma& common = *group.mmas[thread.issued++];
  if (common.a != a.descriptor || common.b != b || common.mma.n != mma.n || common.mma.accumulates != mma.accumulates)
    fail("multiplies something else than the rest of its warpgroup");
  common.accumulators[thread.rank_in_cta % 128] = std::move(accumulators);
  common.registers[thread.rank_in_cta % 128] = a.registers;
  if (++common.issued == 128) wake(common.waiting);
}

void wgmma_commit() {
  me().mma_groups.push_back(me().issued);
  me().committed_mmas = me().issued;
}

void wgmma_wait(unsigned left) {
  Thread& thread = me();
  Warpgroup& group = my_warpgroup();
  if (left == 0) thread.has_wgmma_fence = false;
  while (thread.mma_groups.size() > left) {
    size_t until = thread.mma_groups.front();
    thread.mma_groups.pop_front();
    while (group.done < until) {
      Wgmma& next = *group.mmas[group.done];
      if (next.issued < 128) {
        wait_in(next.waiting, [] { return "the rest of its warpgroup at wgmma"; });
        continue;
      }
      group.done++;
      multiply(thread.cta, next);
      for (const Range& range : next.reads) end_read(range);
      next.reads.clear();
      for (auto& list : next.accumulators) std::vector<void*>().swap(list);
    }
  }
}

}  // namespace machine

// What g++ calls with -fsanitize=thread before each load and store; its own library is not linked.
#define HOOK(size)                                                                                     \
  extern "C" void __tsan_read##size(void* at) { machine::access(at, size, false, true); }               \
  extern "C" void __tsan_write##size(void* at) { machine::access(at, size, true, true); }               \
  extern "C" void __tsan_unaligned_read##size(void* at) { machine::access(at, size, false, false); }    \
  extern "C" void __tsan_unaligned_write##size(void* at) { machine::access(at, size, true, false); }    \
  extern "C" void __tsan_volatile_read##size(void* at) { machine::access(at, size, false, true); }      \
  extern "C" void __tsan_volatile_write##size(void* at) { machine::access(at, size, true, true); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
extern "C" void __tsan_read_range(void* at, size_t size) { machine::access(at, size, false, false); }
extern "C" void __tsan_write_range(void* at, size_t size) { machine::access(at, size, true, false); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void*, void*) {}
extern "C" void __tsan_vptr_read(void*) {}
