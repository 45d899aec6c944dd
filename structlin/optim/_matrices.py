"""A parameter as a batch of matrices, and the batches of many parameters as a few stacks."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from einops import rearrange
from torch import Tensor

from .._model.parameters import Weight

MapStacks = Callable[[Iterable[Tensor]], Iterable[Tensor]]
_LARGEST_STACK = 2**24  # elements that are worked on in one call: bounds the memory of a step


def to_matrices(weight: Weight, tensor: Tensor) -> Tensor:
    """A parameter, or its gradient: `(batch, fan_out, fan_in)`."""
    if weight.core is not None:
        return tensor  # (batch, fan_out, fan_in)
    slices = tensor.reshape(*tensor.shape[:2], weight.kernel)
    return rearrange(slices, f"{_stored(weight)} -> (g k) m n", g=weight.groups)


def from_matrices(weight: Weight, matrices: Tensor, like: Tensor) -> Tensor:
    """The inverse of `to_matrices`, in the shape of `like`."""
    if weight.core is not None:
        return matrices  # (batch, fan_out, fan_in)
    slices = rearrange(matrices, f"(g k) m n -> {_stored(weight)}", g=weight.groups)
    return slices.reshape(like.shape)


def _stored(weight: Weight) -> str:
    """The axes of a dense weight, its kernel flattened: g groups, k positions, m x n matrices."""
    return "(g n) m k" if weight.transposed else "(g m) n k"


def map_stacks(function: MapStacks, matrices: list[Tensor]) -> list[Tensor]:
    """What `function` makes of batches `(batch, m, n)`, alike ones (m, n, dtype, device) together.

    `function` keeps the first dimension, and may take one stack at a time or all of them.
    """
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for n, matrix in enumerate(matrices):
        alike[(*matrix.shape[-2:], matrix.dtype, matrix.device)].append(n)
    sizes = [matrix.numel() for matrix in matrices]
    chunks = [chunk for members in alike.values() for chunk in _chunks(members, sizes)]

    def stack(chunk: list[int]) -> Tensor:
        if len(chunk) == 1:
            return matrices[chunk[0]]  # (batch, m, n)
        return torch.cat([matrices[n] for n in chunk])  # (batches of all of them, m, n)

    results = list(matrices)
    for chunk, result in zip(chunks, function(map(stack, chunks)), strict=True):
        parts = torch.split(result, [len(matrices[n]) for n in chunk])
        for n, part in zip(chunk, parts, strict=True):
            results[n] = part
    return results


def _chunks(members: list[int], sizes: list[int]) -> list[list[int]]:
    """Consecutive members of at most `_LARGEST_STACK` elements together."""
    chunks: list[list[int]] = []
    room = 0
    for member in members:
        if not chunks or sizes[member] > room:
            chunks.append([])
            room = _LARGEST_STACK
        chunks[-1].append(member)
        room -= sizes[member]
    return chunks
