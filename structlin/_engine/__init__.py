"""The product of a structure: `product` defines it and chooses who computes it, the compiled engine
for CPUs (`cpu`), which is optional, or batched products without copies (`views`)."""

OF_X, OF_CORES, OF_GAINS, OF_BIAS = 1, 2, 4, 8  # gradients that are wanted: `Wants` in cpu.cpp
