"""The polar factor of batched matrices, and the duality maps made of it. Names no family.

A gradient is a dual vector; the duality map of a norm turns it into the step that decreases the loss fastest per unit
of that norm. For a matrix under the RMS->RMS operator norm that is sqrt(fan_out / fan_in) U V^T, with G = U S V^T; the
norm of a batched core is the largest of its blocks', so its map acts on each block by itself.

Source: Bernstein & Newhouse 2024, "Modular Duality in Deep Learning" (arXiv:2410.21265). Iterations: Newton-Schulz
(Higham 2008, ch. 8); quintic coefficients of Jordan et al. 2024 (Muon); Amsel et al. 2025, "The Polar Express"
(arXiv:2505.16932), also for the Remez construction behind "ns" and "fast".
"""

from math import sqrt

import torch
from torch import Tensor

# One (a, b, c) per step: X <- a X + b (X X^T) X + c (X X^T)^2 X, on singular values in [0, 1].
SCHEDULES: dict[str, tuple[tuple[float, float, float], ...]] = {
    # optimal composition (Remez) for singular values in [1e-4, 1] of the largest: error below 1e-4 there
    "ns": (
        (8.318233, -23.684210, 17.365146),
        (4.155384, -2.960332, 0.543077),
        (4.138241, -2.955875, 0.543686),
        (4.068883, -2.938174, 0.546351),
        (3.792132, -2.833665, 0.549261),
        (2.918343, -2.183037, 0.475600),
        (2.046667, -1.429830, 0.393389),
        (1.876388, -1.251541, 0.375154),
    ),
    "cubic": ((1.5, -0.5, 0.0),) * 30,
    "quintic": ((2.0, -1.5, 0.5),) * 12,
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar-express": (
        (8.2872, -23.5959, 17.3004),
        (4.1071, -2.9478, 0.5448),
        (3.9487, -2.9089, 0.5518),
        (3.3184, -2.4885, 0.5100),
        (2.3007, -1.6689, 0.4188),
        (1.8913, -1.2680, 0.3768),
        (1.8750, -1.2500, 0.3750),
        (1.8750, -1.2500, 0.3750),
    ),
}
METHODS = ("svd", *SCHEDULES)


def dualize(matrix: Tensor, *, method: str = "ns") -> Tensor:
    """The polar factor U V^T of the last two dimensions, G = U S V^T: every singular value becomes 1. Pure.

    Args:
        matrix: `(..., m, n)`, real floating point. Leading dimensions are independent matrices.
        method: "svd" is exact: singular values below the numerical rank become 0. The others are Newton-Schulz
            iterations in float32 (float64 for float64 input), which only multiply matrices: "ns", 8 steps of a
            schedule made for this, has singular values within 1e-3 of 1 where the input's are above 1e-4 of the
            Frobenius norm; "cubic" (1.5, -0.5), "quintic" (2, -1.5, 0.5), "jordan" (Muon's five steps: values land
            between 0.68 and 1.13) and "polar-express" are for comparison.

    Returns:
        A new tensor, of the dtype of `matrix`. Independent of the scale of each matrix, and odd. A zero matrix maps
        to zero; singular values that are exactly zero stay (nearly, for the iterations) zero.

    Raises:
        ValueError: `method` is unknown, or `matrix` has fewer than two dimensions.
        TypeError: `matrix` is not real floating point.

    >>> g = torch.randn(4, 8, 16)
    >>> torch.linalg.svdvals(dualize(g)).sub(1).abs().max() < 1e-3
    tensor(True)
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; there are {', '.join(METHODS)}")
    if matrix.ndim < 2:
        raise ValueError(f"matrix has shape {tuple(matrix.shape)}; it needs at least two dimensions (m, n)")
    if not matrix.is_floating_point():
        raise TypeError(f"matrix has dtype {matrix.dtype}; it must be real floating point")
    if matrix.numel() == 0:
        return matrix.clone()
    x = matrix.to(torch.float64 if matrix.dtype == torch.float64 else torch.float32)
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    x = x / torch.where(largest > 0, largest, torch.ones_like(largest))  # norms below neither under- nor overflow
    if method == "svd":
        return _svd(x).to(matrix.dtype)
    norm = torch.linalg.matrix_norm(x, keepdim=True)
    x = x / torch.where(norm > 0, norm, torch.ones_like(norm))
    return _newton_schulz(x, SCHEDULES[method]).to(matrix.dtype)


def dual_core(gradient: Tensor, *, method: str = "ns") -> Tensor:
    """Duality map of a core or a linear layer: sqrt(fan_out / fan_in) U V^T for each block of `(..., fan_out, fan_in)`.

    >>> torch.linalg.matrix_norm(dual_core(torch.randn(3, 8, 2)), 2).round(decimals=2)  # sqrt(8 / 2) in each block
    tensor([2., 2., 2.])
    """
    m, n = gradient.shape[-2:]
    return sqrt(m / n) * dualize(gradient, method=method)


def _svd(x: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    tolerance = s[..., :1] * max(x.shape[-2:]) * torch.finfo(x.dtype).eps
    return torch.matmul(u * (s > tolerance).to(x.dtype).unsqueeze(-2), vh)


def _newton_schulz(x: Tensor, schedule: tuple[tuple[float, float, float], ...]) -> Tensor:
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT  # the Gram matrix is of the short side
    for a, b, c in schedule:
        gram = x @ x.mT
        polynomial = b * gram + c * (gram @ gram) if c else b * gram
        x = a * x + polynomial @ x
    return x if wide else x.mT
