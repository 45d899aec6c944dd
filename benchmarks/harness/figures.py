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
MARKERS = "osD^vPX<>*hpd"
COLOURS = 64  # of a kept picture: a third of the bytes


def save_picture(figure: Figure, path: Path) -> None:
    """Write a PNG with a palette of `COLOURS` colours."""
    png = BytesIO()
    figure.savefig(png, format="png", dpi=90)
    Image.open(png).convert("RGB").quantize(COLOURS).save(path, optimize=True)


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

    panel_keys = _keys(rows, panel)
    line_keys = _keys(rows, line)
    colours = _colours(line_keys)
    figure, grid = panels(panel_keys, columns=columns)
    for axes, panel_key in zip(grid, panel_keys, strict=True):
        panel_rows = select(rows, **dict(zip(panel, panel_key, strict=True)))
        for line_key, colour, marker in zip(line_keys, colours, cycle(MARKERS), strict=False):
            line_rows = select(panel_rows, **dict(zip(line, line_key, strict=True)))
            if not line_rows:
                continue
            places = sorted(values(line_rows, x))
            means = []
            for place in places:
                heights = [row[y] for row in line_rows if row[x] == place]
                means.append(_mean(heights, geometric="y" in log))
            label = ", ".join(map(str, line_key))
            axes.plot(places, means, marker=marker, ms=4, color=colour, label=label)
        if "x" in log:
            axes.set_xscale("log", base=base)
            axes.tick_params("x", which="both", labelrotation=45)
        if "y" in log:
            axes.set_yscale("log")
        axes.set(xlabel=x, ylabel=y)
    if line_keys != [()]:
        handles = {}
        for axes in grid:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles[label] = handle
        across = min(len(handles), columns, 2 * len(grid))
        place = {"loc": "outside lower center", "ncols": across}
        figure.legend([*handles.values()], [*handles], fontsize="small", **place)
    return figure


def _keys(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """The combinations of values of `names`, in the order in which they come first."""
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def _colours(line_keys: Sequence[tuple[Any, ...]]) -> list[tuple[float, float, float, float]]:
    """A shade for each line: along a scale where the lines are numbers, else as different as can
    be."""
    count = len(line_keys)
    if all(isinstance(key[-1], int | float) for key in line_keys if key):
        return [colormaps["viridis"](0.9 * n / max(1, count - 1)) for n in range(count)]
    # tab20 alternates dark and light: ten dark shades come first
    return [colormaps["tab20"]((2 * n + n // 10) % 20) for n in range(count)]


def _mean(heights: Sequence[float], *, geometric: bool) -> float:
    if geometric:
        return math.exp(fmean(map(math.log, heights)))
    return fmean(heights)


def rates(
    rows: Sequence[Row], *, panel: Sequence[str], line: Sequence[str], y: str = "loss"
) -> Figure:
    """Losses against learning rates."""
    return curves(rows, "lr", y, panel=panel, line=line, base=2)
