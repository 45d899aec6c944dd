"""Which layers are two cores in one kernel, in which tiles, and the operators of such a layer.

Everything is read from `Program.numbers`.
"""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice, permutations, product
from math import ceil, inf, sqrt
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._structure.structure import SILU_RMS, move_of, steps_of
from .. import OF_BIAS, OF_CORES, OF_GAINS, OF_X

PROGRAMS = 2  # of the sums over tokens, for each multiprocessor
SLICES, BLOCK = 64, 1024  # of a core: programs, and numbers that one has at a time
FAR = 2**31  # elements, from which on an offset needs 64 bits
LEAST = 16  # of a summed index, and of a side of a tile, that tensor cores take
# of each GPU, or "any" where the model's tile spills: tiles, by `name_of`, whether they pay, and
# from how many tokens on W does
TUNED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("tiles.json").read_text())

# What the choice of a tile supposes of a GPU
MAX_REGISTERS, REGISTERS = 255, 2**16  # of a thread, and of a multiprocessor
# A thread's registers: for each sum that it keeps, each number of h, 16 bytes that it loads in a
# step, and the rest; fitted to 250 kernels that Triton 3.6 compiled for sm_90
REGISTERS_FOR = {
    "product": (1.25, 0.7, 1.25, 85.0),
    "gated": (3.5, 0.2, 0.5, 46.0),
    "gradients": (1.0, 0.65, 5.2, 91.0),
}
MOST_REGISTERS = 210  # by these, so that none spills
FLOPS_PER_BYTE = 80  # of tensor cores, for each byte from the second cache
MEMORY = 2.5  # the time of a byte from memory, in PyTorch's products, over one from that cache
ALONE = 1.25  # the time of a multiprocessor that has one program, over that of one with more
FORMED = 8  # times that W and its gradient go through memory, beside the products with x and dy
NEVER = 2**62  # tokens
SHALLOW = 1.1  # the time where one step is loaded ahead, over that where two are


class Pair(NamedTuple):
    """Two cores, as kernels.py has them: sizes, strides of each tensor, features of x and y."""

    p: int
    q: int
    r: int
    j: int
    o: int
    x: tuple[int, int]
    near: tuple[int, int, int, int]
    far: tuple[int, int, int, int]
    y: tuple[int, int]
    columns: int
    rows: int

    def turn(self) -> "Pair":
        """The same from y to x."""
        near, far = ((each[1], each[0], *each[2:]) for each in (self.far, self.near))
        ends = self.y, near, far, self.x, self.rows, self.columns
        return Pair(self.q, self.p, self.r, self.o, self.j, *ends)


class Tile(NamedTuple):
    """How much of each index a program has at a time; all are powers of 2."""

    t: int
    p: int
    q: int
    r: int
    j: int
    o: int
    warps: int
    stages: int  #: steps in flight, and one


class Norms(NamedTuple):
    """What `product.normalise` reads: |core|, of both, their gains, and sigma sqrt(numel)."""

    near: Tensor | None = None
    far: Tensor | None = None
    gains: Tensor | None = None
    largest: tuple[float, ...] = (0.0, 0.0)

    def turn(self) -> "Norms":
        """For `Pair.turn`; the kernel finds the gains by itself."""
        return Norms(self.far, self.near, self.gains, self.largest[::-1])


@lru_cache(maxsize=1024)
def pair_of(program: tuple[int, ...]) -> Pair | None:
    """The two cores of `Program.numbers`, in whatever order their axes are; None if it is no pair.

    >>> from structlin import BTT, TT
    >>> pair_of(BTT(rank=2).structure(64, 48).program.numbers)[:5]
    (8, 6, 2, 8, 8)
    >>> pair_of(TT(rank=2, cores=3).structure(64, 64).program.numbers)
    """
    if program[2] != 2:
        return None
    (batch, repeat, j, made), (groups, times, read, o) = steps_of(program)
    p, q = batch * repeat, groups * times
    r = made // q
    if min(batch, repeat) > 1 or min(groups, times) > 1 or (made, read) != (q * r, p * r):
        return None
    sizes = {"p": p, "q": q, "r": r, "j": j, "o": o}
    moves = moves_of(program)
    for first, near, far, last in product(*map(permutations, ("pj", "qr", "pr", "qo"))):
        found = (move_of(first, "pj", sizes), move_of(("p", *near), ("q", *far), sizes))
        if (*found, move_of("qo", last, sizes)) == moves:
            strides = [strides_of(axes, sizes) for axes in (first, (*near, "j"), ("o", *far), last)]
            x, rows, columns, y = strides
            return Pair(
                p, q, r, j, o, (x["p"], x["j"]),
                (made * j * (batch > 1), rows["q"], rows["r"], 1),
                (columns["p"], read * o * (groups > 1), columns["r"], columns["o"]),
                (y["q"], y["o"]), *program[:2],
            )  # fmt: skip
    return None


