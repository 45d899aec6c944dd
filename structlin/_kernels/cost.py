"""What each way to multiply costs, predicted, and the choice between them.

    seconds = FLOPs / rate + bytes of products / stream + bytes permuted / permute + calls * call

A product of n tokens with a core takes 2 n params FLOPs (times repeat) and moves its operands and its result once; the
backward pass takes two more of them. The ways:

    columns, rows   through the structure, the middle stored with the tokens running fastest, or not (see `layout`)
    dense           the cores multiplied into W at every call, and one product with it

Each is a constant plus so much for a token, so two ways cross at one number of tokens at most. The constants of a
device and dtype are measured by `python -m benchmarks.calibrate`, which prints the table below.
"""

from functools import cache
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor

from .._structure import Structure
from .layout import Stages, decode

FOREVER = 1 << 62  # tokens
CACHE = 1 << 21  # bytes of the widest activation of a chunk, on a CPU
FEW = 1 << 15  # numbers in x, on a CPU, up to which calls cost more than what they compute


class Machine(NamedTuple):
    """The constants of one device and dtype."""

    rate: float  #: FLOP/s of a large matrix product
    rows: float  #: bytes/s at which a product reads and writes blocks that lie in rows
    columns: float  #: the same, in columns
    permute: float  #: bytes/s of a permutation of each token's features, read and written
    call: float  #: seconds of a small operation


MACHINES: dict[tuple[str, torch.dtype], Machine] = {
    # One thread of an AMD EPYC (Zen 4), torch 2.13; more threads divide all terms alike, near enough for a choice
    ("cpu", torch.float32): Machine(rate=8.7e10, rows=8.2e9, columns=1.1e10, permute=1.2e10, call=1.2e-5),
    ("cpu", torch.bfloat16): Machine(rate=2.1e11, rows=9.4e9, columns=2.0e9, permute=1.1e10, call=1.2e-5),
    # An H200's data sheet, not measured: 790 TFLOP/s and 4.3 TB/s are what large products and copies reach
    ("cuda", torch.bfloat16): Machine(rate=790e12, rows=4.3e12, columns=4.3e12, permute=2.1e12, call=5e-6),
}
SIMILAR = {torch.float16: torch.bfloat16}  # dtypes that cost what another one does; all others cost what float32 does


class Seconds(NamedTuple):
    """`fixed + token * tokens`."""

    fixed: float
    token: float

    def at(self, tokens: int) -> float:
        return self.fixed + self.token * tokens


def machine(device: str, dtype: torch.dtype) -> Machine:
    """The constants for a device type and dtype, or those of the nearest that was measured."""
    dtype = SIMILAR.get(dtype, dtype)
    if device == "cuda":
        return MACHINES["cuda", torch.bfloat16]
    return MACHINES.get(("cpu", dtype), MACHINES["cpu", torch.float32])


def structured(at: Stages, dtype: torch.dtype, device: str, *, columns: bool, backward: bool) -> Seconds:
    """Through the structure."""
    here, size, products = machine(device, dtype), dtype.itemsize, 3 if backward else 1
    rate, stream = here.rate, here.columns if columns else here.rows
    token = fixed = 0.0
    for core in at.cores:
        moved = core.repeat * core.batch * (core.fan_in + core.fan_out)
        token += products * (core.flops / rate + size * moved / stream)
        fixed += products * size * core.params / stream
    for n, permutation in enumerate(at.permutations):
        inside = 0 < n < len(at.cores)
        if not permutation.trivial and not (columns and inside):
            token += (2 if backward else 1) * 2 * size * prod(permutation.sizes) / here.permute
    if backward:
        token += 2 * size * at.middle / stream  # stored for the backward pass, and read
    seconds = here.call * calls(len(at.cores), backward=backward)
    return Seconds(fixed + seconds, token + seconds / chunk(at, device, size))


def calls(cores: int, *, backward: bool) -> int:
    """Small operations that a chunk of tokens takes: views, products, copies."""
    return 6 * cores * (3 if backward else 1)


def dense(structure: Structure, dtype: torch.dtype, device: str, *, backward: bool, formed: bool = True) -> Seconds:
    """By the matrix W; `formed`: of which the cores are multiplied into it first."""
    here, size, products = machine(device, dtype), dtype.itemsize, 3 if backward else 1
    params = structure.in_features * structure.out_features
    token = products * (2 * params / here.rate + size * (structure.in_features + structure.out_features) / here.rows)
    fixed = products * (size * params / here.rows + here.call)
    if formed:
        outer = {*structure.inputs, *structure.outputs}
        summed = prod(size for axis, size in structure.sizes.items() if axis not in outer)
        fixed += products * (2 * params * summed / here.rate + 4 * size * params / here.permute)
        fixed += here.call * calls(len(structure.cores), backward=backward)
    return Seconds(fixed, token)


def best(structure: Structure, dtype: torch.dtype, device: str, *, backward: bool) -> Seconds:
    """Through the structure, in the layout that it takes."""
    at = decode(structure.text)[1]
    return structured(at, dtype, device, columns=in_columns(at, dtype, device), backward=backward)


@cache
def in_columns(at: Stages, dtype: torch.dtype, device: str) -> bool:
    """Is the middle best stored with the tokens running fastest? The same for any number of tokens."""
    rows, columns = (structured(at, dtype, device, columns=columns, backward=True).token for columns in (False, True))
    return at.in_columns and columns < rows


def chunk(at: Stages, device: str, itemsize: int) -> int:
    """Tokens that go through all cores before the next ones are read: so many that they stay in cache.

    On a GPU, and where every core is one plain matrix, whose product is tiled already, all of them.
    """
    if device != "cpu" or all(core.batch * core.repeat == 1 for core in at.cores):
        return FOREVER
    return max(32, CACHE // (itemsize * at.width) // 32 * 32)


def few(x: Tensor) -> bool:
    """Are there so few tokens that the least number of calls is fastest? Never said of a compiled program."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel() <= FEW


def tokens_for(text: str, dtype: torch.dtype, device: str, backward: bool) -> tuple[int, int]:
    """The least and the greatest number of tokens for which the structure is not slower than dense; (1, 0) for none.

    >>> from structlin import BTT
    >>> tokens_for(BTT().structure(1024, 1024).text, torch.float32, "cpu", True) == (0, FOREVER)
    True
    """
    return _tokens_for(text, dtype, device, backward)


# torch.compile calls it, and sees two integers: torch.compiler.assume_constant_result, without importing the compiler
tokens_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _tokens_for(text: str, dtype: torch.dtype, device: str, backward: bool) -> tuple[int, int]:
    structure = decode(text)[0]
    own, other = best(structure, dtype, device, backward=backward), dense(structure, dtype, device, backward=backward)
    saved, ahead = other.token - own.token, other.fixed - own.fixed
    if saved > 0:
        return max(0, ceil(-ahead / saved)), FOREVER
    if ahead < 0:
        return 1, 0
    return 0, int(ahead / -saved) if saved else FOREVER
