"""Which rank, or how many blocks, for each layer: the least harm to the model within a budget."""

import heapq
import math
from collections.abc import Sequence

from .._projection.curve import COUNTS, Curve, Size

WAYS = ("effect", "error", "uniform")  # in which a budget may be shared
NEGLIGIBLE_GAIN = 1e-12  # in squared relative error: rounding


def check_budget(budget: float | None, of: str, by: str | None = None) -> None:
    """Raises: ValueError: `budget` is no fraction; `of` or `by` is unknown, or given without a
    budget."""
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if budget is not None and not (number and 0 < budget <= 1):
        raise ValueError(
            f"budget={budget!r} must be a fraction of the parameters or FLOPs, above 0, at most 1"
        )
    if of not in COUNTS or (budget is None and of != "params"):
        known = " or ".join(map(repr, COUNTS))
        raise ValueError(
            f"budget_of={of!r}: it is {known}, and goes with a budget, for example budget=0.5"
        )
    if by is not None and (by not in WAYS or budget is None):
        raise ValueError(
            f"budget_by={by!r}: it is one of {', '.join(WAYS)}, and goes with a budget, for "
            "example budget=0.5"
        )


def allocate(
    curves: Sequence[Curve], budget: float, harms: Sequence[float], of: str = "params"
) -> list[Size]:
    """A size for each layer: the least sum of harm times squared error within a budget.

    Greedy on the lower convex hull of each layer's curve: all layers start at the smallest size,
    then the step that lowers the sum most for its cost is taken, as long as it fits; of the first
    that does not, its layer gets the best size that does. The order of the steps does not depend on
    the budget: a larger one never gives a layer a smaller size, nor a larger sum. The last step of
    a layer leaves it dense, without error, and no other size costs as much as that.

    Args:
        curves: of each layer, see `measure_curve`.
        budget: fraction of what the dense layers cost together, above 0 and at most 1.
        harms: what a squared error of 1 in each layer does: for the sum of squared relative errors,
            1 / `whole`.
        of: what the costs are, for the message.

    Raises:
        ValueError: `budget` is below what the smallest sizes need.

    >>> import torch
    >>> from structlin import LowRank
    >>> from structlin._projection.curve import measure_curve
    >>> plain, hard = torch.ones(16, 16), torch.eye(16)
    >>> curves = [measure_curve(weight, LowRank(rank=1)) for weight in (plain, hard)]
    >>> [size.family for size in allocate(curves, 0.5, [1.0, 1.0])]
    [LowRank(rank=1), LowRank(rank=7)]
    """
    limit = budget * sum(curve.sizes[-1].cost for curve in curves)
    spent = _require_room(curves, budget, of)
    paths = [_hull(curve) for curve in curves]
    taken = [0] * len(curves)  # steps of each layer on its path
    steps: list[tuple[float, int]] = []  # a heap: minus what a step gains for its cost, the layer
    found = [0] * len(curves)

    def consider(n: int) -> None:
        """Put the layer's next step on the heap, if it gains anything."""
        if taken[n] + 1 < len(paths[n]) and harms[n] > 0:
            gain, cost = _compare(curves[n], *paths[n][taken[n] : taken[n] + 2])
            heapq.heappush(steps, (-harms[n] * gain / cost, n))

    for n in range(len(curves)):
        consider(n)
    while steps:
        _, n = heapq.heappop(steps)
        here, there = paths[n][taken[n] : taken[n] + 2]
        fit = [
            m for m in range(here, there + 1) if spent + _compare(curves[n], here, m)[1] <= limit
        ]
        found[n] = min(fit, key=lambda m: curves[n].errors[m])
        if there not in fit:
            break
        spent += _compare(curves[n], here, there)[1]
        taken[n] += 1
        consider(n)
    return [curve.sizes[m] for curve, m in zip(curves, found, strict=True)]


def share_evenly(sizes: Sequence[Sequence[Size]], budget: float) -> list[Size]:
    """For each layer the largest of its sizes that costs at most that fraction of the dense one.

    Raises:
        ValueError: the smallest size of a layer costs more.
    """
    found = []
    for own in sizes:
        limit = budget * own[-1].cost
        if own[0].cost > limit:
            least = math.ceil(1e4 * own[0].cost / own[-1].cost) / 1e4
            raise ValueError(
                f"budget={budget}, the same for all layers: the smallest structure of one is "
                f"{own[0].family.label}, which needs {least:.4f} or more"
            )
        found.append(max((size for size in own if size.cost <= limit), key=lambda s: s.cost))
    return found


def _require_room(curves: Sequence[Curve], budget: float, of: str) -> int:
    """What the smallest sizes cost."""
    spent = sum(curve.sizes[0].cost for curve in curves)
    total = sum(curve.sizes[-1].cost for curve in curves)
    if spent > budget * total:
        least = math.ceil(1e4 * spent / total) / 1e4
        raise ValueError(
            f"budget={budget} is {int(budget * total):,} {COUNTS[of]}; the smallest structures of "
            f"these layers have {spent:,}: budget={least:.4f} or more"
        )
    return spent


def _compare(curve: Curve, here: int, there: int) -> tuple[float, int]:
    """What the larger of two sizes gains in squared error, and what it costs more."""
    gain = curve.errors[here] - curve.errors[there]
    return gain, curve.sizes[there].cost - curve.sizes[here].cost


def _hull(curve: Curve) -> list[int]:
    """The sizes from which each next one gains less for its cost than the last, and something."""
    path: list[int] = []
    for n in range(len(curve.sizes)):
        while len(path) > 1 and _slope(curve, path[-1], n) >= _slope(curve, *path[-2:]):
            path.pop()
        if not path or curve.errors[path[-1]] - curve.errors[n] > NEGLIGIBLE_GAIN * curve.whole:
            path.append(n)
    return path


def _slope(curve: Curve, here: int, there: int) -> float:
    gain, cost = _compare(curve, here, there)
    return gain / cost
