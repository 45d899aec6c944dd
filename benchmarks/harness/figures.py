"""The pictures of results: small multiples of curves."""

import math
from collections.abc import Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image  # matplotlib brings it

from benchmarks.harness.statistics import select, values

Row = dict[str, Any]
COLUMNS = 4
COLOURS = 64  # of a kept picture: a third of the bytes


def save_picture(figure: Figure, path: Path) -> None:
    """Write a PNG with a palette of `COLOURS` colours."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=90)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def panels(
    names: Sequence[Any], *, columns: int = COLUMNS, size: float = 3.6
) -> tuple[Figure, list[Axes]]:
    """A picture with a panel for each name, in lines of `columns`."""
    across = min(columns, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(size * 1.25 * across, size * down), layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, name in zip(grid, names, strict=False):
        axes.set_title(" ".join(map(str, name)) if isinstance(name, tuple) else str(name))
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    return figure, grid[: len(names)]


def curves(
    rows: Sequence[Row],
    x: str,
    y: str = "loss",
    *,
    panel: Sequence[str] = (),
    line: Sequence[str] = (),
    log: str = "xy",
    base: float = 10,
    columns: int = COLUMNS,
) -> Figure:
    """`y` against `x`, geometric means over all else of the rows: a panel for each value of
    `panel`, a line for each of `line`. Rows without a finite `y` are left out.

    Args:
        log: the axes that are logarithmic; means are arithmetic where "y" is not.
        base: of the logarithmic x.
    """
    rows = [row for row in rows if row[y] is not None and math.isfinite(row[y])]
    if not rows:
        return Figure()

    def keys(names: Sequence[str]) -> list[tuple[Any, ...]]:
        return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))

    lines = keys(line)
    numbers = all(isinstance(each, int | float) for each in (key[-1] for key in lines if key))
    shades = colormaps["viridis" if numbers else "tab20"]  # dark, light, dark, ...
    figure, grid = panels(keys(panel), columns=columns)
    for axes, where in zip(grid, keys(panel), strict=True):
        mine = select(rows, **dict(zip(panel, where, strict=True)))
        for (n, key), marker in zip(enumerate(lines), cycle("osD^vPX<>*hpd"), strict=False):
            found = select(mine, **dict(zip(line, key, strict=True)))
            if not found:
                continue
            places = sorted(values(found, x))
            means = [_mean([row[y] for row in found if row[x] == at], "y" in log) for at in places]
            colour = shades(0.9 * n / max(1, len(lines) - 1) if numbers else (2 * n + n // 10) % 20)
            axes.plot(
                places, means, marker=marker, ms=4, color=colour, label=", ".join(map(str, key))
            )
        if "x" in log:
            axes.set_xscale("log", base=base)
            axes.tick_params("x", which="both", labelrotation=45)
        if "y" in log:
            axes.set_yscale("log")
        axes.set(xlabel=x, ylabel=y)
    if lines != [()]:
        named = {
            name: mark
            for axes in grid
            for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        across = min(len(named), columns, 2 * len(grid))
        place = {"loc": "outside lower center", "ncols": across}
        figure.legend([*named.values()], [*named], fontsize="small", **place)
    return figure


def _mean(found: Sequence[float], geometric: bool) -> float:
    return math.exp(fmean(map(math.log, found))) if geometric else fmean(found)


def rates(
    rows: Sequence[Row], *, panel: Sequence[str], line: Sequence[str], y: str = "loss"
) -> Figure:
    """Losses against learning rates."""
    return curves(rows, "lr", y, panel=panel, line=line, base=2)
