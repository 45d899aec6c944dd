"""A family of your own, searched: all einsums of two cores, drawn at random and trained.

    python examples/einsum_search.py            # 12 points, half a minute
    python examples/einsum_search.py --smoke

A point of the space says how each axis of two cores grows with the width d. Low-rank, Kronecker,
TT, BTT, Monarch and dense matrices are points. Three exponents of a point tell how it trains:

    omega   parameter sharing   d^omega multiplications use a parameter once for each token
    psi     rank                the matrix has rank d^psi
    nu      compute             d^(1 + nu) multiplications a token

Each model is an MLP that learns a random one, its square layers at the point; `param_groups` gives
each core the rate that follows from dense's. The table has the lowest loss first.

Source: Potapczynski et al. 2024, "Searching for Efficient Linear Layers over a Continuous Space of
Structured Matrices" (arXiv:2410.02117), and its authors' code for the axes of the cores.
"""

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from structlin import Dense, Family, Structure, convert, cost, param_groups

# axes in the order in which they lie in a vector: of axes that grow alike the last is the largest
INPUTS = {"gamma": "g", "beta": "b", "alpha": "a"}
OUTPUTS = {"phi": "f", "epsilon": "e", "delta": "d"}
CORES = ("g f d r a", "f e g r b")
ROUNDING = 0.01  # of a sum of exponents: 0.33 + 0.67, 3 * 0.33
PADDING = 0.15  # of a width, at most; the authors' code has the same tolerance
FACTOR = 2.0  # by which a size may miss width^exponent
INPUT, OUTPUT, BATCH = 64, 16, 256  # features of the task, samples of a step
LR = 2.0**-7  # of the dense model


