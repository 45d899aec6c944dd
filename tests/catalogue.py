"""What the contract tests run over: one table of families and widths, and a strategy that draws
structures.

The only file behind `test_families.py` that knows the families; a new one gets all contract tests
by its rows here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from structlin import (
    BLAST,
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Family,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
)

# Families with the widths of a layer: square, wide, tall, padded (primes and a vocabulary), 1 to 4
# cores.
CASES: list[tuple[Family, int, int]] = [
    (Dense(), 7, 5),
    (LowRank(rank=3), 12, 12),
    (LowRank(rank=1), 5, 9),
    (BlockDiagonal(blocks=4), 12, 20),
    (BlockDiagonal(blocks=1), 6, 4),
    (Kronecker(), 16, 16),
    (Kronecker(), 20, 12),
    (Kronecker(), 97, 101),
    (TT(rank=(), cores=1), 5, 6),
    (TT(rank=2), 12, 20),
    (TT(rank=5), 97, 36),
    (TT(rank=2, cores=3), 24, 60),
    (TT(rank=(3, 2), cores=3), 27, 8),
    (TT(rank=2, cores=4), 36, 16),
    (TT(rank=2), 16, 50257),
    (Monarch(blocks=2), 16, 16),  # blocks divide q
    (Monarch(blocks=8), 16, 16),  # q divides blocks
    (Monarch(blocks=4), 16, 16),  # both
    (Monarch(blocks=2), 24, 8),
    (Monarch(blocks=6), 12, 30),
    (BLAST(blocks=2, rank=2), 8, 12),
    (BLAST(blocks=2, rank=6), 8, 6),
    (BTT(), 16, 16),
    (BTT(rank=2), 12, 20),
    (BTT(rank=3), 30, 12),
    (BTT(rank=2), 97, 101),
    (BTT(rank=2, cores=3), 24, 60),
    (BTT(rank=(3, 2), cores=3), 60, 27),
    (BTT(rank=2, cores=4), 36, 16),
    (BTT(), 16, 50257),
    (BTT(rank=4), 768, 1024),
]
# The same with an activation between the cores: of one core and several, padded, of shared blocks
ACTIVATED: list[tuple[Family, int, int]] = [
    (family.activate(), i, o)
    for family, i, o in [
        (LowRank(rank=3), 12, 12),
        (Monarch(blocks=2), 24, 8),
        (BLAST(blocks=2, rank=2), 8, 12),
        (TT(rank=2, cores=3), 24, 60),
        (BTT(), 16, 16),
        (BTT(rank=3), 30, 12),
        (BTT(rank=2), 97, 101),
    ]
]
IDS = [f"{family.label}-{i}-{o}" for family, i, o in CASES]
ACTIVATED_IDS = [f"{family.label}-{i}-{o}" for family, i, o in ACTIVATED]
SMALL = [(family, i, o) for family, i, o in CASES if i * o <= 12 * 30]
SMALL_IDS = [f"{family.label}-{i}-{o}" for family, i, o in SMALL]


# Each small structure in a layer that is narrower than it: on the side of x, of y, and of both.
NARROW = [
    (structure, max(1, structure.in_features - columns), max(1, structure.out_features - rows))
    for structure in (family.structure(i, o) for family, i, o in (*SMALL, *ACTIVATED[:-1]))
    for columns, rows in ((1, 0), (0, 1), (structure.in_features // 2, structure.out_features // 3))
]
NARROW_IDS = [f"{structure!r}-{i}-{o}" for structure, i, o in NARROW]


@dataclass(frozen=True)
class Drawn:
    """A drawn structure, with the roles that its axes were drawn to have (not those that the
    library derived)."""

    structure: Structure
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cores: tuple[dict[str, tuple[str, ...]], ...]  # by role: batch, fan_out, fan_in, repeat
    sizes: dict[str, int]


@st.composite
def drawn(draw: st.DrawFn, max_width: int = 256) -> Drawn:
    """1 to 4 cores on axes of size 1 to 4: each core sums some of its axes, keeps some, skips some
    and adds some."""
    names, sizes, width = iter("abcdefghijklmnopqrstuvwxyz"), {}, 1

    def new(most: int) -> list[str]:
        nonlocal width
        axes = [next(names) for _ in range(draw(st.integers(0, most)))]
        for axis in axes:
            sizes[axis] = draw(st.integers(1, max(1, min(4, max_width // width))))
            width *= sizes[axis]
        return axes

    activation = inputs = new(3)
    cores, subscripts = [], []
    for _ in range(draw(st.integers(1, 4))):
        role = {axis: draw(st.sampled_from(["batch", "fan_in", "repeat"])) for axis in activation}
        role |= dict.fromkeys(new(2), "fan_out")
        order = draw(st.permutations(list(role)))
        groups = {
            r: tuple(a for a in order if role[a] == r)
            for r in ("batch", "fan_out", "fan_in", "repeat")
        }
        cores.append(groups)
        subscripts.append(" ".join(axis for axis in order if role[axis] != "repeat"))
        activation = [axis for axis in role if role[axis] != "fan_in"]
        for axis in groups["fan_in"]:
            width //= sizes[axis]
    outputs = draw(st.permutations(activation))
    structure = Structure(f"{' '.join(inputs)} -> {' '.join(outputs)}", *subscripts, **sizes)
    return Drawn(structure, tuple(inputs), tuple(outputs), tuple(cores), sizes)


def structures(max_width: int = 256, activated: bool = False) -> st.SearchStrategy[Structure]:
    """Drawn ones; with `activated` some have an activation between their cores."""
    linear = drawn(max_width).map(lambda case: case.structure)
    if not activated:
        return linear
    between = st.sampled_from([None, "silu"])
    return st.builds(lambda s, name: s.activate(name) if s.cores[1:] else s, linear, between)


def every_structure(test: Callable[..., None]) -> Callable[..., None]:
    """Runs `test(structure=...)` for each row of the table and for drawn structures."""
    return given(structure=structures())(_with_examples(test, CASES))


def every_program(test: Callable[..., None]) -> Callable[..., None]:
    """The same, also with an activation between the cores."""
    return given(structure=structures(activated=True))(_with_examples(test, CASES + ACTIVATED))


def _with_examples(
    test: Callable[..., None], cases: list[tuple[Family, int, int]]
) -> Callable[..., None]:
    for family, in_features, out_features in reversed(cases):
        test = example(structure=family.structure(in_features, out_features))(test)
    return test


def random_cores(
    structure: Structure, dtype: torch.dtype = torch.float64, seed: int = 1
) -> list[Tensor]:
    """Gaussian cores whose product keeps numbers of order 1."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(core.shape, generator=generator, dtype=torch.float64) / core.fan_in**0.5).to(
            dtype
        )
        for core in structure.cores
    ]


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(
        dtype
    )


