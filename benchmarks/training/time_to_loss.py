"""How many times fewer FLOPs and seconds until the dense model's loss?

    python -m benchmarks.training.time_to_loss                  # results/time_to_loss.{json,png}
    python -m benchmarks.training.time_to_loss --setups teacher
    python -m benchmarks.training.time_to_loss --smoke          # seconds

Figures 8 and 10 (b, c) of "Compute Better Spent": loss against compute and against time. Models of
growing width train for the same number of steps; a structure's losses, drawn against FLOPs or
seconds, are interpolated in logarithms, and the factor is how many times less than a dense model's
they are where they meet the dense model's loss. 0: never met, up to the widest model. A structure
whose narrowest model is already below counts with that model.

    teacher     regression of a random MLP, every sample new; MLPs of three hidden layers, the two
                square matrices structured
    digits MLP  scikit-learn's digits with the paper's augmentation; its residual MLPs (E.1), all
                matrices of the blocks structured; held-out loss
    digits ViT  the same with its ViT

Every structure has its best base learning rate: a climb by factors of 2 on seed 0 at the width
where rates are meant, dense and structured alike; muP and `param_groups` take it to the other
widths. At its widest model half and twice that rate are tried on seed 0, and shown. Adam(W) with a
cosine to zero. Intervals are 95 %, bootstrap over the seeds; with three they are about the range.

Seconds are steps times the milliseconds of a step, making the batch not counted: medians of rounds
in which all models take turns, measured after all losses. Runs are kept in the JSON as they finish;
the same command goes on, and repeats only the timing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, models, tasks, training
from benchmarks.harness.experiment import Axis, Experiment, Row, Runs, Tune, combinations, tune
from benchmarks.harness.models import BASE_WIDTH, STRUCTURES
from benchmarks.harness.report import rate, table
from benchmarks.harness.statistics import (
    best,
    bootstrap,
    curve_of_rates,
    log_loss,
    seeds_of,
    select,
    values,
)
from benchmarks.harness.timing import milliseconds

Point = tuple[float, float]  # FLOPs or seconds, loss


def teacher_mlp(width: int, structure: str) -> nn.Module:
    task = tasks.WiderTeacher
    return models.structured_mlp(task.inputs, width, task.outputs, STRUCTURES[structure](width))


def vision_model(
    kind: type[nn.Module], zero: Sequence[str], width: int, structure: str
) -> nn.Module:
    model = kind(tasks.MixedDigits.inputs, width, tasks.MixedDigits.outputs)
    family = STRUCTURES[structure](width)
    return structlin.convert(model, family, include="blocks.*", init="mup", zero_init=zero)


@dataclass(frozen=True)
class Setup:
    """Data, model, and how it is trained."""

    task: Callable[[int], Any]  # of a seed
    build: Callable[[int, str], nn.Module]  # width, structure -> model
    start: float  # the first rate of a climb
    steps: int
    batch: int
    widths: Mapping[str, tuple[int, ...]]  # ascending, by structure


SETUPS = {
    "teacher": Setup(
        tasks.WiderTeacher,
        teacher_mlp,
        start=2**-6,
        steps=300,
        batch=256,
        widths={
            "dense": (128, 256, 512, 1024),
            "low-rank": (256, 1024, 4096),
            "Monarch 16": (256, 512, 1024),
            "BTT r=1": (256, 576, 1024, 2304, 4096),
        },
    ),
    "digits MLP": Setup(
        tasks.MixedDigits,
        partial(vision_model, models.Perceptron, ("*c_proj",)),
        start=2**-7,
        steps=400,
        batch=128,
        widths={
            "dense": (32, 64, 128, 256),
            "low-rank": (64, 256),
            "Monarch 16": (64, 128, 256),
            "BTT r=1": (64, 144, 256, 576),
        },
    ),
    "digits ViT": Setup(
        tasks.MixedDigits,
        partial(vision_model, models.ViT, ("*c_proj", "*query")),
        start=2**-8,
        steps=500,
        batch=64,
        widths={"dense": (32, 64, 128), "BTT r=1": (64, 144, 256)},
    ),
}
SMOKE_WIDTHS = {"dense": (32, 96), "BTT r=1": (64, 144)}


def settings(**changes: int) -> dict[str, dict[str, int]]:
    """What the runs of each setup share."""
    return {
        name: {
            "steps": setup.steps, "batch": setup.batch, "base": BASE_WIDTH,
            "samples": training.HELD_OUT_SAMPLES,
        }
        | changes
        for name, setup in SETUPS.items()
    }  # fmt: skip


# ---- a run ---------------------------------------------------------------------------------------


def make(
    setup: str, structure: str, width: int, lr: float, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A fresh model, its optimizer and its task."""
    torch.manual_seed(seed)
    build = SETUPS[setup].build
    model, task = build(width, structure), SETUPS[setup].task(seed)
    with torch.device("meta"):
        base = build(BASE_WIDTH, "dense")
    groups = structlin.param_groups(model, lr, base=base)
    return model, torch.optim.AdamW(groups, lr, fused=True), task


