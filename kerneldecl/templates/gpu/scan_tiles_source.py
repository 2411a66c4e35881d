"""Owns the CUDA text of cumulative sums along rows by tiles that look only at sums which were published long ago.

Knows nothing of how parameters are chosen.

Thread blocks take numbers in the order in which they begin, by a counter, so that whatever a block waits for is under way already. A
tile's sum is published together with the word that says so, before the tile is scanned. A tile adds up single tiles of its group and of
the `LAG` groups before, and one sum of each group before those; which is a matter of its place alone, so that each call gives the same
bits. The last tile of a group publishes the group's sum once its own results are stored: nobody needs it soon.

A thread has `H` vectors in registers and `V` in shared memory, which it alone copies and reads: more of the row is under way than
registers hold. Where `AHEAD` is not 0, a block first adds up one tile, whose elements come from DRAM and stay in L2, and then scans the
tile `AHEAD` numbers before, whose elements are in L2 still and whose words are there.
"""

from __future__ import annotations

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.scan import GpuScanParams, GpuScanTilesParams
from kerneldecl.compiler.scan import ScanSpec
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.scan_once_source import PUBLISHED
from kerneldecl.templates.gpu.scan_source import BEFORE_ME, constants_of

_SIZES = """
constexpr int TILE = T * W * U, TILES = (N + TILE - 1) / TILE, COUNT = {outer} * TILES;
constexpr int G = {group}, GROUPS = (TILES + G - 1) / G, WORDS = COUNT + {outer} * GROUPS;
constexpr int LAG = {lag}, AHEAD = {ahead}, LOOKS = {looks};
constexpr int H = {held}, V = {kept};  // vectors of a thread in registers, and in shared memory
"""
_TILES = """\
__device__ __forceinline__ Sum sum_in(uint64_t word) {
  unsigned low = (unsigned)word;
  return *reinterpret_cast<const Sum*>(&low);
}
// What comes before a tile: so many groups, then single tiles.
struct Before {
  const uint64_t *groups, *tiles;
  int far, count;
  __device__ __forceinline__ uint64_t word(int at) const { return look(at < far ? groups + at : tiles + (at - far)); }
};
__device__ __forceinline__ Before before_tile(const uint64_t* found, int tile) {
  int row = tile / TILES, in_row = tile % TILES, far = in_row / G > LAG ? in_row / G - LAG : 0;
  return {found + COUNT + row * GROUPS, found + row * TILES + far * G, far, far + in_row - far * G};
}
// This thread's share of the words, all asked for at once; beyond the last one there is 0.
__device__ __forceinline__ void look_each(const Before& before, int thread, uint64_t (&seen)[LOOKS]) {
  #pragma unroll
  for (int i = 0; i < LOOKS; i++) seen[i] = i * T + thread < before.count ? before.word(i * T + thread) : THERE;
}
// Wait for those that are not there yet.
__device__ __forceinline__ Sum added(const Before& before, int thread, uint64_t (&seen)[LOOKS]) {
  bool waits = true;
  while (waits) {
    waits = false;
    #pragma unroll
    for (int i = 0; i < LOOKS; i++) waits |= !(seen[i] & THERE);
    #pragma unroll
    for (int i = 0; i < LOOKS; i++)
      if (!(seen[i] & THERE)) seen[i] = before.word(i * T + thread);
  }
  Sum sum = 0;
  #pragma unroll
  for (int i = 0; i < LOOKS; i++) sum += sum_in(seen[i]);
  return sum;
}
__device__ __forceinline__ Sum value(const Access& held, int w) {
  return wide(reinterpret_cast<const Item*>(&held)[REVERSE ? W - 1 - w : w]);
}
// Volatile, so that all loads are under way before the first one is waited for.
__device__ __forceinline__ void get(Access& to, const Access* from) { {get} }
__device__ __forceinline__ void get_last(Access& to, const Access* from) { {get_last} }
__device__ __forceinline__ void put(Access* to, const Access& all) { {put} }
// What a thread has of a tile: a warp has U times 32 neighbouring vectors, so that each of its accesses is to whole lines.
template <bool WHOLE>
struct Tile {
  const Access* x;
  Access* y;
  long long left;  // elements of the row from the thread's first vector on
  __device__ __forceinline__ bool has(int u) const { return u < U && (WHOLE || u * 32 * W < left); }
  __device__ __forceinline__ static int place(int u) { return REVERSE ? -32 * u : 32 * u; }
  __device__ __forceinline__ void copy(Access* kept) const {
    #pragma unroll
    for (int v = 0; v < V; v++) {
      unsigned to = (unsigned)__cvta_generic_to_shared(kept + v * T);
      if (has(H + v)) asm volatile("cp.async.{cached}.shared.global [%0], [%1], {nbytes};" ::"r"(to), "l"(x + place(H + v)));
    }
  }
  __device__ __forceinline__ Access copied(const Access* kept, int v) const {
    Access none = {};
    return has(H + v) ? kept[v * T] : none;
  }
  __device__ __forceinline__ void load(Access (&held)[H]) const {
    #pragma unroll
    for (int u = 0; u < H; u++)
      if (has(u)) get_last(held[u], x + place(u));
  }
  __device__ __forceinline__ Sum sum_of(const Access& vector, int u) const {
    Sum sum = 0;
    #pragma unroll
    for (int w = 0; w < W; w++) sum += value(vector, w);
    return has(u) ? sum : Sum(0);
  }
  // The sum of all vectors, which will be read again: as many at once as registers hold.
  __device__ __forceinline__ Sum sum_ahead() const {
    Sum sum = 0;
    #pragma unroll
    for (int begin = 0; begin < U; begin += H) {
      Access held[H];
      #pragma unroll
      for (int u = 0; u < H; u++)
        if (has(begin + u)) get(held[u], x + place(begin + u));
      #pragma unroll
      for (int u = 0; u < H; u++) sum += sum_of(held[u], begin + u);
    }
    return sum;
  }
  // Store the running sums of a vector: `running` is what comes before it.
  __device__ __forceinline__ void store(const Access& vector, int u, Sum running) const {
    if (!has(u)) return;
    Access out;
    #pragma unroll
    for (int w = 0; w < W; w++) {
      Sum exclusive = running;
      running += value(vector, w);
      reinterpret_cast<Item*>(&out)[REVERSE ? W - 1 - w : w] = narrow(EXCLUSIVE ? exclusive : running);
    }
    put(y + place(u), out);
  }
};
template <bool WHOLE>
__device__ __forceinline__ Tile<WHOLE> tile_at(const Item* x, Item* y, int tile, int thread) {
  long long first = (long long)(tile % TILES) * TILE + (thread / 32 * U * 32 + thread % 32) * W;
  long long at = (long long)(tile / TILES) * N + (REVERSE ? N - first - W : first);
  return {reinterpret_cast<const Access*>(x + at), reinterpret_cast<Access*>(y + at), N - first};
}
__device__ __forceinline__ bool is_whole(int tile) { return N % TILE == 0 || tile % TILES < TILES - 1; }
// What comes before this lane's vector in its warp; the warp's vectors are added to `all`.
__device__ __forceinline__ Sum before_lane(Sum own, int lane, Sum& all) {
  Sum upto = own;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    Sum other = __shfl_up_sync(0xffffffffu, upto, by);
    if (lane >= by) upto += other;
  }
  Sum back = __shfl_up_sync(0xffffffffu, upto, 1), before = all + (lane ? back : Sum(0));
  all += __shfl_sync(0xffffffffu, upto, 31);
  return before;
}
// Scan a tile that is in registers and shared memory.
template <bool WHOLE>
__device__ __forceinline__ void scan(const Tile<WHOLE>& tile, int number, const Access (&held)[H], const Access* kept,
                                     uint64_t (&seen)[LOOKS], uint64_t* found, Sum* cells, int thread) {
  Sum all, sum = 0, carry, before_it[H];
  // 1. The tile's own sum; then what comes before vectors in it, while others publish what comes before the tile.
  #pragma unroll
  for (int u = 0; u < H; u++) sum += tile.sum_of(held[u], u);
  if (V > 0) asm volatile("cp.async.wait_all;" ::: "memory");
  #pragma unroll
  for (int v = 0; v < V; v++) sum += tile.sum_of(tile.copied(kept, v), H + v);
  Sum running = __shfl_sync(0xffffffffu, before_me(sum, cells, thread, all), 0);
  if (AHEAD == 0 && thread == 0) publish(found + number, all);
  #pragma unroll
  for (int u = 0; u < H; u++) before_it[u] = before_lane(tile.sum_of(held[u], u), thread % 32, running);
  before_me(added(before_tile(found, number), thread, seen), cells + 64, thread, carry);
  // 2. The results.
  #pragma unroll
  for (int u = 0; u < H; u++) tile.store(held[u], u, carry + before_it[u]);
  running += carry;
  #pragma unroll 4
  for (int v = 0; v < V; v++) {
    Access vector = tile.copied(kept, v);
    tile.store(vector, H + v, before_lane(tile.sum_of(vector, H + v), thread % 32, running));
  }
}
// The sum of a group. Where sums are ahead, another block publishes the last tile's, and may not have done so yet.
__device__ __forceinline__ void publish_group(int number, uint64_t* found, Sum* cells, int thread) {
  int in_row = number % TILES;
  if (in_row % G != G - 1) return;
  Sum sum = 0, all;
  #pragma unroll 1
  for (int at = thread; at < G; at += T) {
    uint64_t word = 0;
    while (!(word & THERE)) word = look(found + number - (G - 1) + at);
    sum += sum_in(word);
  }
  before_me(sum, cells + 32, thread, all);
  if (thread == 0) publish(found + COUNT + number / TILES * GROUPS + in_row / G, all);
}
__device__ __forceinline__ Access* kept_of(Sum* cells, int thread) { return reinterpret_cast<Access*>(cells + 128) + thread; }
__device__ __forceinline__ void copy(const Item* x, Item* y, int number, Access* kept, int thread) {
  if (number >= COUNT) return;  // Never so, but with this test nvcc 13.0 takes two registers less.
  if (is_whole(number)) tile_at<true>(x, y, number, thread).copy(kept);
  else tile_at<false>(x, y, number, thread).copy(kept);
}
// Load and scan a tile that is being copied. What `ahead` does stands between its loads and the first use of them.
template <bool WHOLE, class Ahead>
__device__ __forceinline__ void load_and_scan(Tile<WHOLE> tile, int number, uint64_t* found, Sum* cells, int thread, Ahead ahead) {
  Access held[H], *kept = kept_of(cells, thread);
  uint64_t seen[LOOKS];
  tile.load(held);
  look_each(before_tile(found, number), thread, seen);
  __syncwarp();  // No load moves behind it: ptxas put some behind the wait for copies.
  ahead();
  scan(tile, number, held, kept, seen, found, cells, thread);
}
__device__ __forceinline__ void take(const Item* __restrict__ x, Item* __restrict__ y, uint64_t* found, Sum* cells, int thread) {
  unsigned* taken = reinterpret_cast<unsigned*>(cells + 96);
  if (thread == 0) *taken = atomicAdd(reinterpret_cast<unsigned*>(found + WORDS), 1u);
  __syncthreads();
  int next = *taken, number = next - AHEAD;
  bool sums = AHEAD > 0 && next < COUNT;
  Sum sum = 0;
  if (AHEAD == 0 || number >= 0) copy(x, y, number, kept_of(cells, thread), thread);
  // The sum of a tile ahead is shared while the elements of the tile to be scanned are under way.
  if (sums) sum = is_whole(next) ? tile_at<true>(x, y, next, thread).sum_ahead() : tile_at<false>(x, y, next, thread).sum_ahead();
  auto share = [&] {
    if (!sums) return;
    Sum all;
    before_me(sum, cells + 32, thread, all);
    if (thread == 0) publish(found + next, all);
  };
  if (AHEAD > 0 && number < 0) return share();
  if (is_whole(number)) load_and_scan(tile_at<true>(x, y, number, thread), number, found, cells, thread, share);
  else load_and_scan(tile_at<false>(x, y, number, thread), number, found, cells, thread, share);
  publish_group(number, found, cells, thread);
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void scan_tiles(const X* x, X* y, uint64_t* found, Sum* cells, int, int thread) {
  take(reinterpret_cast<const Item*>(x), reinterpret_cast<Item*>(y), found, cells, thread);
}
"""

