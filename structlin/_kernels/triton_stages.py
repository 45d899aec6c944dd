"""A whole layer on the Triton products: three a core, and no copy of an activation between them.
Untested on GPU.

    forward     h_i = h_(i-1) core_i                                    every core i, block by block
    backward    dcore_i = dh_i^T h_(i-1),    dh_(i-1) = dh_i core_i^T   last to first

Between the cores the axes of an activation may be stored in any order, so one is taken in which all
products read and write 16 bytes at a time: the tokens run fastest (which takes a multiple of 16 of
them; any other number is right, but slower), or, if a core is used several times a token
(Kronecker, TT), the features do, as they are produced. At the layer's output one structure in use
needs a copy. Where the fastest output axis is a batch axis of the last core (Monarch), one block's
results would be written 2 bytes at a time, each into a 32-byte sector of the cache; they are
written in the order in which they are produced and permuted once.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from .._structure import TOKENS, Core, Structure
from .triton_gemm import block_gemm, block_gemm_weight

Axes = tuple[str, ...]


def supported(structure: Structure) -> bool:
    """Has no index of a product more than two axes? So it is for up to three cores of BTT and two
    of everything else.

    >>> from structlin import BTT, TT
    >>> supported(BTT(cores=3).structure(64, 64)), supported(TT(rank=2, cores=3).structure(64, 64))
    (True, False)
    """
    return all(len(axes) <= 2 for core in structure.cores for axes in _indices(core))


def forward(
    structure: Structure, cores: Sequence[Tensor], x: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`y = x W^T + bias` for x `(tokens, in_features)`, and the middle for `backward`: all that the
    cores but the first read, `(tokens * features,)`.

    Raises:
        ValueError, TypeError: as `block_gemm`; shapes are otherwise taken to be checked.
    """
    middle = x.new_empty(len(x) * sum(_width(core) for core in structure.cores[1:]))
    order, wanted = _orders(structure)[-1], _output(structure)
    if order == wanted:
        return _products(structure, cores, x, middle, len(cores), bias).view(
            len(x), structure.out_features
        ), middle
    h = _products(structure, cores, x, middle, len(cores)).permute(
        [order.index(axis) for axis in wanted]
    )
    y = h.new_empty(h.shape)
    if bias is None:
        y.copy_(h)
    else:
        torch.add(h, bias.view(h.shape[1:]), out=y)
    return y.view(len(x), structure.out_features), middle