def one_einsum(structure: Structure, cores: list[Tensor], x: Tensor) -> Tensor:
    """The oracle: `torch.einsum` over the whole expression, with a letter for each axis. x is
    `(tokens, in)`. With an activation between the cores, one einsum for each core."""
    if structure.between is not None:
        return _einsum_by_core(structure, cores, x)
    letter = {axis: chr(ord("a") + n) for n, axis in enumerate(structure.sizes)}
    inputs, outputs = structure.inputs, structure.outputs
    operands, terms = (
        [x.reshape(-1, *(structure.sizes[axis] for axis in inputs))],
        ["Z" + _join(letter, inputs)],
    )
    for core, stored in zip(structure.cores, cores, strict=True):
        axes = [*core.batch_axes, *core.fan_out_axes, *core.fan_in_axes]
        operands.append(stored.reshape([structure.sizes[axis] for axis in axes]))
        terms.append(_join(letter, axes))
    y = torch.einsum(f"{','.join(terms)}->Z{_join(letter, outputs)}", *operands)
    return y.reshape(len(x), structure.out_features)


def silu_rms() -> float:
    """sqrt(E silu(z)^2) for z ~ N(0, 1), by the trapezoid rule, which is exact here."""
    z = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    return (F.silu(z).square() * density).sum().mul(0.001).sqrt().item()


def _einsum_by_core(structure: Structure, cores: list[Tensor], x: Tensor) -> Tensor:
    letter = {axis: chr(ord("a") + n) for n, axis in enumerate(structure.sizes)}
    axes, rms = list(structure.inputs), silu_rms()
    h = x.reshape(-1, *(structure.sizes[axis] for axis in axes))
    for n, (core, stored) in enumerate(zip(structure.cores, cores, strict=True)):
        h = h if n == 0 else h / (1 + torch.exp(-h)) / rms
        own = [*core.batch_axes, *core.fan_out_axes, *core.fan_in_axes]
        made = [axis for axis in axes if axis not in core.fan_in_axes] + list(core.fan_out_axes)
        terms = f"Z{_join(letter, axes)},{_join(letter, own)}->Z{_join(letter, made)}"
        h = torch.einsum(terms, h, stored.reshape([structure.sizes[axis] for axis in own]))
        axes = made
    order = [0, *(1 + axes.index(axis) for axis in structure.outputs)]
    return h.permute(order).reshape(len(x), structure.out_features)


def einsum_matrix(structure: Structure, cores: list[Tensor]) -> Tensor:
    identity = torch.eye(structure.in_features, dtype=cores[0].dtype)
    return one_einsum(structure, cores, identity).mT


def layer_of(
    case: tuple[Family | Structure, int, int],
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> StructuredLinear:
    """A layer in which no parameter is at a special value."""
    family, in_features, out_features = case
    layer = StructuredLinear(in_features, out_features, family, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in (layer.bias, layer.gains):
            if parameter is not None:
                parameter.uniform_(0.5, 1.5)
    return layer


def _join(letter: dict[str, str], axes: list[str]) -> str:
    return "".join(letter[axis] for axis in axes)
