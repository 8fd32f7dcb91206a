// Host and device functions of all microbenchmarks.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using Clocks = long long;

static Clocks* out;    // pinned: kernels write their times here
static uint32_t* data; // random bits, 1 MB, then words that kernels write so that nothing is optimised away
static uint32_t* sink;
static int sms;
constexpr size_t DATA_BYTES = 1 << 20, OUT_WORDS = 1 << 14;

static void emit(const std::string& name, double value, const char* unit, const char* format, ...) {
  char detail[768];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(detail, sizeof detail, format, arguments);
  va_end(arguments);
  printf("{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"detail\": \"%s\"}\n", name.c_str(), value, unit, detail);
  fflush(stdout);
}
static void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}
static void finish() {
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
}
static void measure(const std::string& name, const std::function<void()>& body) {
  try {
    body();
    finish();
  } catch (const std::exception& error) {
    printf("{\"name\": \"ERROR\", \"value\": null, \"unit\": \"\", \"detail\": \"%s: %s\"}\n", name.c_str(), error.what());
    fflush(stdout);
    cudaGetLastError();
    if (cudaDeviceSynchronize() != cudaSuccess) _Exit(3);
  }
}
// Returns the least out[0] of three launches.
static double least_clocks(const std::function<void()>& launch) {
  double least = 1e30;
  for (int i = 0; i < 3; ++i) {
    launch();
    finish();
    least = std::min(least, double(out[0]));
  }
  return least;
}
static double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}
// Returns the median of out[first], out[first + step], .. below `end`.
static double median_of(int first, int end, int step = 1) {
  std::vector<double> values;
  for (int i = first; i < end; i += step) values.push_back(double(out[i]));
  return median(values);
}
static double least_ms(int times, const std::function<void()>& launch, cudaStream_t stream = nullptr) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  double least = 1e30;
  for (int i = 0; i < times; ++i) {
    check(cudaEventRecord(begin, stream));
    launch();
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end));
    least = std::min(least, double(ms));
  }
  return least;
}
template <class Kernel>
static void allow(Kernel kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

#define DEVICE static __device__ __forceinline__
#define SHARED                                \
  extern __shared__ unsigned char shared_[];  \
  const uint32_t smem = (address(shared_) + 1023) & ~1023u  // asm addresses it; allocate 1 KB more

DEVICE uint32_t address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }
DEVICE Clocks now() {
  Clocks t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}
DEVICE uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
DEVICE uint32_t rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// One thread of a converged warp; ptxas then issues copies without a loop over lanes.
DEVICE bool elect() {
  uint32_t chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen)::"memory");
  return chosen != 0;
}
__host__ DEVICE uint32_t hash(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}
DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEVICE void arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void arrive_remote(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Initialises barriers of one arrival, by one thread.
DEVICE void init(uint64_t* bars, int number) {
  for (int i = 0; i < number; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(bars + i)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_async();
}
DEVICE bool try_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done != 0;
}
DEVICE void wait(uint32_t bar, uint32_t parity) {
#pragma unroll 1
  for (int i = 0; !try_wait(bar, parity); ++i)
    if (i == 10000000) __trap();
}
DEVICE uint32_t in_peer(uint32_t local) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank_in_cluster() ^ 1));
  return remote;
}
DEVICE void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEVICE void bulk_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "r"(from), "r"(bytes), "r"(bar) : "memory");
}
// Loads a box of 64 columns of 2 bytes; mask: CTAs of the cluster that get it, 0: this one, by a plain copy.
DEVICE void tensor_load(uint32_t to, const CUtensorMap* map, int row, uint32_t bar, uint16_t mask = 0) {
  if (mask)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(bar), "h"(mask) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(bar) : "memory");
}
// Fills memory with random pairs of bf16 in [-2, 2). As bytes they are e4m3 that are no NaN.
__global__ void fill(uint32_t* words, size_t number) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < number; i += size_t(gridDim.x) * blockDim.x)
    words[i] = (hash(uint32_t(i)) & 0x807f807fu) | 0x3f003f00u;
}
// Memory of one measurement.
struct Buffer {
  unsigned char* bytes = nullptr;
  explicit Buffer(size_t size) {
    check(cudaMalloc(&bytes, size));
    fill<<<1320, 256>>>(reinterpret_cast<uint32_t*>(bytes), size / 4);
    finish();
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(bytes); }
};
static void flush_l2() { Buffer more(size_t(512) << 20); }
// Ends a kernel of one CTA: the clocks since `begin` of its slowest thread.
DEVICE void report(Clocks begin, uint32_t result, Clocks* out, uint32_t* sink) {
  __syncthreads();
  if (threadIdx.x == 0) out[0] = now() - begin;
  sink[threadIdx.x] = result;
}
