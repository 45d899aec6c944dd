"""The product as batched products of views, without a copy of an activation: what serves every
device and every version of torch that the compiled engine does not.

An activation is a matrix `(features, tokens)`: x and y are turned views of `(tokens, features)`,
and between two cores the tokens run fastest. A core is then one `torch.bmm` of `(blocks, fan_out,
fan_in)` by `(blocks, fan_in, tokens)`, and every permutation is a stride of an operand or of the
result. Two cores are two products forward and four backward. What is copied: a core of rank above
1, and x or y where their features interleave the blocks, as Monarch's y does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .._structure.structure import SILU_RMS, steps_of
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
        (blocks, fan_out), (_, fan_in) = self.write.shape, self.read.shape
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


pays._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile asks it, once


def multiply(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, trains: bool, program: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`W x + bias` of x `(..., in_features)`; and the activations between the cores, `(features,
    tokens)`, where a backward pass will need them."""
    stages = stages_of(tuple(program))
    widths = [stage.write.width for stage in stages]
    h = _widen(x, stages[0].read.width)
    y = x.new_empty(h.shape[1], widths[-1])
    between = x.new_empty(sum(widths[:-1]), h.shape[1])
    for n, (stage, core) in enumerate(zip(stages, cores, strict=True)):
        weight = stage.weight(core)
        if n and program[-1]:
            h = F.silu(h, inplace=not trains)
            weight = weight / SILU_RMS
        result = y.mT if n == len(stages) - 1 else between.narrow(0, sum(widths[:n]), widths[n])
        stage.write.multiply(weight, stage.read.blocks(h), result)
        h = result
    y = y[:, : program[1]]
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], program[1]), between if trains else x.new_empty(0)


