"""A whole layer on the Triton products: three per core, and no copy of an activation between them.
Untested on GPU.

    forward     h_i = h_(i-1) core_i                                    every core i, block by block
    backward    dcore_i = dh_i^T h_(i-1),    dh_(i-1) = dh_i core_i^T   last to first

Between the cores the features of an activation may be stored in any order, so one is taken in which
all products read and write 16 bytes at a time: the tokens run fastest (best for a multiple of 16),
or, if a core is used several times per token (Kronecker, TT), the features do, as they are
produced. The output needs a copy where its fastest axis is a batch axis of the last core (Monarch):
one block's results would be written 2 bytes at a time. They are written as they are produced, and
permuted once.

Everything is read from `Program.numbers`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from math import prod
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._structure.structure import steps_of

Axes = tuple[tuple[int, int], ...]  # (size, stride) of each axis of an index, the last one fastest
Product = Callable[..., None]  # `block_gemm` of gemm.py, by whatever means


def plain(
    a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, *, rows: str = "m"
) -> None:
    """By PyTorch."""
    y = torch.einsum("yzmlkj,yzkjnp->yzmlnp", a, b)
    out.copy_(y if bias is None else y + bias)


def nothing(*_: Any, **__: Any) -> None:
    """Where shapes alone are asked for."""


class Side(NamedTuple):
    """How a product reads or writes the features of an activation."""

    axes: Axes  #: batch, batch', repeat, fan and fan'; more where no product can take them
    width: int  #: features of a token
    turned: bool  #: stored as (features, tokens), or else as (tokens, features)

    def view(self, h: Tensor, tokens: int) -> Tensor:
        """`(batch, batch', tokens, repeat, fan, fan')` of h, flat or `(tokens, features)`."""
        feature = tokens if self.turned else 1  # elements from one feature to the next
        token = h.stride(0) if h.ndim == 2 else 1 if self.turned else self.width
        axes = [(size, feature * stride) for size, stride in self.axes]
        axes.insert(2, (tokens, token))
        return h.as_strided([size for size, _ in axes], [stride for _, stride in axes])


class Stage(NamedTuple):
    """One core: the features that it reads and writes; batch and repeat are the same of both."""

    read: Side
    written: Side

    def view(self, core: Tensor) -> Tensor:
        """`(batch, batch', fan_out, fan_out', fan_in, fan_in')`."""
        axes = (*self.read.axes[:2], *self.written.axes[3:], *self.read.axes[3:])
        return core.contiguous().view([size for size, _ in axes])


class Layout(NamedTuple):
    """A layer: its stages, and the sizes and the order of the output's copy, if any."""

    stages: list[Stage]
    sizes: tuple[int, ...]
    order: tuple[int, ...]


def supported(program: Sequence[int]) -> bool:
    """Whether no index of a product has more than two axes, the tokens among them.

    >>> from structlin import TT
    >>> supported(TT(rank=2, cores=4).structure(256, 256).program.numbers)
    False
    """
    stages = lay_out(tuple(program)).stages
    return all(len(side.axes) == 5 for stage in stages for side in stage)


def forward(
    program: Sequence[int], cores: Sequence[Tensor], x: Tensor, bias: Tensor | None, by: Product
) -> list[Tensor]:
    """`y = x W^T + bias` for x `(tokens, in_features)`, and for `backward` what each core but the
    first reads, flat."""
    layout, tokens = lay_out(tuple(program)), x.shape[0]
    found = [x.new_empty(tokens * stage.written.width) for stage in layout.stages]
    reads = [x.contiguous(), *found[:-1]]
    for stage, core, h, out in zip(layout.stages, cores, reads, found, strict=True):
        weight = stage.view(core).permute(0, 1, 4, 5, 2, 3)  # (batch, fan_in, fan_out)
        added = None
        if out is found[-1] and bias is not None and not layout.order:
            added = stage.written.view(bias.expand(tokens, -1), tokens)
        # (batch, tokens * repeat, fan_in) (batch, fan_in, fan_out), each index in two levels
        by(stage.read.view(h, tokens), weight, stage.written.view(out, tokens), added)
    *middle, y = found
    if layout.order:
        y = y.view(tokens, *layout.sizes).permute(0, *(1 + axis for axis in layout.order))
        y = y if bias is None else y + bias.view(y.shape[1:])
    return [y.reshape(tokens, program[1]), *middle]


def backward(
    program: Sequence[int],
    cores: Sequence[Tensor],
    x: Tensor,
    middle: Sequence[Tensor],
    dy: Tensor,
    wants: Sequence[bool],
    by: Product,
) -> list[Tensor]:
    """dx `(tokens, in_features)` and the gradients of the cores, each empty if it is not among
    `wants`, (x, cores)."""
    layout, read = lay_out(tuple(program)), [x.contiguous(), *middle]
    dh, tokens = dy.contiguous(), x.shape[0]
    gradients = [core.new_empty(core.shape if wants[1] else 0) for core in cores]
    if layout.order:
        dh = dh.view(tokens, *(layout.sizes[axis] for axis in layout.order))
        back = (1 + layout.order.index(axis) for axis in range(len(layout.order)))
        dh = dh.permute(0, *back).contiguous()
    for i, stage in reversed(list(enumerate(layout.stages))):
        dh_view = stage.written.view(dh, tokens)
        if wants[1]:  # (batch, fan_out, tokens * repeat) (batch, tokens * repeat, fan_in)
            transposed = dh_view.permute(0, 1, 4, 5, 2, 3)
            h_view = stage.read.view(read[i], tokens)
            by(transposed, h_view, stage.view(gradients[i]), rows="k")
        if i or wants[0]:  # (batch, tokens * repeat, fan_out) (batch, fan_out, fan_in)
            dh = x.new_empty(tokens * stage.read.width)
            by(dh_view, stage.view(cores[i]), stage.read.view(dh, tokens))
    return [dh.view(x.shape) if wants[0] else x.new_empty(0), *gradients]


