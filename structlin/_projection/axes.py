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
    names = dict.fromkeys(axis for _, axes in operands for axis in axes)
    letter = dict(zip(names, ascii_letters, strict=False))
    *sources, result = (
        "".join(letter[axis] for axis in axes) for axes in (*(axes for _, axes in operands), to)
    )
    return torch.einsum(f"{','.join(sources)}->{result}", *(tensor for tensor, _ in operands))


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
    square: Tensor, axes: Sequence[str], given: list[str], own: list[str], size: Mapping[str, int]
) -> Tensor:
    """The blocks of a matrix over `axes` on both sides that have one value of `given` on both,
    summed over what is neither `given` nor `own`: `(given, own, own)`."""
    rows = split_axes(square, [*axes, *axes], size)
    blocks = contract([*given, *own, *prime(own)], (rows, [*axes, *prime(axes, own)]))
    return as_squares(blocks, own, size)


def store(structure: Structure, n: int, tensor: Tensor, axes: Sequence[str]) -> Tensor:
    """A tensor over the axes of core n, as that core is stored: `(batch, fan_out, fan_in)`."""
    core = structure.cores[n]
    return group_axes(
        tensor, axes, (core.batch_axes, core.fan_out_axes, core.fan_in_axes), structure.sizes
    )
