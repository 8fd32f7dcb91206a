"""Ahead-of-time build: kernel sources to PTX, cubins and the manifest, with gates before a kernel ships.

Needs the build extra, but neither GPU nor CUDA toolkit.

variants, fingerprint, compile, tools   the list of kernels, their build keys, the DSL and NVIDIA's programs
ptx, cubin, sass, opcode_counts         readers of the compiler's output
gates, build                            checks on that output, and the parallel build
wheel, rebuild                          packing, and the reproducibility check
"""