def moves_of(program: Sequence[int]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The sizes and the order of each move: before each core, and after the last."""
    rest = iter(program[3 + 4 * program[2] : -1])
    return tuple((tuple(islice(rest, axes)), tuple(islice(rest, axes))) for axes in rest)


def strides_of(axes: Sequence[str], sizes: dict[str, int]) -> dict[str, int]:
    """Of axes the last of which is the innermost."""
    found, stride = dict[str, int](), 1
    for axis in reversed(axes):
        found[axis], stride = stride, stride * sizes[axis]
    return found


def kernels_of(program: tuple[int, ...]) -> list[tuple[Pair, str]]:
    """The kernels of y, of dx and of the gradients of both cores, by their kinds."""
    pair = pair_of(program)
    assert pair
    back = "gated" if program[-1] else "product"
    return [(pair, "product"), (pair.turn(), back), (pair, "gradients")]


# ---- tiles ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def tile_for(pair: Pair, kind: str, itemsize: int, gpu: str, shared: int) -> Tile | None:
    """The tile that `TUNED` has for this GPU, or for any if it fits; or else the one that the model
    takes for the fastest. None if none fits.

    Args:
        kind: "product"; "gated", which has a slope in it; or "gradients".
        shared: bytes that a program may have on the chip.
    """
    name = name_of(pair, kind, itemsize)
    time = partial(time_of, pair, kind=kind, itemsize=itemsize, shared=shared)
    if tuned := TUNED.get(gpu, {}).get(name):
        return Tile(*tuned)
    if (spared := TUNED.get("any", {}).get(name)) and time(Tile(*spared)) < inf:
        return Tile(*spared)
    best = min(tiles_of(pair, kind), key=time, default=None)
    return best if best and time(best) < inf else None


def best_time(pair: Pair, kind: str, itemsize: int, gpu: str, shared: int) -> float:
    """`time_of` in the tile of `tile_for`."""
    tile = tile_for(pair, kind, itemsize, gpu, shared)
    return time_of(pair, tile, kind, itemsize, shared) if tile else inf


def name_of(pair: Pair, kind: str, itemsize: int) -> str:
    return f"{kind} {itemsize} {' '.join(map(str, pair[:5]))}"


def tiles_of(pair: Pair, kind: str) -> Iterator[Tile]:
    """All that may be worth a trial."""
    p_most, q_most, r, j_most, o = (1 << (size - 1).bit_length() for size in pair[:5])
    r = max(r, LEAST // p_most, LEAST // q_most)
    j_most, o = max(j_most, LEAST), max(o, LEAST)
    js = {j_most} if kind == "gradients" else {j_most, min(j_most, 64), min(j_most, 128)}
    sides = [[1 << n for n in range(most.bit_length())] for most in (p_most, q_most)]
    for t, p, q, j in product((16, 32, 64, 128), *sides, sorted(js)):
        if p * r >= (LEAST // 2 if kind == "gradients" else LEAST) and q * r >= LEAST // 2:
            for warps, stages in product((4, 8), (2, 3)):
                yield Tile(t, p, q, r, j, o, warps, stages)


def time_of(pair: Pair, tile: Tile, kind: str, itemsize: int, shared: int) -> float:
    """Bytes that a token takes from the second cache, and its FLOPs in their place, by the model;
    infinite where registers or memory of a program are too few."""
    t, p, q, r, j, o, warps, stages = tile
    steps_p, steps_q = -(-pair.p // p), -(-pair.q // q)
    # a batch of products is divided among warps; those that are too many do the same once more
    threads_p, threads_q = 32 * min(warps, p), 32 * min(warps, q)
    ends = pair.p * pair.j, pair.q * pair.o
    middle, near, far = p * t * q * r, p * q * r * j, p * q * r * o
    first = 2.0 * near * -(-pair.j // j) * 32 * warps / threads_p
    second = 2.0 * far * 32 * warps / threads_q
    if kind == "gradients":
        sums, middles = near / threads_p + far / threads_q, middle / threads_p + middle / threads_q
        loads, held, flops = p * t * j + q * t * o, near + far + 2 * middle, 2 * (first + second)
        moved = ends[0] * steps_q + ends[1] * steps_p
    else:
        gated = kind == "gated"
        sums, middles = q * t * o / threads_q, middle / threads_p
        loads, held = p * t * j + near + far, middle * (1 + 2 * gated)
        flops = first + second * (1 + gated)
        moved = ends[0] * steps_q + ends[1] * (1 + gated)
        moved += pair.p * pair.q * pair.r * (pair.j + pair.o) // t
    each = (sums, middles, loads * itemsize / 16 / (32 * warps), 1)
    registers = sum(map(mul, REGISTERS_FOR[kind], each)) + 15 * (r > 1)  # the offsets of r
    memory = itemsize * ((stages - 1) * loads + held)
    if registers > MOST_REGISTERS or memory > shared:
        return inf
    alone = 2 * 32 * warps * registers > REGISTERS or 2 * memory > shared
    took = itemsize * moved + steps_p * steps_q * flops / FLOPS_PER_BYTE
    return took * (ALONE if alone else 1) * (SHALLOW if stages == 2 else 1)


def plain_time(pair: Pair, activation: int, itemsize: int) -> float:
    """The same of PyTorch's products, whose activations go through memory: each is made, permuted
    and read; with an activation between them, twice more."""
    one_block = pair.p == pair.q == 1
    middle = pair.p * pair.q * pair.r * (2 + 2 * (not one_block) + 4 * bool(activation))
    turned = 2 * pair.q * pair.o * (pair.y[0] < pair.y[1] and pair.q > 1)
    flops = 2 * pair.p * pair.q * pair.r * (pair.j + pair.o)
    ends = pair.p * pair.j + pair.q * pair.o
    return MEMORY * itemsize * (ends + middle + turned) + flops / FLOPS_PER_BYTE / 2


def matrix_times(pair: Pair, itemsize: int) -> tuple[float, float]:
    """The same, of forward and backward, where W is formed and multiplied by; and what it takes
    besides, once for all tokens, to form W and to take its gradient to the cores."""
    size = pair.columns * pair.rows
    each = MEMORY * itemsize * (pair.columns + pair.rows) + size / FLOPS_PER_BYTE
    return 3 * each, size * (FORMED * MEMORY * itemsize + 3 * pair.r / FLOPS_PER_BYTE)


@lru_cache(maxsize=1024)
def tokens_for_matrix(
    program: tuple[int, ...], dtype: torch.dtype, device: torch.device, served: bool
) -> int:
    """From how many tokens on it is the fastest to form W, forward and backward, as measured or by
    the model.

    Args:
        served: whether the kernels serve, or else PyTorch's products.
    """
    pair, size = pair_of(program), dtype.itemsize
    if pair is None or program[-1]:
        return NEVER
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if (measured := TUNED.get(gpu, {}).get(name_of(pair, "matrix", size))) is not None:
        return int(measured)
    own = 3 * plain_time(pair, 0, size)
    if served:
        card = card_of(device)
        own = sum(best_time(*each, size, *card[:2]) for each in kernels_of(program))
    each, once = matrix_times(pair, size)
    return ceil(once / (own - each)) if own > each else NEVER


def pays(program: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this layer is a pair whose tiles fit, and that the model takes for faster than
    PyTorch's products."""
    pair, size = pair_of(program), dtype.itemsize
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if pair is None or old:  # Triton uses no tensor cores there
        return False
    card = card_of(device)
    entry = name_of(pair, "pays with SiLU" if program[-1] else "pays", size)
    if (measured := TUNED.get(card.name, {}).get(entry)) is not None:
        return bool(measured)
    forward, *backward = (best_time(*each, size, *card[:2]) for each in kernels_of(program))
    return max(backward) < inf and forward < plain_time(pair, program[-1], size)


class Card(NamedTuple):
    """What a choice depends on."""

    name: str
    shared: int  #: bytes that a program may have
    processors: int


@lru_cache
def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(device.type, 227 * 1024, 132)  # the interpreter, as an H100
    from triton.runtime import driver  # type: ignore[import-not-found,import-untyped,unused-ignore]

    found = driver.active.utils.get_device_properties(device.index)
    kept = found["max_shared_mem"], found["multiprocessor_count"]
    return Card(torch.cuda.get_device_name(device), *kept)


# ---- the operators -------------------------------------------------------------------------------


def multiply(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, gains: Tensor | None,
    sigmas: Sequence[float], program: Sequence[int], out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`W(normalised cores) x + bias` of x `(..., in_features)`."""
    to_y, *_ = launches_of(tuple(program), x.dtype, x.device)
    near, far = (core.contiguous() for core in cores)
    norms = _find_norms(near, far, gains, sigmas)
    y = x.new_empty(*x.shape[:-1], to_y.pair.rows) if out is None else out
    bias = None if bias is None else bias.expand(to_y.pair.rows).contiguous()
    _multiply(to_y, x.contiguous(), near, far, y, bias, norms)
    return y


def gradients(
    dy: Tensor, x: Tensor, cores: Sequence[Tensor], gains: Tensor | None, sigmas: Sequence[float],
    program: Sequence[int], wants: int,
) -> list[Tensor]:  # fmt: skip
    """dx, dcores, dgains and dbias; each empty if `wants` has it not."""
    to_y, to_dx, to_parts, to_cores = launches_of(tuple(program), x.dtype, x.device)
    x, dy = x.contiguous(), dy.contiguous()
    near, far = (core.contiguous() for core in cores)
    norms = _find_norms(near, far, gains, sigmas)
    dx = x.new_empty(x.shape if wants & OF_X else 0)
    if wants & OF_X:
        z = x if program[-1] else None
        _multiply(to_dx, dy, far, near, dx, None, norms.turn(), z, turned=True)
    trains = wants & (OF_CORES | OF_GAINS)
    dnear, dfar = (core.new_empty(core.shape if trains else 0) for core in cores)
    dgains = x.new_empty(0)
    if gains is not None:
        dgains = gains.new_empty(2 if wants & OF_GAINS else 0, dtype=torch.float32)
    if trains:
        parts = _find_gradients(to_parts, x, dy, near, far, norms)
        _finish(to_cores, *parts, near, far, dnear, dfar, norms, dgains)
    dcores = (dnear, dfar) if wants & OF_CORES else (x.new_empty(0), x.new_empty(0))
    dbias = dy.view(-1, to_y.pair.rows).sum(0, dtype=x.dtype) if wants & OF_BIAS else x.new_empty(0)
    return [dx, *dcores, dgains if gains is None else dgains.to(gains.dtype), dbias]


def _multiply(
    launch: "Launch", x: Tensor, near: Tensor, far: Tensor, y: Tensor, bias: Tensor | None,
    norms: Norms, z: Tensor | None = None, *, turned: bool = False,
) -> None:  # fmt: skip
    pair, tile = launch[1:3]
    tokens = x.numel() // pair.columns
    programs = -(-tokens // tile.t) * -(-pair.q // tile.q)
    last = tokens * max(pair.columns, pair.rows) >= FAR, int(turned)
    tensors = x, near, far, y, bias, *norms[:3], z
    launch(programs, tensors, (tokens, *norms.largest), last)


def _find_gradients(
    launch: "Launch", x: Tensor, dy: Tensor, near: Tensor, far: Tensor, norms: Norms
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the normalised cores, of each use, in parts to be added, in float32; and
    their products with the cores, `(2, programs)`."""
    pair, (t, p, q, *_) = launch[1:3]
    tokens = x.numel() // pair.columns
    together = -(-pair.p // p) * -(-pair.q // q)
    parts = min(PROGRAMS * card_of(x.device).processors // together, tokens // (4 * t))
    chunk = -(-tokens // (max(parts, 1) * t)) * t
    parts = -(-tokens // chunk) if chunk else 1  # which is zero
    size = pair.p * pair.q * pair.r * (pair.j + pair.o)
    found = x.new_empty(parts, size, dtype=torch.float32)
    dots = None if norms.gains is None else found.new_empty(2, parts * together)
    wide = tokens * max(pair.columns, pair.rows) >= FAR
    tensors = x, dy, near, far, *norms[:3], found, dots
    launch(parts * together, tensors, (tokens, chunk, *norms.largest), (wide,))
    return found, dots


class Launch(NamedTuple):
    """A kernel in a tile, and what is compiled of it: only then are Triton's knobs read."""

    name: str
    pair: Pair
    tile: Tile
    constants: tuple[Any, ...]
    options: dict[str, int]
    ready: dict[tuple[Any, ...], Any]

    def __call__(
        self, programs: int, tensors: Sequence[Any], numbers: Sequence[float],
        last: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        if not programs:
            return
        seen = [each if each is None else (each.dtype, align(each)) for each in tensors]
        key = last, *seen
        arguments = *tensors, *numbers, *self.constants, *last
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            if kernel := self.ready.get(key):  # Triton would look for it longer than it runs
                kernel[programs, 1, 1](*arguments)
            else:
                from . import kernels

                launch = getattr(kernels, self.name)[programs, 1, 1]
                self.ready[key] = launch(*arguments, **self.options)


def align(x: Tensor) -> int:
    """Bytes from a multiple of 16 to where x begins."""
    return x.data_ptr() % 16


def launch_of(
    pair: Pair, kind: str, activation: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    card = card_of(device)
    tile = tile_for(pair, kind, dtype.itemsize, card.name, card.shared)
    assert tile, "`pays` has asked for it"
    tf32 = dtype == torch.float32 and device.type == "cuda"
    f, precision = 1 / SILU_RMS if activation else None, "tf32" if tf32 else "ieee"
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": MAX_REGISTERS}
    name = "find_gradients" if kind == "gradients" else "multiply"
    return Launch(name, pair, tile, (tuple(pair), tile[:6], f, precision), options, {})


@lru_cache(maxsize=1024)
def launches_of(
    program: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Launch, ...]:
    """The launches of a layer's kernels, and of the one that adds the parts of the gradients; kept,
    as to look for them takes longer than to launch one."""
    found = [launch_of(*kernel, program[-1], dtype, device) for kernel in kernels_of(program)]
    sums = "add_parts", *found[-1][1:3], (BLOCK, SLICES)
    return *found, Launch(*sums, {"num_warps": 8}, {})


# ---- what is done on the cores -------------------------------------------------------------------


def _find_norms(near: Tensor, far: Tensor, gains: Tensor | None, sigmas: Sequence[float]) -> Norms:
    """|core| in float64, as no float32 overflows there; gains in float32."""
    if gains is None:
        return Norms()
    first, second = torch._foreach_norm([near, far], 2, torch.float64)
    largest = sigmas[0] * sqrt(near.numel()), sigmas[1] * sqrt(far.numel())
    return Norms(first, second, gains.float().contiguous(), largest)


def _finish(
    launch: Launch, found: Tensor, dots: Tensor | None, near: Tensor, far: Tensor,
    dnear: Tensor, dfar: Tensor, norms: Norms, dgains: Tensor,
) -> None:  # fmt: skip
    """The gradients of the cores and of the gains from their parts."""
    found = found if len(found) <= 8 else found.sum(0, keepdim=True)  # by more programs
    pair, numels = launch.pair, (near.numel(), far.numel())
    sizes = pair.p * pair.q * pair.r * pair.j, *numels
    programs = 0 if dots is None else dots.shape[1]
    tensors = found, near, far, dnear, dfar, *norms[:3], dots, dgains if dgains.numel() else None
    launch(2 * SLICES, tensors, (*found.shape, *sizes, programs, *norms.largest))
