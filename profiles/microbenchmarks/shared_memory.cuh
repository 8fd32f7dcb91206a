// Latencies and rates of shared memory.
#pragma once
#include "common.cuh"

// ACCESS(name, bytes of a warp, PTX): values %0 to %3, address %4.
#define ACCESSES(ACCESS)                                                                            \
  ACCESS(lds32, 128, "ld.volatile.shared.b32 %0, [%4];")                                            \
  ACCESS(lds128, 512, "ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];")                          \
  ACCESS(ldsm, 512, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];")             \
  ACCESS(sts32, 128, "st.shared.b32 [%4], %0;")                                                     \
  ACCESS(sts128, 512, "st.shared.v4.b32 [%4], {%0, %0, %0, %0};")                                   \
  ACCESS(stsm, 512, "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};")
#define ACCESS_STRUCT(NAME, BYTES, PTX)                                                             \
  struct NAME {                                                                                     \
    static constexpr int bytes = BYTES;                                                             \
    DEVICE void run(uint32_t (&v)[4], uint32_t a) {                                                 \
      asm volatile(PTX : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3]) : "r"(a) : "memory");       \
    }                                                                                               \
  };
ACCESSES(ACCESS_STRUCT)
struct none {
  DEVICE void run(uint32_t (&)[4], uint32_t) {}
};
// 8 accesses of a warp without conflicts, 4 KB.
template <class Access>
DEVICE void batch(uint32_t region, uint32_t& result) {
  uint32_t v[4] = {result, result, result, result};
  uint32_t a = region + threadIdx.x % 32 * (Access::bytes / 32);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Access::run(v, a + i * 512);
    result ^= v[0] ^ v[1] ^ v[2] ^ v[3];
  }
}
template <class Access>
__global__ void __launch_bounds__(512) shared_rate(Clocks* out, uint32_t* sink) {
  SHARED;
  uint32_t result = threadIdx.x;
  __syncthreads();
  Clocks begin = now();
#pragma unroll 1
  for (int i = 0; i < 256; ++i) batch<Access>(smem + threadIdx.x / 32 * 4096, result);
  report(begin, result, out, sink);
}
// A chain of loads, each behind a store of the same words: every lane finds its own address.
template <class Load, class Store>
__global__ void shared_chain(Clocks* out, uint32_t* sink) {
  __shared__ __align__(1024) uint32_t words[512];
  uint32_t stride = Load::bytes / 32, base = address(words), v[4];
  for (int i = threadIdx.x; i < 512; i += 32) words[i] = base + (std::is_same<Load, lds128>::value ? i / 4 : i) % 32 * stride;
  __syncthreads();
  v[0] = base + threadIdx.x * stride;
  v[1] = v[2] = v[3] = 0;
  Clocks begin = now();
#pragma unroll 16
  for (int i = 0; i < 1024; ++i) {
    Store::run(v, v[0]);
    Load::run(v, v[0]);
  }
  report(begin, v[0], out, sink);
}
template <class Load, class Store>
static void latency_of(const std::string& name) {
  measure(name, [&] {
    double all = least_clocks([] { shared_chain<Load, Store><<<1, 32>>>(out, sink); });
    emit(name, all / 1024, "clocks", "a chain, 1 warp");
  });
}
template <class Access>
static void rate_of(const std::string& name) {
  measure(name, [&] {
    allow(shared_rate<Access>, 65 << 10);
    double all = least_clocks([] { shared_rate<Access><<<1, 512, 65 << 10>>>(out, sink); });
    emit(name + "_bytes", 256 * 8 * 16 * Access::bytes / all, "bytes/clock", "of an SM, 16 warps; %.2f clocks an instruction",
         all / (256 * 8 * 16));
  });
}
#define RATE(NAME, BYTES, PTX) rate_of<NAME>(#NAME);
static void shared_memory() {
  latency_of<lds32, none>("lds32_latency");
  latency_of<lds128, none>("lds128_latency");
  latency_of<ldsm, none>("ldsm_latency");
  latency_of<lds128, sts128>("sts128_lds128_round");
  ACCESSES(RATE)
}
