"""Structure and cores -> numbers: the only place where activations are permuted and multiplied."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from .structure import TOKENS, Structure

if TYPE_CHECKING:
    from cola.ops import LinearOperator


def apply(structure: Structure, cores: Sequence[Tensor], x: Tensor) -> Tensor:
    """`y = W x` for every token, core by core, without ever forming W.

    Args:
        cores: one tensor `(batch, fan_out, fan_in)` per core of the structure.
        x: `(..., structure.in_features)`, any leading shape and strides, also no tokens at all.

    Returns:
        `(..., structure.out_features)`. Differentiable any number of times; `torch.compile(fullgraph=True)` sees
        batched products and permutations only.

    Raises:
        ValueError: wrong last dimension of `x`, wrong number or shape of cores, mixed devices.
        TypeError: `x` is not floating point, or its dtype is not the cores' (outside autocast).

    >>> from structlin import Kronecker
    >>> structure = Kronecker().structure(6, 6)
    >>> right, left = torch.randn(1, 3, 3), torch.randn(1, 2, 2)
    >>> x = torch.randn(5, 6)
    >>> torch.allclose(apply(structure, [right, left], x), x @ torch.kron(left[0], right[0]).T, atol=1e-5)
    True
    """
    _check(structure, cores, x)
    h = x.reshape(1, -1, structure.in_features)
    for (pattern, sizes), core in zip(structure.rearrangements, cores, strict=False):
        h = rearrange(h, pattern, **sizes)  # (batch, tokens * repeat, fan_in)
        h = torch.bmm(h, core.mT)  # (batch, tokens * repeat, fan_out)
    pattern, sizes = structure.rearrangements[-1]
    return rearrange(h, pattern, **sizes).reshape(*x.shape[:-1], structure.out_features)


def to_dense(structure: Structure, cores: Sequence[Tensor]) -> Tensor:
    """The matrix W that `apply` multiplies by: `(out_features, in_features)`, differentiable in the cores.

    >>> from structlin import LowRank
    >>> v, u = torch.randn(1, 2, 6), torch.randn(1, 4, 2)
    >>> torch.allclose(to_dense(LowRank(rank=2).structure(6, 4), [v, u]), u[0] @ v[0])
    True
    """
    _check_cores(structure, cores)
    identity = torch.eye(structure.in_features, dtype=cores[0].dtype, device=cores[0].device)
    return apply(structure, cores, identity).mT


def to_cola(structure: Structure, cores: Sequence[Tensor]) -> "LinearOperator":
    """W as a CoLA `LinearOperator`: a product of block-diagonal, Kronecker and permutation operators.

    It stays matrix-free, so CoLA's spectral algorithms run on a trained layer. Needs `cola-ml`.

    Source: Potapczynski et al. 2023, "CoLA" (arXiv:2309.03060).

    >>> from structlin import LowRank
    >>> v, u = torch.randn(1, 2, 6), torch.randn(1, 4, 2)
    >>> operator = to_cola(LowRank(rank=2).structure(6, 4), [v, u])
    >>> operator.shape, torch.allclose(operator.to_dense(), u[0] @ v[0])
    ((4, 6), True)
    """
    from cola.ops import BlockDiag, Dense, Identity, Kronecker, Permutation, Product

    _check_cores(structure, cores)
    dtype, device = cores[0].dtype, cores[0].device
    factors: list[LinearOperator] = []

    def permute(pattern: str, sizes: dict[str, int], width: int) -> None:
        left, right = re.sub("[()]", "", pattern).split("->")
        identity = torch.arange(width, device=device)
        order = rearrange(identity, f"({left}) -> ({right})", **{TOKENS: 1}, **sizes)
        if not torch.equal(order, identity):
            factors.append(Permutation(order, dtype=dtype))

    width = structure.in_features
    for (pattern, sizes), core, weight in zip(structure.rearrangements, structure.cores, cores, strict=False):
        permute(pattern, sizes, width)
        blocks = [Dense(block) for block in weight]
        if core.repeat > 1:
            shared = Identity((core.repeat, core.repeat), dtype=dtype)
            blocks = [Kronecker(shared, block) for block in blocks]
        factors.append(blocks[0] if core.batch == 1 else BlockDiag(*blocks))
        width = core.batch * core.repeat * core.fan_out
    permute(*structure.rearrangements[-1], width)
    return factors[0] if len(factors) == 1 else Product(*reversed(factors))


def _check(structure: Structure, cores: Sequence[Tensor], x: Tensor) -> None:
    _check_cores(structure, cores)
    if x.ndim == 0 or x.shape[-1] != structure.in_features:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: its last dimension must be in_features={structure.in_features}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x has dtype {x.dtype}; a structured product needs a floating-point input")
    if x.device != cores[0].device:
        raise ValueError(f"x is on {x.device}, the cores are on {cores[0].device}")
    if x.dtype != cores[0].dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"x has dtype {x.dtype}, the cores have {cores[0].dtype}; cast one of them or use autocast")


def _check_cores(structure: Structure, cores: Sequence[Tensor]) -> None:
    if len(cores) != len(structure.cores):
        raise ValueError(f"{len(cores)} cores given; the structure has {len(structure.cores)}: {structure!r}")
    for n, (core, tensor) in enumerate(zip(structure.cores, cores, strict=True)):
        if tuple(tensor.shape) != core.shape:
            raise ValueError(f"cores[{n}] has shape {tuple(tensor.shape)}; the structure needs {core.shape}")
        if tensor.dtype != cores[0].dtype or tensor.device != cores[0].device:
            raise ValueError(
                f"cores[{n}] is {tensor.dtype} on {tensor.device}, cores[0] is {cores[0].dtype} on {cores[0].device}"
            )
