"""Batches of matrices: truncation, and what positive semi-definite ones need."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

OF_INPUTS = "X X^T / N of the layer's inputs"


def truncate(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The nearest `left @ right` of `rank` to each matrix of a batch; the rows of `right` are
    orthonormal.

    Where the matrix is too small for the rank, rows of `right` come again and `left` is zero there.
    """
    *_, m, n = matrices.shape
    k = min(rank, m, n)
    if n <= m:
        right = leading_eigenvectors(matrices.mT @ matrices, k).mT
        left = matrices @ right.mT
    else:
        basis = leading_eigenvectors(matrices @ matrices.mT, k)
        orthonormal, triangle = torch.linalg.qr((basis.mT @ matrices).mT)
        left = basis @ triangle.mT
        right = orthonormal.mT
    repeated_rows = torch.arange(rank, device=right.device) % k
    return F.pad(left, (0, rank - k)), right[:, repeated_rows]


def approach(matrices: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of `truncate` from the rows of `right`: the result is never farther from the
    matrices than what those rows can give (subspace iteration)."""
    rank = right.shape[-2]
    if rank >= min(matrices.shape[-2:]):
        return truncate(matrices, rank)
    columns = torch.linalg.qr(matrices.mT @ (matrices @ right.mT)).Q
    return matrices @ columns, columns.mT


def leading_eigenvectors(gram: Tensor, k: int) -> Tensor:
    """The eigenvectors of the k largest eigenvalues, as columns.

    On one thread for small blocks: LAPACK gains nothing from more, and loses a factor of 100 where
    cores are busy.
    """
    with limit_threads(1, gram.is_cpu and gram.shape[-1] <= 256):
        vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors[..., -k:].flip(-1)


@contextmanager
def limit_threads(most: int, only_if: bool = True) -> Iterator[None]:
    """Within it, torch computes with so many threads at most."""
    threads = torch.get_num_threads()
    if threads <= most or not only_if:
        yield
        return
    try:
        torch.set_num_threads(most)
        yield
    finally:
        torch.set_num_threads(threads)


def make_definite(c: Tensor, name: str = "covariance", hint: str = OF_INPUTS) -> Tensor:
    """C scaled to a mean variance of 1, plus the identity times the least power of ten that makes
    the sum numerically positive definite.

    Inputs that never vary then keep W's own columns, as far as the structure can hold them. `c` may
    be the diagonal of a diagonal C.
    """
    if c.ndim == 1:
        return c / (c.mean() or 1.0) + 1e-14
    c = (c + c.mT) / 2
    c = c / (c.diagonal().mean().abs() or 1.0)
    for exponent in range(-14, -3):
        shifted = c + 10.0**exponent * identity_like(c)
        if torch.linalg.cholesky_ex(shifted).info == 0:
            return shifted
    raise ValueError(
        f"{name} has an eigenvalue of {torch.linalg.eigvalsh(c)[0].item():.3g} times its mean "
        f"variance; it must be positive semi-definite: {hint}"
    )


def extend(c: Tensor, columns: int) -> Tensor:
    """C with inputs more that are always zero."""
    extended = F.pad(c, (0, columns, 0, columns))
    extended.diagonal()[len(c) :] = 1e-14
    return extended


def invert(gram: Tensor) -> Tensor:
    """The inverse, slightly damped."""
    return torch.cholesky_inverse(_take_damped_root(gram))


def solve_damped(gram: Tensor, right: Tensor) -> Tensor:
    """`invert(gram) @ right`."""
    return torch.cholesky_solve(right, _take_damped_root(gram))


def _take_damped_root(gram: Tensor) -> Tensor:
    mean = mean_diagonal(gram)[..., None, None]
    unit = torch.where(mean > 0, mean, torch.ones_like(mean))
    damping = unit * sqrt(torch.finfo(gram.dtype).eps)
    root: Tensor = torch.linalg.cholesky(gram + damping * identity_like(gram))
    return root


def divide_norms(error: float, whole: float) -> float:
    """The relative error: 0 where both norms are 0, infinite where only `whole` is."""
    if whole:
        return error / whole
    return inf if error else 0.0


def mean_diagonal(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).mean(-1)


def identity_like(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
