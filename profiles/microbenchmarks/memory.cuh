// Latencies and rates of copies, L2 and HBM.
#pragma once
#include "common.cuh"

static CUtensorMap map_of(void* memory, uint64_t rows, uint32_t box_rows) {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000, cudaEnableDefault, &found));
  CUtensorMap map;
  cuuint64_t sizes[2] = {64, rows}, stride = 128;
  cuuint32_t box[2] = {64, box_rows}, steps[2] = {1, 1};
  if (!encode || encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, memory, sizes, &stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    throw std::runtime_error("cuTensorMapEncodeTiled failed");
  return map;
}
// A copy of `bytes`: a box of rows of 128 bytes, or contiguous.
template <bool TENSOR>
DEVICE void load(uint32_t to, const CUtensorMap* map, const unsigned char* from, size_t offset, uint32_t bytes, uint32_t bar) {
  if (TENSOR)
    tensor_load(to, map, int(offset / 128), bar);
  else
    bulk_load(to, from + offset, bytes, bar);
}
// One copy after the other. out[i]: clocks from the issue of copy i to the end of the wait.
template <bool TENSOR>
__global__ void copy_latency(const __grid_constant__ CUtensorMap map, const unsigned char* from, int number, uint32_t bytes, Clocks* out) {
  SHARED;
  __shared__ __align__(16) uint64_t bar[1];
  if (elect()) {
    init(bar, 1);
    for (int i = 0; i < number; ++i) {
      expect(address(bar), bytes);
      Clocks begin = now();
      load<TENSOR>(smem, &map, from, size_t(i) * bytes, bytes, address(bar));
      wait(address(bar), i & 1);
      out[i] = now() - begin;
    }
  }
}
// 16 copies at once. out[i], out[16 + i]: clocks after the issue of copy i, and when it is seen complete.
template <bool TENSOR>
__global__ void copy_cadence(const __grid_constant__ CUtensorMap map, const unsigned char* from, uint32_t bytes, Clocks* out) {
  SHARED;
  __shared__ __align__(16) uint64_t bars[16];
  __shared__ Clocks issued[16], ended[16];
  if (elect()) {
    init(bars, 16);
    for (int pass = 0; pass < 3; ++pass) {
      for (int i = 0; i < 16; ++i) expect(address(bars + i), bytes);
      Clocks begin = now();
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        load<TENSOR>(smem + i * bytes, &map, from, size_t(i) * bytes, bytes, address(bars + i));
        issued[i] = now() - begin;
      }
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        wait(address(bars + i), pass & 1);
        ended[i] = now() - begin;
      }
    }
    for (int i = 0; i < 16; ++i) out[i] = issued[i], out[16 + i] = ended[i];
  }
}
// CTA 0 of a cluster of two loads 8 KB for the CTAs of the mask. out[i]: clocks until it has them itself.
__global__ void __cluster_dims__(2) multicast(const __grid_constant__ CUtensorMap map, uint16_t mask, Clocks* out) {
  SHARED;
  __shared__ __align__(16) uint64_t bar[1];
  const uint32_t rank = rank_in_cluster();
  if (threadIdx.x == 0) init(bar, 1);
  for (int i = 0; i < 64; ++i) {
    if (elect() && (rank == 0 || mask == 3)) expect(address(bar), 8192);
    cluster_sync();
    if (elect() && (rank == 0 || mask == 3)) {
      Clocks begin = now();
      if (rank == 0) tensor_load(smem, &map, i * 64, address(bar), mask);
      wait(address(bar), i & 1);
      if (rank == 0) out[i] = now() - begin;
    }
    cluster_sync();
  }
}
template <bool TENSOR>
static void copies(const std::string& name, const CUtensorMap& map, const unsigned char* from, uint32_t bytes) {
  measure(name, [&] {
    constexpr int number = 128;
    flush_l2();
    for (const char* place : {"hbm", "l2"}) {
      copy_latency<TENSOR><<<1, 32, 9 << 10>>>(map, from, number, bytes, out);
      finish();
      emit(name + "_" + place, median_of(4, number), "clocks", "from issue to the end of try_wait, one at a time");
    }
  });
  measure(name + "_cadence", [&] {
    allow(copy_cadence<TENSOR>, 129 << 10);
    copy_cadence<TENSOR><<<1, 32, 129 << 10>>>(map, from, bytes, out);
    finish();
    emit(name + "_cadence", (out[15] - out[3]) / 12.0, "clocks", "between issues 4 to 16; %.1f between completions",
         (out[31] - out[19]) / 12.0);
  });
}
static void copy_engine() {
  const size_t bytes = 64 << 20;
  Buffer memory(bytes);
  const CUtensorMap large = map_of(memory.bytes, bytes / 128, 64), small = map_of(memory.bytes, bytes / 128, 8);
  copies<true>("tensor_8k", large, memory.bytes, 8192);
  copies<true>("tensor_1k", small, memory.bytes, 1024);
  copies<false>("bulk_8k", large, memory.bytes, 8192);
  copies<false>("bulk_1k", large, memory.bytes, 1024);
  for (int mask : {0, 1, 3})
    measure("multicast", [&] {
      for (int i = 0; i < 2; ++i) multicast<<<2, 32, 9 << 10>>>(large, uint16_t(mask), out), finish();
      emit("multicast_" + std::to_string(mask), median_of(4, 64), "clocks", "8 KB in L2, at the issuing CTA; 0: a plain copy");
    });
}

