"""The product as batched products of views, without a copy of an activation: what serves every
device and every version of torch that the compiled engine does not.

An activation is a matrix `(features, tokens)`: x and y are turned views of `(tokens, features)`,
and between two cores the tokens run fastest. A core is then one `torch.bmm` of `(blocks, fan_out,
fan_in)` by `(blocks, fan_in, tokens)`, and every permutation is a stride of an operand or of the
result. Two cores are two products forward and four backward. What is copied: a core of rank above
1, and x or y where their features interleave the blocks, as Monarch's y does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .._structure.structure import SILU_RMS, steps_of
from .._torch import call_while_tracing
from . import OF_BIAS, OF_CORES, OF_X
from .devices import writes_views

MANY_BLOCKS = 16  # that are interleaved, from which on a copy that turns a whole matrix is faster


@dataclass(frozen=True)
class Layout:
    """Where one core finds its blocks in an activation `(features, tokens)`."""

    sizes: tuple[int, ...]  #: of the axes of the features, as they lie
    order: tuple[int, ...]  #: in which the core has them: those of its blocks, then the others
    shape: tuple[int, int]  #: blocks, and features of each
    width: int  #: all features
    merges: bool  #: whether both are strides; or else the blocks are scattered, and are copied
    has_rows: bool  #: whether the features of a block lie side by side

    def blocks(self, h: Tensor) -> Tensor:
        """h as `(blocks, features of each, tokens)`."""
        if self.needs_turn(h):
            h = h.contiguous()
        return self.axes(h).reshape(*self.shape, h.shape[1])

    def multiply(self, weight: Tensor, operand: Tensor, result: Tensor) -> None:
        """Write `weight @ operand`, `(blocks, features of each, tokens)`, into `result`."""
        needs_turn = self.needs_turn(result)
        if needs_turn and self.shape[0] < MANY_BLOCKS:
            axes = self.axes(result)
            axes.copy_(torch.bmm(operand.mT, weight.mT).mT.reshape(axes.shape))
        elif needs_turn:
            turned = result.new_empty(result.shape)
            self.multiply(weight, operand, turned)
            result.mT.copy_(turned.mT)  # of two contiguous matrices, which torch turns in tiles
        elif self.merges and writes_views(result.device.type):
            view = self.axes(result).view(*self.shape, result.shape[1])
            torch.bmm(weight, operand, out=view)
        else:
            axes = self.axes(result)
            axes.copy_(torch.bmm(weight, operand).view(axes.shape))

    def needs_turn(self, h: Tensor) -> bool:
        """Whether no BLAS takes the blocks of h, as neither their features nor the tokens lie side
        by side; a copy in which the tokens do is then made first."""
        return h.stride(1) != 1 and not (self.has_rows and h.stride(0) == 1)

    def axes(self, h: Tensor) -> Tensor:
        """h with the axes of the core, the tokens last."""
        return h.view(*self.sizes, h.shape[1]).permute(*self.order, len(self.order))


@dataclass(frozen=True)
class Stage:
    """One core, and where it reads and writes."""

    batch: int
    repeat: int
    sizes: tuple[int, ...]  #: of the axes of the stored core
    order: tuple[int, ...]  #: of these axes in `weight`
    read: Layout
    write: Layout

    def weight(self, core: Tensor) -> Tensor:
        """The core as `(blocks, fan_out, fan_in)`, its axes in the order of both layouts."""
        blocks, fan_out = self.write.shape
        _, fan_in = self.read.shape
        weight = core.reshape(self.sizes).permute(self.order)
        weight = weight.reshape(self.batch, 1, fan_out, fan_in)
        return weight.expand(-1, self.repeat, -1, -1).reshape(blocks, fan_out, fan_in)

    def gradient(self, dweight: Tensor, core: Tensor) -> Tensor:
        """The gradient of the core; those of its repeated uses add up."""
        dcore = dweight
        if self.repeat > 1:
            dcore = dweight.view(self.batch, self.repeat, *dweight.shape[1:]).sum(1)
        permuted = [self.sizes[axis] for axis in self.order]
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return dcore.reshape(permuted).permute(inverse).reshape(core.shape)


@call_while_tracing
def pays(program: tuple[int, ...]) -> bool:
    """Whether this way is faster than the loop, for at least as many tokens as the larger width.

    Not by one core or one block, of which the loop copies as little. Nor by cores that a token uses
    more than once, since the loop then has one large product in the place of many small ones. Nor
    where an activation between two cores is copied and wider than x and y, as with three cores of
    rank 2.

    >>> from structlin import BTT, Kronecker
    >>> families = BTT(), BTT(cores=3), BTT(rank=2, cores=3), Kronecker()
    >>> [pays(family.structure(64, 64).program.numbers) for family in families]
    [True, True, False, False]
    """
    stages = stages_of(program)
    if len(stages) < 2 or any(stage.batch == 1 or stage.repeat > 1 for stage in stages):
        return False
    widest = max(stages[0].read.width, stages[-1].write.width)
    return all(stage.write.merges or stage.write.width <= widest for stage in stages[:-1])


def multiply(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, trains: bool, program: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`W x + bias` of x `(..., in_features)`; and the activations between the cores, `(features,
    tokens)`, where a backward pass will need them."""
    stages = stages_of(tuple(program))
    widths = [stage.write.width for stage in stages]
    h = _widen(x, stages[0].read.width)  # (features, tokens), as all activations
    tokens = h.shape[1]
    y = x.new_empty(tokens, widths[-1])
    between = x.new_empty(sum(widths[:-1]), tokens)
    results = [*torch.split(between, widths[:-1]), y.mT]
    for n, (stage, core, result) in enumerate(zip(stages, cores, results, strict=True)):
        weight = stage.weight(core)
        if n and program[-1]:
            h = F.silu(h, inplace=not trains)
            weight = weight / SILU_RMS
        stage.write.multiply(weight, stage.read.blocks(h), result)
        h = result

    y = y[:, : program[1]]
    if bias is not None:
        y += bias
    y = y.view(*x.shape[:-1], program[1])
    return y, between if trains else x.new_empty(0)


