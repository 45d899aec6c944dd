"""Do the best rate and decay carry over to wider and deeper residual networks, for every structure
and optimizer? And to other batches and durations?

    python -m benchmarks.transfer            # results/transfer.{json,png}; goes on where it stopped
    python -m benchmarks.transfer --smoke    # seconds

A residual MLP on scikit-learn's digits: blocks `x + m * fc2(relu(fc1(norm(x))))` with m = 2 / depth
(CompleteP, alpha = 1), all matrices of the blocks structured, the head zero at the start; linear
decay of the rate to zero, no warmup. The base point is width 64, depth 2. From it a cross: wider at
depth 2, deeper at width 64; the products of both were not run, nor what LEFT_OUT names, whose
polar factors and norms are too dear for a CPU. At each point the rate is searched by factors of 2
until the best has both its neighbours, and the optimum is the vertex of the parabola through them,
of the geometric mean over the seeds of the final loss on all images.

Besides: the best rate at other batches and durations; and the best decay over widths, under each
`decay=` of `param_groups`, of the held-out loss where a fifth of the training labels is wrong.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import structlin
from benchmarks import lr_transfer
from benchmarks.papers import sweeps
from benchmarks.record import RESULTS, save_json, table
from benchmarks.runs import digits, keep, parser, run_all
from structlin.optim import Depth, Muon, Normed, param_groups

STRUCTURES = [name for name in lr_transfer.STRUCTURES if name != "TT r=4"]
FEW = ["dense", "BTT r=1"]  # for batch, duration and decay
BASE = {"width": 64, "depth": 2}
BATCH = 64
AXES = {
    "width": [64, 256, 1024],
    "depth": [2, 16],
    "batch": [16, 64, 256],
    "steps": [25, 50, 100, 200],
    "decay": [64, 512],  # widths
}
BASES = {**BASE, "batch": BATCH, "steps": 50, "decay": 64}
LEFT_OUT = [  # structure, optimizer, width
    ("dense", "Muon", 1024), ("dense", "Normed", 1024),
    ("Monarch", "Muon", 1024), ("Monarch", "Normed", 1024),
]  # fmt: skip
DECAYS = ("1/width", "sqrt", "constant")
STARTS = {"AdamW": 2.0**-7, "Muon": 2.0**-4, "Normed": 2.0**-4} | dict.fromkeys(DECAYS, 1.0)
OTHER_LR = 2.0**-9  # of Muon's biases and norms
DECAY_LR = 2.0**-7

Job = tuple[str, str, str]  # structure, optimizer or rule of decay, axis
Row = dict[str, Any]


class Block(nn.Module):
    """`x + multiplier * branch(x)`."""

    def __init__(self, width: int, multiplier: float) -> None:
        super().__init__()
        self.norm, self.multiplier = nn.LayerNorm(width), multiplier
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.multiplier * self.fc2(F.relu(self.fc1(self.norm(x))))


class ResMLP(nn.Module):
    def __init__(self, width: int, depth: int, multiplier: float) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, multiplier) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(structure: str, width: int, depth: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = ResMLP(width, depth, BASE["depth"] / depth)
    return structlin.convert(model, lr_transfer.STRUCTURES[structure](width))


def adamw(model: nn.Module, lr: float, width: int, **options: Any) -> torch.optim.Optimizer:
    base, depth = {width: BASE["width"]}, Depth(base=BASE["depth"])
    groups = param_groups(model, lr, base=base, depth=depth, eps=1e-8, **options)
    return torch.optim.AdamW(groups)


def muon(model: nn.Module, lr: float, width: int) -> torch.optim.Optimizer:
    # at alpha = 1 depth changes no rate of its
    return Muon(model, lr, other_lr=OTHER_LR, method="ns")


def normed(model: nn.Module, lr: float, width: int) -> torch.optim.Optimizer:
    return Normed(torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0), model)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "Muon": muon,
    "Normed": normed,
}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    *,
    steps: int,
    batch: int,
    seed: int,
) -> None:
    x, y = data
    draw = torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        chosen = torch.randint(len(x), (batch,), generator=draw)
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[Tensor, Tensor]) -> float | None:
    loss = F.cross_entropy(model(data[0]), data[1]).item()
    return loss if math.isfinite(loss) else None


def seek(job: Job, kept: dict[str, Row], seeds: int, steps: int) -> list[Row]:
    """The rows of a structure and optimizer along an axis, "size"; those of `kept` are not made
    again. Of the axis "decay" the method is a rule, and "lr" the decay."""
    structure, method, axis = job
    shared = {"structure": structure, "method": method, "axis": axis}

    def run(size: int, lrs: Sequence[float]) -> list[Row]:
        rows = []
        for lr, seed in product(lrs, range(seeds)):
            row = {**shared, "size": size, "lr": lr, "seed": seed}
            made = _decayed if axis == "decay" else _tuned
            found = kept.get(_key(row))
            rows.append(found or {**row, "loss": made(row, steps)})
        return rows

    sizes = AXES[axis]
    if axis == "width":
        sizes = [size for size in sizes if (structure, method, size) not in LEFT_OUT]
    return sweeps.search(run, sizes, STARTS[method])


def _tuned(row: Row, steps: int) -> float | None:
    at = {**BASE, "batch": BATCH, "steps": steps, row["axis"]: row["size"]}
    model = build_model(row["structure"], at["width"], at["depth"], row["seed"])
    optimizer = OPTIMIZERS[row["method"]](model, row["lr"], at["width"])
    try:
        train(model, optimizer, digits(), steps=at["steps"], batch=at["batch"], seed=row["seed"])
    except FloatingPointError:
        return None
    return evaluate(model, digits())


def _decayed(row: Row, steps: int) -> float | None:
    width, learned, held = row["size"], *noisy_digits()
    model = build_model(row["structure"], width, BASE["depth"], row["seed"])
    optimizer = adamw(model, DECAY_LR, width, weight_decay=row["lr"], decay=row["method"])
    train(model, optimizer, learned, steps=3 * steps, batch=BATCH, seed=row["seed"])
    return evaluate(model, held)


def _key(row: Row) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "loss"})


@cache
def noisy_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """898 images for training, a fifth of them with a label drawn at random, and the others."""
    x, y = digits()
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=draw)
    learned, held = order[: len(x) // 2], order[len(x) // 2 :]
    labels = y[learned].clone()
    wrong = torch.rand(len(labels), generator=draw) < 0.2
    labels[wrong] = torch.randint(10, (int(wrong.sum()),), generator=draw)
    return (x[learned], labels), (x[held], y[held])


def summarise(rows: list[Row]) -> list[Row]:
    """A row for each structure, method and axis: log2 of the best rate (or decay) at each size, by
    how much it lies off the base point's, and what keeping that one costs at the last size."""
    found: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["axis"], row["structure"], row["method"]].append(row)
    result = []
    for (axis, structure, method), members in found.items():
        moved = next(iter(sweeps.transfer(members).values()))
        optima = moved["optima"]
        origin = optima[BASES[axis]] if BASES[axis] in optima else next(iter(optima.values()))
        result.append(
            {
                "axis": axis,
                "structure": structure,
                "method": method,
                "optima": {str(size): value for size, value in optima.items()},
                "shifts": {str(size): value - origin for size, value in optima.items()},
                "cost": moved["cost"],
                "bracketed": moved["bracketed"],
                "over seeds": sweeps.moves(members)["moved"],
                "losses": {str(size): value for size, value in moved["losses"].items()},
            }
        )
    return result


