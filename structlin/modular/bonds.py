"""Bonds: what a network does between its weights. Each class says its sensitivity, and gamma, its
sharpness.

They are bounds for inputs of RMS at most 1, but for these. RMSDivide stretches what is smaller: its
numbers are for inputs of RMS 1. ReLU and GELU can pass a perturbation whole: 1 / sqrt 2 is what MN
takes, the RMS gain on inputs of either sign in equal number, and GELU's gamma is for perturbations
with entries of at most 1. And one head that SplitHeads gives may have a larger RMS than all of them
together.

Source: Large et al. 2024 (arXiv:2405.14813), appendix B.3 and B.4.
"""

from math import pi, sqrt
from typing import Annotated

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .._structure.arguments import Range, checked
from .module import Bond, Composite, Width, single

Dim = Annotated[int, Range(-64, 63)]  # torch's
Dims = Dim | tuple[Dim, ...]


class Abs(Bond):
    """x -> |x|.

    >>> Abs()(torch.tensor([-1.0, 2.0]))
    tensor([1., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class ReLU(Bond):
    """x -> max(x, 0).

    >>> ReLU()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    own_sensitivity = 1 / sqrt(2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class GELU(Bond):
    """x -> x Phi(x). Its second derivative is at most sqrt(2 / pi), at 0.

    >>> GELU()(torch.tensor([-1.0, 2.0]))
    tensor([-0.1587,  1.9545])
    """

    own_sensitivity = 1 / sqrt(2)
    gamma = sqrt(2 / pi)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class _OverDims(Bond):
    """A bond that takes a mean over `dim`."""

    @checked
    def __init__(self, dim: Dims = -1) -> None:
        super().__init__()
        self.dim = dim


class MeanSubtract(_OverDims):
    """x -> x - mean(x) over `dim`.

    >>> MeanSubtract()(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=self.dim, keepdim=True)


class RMSDivide(_OverDims):
    """x -> x / RMS(x) over `dim`, zero to zero. 2 / sqrt 3 is the norm of its second derivative at
    RMS 1.

    >>> RMSDivide()(torch.tensor([3.0, 3.0]))
    tensor([1., 1.])
    """

    gamma = 2 / sqrt(3)

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.square().mean(dim=self.dim, keepdim=True)
        return x * torch.where(mean_square == 0, torch.ones_like(mean_square), mean_square).rsqrt()


def LayerNorm(dim: Dims = -1) -> Composite:  # noqa: N802
    """Mean subtraction, then division by the RMS; without parameters.

    >>> LayerNorm()(torch.tensor([1.0, 2.0, 3.0]))
    tensor([-1.2247,  0.0000,  1.2247])
    """
    return RMSDivide(dim) @ MeanSubtract(dim)


class FunctionalAttention(Bond):
    """(q, k, v) -> softmax(q k^T / d) v, each `(..., heads, tokens, d)`; without weights.

    Divided by d and not by sqrt(d), it has sensitivity 1 and gamma 3 where the queries, keys and
    values of each head have RMS at most 1 (MN, appendix B).

    >>> q = k = v = torch.ones(1, 2, 3, 4)  # (batch, heads, tokens, d)
    >>> FunctionalAttention(causal=True)((q, k, v)).shape
    torch.Size([1, 2, 3, 4])
    """

    gamma = 3.0

    @checked
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def width(self, width: Width) -> Width:
        if width is None:
            return None
        if not isinstance(width, tuple) or len(width) != 3:
            raise ValueError(
                f"FunctionalAttention takes a tuple (q, k, v), but it is given {width}"
            )
        queries, keys, values = width
        if None not in (queries, keys) and queries != keys:
            raise ValueError(
                f"FunctionalAttention: queries have {queries} features and keys {keys}, "
                "they must agree"
            )
        return values

    def forward(self, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        q, k, v = qkv
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=1 / q.shape[-1])


class SplitHeads(Bond):
    """`(..., tokens, heads * d)` -> `(..., heads, tokens, d)`.

    >>> SplitHeads(2)(torch.ones(5, 3, 8)).shape
    torch.Size([5, 2, 3, 4])
    """

    @checked
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def width(self, width: Width) -> Width:
        features = single(self, width)
        if features is not None and features % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide the {features} features "
                "that SplitHeads is given"
            )
        return None if features is None else features // self.heads

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(x, "... t (h d) -> ... h t d", h=self.heads)


class MergeHeads(Bond):
    """`(..., heads, tokens, d)` -> `(..., tokens, heads * d)`.

    >>> MergeHeads()(torch.ones(5, 2, 3, 4)).shape
    torch.Size([5, 3, 8])
    """

    keeps_width = False

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(x, "... h t d -> ... t (h d)")
