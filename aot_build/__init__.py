"""Kernel sources -> PTX + cubin + manifest, with gates on what may ship. Needs the build extra; no GPU, no CUDA toolkit."""
