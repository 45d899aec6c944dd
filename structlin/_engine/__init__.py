"""The product of a structure: `product` defines it and chooses who computes it, the compiled engine
for CPUs (`cpu`) or the kernels for GPUs (`triton`), each optional."""
