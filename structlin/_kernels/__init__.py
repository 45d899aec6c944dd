"""Engines behind `_product.run`: on a CPU (`cpu.cpp`, `engine` builds it, `op`) and on a GPU
(`triton_*`)."""
