"""What PyTorch's products can do on a device."""

from functools import lru_cache

import torch


@lru_cache
def writes_views(device: str) -> bool:
    """Whether torch.bmm writes into a strided view there: some backends refuse, or miss it."""
    if device == "cuda":  # cuBLAS does; an answer may not be waited for while a graph is captured
        return True
    weight = torch.ones(2, 3, 4, device=device)
    operand = torch.ones(2, 4, 5, device=device)
    result = torch.zeros(3, 2, 5, device=device)
    try:
        torch.bmm(weight, operand, out=result.transpose(0, 1))
    except RuntimeError:
        return False
    return bool((result == 4).all())
