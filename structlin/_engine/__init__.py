"""The product of a structure: `product` defines it and chooses who computes it, the compiled engine
for CPUs (`cpu`), which is optional, or batched products without copies (`views`)."""

# the gradients that a call wants, as bits: `Wants` in cpu.cpp
OF_X = 1
OF_CORES = 2
OF_GAINS = 4
OF_BIAS = 8
