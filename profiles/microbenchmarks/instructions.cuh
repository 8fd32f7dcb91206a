// Latencies and rates of instructions of one SM.
#pragma once
#include "common.cuh"

// x, y: two chains; b, c: operands that do not change.
#define REGISTERS ".reg .b16 l, h; .reg .f32 f, g, k; "
#define LOW(x) "mov.b32 {l, h}, " x "; "
#define FLOATS(x) "mov.b32 f, " x "; mov.b32 g, %2; mov.b32 k, %3; "
#define BF16X2(x) FLOATS(x) "cvt.rn.bf16x2.f32 " x ", f, g; "
#define E4M3(x) LOW(x) "cvt.rn.f16x2.e4m3x2 " x ", l; "
#define TO_E4M3(x) "cvt.rn.satfinite.e4m3x2.f32 " x "; "
#define HFMA2(x) "fma.rn.bf16x2 " x ", " x ", %2, %3; "
#define FFMA(x) FLOATS(x) "fma.rn.f32 f, f, g, k; mov.b32 " x ", f; "
#define IMAD(x) "mad.lo.u32 " x ", " x ", %2, %3; "
#define LOP3(x) "lop3.b32 " x ", " x ", %2, %3, 0x96; "
#define EX2(x) FLOATS(x) "ex2.approx.ftz.f32 f, f; mov.b32 " x ", f; "

// OP(name, instructions, PTX)
#define CONVERSIONS(OP)                                                                                                    \
  OP(cvt_bf16x2_f32, 1, BF16X2("%0"))                                                                                      \
  OP(cvt_f16x2_f32, 1, FLOATS("%0") "cvt.rn.f16x2.f32 %0, f, g;")                                                          \
  OP(cvt_f16x2_e4m3x2, 1, E4M3("%0"))                                                                                      \
  OP(cvt_e4m3x2_f32, 2, FLOATS("%0") TO_E4M3("l, f, g") TO_E4M3("h, g, f") "mov.b32 %0, {l, h};")                          \
  OP(cvt_f32_f16, 1, LOW("%0") "cvt.f32.f16 f, l; mov.b32 %0, f;")                                                         \
  OP(cvt_f32_bf16, 1, LOW("%0") "cvt.f32.bf16 f, l; mov.b32 %0, f;")                                                       \
  OP(cvt_f32_s32, 1, "cvt.rn.f32.s32 f, %0; mov.b32 %0, f;")                                                               \
  OP(hfma2_bf16, 1, HFMA2("%0"))                                                                                           \
  OP(hmul2_bf16, 1, "mul.rn.bf16x2 %0, %0, %2;")                                                                           \
  OP(mix_bf16x2_ffma, 2, BF16X2("%0") FFMA("%1"))                                                                          \
  OP(mix_bf16x2_lop3, 2, BF16X2("%0") LOP3("%1"))                                                                          \
  OP(mix_bf16x2_imad, 2, BF16X2("%0") IMAD("%1"))                                                                          \
  OP(mix_bf16x2_hfma2, 2, BF16X2("%0") HFMA2("%1"))                                                                        \
  OP(mix_bf16x2_ex2, 2, BF16X2("%0") EX2("%1"))                                                                            \
  OP(mix_bf16x2_e4m3, 2, BF16X2("%0") E4M3("%1"))                                                                          \
  OP(mix_e4m3_ffma, 2, E4M3("%0") FFMA("%1"))
