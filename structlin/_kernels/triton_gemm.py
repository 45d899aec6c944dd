"""The products of a stage on a GPU, in Triton: batched, strided, no operand is copied. Untested on
GPU.

    block_gemm          out[z, m, n] = sum_k a[z, m, k] b[z, k, n] + bias[z, m, n]
    block_gemm_weight   out[z, o, i] = sum_n dy[z, n, o] x[z, n, i]

The first is a stage, or its input gradient; the second is the gradient of a core.
Every index is two-level, `outer * inner_size + inner` with a stride for each level, so a permuted
activation is read and written where it lies. Both are one kernel. The second splits its sum over
the tokens, so that a few blocks fill the chip, and adds the partial sums in a second pass. Sums are
float32, in a fixed order, without atomics: the same inputs give the same bits.

Untested on GPU: the kernel ran in Triton's interpreter (float32, float16) and was compiled for
sm_90 (float32, float16, bfloat16; no spills), but no GPU has run it. `triton_check.available` tests
it on the device before its first use. Nothing here is imported unless a CUDA tensor asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:  # optional: `triton_check.usable` is then False, and no product below is called
    triton = None

jit: Callable[[Any], Any] = triton.jit if triton else lambda kernel: kernel

DTYPES = torch.float32, torch.float16, torch.bfloat16
# A weight gradient is split until it has so many: about 4 for each multiprocessor of an H100.
PROGRAMS = 512
ROWS = 512  # but no program sums fewer tokens than this
FAR = 2**31  # elements, from which on an offset needs 64 bits


class Tile(NamedTuple):
    """Part of the output that one program computes, and how."""

    m: int
    n: int
    k: int  #: summed in one step
    warps: int
    stages: int  #: steps in flight


def tile_for(m: int, n: int, k: int, dtype: torch.dtype, precision: str = "ieee") -> Tile:
    """The fixed table of configurations, by size and type alone; compiled for sm_90, not yet tuned
    on a GPU.

    A side below 16, the least that tensor cores take, is padded inside the kernel.

    >>> tile_for(16384, 32, 32, torch.bfloat16)
    Tile(m=128, n=32, k=32, warps=4, stages=1)
    >>> tile_for(16384, 1024, 1024, torch.bfloat16)
    Tile(m=128, n=256, k=64, warps=8, stages=3)
    >>> tile_for(5, 24, 7, torch.float32)
    Tile(m=16, n=32, k=16, warps=4, stages=1)
    """
    largest = (128, 256, 64)
    if dtype == torch.float32:
        largest = (128, 128, 32) if precision == "tf32" else (64, 32, 16)
    block_m, block_n, block_k = (
        max(16, min(most, 1 << (size - 1).bit_length()))
        for most, size in zip(largest, (m, n, k), strict=True)
    )
    return Tile(
        block_m, block_n, block_k, 8 if block_m * block_n > 128 * 64 else 4, 3 if k > block_k else 1
    )


def block_gemm(
    a: Tensor, b: Tensor, out: Tensor, *, bias: Tensor | None = None, tile: Tile | None = None
) -> None:
    """`out[z, m, n] = sum_k a[z, m, k] b[z, k, n] + bias[z, m, n]` for any number of rows m, the
    tokens.

    Args:
        a: `(z, z', m, m', k, k')`: an index has an outer and an inner side, one of them 1 where it
            has one level only. Any strides; a and b of one dtype: float32, float16 or bfloat16.
        b: `(z, z', k, k', n, n')`.
        out: `(z, z', m, m', n, n')`, written in place; it overlaps neither a nor b nor itself.
        bias: of out's shape, any strides, so also expanded over the tokens.
        tile: instead of the table's.

    A float32 product is IEEE, or tf32 where `torch.backends.cuda.matmul` allows that. The kernel is
    compiled again for other sizes, but not for another m.

    Raises:
        ValueError: the shapes do not fit together, or the tensors are on several devices.
        TypeError: a and b have two dtypes, or one that is not supported.
    """
    _check(a, b, out, bias)
    _launch(a, b, out[None], tile, rows="m", bias=bias)


def block_gemm_weight(
    dy: Tensor, x: Tensor, out: Tensor, *, tile: Tile | None = None, splits: int | None = None
) -> None:
    """`out[z, o, i] = sum_n dy[z, n, o] x[z, n, i]` over any number of tokens n, also none.

    Args:
        dy: `(z, z', n, n', o, o')`, as in `block_gemm`.
        x: `(z, z', n, n', i, i')`.
        out: `(z, z', o, o', i, i')`, written in place.
        tile: instead of the table's, for (o, i, n).
        splits: parts of the sum over n that are computed at the same time, instead of the table's.

    Raises:
        ValueError, TypeError: as `block_gemm`.
    """
    a = dy.permute(0, 1, 4, 5, 2, 3) if dy.ndim == 6 else dy
    _check(a, x, out)
    m, k, n = prod(a.shape[2:4]), prod(a.shape[4:]), prod(x.shape[4:])
    # a wider one spills registers
    tile = tile or tile_for(m, min(n, 128), k, x.dtype, _precision())
    blocks = prod(x.shape[:2]) * -(-m // tile.m) * -(-n // tile.n)
    splits = splits or max(1, min(PROGRAMS // blocks, k // ROWS))
    if splits == 1:
        return _launch(a, x, out[None], tile, rows="k")
    parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
    _launch(a, x, parts, tile, rows="k")
    out.copy_(parts.sum(0))


# ---- the kernel ----------------------------------------------------------------------------------


@jit
def _offsets(index, inner, strides):  # type: ignore[no-untyped-def]
    """Of the elements of a two-level index, in elements."""
    return index // inner * strides[0] + index % inner * strides[1]


@jit
def _product(  # type: ignore[no-untyped-def]
    a, b, out, bias,  # or None
    # of z, m, k | z, k, n | part, z, m, n | z, m, n; of two levels
    a_strides, b_strides, out_strides, bias_strides,
    sizes, inner,  # of z, m, n, k; compiled in, but for the index that runs over tokens
    chunk,  # of k, for one part of the sum
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    split: tl.constexpr,  # is the sum in several parts?
    int_type: tl.constexpr,  # of offsets: int64 if an operand reaches past 2**31 elements
    precision: tl.constexpr,
):  # fmt: skip
    """One tile of one part. Neighbouring programs differ in z, whose elements may share cache
    lines."""
    Z, M, N, K = sizes
    tiles_m, tiles_n = (M + block_m - 1) // block_m, (N + block_n - 1) // block_n
    program = tl.program_id(0).to(int_type)
    z, program = program % Z, program // Z
    tile_n, program = program % tiles_n, program // tiles_n
    tile_m, part = program % tiles_m, program // tiles_m
    m = tile_m * block_m + tl.arange(0, block_m)
    n = tile_n * block_n + tl.arange(0, block_n)
    begin, end = 0, K
    if split:
        begin, end = part * chunk, tl.minimum(K, (part + 1) * chunk)

    a += _offsets(z, inner[0], a_strides[0]) + _offsets(m, inner[1], a_strides[1])[:, None]
    b += _offsets(z, inner[0], b_strides[0]) + _offsets(n, inner[2], b_strides[2])[None, :]
    total = tl.full((block_m, block_n), 0.0, tl.float32)
    for first in range(begin, end, block_k):
        k = first + tl.arange(0, block_k).to(int_type)
        a_here = a + _offsets(k, inner[3], a_strides[2])[None, :]
        b_here = b + _offsets(k, inner[3], b_strides[1])[:, None]
        a_tile = tl.load(a_here, (m < M)[:, None] & (k < end)[None, :], 0.0)
        b_tile = tl.load(b_here, (k < end)[:, None] & (n < N)[None, :], 0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision=precision)
    if bias is not None:
        bias += (
            _offsets(z, inner[0], bias_strides[0]) + _offsets(m, inner[1], bias_strides[1])[:, None]
        )
        bias += _offsets(n, inner[2], bias_strides[2])[None, :]
        total += tl.load(bias, (m < M)[:, None] & (n < N)[None, :], 0.0).to(tl.float32)
    out += part * out_strides[0][0] + _offsets(z, inner[0], out_strides[1])
    out += (
        _offsets(m, inner[1], out_strides[2])[:, None]
        + _offsets(n, inner[2], out_strides[3])[None, :]
    )
    tl.store(out, total.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


# ---- its arguments -------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where the elements of a tensor lie."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def extent(self) -> int:
        """The largest offset of an element."""
        return sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)
        )


def _launch(
    a: Tensor, b: Tensor, out: Tensor, tile: Tile | None, rows: str, bias: Tensor | None = None
) -> None:
    """`out[p, z, m, n] = sum of a[z, m, k] b[z, k, n] over part p of k`; `rows` is the index that
    runs over tokens."""
    layouts = [Layout(tensor.shape, tensor.stride()) for tensor in (a, b, out)]
    layouts.append(Layout(out.shape[1:], (0,) * 6 if bias is None else bias.stride()))
    programs, arguments, options = _plan(*layouts, a.dtype, _precision(), tile, rows)
    if programs:
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            _product[(programs,)](a, b, out, bias, *arguments, **options)


@lru_cache(maxsize=4096)
def _plan(
    a: Layout,
    b: Layout,
    out: Layout,
    bias: Layout,
    dtype: torch.dtype,
    precision: str,
    tile: Tile | None,
    rows: str,
) -> tuple[int, list[Any], dict[str, Any]]:
    """Number of programs, and the kernel's arguments by position and by name."""
    z, m = _index((a, 0), (b, 0), (out, 1), (bias, 0)), _index((a, 2), (out, 3), (bias, 2))
    n, k = _index((b, 4), (out, 5), (bias, 4)), _index((a, 4), (b, 2))
    tile = tile or tile_for(m.size, n.size, k.size, dtype, precision)
    parts = out.shape[0]
    named = {"z": z, "m": m, "n": n, "k": k}

    def compiled_in(name: str, value: int) -> Any:
        return value if name == rows else tl.constexpr(value)

    return (
        parts * -(-m.size // tile.m) * -(-n.size // tile.n) * z.size,
        [
            (z.strides[0], m.strides[0], k.strides[0]),
            (z.strides[1], k.strides[1], n.strides[0]),
            ((out.stride[0] if parts > 1 else 0, 0), z.strides[2], m.strides[1], n.strides[1]),
            (z.strides[3], m.strides[2], n.strides[2]),
            tuple(compiled_in(name, index.size) for name, index in named.items()),
            tuple(compiled_in(name, index.inner) for name, index in named.items()),
            -(-k.size // (parts * tile.k)) * tile.k,
        ],
        {
            "block_m": tile.m,
            "block_n": tile.n,
            "block_k": tile.k,
            "split": parts > 1,
            "int_type": tl.int64
            if max(a.extent, b.extent, out.extent, bias.extent) >= FAR
            else tl.int32,
            "precision": precision,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        },
    )


class _Index(NamedTuple):
    size: int
    inner: int  #: 1 where one level is enough
    strides: tuple[tuple[int, int], ...]  #: outer and inner, of each operand


def _index(*operands: tuple[Layout, int]) -> _Index:
    """The index in dimensions d and d + 1 of each operand (layout, d): in one level where all
    operands allow it, else with the level inside that is contiguous in one of them.

    >>> x, y = Layout((5, 2), (2, 1)), Layout((5, 2), (1, 5))
    >>> _index((x, 0), (x, 0))
    _Index(size=10, inner=1, strides=((1, 0), (1, 0)))
    >>> _index((x, 0), (y, 0))
    _Index(size=10, inner=2, strides=((2, 1), (1, 5)))
    >>> _index((y, 0), (Layout((5, 2), (3, 15)), 0))
    _Index(size=10, inner=1, strides=((1, 0), (3, 0)))
    """
    first, d = operands[0]
    outer, inner = first.shape[d : d + 2]
    strides = tuple((layout.stride[d], layout.stride[d + 1]) for layout, d in operands)
    swapped = tuple((near, far) for far, near in strides)
    if inner == 1 or (
        outer > 1 and any(far == 1 for far, _ in strides) and all(near > 1 for _, near in strides)
    ):
        outer, inner, strides = inner, outer, swapped
    if outer == 1 or all(far == inner * near for far, near in strides):
        return _Index(outer * inner, 1, tuple((near, 0) for _, near in strides))
    return _Index(outer * inner, inner, strides)


def _precision() -> str:
    """Of float32 products, as PyTorch's own: "ieee" or "tf32"."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # PyTorch 2.9 and later
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmul.allow_tf32 else "ieee"


def _check(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    z, m, k, n = a.shape[:2], a.shape[2:4], a.shape[4:], b.shape[4:]
    if a.ndim != 6 or b.shape != (*z, *k, *n) or out.shape != (*z, *m, *n):
        raise ValueError(
            f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply to {tuple(out.shape)}: "
            "(z, m, k) and (z, k, n) -> (z, m, n), with two dimensions for each index"
        )
    if a.dtype != b.dtype or a.dtype not in DTYPES or out.dtype not in DTYPES:
        raise TypeError(
            f"dtypes {a.dtype} and {b.dtype} -> {out.dtype}: both operands need the same, "
            f"one of {DTYPES}"
        )
    if not a.device == b.device == out.device:
        raise ValueError(
            f"tensors on {a.device}, {b.device} and {out.device}: move them to one device"
        )
    if bias is not None and (
        bias.shape != out.shape or bias.device != out.device or bias.dtype not in DTYPES
    ):
        raise ValueError(
            f"bias of shape {tuple(bias.shape)}, {bias.dtype} on {bias.device}: it needs the "
            f"output's shape {tuple(out.shape)} and device {out.device}, and one of {DTYPES}; "
            "expand it over the tokens"
        )
