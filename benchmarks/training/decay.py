"""Does the best weight decay carry over to wider networks, and the best (rate, decay) to wider and
deeper ones?

    python -m benchmarks.training.decay            # results/decay.json; goes on where it stopped
    python -m benchmarks.training.decay --smoke    # seconds

The residual MLP of `benchmarks.training.transfer`, 150 steps, where decay may matter: a
fifth of the labels of the training images is wrong. The loss is that of held-out
images with their right labels.

- AdamW at rate 2^-7: the best decay at two widths, under each `weight_decay_scaling` of
  `param_groups`, by factors of 2;
- AdamW and Muon with their default `weight_decay_scaling`, and Normed: the best rate and decay
  together at the base point, at wider and at deeper ones, by factors of 2 of the rate and 4 of the
  decay, until all eight points around the best are run. The search starts at the base point's best.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product

import torch

from benchmarks.harness import training
from benchmarks.harness.experiment import Axis, Experiment, Job, Row, Runs, climb
from benchmarks.harness.statistics import (
    best,
    curve_of_rates,
    moves,
    optimum,
    select,
    student,
)
from benchmarks.harness.statistics import transfer as find_transfer
from benchmarks.harness.tasks import Batch, Samples, digits
from benchmarks.training import transfer
from benchmarks.training.transfer import BASE, FEW, STRUCTURES

RULES = ("1/width", "sqrt", "constant")
WIDTHS = [64, 512]
LR = 2.0**-7  # of AdamW at the base point, where only the decay is searched
NORMED = "Normed, power"
DEFAULTS = {
    "AdamW": "1/width",
    "Muon": "constant",
    NORMED: "constant",
}  # `weight_decay_scaling=` of each
POINTS = [(64, 2), (256, 16), (256, 2), (64, 16)]  # widths and depths, the base first
OF_MUON = [("dense", (64, 2)), ("BTT r=1", (64, 2)), ("BTT r=1", (256, 16))]  # the rest is too dear
STARTS = {"AdamW": (2.0**-7, 0.25), "Muon": (2.0**-4, 0.0625), NORMED: (2.0**-4, 0.0625)}
STEPS = 150
ALONE, BOTH = "decay", "rate and decay"  # the two searches

Pair = tuple[float, float]  # rate, decay


@cache
def noisy_digits() -> tuple[Batch, Batch]:
    """898 images for training, a fifth of them with a label drawn at random, and the others."""
    x, y = digits()
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=draw)
    learned, held = order[: len(x) // 2], order[len(x) // 2 :]
    labels = y[learned].clone()
    wrong = torch.rand(len(labels), generator=draw) < 0.2
    labels[wrong] = torch.randint(10, (int(wrong.sum()),), generator=draw)
    return (x[learned], labels), (x[held], y[held])


def train(
    search: str,
    structure: str,
    method: str,
    rule: str,
    width: int,
    depth: int,
    lr: float,
    weight_decay: float,
    seed: int,
    steps: int,
) -> Row:
    """The loss on held-out images."""
    model = transfer.build_model(structure, width, depth, seed)
    options = {"weight_decay": weight_decay}
    if method != NORMED:  # whose rates are the same at every width
        options["weight_decay_scaling"] = rule
    make = transfer.METHODS[method].make
    optimizer = make(model, lr, width, alpha=1.0, **options)
    how = {"batch": BASE["batch"], "schedule": "linear"}
    return {"loss": training.train(model, optimizer, Samples(*noisy_digits(), seed), steps, **how)}


# ---- the searches --------------------------------------------------------------------------------


def plan(axes: Mapping[str, Axis]) -> list[Job]:
    """Every search of the structures in `axes` at its widths and points."""
    names = ("search", "structure", "method", "rule", "width", "depth")
    structures = axes["structure"]
    points = [p for p in POINTS if p[1] in axes["depth"]]
    few = [name for name in FEW if name in structures]
    jobs = [(ALONE, *each, 2) for each in product(few, ["AdamW"], RULES, axes["width"])]
    for point, (method, rule), structure in product(points, DEFAULTS.items(), structures):
        if method != "Muon" or (structure, point) in OF_MUON:
            jobs.append((BOTH, structure, method, rule, *point))
    return [dict(zip(names, job, strict=True)) for job in jobs]


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """The base points before what starts at their best."""
    jobs = plan(axes)
    for base in (True, False):
        places = [
            (job, (job["search"], start_of(job, runs.all())))
            for job in jobs
            if ((job["width"], job["depth"]) == POINTS[0]) == base
        ]
        climb(runs, places, next_pairs, axes["seed"], 1 if runs.options.smoke else 100)
    return runs.all()


def start_of(job: Job, rows: Iterable[Row]) -> Pair:
    width, depth = POINTS[0]
    at_base = surface(select(rows, **job | {"width": width, "depth": depth}))
    if at_base:
        return best(at_base)
    return STARTS[job["method"]] if job["search"] == BOTH else (LR, 1.0)


def next_pairs(rows: list[Row], start: tuple[str, Pair]) -> list[Job]:
    pairs = untried(surface(rows), start[1], start[0])
    return [{"lr": lr, "weight_decay": decay} for lr, decay in pairs]


def untried(losses: Mapping[Pair, float], start: Pair, search: str) -> list[Pair]:
    """The (rate, decay) to try next: those around the best, or `start`, that have not been tried.

    >>> untried({}, (1.0, 2.0), ALONE)
    [(1.0, 1.0), (1.0, 2.0), (1.0, 4.0)]
    >>> len(untried({}, (1.0, 1.0), BOTH)), untried({(1.0, 1.0): 2.5}, (1.0, 1.0), ALONE)
    (9, [(1.0, 0.5), (1.0, 2.0)])
    """
    lr, decay = best(losses) if losses else start
    if search == BOTH:
        around = list(product((lr / 2, lr, 2 * lr), (decay / 4, decay, 4 * decay)))
    else:
        around = [(lr, decay / 2), (lr, decay), (lr, 2 * decay)]
    return [pair for pair in dict.fromkeys([*around, start]) if pair not in losses]


def surface(rows: Iterable[Row]) -> dict[Pair, float]:
    """(rate, decay) -> geometric mean of the loss over the seeds, of the rows of one job."""
    return curve_of_rates([row | {"lr": (row["lr"], row["weight_decay"])} for row in rows])


# ---- what is found -------------------------------------------------------------------------------


def summarise_alone(rows: Iterable[Row]) -> list[Row]:
    """For each structure and rule: log2 of the best decay at each width, by how much it moves over
    the seeds, and what keeping the first width's costs at the last, a factor of the loss."""
    result = []
    for structure, rule in product(FEW, RULES):
        of_rule = select(rows, **{"search": ALONE, "structure": structure, "rule": rule})
        if not of_rule:
            continue
        members = [
            row | {"method": rule, "size": row["width"], "lr": row["weight_decay"]}
            for row in of_rule
        ]
        moved = find_transfer(members)[rule]
        shared = {"structure": structure, "rule": rule, "cost": moved["cost"]}
        optima = {str(width): value for width, value in moved["optima"].items()}
        result.append(shared | {"optima": optima, "over seeds": moves(members)["moved"]})
    return result


