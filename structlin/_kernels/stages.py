"""The products of a structured layer, forward and backward, in chunks of tokens that stay in cache.

    forward     h_0 = P_0 x        h_t = P_t (core_(t-1) h_(t-1))        y = P_c (core_(c-1) h_(c-1)) + bias
    backward    g_c = P_c' dy      g_t = P_t' (core_t' g_(t+1))          dx = g_0        dcore_t = sum_n g_(t+1) h_t'

P permutes a token's features, ' is the transpose; how a core sees an activation is said in `layout`. A chunk of tokens
goes through all cores before the next one is read: the middle never leaves the cache. The backward pass computes it
again there, unless `keep` has stored it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .layout import Stages

STRIDED = (torch.bfloat16, torch.float16)  # on a CPU these products write into strided views at full speed


def forward(
    at: Stages, cores: Sequence[Tensor], x: Tensor, bias: Tensor | None, *, columns: bool, keep: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """`y = x W^T + bias`.

    Args:
        x: `(tokens, in_features)`, contiguous.
        columns: store the middle with the tokens running fastest.
        keep: also return the middle, what all cores but the first read: `(tokens * at.middle,)`; else `(0,)`.
        chunk: tokens of a chunk.
    """
    y = x.new_empty(x.shape[0], at.out_features)
    middle = x.new_empty(x.shape[0] * at.middle if keep else 0)
    for n, kept in _chunks(at, x.shape[0], chunk):
        read = _operands(at, cores, x[n], columns)
        if keep:
            for stored, h in zip(_stored(at, middle[kept], columns), read[1:], strict=True):
                stored.copy_(h)
        _last(at, cores[-1], read[-1], y[n], bias)
    return y, middle


def backward(
    at: Stages,
    cores: Sequence[Tensor],
    x: Tensor,
    middle: Tensor,
    dy: Tensor,
    *,
    columns: bool,
    chunk: int,
    wants: Sequence[bool],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The gradients of `forward` for x, the cores and the bias; empty where `wants` says that nobody asks for one.

    Sums over the tokens are kept in float32 or better. `columns` and `chunk` must be those of `forward` if it kept the
    middle.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = torch.empty_like(x) if wants[0] else x.new_empty(0)
    # Where h is in columns, which it is for all but the first core, a sum over the tokens is fastest as h g'
    shapes = [(weight.mT if t else weight).shape if wants[1] else (0,) for t, weight in enumerate(cores)]
    sums = [x.new_zeros(shape, dtype=wide) for shape in shapes]
    dbias = x.new_zeros(at.out_features if wants[2] else 0, dtype=wide)
    for n, kept in _chunks(at, x.shape[0], chunk):
        if wants[1] and middle.shape[0]:
            read = [_enter(at, x[n]), *_stored(at, middle[kept], columns)]
        elif wants[1]:
            read = _operands(at, cores, x[n], columns)
        g = _blocks(at, -1, at.permutations[-1].inverse.rows(dy[n]), at.cores[-1].fan_out)
        for t in reversed(range(len(cores))):
            if wants[1]:
                left, right = (read[t], g) if t else (g, read[t])
                _accumulate(sums[t], left, right, from_left=at.inner[t] > 1)
            if t:
                g = _before(at, cores[t], t, g, columns, x[n].shape[0])
            elif wants[0]:
                _first(at, cores[0], g, dx[n])
        if wants[2]:
            dbias += dy[n].sum(0)
    dcores = [(total.mT if t and wants[1] else total).to(x.dtype).contiguous() for t, total in enumerate(sums)]
    return dx, dcores, dbias.to(x.dtype)


def _chunks(at: Stages, tokens: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Of the tokens, and of the middle that belongs to them."""
    for start in range(0, tokens, chunk):
        stop = min(tokens, start + chunk)
        yield slice(start, stop), slice(start * at.middle, stop * at.middle)


def _enter(at: Stages, x: Tensor) -> Tensor:
    return _blocks(at, 0, at.permutations[0].rows(x), at.cores[0].fan_in)


def _blocks(at: Stages, t: int, rows: Tensor, features: int) -> Tensor:
    """As core t sees them: a view `(batch, tokens * repeat, features)`, or `(tokens * outer, features, inner)`."""
    if at.inner[t] > 1:
        return rows.view(-1, features, at.inner[t])
    core = at.cores[t]
    return rows.view(rows.shape[0] * core.repeat, core.batch, features).transpose(0, 1)


