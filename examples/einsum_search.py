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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

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
INPUT = 64  # features of the task
OUTPUT = 16
BATCH = 256  # samples of a step
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
        for name, exponent in self.exponents.items():
            if not 0 <= exponent <= 1:
                raise ValueError(f"{name}={exponent!r} must be a number from 0 to 1")
        self._require_sum_of_1("x", INPUTS)
        self._require_sum_of_1("y", OUTPUTS)
        bound = min(self.alpha + self.delta, self.beta + self.epsilon)
        if self.rho > bound + ROUNDING:
            raise ValueError(
                f"rho={self.rho} is over the useful bound "
                f"min(alpha + delta, beta + epsilon) = {bound:g}"
            )

    def _require_sum_of_1(self, vector: str, names: Iterable[str]) -> None:
        exponents = {name: self.exponents[name] for name in names}
        total = sum(exponents.values())
        if abs(total - 1) > ROUNDING:
            text = " + ".join(f"{name}={exponent}" for name, exponent in exponents.items())
            raise ValueError(f"{text} is {total:g}: the exponents of {vector} must sum to 1")

    @property
    def exponents(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def omega(self) -> float:
        """log_d of FLOPs / (2 params), in the limit of wide square matrices: 0 is no sharing."""
        # A has d^(gamma + phi + delta + rho + alpha) entries and each multiplies d^beta times; B
        # has d^(phi + epsilon + gamma + rho + beta), d^delta times. The exponents of x and of y sum
        # to 1, so the larger core has d^(2 + rho - min(beta + epsilon, alpha + delta)) entries, and
        # the larger product takes d^(2 + rho - min(epsilon, alpha)) multiplications.
        params_saved = min(self.alpha + self.delta, self.beta + self.epsilon)
        flops_saved = min(self.alpha, self.epsilon)
        return round(params_saved - flops_saved, 9)

    @property
    def psi(self) -> float:
        """log_d of the rank, in the same limit: 1 is full rank up to a factor."""
        # Block (f, g) of the matrix is the sum over r of kron(A_r, B_r), with A_r (d, a) and
        # B_r (e, b). Its rank is at most r * min(d, a) * min(e, b), and there are f * g blocks.
        through_b_and_d = 2 + self.rho - (self.alpha + self.epsilon)
        through_a_and_e = 2 + self.rho - (self.beta + self.delta)
        return round(min(1.0, through_b_and_d, through_a_and_e), 9)

    @property
    def nu(self) -> float:
        """log_d of FLOPs / (2 d), in the same limit: 1 is a dense matrix's."""
        return round(1 + self.rho - min(self.alpha, self.epsilon), 9)

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.exponents.items() if value)

    def structure(self, in_features: int, out_features: int) -> Structure:
        inputs = find_sizes(in_features, {INPUTS[name]: self.exponents[name] for name in INPUTS})
        outputs = find_sizes(
            out_features, {OUTPUTS[name]: self.exponents[name] for name in OUTPUTS}
        )
        sizes = inputs | outputs
        if self.rho:
            # A block is the sum over r of kron(A_r, B_r), with A_r (d, a) and B_r (e, b). More
            # than a * d or b * e terms add parameters and no matrices.
            a_bound = sizes.get("a", 1) * sizes.get("d", 1)
            b_bound = sizes.get("b", 1) * sizes.get("e", 1)
            rank = round(min(in_features, out_features) ** self.rho)
            sizes["r"] = min(rank, a_bound, b_bound)
        cores = []
        for core in CORES:
            axes = [axis for axis in core.split() if axis in sizes]
            if axes:
                cores.append(" ".join(axes))
        return Structure(f"{' '.join(inputs)} -> {' '.join(outputs)}", *cores, **sizes)


