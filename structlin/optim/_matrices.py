"""A parameter as a batch of matrices, and the batches of many parameters as a few stacks."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from einops import rearrange
from torch import Tensor

from .._model.parameters import Weight

MapStacks = Callable[[Iterable[Tensor]], Iterable[Tensor]]
LARGEST_STACK = 2**24  # elements that are worked on in one call: bounds the memory of a step
LARGEST_ON_CPU = 2**16  # where a stack stays in the cache, and copying a large matrix is a waste


def to_matrices(weight: Weight, tensor: Tensor) -> Tensor:
    """A parameter, or its gradient: `(batch, fan_out, fan_in)`."""
    if weight.core is not None:
        return tensor  # (batch, fan_out, fan_in)
    if tensor.shape == (weight.fan_out, weight.fan_in) and not weight.transposed:
        return tensor[None]  # an nn.Linear's
    slices = tensor.reshape(*tensor.shape[:2], weight.kernel)
    return rearrange(slices, f"{_stored(weight)} -> (g p k) m n", g=weight.groups, p=weight.parts)


def from_matrices(weight: Weight, matrices: Tensor, like: Tensor) -> Tensor:
    """The inverse of `to_matrices`, in the shape of `like`."""
    if weight.core is not None:
        return matrices  # (batch, fan_out, fan_in)
    if like.shape == (weight.fan_out, weight.fan_in) and not weight.transposed:
        return matrices[0]
    slices = rearrange(
        matrices, f"(g p k) m n -> {_stored(weight)}", g=weight.groups, p=weight.parts
    )
    return slices.reshape(like.shape)


def _stored(weight: Weight) -> str:
    """The axes of a dense weight, its kernel flattened: g groups, k positions, p parts of m x n."""
    return "(g n) (p m) k" if weight.transposed else "(g p m) n k"


def map_stacks(
    function: MapStacks, matrices: list[Tensor], most: int = LARGEST_STACK
) -> list[Tensor]:
    """What `function` makes of batches `(batch, m, n)`, alike ones (m, n, dtype, device) together.

    `function` keeps the first dimension, and may take one stack, of at most `most` elements or one
    batch, at a time, or all of them.
    """
    kinds = [(*matrix.shape[-2:], matrix.dtype, matrix.device) for matrix in matrices]
    chunks = chunk_alike(kinds, [matrix.numel() for matrix in matrices], most)

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


def chunk_alike(kinds: Sequence[Hashable], sizes: Sequence[int], most: int) -> list[list[int]]:
    """The indices of each kind, in order, in chunks of at most `most` elements together.

    One that is larger by itself is a chunk of its own.

    >>> chunk_alike("abaa", [2, 2, 2, 2], most=4)
    [[0, 2], [3], [1]]
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for n, kind in enumerate(kinds):
        alike[kind].append(n)
    chunks: list[list[int]] = []
    for members in alike.values():
        room = 0
        for n in members:
            if n == members[0] or sizes[n] > room:
                chunks.append([])
                room = most
            chunks[-1].append(n)
            room -= sizes[n]
    return chunks
