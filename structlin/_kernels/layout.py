"""How a core sees an activation: as blocks of rows, a strided view wherever one exists.

A token's features are the axes of an activation, row-major. A core multiplies blocks of rows,

    out[b, n, o] = sum_i in[b, n, i] core[b, o, i]        b batch, n tokens and repeat, i fan-in, o fan-out

so its input lies as (repeat, batch, fan-in) and its output as (repeat, batch, fan-out); between two cores there is a
fixed permutation of the features, often a trivial one. Where a core without a batch finds its fan-in in front of axes
that repeat it often, as in Kronecker and TT, it multiplies from the left, and nothing moves:

    out[n, o, r] = sum_i core[o, i] in[n, i, r]           n tokens and outer repeat, r inner repeat

An activation is stored in one of two ways:

    rows       (tokens, features)    as the layer's input and output; every block is a view, a permutation is a copy
    columns    (features, tokens)    the tokens run fastest, so most permutations are views too; needs repeat = 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

from torch import Tensor

from .._structure import Core, Structure

LEFT = 32  # inner repeat from which on a product from the left is faster than a permutation and one from the right


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
        return h.view(h.shape[0], *self.sizes).permute(0, *(1 + axis for axis in self.order))

    def columns(self, h: Tensor, batch: int) -> Tensor:
        """`(batch', features', tokens)`, contiguous, to `(batch, features, tokens)`; a view if strides can say it."""
        tokens = h.shape[-1]
        return h.view(*self.sizes, tokens).permute(*self.order, -1).reshape(batch, -1, tokens)


@dataclass(frozen=True, eq=False)
class Stages:
    """A structure as its cores and the permutations before, between and after them."""

    cores: tuple[Core, ...]
    permutations: tuple[Permutation, ...]  #: one before each core, and one after the last
    inner: tuple[int, ...]  #: the inner repeat of each core that multiplies from the left, 1 of the others
    in_features: int
    out_features: int

    @cached_property
    def middle(self) -> int:
        """Features that all cores but the first read, which a backward pass needs."""
        return sum(core.repeat * core.batch * core.fan_in for core in self.cores[1:])

    @cached_property
    def width(self) -> int:
        """Of the widest activation."""
        return max(core.repeat * core.batch * max(core.fan_in, core.fan_out) for core in self.cores)

    @cached_property
    def in_columns(self) -> bool:
        """Can the middle be stored with the tokens running fastest? Nothing is gained where no core has blocks."""
        blocks = any(core.batch > 1 for core in self.cores)
        return len(self.cores) > 1 and blocks and all(core.repeat == 1 for core in self.cores)


def stages(structure: Structure, least: int = LEFT) -> Stages:
    """Of a structure; `least` is the inner repeat from which on a core multiplies from the left."""
    lying, permutations, inner = [*structure.inputs], [], []

    def to(wanted: Sequence[str]) -> None:
        sizes = tuple(structure.sizes[axis] for axis in lying)
        permutations.append(Permutation(sizes, tuple(lying.index(axis) for axis in wanted)))

    for core in structure.cores:
        at, read = lying.index(core.fan_in_axes[0]) if core.fan_in_axes else 0, len(core.fan_in_axes)
        outer, behind = lying[:at], lying[at + read :]
        repeat = prod(structure.sizes[axis] for axis in behind)
        left = core.batch == 1 and repeat >= least and lying[at : at + read] == [*core.fan_in_axes]
        if left:
            to(lying)
            lying = [*outer, *core.fan_out_axes, *behind]
        else:
            to([*core.repeat_axes, *core.batch_axes, *core.fan_in_axes])
            lying = [*core.repeat_axes, *core.batch_axes, *core.fan_out_axes]
        inner.append(repeat if left else 1)
    to(structure.outputs)
    return Stages(structure.cores, tuple(permutations), tuple(inner), structure.in_features, structure.out_features)


@cache
def decode(text: str) -> tuple[Structure, Stages]:
    """A structure and its stages; `text`, `Structure.text`, can stand in the schema of an operator."""
    structure = Structure.parse(text)
    return structure, stages(structure)
