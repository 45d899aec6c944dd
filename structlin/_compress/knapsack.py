"""The sizes of some layers that lose the least in all within a cost: a knapsack.

Each layer has options, ascending in cost, of which it takes one (the multiple-choice knapsack).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from .._projection.curve import Curve

NEGLIGIBLE_GAIN = 1e-12  # in squared relative error: rounding
SMALL_GAP = 0.01  # of the lower bound: the greedy choice is good enough
CELLS = 1 << 14  # of the table of dynamic programming


class Choice(NamedTuple):
    """An option of each layer."""

    options: list[int]
    harm: float  #: the sum of weight times squared error
    bound: float  #: no choice within the cost has a smaller sum


def choose(curves: Sequence[Curve], limit: float, weights: Sequence[float]) -> Choice:
    """The least sum of weight times squared error whose costs are at most `limit` in all.

    The greedy choice is taken where its sum is within 1 % of the lower bound. It nearly always is
    for many layers, and a larger limit then never gives a layer a smaller size. Otherwise dynamic
    programming finds the best one. It is exact where all costs are multiples of a number that
    goes into the limit at most `CELLS` times. Elsewhere it rounds costs to such multiples. Then
    nothing but `bound` says how near the best choice is.
    """
    greedy = choose_greedily(curves, limit, weights)
    if greedy.harm <= (1 + SMALL_GAP) * greedy.bound:
        return greedy
    options = choose_by_table(curves, limit, weights)
    harm = sum_of_harms(curves, options, weights)
    return Choice(options, harm, greedy.bound) if harm < greedy.harm else greedy


def sum_of_harms(
    curves: Sequence[Curve], options: Sequence[int], weights: Sequence[float]
) -> float:
    layers = zip(curves, options, weights, strict=True)
    return sum(weight * curve.errors[option] for curve, option, weight in layers)


def choose_greedily(curves: Sequence[Curve], limit: float, weights: Sequence[float]) -> Choice:
    """Greedy on the lower convex hull of each layer's curve.

    All layers start at the smallest size. Then the step that lowers the sum most for its cost is
    taken, as long as it fits. The layer of the first one that does not fit gets the best size that
    does. The order of the steps does not depend on `limit`.

    The bound is the sum where a share of that last step could be taken: the optimum of the linear
    relaxation (Sinha and Zoltners 1979).
    """
    paths = [find_hull(curve) for curve in curves]
    steps: list[tuple[float, int]] = []  # minus what a step gains for its cost, the layer
    for layer, curve in enumerate(curves):
        for here, there in pairwise(paths[layer] if weights[layer] > 0 else []):
            steps.append((-weights[layer] * slope(curve, here, there), layer))
    spent = sum(curve.sizes[0].cost for curve in curves)
    options = [0] * len(curves)
    gain_of_a_share = 0.0
    for negative_gain, layer in sorted(steps):
        curve = curves[layer]
        # a layer's steps come in its path's order, as they gain less and less for their cost
        here, there = paths[layer][:2]
        others = spent - curve.sizes[here].cost
        fitting = [m for m in range(here, there + 1) if others + curve.sizes[m].cost <= limit]
        if there not in fitting:
            # A size on the way may fit. The relaxation takes a share of the whole step.
            harm_here = weights[layer] * curve.errors[here]
            options[layer] = min(fitting, key=lambda m: curve.errors[m])
            harm_taken = weights[layer] * curve.errors[options[layer]]
            gain_of_a_share = -negative_gain * (limit - spent) - (harm_here - harm_taken)
            break
        # a step of the hull may pass a size that is as good and costs as much
        options[layer] = min(fitting, key=lambda m: curve.errors[m])
        spent = others + curve.sizes[there].cost
        del paths[layer][0]
    harm = sum_of_harms(curves, options, weights)
    return Choice(options, harm, harm - max(0.0, gain_of_a_share))


def choose_by_table(
    curves: Sequence[Curve], limit: float, weights: Sequence[float], most_cells: int = CELLS
) -> list[int]:
    """Dynamic programming: table[c] is the least sum of the layers so far within c units of cost.

    Costs count from each layer's smallest size, which fits always. They are rounded to multiples of
    a unit, which is the smallest that goes into the limit at most `most_cells` times. The result is
    the choice of the most units whose costs fit as they are.
    """
    extra = [[size.cost - curve.sizes[0].cost for size in curve.sizes] for curve in curves]
    room = math.floor(limit) - sum(curve.sizes[0].cost for curve in curves)
    common = math.gcd(*(cost for costs in extra for cost in costs))
    unit = common * max(1, math.ceil(room / (common * most_cells)))
    units = [[round(cost / unit) for cost in costs] for costs in extra]
    cells = room // unit + 1 + len(curves) // 2  # for what rounding adds at most
    table = torch.zeros(cells, dtype=torch.float64)
    taken: list[torch.Tensor] = []  # for each layer: cells -> its option
    for curve, shifts, weight in zip(curves, units, weights, strict=True):
        best = torch.full((cells,), math.inf, dtype=torch.float64)
        option_of = torch.zeros(cells, dtype=torch.int64)
        for option, shift in enumerate(shifts):
            if shift >= cells:
                break
            harm = table[: cells - shift] + weight * curve.errors[option]  # (cells - shift,)
            better = harm < best[shift:]
            best[shift:][better] = harm[better]
            option_of[shift:][better] = option
        table = best
        taken.append(option_of)
    for cell in reversed(range(cells)):
        options = trace_back(taken, units, cell)
        if sum(costs[option] for costs, option in zip(extra, options, strict=True)) <= room:
            return options
    return [0] * len(curves)


def trace_back(
    taken: Sequence[torch.Tensor], units: Sequence[Sequence[int]], cell: int
) -> list[int]:
    """The options that led to a cell of the last layer's table."""
    options: list[int] = []
    for option_of, shifts in zip(reversed(taken), reversed(units), strict=True):
        option = int(option_of[cell])
        options.append(option)
        cell -= shifts[option]
    return options[::-1]


def find_hull(curve: Curve) -> list[int]:
    """Indices of the lower convex hull of error against cost, ascending."""
    path: list[int] = []
    for n in range(len(curve.sizes)):
        # the path's last point is on or above the line from the one before it to this size
        while len(path) > 1 and slope(curve, path[-1], n) >= slope(curve, *path[-2:]):
            path.pop()
        # a larger size that gains nothing is no point of the path
        if not path or curve.errors[path[-1]] - curve.errors[n] > NEGLIGIBLE_GAIN * curve.whole:
            path.append(n)
    return path


def slope(curve: Curve, here: int, there: int) -> float:
    """What the larger of two sizes gains in squared error, for each parameter or FLOP more."""
    gain = curve.errors[here] - curve.errors[there]
    return gain / (curve.sizes[there].cost - curve.sizes[here].cost)
