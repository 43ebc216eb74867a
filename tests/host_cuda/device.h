// The part of CUDA and of TileLang's device templates that the preprocessing kernels use, on a CPU.
//
// A block runs at a time, its threads as fibers that switch only where a thread must wait: for the
// block, for its warp, or for an mbarrier. One warp runs ahead of the others as far as it can. TMA
// loads land as late as they can in some blocks and at once in others, TMA stores when their thread
// waits for them: a missing wait shows. Shared memory starts as NaN in every block.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

typedef unsigned int uint;
typedef unsigned char uchar;

constexpr int WARP = 32, WARP_GROUP = 128, MAX_THREADS = 1024, SHARED_BYTES = 227 * 1024;
constexpr int FIBER_STACK = 128 * 1024, ROW = 16;  // bytes of a row of an 8x8 16-bit matrix

alignas(1024) static uchar buf_dyn_shmem[SHARED_BYTES];
static struct { int x, y, z; } threadIdx, blockIdx;

[[noreturn]] static void fail(const char* what) {
  fprintf(stderr, "host_cuda: block %d thread %d: %s\n", blockIdx.x, threadIdx.x, what);
  abort();
}

// ---- 16-bit floats, rounded to nearest even

template <class To, class From> static To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct bfloat16_t {
  uint16_t raw;
  bfloat16_t() = default;
  bfloat16_t(float value) {
    uint32_t u = bits<uint32_t>(value);
    raw = std::isnan(value) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  operator float() const { return bits<float>(uint32_t(raw) << 16); }
};

struct half_t {
  uint16_t raw;
  half_t() = default;
  half_t(float value) {
    uint16_t sign = std::signbit(value) << 15;
    float size = std::fabs(value);
    if (std::isnan(value)) raw = 0x7fff;
    else if (size >= 65520.f) raw = sign | 0x7c00;
    else {
      int exponent = size == 0 ? -14 : std::max(std::ilogb(size), -14);
      int units = int(std::nearbyint(std::ldexp(size, 10 - exponent)));
      raw = sign | (units + (exponent + 14) * 1024);  // the implicit bit of units carries
    }
  }
  operator float() const {
    int exponent = raw >> 10 & 31, fraction = raw & 1023;
    float size = exponent == 31 ? (fraction ? NAN : INFINITY)
               : exponent == 0  ? std::ldexp(float(fraction), -24)
                                : std::ldexp(float(fraction + 1024), exponent - 25);
    return raw >> 15 ? -size : size;
  }
};

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint1 { uint x; };
struct alignas(8) uint2 { uint x, y; };
struct alignas(16) uint4 { uint x, y, z, w; };
struct __nv_bfloat162 { bfloat16_t x, y; };
struct half2 { half_t x, y; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(uint x, uint y, uint z, uint w) { return {x, y, z, w}; }
static uint __pack_nv_bfloat162(bfloat16_t x, bfloat16_t y) { return x.raw | uint(y.raw) << 16; }
static uint __pack_half2(half_t x, half_t y) { return x.raw | uint(y.raw) << 16; }
static __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
static half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
using std::max;
using std::min;

// ---- fibers

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  std::function<bool()> ready;
  bool done;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static std::function<void()> kernel_body;
// TMA copies under way: loads of the block, stores of each thread
static std::vector<std::function<void()>> loads;
static std::map<int, std::vector<std::function<void()>>> stores;

static void wait_until(std::function<bool()> ready) {
  if (ready()) return;
  int self = threadIdx.x;
  fibers[self].ready = ready;
  swapcontext(&fibers[self].context, &scheduler);
}

static void land(std::vector<std::function<void()>>& transfers) {
  auto landing = std::move(transfers);
  transfers.clear();
  for (auto& transfer : landing) transfer();
}

static void fiber_main() {
  kernel_body();
  fibers[threadIdx.x].done = true;
}

// ---- meeting of several threads; the last to come runs `last` before anybody leaves

struct Meeting {
  int here = 0;
  long round = 0;
  void join(int expected, const std::function<void()>& last = [] {}) {
    if (++here == expected) {
      last();
      here = 0;
      ++round;
    } else {
      long mine = round;
      wait_until([this, mine] { return round != mine; });
    }
  }
};
static Meeting block_meeting, warp_meetings[MAX_THREADS / WARP];

static void __syncthreads() { block_meeting.join(int(fibers.size())); }
static void __syncwarp() { warp_meetings[threadIdx.x / WARP].join(WARP); }

// Dependent launches have nothing to wait for here: every launch ends before the next begins.
static void cudaTriggerProgrammaticLaunchCompletion() {}
static void cudaGridDependencySynchronize() {}

// Every lane gives a pointer to its argument; `all` sees the 32 of them once.
template <class Argument>
static void collective(Argument& argument, const std::function<void(Argument**)>& all) {
  static Argument* arguments[MAX_THREADS / WARP][WARP];
  int warp = threadIdx.x / WARP;
  arguments[warp][threadIdx.x % WARP] = &argument;
  warp_meetings[warp].join(WARP, [&] { all(arguments[warp]); });
  warp_meetings[warp].join(WARP);
}

template <class T> struct Shuffle { T value; int source; T result; };
template <class T> static T shuffle(T value, int source) {
  Shuffle<T> mine{value, source, 0};
  collective<Shuffle<T>>(mine, [](Shuffle<T>** all) {
    for (int lane = 0; lane < WARP; ++lane) all[lane]->result = all[all[lane]->source]->value;
  });
  return mine.result;
}
template <class T> static T __shfl_sync(uint, T value, int source, int width) {
  int lane = threadIdx.x % WARP;
  return shuffle(value, lane / width * width + source % width);
}
template <class T> static T __shfl_up_sync(uint, T value, int distance, int width) {
  int lane = threadIdx.x % WARP;
  return shuffle(value, lane % width < distance ? lane : lane - distance);
}
template <class T> static T __shfl_xor_sync(uint, T value, int mask, int) {
  return shuffle(value, threadIdx.x % WARP ^ mask);
}
static float rsqrtf(float x) { return 1 / std::sqrt(x); }

// ---- mbarriers

struct BarrierState { int count, pending, phase; long bytes; };
static std::map<const void*, BarrierState> barriers;

struct Barrier {
  uint64_t storage;
  BarrierState& state() const {
    auto found = barriers.find(this);
    if (found == barriers.end()) fail("mbarrier used before its init");
    return found->second;
  }
  void init(int count) { barriers[this] = {count, count, 0, 0}; }
  void expect_transaction(int bytes) { state().bytes += bytes; }
  void landed(int bytes) { state().bytes -= bytes; settle(); }
  void arrive() {
    if (--state().pending < 0) fail("more arrivals than an mbarrier counts");
    settle();
  }
  void wait(int parity) { wait_until([=] { return state().phase != parity; }); }
  void settle() {
    BarrierState& s = state();
    if (s.pending == 0 && s.bytes == 0) s = {s.count, s.count, s.phase ^ 1, 0};
  }
};

// ---- tensor maps

struct CUtensorMap {
  char* base;
  int rank, element, swizzle;  // bytes of an element, span of the swizzle in bytes or 0
  int64_t extents[5], strides[5];  // innermost first, strides in bytes
  int box[5];
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= box[i];
    return n;
  }
};

// Where hardware keeps byte `p` of a tile with rows of `span` bytes: 16-byte units permuted by row.
static char* swizzled(char* p, int span) {
  uint64_t offset = p - (char*)buf_dyn_shmem;
  uint64_t mask = span == 128 ? 7 : span == 64 ? 3 : span == 32 ? 1 : 0;
  return (char*)buf_dyn_shmem + (offset ^ (offset >> 7 & mask) << 4);
}

static void transfer(const CUtensorMap& map, char* tile, std::vector<int64_t> corner, bool load) {
  for (int64_t e = 0; e < map.elements(); ++e) {
    int64_t rest = e, offset = 0;
    bool inside = true;
    for (int i = 0; i < map.rank; ++i) {
      int64_t at = corner[i] + rest % map.box[i];
      rest /= map.box[i];
      inside = inside && at >= 0 && at < map.extents[i];
      offset += at * map.strides[i];
    }
    char* shared = swizzled(tile + e * map.element, map.swizzle);
    if (!load && inside) memcpy(map.base + offset, shared, map.element);
    if (load && inside) memcpy(shared, map.base + offset, map.element);
    if (load && !inside) memset(shared, 0, map.element);
  }
}

// ---- TileLang's device functions

namespace tl {
enum class DataType { kFloat16, kBFloat16, kFloat32 };

template <int threads> static bool tl_shuffle_elect() {
  return threads ? threadIdx.x % threads == 0 : threadIdx.x == 0;
}
static void prefetch_tma_descriptor(const CUtensorMap&) {}
static void fence_barrier_init() {}
static void fence_proxy_async() {}
static void warpgroup_arrive() {}
static void warpgroup_commit_batch() {}
template <int> static void warpgroup_wait() {}
template <class T> static void warpgroup_fence_operand(T*, int) {}

template <class... Corner>
static void tma_load(const CUtensorMap& map, Barrier& barrier, void* tile, Corner... corner) {
  std::vector<int64_t> at{int64_t(corner)...};
  loads.push_back([&map, &barrier, tile, at] {
    transfer(map, (char*)tile, at, true);
    barrier.landed(int(map.elements() * map.element));
  });
}
template <class... Corner>
static void tma_store(const CUtensorMap& map, void* tile, Corner... corner) {
  std::vector<int64_t> at{int64_t(corner)...};
  stores[threadIdx.x].push_back([&map, tile, at] { transfer(map, (char*)tile, at, false); });
}
static void tma_store_arrive() {}
template <int count, bool> static void tma_store_wait() { land(stores[threadIdx.x]); }

// K-major operands in 128-byte swizzled tiles, as the descriptors of these kernels describe them.
struct GmmaDescriptor {
  uint64_t address;
  int stride;  // bytes between groups of eight rows
  GmmaDescriptor operator+(uint64_t units) const { return {address + 16 * units, stride}; }
  operator uint64_t() const { return address | uint64_t(stride) << 32; }
};
template <int layout, int leading, int stride, class T>
static void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, T* tile) {
  static_assert(layout == 1, "only the 128-byte swizzle is known here");
  descriptor = {uint64_t((uchar*)tile - buf_dyn_shmem), stride * 16};
}
template <DataType type> static float as_float(const void* p) {
  if (type == DataType::kFloat16) return *(const half_t*)p;
  return *(const bfloat16_t*)p;
}
template <DataType type> static float operand(uint64_t descriptor, int row, int k) {
  uint64_t offset = (descriptor & 0xffffffff) + row / 8 * (descriptor >> 32) + row % 8 * 128 + k * 2;
  return as_float<type>(swizzled((char*)buf_dyn_shmem + offset, 128));
}

template <DataType A, DataType B, DataType C, int M, int N, int K, bool, bool, int, int>
static void wgmma_ss(uint64_t a, uint64_t b, uint32_t* registers, int accumulate) {
  float* c = (float*)registers;
  int thread = threadIdx.x % WARP_GROUP;
  for (int i = 0; i < N / 2; ++i) {
    int row = thread / WARP * 16 + thread % WARP / 4 + i / 2 % 2 * 8;
    int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    double sum = accumulate ? c[i] : 0;
    for (int k = 0; k < K; ++k) sum += double(operand<A>(a, row, k)) * operand<B>(b, column, k);
    c[i] = float(sum);
  }
}

struct Product { float* c; const uint *a, *b; };
template <DataType A, DataType B, DataType C, int M, int N, int K, bool, bool>
static void mma_sync(float* c, const uint* a, const uint* b) {
  static_assert(M == 16 && N == 8 && K == 16);
  Product mine{c, a, b};
  collective<Product>(mine, [](Product** all) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
      int group = lane / 4, pair = lane % 4 * 2;
      for (int i = 0; i < 8; ++i)
        left[group + i / 2 % 2 * 8][pair + i % 2 + i / 4 * 8] =
            as_float<A>((const char*)all[lane]->a + 2 * i);
      for (int i = 0; i < 4; ++i)
        right[pair + i % 2 + i / 2 * 8][group] = as_float<B>((const char*)all[lane]->b + 2 * i);
    }
    for (int lane = 0; lane < WARP; ++lane)
      for (int i = 0; i < 4; ++i) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = all[lane]->c[i];
        for (int k = 0; k < 16; ++k) sum += double(left[row][k]) * right[k][column];
        all[lane]->c[i] = float(sum);
      }
  });
}