def backward(
    structure: Structure,
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
    orders = _orders(structure)
    if not len(middle) and wants[1]:
        middle = x.new_empty(len(x) * sum(_width(core) for core in structure.cores[1:]))
        _products(structure, cores, x, middle, len(cores) - 1)
    activations = (
        [_split(structure, x, orders[0]), *_middles(structure, middle, len(x))] if wants[1] else []
    )
    gradients = [weight.new_empty(weight.shape if wants[1] else 0) for weight in cores]
    output, dh = _output(structure), _split(structure, dy, _output(structure))
    if output != orders[-1]:
        dh = dh.permute([output.index(axis) for axis in orders[-1]]).contiguous()
    for i in reversed(range(len(cores))):
        core, axes = structure.cores[i], _stored_axes(structure.cores[i])
        z, m, k, n = _indices(core)
        dh_view = _view(dh, orders[i + 1], z, m, n)
        if wants[1]:
            gradient = _view(_stored(structure, core, gradients[i]), axes, z, n, k)
            block_gemm_weight(dh_view, _view(activations[i], orders[i], z, m, k), gradient)
        if i or wants[0]:
            dh = _empty(structure, x, orders[i])
            weight = _view(_stored(structure, core, cores[i]), axes, z, n, k)
            block_gemm(dh_view, weight, _view(dh, orders[i], z, m, k))
    return dh.view(x.shape) if wants[0] else x.new_empty(0), gradients


def _products(
    structure: Structure,
    cores: Sequence[Tensor],
    x: Tensor,
    middle: Tensor,
    first: int,
    bias: Tensor | None = None,
) -> Tensor:
    """The `first` products: the middle is written as far as they reach, and their last result is
    returned."""
    orders = _orders(structure)
    h, targets = _split(structure, x, orders[0]), _middles(structure, middle, len(x))
    for i in range(first):
        core, last = structure.cores[i], i == len(cores) - 1
        z, m, k, n = _indices(core)
        target = _empty(structure, x, orders[-1]) if last else targets[i]
        added = None
        if last and bias is not None:
            added = _view(
                _split(structure, bias.expand(len(x), -1), _output(structure)),
                _output(structure),
                z,
                m,
                n,
            )
        block_gemm(
            _view(h, orders[i], z, m, k),
            _view(_stored(structure, core, cores[i]), _stored_axes(core), z, k, n),
            _view(target, orders[i + 1], z, m, n),
            bias=added,
        )
        h = target
    return h


# ---- where the axes lie --------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _orders(structure: Structure) -> list[Axes]:
    """Axes of the activations before, between and after the cores, the fastest last.

    >>> from structlin import BTT, Kronecker, Monarch
    >>> [" ".join(axes) for axes in _orders(BTT(rank=2).structure(64, 64))]
    ['tokens j1 j2', 'i2 j1 r1 tokens', 'tokens i2 i1']
    >>> [" ".join(axes) for axes in _orders(Kronecker().structure(64, 64))]
    ['tokens g d', 'tokens g b', 'tokens a b']
    >>> [" ".join(axes) for axes in _orders(Monarch().structure(64, 64))]
    ['tokens k p', 'l k q tokens', 'tokens l s']
    """
    shared = any(core.repeat_axes for core in structure.cores)
    last, output = structure.cores[-1], _output(structure)
    return [
        (TOKENS, *structure.inputs),
        *(
            _produced(core) if shared else (*following.batch_axes, *following.fan_in_axes, TOKENS)
            for core, following in pairwise(structure.cores)
        ),
        _produced(last) if output[-1] in last.batch_axes else output,
    ]


def _output(structure: Structure) -> Axes:
    return (TOKENS, *structure.outputs)


def _produced(core: Core) -> Axes:
    return (TOKENS, *core.batch_axes, *core.repeat_axes, *core.fan_out_axes)


def _stored_axes(core: Core) -> Axes:
    return (*core.batch_axes, *core.fan_out_axes, *core.fan_in_axes)


def _indices(core: Core) -> tuple[Axes, Axes, Axes, Axes]:
    """z, m, k, n of `block_gemm`."""
    return core.batch_axes, (TOKENS, *core.repeat_axes), core.fan_in_axes, core.fan_out_axes


# ---- tensors with a dimension for every axis -----------------------------------------------------


def _split(structure: Structure, h: Tensor, order: Axes) -> Tensor:
    """`(tokens, features)` by axes; always a view."""
    return h.view(len(h), *(structure.sizes[axis] for axis in order[1:]))


def _stored(structure: Structure, core: Core, weight: Tensor) -> Tensor:
    """A core `(batch, fan_out, fan_in)`, or its gradient, by axes; always a view of a contiguous
    core."""
    return weight.reshape([structure.sizes[axis] for axis in _stored_axes(core)])


def _empty(structure: Structure, like: Tensor, order: Axes) -> Tensor:
    """Of `like`'s tokens, dtype and device."""
    return like.new_empty(
        [len(like) if axis == TOKENS else structure.sizes[axis] for axis in order]
    )


def _middles(structure: Structure, middle: Tensor, tokens: int) -> list[Tensor]:
    """The activations that a stored middle holds."""
    parts = torch.split(middle, [tokens * _width(core) for core in structure.cores[1:]])
    orders = _orders(structure)[1:-1]
    return [
        part.view([tokens if axis == TOKENS else structure.sizes[axis] for axis in order])
        for part, order in zip(parts, orders, strict=True)
    ]


def _width(core: Core) -> int:
    """Features of the activation that a core reads."""
    return core.batch * core.repeat * core.fan_in


def _view(h: Tensor, order: Axes, *indices: Axes) -> Tensor:
    """By the axes of `indices`, two dimensions for each."""
    shape, stride = h.shape, h.stride()
    dims = _dimensions(order, indices)
    return h.as_strided(
        [1 if d is None else shape[d] for d in dims],
        [0 if d is None else stride[d] for d in dims],
        h.storage_offset(),
    )


@lru_cache(maxsize=4096)
def _dimensions(order: Axes, indices: tuple[Axes, ...]) -> list[int | None]:
    return [
        order.index(index[level]) if level < len(index) else None
        for index in indices
        for level in (0, 1)
    ]
