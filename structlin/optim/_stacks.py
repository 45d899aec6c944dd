"""The matrices of parameters, in stacks of one shape whose directions are computed together."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from .._model.parameters import Weight
from .._torch import foreach_lerp
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


class Blocks:
    """The blocks of alike parameters in one step: what a `Direction` works on.

    Alike parameters have matrices of one shape `(m, n)`, have made as many steps, and have the same
    state. Their blocks lie one after the other, `(blocks, m, n)`. On several processes these are
    the blocks that this process has; what is cut is whole here.

    Attributes:
        options: the group's.
        polar: the polar factor of `(blocks, m, n)`, as `method` and `dtype` choose it.
        state: `(blocks, ...)` each, by name, without the momentum. What is written into a tensor is
            in the parameters' own state.
        count: of the steps, with this one.
    """

    def __init__(
        self,
        stack: "Stack",
        options: Mapping[str, Any],
        momenta: list[Tensor],
        state: dict[str, Tensor],
        count: int,
    ) -> None:
        self.members = stack.members
        self.polar = stack.polar
        self.gradients = stack.gradients
        self.options = options
        self.momenta = momenta
        self.state = state
        self.count = count
        self.sizes: list[int] = []
        self._gradient: Tensor | None = None

    def gradient(self) -> Tensor:
        """The gradient G, `(blocks, m, n)`. Do not change it."""
        if self._gradient is None:  # processes communicate once
            self._gradient = self.stack(self.gradients)
        return self._gradient

    def average(self) -> Tensor:
        """The momentum B, the average of gradients of before this step, `(blocks, m, n)`."""
        return self.stack(self.momenta)

    @property
    def is_copied(self) -> bool:
        """Whether `stack` makes new tensors, which may be changed in place."""
        return len(self.members) > 1

    def update(self) -> Tensor:
        """Nesterov's (1 - momentum) G + momentum B, with this step's B, `(blocks, m, n)`."""
        momentum = self.options["momentum"]
        averages = foreach_lerp(self.momenta, list(self.gradients), 1 - momentum)
        return self.stack(foreach_lerp(list(self.gradients), averages, momentum))

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """What is cut as the parameters are, one tensor for each, as `(blocks, m, n)`."""
        matrices = []
        for member, tensor in zip(self.members, tensors, strict=True):
            whole = join_parts(member.parameter, member.weight, tensor)
            matrices.append(to_matrices(member.weight, whole))
        self.sizes = [len(matrix) for matrix in matrices]
        return torch.cat(matrices) if len(matrices) > 1 else matrices[0]

    def unstack(self, directions: Tensor) -> list[Tensor]:
        """The inverse of `stack`."""
        local_directions = []
        for member, blocks in zip(self.members, torch.split(directions, self.sizes), strict=True):
            direction = from_matrices(member.weight, blocks)
            local_directions.append(take_part(member.parameter, member.weight, direction))
        return local_directions


class Direction:
    """How the blocks of a stack step: all that a new block optimizer has to say.

    One is made for each stack in each step. A step asks every stack for `find`, checks all
    directions, moves the parameters, and then calls `keep`. So nothing may change before `keep`;
    what that needs of `find` is an attribute.
    """

    name: ClassVar[str]  #: of the step, in the table of `print(optimizer)`
    state_names: ClassVar[tuple[str, ...]] = ()  #: of what a parameter may have beside the momentum
    #: No direction of a block has a larger root mean square of its singular values.
    largest_value: ClassVar[float] = inf

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.options = blocks.options
        self.state = blocks.state

    @classmethod
    def serves(cls, weight: Weight, options: Mapping[str, Any]) -> bool:
        """Whether such a matrix steps so. Others step by their polar factor."""
        return True

    @classmethod
    def describe(cls, weight: Weight, options: Mapping[str, Any]) -> str:
        """The step of such a matrix, in the table of `print(optimizer)`."""
        return cls.name

    @classmethod
    def explain(cls, options: Mapping[str, Any], largest: str) -> str:
        """The end of the error of a direction that is too large or not finite."""
        return (
            f"{cls.name}, and none has more than {largest}; nothing was changed. Its state is not "
            "finite: load one that is, or drop it by optimizer.state.pop(parameter)"
        )

    def start(self) -> dict[str, Tensor]:
        """The state before the first step, by name: `(blocks, ...)`, of three dimensions."""
        return {}

    def find(self) -> Tensor:
        """The directions, `(blocks, m, n)`, about as long as polar factors. Nothing changes."""
        raise NotImplementedError

    def keep(self) -> None:
        """Write into the state, in place, what the next step needs."""


class PolarFactor(Direction):
    """The polar factor of Nesterov's momentum: Muon's direction. Of an embedding each vector is
    divided by its RMS."""

    name = "polar factor"
    largest_value = 1.5  # singular values are near 1

    @classmethod
    def explain(cls, options: Mapping[str, Any], largest: str) -> str:
        return (
            f"method={options['method']!r}, and none has more than {largest}; nothing was changed. "
            "Take method='svd' or dtype=torch.float32"
        )

    def find(self) -> Tensor:
        assert self.blocks.polar is not None
        return self.blocks.polar(self.blocks.update())


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
            params_of_stack = [members[n] for n in chunk]
            stack = [Member(p, weights[p], lengths(p)) for p in params_of_stack]
            stacks.append(Stack(stack, polar))
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
            numbers = [members[n] for n in chunk]
            batches = [matrices[n] for n in numbers]
            # (sum of the batches, m, n), and back to (batch, m, n) each
            stack = torch.cat(batches) if len(batches) > 1 else batches[0]
            mapped = torch.split(function(stack), [len(batch) for batch in batches])
            for n, result in zip(numbers, mapped, strict=True):
                results[n] = result
    return results


def fill_one_storage(tensors: Sequence[Tensor]) -> bool:
    """Whether they lie in one storage, one after the other and nothing else, as the parts of a
    split do. A compiler is told no: it follows no storage."""
    if torch.compiler.is_compiling():
        return False
    storage = tensors[0].untyped_storage()
    begin = 0
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if not tensor.is_contiguous() or address != storage.data_ptr():
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