// Four 8x8 matrices; lane 8 m + r holds the address of row r of matrix m.
struct Matrices { char* row; int32_t words[4]; };
static void move_matrices(Matrices& mine, bool load, bool transposed) {
  if (uint64_t(mine.row) % ROW) fail("a matrix row is not aligned to 16 bytes");
  collective<Matrices>(mine, [=](Matrices** all) {
    for (int m = 0; m < 4; ++m)
      for (int lane = 0; lane < WARP; ++lane)
        for (int e = 0; e < 2; ++e) {
          int row = lane / 4, column = lane % 4 * 2 + e;
          if (transposed) std::swap(row, column);
          char* shared = all[m * 8 + row]->row + column * 2;
          char* word = (char*)&all[lane]->words[m] + e * 2;
          memcpy(load ? word : shared, load ? shared : word, 2);
        }
  });
}
static void load_matrices(const void* row, void* registers, bool transposed) {
  Matrices mine{(char*)row, {}};
  move_matrices(mine, true, transposed);
  memcpy(registers, mine.words, sizeof mine.words);
}
static void ptx_ldmatrix_x4(const void* row, void* to) { load_matrices(row, to, false); }
static void ptx_ldmatrix_x4_trans(const void* row, void* to) { load_matrices(row, to, true); }
static void ptx_stmatrix_m8n8_x4(void* row, int a, int b, int c, int d) {
  Matrices mine{(char*)row, {a, b, c, d}};
  move_matrices(mine, false, false);
}
}  // namespace tl