def gradients(
    dy: Tensor, x: Tensor, between: Tensor, cores: Sequence[Tensor], program: Sequence[int],
    wants: int,
) -> list[Tensor]:  # fmt: skip
    """dx, dcores and dbias; each empty if `wants` has it not."""
    stages = stages_of(tuple(program))
    widths = [stage.write.width for stage in stages]
    activations = [_widen(x, stages[0].read.width), *torch.split(between, widths[:-1])]
    tokens = x.numel() // x.shape[-1]
    dx = x.new_empty(tokens if wants & OF_X else 0, stages[0].read.width)
    dcores = [core.new_empty(0) for core in cores]
    dbias = dy.reshape(-1, program[1]).sum(0) if wants & OF_BIAS else dy.new_empty(0)

    # A core has y = W h, with h (blocks, fan_in, tokens) and y (blocks, fan_out, tokens), hence
    # dW = dy h^T and dh = W^T dy. After an activation it has h = silu(z) / SILU_RMS: the factor is
    # applied to dW and W, which are smaller, and the slope of silu at z to dh, in place.
    dh = _widen(dy, widths[-1])
    for n, stage in reversed([*enumerate(stages)]):
        is_activated = bool(n and program[-1])
        h = F.silu(activations[n]) if is_activated else activations[n]
        gradient = stage.write.blocks(dh)
        if wants & OF_CORES:
            dweight = torch.bmm(gradient, stage.read.blocks(h).mT)
            if is_activated:
                dweight = dweight * (1 / SILU_RMS)
            dcores[n] = stage.gradient(dweight, cores[n])
        if n or wants & OF_X:
            weight = stage.weight(cores[n]).mT
            if is_activated:
                weight = weight * (1 / SILU_RMS)
            dh = torch.empty_like(h) if n else dx.mT
            stage.read.multiply(weight, gradient, dh)
        if is_activated:
            torch.ops.aten.silu_backward(dh, activations[n], grad_input=dh)
    dx = dx[:, : program[0]].reshape(x.shape if wants & OF_X else 0)
    return [dx, *dcores, dbias]


def _widen(x: Tensor, width: int) -> Tensor:
    """x as `(width, tokens)`, with zeros for the features that it lacks."""
    x = x.reshape(-1, x.shape[-1])
    if width > x.shape[1]:
        x = F.pad(x, (0, width - x.shape[1]))
    return x.mT


# ---- from the integers of a program --------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """x, y or an activation between two cores, the tokens left out.

    Its axes are numbered as the core before writes them, from the outermost on.
    """

    sizes: Sequence[int]  #: of the axes
    read: Sequence[int]  #: the axes in the order in which the core after reads them
    stored: Sequence[int]  #: the axes in the order in which they lie
    fan_out: set[int]  #: of the core before; the other axes count that core's blocks
    fan_in: set[int]  #: of the core after; the other axes count that core's blocks

    def layout(self, blocks: Sequence[int], features: Sequence[int]) -> Layout:
        """How a core finds its blocks, whose axes these are, and the features of each."""
        block_positions = [self.stored.index(axis) for axis in blocks]
        feature_positions = [self.stored.index(axis) for axis in features]
        sizes = [self.sizes[axis] for axis in self.stored]
        block_count = prod(sizes[position] for position in block_positions)
        features_per_block = prod(sizes[position] for position in feature_positions)
        innermost = len(sizes) - 1
        return Layout(
            sizes=tuple(sizes),
            order=(*block_positions, *feature_positions),
            shape=(block_count, features_per_block),
            width=prod(sizes),
            merges=_is_run(block_positions) and _is_run(feature_positions),
            has_rows=feature_positions[-1:] == [innermost],
        )


def _is_run(positions: Sequence[int]) -> bool:
    """Whether each position is the one after the last, so that the axes are one stride."""
    return all(after == before + 1 for before, after in pairwise(positions))


@lru_cache(maxsize=1024)
def stages_of(program: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stage of each core of `Program.numbers`.

    >>> from structlin import BTT
    >>> first, last = stages_of(BTT(rank=2).structure(64, 48).program.numbers)
    >>> first.write.shape, last.read.shape
    ((8, 12), (6, 16))
    """
    steps = steps_of(program)
    # x, the activations between the cores, and y: how wide each is, and how many blocks the core
    # before it and the core after it have there
    widths = []
    blocks = [1]
    for batch, repeat, fan_in, fan_out in steps:
        widths.append(batch * repeat * fan_in)
        blocks.append(batch * repeat)
        width_of_y = batch * repeat * fan_out
    widths.append(width_of_y)
    blocks.append(1)

    # the moves: for each of these activations a number of axes, their sizes, and their order
    moves = iter(program[3 + 4 * len(steps) : -1])
    places = []
    for n, width in enumerate(widths):
        count = next(moves)
        sizes = [*islice(moves, count)] or [width]
        order = [*islice(moves, count)] or [0]
        pieces = _cut(sizes, order, blocks[n], blocks[n + 1])
        place = _place(pieces, order, blocks[n], blocks[n + 1])
        if n == 0:
            place = replace(place, stored=range(len(place.sizes)))
        elif n == len(steps):
            place = replace(place, stored=place.read)
        places.append(place)

    stages = []
    for (batch, repeat, _, _), (before, after) in zip(steps, pairwise(places), strict=True):
        stages.append(_stage(batch, repeat, before, after))
    return tuple(stages)