def gradients(
    dy: Tensor, x: Tensor, between: Tensor, cores: Sequence[Tensor], program: Sequence[int],
    wants: int,
) -> list[Tensor]:  # fmt: skip
    """dx, dcores and dbias; each empty if `wants` has it not."""
    stages = stages_of(tuple(program))
    widths = [stage.write.width for stage in stages]
    activations = [_widen(x, stages[0].read.width), *torch.split(between, widths[:-1])]
    dx = x.new_empty(x.numel() // x.shape[-1] if wants & OF_X else 0, stages[0].read.width)
    dcores = [core.new_empty(0) for core in cores]
    dbias = dy.reshape(-1, program[1]).sum(0) if wants & OF_BIAS else dy.new_empty(0)
    dh = _widen(dy, widths[-1])
    for n, stage in reversed([*enumerate(stages)]):
        activated = bool(n and program[-1])
        scale = 1 / SILU_RMS if activated else 1
        h = F.silu(activations[n]) if activated else activations[n]
        # (blocks, fan_out, tokens) by (blocks, tokens, fan_in)
        gradient = stage.write.blocks(dh)
        if wants & OF_CORES:
            dweight = torch.bmm(gradient, stage.read.blocks(h).mT)
            dcores[n] = stage.gradient(dweight * scale if activated else dweight, cores[n])
        if n or wants & OF_X:
            weight = stage.weight(cores[n]).mT
            dh = torch.empty_like(h) if n else dx.mT
            stage.read.multiply(weight * scale if activated else weight, gradient, dh)
        if activated:
            torch.ops.aten.silu_backward(dh, activations[n], grad_input=dh)
    dx = dx[:, : program[0]].reshape(x.shape if wants & OF_X else 0)
    return [dx, *dcores, dbias]


def _widen(x: Tensor, width: int) -> Tensor:
    """x as `(width, tokens)`, with zeros for the features that it lacks."""
    x = x.reshape(-1, x.shape[-1])
    return (F.pad(x, (0, width - x.shape[1])) if width > x.shape[1] else x).mT


# ---- from the integers of a program --------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A run of axes of x, of y, or of an activation between two cores."""

    size: int
    made: bool  #: whether it is fan-out of the core before; or else it counts its blocks
    summed: bool  #: whether it is fan-in of the core after; or else it counts its blocks


@dataclass(frozen=True)
class Place:
    """x, y or an activation between two cores: its axes in three orders, the tokens left out."""

    axes: Sequence[Axis]  #: as the core before makes them
    wanted: Sequence[int]  #: as the core after reads them
    stored: Sequence[int]  #: as they lie

    def layout(self, blocks: Sequence[int], features: Sequence[int]) -> Layout:
        """How a core finds its blocks, whose axes these are, and the features of each."""
        block_positions = [self.stored.index(axis) for axis in blocks]
        feature_positions = [self.stored.index(axis) for axis in features]
        sizes = [self.axes[axis].size for axis in self.stored]
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
        axes, wanted = _split(sizes, order, blocks[n], blocks[n + 1])
        places.append(_place(axes, wanted, n == 0, n == len(steps)))
    return tuple(
        _stage(steps[n][0], steps[n][1], places[n], places[n + 1]) for n in range(len(steps))
    )


def _split(
    sizes: Sequence[int], order: Sequence[int], before: int, after: int
) -> tuple[list[Axis], list[int]]:
    """The axes of a move, cut where the blocks of the core before end, and those of the one after;
    and the order in which the latter reads them."""
    ends: list[set[int]] = [{1, size} for size in sizes]  # where each axis is cut
    for axes, blocks in ((range(len(sizes)), before), (order, after)):
        outer = 1
        for axis in axes:
            if outer < blocks < outer * sizes[axis]:
                ends[axis].add(blocks // outer)
            outer *= sizes[axis]

    pieces: list[int] = []  # the sizes of all axes after the cuts, as the core before makes them
    pieces_of_axis = []  # their numbers
    for ends_of_axis in ends:
        cuts = sorted(ends_of_axis)
        first_piece = len(pieces)
        pieces += [outer // inner for inner, outer in pairwise(cuts)] or [1]
        pieces_of_axis.append(range(first_piece, len(pieces)))
    wanted: list[int] = []
    for axis in order:
        wanted += pieces_of_axis[axis]

    made = _inside(pieces, range(len(pieces)), before)
    summed = _inside(pieces, wanted, after)
    return [Axis(size, n in made, n in summed) for n, size in enumerate(pieces)], wanted


def _inside(sizes: Sequence[int], order: Sequence[int], blocks: int) -> set[int]:
    """The axes that lie inside the blocks, of axes in this order."""
    inside = set()
    outer = 1
    for axis in order:
        if outer >= blocks:
            inside.add(axis)
        outer *= sizes[axis]
    return inside


def _place(axes: Sequence[Axis], wanted: Sequence[int], is_x: bool, is_y: bool) -> Place:
    made_order = range(len(axes))
    if is_x:
        stored = [*made_order]
    elif is_y:
        stored = [*wanted]
    else:  # (blocks of the core after, rank, blocks of the core before), the tokens innermost
        stored = [axis for axis in wanted if not axes[axis].summed]
        for made in (True, False):
            stored += [axis for axis in made_order if axes[axis].summed and axes[axis].made == made]
    return Place(axes, wanted, stored)


def _stage(batch: int, repeat: int, before: Place, after: Place) -> Stage:
    fan_in = [axis for axis in before.wanted if before.axes[axis].summed]
    fan_out = [axis for axis, each in enumerate(after.axes) if each.made]
    in_stored = [axis for axis in before.stored if before.axes[axis].summed]
    out_stored = [axis for axis in after.stored if after.axes[axis].made]
    read_blocks = [axis for axis in before.wanted if not before.axes[axis].summed]
    write_blocks = [axis for axis, each in enumerate(after.axes) if not each.made]
    sizes = [batch, *(after.axes[a].size for a in fan_out), *(before.axes[a].size for a in fan_in)]
    order = [0, *(1 + fan_out.index(axis) for axis in out_stored)]
    order += [1 + len(fan_out) + fan_in.index(axis) for axis in in_stored]
    return Stage(
        batch, repeat, tuple(sizes), tuple(order),
        before.layout(read_blocks, in_stored), after.layout(write_blocks, out_stored),
    )  # fmt: skip
