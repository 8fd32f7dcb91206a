// Microbenchmarks of a Hopper GPU: the constants of the clock (profiles/clock) that nobody has published.
//
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a microbenchmarks.cu -o microbenchmarks
//   ./microbenchmarks list         prints the names of the groups
//   ./microbenchmarks GROUP...     runs these groups and prints a JSON line a measurement; "clocks" are of the SM
//
// `python -m cute_mla.profiles.results` makes constants of the lines; profiles/measured_constants.py says which.
// A measurement that fails is a line named ERROR. After an error that stays on the device the program exits with 3.
#include "barriers.cuh"
#include "instructions.cuh"
#include "launches.cuh"
#include "memory.cuh"
#include "shared_memory.cuh"
#include "tensor_core.cuh"

// In the order of use to the clock, should time run out.
static const std::pair<const char*, void (*)()> GROUPS[] = {
    {"conversions", conversions}, {"products", products}, {"copies", copy_engine}, {"launches", launches},
    {"clock", clock_rates}, {"barriers", barrier_latencies}, {"cluster", cluster}, {"bandwidth", bandwidth},
    {"latencies", latencies}, {"arithmetic", arithmetic}, {"shared", shared_memory}, {"ports", shared_port_groups},
    {"gather", gathering},
};

static void set_up() {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0));
  sms = device.multiProcessorCount;
  check(cudaHostAlloc(&out, OUT_WORDS * sizeof(Clocks), cudaHostAllocDefault));
  check(cudaMalloc(&data, DATA_BYTES));
  check(cudaMalloc(&sink, 1 << 20));
  for (int i = 0; i < 50; ++i) fill<<<1320, 256>>>(data, DATA_BYTES / 4);  // also raises the clock
  finish();
  char date[16];
  const std::time_t seconds = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&seconds));
  emit("device", sms, "SMs", "%s; %s", device.name, date);
}
int main(int count, char** arguments) {
  if (count == 2 && !strcmp(arguments[1], "list")) {
    for (auto& [name, run] : GROUPS) puts(name);
    return 0;
  }
  try {
    set_up();
    for (auto& [name, run] : GROUPS)
      for (int i = 1; i < count; ++i)
        if (!strcmp(arguments[i], name)) run();
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
