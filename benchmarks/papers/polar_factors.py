"""The polar factors that the papers compare, as methods of `structlin.optim.Muon`: schedules of
coefficients, and functions of matrices `(..., m, n)`.

Sources: Bernstein & Newhouse 2024 (arXiv:2410.21265); Jordan et al. 2024, "Muon"; Amsel et al.
2025, "The Polar Express" (arXiv:2505.16932); Halko, Martinsson & Tropp 2011 (arXiv:0909.4061).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from structlin import dualize
from structlin.duality import SCHEDULES

Method = str | Sequence[tuple[float, float, float]] | Callable[[Tensor], Tensor]

PAPERS: dict[str, Sequence[tuple[float, float, float]]] = {
    "cubic": ((1.5, -0.5, 0.0),) * 30,
    "quintic": ((2.0, -1.5, 0.5),) * 12,
    "quintic-steep": ((3.0, -3.2, 1.2),) * 10,
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    # As published, for [1e-3, 1]; its first step divides by 1.02, again for the sake of rounding.
    "polar-express": (
        (8.2872 / 1.02, -23.5959 / 1.02**3, 17.3004 / 1.02**5),
        (4.1071, -2.9478, 0.5448),
        (3.9487, -2.9089, 0.5518),
        (3.3184, -2.4885, 0.5100),
        (2.3007, -1.6689, 0.4188),
        (1.8913, -1.2680, 0.3768),
        (1.8750, -1.2500, 0.3750),
        (1.8750, -1.2500, 0.3750),
    ),
}
COEFFICIENTS = {**SCHEDULES, **PAPERS}  # by name: (a, b, c) per step


def inverse_root(matrix: Tensor) -> Tensor:
    """Return (G G^T)^(-1/2) G from an eigendecomposition in float64.

    It is as exact as "svd" where the condition number is below 1e6.
    """
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = (matrix if wide else matrix.mT).double()
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / torch.where(norms == 0, 1, norms)
    eigenvalues, q = torch.linalg.eigh(x @ x.mT)
    eps = max(torch.finfo(matrix.dtype).eps, torch.finfo(torch.float64).eps ** 0.5)
    kept = eigenvalues > eigenvalues[..., -1:] * (x.shape[-1] * eps) ** 2
    roots = torch.where(kept, eigenvalues, 1).rsqrt() * kept
    polar = (q * roots[..., None, :]) @ q.mT @ x
    return (polar if wide else polar.mT).to(matrix.dtype)


def sketch(matrix: Tensor) -> Tensor:
    """Return the polar factor of the leading half of the singular directions alone.

    A randomised range finder with a fixed seed finds them: the range of x x^T x omega. The other
    directions map to 0.
    """
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if wide else matrix.mT
    rank = (x.shape[-2] + 1) // 2
    seeded = torch.Generator().manual_seed(0)  # pure: the same input gives the same output
    omega = torch.randn(x.shape[-1], rank, generator=seeded, dtype=torch.float64)
    basis = torch.linalg.qr(x @ (x.mT @ (x @ omega.to(x.device, x.dtype)))).Q
    polar = basis @ dualize(basis.mT @ x, method="svd")
    return polar if wide else polar.mT


METHODS: dict[str, Method] = {
    "svd": "svd",
    "inverse-root": inverse_root,
    "sketch": sketch,
    "ns": "ns",
    "fast": "fast",
    **PAPERS,
}


def find_polar(matrix: Tensor, method: str) -> Tensor:
    """Return the polar factor of `matrix` by one of METHODS."""
    chosen = METHODS[method]
    return chosen(matrix) if callable(chosen) else dualize(matrix, method=chosen)


def dual_efficiency(gradient: Tensor, update: Tensor) -> Tensor:
    """Return how much of the steepest descent `update` is: `<G, X> / (|G|_* |X|_2)`, `(...)`.

    |.|_* is the nuclear norm and |.|_2 the spectral norm of each matrix. It is 1 for the exact
    polar factor, and NaN where either matrix is zero.

    >>> g = torch.randn(3, 8, 16)
    >>> dual_efficiency(g, dualize(g)).min() > 0.999, bool(dual_efficiency(g, g).max() < 0.95)
    (tensor(True), True)
    """
    inner = (gradient * update).sum(dim=(-2, -1))
    norms = torch.linalg.matrix_norm(gradient, "nuc") * torch.linalg.matrix_norm(update, 2)
    return inner / norms
