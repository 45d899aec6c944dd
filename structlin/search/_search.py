"""What a search has found: its runs, the structures compared at equal cost, the frontier, the
effects of the measures."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._arguments import require_choice
from .._report import Table
from .._trials import check_row
from ..stability._common import PathLike, new_figure, save_figure
from ._fits import Estimate, bootstrap, fit_power_law, lower_envelope, regress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COSTS = ("flops", "seconds")
MEASURES = ("omega", "psi", "nu")
STEP = 0.5  # of a measure, for its effect: omega from none to Kronecker's, psi from sqrt(d) to full


@dataclass(frozen=True)
class Trial:
    """One training.

    >>> trial = Trial("BTT", 64, 0, 1.5, 4096, 8192, 2.0, 0.0, 1.0, 0.5, {"name": "BTT", "rank": 1})
    >>> trial.loss, trial.family["rank"]
    (1.5, 1)
    """

    structure: str  #: its name in the search
    width: int
    seed: int
    loss: float | None  #: None: it diverged
    params: int  #: of the model
    flops: int  #: of the model's forward pass, on the example; linear layers, one token without one
    seconds: float  #: that `train` took
    omega: float  #: mean of the structured layers, see `measure`; of a dense model 0, 1 and 1
    psi: float
    nu: float
    family: dict[str, Any]  #: `structlin.family(**family)` is the structure

    def __post_init__(self) -> None:
        check_row(self, positive=("width", "loss", "params", "flops"))


@dataclass(frozen=True)
class Standing:
    """A structure among the others."""

    structure: str
    ratio: Estimate  #: its loss over that of all structures' common curve, at equal cost; mean
    omega: float  #: at the widest model, as `psi` and `nu`
    psi: float
    nu: float
    diverged: int  #: runs


@dataclass(frozen=True)
class Frontier:
    """loss = a cost^-b + c through the points that no structure beats."""

    cost: str
    a: Estimate
    b: Estimate
    c: Estimate
    points: tuple[tuple[str, int, float, float], ...]  #: structure, width, cost, loss

    def loss(self, cost: float) -> float:
        return self.a.value * math.exp(-self.b.value * math.log(cost)) + self.c.value


class _Points(NamedTuple):
    """One for each structure and width that has finished."""

    cost: Tensor  # (P,)
    log_loss: Tensor  # (P,)
    measures: Tensor  # (P, 3)
    keys: list[tuple[int, int]]  # structure, width: indices


@dataclass(frozen=True)
class Search:
    """What `run` found. Print it.

    Losses are averaged in logarithms over the seeds; a structure that diverges with one of them
    has no point at that width. Costs are "flops" or "seconds". Intervals are 95 %, bootstrap over
    the seeds, each drawn for all structures, and for `frontier` and `effects` over the structures
    as well. One seed gives no interval.
    """

    rows: tuple[Trial, ...]

    @cached_property
    def names(self) -> list[str]:
        return list(dict.fromkeys(row.structure for row in self.rows))

    @cached_property
    def _widths(self) -> list[int]:
        return sorted({row.width for row in self.rows})

    @cached_property
    def _seeds(self) -> list[int]:
        return sorted({row.seed for row in self.rows})

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """Log loss and costs of each run (S, W, N), nan where there is none; of each structure
        at each width its measures (S, W, 3)."""
        shape = len(self.names), len(self._widths), len(self._seeds)
        found = {
            name: torch.full(shape, math.nan, dtype=torch.float64) for name in ("log_loss", *COSTS)
        }
        measures = torch.full((*shape[:2], len(MEASURES)), math.nan, dtype=torch.float64)
        for row in self.rows:
            model = self.names.index(row.structure), self._widths.index(row.width)
            place = (*model, self._seeds.index(row.seed))
            found["log_loss"][place] = math.inf if row.loss is None else math.log(row.loss)
            for name in COSTS:
                found[name][place] = getattr(row, name)
            measures[model] = torch.tensor([getattr(row, name) for name in MEASURES])
        return found | {"measures": measures}

    def _points(self, cost: str, structures: list[int], seeds: list[int]) -> _Points:
        require_choice("cost", cost, COSTS)
        tensors = self._tensors
        log_loss = tensors["log_loss"][structures][:, :, seeds].nanmean(-1)  # (S, W)
        log_cost = tensors[cost].log()[structures][:, :, seeds].nanmean(-1)
        kept = log_loss.isfinite().nonzero()  # (P, 2)
        at = kept[:, 0], kept[:, 1]
        measures = tensors["measures"][structures][at]
        keys = [(structures[structure], width) for structure, width in kept.tolist()]
        return _Points(log_cost[at].exp(), log_loss[at], measures, keys)

    def _all(self, cost: str) -> _Points:
        points = self._points(cost, [*range(len(self.names))], [*range(len(self._seeds))])
        if not points.keys:
            raise ValueError(f"rows: none of {len(self.rows)} runs has a finite loss")
        return points

    def standings(self, cost: str = "flops") -> list[Standing]:
        """All structures, the best first; one with no finite loss has a ratio of inf.

        A structure's ratio is the geometric mean over its widths of its loss over that of one power
        law with a floor through the points of all structures, at equal cost.
        """
        self._all(cost)

        def ratios(structures: list[int], seeds: list[int]) -> list[float]:
            points = self._points(cost, structures, seeds)
            law = fit_power_law(points.cost, points.log_loss)
            over = points.log_loss - law.log_loss(points.cost)
            sums = torch.zeros(2, len(self.names), dtype=torch.float64)
            sums.index_add_(
                1,
                torch.tensor([structure for structure, _ in points.keys]),
                torch.stack([over, torch.ones_like(over)]),
            )
            total, count = sums
            return torch.where(count > 0, (total / count).exp(), math.inf).tolist()

        estimates = bootstrap(ratios, len(self.names), len(self._seeds), draw_structures=False)
        found = []
        for name, estimate in zip(self.names, estimates, strict=True):
            rows = [row for row in self.rows if row.structure == name]
            widest = max(rows, key=lambda row: row.width)
            diverged = sum(row.loss is None for row in rows)
            measures = widest.omega, widest.psi, widest.nu
            found.append(Standing(name, estimate, *measures, diverged))
        return sorted(found, key=lambda standing: standing.ratio.value)

    def best(self, cost: str = "flops") -> str:
        """The structure of the least loss at equal cost."""
        return self.standings(cost)[0].structure

    def frontier(self, cost: str = "flops") -> Frontier:
        """The least loss that any structure reached at a cost, as a power law with a floor.

        Raises:
            ValueError: fewer than two points of different cost are on it.
        """

        def law(structures: list[int], seeds: list[int]) -> list[float]:
            points = self._points(cost, structures, seeds)
            on = lower_envelope(points.cost, points.log_loss)
            found = fit_power_law(points.cost[on], points.log_loss[on])
            return [_exp(found.level), found.exponent, found.floor]

        points = self._all(cost)
        sizes = len(self.names), len(self._seeds)
        a, b, c = bootstrap(law, *sizes, draw_structures=True)
        kept = []
        for n in lower_envelope(points.cost, points.log_loss).tolist():
            structure, width = points.keys[n]
            numbers = float(points.cost[n]), float(points.log_loss[n].exp())
            kept.append((self.names[structure], self._widths[width], *numbers))
        return Frontier(cost, a, b, c, tuple(kept))

    def _find_frontier(self, cost: str) -> Frontier | None:
        """The frontier; None where one run alone is on it."""
        points = self._all(cost)
        on = lower_envelope(points.cost, points.log_loss)
        return self.frontier(cost) if len(on) > 1 else None

    def effects(self, cost: str = "flops") -> dict[str, Estimate]:
        """Return by what a loss is multiplied if "omega", "psi" or "nu" rises by 0.5, at equal cost
        and equal others: least squares of the log loss on the three and a parabola in the log cost.

        A measure that is the same in all runs is left out.
        """
        measures = self._all(cost).measures
        varied = [n for n in range(len(MEASURES)) if measures[:, n].std() > 0]

        def factors(structures: list[int], seeds: list[int]) -> list[float]:
            points = self._points(cost, structures, seeds)
            effects = regress(points.cost, points.log_loss, points.measures[:, varied])
            return [_exp(STEP * effect) for effect in effects]

        sizes = len(self.names), len(self._seeds)
        found = bootstrap(factors, *sizes, draw_structures=True)
        return {MEASURES[n]: estimate for n, estimate in zip(varied, found, strict=True)}

    def table(self, cost: str = "flops") -> Table:
        """`standings`, the best first."""
        table = Table("structure", *MEASURES, f"loss at equal {cost}", "interval", "")
        for each in self.standings(cost):
            ratio = each.ratio
            measures = [f"{getattr(each, name):.2f}" for name in MEASURES]
            known = not math.isnan(ratio.low)
            interval = f"{ratio.low:.3f} to {ratio.high:.3f}" if known else "none"
            note = f"{each.diverged} runs diverged" if each.diverged else ""
            table.row(each.structure, *measures, f"{ratio.value:.3f}", interval, note)
        return table

    def plot(self, path: PathLike | None = None, cost: str = "flops") -> "Figure":
        """Loss against cost, a line per structure, coloured by omega, dotted where the rank is not
        full, with the frontier in black if there is one; as a file too, if `path` is given."""
        figure = new_figure(7, 5)
        self.draw(figure.subplots(), cost)
        return save_figure(figure, path)

    def draw(self, axes: Any, cost: str = "flops") -> None:
        """What `plot` shows, on matplotlib's `axes`."""
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        points = self._all(cost)
        colours = ScalarMappable(Normalize(0, 0.75), colormaps["viridis"])
        for index in range(len(self.names)):
            mine = [n for n, (structure, _) in enumerate(points.keys) if structure == index]
            if not mine:
                continue
            omega, psi, _ = points.measures[mine[-1]].tolist()
            style = {"color": colours.to_rgba(omega), "ls": "-" if psi > 0.95 else ":", "lw": 1}
            axes.plot(points.cost[mine], points.log_loss[mine].exp(), marker=".", **style)
        if frontier := self._find_frontier(cost):
            costs = torch.logspace(*points.cost.log10().aminmax(), 50, dtype=torch.float64)
            law = f"{frontier.a.value:.3g} x^-{frontier.b.value:.2f} + {frontier.c.value:.2g}"
            losses = [frontier.loss(float(each)) for each in costs]
            axes.plot(costs, losses, "k--", label=f"frontier: {law}")
            axes.legend(fontsize="small")
        axes.set(xscale="log", yscale="log", xlabel=cost, ylabel="loss")
        axes.figure.colorbar(colours, ax=axes, label="omega (dotted: rank not full)")

    def __str__(self) -> str:
        law = "no frontier: one run has the fewest FLOPs and the lowest loss"
        if frontier := self._find_frontier("flops"):
            law = f"frontier: loss = a FLOPs^-b + c, a {frontier.a}, b {frontier.b}, c {frontier.c}"
        effects = [f"{name} +{STEP}: loss x {found}" for name, found in self.effects().items()]
        one = len(self._seeds) == 1
        note = ["one seed gives no intervals: take three, seeds=range(3)"] if one else []
        return "\n".join([str(self.table()), law, *effects, *note])


def _exp(value: float) -> float:
    """Finite: a draw of structures that are nearly alike may have an effect of any size."""
    return math.exp(min(value, 700.0))