# ---- the family ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Einsum(Family):
    """A point of the space: an exponent for each of the seven axes.

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

    Raises:
        ValueError: an exponent is out of range; those of x or of y do not sum to 1.

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
            if not 0 <= (value := getattr(self, field.name)) <= 1:
                raise ValueError(f"{field.name}={value!r} must be a number from 0 to 1")
        for side, axes in (("x", INPUTS), ("y", OUTPUTS)):
            total = sum(getattr(self, name) for name in axes)
            if abs(total - 1) > ROUNDING:
                text = " + ".join(f"{name}={getattr(self, name)}" for name in axes)
                raise ValueError(f"{text} is {total:g}: the exponents of {side} must sum to 1")
        bound = min(self.alpha + self.delta, self.beta + self.epsilon)
        if self.rho > bound + ROUNDING:
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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name} {value:g}" for name, value in values.items() if value)

    def structure(self, in_features: int, out_features: int) -> Structure:
        inputs = find_sizes(in_features, {INPUTS[n]: getattr(self, n) for n in INPUTS})
        outputs = find_sizes(out_features, {OUTPUTS[n]: getattr(self, n) for n in OUTPUTS})
        sizes = inputs | outputs
        if self.rho:
            pairs = [("a", "d"), ("b", "e")]
            bound = min(sizes.get(one, 1) * sizes.get(other, 1) for one, other in pairs)
            sizes["r"] = min(round(min(in_features, out_features) ** self.rho), bound)
        cores = [" ".join(axis for axis in core.split() if axis in sizes) for core in CORES]
        signature = f"{' '.join(inputs)} -> {' '.join(outputs)}"
        return Structure(signature, *(core for core in cores if core), **sizes)


def find_sizes(width: int, grown: dict[str, float]) -> dict[str, int]:
    """Integers nearest to width^exponent whose product is `width`, or the next number that has
    some; axes with exponent 0 are left out.

    >>> find_sizes(96, {"b": 0.5, "a": 0.5}), find_sizes(97, {"b": 0.5, "a": 0.5})
    ({'b': 8, 'a': 12}, {'b': 7, 'a': 14})
    """
    exponents = {axis: exponent for axis, exponent in grown.items() if exponent}

    def miss(sizes: Sequence[int], padded: int) -> float:
        """The largest log of a size over its power."""
        pairs = zip(sizes, exponents.values(), strict=True)
        return round(max(abs(math.log(s) - e * math.log(padded)) for s, e in pairs), 9)

    for padded in range(width, math.ceil(width * (1 + PADDING)) + 1):
        off, best = min((miss(sizes, padded), sizes) for sizes in factorise(padded, len(exponents)))
        if off <= math.log(FACTOR) + 1e-9:
            return dict(zip(exponents, best, strict=True))
    raise ValueError(f"width {width} has no factors within a factor of 2 of the powers {exponents}")


def factorise(width: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations, ascending."""
    if factors == 1:
        yield (width,)
        return
    for first in (n for n in range(1, width + 1) if width % n == 0):
        for rest in factorise(width // first, factors - 1):
            yield (first, *rest)


# ---- drawing and training ------------------------------------------------------------------------


def sample(width: int, n: int, seed: int = 0) -> list[Einsum]:
    """`n` points whose structures differ at this width and cost less than dense does there.

    Each axis is left out with probability 1/2: families lie on the space's edges.
    """
    draw, found = random.Random(seed), dict[str, Einsum]()
    while len(found) < n:
        exponents = draw_exponents(draw, [*INPUTS]) | draw_exponents(draw, [*OUTPUTS])
        pairs = exponents["alpha"] + exponents["delta"], exponents["beta"] + exponents["epsilon"]
        rho = math.floor(100 * draw.uniform(0, min(*pairs, 1.0))) / 100
        point = Einsum(**exponents, rho=rho if draw.random() < 0.5 else 0.0)
        try:
            structure = point.structure(width, width)
        except ValueError:  # the width has no factors for it
            continue
        if structure.flops < 2 * width**2:
            found.setdefault(str([(core.shape, core.repeat) for core in structure.cores]), point)
    return [*found.values()]


def draw_exponents(draw: random.Random, names: list[str]) -> dict[str, float]:
    """Hundredths that sum to 1, uniform for the axes that are not left out."""
    kept: list[str] = []
    while not kept:
        kept = [name for name in names if draw.random() < 0.5]
    cuts = sorted(draw.randint(0, 100) for _ in kept[1:])
    parts = [(high - low) / 100 for low, high in pairwise([0, *cuts, 100])]
    return dict.fromkeys(names, 0.0) | dict(zip(kept, parts, strict=True))


def build(width: int) -> nn.Sequential:
    sizes = (INPUT, width, width, width, OUTPUT)
    layers = [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def train(family: Family, width: int, steps: int, seed: int) -> tuple[float, int]:
    """The loss on new samples, over the variance of what is learned; FLOPs of one sample."""
    torch.manual_seed(0)
    teacher = build(width).requires_grad_(False)
    torch.manual_seed(1 + seed)
    model = convert(build(width), family, include="[24]")
    optimizer = torch.optim.Adam(param_groups(model, LR))
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def loss(samples: int) -> Tensor:
        x = torch.randn(samples, INPUT)
        y: Tensor = teacher(x)
        return (model(x) - y).square().mean() / y.var()

    for _ in range(steps):
        optimizer.zero_grad()
        loss(BATCH).backward()
        optimizer.step()
        decay.step()
    with torch.no_grad():
        return loss(8 * BATCH).item(), cost(model).flops


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=12, help="how many are drawn")
    parser.add_argument("--width", type=int, default=128, help="of the layers that are structured")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="seconds")
    options = parser.parse_args(argv)
    if options.smoke:
        options.points, options.width, options.steps = 2, 64, 3
    families: list[Family] = [Dense(), *sample(options.width, options.points, options.seed)]
    rows = [(*train(each, options.width, options.steps, options.seed), each) for each in families]
    shown = Table("structure", "omega", "psi", "nu", "FLOPs", "loss")
    for loss, flops, family in sorted(rows, key=lambda row: row[0]):
        measured = [getattr(family, name, None) for name in ("omega", "psi", "nu")]
        figures = ["" if each is None else f"{each:.2f}" for each in measured]
        shown.add_row(family.label, *figures, f"{flops:,}", f"{loss:.3f}")
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
