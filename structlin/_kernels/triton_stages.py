"""A whole layer on the Triton products: three per core, and no copy of an activation between them.
Untested on GPU.

    forward     h_i = h_(i-1) core_i                                    every core i, block by block
    backward    dcore_i = dh_i^T h_(i-1),    dh_(i-1) = dh_i core_i^T   last to first

Between the cores the features of an activation may be stored in any order, so one is taken in which
all products read and write 16 bytes at a time: the tokens run fastest (which takes a multiple of 16
of them; any other number is right, but slower), or, if a core is used several times per token
(Kronecker, TT), the features do, as they are produced. At the layer's output one structure in use
needs a copy. Where the fastest output axis is a batch axis of the last core (Monarch), one block's
results would be written 2 bytes at a time, each into a 32-byte sector of the cache; they are
written in the order in which they are produced and permuted once.

Everything is read from `Program.numbers`.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .triton_gemm import block_gemm, block_gemm_weight

Axes = tuple[tuple[int, int], ...]  # (size, stride) of each axis of an index, the last one fastest
Groups = list[Axes]  # batch, repeat, and fan-in or fan-out


class Place(NamedTuple):
    """How an activation is stored."""

    width: int  #: features of a token
    turned: bool  #: (features, tokens), or else (tokens, features)


class Stage(NamedTuple):
    """One core: the features that it reads and writes, each as an index of at most two axes."""

    read: Groups
    written: Groups  #: batch and repeat have the sizes that they have in `read`


class Plan(NamedTuple):
    """A layer: its stages, and the activations before, between and after them."""

    stages: list[Stage]
    places: list[Place]
    turns: tuple[tuple[int, ...], tuple[int, ...]]  #: sizes and order of the output's copy, if any

    @property
    def middle(self) -> int:
        """Features that all cores but the first read."""
        return sum(place.width for place in self.places[1:-1])


def supported(program: Sequence[int]) -> bool:
    """Whether no index of a product has more than two axes.

    >>> from structlin import BTT, TT
    >>> supported(BTT(cores=3).structure(64, 64).program.numbers)
    True
    >>> supported(TT(rank=2, cores=4).structure(256, 256).program.numbers)
    False
    """
    return all(
        len(axes) <= most
        for stage in make_plan(tuple(program)).stages
        for side in (stage.read, stage.written)
        for axes, most in zip(side, (2, 1, 2), strict=True)  # tokens are an axis of repeat's index
    )


def forward(
    program: Sequence[int], cores: Sequence[Tensor], x: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`y = x W^T + bias` for x `(tokens, in_features)`, and the middle for `backward`: all that the
    cores but the first read, `(tokens * features,)`.

    Raises:
        ValueError, TypeError: as `block_gemm`; shapes are otherwise taken to be checked.
    """
    plan, tokens = make_plan(tuple(program)), len(x)
    middle = x.new_empty(tokens * plan.middle)
    sizes, order = plan.turns
    if not order:
        return _multiply(plan, cores, x, middle, len(cores), bias), middle
    y = _multiply(plan, cores, x, middle, len(cores))
    y = y.view(tokens, *sizes).permute(0, *(1 + axis for axis in order))
    if bias is not None:
        y = y + bias.view(y.shape[1:])
    return y.reshape(tokens, plan.places[-1].width).contiguous(), middle


def backward(
    program: Sequence[int],
    cores: Sequence[Tensor],
    x: Tensor,
    middle: Tensor,
    dy: Tensor,
    wants: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, list[Tensor]]:
    """dx `(tokens, in_features)` and the gradients of the cores, each empty if it is not among
    `wants`, (x, cores).

    A middle of no elements, where nothing was kept, is computed again.
    """
    plan, tokens = make_plan(tuple(program)), len(x)
    if not len(middle) and wants[1]:
        middle = x.new_empty(tokens * plan.middle)
        _multiply(plan, cores, x, middle, len(cores) - 1)
    activations = [x, *_split(plan, middle, tokens)] if wants[1] else []
    gradients = [core.new_empty(core.shape if wants[1] else 0) for core in cores]
    dh, (sizes, order) = dy, plan.turns
    if order:
        dh = dh.view(tokens, *(sizes[axis] for axis in order))
        dh = dh.permute(0, *(1 + axis for axis in _invert(order))).contiguous()
    for i in reversed(range(len(cores))):
        stage, before, after = plan.stages[i], *plan.places[i : i + 2]
        dh_view = _view(dh, after, stage.written, tokens)
        if wants[1]:
            h_view = _view(activations[i], before, stage.read, tokens)
            block_gemm_weight(dh_view, h_view, _view_core(gradients[i], stage))
        if i or wants[0]:
            dh = x.new_empty(tokens * before.width)
            weight = _view_core(cores[i].contiguous(), stage)
            block_gemm(dh_view, weight, _view(dh, before, stage.read, tokens))
    return dh.view(x.shape) if wants[0] else x.new_empty(0), gradients


def _multiply(
    plan: Plan,
    cores: Sequence[Tensor],
    x: Tensor,
    middle: Tensor,
    first: int,
    bias: Tensor | None = None,
) -> Tensor:
    """The `first` products: the middle is written as far as they reach, and their last result is
    returned."""
    tokens, last = len(x), plan.places[-1]
    targets = _split(plan, middle, tokens)
    if first == len(cores):
        targets = [*targets, x.new_empty(tokens, last.width)]
    h = x
    for i, target in enumerate(targets):
        stage, before, after = plan.stages[i], *plan.places[i : i + 2]
        added = None
        if i == len(cores) - 1 and bias is not None:
            added = _view(bias.expand(tokens, -1), after, stage.written, tokens)  # of stride 0
        weight = _view_core(cores[i].contiguous(), stage).permute(0, 1, 4, 5, 2, 3)  # (z, k, n)
        h_view = _view(h, before, stage.read, tokens)
        block_gemm(h_view, weight, _view(target, after, stage.written, tokens), bias=added)
        h = target
    return h


