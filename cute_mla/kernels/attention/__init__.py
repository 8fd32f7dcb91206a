"""Code that attention kernels of every architecture share: softmax, lengths, schedulers, the kernel's shell."""
