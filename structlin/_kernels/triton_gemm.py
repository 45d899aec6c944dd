"""The products of a stage on a GPU, in Triton: batched, strided, no operand is copied. Untested on
GPU.

    block_gemm          out[z, m, n] = sum_k a[z, m, k] b[z, k, n] + bias[z, m, n]
    block_gemm_weight   out[z, o, i] = sum_n dy[z, n, o] x[z, n, i]

The first is a stage, or its input gradient; the second is the gradient of a core. Every index is
two-level, `outer * inner_size + inner` with a stride for each level, so a permuted activation is
read and written where it lies. Both are one kernel. The second splits its sum over the tokens, so
that a few blocks fill the chip, and adds the parts in a second pass. Sums are float32, in a fixed
order, without atomics: the same inputs give the same bits.

The kernel ran in Triton's interpreter and was compiled for sm_80, sm_90 and sm_100, but no GPU has
run it; `triton_check` tests it on the device before its first use. Nothing here is imported unless
a CUDA tensor asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:  # optional: `triton_check.usable` is then False, and no product below is called
    triton = None

jit: Callable[[Any], Any] = triton.jit if triton else lambda kernel: kernel

FAR = 2**31  # elements, from which on an offset needs 64 bits
# Sizes that are multiples of this are arguments: Triton knows that they are, and one kernel serves
# many widths. Others are compiled in.
EVEN = 16
TILES: dict[str, Any] = json.loads(Path(__file__).with_name("triton_tiles.json").read_text())


class Tile(NamedTuple):
    """Part of the output that one program computes, and how."""

    m: int
    n: int
    k: int  #: summed in one step
    warps: int
    stages: int  #: steps in flight


@lru_cache(maxsize=4096)
def tile_for(m: int, n: int, k: int, gpu: str, kind: str, *, weight: bool = False) -> Tile:
    """The tile of a product by `triton_tiles.json`: the least powers of 2 that hold the sizes, at
    most `largest`, unless `tuned` has a better one in their place.

    A side below 16, the least that tensor cores take, is padded inside the kernel.

    Args:
        gpu: the name of the device; one that is not in the table has the tiles of "fallback".
        kind: "half", or the precision of a float32 product, "ieee" or "tf32".
        weight: whether the product is a gradient of a core.

    >>> tile_for(16384, 32, 32, "fallback", "half")
    Tile(m=128, n=32, k=32, warps=4, stages=1)
    """
    table, name = table_of(gpu), f"{kind} {'weight' if weight else 'product'}"
    block_m, block_n, block_k = (
        max(16, min(most, 1 << (size - 1).bit_length()))
        for most, size in zip(table["largest"][name], (m, n, k), strict=True)
    )
    warps, stages = 8 if block_m * block_n > 128 * 64 else 4, 3 if k > block_k else 1
    tile = Tile(block_m, block_n, block_k, warps, stages)
    return Tile(*table["tuned"].get(f"{name} {' '.join(map(str, tile))}", tile))


def table_of(gpu: str) -> dict[str, Any]:
    table: dict[str, Any] = TILES.get(gpu, TILES["fallback"])
    return table


@lru_cache
def gpu_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def kind_of(dtype: torch.dtype) -> str:
    """The kind of product, see `tile_for`: float32 is as precise as PyTorch's own."""
    matmul = torch.backends.cuda.matmul
    if dtype != torch.float32:
        return "half"
    if hasattr(matmul, "fp32_precision"):  # PyTorch 2.9 and later
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmul.allow_tf32 else "ieee"


def block_gemm(
    a: Tensor, b: Tensor, out: Tensor, *, bias: Tensor | None = None, tile: Tile | None = None
) -> None:
    """`out[z, m, n] = sum_k a[z, m, k] b[z, k, n] + bias[z, m, n]` for any number of tokens m.

    Args:
        a, b, out: two dimensions for each index, outer and inner, one of them 1 where the index has
            one level only. Any strides; a and b of one dtype: float32, float16 or bfloat16.
        bias: of out's shape, any strides, so also expanded over the tokens.
        tile: instead of the table's.
    """
    m, n, k = (prod(shape) for shape in (a.shape[2:4], b.shape[4:], a.shape[4:]))
    tile = tile or tile_for(m, n, k, gpu_of(a.device), kind_of(a.dtype))
    _launch(a, b, out[None], tile, "m", bias)


