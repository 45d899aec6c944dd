"""The space of einsums of two cores: its points, what is measured of them, and drawing from it."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product

from .._arguments import checked
from .._families import Family, structure_of
from .._structure import Structure
from .._widths import divisors

# axes in the order in which they lie in a vector: of axes that grow alike the last is the largest
_INPUTS = {"gamma": "g", "beta": "b", "alpha": "a"}
_OUTPUTS = {"phi": "f", "epsilon": "e", "delta": "d"}
_CORES = ("g f d r a", "f e g r b")
_ROUNDING = 0.01  # of a sum of exponents: 0.33 + 0.67, 3 * 0.33
_PADDING = 0.15  # of a width, at most; the authors' code has the same tolerance
_FACTOR = 2.0  # by which a size may miss width^exponent


@dataclass(frozen=True, kw_only=True)
class Einsum(Family):
    r"""A point of the space of two-core einsums: an exponent for each of the seven axes.

        z[g f d r b] = sum over a        of A[g f d r a] x[g b a]
        y[f e d]     = sum over g, r, b  of B[f e g r b] z[g f d r b]

    a, b and g have the sizes in_features^alpha, ^beta and ^gamma; d, e and f have out_features^
    delta, ^epsilon and ^phi; r has min(in_features, out_features)^rho. Sizes are integers whose
    product is the width, or up to 15 % more (padding), each within a factor of 2 of its power. An
    axis with exponent 0 is left out, and so is a core without axes:

        dense      alpha = delta = 1
        low-rank   alpha = epsilon = 1, rank d^rho
        Kronecker  alpha = beta = delta = epsilon = 1/2; with rho > 0 it is TT
        BTT        alpha = gamma = epsilon = phi = 1/2, rank d^rho; Monarch has fewer, wider blocks

    Attributes:
        omega, psi, nu: exponents of parameter sharing, rank and compute of a square matrix; see
            `structlin.search`.

    Raises:
        ValueError: an exponent outside of 0..1; those of x or of y do not sum to 1 (within 0.01); a
            rho over the useful bound.
    Source: Potapczynski et al. 2024 (arXiv:2410.02117); its axes are those of the authors' code,
        which rounds every size for itself, so that features may be lost.

    >>> btt = Einsum(alpha=0.5, gamma=0.5, epsilon=0.5, phi=0.5)
    >>> btt.structure(64, 256)
    Structure('g a -> f e', 'g f a', 'f e g', a=8, e=16, f=16, g=8)
    >>> btt.omega, btt.psi, btt.nu
    (0.0, 1.0, 0.5)
    """

    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0
    delta: float = 0.0
    epsilon: float = 0.0
    phi: float = 0.0
    rho: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{field.name}={value!r} must be a number from 0 to 1")
        for side, axes in (("x", _INPUTS), ("y", _OUTPUTS)):
            total = sum(getattr(self, name) for name in axes)
            if abs(total - 1) > _ROUNDING:
                text = " + ".join(f"{name}={getattr(self, name)}" for name in axes)
                raise ValueError(f"{text} is {total:g}: the exponents of {side} must sum to 1")
        bound = min(self.alpha + self.delta, self.beta + self.epsilon)
        if self.rho > bound + _ROUNDING:
            raise ValueError(
                f"rho={self.rho} is over the useful bound "
                f"min(alpha + delta, beta + epsilon) = {bound:g}"
            )

    @property
    def omega(self) -> float:
        """log_d of FLOPs / (2 params), in the limit of wide square matrices: 0 is no sharing."""
        params = min(self.alpha + self.delta, self.beta + self.epsilon)
        return round(params - min(self.alpha, self.epsilon), 9)

    @property
    def psi(self) -> float:
        """log_d of the rank, in the same limit: 1 is full rank up to a factor."""
        first, second = self.alpha + self.epsilon, self.beta + self.delta
        return round(min(1.0, 2 + self.rho - first, 2 + self.rho - second), 9)

    @property
    def nu(self) -> float:
        """log_d of FLOPs / (2 d), in the same limit: 1 is a dense matrix's."""
        return round(1 + self.rho - min(self.alpha, self.epsilon), 9)

    @property
    def label(self) -> str:
        """Short text with the exponents that are not 0.

        >>> Einsum(alpha=1, epsilon=1, rho=0.5).label
        'Einsum(alpha=1, epsilon=1, rho=0.5)'
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return (
            f"Einsum({', '.join(f'{name}={value:g}' for name, value in values.items() if value)})"
        )

    def structure(self, in_features: int, out_features: int) -> Structure:
        sizes: dict[str, int] = {}
        for side, width, axes in (
            ("in_features", in_features, _INPUTS),
            ("out_features", out_features, _OUTPUTS),
        ):
            grown = {axis: getattr(self, name) for name, axis in axes.items()}
            grown = {axis: exponent for axis, exponent in grown.items() if exponent}
            found = _find_sizes(width, tuple(grown.values()))
            if found is None:
                text = ", ".join(f"{width**exponent:.3g}" for exponent in grown.values())
                raise ValueError(
                    f"{side}={width} has no factors within a factor of 2 of {text}, nor has a "
                    f"width up to 15 % larger; {_next_width(width, tuple(grown.values()))} has"
                )
            sizes |= dict(zip(grown, found, strict=True))
        inputs, outputs = (
            [axis for axis in axes.values() if axis in sizes] for axes in (_INPUTS, _OUTPUTS)
        )
        if self.rho:
            pairs = [("a", "d"), ("b", "e")]
            bound = min(sizes.get(one, 1) * sizes.get(other, 1) for one, other in pairs)
            rank = round(min(in_features, out_features) ** self.rho)
            sizes["r"] = min(rank, bound)  # over it only by rounding: `__post_init__`
        cores = [" ".join(axis for axis in core.split() if axis in sizes) for core in _CORES]
        return Structure(
            f"{' '.join(inputs)} -> {' '.join(outputs)}", *(core for core in cores if core), **sizes
        )


# ---- what is measured ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Measures:
    """Measures of one structure, at its own size, to the base of its smaller width; see
    `measure`."""

    omega: float  #: of multiplications for each parameter: parameter sharing
    psi: float  #: of the rank
    nu: float  #: of multiplications for each of the wider side's features: compute


@checked
@lru_cache(maxsize=4096)
def measure(structure: Structure) -> Measures:
    """Parameter sharing, rank and compute of `structure` as exponents of its smaller width d.

    The rank is the least product of axes that separates x from y (a minimum cut). No matrix of
    the structure has a larger one; random cores reach it.

    Raises:
        ValueError: a side of one feature, which has no logarithms to its base.

    >>> from structlin import BTT, Dense, Kronecker, LowRank
    >>> for family in (Dense(), BTT(), Kronecker(), LowRank(rank=8)):
    ...     print(measure(family.structure(64, 64)))
    Measures(omega=0.0, psi=1.0, nu=1.0)
    Measures(omega=0.0, psi=1.0, nu=0.6667)
    Measures(omega=0.5, psi=1.0, nu=0.6667)
    Measures(omega=0.0, psi=0.5, nu=0.6667)
    """
    narrow, wide = sorted((structure.in_features, structure.out_features))
    if narrow < 2:
        raise ValueError(f"structure={structure!r} needs 2 features or more on either side")
    multiplications = structure.flops / 2

    def exponent(amount: float) -> float:
        return round(math.log(amount) / math.log(narrow), 4)

    return Measures(
        omega=exponent(multiplications / structure.params),
        psi=exponent(_rank(structure)),
        nu=exponent(multiplications / wide),
    )


def _rank(structure: Structure) -> int:
    """The least that all axes cross if every core stands on x's side or on y's."""

    def crossing(sides: tuple[bool, ...]) -> int:
        total = 1
        for axis, size in structure.sizes.items():
            cores = zip(structure.cores, sides, strict=True)
            stands = {side for core, side in cores if axis in core.axes}
            stands |= {False} if axis in structure.inputs else set()
            stands |= {True} if axis in structure.outputs else set()
            total *= size if len(stands) == 2 else 1
        return total

    return min(crossing(sides) for sides in product((False, True), repeat=len(structure.cores)))


# ---- drawing -------------------------------------------------------------------------------------

Range = tuple[float, float]


@checked
def sample(
    in_features: int,
    out_features: int,
    n: int,
    *,
    seed: int = 0,
    omega: Range = (0.0, 1.0),
    psi: Range = (0.0, 1.0),
    nu: Range = (0.0, 1.0),
) -> list[Einsum]:
    """`n` points whose structures differ at these widths and cost less than dense does there.

    Each axis is left out with probability 1/2, so that families, which lie on the space's edges,
    are drawn as well; the others' exponents are uniform, in hundredths.

    Args:
        omega, psi, nu: ranges, ends included, of the exponents that a point must have; (0, 0) for
            omega is no parameter sharing, (1, 1) for psi full rank.

    Raises:
        ValueError: a range that is empty; no or fewer than `n` such points, as where the widths
            have no factors near the powers; the message says how many were found.

    >>> points = sample(256, 256, 8, omega=(0, 0), psi=(1, 1))
    >>> {(point.omega, point.psi) for point in points}
    {(0.0, 1.0)}
    >>> all(point.structure(256, 256).flops < 2 * 256**2 for point in points)
    True
    """
    ranges = {"omega": omega, "psi": psi, "nu": nu}
    for name, (low, high) in ranges.items():
        if not low <= high:
            raise ValueError(f"{name}={(low, high)} must be (low, high), low at most high")
    draw = random.Random(seed)
    found: dict[str, Einsum] = {}
    for _ in range(5_000 + 1000 * n):
        point = _draw_point(draw)
        if not all(
            low - 1e-9 <= getattr(point, name) <= high + 1e-9
            for name, (low, high) in ranges.items()
        ):
            continue
        try:
            structure = structure_of(point, in_features, out_features)
        except ValueError:  # the widths have no factors for it
            continue
        if structure.flops < 2 * in_features * out_features:
            integers = [(core.shape, core.repeat) for core in structure.cores]
            found.setdefault(str(integers), point)
        if len(found) == n:
            return list(found.values())
    text = ", ".join(f"{name} in {values}" for name, values in ranges.items())
    raise ValueError(
        f"n={n}: {text} has {len(found)} structures for {in_features} -> {out_features} that cost "
        f"less than dense; ask for fewer, or for wider ranges"
    )


def _draw_point(draw: random.Random) -> Einsum:
    exponents = _draw_exponents(draw, list(_INPUTS)) | _draw_exponents(draw, list(_OUTPUTS))
    bound = min(
        exponents["alpha"] + exponents["delta"], exponents["beta"] + exponents["epsilon"], 1.0
    )
    rho = math.floor(100 * draw.uniform(0, bound)) / 100 if draw.random() < 0.5 else 0.0
    return Einsum(**exponents, rho=rho)


def _draw_exponents(draw: random.Random, names: list[str]) -> dict[str, float]:
    """Hundredths that sum to 1, uniform for the axes that are not left out."""
    kept: list[str] = []
    while not kept:
        kept = [name for name in names if draw.random() < 0.5]
    cuts = sorted(draw.randint(0, 100) for _ in kept[1:])
    parts = [high - low for low, high in zip([0, *cuts], [*cuts, 100], strict=True)]
    return dict.fromkeys(names, 0.0) | {
        name: part / 100 for name, part in zip(kept, parts, strict=True)
    }


# ---- sizes ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _find_sizes(width: int, exponents: tuple[float, ...]) -> tuple[int, ...] | None:
    """Integers nearest to width^exponent whose product is `width`, or the next number that has
    some; of equal exponents the last gets the largest. None: none is near up to the most padding.

    >>> _find_sizes(96, (0.5, 0.5)), _find_sizes(97, (0.5, 0.5)), _find_sizes(13, (0.3, 0.3, 0.4))
    ((8, 12), (7, 14), None)
    """
    for padded in range(width, math.ceil(width * (1 + _PADDING)) + 1):
        if (found := _nearest(padded, exponents)) is not None:
            return found
    return None


def _nearest(width: int, exponents: tuple[float, ...]) -> tuple[int, ...] | None:
    def miss(sizes: tuple[int, ...]) -> float:
        """The largest log of a size over its power."""
        pairs = zip(sizes, exponents, strict=True)
        return round(max(abs(math.log(s) - e * math.log(width)) for s, e in pairs), 9)

    best = min(_products(width, len(exponents)), key=miss)
    return best if miss(best) <= math.log(_FACTOR) + 1e-9 else None


def _products(width: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations, ascending."""
    if factors == 1:
        yield (width,)
        return
    for first in divisors(width):
        for rest in _products(width // first, factors - 1):
            yield (first, *rest)


def _next_width(width: int, exponents: tuple[float, ...]) -> int:
    while _nearest(width, exponents) is None:
        width += 1
    return width
