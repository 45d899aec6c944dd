"""How a core sees an activation: as blocks of rows, a strided view wherever one exists.

A token's features are the axes of an activation, row-major. A core multiplies blocks of rows,

    out[b, n, o] = sum_i in[b, n, i] core[b, o, i]        b batch, n tokens and repeat, i fan-in, o fan-out

so its input lies as (repeat, batch, fan-in) and its output as (repeat, batch, fan-out); between two cores there is a
fixed permutation of the features, often a trivial one. An activation is stored in one of two ways:

    rows       (tokens, features)    as the layer's input and output; every block is a view, a permutation is a copy
    columns    (features, tokens)    the tokens run fastest, so most permutations are views too; needs repeat = 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from torch import Tensor

from ..structure import Core, Structure


@dataclass(frozen=True)
class Permutation:
    """Of the axes of a token's features.

    >>> import torch
    >>> swap = Permutation(sizes=(2, 3), order=(1, 0))
    >>> swap.rows(torch.arange(6)[None]), swap.inverse.rows(swap.rows(torch.arange(6)[None]))
    (tensor([[0, 3, 1, 4, 2, 5]]), tensor([[0, 1, 2, 3, 4, 5]]))
    """

    sizes: tuple[int, ...]  #: of the axes, in the order in which they lie
    order: tuple[int, ...]  #: in which they shall lie

    @cached_property
    def trivial(self) -> bool:
        wide = [axis for axis in self.order if self.sizes[axis] > 1]
        return wide == sorted(wide)

    @cached_property
    def inverse(self) -> "Permutation":
        return Permutation(
            tuple(self.sizes[axis] for axis in self.order),
            tuple(self.order.index(axis) for axis in range(len(self.order))),
        )

    def rows(self, h: Tensor) -> Tensor:
        """`(tokens, features)`, contiguous, to the same; h itself if nothing moves."""
        return h if self.trivial else self.view(h).reshape(h.shape)

    def view(self, h: Tensor) -> Tensor:
        """`(tokens, features)`, contiguous, to the permuted view `(tokens, *axes)`."""
        return h.view(len(h), *self.sizes).permute(0, *(1 + axis for axis in self.order))

    def columns(self, h: Tensor, batch: int) -> Tensor:
        """`(batch', features', tokens)`, contiguous, to `(batch, features, tokens)`; a view if strides can say it."""
        tokens = h.shape[-1]
        return h.view(*self.sizes, tokens).permute(*self.order, -1).reshape(batch, -1, tokens)


@dataclass(frozen=True)
class Stages:
    """A structure as its cores and the permutations before, between and after them."""

    cores: tuple[Core, ...]
    permutations: tuple[Permutation, ...]  #: one before each core, and one after the last
    in_features: int
    out_features: int

    @property
    def middle(self) -> int:
        """Features that all cores but the first read, which a backward pass needs."""
        return sum(core.repeat * core.batch * core.fan_in for core in self.cores[1:])

    @property
    def width(self) -> int:
        """Of the widest activation."""
        return max(core.repeat * core.batch * max(core.fan_in, core.fan_out) for core in self.cores)

    @property
    def in_columns(self) -> bool:
        """Can the middle be stored with the tokens running fastest? Nothing is gained where no core has blocks."""
        blocks = any(core.batch > 1 for core in self.cores)
        return len(self.cores) > 1 and blocks and all(core.repeat == 1 for core in self.cores)


def stages(structure: Structure) -> Stages:
    inputs, outputs = (side.split() for side in structure.signature.split("->"))
    lying, permutations = inputs, []

    def to(wanted: Sequence[str]) -> None:
        sizes = tuple(structure.sizes[axis] for axis in lying)
        permutations.append(Permutation(sizes, tuple(lying.index(axis) for axis in wanted)))

    for core in structure.cores:
        to([*core.repeat_axes, *core.batch_axes, *core.fan_in_axes])
        lying = [*core.repeat_axes, *core.batch_axes, *core.fan_out_axes]
    to(outputs)
    return Stages(structure.cores, tuple(permutations), structure.in_features, structure.out_features)


def encode(structure: Structure) -> str:
    """A structure as text, for the schema of an operator: `"g d -> b a; g s b d; b a g s; a=8 b=4 d=8 g=4 s=1"`."""
    sizes = " ".join([f"{axis}={size}" for axis, size in structure.sizes.items()])
    return "; ".join([structure.signature, *structure.subscripts, sizes])


@cache
def decode(text: str) -> tuple[Structure, Stages]:
    signature, *cores, sizes = text.split("; ")
    named = (size.split("=") for size in sizes.split())
    structure = Structure(signature, *cores, **{axis: int(size) for axis, size in named})
    return structure, stages(structure)


def blocks(h: Tensor, core: Core, features: int) -> Tensor:
    """Rows `(tokens, (repeat, batch, features))` as `(batch, tokens * repeat, features)`: a view."""
    return h.view(len(h) * core.repeat, core.batch, features).transpose(0, 1)