def largest(summary: list[Row], method: str) -> tuple[float, float]:
    """By how many factors of 2 the best rate of an optimizer lies off the base point at most, over
    widths, depths and structures: off each structure's own, and off dense's."""
    chosen = [row for row in summary if row["method"] == method and row["axis"] in BASE]
    own = max(abs(shift) for row in chosen for shift in row["shifts"].values())
    origin = next(row for row in chosen if row["structure"] == "dense")["optima"][str(64)]
    return own, max(abs(best - origin) for row in chosen for best in row["optima"].values())


def show(summary: list[Row]) -> None:
    for row in summary:
        shifts = ", ".join(f"{size} {shift:+.2f}" for size, shift in row["shifts"].items())
        cost = "diverges" if row["cost"] is None else f"{row['cost']:.2f}x"
        end = "" if row["bracketed"] else " (at an end)"
        print(f"{row['axis']:7}{row['structure']:11}{row['method']:9}{shifts}; kept {cost}{end}")
    for method in OPTIMIZERS:
        own, dense = largest(summary, method)
        verdict = "within" if own <= 0.5 else "NOT within"
        print(f"{method}: off by at most 2^{own:.2f}, {verdict} a factor of sqrt 2")
        print(f"{' ' * len(method)}  2^{dense:.2f} off dense's base point")


