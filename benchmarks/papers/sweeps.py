"""What the sweeps of learning rates share: the search, where the best rate is, how it moves with
size, what moving it saves.

A row is a run: {"method", "size", "lr", "seed", "loss"}, the loss None where it was not finite.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from benchmarks.papers.intervals import Estimate, student

Row = Mapping[str, Any]


def losses(rows: Iterable[Row]) -> dict[tuple[str, int], dict[float, float]]:
    """(method, size) -> lr -> geometric mean of the loss over the seeds, infinite if it is for one
    of them."""
    found: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        loss = math.inf if row["loss"] is None else row["loss"]
        found[row["method"], row["size"]][row["lr"]].append(math.log(loss))
    return {
        key: {lr: math.exp(sum(logs) / len(logs)) for lr, logs in sorted(by_lr.items())}
        for key, by_lr in sorted(found.items(), key=lambda item: item[0][1])
    }


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


def search(
    run: Callable[[int, list[float]], list[dict[str, Any]]], sizes: Sequence[int], start: float
) -> list[dict[str, Any]]:
    """The rows of one method's runs: at each of `sizes`, ascending, from the best rate of the size
    before by factors of 2 until the best has both its neighbours; and at the last size with the
    first one's best rate.

    Args:
        run: size, rates -> a row for each rate and seed.
        start: where the search begins at the first size.
    """
    rows: list[dict[str, Any]] = []

    def curve(size: int) -> dict[float, float]:
        return next(iter(losses(row for row in rows if row["size"] == size).values()), {})

    for size in sizes:
        while lrs := untried(curve(size), start):
            rows += run(size, lrs)
        start = best(curve(size))
    kept = best(curve(sizes[0]))
    return rows if kept in curve(sizes[-1]) else rows + run(sizes[-1], [kept])


def tuned(rows: Iterable[Row], of: str = "loss") -> dict[str, Any]:
    """The rate of the least mean log loss over the seeds, whether it is at an end of those tried,
    and the log losses at it, by seed.

    Args:
        rows: of one method and size.
        of: the loss's name in them.
    """
    by_rate: dict[float, dict[int, float]] = defaultdict(dict)
    for row in rows:
        by_rate[row["lr"]][row["seed"]] = math.inf if row[of] is None else math.log(row[of])
    lr = min(by_rate, key=lambda rate: sum(by_rate[rate].values()))
    return {"lr": lr, "at end": lr in (min(by_rate), max(by_rate)), "logs": by_rate[lr]}


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
    - "range": largest less smallest log2 (best lr);
    - "cost": loss of the largest size at the least size's best rate, over its loss at its own (inf
      as None);
    - "bracketed": no size has its best rate at the end of its sweep;
    - "optima", "losses": log2 (best lr) and least loss of each size.
    """
    curves: dict[str, dict[int, dict[float, float]]] = defaultdict(dict)
    for (method, size), curve in losses(rows).items():
        curves[method][size] = curve
    return {method: _transfer(by_size) for method, by_size in curves.items()}


def _transfer(curves: Mapping[int, Mapping[float, float]]) -> dict[str, Any]:
    optima = {size: optimum(curve) for size, curve in curves.items()}
    smallest, largest = curves[min(curves)], curves[max(curves)]
    moved = largest.get(best(smallest), math.inf) / largest[best(largest)]
    return {
        "drift": slope([math.log2(size) for size in optima], list(optima.values())),
        "range": max(optima.values()) - min(optima.values()),
        "cost": moved if math.isfinite(moved) else None,
        "bracketed": all(min(curve) < best(curve) < max(curve) for curve in curves.values()),
        "optima": optima,
        "losses": {size: curve[best(curve)] for size, curve in curves.items()},
    }


def moves(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Of one method's rows, over the seeds: by how many factors of 2 the optimum moves from the
    smallest size to the largest, "moved", and what keeping the smallest one's best rate (of all
    seeds) costs there, as the log of a ratio, "cost"."""
    by_size = {size: curve for (_, size), curve in losses(rows).items()}
    kept = best(by_size[min(by_size)])
    last = [curves[max(curves)] for curves in curves_by_seed(rows)]
    costs = [math.log(curve[kept] / min(curve.values())) for curve in last]
    return {"moved": student(moved_by_seed(rows)), "cost": student(costs)}


def moved_by_seed(rows: Sequence[Row]) -> list[float]:
    """By how many factors of 2 one method's optimum moves from the smallest size to the largest,
    seed by seed."""
    return [
        optimum(curves[max(curves)]) - optimum(curves[min(curves)])
        for curves in curves_by_seed(rows)
    ]


def curves_by_seed(rows: Sequence[Row]) -> list[dict[int, dict[float, float]]]:
    """Of one method's rows: size -> lr -> loss, for each seed."""
    seeds = sorted({row["seed"] for row in rows})
    found = (losses(row for row in rows if row["seed"] == seed) for seed in seeds)
    return [{size: curve for (_, size), curve in each.items()} for each in found]


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


def table(title: str, found: Mapping[str, Mapping[str, Any]], size: str) -> Table:
    """A line per method: log2 (best lr) and least loss at each size, and how they move."""
    shown = Table(title=f"{title}: log2 (best lr), least loss")
    shown.add_column("method")
    sizes = sorted({n for row in found.values() for n in row["optima"]})
    for heading in (*(f"{size} {n}" for n in sizes), "drift per doubling", "cost of no retuning"):
        shown.add_column(heading, justify="right")
    for method, row in found.items():
        cells = [
            f"{row['optima'][n]:+.1f}, {row['losses'][n]:.3g}" if n in row["optima"] else ""
            for n in sizes
        ]
        cost = "diverges" if row["cost"] is None else f"{row['cost']:.2f}x"
        shown.add_row(
            method,
            *cells,
            f"{row['drift']:+.2f}" + ("" if row["bracketed"] else " (at an end)"),
            cost,
        )
    return shown


def say(console: Console, claims: Mapping[str, bool]) -> None:
    """Which of the paper's claims hold here."""
    for claim, holds in claims.items():
        console.print(f"{'holds' if holds else 'does NOT hold'}: {claim}")


def plot(
    axes: Axes, rows: Iterable[Row], method: str, size: str, sizes: Sequence[Any] = ()
) -> None:
    """Loss against learning rate, a line per size; `sizes`: all that colours are for, where other
    axes have more of them."""
    import matplotlib

    curves = {n: curve for (name, n), curve in losses(rows).items() if name == method}
    colours = matplotlib.colormaps["viridis"]
    order = list(sizes or curves)
    for n, curve in curves.items():
        colour = colours(0.9 * order.index(n) / max(1, len(order) - 1))
        finite = {rate: loss for rate, loss in curve.items() if math.isfinite(loss)}
        axes.plot(list(finite), list(finite.values()), ".-", color=colour, label=f"{size} {n}")
        if finite:
            axes.plot(best(curve), curve[best(curve)], "o", color=colour, mfc="none", ms=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(title=method, xlabel="learning rate")
