"""Does the best learning rate carry over to wider and deeper residual networks, for every structure
and optimizer? And to other batches and durations?

    python -m benchmarks.training.transfer                     # results/transfer.{json,png}
    python -m benchmarks.training.transfer --methods Normed    # only this one; what is kept stays
    python -m benchmarks.training.transfer --smoke             # seconds

A residual MLP on scikit-learn's digits: blocks `x + m * fc2(relu(fc1(norm(x))))` with m = (2 /
depth)^alpha, alpha = 1 (CompleteP), all matrices of the blocks structured, the head zero at the
start; linear decay of the rate to zero, no warmup. The base point is width 64, depth 2; from there
a grid of widths and depths.

At each point the rate is searched by factors of 2, from the base point's
best, until the best has both its neighbours. The optimum is the vertex of the parabola through
them, of the geometric mean over the seeds of the final loss on all images. Points that the JSON has
are not run again.

Normed by power iterations is searched without weight decay and with two of them: together the best
rate and decay.

Besides: the best rate at other batches and durations; under plain torch AdamW with one rate for all
parameters and m = 1, which is what the rules are compared with; and with alpha = 1/2.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, training
from benchmarks.harness.experiment import Axis, Experiment, Job, Row, Runs, climb, combinations
from benchmarks.harness.report import table
from benchmarks.harness.statistics import (
    best,
    curve_of_rates,
    optimum,
    seeds_of,
    select,
    student,
    untried,
)
from benchmarks.harness.tasks import PlainDigits
from benchmarks.training import lr_transfer
from structlin.optim import Depth, Muon, Normed, param_groups

STRUCTURES = [name for name in lr_transfer.STRUCTURES if name != "TT r=4"]
FEW = ["dense", "BTT r=1"]  # for batch, duration, the control and alpha
WIDTHS = [64, 256, 1024]
DEPTHS = [2, 6, 16]
BASE = {"width": 64, "depth": 2, "batch": 64, "steps": 50}
AXES = {"batch": [16, 64, 256], "steps": [25, 50, 100, 200]}
OTHER_LR = 2.0**-9  # of Muon's biases and norms


class Block(nn.Module):
    """`x + multiplier * branch(x)`."""

    def __init__(self, width: int, multiplier: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.multiplier = multiplier
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(self.norm(x)))
        return x + self.multiplier * self.fc2(h)


class ResMLP(nn.Module):
    def __init__(self, width: int, depth: int, multiplier: float) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, multiplier) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(structure: str, width: int, depth: int, seed: int, alpha: float = 1.0) -> nn.Module:
    torch.manual_seed(seed)
    model = ResMLP(width, depth, (BASE["depth"] / depth) ** alpha)
    return structlin.convert(model, lr_transfer.STRUCTURES[structure](width), init="mup")


def adamw(
    model: nn.Module, lr: float, width: int, alpha: float, **options: Any
) -> torch.optim.Optimizer:
    groups = param_groups(model, lr, weight_decay=0.0, eps=1e-8, **_rules(width, alpha), **options)
    return torch.optim.AdamW(groups)


def muon(
    model: nn.Module, lr: float, width: int, alpha: float, **options: Any
) -> torch.optim.Optimizer:
    return Muon(model, lr, other_lr=OTHER_LR, matrices="all", **_rules(width, alpha), **options)


def _rules(width: int, alpha: float) -> dict[str, Any]:
    return {"base": {width: BASE["width"]}, "depth": Depth(base=BASE["depth"], alpha=alpha)}


class PowerNormed(Normed):
    """Normed by two power iterations, as the paper's code does it: each starts from the vectors
    where the last step's ended, one per block."""

    def _norms(self, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        return [self._norm(p, update) for p, update in zip(params, updates, strict=True)]

    def _norm(self, parameter: Tensor, update: Tensor) -> Tensor:
        weight = self._roster.weights[parameter]
        if weight.kind != "matrix":
            return super()._norms([parameter], [update])[0]
        x = update if update.ndim == 3 else update[None]  # (batch, m, n)
        state = self.state[parameter]
        if "singular_vector" not in state:
            seeded = torch.Generator().manual_seed(0)
            start = torch.randn(x.shape[0], x.shape[2], 1, generator=seeded, dtype=torch.float64)
            state["singular_vector"] = start.to(x.dtype)
        # twice v <- X^T u with u = X v / |X v|; then |v| is the norm from below, and v is v / |v|
        right = state["singular_vector"]
        norm = x.new_zeros(len(x))
        for _ in range(2):
            right = x.mT @ nn.functional.normalize(x @ right, dim=1)  # (batch, n, 1)
            norm = right.norm(dim=1)[:, 0]  # (batch,)
            right = right / torch.where(norm == 0, torch.ones_like(norm), norm)[:, None, None]
        state["singular_vector"][norm > 0] = right[norm > 0]
        return norm.amax()


def normed(
    model: nn.Module,
    lr: float,
    width: int,
    alpha: float,
    kind: type[Normed],
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    groups = param_groups(model, lr, weight_decay=weight_decay, structure_aware=False)
    return kind(torch.optim.AdamW(groups, lr), model)


def plain(model: nn.Module, lr: float, width: int, alpha: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)


@dataclass(frozen=True)
class Method:
    make: Callable[..., torch.optim.Optimizer]
    start: float  #: the rate where the search begins at the base point
    alpha: float = 1.0


def by_power(weight_decay: float) -> Method:
    return Method(partial(normed, kind=PowerNormed, weight_decay=weight_decay), 2.0**-4)


POWER = "Normed, power"  # two power iterations
DECAYS = {POWER: 0.0, f"{POWER}, decay 1/16": 2.0**-4, f"{POWER}, decay 1/4": 2.0**-2}
METHODS = {
    "AdamW": Method(adamw, 2.0**-7),
    "Muon": Method(muon, 2.0**-4),
    "Normed": Method(partial(normed, kind=Normed), 2.0**-4),
    **{name: by_power(decay) for name, decay in DECAYS.items()},
    "plain AdamW": Method(plain, 2.0**-7, alpha=0.0),
    "AdamW, alpha 1/2": Method(adamw, 2.0**-7, alpha=0.5),
    "Muon, alpha 1/2": Method(muon, 2.0**-4, alpha=0.5),
}
GRID = ["AdamW", "Muon", "Normed", POWER]
HALVES = ["AdamW, alpha 1/2", "Muon, alpha 1/2"]


def train(
    structure: str,
    method: str,
    width: int,
    depth: int,
    batch: int,
    steps: int,
    lr: float,
    seed: int,
) -> Row:
    """The final loss on all images."""
    alpha = METHODS[method].alpha
    model = build_model(structure, width, depth, seed, alpha)
    optimizer = METHODS[method].make(model, lr, width, alpha=alpha or 1.0)
    task = PlainDigits(seed)
    loss = training.train(model, optimizer, task, steps, batch=batch, schedule="linear")
    return {"loss": loss}


# ---- the search ----------------------------------------------------------------------------------


def plan(axes: Mapping[str, Axis]) -> list[Job]:
    """All points of the structures and methods in `axes`, the cheap ones first."""

    def points(structures: Iterable[str], methods: Iterable[str], **varied: Any) -> list[Job]:
        names = {"structure": [*structures], "method": [*methods]}
        base = {name: [value] for name, value in BASE.items()}
        return [*combinations(names | base | varied)]

    grid = {"width": axes["width"], "depth": axes["depth"]}
    jobs = points(STRUCTURES, dict.fromkeys([*GRID, *DECAYS]), **grid)
    jobs += points(FEW, ["plain AdamW"], **grid)
    jobs += points(FEW, HALVES, depth=axes["depth"])
    for axis, sizes in AXES.items():
        jobs += points(FEW, ["AdamW", "Muon"], **{axis: sizes})
    chosen = ("structure", "method", "batch", "steps")
    jobs = [job for job in jobs if all(job[name] in axes[name] for name in chosen)]
    jobs.sort(key=lambda job: job["width"] * job["depth"])
    return [dict(key) for key in dict.fromkeys(tuple(job.items()) for job in jobs)]


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """The base points, and then the others, from the best rate of theirs."""
    jobs = plan(axes)
    base_jobs = [job for job in jobs if _is_base(job)]
    later_jobs = [job for job in jobs if not _is_base(job)]
    for chosen in (base_jobs, later_jobs):
        places = [(job, start_of(job, runs.all())) for job in chosen]
        climb(runs, places, next_rates, axes["seed"], 1 if runs.options.smoke else 100)
    return runs.all()


def start_of(job: Job, rows: Iterable[Row]) -> float:
    at_base = curve_of_rates(select(rows, **job | BASE))
    return best(at_base) if at_base else METHODS[job["method"]].start


def next_rates(rows: list[Row], start: float) -> list[Job]:
    curve = curve_of_rates(rows)
    rates = untried(curve, start)
    if not rates and start not in curve:
        rates = [start]
    return [{"lr": lr} for lr in rates]


# ---- what is found -------------------------------------------------------------------------------


def summarise(rows: Iterable[Row]) -> list[Row]:
    """A row for each structure, method and point: log2 of the best rate, by how much it lies off
    the base point's, the same over the seeds, and the loss at the base point's best rate over that
    at the point's own (None: it diverges)."""
    groups: dict[tuple[str, str], dict[tuple[int, ...], list[Row]]] = defaultdict(dict)
    for row in rows:
        points = groups[row["structure"], row["method"]]
        points.setdefault(tuple(row[name] for name in BASE), []).append(row)
    summary = []
    for (structure, method), points in groups.items():
        base = points[tuple(BASE.values())]
        base_rate = best(curve_of_rates(base))
        for point, runs in points.items():
            curve = curve_of_rates(runs)
            least = curve[best(curve)]
            cost = curve.get(base_rate, math.inf) / least
            by_seed = [a - b for a, b in zip(_optima(runs), _optima(base), strict=True)]
            summary.append(
                {
                    "structure": structure,
                    "method": method,
                    **dict(zip(BASE, point, strict=True)),
                    "optimum": optimum(curve),
                    "shift": optimum(curve) - _optimum(base),
                    "over seeds": student(by_seed),
                    "cost": cost if math.isfinite(cost) else None,
                    "bracketed": min(curve) < best(curve) < max(curve),
                    "loss": least,
                }
            )
    return summary


def _optimum(rows: Iterable[Row]) -> float:
    return optimum(curve_of_rates(rows))


def _optima(rows: list[Row]) -> list[float]:
    """Of each seed."""
    return [_optimum(select(rows, seed=seed)) for seed in seeds_of(rows)]


def on_grid(summary: Iterable[Row], method: str) -> list[Row]:
    """The rows of a method at the base point's batch and duration."""
    usual = {"method": method, "batch": BASE["batch"], "steps": BASE["steps"]}
    return select(summary, **usual)


class Farthest(NamedTuple):
    """By how many factors of 2 the best rate of a method lies off the base point at most, over
    widths, depths and structures."""

    off_itself: float  #: the same structure at the base point
    off_dense: float


def largest(summary: list[Row], method: str) -> Farthest:
    chosen = on_grid(summary, method)
    (origin,) = select(chosen, **BASE | {"structure": "dense"})
    off_itself = max(abs(row["shift"]) for row in chosen)
    off_dense = max(abs(row["optimum"] - origin["optimum"]) for row in chosen)
    return Farthest(off_itself, off_dense)


# ---- tables and the plot -------------------------------------------------------------------------


def farthest(result: Row) -> str:
    """The table of docs/transfer.md: how far the best rate of each method moves at most, and at how
    many of the points the interval over the seeds is within sqrt 2 as well."""
    lines = []
    for method in dict.fromkeys([*GRID, *DECAYS, "plain AdamW"]):
        rows = on_grid(result["summary"], method)
        if not rows:
            continue
        off_itself, off_dense = largest(rows, method)
        points = [row for row in rows if not _is_base(row)]
        sure = sum(map(is_sure, points))
        within = sum(abs(row["shift"]) <= 0.5 for row in points)
        verdict = "yes" if off_itself <= 0.5 else "**no**"
        lines.append(
            [
                method,
                f"{within} of {len(points)}",
                f"{off_itself:.2f}",
                verdict,
                f"{sure} of {len(points)}",
                f"{off_dense:.2f}",
            ]
        )
    titles = ["points within sqrt 2", "at most", "all within", "interval too", "off dense's"]
    return table(["", *titles], lines)


def best_decays(summary: Iterable[Row]) -> list[float]:
    """At each structure and point of the grid the decay of the least loss, each at its best
    rate."""
    points: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in select(summary, batch=BASE["batch"], steps=BASE["steps"]):
        if row["method"] in DECAYS:
            points[row["structure"], row["width"], row["depth"]].append(row)
    decays = []
    for rows in points.values():
        best_row = min(rows, key=lambda row: row["loss"])
        decays.append(DECAYS[best_row["method"]])
    return decays


def _is_base(row: Row) -> bool:
    return BASE.items() <= row.items()


def shifts(result: Row, methods: Iterable[str], name: str) -> str:
    """The table of docs/transfer.md: the best rate of `methods` at the base point, and its shift
    where `name` differs from there; "kept" is the largest cost of the base point's rate."""
    fixed = {axis: value for axis, value in BASE.items() if axis != name}
    methods = [*methods]
    rows = [row for row in select(result["summary"], **fixed) if row["method"] in methods]
    rows.sort(key=lambda row: methods.index(row["method"]))
    moved_rows = [row for row in rows if not _is_base(row)]
    points = sorted({row[name] for row in moved_rows})
    lines = []
    for method, structure in dict.fromkeys((row["method"], row["structure"]) for row in moved_rows):
        chosen = select(rows, method=method, structure=structure)
        at = {row[name]: row for row in chosen}
        cells = [f"{structure}, {method}", f"{at[BASE[name]]['optimum']:.2f}"]
        for point in points:
            cells.append(f"{at[point]['shift']:+.2f}" if point in at else "not run")
        costs = [row["cost"] for row in chosen]
        cells.append("diverges" if None in costs else f"{max(costs):.2f}")
        lines.append(cells)
    return table(["", "base point", *(f"{name} {point}" for point in points), "kept"], lines)


def numbers(result: Row) -> dict[str, str]:
    summary = result["summary"]
    grid = {method: on_grid(summary, method) for method in METHODS}
    costs = {"normed": "Normed", "power": POWER, "adamw": "AdamW", "muon": "Muon"}
    texts = {}
    for name, method in costs.items():
        texts[f"transfer.cost_{name}"] = f"{max(row['cost'] for row in grid[method]):.2f}"
    for name, structure in (("dense", "dense"), ("btt", "BTT r=1")):
        for rule, method, digits in (("ruled", "AdamW", 2), ("control", "plain AdamW", 1)):
            shifts = [abs(row["shift"]) for row in select(grid[method], structure=structure)]
            texts[f"transfer.{rule}_{name}"] = f"{max(shifts):.{digits}f}"
    for name, method in (("normed", "Normed"), ("adamw", "AdamW"), ("muon", "Muon")):
        texts[f"transfer.sure_{name}"] = str(sum(map(is_sure, grid[method])))
    return texts | {
        "transfer.points": str(len(grid["Normed"])),
        "transfer.adamw_far": str(len(far(summary, "AdamW"))),
        "transfer.muon_far": str(len(far(summary, "Muon"))),
        "transfer.muon_most": f"{max(row['shift'] for row in far(summary, 'Muon')):.2f}",
        "transfer.no_decay": str(best_decays(summary).count(0.0)),
        "transfer.control_cost": f"{max(row['cost'] for row in grid['plain AdamW']):.0f}",
    }


def is_sure(row: Row) -> bool:
    """Whether the interval over the seeds of a point's move is within sqrt 2; the base point does
    not move."""
    moved = row["over seeds"]
    return not _is_base(row) and moved["low"] >= -0.5 and moved["high"] <= 0.5


def far(summary: list[Row], method: str) -> list[Row]:
    """The points of the grid whose best rate is beyond sqrt 2 of the base point's."""
    return [row for row in on_grid(summary, method) if abs(row["shift"]) > 0.5]


TABLES = {
    "farthest": farthest,
    "batch": lambda result: shifts(result, GRID, "batch"),
    "steps": lambda result: shifts(result, GRID, "steps"),
}


EXPERIMENT = Experiment(
    name="transfer",
    about=__doc__,
    numbers=numbers,
    tables=TABLES,
    run=train,
    axes={
        "structure": STRUCTURES,
        "method": [*METHODS],
        "width": WIDTHS,
        "depth": DEPTHS,
        "batch": AXES["batch"],
        "steps": AXES["steps"],
        "lr": [],
    },
    note={
        "base": BASE, "widths": WIDTHS, "depths": DEPTHS, "axes": AXES, "other_lr": OTHER_LR,
        "data": "digits",
    },
    smoke={
        "structure": FEW,
        "method": ["AdamW", POWER, "plain AdamW"],
        "width": WIDTHS[:1],
        "depth": DEPTHS[:1],
        "batch": [BASE["batch"]],
        "steps": [BASE["steps"]],
    },
    design=design,
    analyse=lambda rows: {"summary": summarise(rows)},
    draw=lambda result: figures.rates(
        [*chain.from_iterable(on_grid(result["rows"], name) for name in (*GRID, "plain AdamW"))],
        panel=["structure", "method"],
        line=["width", "depth"],
    ),
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
