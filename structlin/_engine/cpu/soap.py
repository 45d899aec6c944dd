"""The compiled step of SOAP for small blocks (`soap.h`), as two operators: one finds directions and
changes nothing, the other writes the state."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..operators import is_plain
from .polar import has_engine

LARGEST_SIDE = 256  # of a block that lies in a core's cache with its factors

torch.library.define(
    "structlin::soap_find",
    "(Tensor gradient, Tensor average, Tensor squares, Tensor? left, Tensor? right, float weight,"
    " float beta, float length, float longest) -> (Tensor, Tensor, bool)",
)
torch.library.define(
    "structlin::soap_keep",
    "(Tensor gradient, Tensor new_squares, Tensor(a!) squares, Tensor(b!)? left,"
    " Tensor(c!)? left_basis, Tensor(d!)? right, Tensor(e!)? right_basis, float beta, bool turns)"
    " -> ()",
)
find = torch.ops.structlin.soap_find.default
keep = torch.ops.structlin.soap_keep.default


class Found(NamedTuple):
    """What `find` says of a stack."""

    directions: Tensor  #: (blocks, m, n)
    squares: Tensor  #: the next V, (blocks, m, n)
    fits: bool  #: whether float32 holds the squares of all numbers in their unit


def takes(tensors: Sequence[Tensor]) -> bool:
    """Whether the operators take a stack: gradients `(blocks, m, n)` first, and its state."""
    gradient = tensors[0]
    if torch.compiler.is_compiling() or not gradient.is_cpu or gradient.dtype != torch.float32:
        return False
    if max(gradient.shape[-2:]) > LARGEST_SIDE or not gradient.numel() or not has_engine():
        return False
    return all(x.dtype == torch.float32 and x.is_contiguous() and is_plain(x) for x in tensors)


@register_flop_formula(torch.ops.structlin.soap_find)
def _(
    gradient: Sequence[int], average: Any, squares: Any, left: Any, right: Any, *_: Any, **__: Any
) -> int:
    blocks, m, n = gradient
    depth = (m if left is not None else 0) + (n if right is not None else 0)
    return 3 * 2 * blocks * m * n * depth  # G, the update, and the direction back
