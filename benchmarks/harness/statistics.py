"""What rows come to: intervals over the seeds, best learning rates, power laws, and verdicts on
claims.

A row is a run: {"lr", "seed", "loss", ...}, the loss None where it was not finite; "method" and
"size" where a rate is followed over sizes.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, linear_regression, stdev
from typing import Any

import numpy as np

Row = Mapping[str, Any]
Estimate = dict[str, float]  # "value", and the ends of its 95 % interval, "low" and "high"
Curve = list[tuple[float, float]]  # log FLOPs, log loss; ascending
RESAMPLES = 1000


def select(rows: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The rows that have what is `wanted`."""
    return [row for row in rows if wanted.items() <= row.items()]


def one(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The only row that has what is `wanted`."""
    (found,) = select(rows, **wanted)
    return found


def values(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of `key`, in the order in which they come first."""
    return list(dict.fromkeys(row[key] for row in rows))


def seeds_of(rows: Iterable[Row]) -> list[int]:
    return sorted({row["seed"] for row in rows})


def log_loss(row: Row, of: str = "loss") -> float:
    """The log of a row's loss, infinite where the run diverged."""
    return math.inf if row[of] is None else math.log(row[of])


# ---- intervals -----------------------------------------------------------------------------------


def student(values: Sequence[float]) -> Estimate:
    """The mean of a number for each seed, with its 95 % interval by Student's distribution.

    Raises:
        ValueError: fewer than two values.

    >>> found = student([1.0, 2.0, 3.0])
    >>> [round(found[key], 2) for key in ("value", "low", "high")]
    [2.0, -0.48, 4.48]
    """
    from scipy.stats import t

    if len(values) < 2:
        raise ValueError(f"{len(values)} values have no interval; two or more seeds do")
    mean = fmean(values)
    reach = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return {"value": mean, "low": mean - reach, "high": mean + reach}


def bootstrap(statistic: Callable[[Sequence[int]], float], seeds: Sequence[int]) -> Estimate:
    """`statistic` of all seeds, and the ends of its 95 % interval over draws of the seeds."""
    draw = random.Random(0)
    drawn = sorted(statistic(draw.choices(seeds, k=len(seeds))) for _ in range(RESAMPLES))
    low, high = drawn[RESAMPLES // 40], drawn[-1 - RESAMPLES // 40]
    return {"value": statistic(seeds), "low": low, "high": high}


def differences(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """`student` of the differences of two numbers that each seed has."""
    return student([a - b for a, b in zip(first, second, strict=True)])


# ---- verdicts: the only way to say whether a claim holds -----------------------------------------


def below(found: Estimate, limit: float = 0.0) -> bool | None:
    """Whether what was measured is below `limit`; None where the interval holds both.

    >>> [below({"value": v, "low": v - 1, "high": v + 1}) for v in (-2, 0, 2)]
    [True, None, False]
    """
    return True if found["high"] < limit else False if found["low"] >= limit else None


def above(found: Estimate, limit: float = 0.0) -> bool | None:
    """Whether what was measured is above `limit`; None where the interval holds both.

    >>> [above({"value": v, "low": v - 1, "high": v + 1}) for v in (-2, 0, 2)]
    [False, None, True]
    """
    return True if found["low"] > limit else False if found["high"] <= limit else None


def within(found: Estimate, limit: float) -> bool | None:
    """Whether what was measured lies between -`limit` and `limit`; None where the interval holds
    values of both kinds.

    >>> [within({"value": v, "low": v - 1, "high": v + 1}, 2.5) for v in (-1, 2, 5)]
    [True, None, False]
    """
    if found["low"] > limit or found["high"] < -limit:
        return False
    return True if -limit <= found["low"] and found["high"] <= limit else None


def judge(*holds: bool | None) -> str:
    """What the parts of a claim come to; None is a part that its interval does not decide.

    >>> judge(True, True), judge(True, False), judge(True, None)
    ('yes', 'in part', 'in part, else undecided')
    >>> judge(None, None), judge(False, None), judge(False, False)
    ('undecided', '**no**, in part undecided', '**no**')
    """
    found = set(holds)
    if found == {True}:
        return "yes"
    if True in found:
        return "in part" if False in found else "in part, else undecided"
    if False in found:
        return "**no**, in part undecided" if None in found else "**no**"
    return "undecided"


# ---- learning rates ------------------------------------------------------------------------------


def curve_of_rates(rows: Iterable[Row], of: str = "loss") -> dict[float, float]:
    """lr -> geometric mean of the loss over the seeds, infinite if it is for one of them.

    Args:
        rows: of one method and size.
        of: the loss's name in them.
    """
    logs: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        logs[row["lr"]].append(log_loss(row, of))
    return {lr: math.exp(sum(found) / len(found)) for lr, found in sorted(logs.items())}


def losses(
    rows: Iterable[Row], by: Sequence[str] = ("method", "size")
) -> dict[tuple[Any, ...], dict[float, float]]:
    """The values of `by` -> `curve_of_rates`, sorted by the second of them."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in by)].append(row)
    ordered = sorted(found.items(), key=lambda item: item[0][1])
    return {key: curve_of_rates(members) for key, members in ordered}


def best(curve: Mapping[float, float]) -> float:
    """The learning rate of the least loss."""
    return min(curve, key=curve.__getitem__)


def untried(curve: Mapping[float, float], start: float) -> list[float]:
    """The rates to try next, by factors of 2 from the best; none if it has both its neighbours.

    >>> untried({}, 1.0), untried({0.5: 3.0, 1.0: 2.0, 2.0: 1.0}, 1.0)
    ([0.5, 1.0, 2.0], [4.0])
    >>> untried({0.5: 2.0, 1.0: 1.0, 2.0: 2.0}, 1.0)
    []
    """
    centre = best(curve) if curve else start
    return [rate for rate in (centre / 2, centre, 2 * centre) if rate not in curve]


def tuned(rows: Iterable[Row], of: str = "loss") -> dict[str, Any]:
    """The rate of the least mean log loss over the seeds, and the log losses at it, by seed.

    Args:
        rows: of one method and size.
        of: the loss's name in them.
    """
    by_rate: dict[Any, dict[int, float]] = defaultdict(dict)
    for row in rows:
        by_rate[row["lr"]][row["seed"]] = log_loss(row, of)
    lr = min(by_rate, key=lambda rate: sum(by_rate[rate].values()))
    return {"lr": lr, "logs": by_rate[lr]}


def log_ratios(first: Row, second: Row) -> list[float]:
    """Of two results of `tuned`, for each seed, the log of the first's loss over the second's."""
    return [first["logs"][seed] - second["logs"][seed] for seed in sorted(second["logs"])]


def optimum(curve: Mapping[float, float]) -> float:
    """log2 of the best learning rate, between the grid's points: the vertex of a parabola.

    It goes through the logarithms of the losses at the best rate and its two neighbours; where one
    of them is missing or infinite the best rate itself is taken.

    >>> optimum({0.5: 2.0, 1.0: 1.0, 2.0: 2.0}), optimum({0.5: 2.0, 1.0: 1.0, 2.0: 1.0})
    (0.0, 0.5)
    """
    rates = list(curve)
    n = rates.index(best(curve))
    centre = math.log2(rates[n])
    if not 0 < n < len(rates) - 1:
        return centre
    left, middle, right = (math.log(curve[rate]) for rate in rates[n - 1 : n + 2])
    bend = left - 2 * middle + right
    if not (math.isfinite(bend) and bend > 0):
        return centre
    return centre + (left - right) / (2 * bend) * (math.log2(rates[n + 1]) - centre)


def transfer(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """method -> how its best learning rate moves from the least size to the largest.

    - "drift": slope of log2 (best lr) on log2 size: factors of 2 per doubling, by least squares;
    - "cost": loss of the largest size at the least size's best rate, over its loss at its own (inf
      as None);
    - "optima", "losses": log2 (best lr) and least loss of each size.
    """
    curves: dict[str, dict[int, dict[float, float]]] = defaultdict(dict)
    for (method, size), curve in losses(rows).items():
        curves[method][size] = curve
    found = {}
    for method, by_size in curves.items():
        optima = {size: optimum(curve) for size, curve in by_size.items()}
        smallest, largest = by_size[min(by_size)], by_size[max(by_size)]
        moved = largest.get(best(smallest), math.inf) / largest[best(largest)]
        found[method] = {
            "drift": slope([math.log2(size) for size in optima], list(optima.values())),
            "cost": moved if math.isfinite(moved) else None,
            "optima": optima,
            "losses": {size: curve[best(curve)] for size, curve in by_size.items()},
        }
    return found


def moved_by_seed(rows: Sequence[Row]) -> list[float]:
    """By how many factors of 2 one method's optimum moves from the smallest size to the largest,
    seed by seed."""
    return [
        optimum(curves[max(curves)]) - optimum(curves[min(curves)])
        for curves in curves_by_seed(rows)
    ]


def curves_by_seed(rows: Sequence[Row]) -> list[dict[int, dict[float, float]]]:
    """Of one method's rows: size -> lr -> loss, for each seed."""
    found = (losses(row for row in rows if row["seed"] == seed) for seed in seeds_of(rows))
    return [{size: curve for (_, size), curve in each.items()} for each in found]


def shifts(rows: Sequence[dict[str, Any]], base_width: int) -> dict[str, Any]:
    """By how many factors of 2 each structure's best rate lies from dense's at `base_width`, for
    each width and rule, and what dense's rate costs in loss.

    Rules are "naive" and "aware", and what they have in common may follow a comma: dense's rate is
    then that of a dense model which has it too.
    """
    curves = losses(rows, by=("structure", "width", "rule"))
    references = {
        rule.partition(",")[2]: best(curve)
        for (structure, width, rule), curve in curves.items()
        if (structure, width) == ("dense", base_width)
    }
    table = [
        {
            "structure": structure,
            "width": width,
            "rule": rule,
            "best_lr": best(curve),
            "shift": math.log2(best(curve) / reference),
            "best_loss": curve[best(curve)],
            "loss_at_reference_lr": curve[reference] if math.isfinite(curve[reference]) else None,
        }
        for (structure, width, rule), curve in curves.items()
        for reference in [references[rule.partition(",")[2]]]
    ]
    moved = {
        rule: [abs(row["shift"]) for row in select(table, rule=rule) if row["structure"] != "dense"]
        for rule in values(table, "rule")
    }
    return {
        "reference_lr": references[""],
        "mean_shift": {rule: sum(found) / len(found) for rule, found in moved.items()},
        "largest_shift": {rule: max(found) for rule, found in moved.items()},
        "table": table,
    }


# ---- power laws ----------------------------------------------------------------------------------


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line; 0 for a single point.

    >>> slope([0, 1, 2], [1, 3, 5])
    2.0
    """
    centre, level = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - centre) ** 2 for a in x)
    return (
        sum((a - centre) * (b - level) for a, b in zip(x, y, strict=True)) / spread
        if spread
        else 0.0
    )


def curve_of(rows: Iterable[Row], seeds: Sequence[int], flops: str = "flops") -> Curve:
    """Mean log loss over `seeds` (a seed may come more than once) at each width, at the width's
    best learning rate.

    Args:
        rows: of one structure.
        flops: the cost's name in them.
    """
    by_width: dict[int, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    costs = {}
    for row in rows:
        by_width[row["width"]][row["lr"]][row["seed"]] = log_loss(row)
        costs[row["width"]] = math.log(row[flops])
    found = {
        width: min(rates.values(), key=lambda logs: fmean(logs.values()))
        for width, rates in by_width.items()
    }
    return sorted(
        (costs[width], fmean(logs[seed] for seed in seeds)) for width, logs in found.items()
    )


def exponent(curve: Curve) -> float:
    """a of the power law loss ~ FLOPs^-a, by least squares in logarithms."""
    return -linear_regression(*zip(*curve, strict=True)).slope


def gap(first: Curve, second: Curve, points: int = 33) -> float:
    """Mean of log(loss of `first` / loss of `second`) at equal FLOPs, evenly in log FLOPs where
    both have values.

    Raises:
        ValueError: there are no FLOPs that both reach.
    """
    low, high = max(first[0][0], second[0][0]), min(first[-1][0], second[-1][0])
    if low >= high:
        raise ValueError(
            f"the curves share no FLOPs: one starts at {math.exp(low):.3g}, "
            f"one ends at {math.exp(high):.3g}"
        )
    at = np.linspace(low, high, points)
    ours, theirs = (np.interp(at, *zip(*curve, strict=True)) for curve in (first, second))
    return float((ours - theirs).mean())
