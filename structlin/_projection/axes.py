"""Tensors with named axes: an axis for each name, primed where a matrix has the same axis on both
sides."""

from collections.abc import Mapping, Sequence
from math import prod
from string import ascii_letters

import torch
from torch import Tensor

from .._structure.structure import Structure


def prime(axes: Sequence[str], those: Sequence[str] | None = None) -> list[str]:
    """The axes with a prime, all or only `those`: the second index of a matrix over the same
    axis."""
    return [f"{axis}'" if those is None or axis in those else axis for axis in axes]


def _sizes_of(axes: Sequence[str], size: Mapping[str, int]) -> list[int]:
    return [size[axis.rstrip("'")] for axis in axes]


def split_axes(tensor: Tensor, axes: Sequence[str], size: Mapping[str, int]) -> Tensor:
    """The tensor with a dimension for each axis."""
    return tensor.reshape(_sizes_of(axes, size))


def contract(to: Sequence[str], *operands: tuple[Tensor, Sequence[str]]) -> Tensor:
    """`torch.einsum` over named axes: `operands` are tensors, one dimension an axis, with their
    names."""
    letters: dict[str, str] = {}  # of the axes, in the order in which they come
    for _, axes in operands:
        for axis in axes:
            letters.setdefault(axis, ascii_letters[len(letters)])
    sources = ["".join(letters[axis] for axis in axes) for _, axes in operands]
    result = "".join(letters[axis] for axis in to)
    tensors = [tensor for tensor, _ in operands]
    return torch.einsum(f"{','.join(sources)}->{result}", *tensors)


def group_axes(
    tensor: Tensor, axes: Sequence[str], groups: Sequence[Sequence[str]], size: Mapping[str, int]
) -> Tensor:
    """A tensor over `axes` as one with a dimension for each group of them."""
    order = [axis for group in groups for axis in group]
    permuted = split_axes(tensor, axes, size).permute([axes.index(axis) for axis in order])
    return permuted.reshape([prod(_sizes_of(group, size)) for group in groups])


def as_squares(tensor: Tensor, group: Sequence[str], size: Mapping[str, int]) -> Tensor:
    """A tensor whose last axes are `group` twice, as a batch of square matrices."""
    n = prod(_sizes_of(group, size))
    return tensor.reshape(-1, n, n)


def take_blocks(
    square: Tensor,
    axes: Sequence[str],
    block_axes: list[str],
    inner_axes: list[str],
    size: Mapping[str, int],
) -> Tensor:
    """The diagonal blocks of a matrix over `axes` on both sides: one for each value of
    `block_axes`, over `inner_axes` on both sides, summed over all other axes: `(blocks, inner,
    inner)`."""
    matrix = split_axes(square, [*axes, *axes], size)
    result_axes = [*block_axes, *inner_axes, *prime(inner_axes)]
    blocks = contract(result_axes, (matrix, [*axes, *prime(axes, inner_axes)]))
    return as_squares(blocks, inner_axes, size)


def store(structure: Structure, n: int, tensor: Tensor, axes: Sequence[str]) -> Tensor:
    """A tensor over the axes of core n, as that core is stored: `(batch, fan_out, fan_in)`."""
    core = structure.cores[n]
    return group_axes(
        tensor, axes, (core.batch_axes, core.fan_out_axes, core.fan_in_axes), structure.sizes
    )
