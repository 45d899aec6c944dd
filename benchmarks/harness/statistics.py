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
    (row,) = select(rows, **wanted)
    return row


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

    >>> estimate = student([1.0, 2.0, 3.0])
    >>> [round(estimate[key], 2) for key in ("value", "low", "high")]
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
    resampled = sorted(statistic(draw.choices(seeds, k=len(seeds))) for _ in range(RESAMPLES))
    tail = RESAMPLES // 40  # 2.5 % of the draws lie beyond each end
    return {"value": statistic(seeds), "low": resampled[tail], "high": resampled[-1 - tail]}


def differences(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """`student` of the differences of two numbers that each seed has."""
    return student([a - b for a, b in zip(first, second, strict=True)])


# ---- verdicts: the only way to say whether a claim holds -----------------------------------------


def below(estimate: Estimate, limit: float = 0.0) -> bool | None:
    """Whether what was measured is below `limit`; None where the interval holds both.

    >>> [below({"value": v, "low": v - 1, "high": v + 1}) for v in (-2, 0, 2)]
    [True, None, False]
    """
    if estimate["high"] < limit:
        return True
    if estimate["low"] >= limit:
        return False
    return None


def above(estimate: Estimate, limit: float = 0.0) -> bool | None:
    """Whether what was measured is above `limit`; None where the interval holds both.

    >>> [above({"value": v, "low": v - 1, "high": v + 1}) for v in (-2, 0, 2)]
    [False, None, True]
    """
    if estimate["low"] > limit:
        return True
    if estimate["high"] <= limit:
        return False
    return None


def within(estimate: Estimate, limit: float) -> bool | None:
    """Whether what was measured lies between -`limit` and `limit`; None where the interval holds
    values of both kinds.

    >>> [within({"value": v, "low": v - 1, "high": v + 1}, 2.5) for v in (-1, 2, 5)]
    [True, None, False]
    """
    if estimate["low"] > limit or estimate["high"] < -limit:
        return False
    if -limit <= estimate["low"] and estimate["high"] <= limit:
        return True
    return None


def judge(*holds: bool | None) -> str:
    """What the parts of a claim come to; None is a part that its interval does not decide.

    >>> judge(True, True), judge(True, False), judge(True, None)
    ('yes', 'in part', 'in part, else undecided')
    >>> judge(None, None), judge(False, None), judge(False, False)
    ('undecided', '**no**, in part undecided', '**no**')
    """
    answers = set(holds)
    if answers == {True}:
        return "yes"
    if True in answers:
        return "in part" if False in answers else "in part, else undecided"
    if False in answers:
        return "**no**, in part undecided" if None in answers else "**no**"
    return "undecided"


# ---- learning rates ------------------------------------------------------------------------------


def curve_of_rates(rows: Iterable[Row], of: str = "loss") -> dict[float, float]:
    """lr -> geometric mean of the loss over the seeds, infinite if it is for one of them.

    Args:
        rows: of one method and size.
        of: the loss's name in them.
    """
    logs_by_rate: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        logs_by_rate[row["lr"]].append(log_loss(row, of))
    return {lr: math.exp(sum(logs) / len(logs)) for lr, logs in sorted(logs_by_rate.items())}


def losses(
    rows: Iterable[Row], by: Sequence[str] = ("method", "size")
) -> dict[tuple[Any, ...], dict[float, float]]:
    """The values of `by` -> `curve_of_rates`, sorted by the second of them."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in by)].append(row)
    ordered_keys = sorted(groups, key=lambda key: key[1])
    return {key: curve_of_rates(groups[key]) for key in ordered_keys}


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
    """For each seed of two results of `tuned`: the log of the first's loss over the second's."""
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
    has_both_neighbours = 0 < n < len(rates) - 1
    if not has_both_neighbours:
        return centre

    # On rates one step apart the parabola through left, middle, right has the second difference
    # `bend`, and its vertex lies (left - right) / (2 bend) steps from the middle.
    left, middle, right = (math.log(curve[rate]) for rate in rates[n - 1 : n + 2])
    bend = left - 2 * middle + right
    if not (math.isfinite(bend) and bend > 0):
        return centre
    step = math.log2(rates[n + 1]) - centre
    return centre + (left - right) / (2 * bend) * step


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
    transfers = {}
    for method, by_size in curves.items():
        optima = {size: optimum(curve) for size, curve in by_size.items()}
        smallest = by_size[min(by_size)]
        largest = by_size[max(by_size)]
        cost = largest.get(best(smallest), math.inf) / largest[best(largest)]
        transfers[method] = {
            "drift": slope([math.log2(size) for size in optima], list(optima.values())),
            "cost": cost if math.isfinite(cost) else None,
            "optima": optima,
            "losses": {size: curve[best(curve)] for size, curve in by_size.items()},
        }
    return transfers


def moved_by_seed(rows: Sequence[Row]) -> list[float]:
    """By how many factors of 2 one method's optimum moves from the smallest size to the largest,
    seed by seed."""
    return [
        optimum(curves[max(curves)]) - optimum(curves[min(curves)])
        for curves in curves_by_seed(rows)
    ]


def curves_by_seed(rows: Sequence[Row]) -> list[dict[int, dict[float, float]]]:
    """One method's size -> lr -> loss, for each seed."""
    by_seed = []
    for seed in seeds_of(rows):
        curves = losses(row for row in rows if row["seed"] == seed)
        by_seed.append({size: curve for (_, size), curve in curves.items()})
    return by_seed


def shifts(rows: Sequence[dict[str, Any]], base_width: int) -> dict[str, Any]:
    """By how many factors of 2 each structure's best rate lies from dense's at `base_width`, for
    each width and rule, and what dense's rate costs in loss.

    Rules are "naive" and "aware", and what they have in common may follow a comma: dense's rate is
    then that of a dense model which has it too.
    """
    curves = losses(rows, by=("structure", "width", "rule"))
    reference_lrs = {
        shared_part(rule): best(curve)
        for (structure, width, rule), curve in curves.items()
        if (structure, width) == ("dense", base_width)
    }

    table = []
    for (structure, width, rule), curve in curves.items():
        reference_lr = reference_lrs[shared_part(rule)]
        reference_loss = curve[reference_lr]
        table.append(
            {
                "structure": structure,
                "width": width,
                "rule": rule,
                "best_lr": best(curve),
                "shift": math.log2(best(curve) / reference_lr),
                "best_loss": curve[best(curve)],
                "loss_at_reference_lr": reference_loss if math.isfinite(reference_loss) else None,
            }
        )

    moves_by_rule: dict[str, list[float]] = {rule: [] for rule in values(table, "rule")}
    for row in table:
        if row["structure"] != "dense":
            moves_by_rule[row["rule"]].append(abs(row["shift"]))
    return {
        "reference_lr": reference_lrs[""],
        "mean_shift": {rule: sum(moves) / len(moves) for rule, moves in moves_by_rule.items()},
        "largest_shift": {rule: max(moves) for rule, moves in moves_by_rule.items()},
        "table": table,
    }


def shared_part(rule: str) -> str:
    """What a rule says after its comma, which dense models have as well.

    >>> shared_part("aware, normed"), shared_part("naive")
    (' normed', '')
    """
    return rule.partition(",")[2]


# ---- power laws ----------------------------------------------------------------------------------


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line; 0 for a single point.

    >>> slope([0, 1, 2], [1, 3, 5])
    2.0
    """
    mean_x = sum(x) / len(x)
    mean_y = sum(y) / len(y)
    spread = sum((x_n - mean_x) ** 2 for x_n in x)
    if not spread:
        return 0.0
    return sum((x_n - mean_x) * (y_n - mean_y) for x_n, y_n in zip(x, y, strict=True)) / spread


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

    curve = []
    for width, logs_by_rate in by_width.items():
        best_logs = min(logs_by_rate.values(), key=lambda logs: fmean(logs.values()))
        curve.append((costs[width], fmean(best_logs[seed] for seed in seeds)))
    return sorted(curve)


def exponent(curve: Curve) -> float:
    """a of the power law loss ~ FLOPs^-a, by least squares in logarithms."""
    log_flops, log_losses = zip(*curve, strict=True)
    return -linear_regression(log_flops, log_losses).slope


def gap(first: Curve, second: Curve, points: int = 33) -> float:
    """Mean of log(loss of `first` / loss of `second`) at equal FLOPs, evenly in log FLOPs where
    both have values.

    Raises:
        ValueError: there are no FLOPs that both reach.
    """
    low = max(first[0][0], second[0][0])
    high = min(first[-1][0], second[-1][0])
    if low >= high:
        raise ValueError(
            f"the curves share no FLOPs: one starts at {math.exp(low):.3g}, "
            f"one ends at {math.exp(high):.3g}"
        )
    log_flops = np.linspace(low, high, points)
    first_losses = np.interp(log_flops, *zip(*first, strict=True))
    second_losses = np.interp(log_flops, *zip(*second, strict=True))
    return float((first_losses - second_losses).mean())
