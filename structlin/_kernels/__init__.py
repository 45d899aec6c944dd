"""Engines behind `_product.run`: the operator (`op`), its products on a CPU (`stages`) and on a GPU (`triton_*`)."""
