"""The arithmetic of a search: power laws, regression on the measures, bootstrap intervals.

Shapes: S structures, W widths, N seeds, P points (a structure at a width). A log loss of nan is a
run that was not made, of inf one that diverged.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 1000
_FLOORS = 100  # values of c that are tried


@dataclass(frozen=True)
class Estimate:
    """A number, and the ends of its 95 % bootstrap interval; NaN where there is none."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.3g}"
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class PowerLaw:
    """loss = exp(level) * cost^-exponent + floor."""

    level: float
    exponent: float
    floor: float

    def log_loss(self, cost: Tensor) -> Tensor:
        return ((self.level - self.exponent * cost.log()).exp() + self.floor).log()


def fit_power_law(cost: Tensor, log_loss: Tensor) -> PowerLaw:
    """Fit a power law by least squares of the log loss; fewer than four points have no floor.

    Raises:
        ValueError: fewer than two different costs.

    >>> cost = torch.tensor([1e3, 1e4, 1e5, 1e6], dtype=torch.float64)
    >>> law = fit_power_law(cost, (8 * cost**-0.5 + 0.01).log())
    >>> f"{math.exp(law.level):.1f} {law.exponent:.2f} {law.floor:.3f}"
    '8.0 0.50 0.010'
    """
    x = cost.log() - cost.log().mean()  # (P,)
    if not x.square().sum() > 0:
        raise ValueError("a power law needs runs of two different costs or more")
    shares = torch.linspace(0, 0.99, _FLOORS if len(cost) > 3 else 1, dtype=cost.dtype)
    for _ in range(3):  # finer around the best
        floor = (log_loss.min().exp() * shares)[:, None]  # (floors, 1)
        y = (log_loss.exp() - floor).log()  # (floors, P)
        slope = (y * x).sum(1, keepdim=True) / x.square().sum()
        level = y.mean(1, keepdim=True)
        error = (((level + slope * x).exp() + floor).log() - log_loss).square().sum(1)
        best = int(error.argmin())
        if len(shares) == 1:
            break
        low, high = shares[max(0, best - 1)], shares[min(best + 1, len(shares) - 1)]
        shares = torch.linspace(float(low), float(high), _FLOORS, dtype=cost.dtype)
    exponent = -float(slope[best])
    constant = float(level[best]) + exponent * float(cost.log().mean())
    return PowerLaw(constant, exponent, float(floor[best]))


def lower_envelope(cost: Tensor, log_loss: Tensor) -> Tensor:
    """Indices of the points that no other has at most the cost and a lower loss of, by cost.

    >>> lower_envelope(torch.tensor([1.0, 2.0, 3.0, 2.0]), torch.tensor([3.0, 1.0, 2.0, 1.5]))
    tensor([0, 1])
    """
    order = sorted(range(len(cost)), key=lambda n: (float(cost[n]), float(log_loss[n])))
    kept: list[int] = []
    for n in order:
        if not kept or log_loss[n] < log_loss[kept[-1]]:
            kept.append(n)
    return torch.tensor(kept)


def regress(cost: Tensor, log_loss: Tensor, measures: Tensor) -> list[float]:
    """Return by how much the log loss rises with each of `measures` (P, M), the cost and the other
    measures being equal: least squares, with a parabola in the log of the cost.

    >>> cost, measures = torch.rand(50, dtype=torch.float64) + 1, torch.rand(50, 2).double()
    >>> log_loss = 1 - 0.5 * cost.log() + 0.3 * measures[:, 0] - 0.2 * measures[:, 1]
    >>> [round(effect, 6) for effect in regress(cost, log_loss, measures)]
    [0.3, -0.2]
    """
    x = cost.log() - cost.log().mean()
    features = torch.cat([torch.stack([x**0, x, x**2], 1), measures], 1)
    solution = torch.linalg.lstsq(features, log_loss[:, None], driver="gelsd").solution
    return [float(value) for value in solution[3:, 0]]


def bootstrap(
    statistic: Callable[[list[int], list[int]], list[float]],
    structures: int,
    seeds: int,
    *,
    draw_structures: bool,
) -> list[Estimate]:
    """Each number of `statistic(structures, seeds)`, lists of indices, with its interval: seeds are
    drawn with repetition, all structures with the same; with `draw_structures` these too. One seed
    gives no interval."""
    draw = random.Random(0)
    values = statistic([*range(structures)], [*range(seeds)])
    if seeds < 2:
        return [Estimate(value, math.nan, math.nan) for value in values]
    drawn: list[list[float]] = []
    while len(drawn) < RESAMPLES:
        chosen = [*range(structures)]
        if draw_structures:
            chosen = draw.choices(chosen, k=structures)
        try:
            drawn.append(statistic(chosen, draw.choices(range(seeds), k=seeds)))
        except ValueError:  # all of one cost: no law
            drawn.append([math.nan] * len(values))
    found = []
    for value, sampled in zip(values, zip(*drawn, strict=True), strict=True):
        known = sorted(each for each in sampled if not math.isnan(each))
        edge = len(known) // 40
        found.append(
            Estimate(value, known[edge], known[-1 - edge])
            if known
            else Estimate(value, math.nan, math.nan)
        )
    return found