def _operands(at: Stages, cores: Sequence[Tensor], x: Tensor, columns: bool) -> list[Tensor]:
    """What each core reads, as it sees it."""
    read = [h := _enter(at, x)]
    for t, core in enumerate(at.cores[1:], start=1):
        if columns:
            h = at.permutations[t].columns(torch.bmm(cores[t - 1], h.mT), core.batch).mT
        else:
            rows = _rows(at, t - 1, h, cores[t - 1].mT, x.shape[0])
            h = _blocks(at, t, at.permutations[t].rows(rows), core.fan_in)
        read.append(h)
    return read


def _stored(at: Stages, middle: Tensor, columns: bool) -> Iterator[Tensor]:
    """The views of a stored middle that hold what each core but the first reads."""
    tokens = middle.shape[0] // max(1, at.middle)
    sizes = [tokens * core.repeat * core.batch * core.fan_in for core in at.cores[1:]]
    for t, part in enumerate(torch.split(middle, sizes), start=1):
        if columns:
            yield part.view(at.cores[t].batch, at.cores[t].fan_in, tokens).mT
        else:
            yield _blocks(at, t, part.view(tokens, -1), at.cores[t].fan_in)


def _before(at: Stages, weight: Tensor, t: int, g: Tensor, columns: bool, tokens: int) -> Tensor:
    """The gradient that core t gives to core t - 1."""
    core, permutation = at.cores[t - 1], at.permutations[t].inverse
    if columns:
        return permutation.columns(torch.bmm(weight.mT, g.mT), core.batch).mT
    return _blocks(at, t - 1, permutation.rows(_rows(at, t, g, weight, tokens)), core.fan_out)


def _last(at: Stages, weight: Tensor, h: Tensor, y: Tensor, bias: Tensor | None) -> None:
    """The last product, into the rows y."""
    core, permutation = at.cores[-1], at.permutations[-1]
    if permutation.trivial:
        _product(at, -1, h, weight.mT, _blocks(at, -1, y, core.fan_out))
    else:
        rows = permutation.view(_rows(at, -1, h, weight.mT, y.shape[0]))
        y.view(rows.shape).copy_(rows)
    if bias is not None:
        y += bias


def _first(at: Stages, weight: Tensor, g: Tensor, dx: Tensor) -> None:
    """The gradient of the first product, into the rows dx."""
    core, permutation = at.cores[0], at.permutations[0].inverse
    if permutation.trivial:
        _product(at, 0, g, weight, _blocks(at, 0, dx, core.fan_in))
    else:
        rows = permutation.view(_rows(at, 0, g, weight, dx.shape[0]))
        dx.view(rows.shape).copy_(rows)


def _rows(at: Stages, t: int, a: Tensor, b: Tensor, tokens: int) -> Tensor:
    """`a b` of core t as rows of features, `(tokens, features)`."""
    rows = a.new_empty(tokens, at.cores[t].repeat * at.cores[t].batch * b.shape[-1])
    _product(at, t, a, b, _blocks(at, t, rows, b.shape[-1]))
    return rows


def _product(at: Stages, t: int, a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a b`, batched, into a view of any strides; where core t multiplies from the left, `b' a`."""
    if at.inner[t] > 1:
        torch.bmm(b.mT.contiguous().expand(a.shape[0], -1, -1), a, out=out)
    elif a.shape[0] == 1:  # as matrices: of one in a batch, oneDNN takes the strides for others, and copies
        torch.mm(a[0], b[0], out=out[0])
    elif out.dtype in STRIDED or out.is_cuda or out.is_contiguous():
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))


def _accumulate(total: Tensor, left: Tensor, right: Tensor, *, from_left: bool) -> None:
    """`total += left' right`, batched, summed over the tokens; `left right'` of activations seen from the left."""
    if from_left:
        total += torch.bmm(left, right.mT).sum(0, dtype=total.dtype)
    elif left.shape[0] == 1:
        total[0].addmm_(left[0].mT, right[0]) if total.dtype == left.dtype else total.add_(left[0].mT @ right[0])
    elif total.dtype == left.dtype:
        total.baddbmm_(left.mT, right)
    else:  # on a CPU, operands in one piece are summed at twice the speed
        total += torch.bmm(left.contiguous().mT, right.contiguous())