// ---- a block

// Run the threads of a warp, in the order given, until none can go on; whether any moved.
static bool run_warp(const std::vector<int>& threads, int& left) {
  bool moved = false;
  for (bool again = true; again;) {
    again = false;
    for (int t : threads) {
      Fiber& fiber = fibers[t];
      if (fiber.done || (fiber.ready && !fiber.ready())) continue;
      fiber.ready = nullptr;
      threadIdx.x = t;
      swapcontext(&scheduler, &fiber.context);
      left -= fiber.done;
      again = moved = true;
    }
  }
  return moved;
}

// The warps' priorities and the order of their lanes are drawn from `random`.
static void run_block(int threads, std::mt19937& random, const std::function<void()>& body) {
  kernel_body = body;
  barriers.clear();
  block_meeting = Meeting();
  for (Meeting& meeting : warp_meetings) meeting = Meeting();
  memset(buf_dyn_shmem, 0xff, sizeof buf_dyn_shmem);
  fibers.resize(threads);
  std::vector<std::vector<int>> warps(threads / WARP);
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    warps[t / WARP].push_back(t);
    fiber.stack.resize(FIBER_STACK);
    fiber.ready = nullptr;
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, fiber_main, 0);
  }
  for (auto& warp : warps) std::shuffle(warp.begin(), warp.end(), random);
  std::shuffle(warps.begin(), warps.end(), random);
  bool eager = random() % 2;
  for (int left = threads; left;) {
    if (eager) land(loads);
    bool moved = false;
    for (size_t w = 0; w < warps.size() && !moved; ++w) moved = run_warp(warps[w], left);
    if (!moved && loads.empty()) fail("deadlock");
    if (!moved) land(loads);
  }
  land(loads);
  for (auto& own : stores) land(own.second);
}