def farthest(result: Row) -> str:
    """The table of docs/transfer.md: how far the best rate of each optimizer moves at most, and in
    how many of the rows the interval over the seeds is within sqrt 2 as well."""
    lines = []
    for method in OPTIMIZERS:
        own, dense = largest(result["summary"], method)
        rows = [row for row in result["summary"] if row["method"] == method and row["axis"] in BASE]
        seeds = [row["over seeds"] for row in rows]
        shown = sum(each["low"] >= -0.5 and each["high"] <= 0.5 for each in seeds)
        within = "yes" if own <= 0.5 else "**no**"
        lines.append([method, f"{own:.2f}", within, f"{shown} of {len(rows)}", f"{dense:.2f}"])
    titles = ["off its own base point", "within sqrt 2", "interval too", "off dense's base point"]
    return table(["", *titles], lines)


def shifts(result: Row, *axes: str) -> str:
    """The table of docs/transfer.md: the best rate at the base point, and its shifts along `axes`;
    the interval over the seeds is of the way from the first size to the last."""
    found = {(row["structure"], row["method"], row["axis"]): row for row in result["summary"]}
    lines = []
    for method, structure in dict.fromkeys((key[1], key[0]) for key in found if key[2] in axes):
        rows = {axis: found[structure, method, axis] for axis in axes}
        origin = rows[axes[0]]["optima"][str(BASES[axes[0]])]
        cells = [f"{structure}, {method}", f"{origin:.2f}"]
        for axis, row in rows.items():
            for size in _others(axis):
                shift = row["shifts"].get(str(size))
                cells.append("not run" if shift is None else f"{shift:+.2f}")
            seeds = row["over seeds"]
            cells.append(f"{seeds['low']:+.2f} to {seeds['high']:+.2f}")
        costs = [row["cost"] for row in rows.values()]
        cells.append("diverges" if None in costs else f"{max(costs):.2f}")
        lines.append(cells)
    titles = ["base point"]
    for axis in axes:
        titles += [f"{axis} {size}" for size in _others(axis)] + ["95 %"]
    return table(["", *titles, "kept"], lines)


def _others(axis: str) -> list[int]:
    return [size for size in AXES[axis] if size != BASES[axis]]


def plot(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(3 * len(STRUCTURES), 12), layout="constrained")
    axes = figure.subplots(6, len(STRUCTURES), squeeze=False)
    lines = list(product(BASE, OPTIMIZERS))
    for (line, (axis, method)), (column, structure) in product(
        enumerate(lines), enumerate(STRUCTURES)
    ):
        key = {"axis": axis, "structure": structure, "method": method}
        members = [row for row in rows if key.items() <= row.items()]
        sweeps.plot(axes[line, column], members, method, axis)
        axes[line, column].set_title(f"{structure}, {method}", fontsize="small")
    for line in axes:
        line[0].legend(fontsize="x-small")
    return figure


def main() -> None:
    options = parser(__doc__, RESULTS)
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    structures, axes = STRUCTURES, AXES
    if arguments.smoke:
        arguments.steps, arguments.seeds = 2, 2
        structures = ["dense", "BTT r=1"]
        for axis, sizes in AXES.items():
            AXES[axis] = sizes[:1]
    jobs = list(product(structures, OPTIMIZERS, BASE))
    jobs.sort(key=lambda job: list(OPTIMIZERS).index(job[1]))
    jobs += product(FEW, ("AdamW", "Muon"), ("batch", "steps"))
    jobs += product(FEW, DECAYS, ("decay",))
    setting = {
        "steps": arguments.steps, "seeds": arguments.seeds, "base": BASE, "batch": BATCH,
        "axes": axes, "not run": [list(left) for left in LEFT_OUT], "other_lr": OTHER_LR,
        "decay_lr": DECAY_LR, "data": "digits",
    }  # fmt: skip
    path = arguments.out / "transfer.json"
    earlier = json.loads(path.read_text()) if path.exists() and not arguments.smoke else {}
    rows = earlier["rows"] if earlier.get("setting") == setting else []
    kept = {_key(row): row for row in rows}
    done: list[Row] = []

    def save(found: list[Row]) -> None:
        done.extend(found)
        if not arguments.smoke:
            known = {_key(row): row for row in (*rows, *done)}
            save_json(path, setting=setting, rows=list(known.values()))

    one = partial(seek, kept=kept, seeds=arguments.seeds, steps=arguments.steps)
    run_all(one, jobs, arguments, save)
    summary = summarise(done)
    show(summary)
    keep(arguments, "transfer", plot(done), setting=setting, summary=summary, rows=done)


if __name__ == "__main__":
    main()
