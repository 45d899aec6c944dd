"""How results are shown: estimates as text, tables in a terminal and in a page."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from itertools import chain
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.pretty import Pretty
from rich.table import Table

Estimate = Mapping[str, float]  # "value", and the ends of its 95 % interval


def interval(estimate: Estimate, digits: int, convert: Callable[[float], float]) -> str:
    """An estimate with the ends of its interval, after `convert` of each number.

    >>> interval({"value": 0.25, "low": 0.2, "high": 0.3}, 1, lambda share: 100 * share)
    '25.0 (20.0 to 30.0)'
    """
    value = convert(estimate["value"])
    low = convert(estimate["low"])
    high = convert(estimate["high"])
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def number(estimate: Estimate, digits: int = 2) -> str:
    """An estimate as it is.

    >>> number({"value": 0.25, "low": 0.2, "high": 0.3})
    '0.25 (0.20 to 0.30)'
    """
    return interval(estimate, digits, lambda value: value)


def factor(estimate: Estimate, digits: int = 2) -> str:
    """The estimate of a logarithm, as a factor."""
    return interval(estimate, digits, math.exp)


def listed(estimates: Mapping[str, Estimate], show: Callable[[Estimate], str] = factor) -> str:
    """Estimates with their names.

    >>> listed({"BTT": {"value": 0, "low": 0, "high": 0}}, number)
    '0.00 (0.00 to 0.00) (BTT)'
    """
    return ", ".join(f"{show(estimate)} ({name})" for name, estimate in estimates.items())


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}"


def least_and_most(prefix: str, values: Iterable[float], form: str) -> dict[str, str]:
    """The ends of `values`.

    >>> least_and_most("main.share_", [2, 1, 3], ".1f")
    {'main.share_least': '1.0', 'main.share_most': '3.0'}
    """
    numbers = list(values)
    least = min(numbers)
    most = max(numbers)
    return {f"{prefix}least": format(least, form), f"{prefix}most": format(most, form)}


def day(result: Mapping[str, Any]) -> str:
    """When a kept result was measured.

    >>> day({"environment": {"date": "2026-11-03"}})
    '3 November 2026'
    """
    measured = date.fromisoformat(result["environment"]["date"])
    return f"{measured.day} {measured:%B %Y}"


def losses(values: Sequence[float | None]) -> str:
    """Losses of several seeds."""
    return ", ".join("diverged" if loss is None else f"{loss:.3f}" for loss in values)


def rate(lr: float) -> str:
    """A learning rate as a power of two.

    >>> rate(0.125)
    '2^-3'
    """
    return f"2^{math.log2(lr):g}"


# ---- in a terminal -------------------------------------------------------------------------------


def without_rows(result: Mapping[str, Any]) -> list[Pretty]:
    """Everything in a result but its rows."""
    return [Pretty({name: content for name, content in result.items() if name != "rows"})]


def grid(title: str, rows: Sequence[Mapping[str, str]], names: int = 1) -> Table:
    """A table of rows as column -> text, a column for every key; the first `names` hold text, the
    others numbers.

    >>> [list(column.cells) for column in grid("", [{"x": "a"}, {"x": "b", "ms": "1"}]).columns]
    [['a', 'b'], ['', '1']]
    """
    grid_table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = list(dict.fromkeys(chain.from_iterable(rows)))
    for n, column in enumerate(columns):
        grid_table.add_column(column, justify="left" if n < names else "right", no_wrap=True)
    for row in rows:
        grid_table.add_row(*(row.get(column, "") for column in columns))
    return grid_table


def with_spread(spread: Mapping[str, float], digits: str) -> str:
    """A median and its percentiles.

    >>> with_spread({"median": 2.0, "p20": 1.0, "p80": 2.5}, ".1f")
    '2.0 (1.0-2.5)'
    """
    return f"{spread['median']:{digits}} ({spread['p20']:{digits}}-{spread['p80']:{digits}})"


# ---- in a page -----------------------------------------------------------------------------------


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    head, *body = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    rule = "|---|" + "--:|" * (len(titles) - 1)
    return "\n".join([head, rule, *body])


def pivot(cells: Mapping[tuple[str, str], str], columns: Sequence[str] = ()) -> str:
    """Markdown of (line, column) -> text, both in the order in which they come first.

    >>> print(pivot({("dense", "16 tokens"): "9 ms", ("BTT", "1 token"): "2x"}))
    |  | 16 tokens | 1 token |
    |---|--:|--:|
    | dense | 9 ms | - |
    | BTT | - | 2x |
    """
    lines = dict.fromkeys(line for line, _ in cells)
    titles = list(columns or dict.fromkeys(column for _, column in cells))
    rows = []
    for line in lines:
        rows.append([line, *(cells.get((line, title), "-") for title in titles)])
    return table(["", *titles], rows)