# ---- tensors, two dimensions for each index ------------------------------------------------------


def _split(plan: Plan, middle: Tensor, tokens: int) -> list[Tensor]:
    """The activations that a stored middle holds."""
    return list(torch.split(middle, [tokens * place.width for place in plan.places[1:-1]]))


def _view(h: Tensor, place: Place, groups: Groups, tokens: int) -> Tensor:
    """`(batch, batch', tokens, repeat, fan, fan')`; h is flat, or `(tokens, features)`."""
    feature = tokens if place.turned else 1
    token = h.stride(0) if h.ndim == 2 else 1 if place.turned else place.width
    batch, repeat, fan = (
        [(size, feature * stride) for size, stride in (*group, *[(1, 0)] * (most - len(group)))]
        for group, most in zip(groups, (2, 1, 2), strict=True)
    )
    axes = [*batch, (tokens, token), *repeat, *fan]
    return h.as_strided([size for size, _ in axes], [stride for _, stride in axes])


def _view_core(core: Tensor, stage: Stage) -> Tensor:
    """A contiguous core: `(batch, batch', fan_out, fan_out', fan_in, fan_in')`."""
    groups = stage.read[0], stage.written[2], stage.read[2]
    return core.view([size for group in groups for size, _ in (*group, (1, 0), (1, 0))[:2]])


# ---- where the features lie ----------------------------------------------------------------------


@lru_cache(maxsize=1024)
def make_plan(program: tuple[int, ...]) -> Plan:
    """The plan of `Program.numbers`.

    >>> from structlin import BTT, Kronecker, Monarch
    >>> [place.turned for place in make_plan(BTT().structure(64, 64).program.numbers).places]
    [False, True, False]
    >>> [place.turned for place in make_plan(Kronecker().structure(64, 64).program.numbers).places]
    [False, False, False]
    >>> make_plan(Monarch().structure(64, 64).program.numbers).turns
    ((4, 16), (1, 0))
    """
    numbers = iter(program)
    _, _, count = (next(numbers) for _ in range(3))
    steps = [[next(numbers) for _ in range(4)] for _ in range(count)]
    moves = []
    for _ in range(count + 1):
        axes = next(numbers)
        moves.append(tuple(tuple(next(numbers) for _ in range(axes)) for _ in range(2)))
    shared = any(repeat > 1 for _, repeat, _, _ in steps)
    reads, writes, places = [], [], []
    for n, (sizes, order) in enumerate(moves):
        batch, repeat, fan_in, fan_out = steps[min(n, count - 1)]
        width = batch * repeat * (fan_in if n < count else fan_out)
        read = _strides(sizes, order) or ((width, 1),)  # in the order of reading, as produced
        written = _strides([sizes[axis] for axis in order], _invert(order)) or ((width, 1),)
        turned = bool(0 < n < count and not shared)
        places.append(Place(width, turned))
        # kept as it is read (turned, and the output), or as it is produced
        if n < count:
            kept = ((width, 1),) if turned else read
            reads.append(_cut(kept, (batch, repeat, fan_in)))
        if n:
            batch, repeat, _, fan_out = steps[n - 1]
            groups = _cut(written, (batch, repeat, fan_out))
            turns: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
            if n == count and any(stride == 1 for _, stride in groups[0]):
                turns = sizes, order
            as_read = turned or (n == count and not turns[1])
            writes.append(groups if as_read else _cut(((width, 1),), (batch, repeat, fan_out)))
    stages = []
    for read_side, written_side in zip(reads, writes, strict=True):
        batches, own_batches = _align(read_side[0], written_side[0])
        repeats, own_repeats = _align(read_side[1], written_side[1])
        stages.append(
            Stage([batches, repeats, read_side[2]], [own_batches, own_repeats, written_side[2]])
        )
    return Plan(stages, places, turns)


def _invert(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def _strides(sizes: Sequence[int], order: Sequence[int]) -> Axes:
    """The axes of `row-major(sizes).permute(order)`."""
    return tuple((sizes[axis], prod(sizes[axis + 1 :])) for axis in order)


def _cut(axes: Axes, sizes: Sequence[int]) -> Groups:
    """The axes, cut into neighbouring groups of these sizes.

    >>> _cut(((6, 4), (4, 1)), (2, 12))
    [((2, 12),), ((3, 4), (4, 1))]
    """
    rest, groups = list(axes), list[Axes]()
    for size in reversed(sizes):
        group = list[tuple[int, int]]()
        while size > 1:
            most, stride = rest.pop()
            part = min(most, size)
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
    sizes, left, right = list[int](), list(first), list(second)
    while left and right:
        (one, a), (two, b) = left.pop(), right.pop()
        size = min(one, two)
        sizes.insert(0, size)
        left += [(one // size, a * size)] * (one > size)
        right += [(two // size, b * size)] * (two > size)
    cut = (chain.from_iterable(_cut(axes, sizes)) for axes in (first, second))
    aligned = tuple(tuple(axes) for axes in cut)
    return aligned[0], aligned[1]