def summarise_both(rows: Iterable[Row]) -> list[Row]:
    """For each structure, method and point: log2 of the best rate (by a parabola, at the best
    decay) and of the best decay; the loss there, its least and largest over the seeds; and the loss
    at the base point's best over it, over the seeds."""
    result = []
    for (method, rule), structure in product(DEFAULTS.items(), STRUCTURES):
        where = {"search": BOTH, "structure": structure, "method": method, "rule": rule}
        kept, origin = None, 0.0
        for width, depth in POINTS:
            members = select(rows, **where | {"width": width, "depth": depth})
            if not members:
                continue
            found = surface(members)
            lr, decay = best(found)
            along = {rate: loss for (rate, other), loss in found.items() if other == decay}
            vertex = optimum(along)
            if kept is None:
                kept, origin = (lr, decay), vertex
            losses = [_of_seeds(members, pair) for pair in (kept, (lr, decay))]
            costs = [math.log(a / b) for a, b in zip(*losses, strict=True)]
            result.append(
                {
                    **where,
                    "width": width,
                    "depth": depth,
                    "rate": vertex,
                    "decay": math.log2(decay),
                    "shift": vertex - origin,
                    "loss": found[lr, decay],
                    "seeds": [min(losses[1]), max(losses[1])],
                    "kept": found[kept],
                    "cost": {name: math.exp(value) for name, value in student(costs).items()},
                }
            )
    return result


def _of_seeds(rows: Iterable[Row], pair: Pair) -> list[float]:
    found = [row for row in rows if (row["lr"], row["weight_decay"]) == pair]
    return [
        math.inf if row["loss"] is None else row["loss"]
        for row in sorted(found, key=lambda row: row["seed"])
    ]


EXPERIMENT = Experiment(
    name="decay",
    about=__doc__,
    run=train,
    axes={
        "search": [ALONE, BOTH],
        "structure": STRUCTURES,
        "method": [*DEFAULTS],
        "rule": RULES,
        "width": WIDTHS,
        "depth": [2, 16],
        "lr": [],
        "weight_decay": [0.0],
    },
    sizes={"steps": STEPS},
    note={"base": BASE, "widths": WIDTHS, "lr": LR, "data": "digits"},
    smoke={"steps": 1, "structure": ["dense"], "width": [64, 128], "depth": [2]},
    design=design,
    analyse=lambda rows: {"decay": summarise_alone(rows), "rate and decay": summarise_both(rows)},
)

if __name__ == "__main__":
    EXPERIMENT.main()