#define ARITHMETIC(OP)                                                                                                     \
  OP(ex2, 1, EX2("%0"))                                                                                                    \
  OP(popc, 1, "popc.b32 %0, %0;")                                                                                          \
  OP(ffma, 1, FFMA("%0"))                                                                                                  \
  OP(fmul, 1, FLOATS("%0") "mul.rn.f32 f, f, g; mov.b32 %0, f;")                                                           \
  OP(imad, 1, IMAD("%0"))                                                                                                  \
  OP(lop3, 1, LOP3("%0"))                                                                                                  \
  OP(prmt, 1, "prmt.b32 %0, %0, %2, %3;")                                                                                  \
  OP(shfl, 1, "shfl.sync.bfly.b32 %0, %0, 1, 0x1f, 0xffffffff;")                                                           \
  OP(redux, 1, "redux.sync.add.s32 %0, %0, 0xffffffff;")                                                                   \
  OP(mix_ffma_lop3, 2, FFMA("%0") LOP3("%1"))                                                                              \
  OP(mix_ffma_imad, 2, FFMA("%0") IMAD("%1"))                                                                              \
  OP(mix_ex2_ffma, 2, EX2("%0") FFMA("%1"))
#define STRUCT(NAME, NUMBER, PTX)                                                                   \
  struct NAME {                                                                                     \
    static constexpr int number = NUMBER;                                                           \
    DEVICE void run(uint32_t& x, uint32_t& y, uint32_t b, uint32_t c) {                             \
      asm volatile("{" REGISTERS PTX "}" : "+r"(x), "+r"(y) : "r"(b), "r"(c));                      \
    }                                                                                               \
  };
namespace op {
CONVERSIONS(STRUCT)
ARITHMETIC(STRUCT)
}  // namespace op