def block_gemm_weight(
    dy: Tensor, x: Tensor, out: Tensor, *, tile: Tile | None = None, splits: int | None = None
) -> None:
    """`out[z, o, i] = sum_n dy[z, n, o] x[z, n, i]` over any number of tokens n, also none; `tile`,
    for (o, i, n), and `splits`, parts of the sum at the same time, are instead of the table's."""
    a, gpu = dy.permute(0, 1, 4, 5, 2, 3), gpu_of(x.device)
    m, n, k = (prod(shape) for shape in (a.shape[2:4], x.shape[4:], a.shape[4:]))
    tile = tile or tile_for(m, n, k, gpu, kind_of(x.dtype), weight=True)
    blocks, table = prod(x.shape[:2]) * -(-m // tile.m) * -(-n // tile.n), table_of(gpu)
    splits = splits or max(1, min(table["programs"] // blocks, k // table["rows_per_program"]))
    if splits == 1:
        return _launch(a, x, out[None], tile, "k")
    parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
    _launch(a, x, parts, tile, "k")
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
    sizes, inner,  # of z, m, n, k
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
    inside = (m < M)[:, None] & (n < N)[None, :]
    if bias is not None:
        bias += _offsets(z, inner[0], bias_strides[0])
        bias += _offsets(m, inner[1], bias_strides[1])[:, None]
        bias += _offsets(n, inner[2], bias_strides[2])[None, :]
        total += tl.load(bias, inside, 0.0).to(tl.float32)
    out += part * out_strides[0][0] + _offsets(z, inner[0], out_strides[1])
    out += _offsets(m, inner[1], out_strides[2])[:, None]
    out += _offsets(n, inner[2], out_strides[3])[None, :]
    tl.store(out, total.to(out.dtype.element_ty), inside)


# ---- its arguments -------------------------------------------------------------------------------


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # the shape and the strides of a tensor


def _launch(
    a: Tensor, b: Tensor, out: Tensor, tile: Tile, rows: str, bias: Tensor | None = None
) -> None:
    """`out[p, z, m, n] = sum of a[z, m, k] b[z, k, n] over part p of k`; `rows`, m or k, is the
    index that runs over tokens."""
    layouts = [(tensor.shape, tensor.stride()) for tensor in (a, b, out)]
    layouts.append((out.shape[1:], (0,) * 6 if bias is None else bias.stride()))
    programs, arguments, options = _plan(*layouts, tile, rows)
    precision = "tf32" if kind_of(a.dtype) == "tf32" else "ieee"
    if programs:
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            _product[(programs,)](a, b, out, bias, *arguments, **options, precision=precision)


@lru_cache(maxsize=4096)
def _plan(
    a: Layout, b: Layout, out: Layout, bias: Layout, tile: Tile, rows: str
) -> tuple[int, list[Any], dict[str, Any]]:
    """Number of programs, and the kernel's arguments by position and by name."""
    z, m = _index((a, 0), (b, 0), (out, 1), (bias, 0)), _index((a, 2), (out, 3), (bias, 2))
    n, k = _index((b, 4), (out, 5), (bias, 4)), _index((a, 4), (b, 2))
    indices, parts = {"z": z, "m": m, "n": n, "k": k}, out[0][0]
    reach = max(_extent(layout) for layout in (a, b, out, bias))

    def compiled_in(name: str, value: int) -> Any:
        return value if name in ("z", rows) or value % EVEN == 0 else tl.constexpr(value)

    arguments = [
        (z.strides[0], m.strides[0], k.strides[0]),
        (z.strides[1], k.strides[1], n.strides[0]),
        ((out[1][0] if parts > 1 else 0, 0), z.strides[2], m.strides[1], n.strides[1]),
        (z.strides[3], m.strides[2], n.strides[2]),
        tuple(compiled_in(name, index.size) for name, index in indices.items()),
        tuple(compiled_in(name, index.inner) for name, index in indices.items()),
        -(-k.size // (parts * tile.k)) * tile.k,
    ]
    options = {f"block_{axis}": size for axis, size in zip("mnk", tile, strict=False)}
    options |= {"split": parts > 1, "int_type": tl.int64 if reach >= FAR else tl.int32}
    options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    return parts * -(-m.size // tile.m) * -(-n.size // tile.n) * z.size, arguments, options


def _extent(layout: Layout) -> int:
    """The largest offset of an element."""
    return sum((size - 1) * stride for size, stride in zip(*layout, strict=True))


class _Index(NamedTuple):
    size: int
    inner: int  #: 1 where one level is enough
    strides: tuple[tuple[int, int], ...]  #: outer and inner, of each operand


def _index(*operands: tuple[Layout, int]) -> _Index:
    """The index in dimensions d and d + 1 of each operand (layout, d): in one level where all
    operands allow it, else with the level inside that is contiguous in one of them.

    >>> x, y = ((5, 2), (2, 1)), ((5, 2), (1, 5))
    >>> _index((x, 0), (y, 0))
    _Index(size=10, inner=2, strides=((2, 1), (1, 5)))
    """
    (shape, _), d = operands[0]
    outer, inner = shape[d : d + 2]
    strides = tuple((steps[d], steps[d + 1]) for (_, steps), d in operands)
    contiguous = any(far == 1 for far, _ in strides) and all(near > 1 for _, near in strides)
    if inner == 1 or (outer > 1 and contiguous):
        outer, inner, strides = inner, outer, tuple((near, far) for far, near in strides)
    if outer == 1 or all(far == inner * near for far, near in strides):
        return _Index(outer * inner, 1, tuple((near, 0) for _, near in strides))
    return _Index(outer * inner, inner, strides)
