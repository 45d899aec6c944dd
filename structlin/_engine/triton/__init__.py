"""The kernels for GPUs, in Triton: where features lie, one product, its check, its operators."""
