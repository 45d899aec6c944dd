"""How results are shown: estimates as text, tables in a terminal and in a page."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

ENDS = {"value", "low", "high"}


def interval(found: Mapping[str, float], digits: int, of: Callable[[float], float]) -> str:
    """An estimate with the ends of its interval, `of` each.

    >>> interval({"value": 0.25, "low": 0.2, "high": 0.3}, 1, lambda share: 100 * share)
    '25.0 (20.0 to 30.0)'
    """
    value, low, high = (f"{of(found[key]):.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def same(x: float) -> float:
    return x


def percent(share: float) -> float:
    return 100 * share


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


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Everything in a result but its rows and setting, a table for each entry.

    >>> [table] = tables({"drift": {"Adam": {"value": 1, "low": 0, "high": 2}}, "rows": []})
    >>> table.title, [list(column.cells) for column in table.columns]
    ('drift', [['Adam'], ['1 (0 to 2)']])
    """
    skipped = {"setting", "rows", "environment"}
    return [_table(name, found) for name, found in result.items() if name not in skipped]


def grid(title: str, rows: Sequence[Mapping[str, str]], names: int = 1) -> Table:
    """A table of rows as column -> text, a column for every key; the first `names` hold text, the
    others numbers.

    >>> [list(column.cells) for column in grid("", [{"x": "a"}, {"x": "b", "ms": "1"}]).columns]
    [['a', 'b'], ['', '1']]
    """
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for n, column in enumerate(columns):
        shown.add_column(column, justify="left" if n < names else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(row.get(column, "") for column in columns))
    return shown


def with_spread(found: Mapping[str, float], digits: str) -> str:
    """A median and its percentiles.

    >>> with_spread({"median": 2.0, "p20": 1.0, "p80": 2.5}, ".1f")
    '2.0 (1.0-2.5)'
    """
    median, low, high = (f"{found[key]:{digits}}" for key in ("median", "p20", "p80"))
    return f"{median} ({low}-{high})"


def _table(title: str, found: Any) -> Table:
    shown = Table(title=title)
    if isinstance(found, list) and found and isinstance(found[0], Mapping):
        columns = list(dict.fromkeys(key for row in found for key in row))
        for column in columns:
            shown.add_column(str(column))
        for row in found:
            shown.add_row(*(_cell(row[key]) if key in row else "" for key in columns))
        return shown
    shown.add_column("what")
    shown.add_column("found")
    for path, value in _leaves(found):
        shown.add_row(", ".join(path), _cell(value))
    return shown


def _leaves(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(found, Mapping) and set(found) != ENDS:
        for key, value in found.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(found, list) and found and isinstance(found[0], Mapping):
        for n, value in enumerate(found):
            yield from _leaves(value, (*path, str(n)))
    else:
        yield path, found


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        if set(value) == ENDS:
            return "{value:.3g} ({low:.3g} to {high:.3g})".format(**value)
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return str(value)


# ---- in a page -----------------------------------------------------------------------------------


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(line)} |" for line in (titles, *rows)]
    return "\n".join([lines[0], "|---|" + "--:|" * (len(titles) - 1), *lines[1:]])


def pivot(cells: Mapping[tuple[str, str], str], columns: Sequence[str] = ()) -> str:
    """Markdown of (line, column) -> text, both in the order in which they come first.

    >>> print(pivot({("dense", "16 tokens"): "9 ms", ("BTT", "1 token"): "2x"}))
    |  | 16 tokens | 1 token |
    |---|--:|--:|
    | dense | 9 ms | - |
    | BTT | - | 2x |
    """
    lines, found = (dict.fromkeys(names) for names in zip(*cells, strict=True))
    titles = list(columns or found)
    rows = [[line, *(cells.get((line, title), "-") for title in titles)] for line in lines]
    return table(["", *titles], rows)


def speeds(cells: Mapping[tuple[str, str], str]) -> str:
    """`pivot` with the narrow corner that docs/speed.md has."""
    return pivot(cells).replace("|  |", "| |", 1)


def fill(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """`text` with what stands between `<!-- name -->` and `<!-- end -->` made anew.

    >>> fill("<!-- sum -->\\nold\\n<!-- end -->", {"sum": lambda: "new"})
    '<!-- sum -->\\nnew\\n<!-- end -->'
    """

    def made(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{tables[match[1]]()}\n<!-- end -->"

    return re.sub(
        r"<!-- (?!end)([\w ]+) -->\n(?:(?!<!--).)*?<!-- end -->", made, text, flags=re.DOTALL
    )
