// Launches, and the clock of the SMs under load.
#pragma once
#include "barriers.cuh"
#include "tensor_core.cuh"

__global__ void empty(int*) {}
__global__ void empty_dependent(int*) {
  asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
}
// A node of a chain: stamps[3 * cta]: nanoseconds of its start, of the end of its wait for the node before, and of its end, 10 us later.
__global__ void stamp(uint64_t* stamps, int dependent) {
  uint64_t start = nanoseconds();
  if (dependent) asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
  uint64_t begin = nanoseconds();
  while (nanoseconds() - begin < 10000) {}
  if (threadIdx.x == 0) stamps[3 * blockIdx.x] = start, stamps[3 * blockIdx.x + 1] = begin, stamps[3 * blockIdx.x + 2] = nanoseconds();
}
// Returns the least microseconds of a CUDA graph of `nodes` launches in sequence.
static double graph_us(int nodes, const std::function<void(cudaStream_t, int)>& launch_node) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < nodes; ++i) launch_node(stream, i);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&ready, graph, 0));
  double us = 1e3 * least_ms(10, [&] { check(cudaGraphLaunch(ready, stream)); }, stream);
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return us;
}
static void nodes(const std::string& name, int ctas, int threads, int smem, int cluster, bool dependent) {
  measure(name, [&] {
    int* nothing = nullptr;
    void* arguments[] = {&nothing};
    const void* kernel = dependent ? (const void*)empty_dependent : (const void*)empty;
    auto node = [&](cudaStream_t stream, int i) { launch(kernel, ctas, threads, smem, cluster, dependent && i > 0, stream, arguments); };
    double many = graph_us(200, node), few = graph_us(100, node);
    emit(name, (many - few) / 100, "us", "a node of a graph; %d x %d threads, %d KB, clusters of %d", ctas, threads, smem >> 10, cluster);
  });
}
static void gaps(const std::string& name, int dependent) {
  measure(name, [&] {
    constexpr int number = 20;
    auto* stamps = reinterpret_cast<uint64_t*>(out);
    graph_us(number, [&](cudaStream_t stream, int i) {
      uint64_t* own = stamps + i * 3 * sms;
      void* arguments[] = {&own, &dependent};
      launch((const void*)stamp, sms, 256, 0, 1, dependent && i > 0, stream, arguments);
    });
    std::vector<double> found;
    for (int i = 4; i < number; ++i) {
      uint64_t end = 0, start = ~0ull;
      for (int cta = 0; cta < sms; ++cta) {
        end = std::max(end, stamps[((i - 1) * sms + cta) * 3 + 2]);
        start = std::min(start, stamps[(i * sms + cta) * 3 + 1]);
      }
      found.push_back((double(start) - double(end)) / 1e3);
    }
    emit(name, median(found), "us", "from the end of a kernel to the first CTA of the next one that may go on");
  });
}
// out[3 * cta]: the SM of a CTA, the clocks of its start and of its end.
__global__ void turn(Clocks* out) {
  Clocks begin = now();
  while (now() - begin < 3000) {}
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    out[3 * blockIdx.x] = sm, out[3 * blockIdx.x + 1] = begin, out[3 * blockIdx.x + 2] = now();
  }
}
static void launches() {
  allow(empty, 220 << 10);
  allow(empty_dependent, 220 << 10);
  allow(stamp, 1024);  // loads it, which a capture does not allow
  nodes("graph_node", sms, 256, 0, 1, false);
  nodes("graph_node_220k", sms, 384, 220 << 10, 1, false);
  nodes("graph_node_cluster", sms, 384, 220 << 10, 2, false);
  nodes("graph_node_dependent", sms, 256, 0, 1, true);
  nodes("graph_node_dependent_220k", sms, 384, 220 << 10, 1, true);
  gaps("gap", 0);
  gaps("gap_dependent", 1);
  measure("cta_turnover", [] {
    allow(turn, 220 << 10);
    for (int i = 0; i < 2; ++i) turn<<<10 * sms, 384, 220 << 10>>>(out), finish();
    std::map<Clocks, std::vector<std::pair<Clocks, Clocks>>> by_sm;
    for (int i = 0; i < 10 * sms; ++i) by_sm[out[3 * i]].push_back({out[3 * i + 1], out[3 * i + 2]});
    std::vector<double> found;
    for (auto& [sm, ctas] : by_sm) {
      std::sort(ctas.begin(), ctas.end());
      for (size_t i = 1; i < ctas.size(); ++i) found.push_back(double(ctas[i].first - ctas[i - 1].second));
    }
    emit("cta_turnover", median(found), "clocks", "from the end of a CTA to the start of the next on its SM; 384 threads, 220 KB");
  });
}

// Products for half a second, 16 of an SM every `period` clocks. out[3 * i]: nanoseconds, clocks and products of CTA 0 every 20 ms.
template <class Product>
__global__ void __launch_bounds__(256) loaded(const uint32_t* data, int period, Clocks* out, uint32_t* sink) {
  SHARED;
  __shared__ volatile int stop;
  Multiplier<Product> m(data, smem);
  const uint64_t start = nanoseconds();
  int samples = 0;
  Clocks next = now();
  for (Clocks products = 0;; products += 128) {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      m.template group<8, 1>();
      while (now() < next) {}
      next += period;
    }
    if (threadIdx.x == 0) {
      const uint64_t ns = nanoseconds() - start;
      if (blockIdx.x == 0 && ns >= 20000000ull * samples && samples < 25)
        out[3 * samples] = ns, out[3 * samples + 1] = now(), out[3 * samples++ + 2] = products;
      stop = ns > 500000000;
    }
    __syncthreads();
    const int ends = stop;
    __syncthreads();
    if (ends) break;
  }
  m.template wait<0>();
  sink[threadIdx.x] = m.result();
}
template <class Product>
static void clock_of(const std::string& name, double use) {
  measure(name, [&] {
    allow(loaded<Product>, PRODUCT_SMEM);
    const int period = use < 1 ? int(16 * Product::clocks / use) : 0;
    loaded<Product><<<sms, 256, PRODUCT_SMEM>>>(data, period, out, sink);
    finish();
    const double ns = double(out[72] - out[36]), clocks = double(out[73] - out[37]), products = double(out[74] - out[38]);
    emit(name + "_ghz", clocks / ns, "GHz", "the second half of 0.5 s; %.3f of the rate of the tensor cores, %.0f TFLOP/s",
         products * Product::clocks / clocks, products * Product::flops * sms / ns / 1e3);
  });
}
static void clock_rates() {
  clock_of<SS256>("clock_60", 0.60);
  clock_of<SS256>("clock_76", 0.76);
  clock_of<SS256>("clock_full", 1);
  clock_of<RS256>("clock_full_registers", 1);
  clock_of<FP8_SS256>("clock_full_fp8", 1);
}
