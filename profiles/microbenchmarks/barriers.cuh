// Barriers, and traffic between the CTAs of a cluster.
#pragma once
#include "common.cuh"

enum class Barrier { pingpong, done, sts, sts_fence, sync, named_pingpong, cluster };
// Clocks of 512 rounds. pingpong: two warps arrive for each other; done: a wait for a complete phase.
template <Barrier KIND>
__global__ void barriers(Clocks* out, uint32_t* sink) {
  __shared__ __align__(16) uint64_t bars[2];
  __shared__ __align__(16) uint32_t words[2048];
  const bool second = threadIdx.x >= blockDim.x / 2;
  const uint32_t own = address(bars + second), other = address(bars + !second), words_of_thread = address(words + 4 * threadIdx.x);
  if (threadIdx.x == 0) init(bars, 2);
  __syncthreads();
  if (KIND == Barrier::cluster) cluster_sync();
  Clocks begin = now();
#pragma unroll 4
  for (int i = 0; i < 512; ++i) {
    if (KIND == Barrier::pingpong && threadIdx.x % 32 == 0) {
      if (!second) arrive(own), wait(other, i & 1);
      if (second) wait(other, i & 1), arrive(own);
    }
    if (KIND == Barrier::done && threadIdx.x == 0) wait(own, 1);
    if (KIND == Barrier::sts || KIND == Barrier::sts_fence)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(words_of_thread), "r"(i) : "memory");
    if (KIND == Barrier::sts_fence) fence_async();
    if (KIND == Barrier::sync) asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x) : "memory");
    if (KIND == Barrier::named_pingpong) {
      if (!second) asm volatile("bar.arrive 1, %0; bar.sync 2, %0;" ::"r"(blockDim.x) : "memory");
      if (second) asm volatile("bar.sync 1, %0; bar.arrive 2, %0;" ::"r"(blockDim.x) : "memory");
    }
    if (KIND == Barrier::cluster) cluster_sync();
  }
  Clocks clocks = now() - begin;
  __syncthreads();
  if (threadIdx.x == 0 && rank_in_cluster() == 0) out[0] = clocks;
  sink[threadIdx.x] = words[threadIdx.x];
}
static void launch(const void* kernel, int grid, int block, int smem, int cluster, bool dependent, cudaStream_t stream, void** arguments) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2];
  config.gridDim = dim3(grid), config.blockDim = dim3(block), config.dynamicSmemBytes = smem, config.stream = stream;
  config.attrs = attributes;
  if (dependent) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = cluster;
    attributes[config.numAttrs].val.clusterDim.y = attributes[config.numAttrs].val.clusterDim.z = 1;
    ++config.numAttrs;
  }
  check(cudaLaunchKernelExC(&config, kernel, arguments));
}
template <Barrier KIND>
static void barrier(const std::string& name, int threads, int hops, const char* detail) {
  measure(name, [&] {
    const int ctas = KIND == Barrier::cluster ? 2 : 1;
    void* arguments[] = {&out, &sink};
    double all = least_clocks([&] { launch((const void*)barriers<KIND>, ctas, threads, 0, ctas, false, nullptr, arguments); });
    emit(name, all / 512 / hops, "clocks", "%s; %d threads", detail, threads);
  });
}
static void barrier_latencies() {
  barrier<Barrier::pingpong>("mbarrier_hop", 64, 2, "from an arrival to the next one of the waiting warp");
  barrier<Barrier::done>("mbarrier_done", 32, 1, "try_wait of a complete phase and its branch");
  barrier<Barrier::sts>("sts128", 32, 1, "STS.128");
  barrier<Barrier::sts_fence>("sts128_fence", 32, 1, "STS.128 and fence.proxy.async");
  barrier<Barrier::sts_fence>("sts128_fence_4", 128, 1, "the same by 4 warps");
  for (int threads : {64, 128, 256, 512}) {
    barrier<Barrier::sync>("bar_sync_" + std::to_string(threads), threads, 1, "bar.sync");
    barrier<Barrier::named_pingpong>("bar_hop_" + std::to_string(threads), threads, 2, "from bar.arrive to that of the others");
  }
  for (int threads : {32, 128, 512})
    barrier<Barrier::cluster>("cluster_barrier_" + std::to_string(threads), threads, 1, "arrive.release and wait.acquire, 2 CTAs");
}
// Two CTAs take turns; out[0]: clocks of 512 hops. bytes: of the bulk copy, 0: an arrival.
__global__ void __cluster_dims__(2) remote_hops(uint32_t bytes, Clocks* out) {
  SHARED;
  __shared__ __align__(16) uint64_t bar[1];
  if (threadIdx.x == 0) init(bar, 1);
  cluster_sync();
  if (threadIdx.x == 0) {
    const uint32_t own = address(bar), peer = in_peer(own), to = in_peer(smem + 32768), rank = rank_in_cluster();
    Clocks begin = now();
    for (int i = 0; i < 512; ++i) {
      if ((i & 1) != rank) {
        if (bytes) expect(own, bytes);
        wait(own, i / 2 & 1);
      } else if (bytes) {
        bulk_send(to, smem, bytes, peer);
      } else {
        arrive_remote(peer);
      }
    }
    if (rank == 0) out[0] = now() - begin;
  }
  cluster_sync();
}
// Bulk copies of 8 KB to the peer. out[cta]: clocks until all have come.
__global__ void __cluster_dims__(2) remote_bandwidth(int number, bool both, Clocks* out) {
  SHARED;
  __shared__ __align__(16) uint64_t bar[1];
  const uint32_t rank = rank_in_cluster();
  if (threadIdx.x == 0) {
    init(bar, 1);
    if (both || rank == 1) expect(address(bar), number * 8192);
  }
  cluster_sync();
  if (elect()) {
    Clocks begin = now();
    for (int i = 0; i < number && (both || rank == 0); ++i)
      bulk_send(in_peer(smem + 32768 + i % 4 * 8192), smem + i % 4 * 8192, 8192, in_peer(address(bar)));
    if (both || rank == 1) wait(address(bar), 0);
    out[blockIdx.x] = now() - begin;
  }
  cluster_sync();
}
static void cluster() {
  allow(remote_hops, 65 << 10);
  allow(remote_bandwidth, 65 << 10);
  for (int bytes : {0, 16, 1024, 8192, 32768})
    measure("remote_hop", [&] {
      double hop = least_clocks([&] { remote_hops<<<2, 32, 65 << 10>>>(bytes, out); }) / 512;
      const std::string name = bytes ? "remote_bulk_hop_" + std::to_string(bytes) : "remote_arrive_hop";
      emit(name, hop, "clocks", "until the peer's wait has ended");
    });
  for (int both : {0, 1})
    measure("remote_bytes", [&] {
      auto mean = [&](int number) {
        remote_bandwidth<<<sms / 2 * 2, 32, 65 << 10>>>(number, both, out);
        finish();
        double sum = 0;
        for (int i = 1; i < sms / 2 * 2; i += 2) sum += out[i];
        return sum / (sms / 2);
      };
      mean(8);
      emit(both ? "remote_bytes_both" : "remote_bytes_oneway", 56 * 8192 / (mean(64) - mean(8)), "bytes/clock",
           "in a direction, all clusters of 2 at once, by the 56 copies of 8 KB after 8");
    });
}