template <class Op, int CHAINS>
__global__ void __launch_bounds__(512) instructions(const uint32_t* data, Clocks* out, uint32_t* sink) {
  uint32_t x[CHAINS], y[CHAINS], b = data[threadIdx.x], c = data[threadIdx.x + 512], result = 0;
  for (int i = 0; i < CHAINS; ++i) x[i] = data[threadIdx.x + 32 * i], y[i] = data[threadIdx.x + 32 * i + 2048];
  __syncthreads();
  Clocks begin = now();
#pragma unroll 1
  for (int round = 0; round < 64; ++round)
#pragma unroll
    for (int i = 0; i < 128; ++i) Op::run(x[i % CHAINS], y[i % CHAINS], b, c);
  for (int i = 0; i < CHAINS; ++i) result += x[i] ^ y[i];
  report(begin, result, out, sink);
}
template <class Op>
static void instruction(const std::string& name) {
  measure(name, [&] {
    constexpr double number = 64 * 128 * Op::number;
    double one = least_clocks([] { instructions<Op, 1><<<1, 32>>>(data, out, sink); });
    emit(name + "_latency", one / (64 * 128), "clocks", "a chain, 1 warp; %d instructions a link", Op::number);
    double all = least_clocks([] { instructions<Op, 8><<<1, 512>>>(data, out, sink); });
    double scheduler = least_clocks([] { instructions<Op, 8><<<1, 32>>>(data, out, sink); });
    emit(name + "_rate_1warp", scheduler / number, "clocks", "an instruction of 1 warp of 8 chains, alone on the SM");
    emit(name + "_rate", all / number / 4, "clocks", "an instruction of a scheduler, 4 warps of 8 chains on each");
  });
}
// Dequantises 16 e4m3 a lane to bf16 and stores them: as a float times the scale, or as a bf16.
template <bool SCALES_BF16>
__global__ void __launch_bounds__(512) dequantise(const uint32_t* data, Clocks* out, uint32_t* sink) {
  SHARED;
  uint32_t x[4], bits = data[threadIdx.x + 7];
  float scale = __uint_as_float(bits);
  for (int i = 0; i < 4; ++i) x[i] = data[threadIdx.x + 32 * i];
  Clocks begin = now();
#pragma unroll 4
  for (int round = 0; round < 512; ++round) {
    uint32_t y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t pair = i & 1 ? x[i / 2] >> 16 : x[i / 2];
      float low, high;
      asm volatile("{.reg .b16 l, h; .reg .b32 t; cvt.u16.u32 l, %2; cvt.rn.f16x2.e4m3x2 t, l; mov.b32 {l, h}, t;"
                   "cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(pair));
      if (!SCALES_BF16) low *= scale, high *= scale;
      asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[i]) : "f"(high), "f"(low));
      if (SCALES_BF16) asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(y[i]) : "r"(bits));
    }
    for (int i = 0; i < 2; ++i)
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem + threadIdx.x * 16 + i * 8192), "r"(y[4 * i]), "r"(y[4 * i + 1]),
                   "r"(y[4 * i + 2]), "r"(y[4 * i + 3]) : "memory");
    for (int i = 0; i < 4; ++i) x[i] = y[2 * i];
  }
  report(begin, x[0], out, sink);
}
template <bool SCALES_BF16>
static void dequantisation(const std::string& name) {
  measure(name, [&] {
    double all = least_clocks([] { dequantise<SCALES_BF16><<<1, 512, 17 << 10>>>(data, out, sink); });
    emit(name, all / 512 / 4, "clocks", "of a scheduler for 16 bytes a lane, 4 warps on each");
  });
}
// A taken branch over a barrier, which cannot be predicated away, behind a LOP3; or the LOP3 alone.
template <bool BRANCHES>
__global__ void branches(const uint32_t* data, Clocks* out, uint32_t* sink) {
  uint32_t one = data[0] | 1, x = data[threadIdx.x];
  Clocks begin = now();
#pragma unroll 1
  for (int round = 0; round < 256; ++round)
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      asm volatile("lop3.b32 %0, %0, %1, 0, 0x3c;" : "+r"(x) : "r"(one));
      if (BRANCHES)
        asm volatile("{.reg .pred p, q; .reg .u32 t; setp.ne.u32 p, %1, 0; @p bra.uni NEXT; AGAIN: ld.volatile.global.u32 t, [%2];"
                     "add.u32 %0, %0, t; setp.eq.u32 q, t, %0; @q bra.uni AGAIN; NEXT:}" : "+r"(x) : "r"(one), "l"(sink) : "memory");
    }
  report(begin, x, out, sink + 8);
}
__constant__ uint32_t ring[512];
__global__ void constants(Clocks* out, uint32_t* sink) {
  uint32_t x = threadIdx.x >> 10;
  for (int pass = 0; pass < 2; ++pass) {
    Clocks begin = now();
    for (int i = 0; i < 1024; ++i) x = ring[x];
    report(begin, x, out, sink);
  }
}
__global__ void special_registers(Clocks* out, uint32_t* sink) {
  uint32_t x = 1;
  Clocks begin = now();
#pragma unroll 16
  for (int i = 0; i < 1024; ++i) {
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm)::"memory");
    x = x * 3 + sm;
    __syncwarp();
  }
  report(begin, x, out, sink);
}
#define RUN(NAME, NUMBER, PTX) instruction<op::NAME>(#NAME);
static void conversions() {
  CONVERSIONS(RUN)
  dequantisation<false>("dequantise_fmul");
  dequantisation<true>("dequantise_hmul2");
}
static void arithmetic() {
  ARITHMETIC(RUN)
  measure("branch", [] {
    double taken = least_clocks([] { branches<true><<<1, 32>>>(data, out, sink); });
    double none = least_clocks([] { branches<false><<<1, 32>>>(data, out, sink); });
    emit("branch_taken", (taken - none) / 4096, "clocks", "besides the LOP3 between branches, 1 warp");
  });
  measure("constant", [] {
    uint32_t next[512];
    for (int i = 0; i < 512; ++i) next[i] = (i + 17) % 512;
    check(cudaMemcpyToSymbol(ring, next, sizeof next));
    double loads = least_clocks([] { constants<<<1, 32>>>(out, sink); });
    emit("constant_latency", loads / 1024, "clocks", "a chain of LDC with the shift of its address");
    double moves = least_clocks([] { special_registers<<<1, 32>>>(out, sink); });
    emit("special_latency", moves / 1024, "clocks", "S2R and its use");
  });
}
