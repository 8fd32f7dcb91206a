// Products of the tensor core, alone and with other users of shared memory.
#pragma once
#include "shared_memory.cuh"

#define TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define SIXTY TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", " TEN(5) ", "
#define D32 TEN() ", " TEN(1) ", " TEN(2) ", %30, %31"
#define D64 SIXTY "%60, %61, %62, %63"
#define D128 SIXTY TEN(6) ", " TEN(7) ", " TEN(8) ", " TEN(9) ", " TEN(10) ", " TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define R8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define R32(i) R8(i), R8(i + 8), R8(i + 16), R8(i + 24)
#define R64 R32(0), R32(32)
#define R128 R64, R32(64), R32(96)
// A product of 64 rows, COLUMNS and K; A in shared memory or in registers.
#define PRODUCT(NAME, COLUMNS, K, TYPES, D, REGISTERS_D, A_AND_B, ...)                                                        \
  struct NAME {                                                                                                               \
    static constexpr int registers = COLUMNS / 2;                                                                             \
    static constexpr double flops = 2.0 * 64 * COLUMNS * K, clocks = COLUMNS / 2;                                             \
    DEVICE void run(float (&d)[registers], uint64_t a, const uint32_t (&r)[4], uint64_t b) {                                  \
      asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k" #K ".f32." TYPES      \
                   " {" D "}, " A_AND_B ";}" : REGISTERS_D : __VA_ARGS__, "l"(b));                                            \
    }                                                                                                                         \
  };
#define BF16 "bf16.bf16"
#define FP8 "e4m3.e4m3"
#define IN_SHARED "l"(a)
#define IN_REGISTERS "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
PRODUCT(SS256, 256, 16, BF16, D128, R128, "%128, %129, p, 1, 1, 0, 0", IN_SHARED)
PRODUCT(RS256, 256, 16, BF16, D128, R128, "{%128, %129, %130, %131}, %132, p, 1, 1, 0", IN_REGISTERS)
PRODUCT(SS128, 128, 16, BF16, D64, R64, "%64, %65, p, 1, 1, 0, 0", IN_SHARED)
PRODUCT(SS64, 64, 16, BF16, D32, R32(0), "%32, %33, p, 1, 1, 0, 0", IN_SHARED)
PRODUCT(FP8_SS256, 256, 32, FP8, D128, R128, "%128, %129, p, 1, 1", IN_SHARED)
PRODUCT(FP8_RS256, 256, 32, FP8, D128, R128, "{%128, %129, %130, %131}, %132, p, 1, 1", IN_REGISTERS)

constexpr int B_BYTES = 32 << 10, A_BYTES = 8 << 10, PORT_BYTES = 64 << 10, PRODUCT_SMEM = B_BYTES + A_BYTES + PORT_BYTES + 1024;
// Operands of a warpgroup: B, then A, which all warpgroups share, K-major with a swizzle of 128 bytes.
template <class Product>
struct Multiplier {
  float d[Product::registers];
  uint32_t r[4];
  uint64_t a, b;

  __device__ __forceinline__ Multiplier(const uint32_t* data, uint32_t smem) {
    for (uint32_t i = threadIdx.x; i < (B_BYTES + A_BYTES) / 4; i += blockDim.x)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + 4 * i), "r"(data[i]) : "memory");
    fence_async();
    __syncthreads();
    b = uint64_t((smem & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
    a = b + (B_BYTES >> 4);
    for (int i = 0; i < 4; ++i) r[i] = data[threadIdx.x + 1024 * i];
    for (float& value : d) value = 0;
  }
  // Issues product number j of an unrolled loop.
  __device__ __forceinline__ void issue(int j) { Product::run(d, a + 2 * (j & 3), r, b + 2 * (j & 3)); }
  __device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  __device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  template <int LEFT>
  __device__ __forceinline__ void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
  template <int NUMBER, int LEFT>
  __device__ __forceinline__ void group() {
    fence();
#pragma unroll
    for (int j = 0; j < NUMBER; ++j) issue(j);
    commit();
    wait<LEFT>();
  }
  __device__ __forceinline__ uint32_t result() {
    float sum = 0;
    for (float& value : d) {
      asm volatile("" : "+f"(value)::"memory");
      sum += value;
    }
    return __float_as_uint(sum);
  }
};
template <class Product>
__global__ void __launch_bounds__(256) product_rate(const uint32_t* data, Clocks* out, uint32_t* sink) {
  SHARED;
  Multiplier<Product> m(data, smem);
  __syncthreads();
  Clocks begin = now();
#pragma unroll 1
  for (int i = 0; i < 128; ++i) m.template group<8, 1>();
  m.template wait<0>();
  report(begin, m.result(), out, sink);
}
// out[i]: clocks of a group of NUMBER products, from before its issue to the end of the wait.
template <class Product, int NUMBER>
__global__ void __launch_bounds__(128) product_tail(const uint32_t* data, Clocks* out, uint32_t* sink) {
  SHARED;
  Multiplier<Product> m(data, smem);
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    __syncthreads();
    Clocks begin = now();
    m.template group<NUMBER, 0>();
    if (threadIdx.x == 0) out[i] = now() - begin;
  }
  sink[threadIdx.x] = m.result();
}
// out[i]: clocks after the issue of product i.
template <class Product>
__global__ void __launch_bounds__(128) product_issue(const uint32_t* data, Clocks* out, uint32_t* sink) {
  SHARED;
  Multiplier<Product> m(data, smem);
  Clocks t[21];
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    __syncthreads();
    t[0] = now();
    m.fence();
#pragma unroll
    for (int j = 0; j < 20; ++j) {
      m.issue(j);
      t[j + 1] = now();
    }
    m.commit();
    m.template wait<0>();
  }
  if (threadIdx.x == 0)
    for (int i = 0; i < 20; ++i) out[i] = t[i + 1] - t[0];
  sink[threadIdx.x] = m.result();
}
template <class Product>
static void product(const std::string& name) {
  measure(name + "_rate", [&] {
    allow(product_rate<Product>, PRODUCT_SMEM);
    for (int groups : {1, 2}) {
      double one = least_clocks([&] { product_rate<Product><<<1, 128 * groups, PRODUCT_SMEM>>>(data, out, sink); }) / (1024 * groups);
      emit(name + "_rate_" + std::to_string(groups), Product::flops / one, "flops/clock", "%d warpgroups; %.1f clocks a product", groups,
           one);
    }
  });
  measure(name + "_tail", [&] {
    allow(product_tail<Product, 1>, PRODUCT_SMEM);
    allow(product_tail<Product, 8>, PRODUCT_SMEM);
    product_tail<Product, 1><<<1, 128, PRODUCT_SMEM>>>(data, out, sink);
    finish();
    double one = median_of(2, 32);
    product_tail<Product, 8><<<1, 128, PRODUCT_SMEM>>>(data, out, sink);
    finish();
    double eight = median_of(2, 32);
    emit(name + "_tail", eight - 8 * Product::clocks, "clocks", "8 products with their wait take %.0f, 1 takes %.0f; less %.0f each", eight,
         one, Product::clocks);
  });
  measure(name + "_depth", [&] {
    allow(product_issue<Product>, PRODUCT_SMEM);
    product_issue<Product><<<1, 128, PRODUCT_SMEM>>>(data, out, sink);
    finish();
    double cadence = (out[19] - out[12]) / 7.0;
    int depth = 1;
    std::string times = std::to_string(out[0]);
    for (int i = 1; i < 20; ++i) times += " " + std::to_string(out[i]);
    while (depth < 19 && out[depth] - out[depth - 1] <= 0.6 * cadence) ++depth;
    emit(name + "_depth", depth, "products", "issued before an issue takes over 0.6 of the cadence %.1f; clocks after each: %s", cadence,
         times.c_str());
  });
}
static void products() {
  product<SS256>("ss256");
  product<RS256>("rs256");
  product<SS128>("ss128");
  product<SS64>("ss64");
  product<FP8_SS256>("fp8_ss256");
  product<FP8_RS256>("fp8_rs256");
}
struct bulk {};
// Warpgroup 0 multiplies; warpgroup 1 accesses 16 KB of shared memory every `gap` clocks, or copies 8 KB from L2 there, or does nothing.
// out[0]: clocks of 512 products, out[1], out[2]: bytes and clocks of one warp of the others.
template <class Product, class Access>
__global__ void __launch_bounds__(256) shared_port(const uint32_t* data, int gap, Clocks* out, uint32_t* sink) {
  SHARED;
  __shared__ __align__(8) uint64_t bars[8];
  __shared__ volatile int done;
  if (threadIdx.x == 0) {
    done = 0;
    init(bars, 8);
  }
  Multiplier<Product> m(data, smem);
  const uint32_t region = smem + B_BYTES + A_BYTES;
  uint32_t result = 0;
  if (threadIdx.x < 128) {
    Clocks begin = 0;
#pragma unroll 1
    for (int i = 0; i < 80; ++i) {
      if (i == 16) begin = now();
      m.template group<8, 1>();
    }
    m.template wait<0>();
    if (threadIdx.x == 0) out[0] = now() - begin, done = 1;
    result = m.result();
  } else {
    Clocks begin = now(), next = begin, bytes = 0;
    if constexpr (std::is_same<Access, bulk>::value) {
      if (threadIdx.x / 32 == 4 && elect()) {
        int issued = 0, ended = 0;
        while (!done || ended < issued) {
          for (; !done && issued < ended + 8; ++issued) {
            while (now() < next) {}
            next = max(next, now() - 4 * gap) + gap;
            expect(address(&bars[issued % 8]), 8192);
            bulk_load(region + issued % 8 * 8192, data + issued % 16 * 2048, 8192, address(&bars[issued % 8]));
          }
          if (ended < issued) wait(address(&bars[ended % 8]), ended / 8 & 1), ++ended, bytes += 8192;
        }
      }
    } else if constexpr (!std::is_same<Access, none>::value) {
      while (!done) {
        batch<Access>(region + (threadIdx.x / 32 - 4) * 4096, result);
        bytes += 4 * 8 * Access::bytes;
        next += gap;
        while (now() < next) {}
      }
    }
    if (threadIdx.x == 128) out[1] = bytes, out[2] = now() - begin;
  }
  sink[threadIdx.x] = result;
}
template <class Product, class Access>
static void port(const std::string& name, std::initializer_list<int> gaps) {
  measure(name, [&] {
    allow(shared_port<Product, Access>, PRODUCT_SMEM);
    for (int gap : gaps) {
      for (int i = 0; i < 2; ++i) shared_port<Product, Access><<<1, 256, PRODUCT_SMEM>>>(data, gap, out, sink), finish();
      const double moved = double(out[1]) / double(out[2]);
      emit(name + "_gap" + std::to_string(gap), out[0] / 512.0, "clocks", "a product; the others moved %.1f bytes a clock", moved);
    }
  });
}
template <class Product>
static void ports(const std::string& name) {
  port<Product, none>("port_" + name + "_alone", {0});
  port<Product, sts128>("port_" + name + "_sts128", {0, 256, 512, 1024});
  port<Product, lds128>("port_" + name + "_lds128", {0, 256, 512, 1024});
  port<Product, bulk>("port_" + name + "_bulk", {0, 192, 256, 512});
}
static void shared_port_groups() {
  ports<SS256>("ss256");
  ports<RS256>("rs256");
  ports<FP8_SS256>("fp8_ss256");
}
