"""Two cores as one kernel, in Triton. Untested on GPU.

    h[t, p, q, r] = sum_j x[t, p, j] near[p, q, r, j]
    y[t, q, o] = sum_pr f(h)[t, p, q, r] far[p, q, r, o] + bias[q, o]

`Pair` says which structures are of this form. A program takes a tile of tokens and some q, and goes
through p, so that h lives in registers alone: x is read, y is written, and the cores come from the
second cache. The gradient of x is the same kernel turned round: near for far, x for y. The
gradients of both cores are one kernel more, whose programs take some p and q and go through tokens:
h is computed again. Sums are float32, in a fixed order, without atomics: the same inputs give the
same bits.

They ran in Triton's interpreter and compile for sm_80, sm_90 and sm_100: see check.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:  # optional: `check.pays` is then False, and no kernel below is called
    triton = None


def jit(*varying: str) -> Callable[[Any], Any]:
    """A kernel that is compiled once for all values of these arguments."""
    return triton.jit(do_not_specialize=varying) if triton else lambda kernel: kernel


OF_NORMS = "near_norm", "far_norm", "gains"  # wherever they begin in memory

# A layer's integers are one constant, `sizes`: of p, q, r, j, o; the strides of x (p, j), near
# (p, q, r, j), far (p, q, r, o) and y (q, o); the features of x and y that are no padding. So is a
# tile: how much of t, p, q, r, j and o a program has at a time.


@jit("tokens", *OF_NORMS)
def multiply(  # type: ignore[no-untyped-def]
    x, near, far, y,
    bias,  # (features of y), or None
    near_norm, far_norm, gains,  # of the whole cores, as `_factor` has them; or None
    z,  # of y's shape: h is multiplied by the slope of f at sum_o z[t, q, o] far[p, q, r, o]
    tokens, near_largest, far_largest,
    sizes: tl.constexpr,
    tile: tl.constexpr,
    f: tl.constexpr,  # the scale of f(h) = scale h sigmoid(h); None: f(h) = h
    precision: tl.constexpr,
    wide: tl.constexpr,  # are there x or y past 2**31 elements?
    turned: tl.constexpr,  # is near the last core?
):  # fmt: skip
    """One tile of tokens and of q."""
    P: tl.constexpr = sizes[0]
    J: tl.constexpr = sizes[3]
    O: tl.constexpr = sizes[4]
    n_x: tl.constexpr = sizes[5]
    n_y: tl.constexpr = sizes[8]
    chunks: tl.constexpr = (sizes[1] + tile[2] - 1) // tile[2]
    t = tl.program_id(0) // chunks * tile[0] + tl.arange(0, tile[0])
    q0 = tl.program_id(0) % chunks * tile[2]
    q, o = q0 + tl.arange(0, tile[2]), tl.arange(0, tile[5])
    rows, taken = (t.to(tl.int64) if wide else t)[None, :, None], (t < tokens)[None, :, None]
    of_y = q[:, None, None] * n_y[0] + o[None, None, :] * n_y[1]
    inside = (q < sizes[1])[:, None, None] & (o < O)[None, None, :]
    if sizes[10] < sizes[1] * O:
        inside = inside & (of_y < sizes[10])
    at = rows * sizes[10] + of_y
    if z is not None:
        slopes_of = tl.load(z + at, inside & taken, 0.0)
    if gains is not None:
        by_near = _factor(near_norm, near_largest, gains + turned)
        by_far = _factor(far_norm, far_largest, gains + 1 - turned)
    total = tl.full((tile[2], tile[0], tile[5]), 0.0, tl.float32)
    for first in range(0, P, tile[1]):
        p = first + tl.arange(0, tile[1])
        h = tl.full((tile[1], tile[0], tile[2] * tile[3]), 0.0, tl.float32)
        for begin in range(0, J, tile[4]):
            j = begin + tl.arange(0, tile[4])
            of_x = p[:, None, None] * n_x[0] + j[None, None, :] * n_x[1]
            x_in = (p < P)[:, None, None] & (j < J)[None, None, :]
            if sizes[9] < P * J:
                x_in = x_in & (of_x < sizes[9])
            a = tl.load(x + rows * sizes[9] + of_x, x_in & taken, 0.0)
            b = _near(near, first, q0, j, sizes, tile)
            h = tl.dot(a, b, h, input_precision=precision)
        if gains is not None:
            h *= by_near
        if f is not None and z is None:
            h *= f * _sigmoid(h)
        h = _turn(h, tile[1], tile[2], tile[0], tile[3])  # (q, t, p r)
        c = _far(far, first, q0, o, sizes, tile)  # (q, o, p r)
        if z is not None:
            g = tl.dot(slopes_of, c, input_precision=precision)
            if gains is not None:
                g *= by_far
            h *= _slope(g, f)
        c = tl.permute(c, (0, 2, 1))
        total = tl.dot(h.to(c.dtype), c, total, input_precision=precision)
    if gains is not None:
        total *= by_far
    if bias is not None:
        total += tl.load(bias + of_y, inside, 0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), inside & taken)


@jit("tokens", "chunk", *OF_NORMS)
def find_gradients(  # type: ignore[no-untyped-def]
    x, dy, near, far, near_norm, far_norm, gains, found, dots,
    tokens,
    chunk,  # of tokens, for one part of the sums
    near_largest, far_largest,
    sizes: tl.constexpr,
    tile: tl.constexpr,
    f: tl.constexpr,
    precision: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    """found[part] is dnear[p, q, r, j], then dfar[p, q, r, o], of some p and q, by the cores'
    strides. Where the cores are normalised, dots[0, program] and [1, program] are the products of
    both with near and far as they are."""
    P: tl.constexpr = sizes[0]
    Q: tl.constexpr = sizes[1]
    R: tl.constexpr = sizes[2]
    J: tl.constexpr = sizes[3]
    O: tl.constexpr = sizes[4]
    chunks_p: tl.constexpr = (P + tile[1] - 1) // tile[1]
    chunks_q: tl.constexpr = (Q + tile[2] - 1) // tile[2]
    program = tl.program_id(0)
    part = program // (chunks_p * chunks_q)
    p0, q0 = program % chunks_p * tile[1], program // chunks_p % chunks_q * tile[2]
    p, q = p0 + tl.arange(0, tile[1]), q0 + tl.arange(0, tile[2])
    j, o = tl.arange(0, tile[4]), tl.arange(0, tile[5])
    of_x = p[:, None, None] * sizes[5][0] + j[None, None, :] * sizes[5][1]
    of_y = q[:, None, None] * sizes[8][0] + o[None, None, :] * sizes[8][1]
    x_in = (p < P)[:, None, None] & (j < J)[None, None, :] & (of_x < sizes[9])
    y_in = (q < Q)[:, None, None] & (o < O)[None, None, :] & (of_y < sizes[10])
    b = _near(near, p0, q0, j, sizes, tile)
    c = _far(far, p0, q0, o, sizes, tile)  # (q, o, p r)
    db = tl.full((tile[1], tile[2] * tile[3], tile[4]), 0.0, tl.float32)
    dc = tl.full((tile[2], tile[5], tile[1] * tile[3]), 0.0, tl.float32)
    if gains is not None:
        by_near = _factor(near_norm, near_largest, gains)
        by_far = _factor(far_norm, far_largest, gains + 1)
    begin = part * chunk
    for first in range(begin, tl.minimum(begin + chunk, tokens), tile[0]):
        t = first + tl.arange(0, tile[0])
        rows, taken = (t.to(tl.int64) if wide else t)[None, :, None], (t < tokens)[None, :, None]
        a = tl.load(x + rows * sizes[9] + of_x, x_in & taken, 0.0)
        d = tl.load(dy + rows * sizes[10] + of_y, y_in & taken, 0.0)
        h = tl.dot(a, b, input_precision=precision)
        dh = tl.dot(d, c, input_precision=precision)
        if gains is not None:
            h *= by_near
            dh *= by_far
        dh = _turn(dh, tile[2], tile[1], tile[0], tile[3])  # (p, t, q r)
        if f is not None:
            dh *= _slope(h, f)
            h *= f * _sigmoid(h)
        h = _turn(h, tile[1], tile[2], tile[0], tile[3])  # (q, t, p r)
        db = tl.dot(tl.permute(dh.to(a.dtype), (0, 2, 1)), a, db, input_precision=precision)
        dc = tl.dot(tl.permute(d, (0, 2, 1)), h.to(d.dtype), dc, input_precision=precision)
    # a core that several p or q share has a gradient for each of them here
    dnear = found + part * (P * R * Q * (J + O))
    dfar = dnear + P * R * Q * J
    n: tl.constexpr = sizes[6]
    pairs, allowed = _pairs(q0, n[1], Q, n[2], R, tile[2], tile[3])
    rest = pairs[None, :, None] + j[None, None, :] * n[3]
    allowed = (p < P)[:, None, None] & allowed[None, :, None] & (j < J)[None, None, :]
    tl.store(dnear + p[:, None, None] * (R * Q * J) + rest, db, allowed)
    if gains is not None:
        used = tl.load(near + p[:, None, None] * n[0] + rest, allowed, 0.0)
        tl.store(dots + program, tl.sum(db * used.to(tl.float32)))
    m: tl.constexpr = sizes[7]
    pairs, allowed = _pairs(p0, m[0], P, m[2], R, tile[1], tile[3])
    rest = o[None, :, None] * m[3] + pairs[None, None, :]
    allowed = (q < Q)[:, None, None] & (o < O)[None, :, None] & allowed[None, None, :]
    tl.store(dfar + q[:, None, None] * (R * P * O) + rest, dc, allowed)
    if gains is not None:
        used = tl.load(far + q[:, None, None] * m[1] + rest, allowed, 0.0)
        tl.store(dots + tl.num_programs(0) + program, tl.sum(dc * used.to(tl.float32)))


@jit("parts", "all", "near_all", "near_size", "far_size", "programs", *OF_NORMS)
def add_parts(  # type: ignore[no-untyped-def]
    found, near, far, dnear, dfar, near_norm, far_norm, gains, dots, dgains,
    parts, all, near_all, near_size, far_size, programs, near_largest, far_largest,
    block: tl.constexpr, slices: tl.constexpr,
):  # fmt: skip
    """The sums of found[parts, all] over parts and the uses of a core, each program a slice of
    them. Through M~ = factor M they are dM = factor (dM~ - <dM~, M> / |M|^2 M), the second term
    where M is clipped, and dgain = factor / gain <dM~, M>."""
    n, i, core, out, size, own = tl.program_id(0), 0, near, dnear, near_size, near_all
    norm, largest = near_norm, near_largest
    if n >= slices:
        i, core, out, size, own, found = 1, far, dfar, far_size, all - near_all, found + near_all
        norm, largest = far_norm, far_largest
    if gains is not None:
        products = tl.full((block,), 0.0, tl.float32)
        for first in range(0, programs, block):
            at = first + tl.arange(0, block)
            products += tl.load(dots + i * programs + at, at < programs, 0.0)
        along, factor = tl.sum(products), _factor(norm, largest, gains + i)
        length = tl.load(norm)
        inside = length <= largest
        share = tl.where(inside, 0.0, 1 / tl.where(inside, 1.0, length)).to(tl.float32)
        if dgains is not None:
            tl.store(dgains + i, along / _divisor(norm, largest), n % slices == 0)
    for first in range(n % slices * block, size, slices * block):
        at = first + tl.arange(0, block)
        total = tl.full((block,), 0.0, tl.float32)
        for part in range(parts):
            for use in range(0, own, size):
                total += tl.load(found + part * all + use + at, at < size, 0.0)
        if gains is not None:
            used = tl.load(core + at, at < size, 0.0).to(tl.float32)
            total = factor * (total - share * along * (share * used))
        tl.store(out + at, total.to(out.dtype.element_ty), at < size)


@jit()
def _factor(norm, largest, gain):  # type: ignore[no-untyped-def]
    """gain min(1, largest / norm), what a core is multiplied by; NaN where the norm is NaN"""
    return (tl.load(gain) / _divisor(norm, largest)).to(tl.float32)


@jit()
def _divisor(norm, largest):  # type: ignore[no-untyped-def]
    length = tl.load(norm)
    return tl.where(length <= largest, 1.0, length / largest)


@jit()
def _near(core, p0, q0, j, sizes: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """near as (p, j, q r)"""
    n: tl.constexpr = sizes[6]
    p = p0 + tl.arange(0, tile[1])
    pairs, allowed = _pairs(q0, n[1], sizes[1], n[2], sizes[2], tile[2], tile[3])
    return _load(core, p, p < sizes[0], n[0], j, j < sizes[3], n[3], pairs, allowed)


@jit()
def _far(core, p0, q0, o, sizes: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """far as (q, o, p r)"""
    n: tl.constexpr = sizes[7]
    q = q0 + tl.arange(0, tile[2])
    pairs, allowed = _pairs(p0, n[0], sizes[0], n[2], sizes[2], tile[1], tile[3])
    return _load(core, q, q < sizes[1], n[1], o, o < sizes[4], n[3], pairs, allowed)


@jit()
def _load(  # type: ignore[no-untyped-def]
    core, batch, batch_in, stride: tl.constexpr, end, end_in, end_stride: tl.constexpr,
    pairs, pairs_in,
):  # fmt: skip
    """(batch, end, pairs), loaded with what lies side by side as the last axis: in wide loads"""
    first = batch[:, None, None] * stride
    if end_stride == 1:
        at = first + pairs[None, :, None] + end[None, None, :]
        inside = batch_in[:, None, None] & pairs_in[None, :, None] & end_in[None, None, :]
        return tl.permute(tl.load(core + at, inside, 0.0), (0, 2, 1))
    else:
        at = first + end[None, :, None] * end_stride + pairs[None, None, :]
        inside = batch_in[:, None, None] & end_in[None, :, None] & pairs_in[None, None, :]
        return tl.load(core + at, inside, 0.0)


@jit()
def _pairs(  # type: ignore[no-untyped-def]
    first, stride: tl.constexpr, size: tl.constexpr, r_stride: tl.constexpr, size_r: tl.constexpr,
    many: tl.constexpr, many_r: tl.constexpr,
):  # fmt: skip
    """Where an index from `first` on and r are, as one axis, and whether they are within their
    sizes: in this form Triton sees what lies side by side."""
    n = tl.arange(0, many * many_r)
    index, r = first + n // many_r, n % many_r
    if stride == many_r * r_stride:
        at = first * stride + n * r_stride
    else:
        at = index * stride + r * r_stride
    whole: tl.constexpr = size % many == 0 and size_r == many_r
    return at, n >= 0 if whole else (index < size) & (r < size_r)


@jit()
def _turn(  # type: ignore[no-untyped-def]
    h, p: tl.constexpr, q: tl.constexpr, t: tl.constexpr, r: tl.constexpr
):
    """(p, t, q r) -> (q, t, p r)"""
    return tl.reshape(tl.permute(tl.reshape(h, (p, t, q, r)), (2, 1, 0, 3)), (q, t, p * r))


@jit()
def _slope(h, scale: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative of scale h sigmoid(h)."""
    s = _sigmoid(h)
    return scale * s * (1 + h * (1 - s))


@jit()
def _sigmoid(h):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp(-h))