def _cut(sizes: Sequence[int], order: Sequence[int], before: int, after: int) -> list[list[int]]:
    """Cut each axis of a move where the blocks of the core before end, and of the core after.

    Args:
        sizes: of the axes, as the core before writes them.
        order: of the axes, as the core after reads them.
        before: number of blocks of the core before, which are outermost there.
        after: the same of the core after.

    Returns:
        The sizes of the pieces of each axis.
    """
    cuts: list[set[int]] = [{1, size} for size in sizes]
    for axes, blocks in ((range(len(sizes)), before), (order, after)):
        outer = 1
        for axis in axes:
            if outer < blocks < outer * sizes[axis]:
                cuts[axis].add(blocks // outer)
            outer *= sizes[axis]
    pieces = []
    for cuts_of_axis in cuts:
        # an axis of 12 that is cut at {1, 4, 12} has pieces of 4 and 3, from outside
        pieces.append([stop // start for start, stop in pairwise(sorted(cuts_of_axis))] or [1])
    return pieces


def _place(pieces: Sequence[Sequence[int]], order: Sequence[int], before: int, after: int) -> Place:
    """An activation between two cores, of the pieces of its axes; the other arguments as `_cut`."""
    sizes: list[int] = []
    numbers = []  # of the pieces of each axis
    for piece_sizes in pieces:
        numbers.append(range(len(sizes), len(sizes) + len(piece_sizes)))
        sizes += piece_sizes
    written = range(len(sizes))
    read: list[int] = []
    for axis in order:
        read += numbers[axis]
    fan_out = _inside(sizes, written, before)
    fan_in = _inside(sizes, read, after)
    # (blocks of the core after, rank, blocks of the core before), the tokens innermost
    stored = [axis for axis in read if axis not in fan_in]
    stored += [axis for axis in written if axis in fan_in and axis in fan_out]
    stored += [axis for axis in written if axis in fan_in and axis not in fan_out]
    return Place(sizes, read, stored, fan_out, fan_in)


def _inside(sizes: Sequence[int], order: Sequence[int], blocks: int) -> set[int]:
    """The axes that lie inside the blocks, of axes in this order."""
    inside = set()
    outer = 1
    for axis in order:
        if outer >= blocks:
            inside.add(axis)
        outer *= sizes[axis]
    return inside


def _stage(batch: int, repeat: int, before: Place, after: Place) -> Stage:
    """A core that reads one place and writes the next one."""
    fan_in = [axis for axis in before.read if axis in before.fan_in]
    read_blocks = [axis for axis in before.read if axis not in before.fan_in]
    stored_fan_in = [axis for axis in before.stored if axis in before.fan_in]
    fan_out = sorted(after.fan_out)
    written_blocks = [axis for axis in range(len(after.sizes)) if axis not in after.fan_out]
    stored_fan_out = [axis for axis in after.stored if axis in after.fan_out]

    # The stored core has the axes (batch, *fan_out, *fan_in), each in the order of its own core.
    # In `Stage.weight` they are in the order in which the two activations have them.
    out_sizes = [after.sizes[axis] for axis in fan_out]
    in_sizes = [before.sizes[axis] for axis in fan_in]
    order = [0]
    order += [1 + fan_out.index(axis) for axis in stored_fan_out]
    order += [1 + len(fan_out) + fan_in.index(axis) for axis in stored_fan_in]
    return Stage(
        batch=batch,
        repeat=repeat,
        sizes=(batch, *out_sizes, *in_sizes),
        order=tuple(order),
        read=before.layout(read_blocks, stored_fan_in),
        write=after.layout(written_blocks, stored_fan_out),
    )
