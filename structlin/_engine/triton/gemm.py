"""The products of a stage on a GPU, in Triton: batched, strided, no operand is copied. Untested on
GPU.

    out[z, m, n] = sum_k a[z, m, k] b[z, k, n] + bias[z, m, n]

That is a stage, its input gradient, or the gradient of a core. Every index is two-level, `outer *
inner_size + inner` with a stride for each level, so a permuted activation is read and written where
it lies. A sum over the tokens is split, so that a few blocks fill the chip, and its parts are added
in a second pass. Sums are float32, in a fixed order, without atomics: the same inputs give the same
bits.

The kernel ran in Triton's interpreter and was compiled for sm_80, sm_90 and sm_100, but no GPU has
run it; check.py tests it on the device before its first use. Nothing here is imported unless
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
except ImportError:  # optional: `check.usable` is then False, and no product below is called
    triton = None

jit: Callable[[Any], Any] = triton.jit if triton else lambda kernel: kernel

# per thread, all that there are: without a number the assembler spills to run more threads
MAX_REGISTERS = 255
FAR = 2**31  # elements, from which on an offset needs 64 bits
# Sizes that are multiples of this are arguments: Triton knows that they are, and one kernel serves
# many widths. Others are compiled in.
EVEN = 16
TILES_PATH = Path(__file__).with_name("tiles.json")
TILES: dict[str, Any] = json.loads(TILES_PATH.read_text())


class LaunchError(RuntimeError):
    """Triton could not compile or launch a kernel."""


class Tile(NamedTuple):
    """Part of the output that one program computes, and how."""

    m: int
    n: int
    k: int  #: summed in one step
    warps: int
    stages: int  #: steps in flight


@lru_cache(maxsize=4096)
def tile_for(m: int, n: int, k: int, gpu: str, kind: str) -> Tile:
    """The tile of a product: that of the rule, unless the table of the GPU has a better one.

    >>> tile_for(16384, 32, 32, "fallback", "half product")
    Tile(m=128, n=32, k=32, warps=4, stages=1)
    """
    name, tile = rule(m, n, k, gpu, kind)
    return Tile(*table_of(gpu)["tuned"].get(name, tile))


def rule(m: int, n: int, k: int, gpu: str, kind: str) -> tuple[str, Tile]:
    """The least powers of 2 that hold the sizes, at most the table's `largest`, and the name under
    which `tuned` may have a better tile.

    A side below 16, the least that tensor cores take, is padded inside the kernel.
    """
    block_m, block_n, block_k = (
        max(16, min(most, 1 << (size - 1).bit_length()))
        for most, size in zip(table_of(gpu)["largest"][kind], (m, n, k), strict=True)
    )
    warps, stages = 8 if block_m * block_n > 128 * 64 else 4, 3 if k > block_k else 1
    tile = Tile(block_m, block_n, block_k, warps, stages)
    return f"{kind} {' '.join(map(str, tile))}", tile


def table_of(gpu: str) -> dict[str, Any]:
    """What `tiles.json` says of a GPU; what it lacks, "fallback" has."""
    table: dict[str, Any] = TILES["fallback"] | TILES.get(gpu, {})
    return table


@lru_cache
def gpu_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def kind_of(dtype: torch.dtype, rows: str) -> str:
    """The table's name for a product; float32 is as precise as PyTorch's own."""
    matmul, kind = torch.backends.cuda.matmul, "half"
    if dtype == torch.float32:
        new = hasattr(matmul, "fp32_precision")  # PyTorch 2.9 and later; one may not read both
        kind = "tf32" if (matmul.fp32_precision == "tf32" if new else matmul.allow_tf32) else "ieee"
    return f"{kind} {'weight' if rows == 'k' else 'product'}"


def block_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    rows: str = "m",
    tile: Tile | None = None,
    splits: int | None = None,
) -> None:
    """`out[z, m, n] = sum_k a[z, m, k] b[z, k, n] + bias[z, m, n]`, also over no k at all.

    Args:
        a, b, out: two dimensions for each index, outer and inner, one of them 1 where the index has
            one level only. Any strides; a and b of one dtype: float32, float16 or bfloat16.
        bias: of out's shape, any strides, so also expanded over the tokens.
        rows: the index that runs over tokens, m or k.
        tile, splits: instead of the table's; parts of the sum at the same time, without a bias.
    """
    m, n, k = (prod(shape) for shape in (a.shape[2:4], b.shape[4:], a.shape[4:]))
    gpu, kind = gpu_of(a.device), kind_of(a.dtype, rows)
    tile, table = tile or tile_for(m, n, k, gpu, kind), table_of(gpu)
    if splits is None and rows == "k":
        programs = prod(a.shape[:2]) * -(-m // tile.m) * -(-n // tile.n)
        splits = min(table["programs"] // programs, k // table["rows_per_program"])
    if splits is None or splits <= 1:
        _launch(a, b, out[None], tile, rows, bias)
    else:
        parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
        _launch(a, b, parts, tile, rows)
        out.copy_(parts.sum(0))


# ---- the kernel ----------------------------------------------------------------------------------


@jit
def _offsets(index, inner, strides):  # type: ignore[no-untyped-def]
    """Where the elements of a two-level index lie, in elements."""
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
    precision = "tf32" if kind_of(a.dtype, rows).startswith("tf32") else "ieee"
    if not programs:
        return
    try:
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            _product[(programs,)](a, b, out, bias, *arguments, **options, precision=precision)
    except Exception as error:  # whatever Triton, its compiler or the driver may raise
        raise LaunchError(f"{type(error).__name__}: {error}") from error


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
    options |= {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    options["maxnreg"] = MAX_REGISTERS
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
    strides = tuple((steps[d], steps[d + 1]) for (_, steps), d in operands)  # outer, inner
    contiguous = any(far == 1 for far, _ in strides) and all(near > 1 for _, near in strides)
    if inner == 1 or (outer > 1 and contiguous):
        outer, inner, strides = inner, outer, tuple((near, far) for far, near in strides)
    # one level: the outer one goes on where the inner one ends, in every operand
    if outer == 1 or all(far == inner * near for far, near in strides):
        return _Index(outer * inner, 1, tuple((near, 0) for _, near in strides))
    return _Index(outer * inner, inner, strides)