// Each CTA streams its share of `pieces` through a ring of slots. out[2 * cta], [2 * cta + 1]: clocks, and the sum of the latencies.
__global__ void __launch_bounds__(32)
    stream(const unsigned char* from, uint32_t pieces, int number, int slots, uint32_t bytes, Clocks* out) {
  SHARED;
  __shared__ __align__(16) uint64_t bars[32];
  __shared__ Clocks issued[32];
  if (elect()) {
    init(bars, slots);
    Clocks begin = now(), latencies = 0;
    for (int i = 0; i < number + slots; ++i) {
      const int slot = i % slots;
      if (i >= slots) {
        wait(address(bars + slot), (i / slots - 1) & 1);
        latencies += now() - issued[slot];
      }
      if (i < number) {
        expect(address(bars + slot), bytes);
        issued[slot] = now();
        const size_t piece = (blockIdx.x + size_t(i) * gridDim.x) % pieces;
        bulk_load(smem + slot * bytes, from + piece * bytes, bytes, address(bars + slot));
      }
    }
    out[2 * blockIdx.x] = now() - begin;
    out[2 * blockIdx.x + 1] = latencies;
  }
}
static void streams(const std::string& name, const Buffer& memory, int ctas, size_t bytes, int passes, int slots, uint32_t piece) {
  measure(name, [&] {
    allow(stream, 201 << 10);
    const uint32_t pieces = uint32_t(bytes / piece);
    const int number = int(size_t(pieces) * passes / ctas);
    double ms = least_ms(3, [&] { stream<<<ctas, 32, 201 << 10>>>(memory.bytes, pieces, number, slots, piece, out); });
    double clocks = 0, latencies = 0;
    for (int i = 0; i < ctas; ++i) clocks += double(out[2 * i]) / ctas, latencies += double(out[2 * i + 1]) / ctas;
    const double moved = double(number) * piece;
    emit(name + "_gbytes", moved * ctas / ms / 1e6, "GB/s", "%d SMs, %d x %u bytes in flight on each; %.0f clocks of latency", ctas, slots,
         piece, latencies / number);
    emit(name + "_bytes", moved / clocks, "bytes/clock", "the same, of an SM");
  });
}
static void bandwidth() {
  const size_t large = size_t(3) << 30, in_l2 = 20 << 20;
  Buffer memory(large);
  for (int slots : {2, 4, 8, 16, 24}) streams("hbm_" + std::to_string(slots), memory, sms, large, 1, slots, 8192);
  for (int slots : {2, 4, 8, 16, 24}) streams("l2_" + std::to_string(slots), memory, sms, in_l2, 40, slots, 8192);
  for (int slots : {1, 4, 16}) streams("l2_1sm_" + std::to_string(slots), memory, 1, 4 << 20, 4, slots, 8192);
}
// Rows of ROW bytes at random places, IN_FLIGHT for each of 16 warps, by cp.async of 16 bytes or by bulk copies.
template <bool BULK, int ROW, int IN_FLIGHT>
__global__ void __launch_bounds__(512) gather(const unsigned char* from, uint32_t rows, int number, uint32_t seed) {
  SHARED;
  __shared__ __align__(16) uint64_t bars[16 * IN_FLIGHT];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = (blockIdx.x * 16 + warp) * number + seed * 7919;
  const uint32_t region = smem + warp * IN_FLIGHT * ROW;
  auto row = [&](int i) { return from + size_t(__umulhi(hash(first + i), rows)) * ROW; };
  if (BULK && elect()) {
    uint64_t* own = bars + warp * IN_FLIGHT;
    init(own, IN_FLIGHT);
    for (int i = 0; i < number + IN_FLIGHT; ++i) {
      const uint32_t slot = i % IN_FLIGHT, bar = address(own + slot);
      if (i >= IN_FLIGHT) wait(bar, (i / IN_FLIGHT - 1) & 1);
      if (i < number) expect(bar, ROW), bulk_load(region + slot * ROW, row(i), ROW, bar);
    }
  }
  if (!BULK)
    for (int i = 0; i < number + IN_FLIGHT; ++i) {
      if (i >= IN_FLIGHT) asm volatile("cp.async.wait_group %0;" ::"n"(IN_FLIGHT - 1) : "memory");
      for (uint32_t j = lane; i < number && j < ROW / 16; j += 32)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     ::"r"(region + i % IN_FLIGHT * ROW + j * 16), "l"(row(i) + j * 16) : "memory");
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
}
template <bool BULK, int ROW, int IN_FLIGHT>
static void gathers(const std::string& name, const Buffer& memory, size_t bytes) {
  measure(name, [&] {
    const int smem = 16 * IN_FLIGHT * ROW + 1024, number = 480;
    uint32_t seed = 0;
    allow(gather<BULK, ROW, IN_FLIGHT>, smem);
    double ms = least_ms(3, [&] { gather<BULK, ROW, IN_FLIGHT><<<sms, 512, smem>>>(memory.bytes, uint32_t(bytes / ROW), number, seed++); });
    const double moved = double(sms) * 16 * number * ROW;
    emit(name, moved / ms / 1e6, "GB/s", "rows of %d bytes out of %.1f GB, %d in flight on an SM", ROW, bytes / 1e9, 16 * IN_FLIGHT);
  });
}
static void gathering() {
  const size_t some = 1500000000, all = size_t(20) << 30;
  Buffer memory(all);
  gathers<false, 656, 4>("gather_async_656_4", memory, some);
  gathers<false, 656, 16>("gather_async_656_16", memory, some);
  gathers<false, 656, 16>("gather_async_656_16_far", memory, all);
  gathers<false, 1152, 8>("gather_async_1152_8", memory, some);
  gathers<true, 656, 16>("gather_bulk_656_16", memory, some);
  gathers<true, 1152, 8>("gather_bulk_1152_8", memory, some);
  gathers<true, 1152, 8>("gather_bulk_1152_8_far", memory, all);
}

