"""Performance of the kernels: benchmark rows, rooflines, an analytic model, figures of built kernels, and timing on a GPU.

rows, shapes, roofline, definitions/   the benchmark rows, the least work of each, and their bounds
model/                                 predicted times
kernel_stats/                          static figures and executed instructions of built kernels, with golden values
workloads/, baselines/, measure/       operands and checks of a row, other libraries, timing
report, results, plots/                the document that `profile` writes, stored measurements, SVG plots
microbenchmarks/, measured_constants    CUDA programs for constants of the clock, and what follows from them
host_cost, preflight, on_gpu.sh        host time of a call; the offline run on a GPU machine
"""
