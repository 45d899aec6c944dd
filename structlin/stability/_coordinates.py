"""`coordinate_check`: do activations and their changes keep their size as the width grows?

Source: Yang et al. 2022 (arXiv:2203.03466), appendix D.1.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations, product
from statistics import linear_regression
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._structure.arguments import ANY_INTEGER, MAX_STEPS, Range, checked
from .._tables import Table
from ..duality import promote
from ._outputs import format_number, rms_of, rms_over_calls, watch_outputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 6  # layers that the legend of a panel names
BELOW = (0.5, -0.15)  # where the legend stands, in units of the panel: it hides no curve


@dataclass(frozen=True)
class CoordinateRow:
    """One module of one width after `step` steps: means over the seeds."""

    layer: str
    width: int
    step: int
    output: float  #: RMS of what it makes of the first batch
    change: float  #: RMS of that minus what it made of it before training


@dataclass(frozen=True)
class Slope:
    """Slope of log RMS against log width; 0 if all RMS are 0, NaN if one of them is, or is not
    finite."""

    layer: str
    quantity: str  #: "output" or "change"
    step: int
    slope: float


@dataclass(frozen=True)
class CoordinateCheck:
    """What `coordinate_check` found. Print it."""

    rows: tuple[CoordinateRow, ...]
    tolerance: float

    @property
    def widths(self) -> list[int]:
        return sorted({row.width for row in self.rows})

    @property
    def slopes(self) -> list[Slope]:
        """One for each layer, quantity and step."""
        series: dict[tuple[str, str, int], list[tuple[int, float]]] = defaultdict(list)
        for row in self.rows:
            series[row.layer, "output", row.step].append((row.width, row.output))
            if row.step:
                series[row.layer, "change", row.step].append((row.width, row.change))
        return [Slope(*key, _slope(sorted(points))) for key, points in series.items()]

    @property
    def steepest(self) -> list[Slope]:
        """The steepest slope over the steps, of each layer's output and change."""
        steepest: dict[tuple[str, str], Slope] = {}
        by_layer = sorted(self.slopes, key=lambda slope: (slope.layer, slope.quantity == "change"))
        for slope in by_layer:
            key = (slope.layer, slope.quantity)
            if key not in steepest or not abs(slope.slope) <= abs(steepest[key].slope):  # or NaN
                steepest[key] = slope
        return list(steepest.values())

    @property
    def not_flat(self) -> list[Slope]:
        """Those of `steepest` that are over the tolerance, or NaN."""
        return [slope for slope in self.steepest if not abs(slope.slope) <= self.tolerance]

    def table(self) -> Table:
        """The steepest slope over the steps, and the RMS by width after that step."""
        sizes = {(row.layer, row.width, row.step): row for row in self.rows}
        titles = [f"width {width}" for width in self.widths]
        table = Table("layer", "RMS of", *titles, "slope", "at step", "")
        for slope in self.steepest:
            rows = [sizes[slope.layer, width, slope.step] for width in self.widths]
            cells = [format_number(getattr(row, slope.quantity)) for row in rows]
            cells += [f"{slope.slope:+.2f}", str(slope.step)]
            verdict = "NOT FLAT" if slope in self.not_flat else ""
            table.row(slope.layer, slope.quantity, *cells, verdict)
        return table

    def plot(self) -> "Figure":
        """RMS after the last step against width, a line per layer.

        Layers that are not flat have a colour. The legend below has the steepest of them, each with
        its steepest slope and that slope's step.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5), layout="constrained")
        for panel, quantity in zip(figure.subplots(1, 2), ("output", "change"), strict=True):
            self._draw_panel(panel, quantity)
        return figure

    def _draw_panel(self, panel: Any, quantity: str) -> None:
        last_step = max(row.step for row in self.rows)
        steep = [slope for slope in self.not_flat if slope.quantity == quantity]
        steep.sort(key=lambda slope: -abs(slope.slope))
        styles: dict[str, dict[str, Any]] = {}  # of layers that are not flat
        for slope in steep[:NAMED]:
            label = f"{slope.layer} {slope.slope:+.2f} (step {slope.step})"
            styles[slope.layer] = {"label": label}
        for slope in steep[NAMED:]:
            styles[slope.layer] = {"color": "0.4", "zorder": 1}

        flat: dict[str, Any] = {"color": "0.7", "zorder": 0}
        rms: dict[str, dict[int, float]] = defaultdict(dict)  # layer -> width -> RMS
        for row in self.rows:
            if row.step == last_step:
                rms[row.layer][row.width] = getattr(row, quantity)
        for layer, by_width in rms.items():
            panel.plot([*by_width], [*by_width.values()], ".-", **styles.get(layer, flat))
        panel.set_xscale("log", base=2)
        panel.set(yscale="log", xlabel="width", ylabel=f"RMS of {quantity}, step {last_step}")
        if steep:
            unnamed = len(steep[NAMED:])
            title = f"not flat, and {unnamed} more" if unnamed else "not flat"
            panel.legend(fontsize="small", title=title, loc="upper center", bbox_to_anchor=BELOW)

    def __str__(self) -> str:
        layers = dict.fromkeys(slope.layer for slope in self.not_flat)
        verdict = f"not flat: {', '.join(layers)}" if layers else "all layers are flat"
        return f"{self.table()}\n{verdict} (slopes within {self.tolerance:g})"


@checked
def coordinate_check(
    build: Callable[[int], nn.Module],
    widths: Iterable[int],
    batches: Iterable[Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Callable[[nn.Module, int], Optimizer],
    steps: Annotated[int, Range(1, MAX_STEPS)] = 3,
    seeds: Iterable[Annotated[int, ANY_INTEGER]] = (0, 1, 2),
    tolerance: float = 0.2,
) -> CoordinateCheck:
    """Do every layer's outputs, and what training changes in them, keep their size across widths?

    For each width and seed a model is built, trained for a few steps, and after each one run on the
    first batch: the RMS of every module's output, and of its change since before training. Both
    should be as large at every width. A slope of log RMS against log width says how they grow
    instead: 0.5 for the hidden layers of a model whose rate does not shrink with the width, and
    after many steps a loss that diverges at some width.

    The model is measured in the mode that `build` returns it in, with the same random numbers
    (dropout) each time. A readout that starts at 1 / fan_in, as muP has it, vanishes with width
    before the first step, and is reported; start it at zero. torch's random state is restored at
    the end.

    Args:
        build: width -> model.
        widths: two or more.
        batches: what `loss` takes; step t trains on the batch number t, from the first again after
            the last.
        loss: (model, batch) -> 0-D tensor.
        optimizer: (model, width) -> optimizer, for example `lambda model, width:
            torch.optim.Adam(structlin.param_groups(model, 1e-3, base={width: 64}))`.
        steps: of training.
        seeds: of torch, set before `build`; sizes are averaged over them.
        tolerance: of the slopes.

    Raises:
        ValueError: fewer than two widths, a width that is not positive, no batch, no seed, `steps`
            below 1, a tolerance that is not positive; a model that `build` returns twice; layers
            that only one width has; training that changes no output; a layer that gets other
            tokens by training, such as an expert.
        TypeError: `build`, `optimizer` or `loss` returns something else.

    >>> def mlp(width):
    ...     return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width))
    >>> def loss(model, x):
    ...     return model(x).square().mean()
    >>> def adam(model, width):  # at one rate for all widths
    ...     return torch.optim.Adam(model.parameters(), lr=1e-2)
    >>> widths, batches = [32, 64, 128, 256], [torch.randn(64, 8)]
    >>> check = coordinate_check(mlp, widths, batches, loss=loss, optimizer=adam)
    >>> sorted({slope.layer for slope in check.not_flat})
    ['2']
    """
    widths = sorted(set(widths))
    batches = list(batches)
    seeds = list(dict.fromkeys(seeds))
    if tolerance == 0:
        raise ValueError(f"tolerance={tolerance!r} must be positive: no slope is exactly 0")
    if len(widths) < 2:
        raise ValueError(f"widths={widths}: a slope needs two different widths or more")
    if not batches or not seeds:
        raise ValueError(f"batches={len(batches)}, seeds={seeds}: at least one of each is needed")
    sizes: dict[tuple[str, int, int], list[Size]] = defaultdict(list)
    model: nn.Module | None = None
    for width, seed in product(widths, seeds):
        with _use_seed(seed):
            model = _build(build, width, model)
            trajectory = list(_train(model, width, batches, loss, optimizer, steps))
        _require_change(trajectory, width, steps)
        for step, size_of in enumerate(trajectory):
            for layer, size in size_of.items():
                sizes[layer, width, step].append(size)
    _require_same_layers({(layer, width) for layer, width, _ in sizes}, widths)
    rows = []
    for (layer, width, step), sizes_of_seeds in sizes.items():
        output = sum(size.output for size in sizes_of_seeds) / len(seeds)
        change = sum(size.change for size in sizes_of_seeds) / len(seeds)
        rows.append(CoordinateRow(layer, width, step, output, change))
    return CoordinateCheck(tuple(rows), tolerance)


class Size(NamedTuple):
    """RMS of what a module makes of the first batch, and of its change since before training."""

    output: float
    change: float


def _build(build: Callable[[int], nn.Module], width: int, previous: nn.Module | None) -> nn.Module:
    model = build(width)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"build({width}) returned {kind}, not a torch.nn.Module")
    if model is previous:
        raise ValueError(f"build({width}) returned a model that it had returned before")
    return model


def _require_change(trajectory: Sequence[dict[str, Size]], width: int, steps: int) -> None:
    for size_of in trajectory:
        if any(size.change for size in size_of.values()):
            return
    raise ValueError(
        f"optimizer(model, {width}): no output of the model changed in {steps} steps; does "
        "it have the parameters of that model, at a learning rate above 0?"
    )


def _require_same_layers(places: set[tuple[str, int]], widths: Sequence[int]) -> None:
    """Refuse layers that only one width has, of pairs of a layer and a width."""
    layers = defaultdict[int, set[str]](set)
    for layer, width in places:
        layers[width].add(layer)
    for width in widths:
        for has, lacks in permutations((widths[0], width)):
            missing = sorted(layers[has] - layers[lacks])
            if missing:
                raise ValueError(
                    f"build: the model of width {has} has {missing[0]!r}, that of {lacks} has none"
                )


def _train(
    model: nn.Module,
    width: int,
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    make_optimizer: Callable[[nn.Module, int], Optimizer],
    steps: int,
) -> Iterator[dict[str, Size]]:
    """The size of each layer, before training and after each step."""
    optimizer = make_optimizer(model, width)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer(model, {width}) returned {type(optimizer).__name__}, not a torch optimizer"
        )
    outputs = _run(model, batches[0], loss)
    outputs_before = outputs
    yield _measure(outputs, outputs_before)
    for step in range(steps):
        value = loss(model, batches[step % len(batches)])
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            kind = type(value).__name__
            raise TypeError(
                f"loss(model, batch) returned {kind}{shape}, not a tensor of one number"
            )
        optimizer.zero_grad()
        torch.autograd.backward(value)
        optimizer.step()
        outputs = _run(model, batches[0], loss)
        yield _measure(outputs, outputs_before)


def _run(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> dict[str, list[Tensor]]:
    """What each module makes of the batch, copied, of each of its calls."""
    outputs = defaultdict[str, list[Tensor]](list)

    def see(name: str, _: Tensor | None, y: Tensor) -> None:
        outputs[name].append(y.clone())

    with _use_seed(0), torch.no_grad(), watch_outputs(model, see):
        loss(model, batch)
    return outputs


def _measure(
    outputs: dict[str, list[Tensor]], outputs_before: dict[str, list[Tensor]]
) -> dict[str, Size]:
    sizes = {}
    _require_same_calls(outputs, outputs_before)
    for name, calls in outputs.items():
        pairs = zip(calls, outputs_before[name], strict=True)
        changes = [promote(y) - promote(before) for y, before in pairs]
        output = rms_over_calls([rms_of(y) for y in calls])
        sizes[name] = Size(output, rms_over_calls([rms_of(change) for change in changes]))
    return sizes


def _require_same_calls(
    outputs: dict[str, list[Tensor]], outputs_before: dict[str, list[Tensor]]
) -> None:
    """Refuse a layer whose outputs are of other shapes by now, so that nobody can say what changed:
    an expert, to which a router that is trained sends other tokens."""
    for name in dict.fromkeys([*outputs_before, *outputs]):
        shapes = [tuple(y.shape) for y in outputs.get(name, [])]
        shapes_before = [tuple(y.shape) for y in outputs_before.get(name, [])]
        if shapes != shapes_before:
            raise ValueError(
                f"layer {name!r} made outputs of shapes {shapes_before} of the first batch before "
                f"training, and {shapes} now: their change has no size. Freeze what sends other "
                "tokens to it, such as a router"
            )


@contextmanager
def _use_seed(seed: int) -> Iterator[None]:
    """Draw torch's random numbers from `seed` in the block; afterwards go on where they were."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _slope(points: Sequence[tuple[int, float]]) -> float:
    values = [value for _, value in points]
    if not any(values):
        return 0.0
    if not all(value > 0 and math.isfinite(value) for value in values):
        return math.nan
    log_widths = [math.log(width) for width, _ in points]
    log_values = [math.log(value) for value in values]
    return linear_regression(log_widths, log_values).slope