# ---- where the features lie ----------------------------------------------------------------------


@lru_cache(maxsize=1024)
def lay_out(program: tuple[int, ...]) -> Layout:
    """The layout of `Program.numbers`.

    >>> from structlin import BTT, Monarch
    >>> lay_out(BTT().structure(64, 64).program.numbers).stages[0].written.turned
    True
    >>> lay_out(Monarch().structure(64, 64).program.numbers)[1:]
    ((4, 16), (1, 0))
    """
    # the moves: a count of axes, their sizes as they are made, their order as they are read
    steps, rest = steps_of(program), iter(program[3 + 4 * program[2] : -1])
    moves = [(tuple(islice(rest, axes)), tuple(islice(rest, axes))) for axes in rest]
    shared = any(repeat > 1 for _, repeat, _, _ in steps)
    turn: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    reads, writes, last = [], [], len(steps)
    for n, (sizes, order) in enumerate(moves):  # of the activation before core n
        batch, repeat, fan_in, fan_out = steps[min(n, last - 1)]
        width = batch * repeat * (fan_out if n == last else fan_in)
        turned = 0 < n < last and not shared
        sizes, order = sizes or (width,), order or (0,)
        if n == last and len(order) > 1 and prod(sizes[: order[-1] + 1]) <= batch:
            turn = sizes, order  # y's fastest axis is a batch axis: it is permuted once it is made
        # kept as it is read, or as it is produced
        kept = order if turned or (n == last and not turn[1]) else range(len(order))
        # elements between two values of an axis, where all axes lie in the order `kept`
        stride = {axis: prod(sizes[b] for b in kept[i + 1 :]) for i, axis in enumerate(kept)}
        if n < last:  # core n reads the axes in their new order
            axes = tuple((sizes[axis], stride[axis]) for axis in order)
            reads.append((_cut(axes, (batch, repeat, fan_in)), width, turned))
        if n:  # core n - 1 writes them in the order in which it makes them
            axes = tuple((size, stride[axis]) for axis, size in enumerate(sizes))
            batch, repeat, _, fan_out = steps[n - 1]
            writes.append((_cut(axes, (batch, repeat, fan_out)), width, turned))
    return Layout([_stage(*sides) for sides in zip(reads, writes, strict=True)], *turn)


def _stage(read: tuple[list[Axes], int, bool], written: tuple[list[Axes], int, bool]) -> Stage:
    """Batch and repeat in axes of the same sizes; two, one (tokens are the other) and two axes."""
    (*ours, fan_in), (*theirs, fan_out) = read[0], written[0]
    aligned = zip(*(_align(*pair) for pair in zip(ours, theirs, strict=True)), strict=True)
    sides = []
    for groups, fan, place in zip(aligned, (fan_in, fan_out), (read[1:], written[1:]), strict=True):
        padded = (
            (*group, *((1, 0),) * (most - len(group)))
            for group, most in zip((*groups, fan), (2, 1, 2), strict=True)
        )
        sides.append(Side(tuple(chain.from_iterable(padded)), *place))
    return Stage(*sides)


def _cut(axes: Axes, sizes: Sequence[int]) -> list[Axes]:
    """The axes, cut into neighbouring groups of these sizes; what can be one axis is one.

    >>> _cut(((6, 1), (4, 6)), (2, 12))
    [((2, 3),), ((3, 1), (4, 6))]
    """
    rest, groups = list(axes), list[Axes]()
    for size in reversed(sizes):
        group = list[tuple[int, int]]()
        while size > 1:  # the fastest axis that is left, or as much of it as the group needs
            most, stride = rest.pop()
            part = min(most, size)
            if group and stride == prod(group[0]):  # one axis with the next
                part_of, stride_of = group.pop(0)
                group.insert(0, (part * part_of, stride_of))
            else:
                group.insert(0, (part, stride))
            if part < most:
                rest.append((most // part, stride * part))
            size //= part
        groups.insert(0, tuple(group))
    return groups


def _align(first: Axes, second: Axes) -> tuple[Axes, Axes]:
    """Both with axes of the same sizes.

    >>> _align(((6, 1),), ((2, 1), (3, 2)))
    (((2, 3), (3, 1)), ((2, 1), (3, 2)))
    """
    # both are cut where either has an axis end: 6 and 2 x 3, the last fastest, after 3 and 6
    ends = (accumulate((size for size, _ in reversed(axes)), mul) for axes in (first, second))
    sizes = [large // small for small, large in pairwise(sorted({1}.union(*ends)))][::-1]
    one, other = (tuple(chain.from_iterable(_cut(axes, sizes))) for axes in (first, second))
    return one, other
