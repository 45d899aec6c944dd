"""The matrices of parameters, in stacks of one shape whose directions are computed together."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from .._model.parameters import Weight
from ..duality import LARGEST_STACK, SMALLEST_STACK, Polar, dualize_embedding
from ._sharding import join_parts, local_gradient, take_part


class Member(NamedTuple):
    """A parameter of a stack."""

    parameter: Tensor
    weight: Weight
    length: float  #: of its step at lr = 1


@dataclass(frozen=True)
class Stack:
    """Parameters that step together, and how the directions of their steps are computed."""

    members: list[Member]
    polar: Callable[[Tensor], Tensor] | None  #: of `(batch, m, n)`; None: AdamW's
    gradients: Sequence[Tensor] = ()  #: in a step, each member's: what this process holds of it

    @property
    def params(self) -> list[Tensor]:
        return [member.parameter for member in self.members]

    def with_gradients(self) -> "Stack":
        """The parameters that have a gradient, with it. Processes may wait for one another."""
        stepping = [member for member in self.members if member.parameter.grad is not None]
        gradients = [local_gradient(member.parameter) for member in stepping]
        return Stack(stepping, self.polar, gradients)

    def dualize(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """The directions of steepest descent, without their lengths. On several processes, from
        their part of each update to their part of its direction."""
        assert self.polar is not None
        pairs = zip(self.members, updates, strict=True)
        wholes = [join_parts(p, weight, update) for (p, weight, _), update in pairs]
        # of each parameter (batch, fan_out, fan_in), and the polar factors of these
        matrices = [to_matrices(m.weight, x) for m, x in zip(self.members, wholes, strict=True)]
        factors = map_stacked(self.polar, matrices)
        return [
            take_part(p, weight, from_matrices(weight, factor))
            for (p, weight, _), factor in zip(self.members, factors, strict=True)
        ]


def stack_alike(
    params: Iterable[Tensor],
    weights: Mapping[Tensor, Weight],
    lengths: Callable[[Tensor], float],
    choose: Callable[[tuple[int, int], torch.dtype, torch.device], Polar] | None,
) -> list[Stack]:
    """Stacks of alike parameters. An embedding is alone, since to stack vectors saves nothing. A
    stack of matrices has at most an eighth of all numbers: a step needs memory for one stack.

    Args:
        choose: None: AdamW steps them all, whatever they are.
    """
    alike: dict[tuple[str, int, int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for p in params:
        weight = weights[p] if choose is not None else Weight()
        alike[weight.kind, weight.fan_out, weight.fan_in, p.dtype, p.device].append(p)
    numbers = sum(p.numel() for members in alike.values() for p in members)
    stacks = []
    for (kind, m, n, dtype, device), members in alike.items():
        polar: Callable[[Tensor], Tensor] | None = (
            dualize_embedding if kind == "embedding" else None
        )
        most = 0 if kind == "embedding" else numbers
        if kind == "matrix" and choose is not None:
            polar = chosen = choose((m, n), dtype, device)
            most = min(chosen.largest_stack, max(SMALLEST_STACK, numbers // 8))
        for chunk in divide([p.numel() for p in members], most):
            own = (members[n] for n in chunk)
            stacks.append(Stack([Member(p, weights[p], lengths(p)) for p in own], polar))
    return stacks


def to_matrices(weight: Weight, tensor: Tensor) -> Tensor:
    """A parameter, or its gradient: `(batch, fan_out, fan_in)`; vectors stay as they are."""
    if weight.stored == weight.matrices:
        return tensor
    return rearrange(tensor, f"{weight.stored} -> {weight.matrices}", **weight.sizes)


def from_matrices(weight: Weight, matrices: Tensor) -> Tensor:
    """The inverse of `to_matrices`."""
    if weight.stored == weight.matrices:
        return matrices
    return rearrange(matrices, f"{weight.matrices} -> {weight.stored}", **weight.sizes)


def map_stacked(function: Callable[[Tensor], Tensor], matrices: list[Tensor]) -> list[Tensor]:
    """`function`, which keeps the first dimension, of each `(batch, m, n)`: of alike ones (m, n,
    dtype, device) together."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = defaultdict(list)
    for n, matrix in enumerate(matrices):
        alike[matrix.shape[1:], matrix.dtype, matrix.device].append(n)
    results = list(matrices)
    for members in alike.values():
        for chunk in divide([matrices[n].numel() for n in members], LARGEST_STACK):
            own = [members[n] for n in chunk]
            # (sum of the batches, m, n), and back in parts of (batch, m, n)
            stack = torch.cat([matrices[n] for n in own]) if len(own) > 1 else matrices[own[0]]
            parts = torch.split(function(stack), [len(matrices[n]) for n in own])
            for n, part in zip(own, parts, strict=True):
                results[n] = part
    return results


def fill_one_storage(tensors: Sequence[Tensor]) -> bool:
    """Whether they lie in one storage, one after the other and nothing else, as the parts of a
    split do. A compiler is told no: it follows no storage."""
    if torch.compiler.is_compiling():
        return False
    storage = tensors[0].untyped_storage()
    begin = 0
    for tensor in tensors:
        own = tensor.untyped_storage().data_ptr()
        if not tensor.is_contiguous() or own != storage.data_ptr():
            return False
        if tensor.storage_offset() != begin and tensor.numel():
            return False
        begin += tensor.numel()
    return begin * tensors[0].element_size() == storage.nbytes()


def divide(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices in chunks of sizes of at most `most` together. One that is larger is alone.

    >>> divide([2, 2, 2, 5], most=4)
    [[0, 1], [2], [3]]
    """
    chunks: list[list[int]] = []
    room = 0
    for n, size in enumerate(sizes):
        if not chunks or size > room:
            chunks.append([])
            room = most
        chunks[-1].append(n)
        room -= size
    return chunks