def train(setup: str, structure: str, width: int, lr: float, seed: int, **sizes: Any) -> Row:
    """The loss on new samples (None: diverged), parameters and FLOPs of a forward pass of one
    sample."""
    size = sizes[setup]
    model, optimizer, task = make(setup, structure, width, lr, seed)

    def loss(step: int) -> Tensor:
        x, y = task.batch(size["batch"])
        return task.loss(model(x), y)

    training.descend(optimizer, loss, size["steps"], warmup=size["steps"] // 20)
    x, y = task.new(size["samples"])
    with torch.no_grad():
        parts = zip(x.split(1024), y.split(1024), strict=True)
        final = fmean(task.loss(model(part), target).item() for part, target in parts)
    return {
        "loss": training.finite(final),
        "params": training.count_params(model),
        "flops": training.forward_flops(model, x[:1]),
    }


def time_steps(
    setup: str, widths: Mapping[str, Sequence[int]], batch: int, seconds: float
) -> list[Row]:
    """Milliseconds of a training step of every model, in turns, all on one batch: what making
    batches costs is the same for all, and not counted."""
    x, y = SETUPS[setup].task(0).batch(batch)

    def work(structure: str, width: int) -> Callable[[], None]:
        model, optimizer, task = make(setup, structure, width, SETUPS[setup].start, 0)
        return training.step_of(optimizer, lambda: task.loss(model(x), y))

    works = {(name, width): work(name, width) for name, all_ in widths.items() for width in all_}
    times = milliseconds(works, rounds=(3, 99), seconds=seconds)
    return [
        {"setup": setup, "structure": structure, "width": width, **found}
        for (structure, width), found in times.items()
    ]


# ---- the runs ------------------------------------------------------------------------------------


def climb(runs: Runs, setup: str, structure: str) -> float:
    """The best base rate, found at the base width on seed 0."""
    where = {"setup": setup, "structure": structure, "width": BASE_WIDTH}
    return best(curve_of_rates(tune(runs, where, [0], Tune(lambda job: SETUPS[setup].start))))


def base_rates(rows: Sequence[Row], setup: str) -> dict[str, float]:
    """structure -> the rate that its climb has found."""
    mine = select(rows, setup=setup, width=BASE_WIDTH, seed=0)
    names = values(mine, "structure")
    return {name: best(curve_of_rates(select(mine, structure=name))) for name in names}


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """Every model at its structure's rate, and each widest one on seed 0 at half and twice that."""
    groups = {name: axes[name] for name in ("setup", "structure")}
    for group in combinations(groups):
        lr = climb(runs, **group)
        widths = [job["width"] for job in combinations({**_fixed(group), "width": axes["width"]})]
        jobs = [{"width": n, "lr": lr, "seed": seed} for n in widths for seed in axes["seed"]]
        jobs += [{"width": widths[-1], "lr": lr * factor, "seed": 0} for factor in (0.5, 2)]
        runs.of(group | job for job in jobs)
    return runs.all()


def _fixed(group: Row) -> dict[str, list[Any]]:
    return {name: [value] for name, value in group.items()}


# ---- factors -------------------------------------------------------------------------------------


def needed(curve: Sequence[Point], loss: float) -> float:
    """What the first point of `curve` at or below `loss` costs, linear in logarithms between two;
    infinite if none is.

    >>> curve = [(10.0, 1.0), (1000.0, 0.25)]
    >>> round(needed(curve, 0.5)), needed(curve, 2.0), needed(curve, 0.1)
    (100, 10.0, inf)
    """
    if curve[0][1] <= loss:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 <= loss:
            if math.isinf(y0):  # diverged
                return x1
            share = math.log(y0 / loss) / math.log(y0 / y1)
            return float(x0 * (x1 / x0) ** share)
    return math.inf


def curve_of(rows: Sequence[Row], costs: Mapping[int, float], seeds: Sequence[int]) -> list[Point]:
    """(cost, geometric mean of the loss over `seeds`, of which one may come more than once), by
    ascending width; `costs` by width."""
    losses = {(row["width"], row["seed"]): log_loss(row) for row in rows}
    return [
        (cost, math.exp(fmean(losses[width, seed] for seed in seeds)))
        for width, cost in sorted(costs.items())
    ]


def factors(rows: Sequence[Row], costs: Mapping[str, Mapping[int, float]]) -> list[Row]:
    """How many times less than dense each structure needs for dense's loss, at each of dense's
    widths.

    Args:
        rows: of one setup, at the chosen rates.
        costs: structure -> width -> FLOPs or seconds.
    """
    seeds = seeds_of(rows)
    of = {structure: select(rows, structure=structure) for structure in costs}

    def factor(structure: str, width: int, drawn: Sequence[int]) -> float:
        dense = curve_of(of["dense"], costs["dense"], drawn)
        cost, loss = dense[sorted(costs["dense"]).index(width)]
        return cost / needed(curve_of(of[structure], costs[structure], drawn), loss)

    return [
        {
            "structure": structure,
            "dense": width,
            **bootstrap(partial(factor, structure, width), seeds),
            "by_seed": [factor(structure, width, [seed]) for seed in seeds],
        }
        for structure in costs
        if structure != "dense"
        for width in sorted(costs["dense"])
    ]


def summarise(
    rows: Sequence[Row], lrs: Mapping[str, float], times: Sequence[Row], steps: int
) -> Row:
    """The factors of one setup, in FLOPs and in seconds; and the losses around the chosen rate at
    each structure's widest model, on seed 0."""
    chosen = [row for row in rows if row["lr"] == lrs.get(row["structure"])]
    flops: dict[str, dict[int, float]] = {structure: {} for structure in lrs}
    seconds: dict[str, dict[int, float]] = {structure: {} for structure in lrs}
    for row in times:
        structure, width = row["structure"], row["width"]
        seconds[structure][width] = steps * row["median"] / 1e3
        flops[structure][width] = select(chosen, structure=structure, width=width)[0]["flops"]
    chosen = [row for row in chosen if row["width"] in flops[row["structure"]]]
    checks = []
    for structure, costs in flops.items():
        losses = curve_of_rates(select(rows, structure=structure, width=max(costs), seed=0))
        checks.append({
            "structure": structure,
            "width": max(costs),
            "losses": {rate(lr): loss for lr, loss in losses.items()},
            "best_over_chosen": best(losses) / lrs[structure],
        })  # fmt: skip
    return {
        "flops": factors(chosen, flops),
        "seconds": factors(chosen, seconds),
        "checks": checks,
        "chosen": chosen,
    }


def measure(chosen: Row, found: Row) -> Row:
    """The times of all steps, and what follows from them."""
    lrs = {setup: base_rates(found["rows"], setup) for setup in chosen["setup"]}
    times, summaries = [], {}
    for setup, rates in lrs.items():
        where = _fixed({"setup": setup}) | {"structure": [*rates], "width": chosen["width"]}
        widths: dict[str, list[int]] = {}
        for job in combinations(where):
            widths.setdefault(job["structure"], []).append(job["width"])
        size = chosen[setup]
        mine = time_steps(setup, widths, size["batch"], chosen["timed"])
        times += mine
        summaries[setup] = summarise(select(found["rows"], setup=setup), rates, mine, size["steps"])
    threads = torch.get_num_threads()
    return {"threads": threads, "lrs": lrs, "times": times, "summaries": summaries}


# ---- the report ----------------------------------------------------------------------------------


def words(row: Row) -> str:
    """A factor with its interval where that shows; "never" if dense's loss is not met.

    >>> words({"value": 2, "low": 1.9, "high": 2.2}), words({"value": 2, "low": 2, "high": 2.01})
    ('2.0 (1.9 to 2.2)', '2.0')
    """
    if row["value"] == 0:
        return "never"
    value, low, high = (f"{row[name]:.1f}" for name in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def markdown(result: Row, setup: str, cost: str) -> str:
    """The table of the factors: a row for each structure, a column for each of dense's widths."""
    found = result["summaries"][setup][cost]
    widths = sorted(values(found, "dense"))
    lines = [
        [structure, *map(words, select(found, structure=structure))]
        for structure in values(found, "structure")
    ]
    return table(["", *(f"dense {width}" for width in widths)], lines)


def draw(result: Row) -> figures.Figure:
    """Loss against FLOPs and against seconds."""
    points = []
    for row in result["times"]:
        steps = result["setting"][row["setup"]]["steps"]
        where = {key: row[key] for key in ("structure", "width")}
        for run in select(result["summaries"][row["setup"]]["chosen"], **where):
            costs = {"FLOPs": run["flops"], "seconds": steps * row["median"] / 1e3}
            points += [
                {"setup": row["setup"], "of": of, "cost": cost, **where, "loss": run["loss"]}
                for of, cost in costs.items()
            ]
    return figures.curves(points, "cost", panel=["setup", "of"], line=["structure"], columns=2)


EXPERIMENT = Experiment(
    name="time_to_loss",
    about=__doc__,
    run=train,
    axes={
        "setup": [*SETUPS],
        "structure": lambda job: [*SETUPS[job["setup"]].widths],
        "width": lambda job: SETUPS[job["setup"]].widths[job["structure"]],
        "lr": [],
    },
    sizes=settings(),
    smoke={
        **settings(steps=2, batch=8, samples=64),
        "structure": [*SMOKE_WIDTHS],
        "width": lambda job: SMOKE_WIDTHS[job["structure"]],
        "seeds": 1,
        "timed": 0.0,
    },
    design=design,
    analyse=lambda rows: {},
    beside=measure,
    extra={"timed": 15.0},
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