def find_sizes(width: int, exponents: dict[str, float]) -> dict[str, int]:
    """Integers nearest to width^exponent whose product is `width`, or the next number that has
    some; axes with exponent 0 are left out.

    >>> find_sizes(96, {"b": 0.5, "a": 0.5}), find_sizes(97, {"b": 0.5, "a": 0.5})
    ({'b': 8, 'a': 12}, {'b': 7, 'a': 14})
    """
    exponents = {axis: exponent for axis, exponent in exponents.items() if exponent}

    def log_miss(padded: int, sizes: Sequence[int]) -> float:
        """The largest |log(size / padded^exponent)|; exponents and sizes come in one order."""
        misses = []
        for size, exponent in zip(sizes, exponents.values(), strict=True):
            misses.append(abs(math.log(size) - exponent * math.log(padded)))
        return round(max(misses), 9)

    for padded in range(width, math.ceil(width * (1 + PADDING)) + 1):
        candidates = []
        for sizes in factorise(padded, len(exponents)):
            candidates.append((log_miss(padded, sizes), sizes))
        smallest_miss, nearest_sizes = min(candidates)
        if smallest_miss <= math.log(FACTOR) + 1e-9:
            return dict(zip(exponents, nearest_sizes, strict=True))
    raise ValueError(f"width {width} has no factors within a factor of 2 of the powers {exponents}")


def factorise(width: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations, ascending."""
    if factors == 1:
        yield (width,)
        return
    for first in range(1, width + 1):
        if width % first == 0:
            for others in factorise(width // first, factors - 1):
                yield (first, *others)


# ---- drawing and training ------------------------------------------------------------------------


def sample(width: int, n: int, seed: int = 0) -> list[Einsum]:
    """`n` points whose structures differ at this width and cost less than dense does there.

    Each axis is left out with probability 1/2: families lie on the space's edges.
    """
    draw = random.Random(seed)
    points: dict[
        str, Einsum
    ] = {}  # by the shapes of their cores: the first point of each structure
    while len(points) < n:
        point = draw_point(draw)
        try:
            structure = point.structure(width, width)
        except ValueError:  # the width has no factors for it
            continue
        if structure.flops < 2 * width**2:
            shapes = str([(core.shape, core.repeat) for core in structure.cores])
            points.setdefault(shapes, point)
    return list(points.values())


def draw_point(draw: random.Random) -> Einsum:
    exponents = draw_exponents(draw, list(INPUTS)) | draw_exponents(draw, list(OUTPUTS))
    a_and_d = exponents["alpha"] + exponents["delta"]
    b_and_e = exponents["beta"] + exponents["epsilon"]
    rho = math.floor(100 * draw.uniform(0, min(a_and_d, b_and_e, 1.0))) / 100
    has_rank = draw.random() < 0.5
    return Einsum(**exponents, rho=rho if has_rank else 0.0)


def draw_exponents(draw: random.Random, names: list[str]) -> dict[str, float]:
    """Hundredths that sum to 1, uniform for the axes that are not left out."""
    present: list[str] = []
    while not present:
        present = [name for name in names if draw.random() < 0.5]
    cuts = sorted(draw.randint(0, 100) for _ in present[1:])
    exponents = dict.fromkeys(names, 0.0)
    for name, (low, high) in zip(present, pairwise([0, *cuts, 100]), strict=True):
        exponents[name] = (high - low) / 100
    return exponents


def build(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INPUT, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, OUTPUT),
    )


class Result(NamedTuple):
    """What became of a family."""

    loss: float  # on new samples, over the variance of what is learned
    flops: int  # of one sample
    family: Family


def train(family: Family, width: int, steps: int, seed: int) -> Result:
    """Trains the model with the family in its two square layers."""
    torch.manual_seed(0)
    teacher = build(width).requires_grad_(False)
    torch.manual_seed(1 + seed)
    model = convert(build(width), family, include="[24]")  # the square layers of `build`
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
        return Result(loss(8 * BATCH).item(), cost(model).flops, family)


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
        options.points = 2
        options.width = 64
        options.steps = 3
    families: list[Family] = [Dense(), *sample(options.width, options.points, options.seed)]
    results = [train(family, options.width, options.steps, options.seed) for family in families]
    table = Table("structure", "omega", "psi", "nu", "FLOPs", "loss")
    for loss, flops, family in sorted(results, key=lambda result: result.loss):
        exponents = ["", "", ""]  # dense is no point of the space here
        if isinstance(family, Einsum):
            exponents = [f"{family.omega:.2f}", f"{family.psi:.2f}", f"{family.nu:.2f}"]
        table.add_row(family.label, *exponents, f"{flops:,}", f"{loss:.3f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
