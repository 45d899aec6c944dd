"""A structure as a CoLA operator, for the spectral algorithms of that library.

pip install "structlin[cola]"
from cola_operator import to_cola
operator = to_cola(layer.structure, layer.effective_cores())
largest = cola.linalg.eigmax(cola.PSD(operator.T @ operator), alg=cola.linalg.Lanczos()) ** 0.5
"""

from collections.abc import Sequence

import torch
from cola.ops import BlockDiag, Dense, Identity, Kronecker, LinearOperator, Permutation, Product
from torch import Tensor

from structlin import Structure


def to_cola(structure: Structure, cores: Sequence[Tensor]) -> LinearOperator:
    """W as a CoLA `LinearOperator`: a product of block-diagonal, Kronecker and permutation
    operators.

    It stays matrix-free, so CoLA's spectral algorithms run on a trained layer.

    Source: Potapczynski et al. 2023, "CoLA" (arXiv:2309.03060).

    >>> from structlin import LowRank
    >>> v, u = torch.randn(1, 2, 6), torch.randn(1, 4, 2)
    >>> operator = to_cola(LowRank(rank=2).structure(6, 4), [v, u])
    >>> operator.shape, torch.allclose(operator.to_dense(), u[0] @ v[0])
    ((4, 6), True)
    """
    dtype = cores[0].dtype
    device = cores[0].device
    factors: list[LinearOperator] = []

    def permute(sizes: Sequence[int], order: Sequence[int], width: int) -> None:
        if order:
            identity = torch.arange(width, device=device)
            permuted = identity.view(*sizes).permute(*order).flatten()  # (width,)
            factors.append(Permutation(permuted, dtype=dtype))

    # Each step moves the axes of its input, then multiplies it by a block-diagonal matrix: `batch`
    # blocks (fan_out, fan_in), each applied to `repeat` vectors, which is kron(I_repeat, block).
    width = structure.in_features
    for step, weight in zip(structure.program.steps, cores, strict=True):
        permute(*step.move, width)
        blocks = [Dense(block) for block in weight]
        if step.repeat > 1:
            shared = Identity((step.repeat, step.repeat), dtype=dtype)
            blocks = [Kronecker(shared, block) for block in blocks]
        factors.append(blocks[0] if step.batch == 1 else BlockDiag(*blocks))
        width = step.batch * step.repeat * step.fan_out
    permute(*structure.program.final_move, width)
    return factors[0] if len(factors) == 1 else Product(*reversed(factors))