// Word pairs at the lines of a ring: each holds the address of the next.
__global__ void link(unsigned char* memory, uint64_t lines, uint64_t step) {
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < lines; i += gridDim.x * blockDim.x)
    *reinterpret_cast<unsigned char**>(memory + i * 128) = memory + (i + step) % lines * 128;
}
// out[0]: clocks of `hops` dependent loads in the last pass, from L1 or beyond it.
template <bool L1>
__global__ void chase(const unsigned char* memory, int hops, int passes, Clocks* out, uint32_t* sink) {
  for (int pass = 0; pass < passes; ++pass) {
    const unsigned char* at = memory;
    Clocks begin = now();
#pragma unroll 8
    for (int i = 0; i < hops; ++i) {
      if (L1) asm volatile("ld.global.ca.u64 %0, [%0];" : "+l"(at)::"memory");
      if (!L1) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at)::"memory");
    }
    report(begin, uint32_t(uint64_t(at)), out, sink);
  }
}
template <bool L1>
static void chases(const std::string& name, const Buffer& memory, uint64_t bytes, uint64_t step, int hops, int passes) {
  measure(name, [&] {
    link<<<256, 256>>>(memory.bytes, bytes / 128, step);
    finish();
    if (passes == 1) flush_l2();
    chase<L1><<<1, 1>>>(memory.bytes, hops, passes, out, sink);
    finish();
    const char* when = passes == 1 ? "cold" : "the last of two passes";
    emit(name, double(out[0]) / hops, "clocks", "dependent loads over %.3f MB, %s", bytes / 1e6, when);
  });
}
static void latencies() {
  Buffer memory(size_t(1) << 30);
  chases<true>("chase_l1", memory, 16 << 10, 7, 1024, 2);
  chases<false>("chase_l2", memory, 1 << 20, 613, 8192, 2);
  chases<false>("chase_l2_20mb", memory, 20 << 20, 16411, 16384, 2);
  chases<false>("chase_hbm", memory, 64 << 20, 16411, 4096, 1);
  chases<false>("chase_hbm_1gb", memory, 1 << 30, 5308871, 4096, 1);
}