_REGISTERS = {16: ("v4.u32", "{%0, %1, %2, %3}", "xyzw"), 8: ("v2.u32", "{%0, %1}", "xy"), 4: ("u32", "%0", ""), 2: ("u16", "%0", "")}
"""Of vectors by their bytes: the type of an access, its registers, and the members of a vector's value that they are."""


def scan_tiles_source(spec: ScanSpec, params: GpuScanTilesParams) -> str:
    """Return the text of both kernels' work: `clear` and `scan_tiles`."""
    sizes = spec.sizes
    parts = GpuScanParams(params.threads, 1, params.unroll)
    nbytes = params.width(sizes) * dtype_bytes(spec.dtype)
    work = filled(
        _SIZES + PUBLISHED + _TILES,
        outer=sizes.outer,
        group=params.group,
        lag=params.lag,
        ahead=params.ahead,
        looks=params.looks(sizes),
        held=params.held,
        kept=params.kept,
        nbytes=nbytes,
        get=_load(nbytes, ""),
        get_last=_load(nbytes, ".cs" if params.stream else ""),
        put=_store(nbytes, ".cs" if params.stream else ""),
        cached="cg" if nbytes == VECTOR_BYTES else "ca",
    )
    return constants_of(spec, parts) + BEFORE_ME + work


def _load(nbytes: int, hint: str) -> str:
    """Return the statement that loads a vector `to` from global memory at `from`."""
    kind, registers, members = _REGISTERS[nbytes]
    constraint = "h" if kind == "u16" else "r"
    outputs = ", ".join(f'"={constraint}"(to{member})' for member in _members(members))
    at = registers.count("%")
    return f'asm volatile("ld.global{hint}.{kind} {registers}, [%{at}];" : {outputs} : "l"(from));'


def _store(nbytes: int, hint: str) -> str:
    """Return the statement that stores a vector `all` in global memory at `to`: whole, as nvcc may not store it in these kernels."""
    kind, registers, members = _REGISTERS[nbytes]
    constraint = "h" if kind == "u16" else "r"
    inputs = ", ".join(f'"{constraint}"(all{member})' for member in _members(members))
    return f'asm volatile("st.global{hint}.{kind} [%{registers.count("%")}], {registers};" : : {inputs}, "l"(to));'


def _members(names: str) -> list[str]:
    return [f".{name}" for name in names] or [""]
