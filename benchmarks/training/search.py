"""Which structures of the two-core einsum space train best, and what do they have in common?

    python -m benchmarks.training.search                  # results/search.{json,png}
    python -m benchmarks.training.search --tasks teacher  # first this one; what is kept stays
    python -m benchmarks.training.search --smoke          # seconds

Structures are drawn by `structlin.search.sample`: a third from the whole space, a third without
parameter sharing, a third without it and of full rank; the families are there as points of the same
space. Each is trained by `structlin.search.run` at two or three widths on three tasks, as the
square matrices of an MLP, for the same number of steps: a regression on a random MLP and
scikit-learn's digits with shifts and noise, both with three hidden layers and every sample new, and
text, the MLP of examples/train_mlp_lm.py, which predicts a character of the Python standard library
from 16. The learning rate is the dense model's at width 64, taken to every structure and width by
`param_groups`; none is tuned.

"Searching for Efficient Linear Layers over a Continuous Space of Structured Matrices"
(arXiv:2410.02117) finds, in its abstract, that "a small omega (which measures parameter sharing)
and large psi (which measures the rank) reliably led to better scaling laws", and in its code's
README that "nu (which measures how much structured an operator is) can be varied with often
negligible impact on the scaling laws". Here each is a factor on the loss at equal FLOPs, with a
95 % interval.

Seconds are steps times the milliseconds of a step on one batch, medians of rounds in which all
models take turns, measured after all runs. Runs are kept in the JSON as they finish; the same
command goes on, and repeats only the timing.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

import torch
from torch import nn

import structlin
from benchmarks.harness import figures, models, report, tasks, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.record import in_lists
from benchmarks.harness.statistics import (
    Curve,
    Estimate,
    above,
    below,
    differences,
    exponent,
    select,
    student,
    values,
    within,
)
from benchmarks.harness.timing import milliseconds
from structlin.search import Einsum, Search, Trial, run, sample

# the best of powers of 2 for the dense model at width 64
LR = {"teacher": 2.0**-6, "digits": 2.0**-6, "text": 2.0**-7}
STEPS = {"teacher": 400, "digits": 200, "text": 800}
WIDTHS = {"teacher": [64, 256, 512], "digits": [64, 256, 512], "text": [64, 256]}
BATCH = 256
DRAWN = 9  # of each kind
COSTS, MEASURES = ("flops", "seconds"), ("omega", "psi", "nu")
NEGLIGIBLE = 1.1  # a factor on the loss

FAMILIES: dict[str, structlin.Family] = {
    "dense": structlin.Dense(),
    "low-rank d^1/2": Einsum(alpha=1, epsilon=1, rho=0.5),
    "low-rank d^3/4": Einsum(alpha=1, epsilon=1, rho=0.75),
    "Kronecker": Einsum(alpha=0.5, beta=0.5, delta=0.5, epsilon=0.5),
    "TT r=d^1/4": Einsum(alpha=0.5, beta=0.5, delta=0.5, epsilon=0.5, rho=0.25),
    "BTT": Einsum(alpha=0.5, gamma=0.5, epsilon=0.5, phi=0.5),
    "BTT r=d^1/4": Einsum(alpha=0.5, gamma=0.5, epsilon=0.5, phi=0.5, rho=0.25),
    "Monarch b=4": structlin.Monarch(blocks=4),
}
CLASS = {"omega": 0.05, "psi": 0.95}  # hardly any sharing, full rank up to a small factor
FULL = (1.0, 1.0)
NONE = (0.0, 0.0)


def draw_structures(n: int) -> dict[str, structlin.Family]:
    """The families, and `n` points of each kind that cost less than dense at the least width."""
    width = models.BASE_WIDTH
    kinds = {
        "any": sample(width, width, n, seed=0, psi=(0.25, 1.0)),
        "no sharing": sample(width, width, n, seed=1, omega=NONE, psi=(0.25, 1.0)),
        "full rank": sample(width, width, n, seed=2, omega=NONE, psi=FULL),
    }
    drawn = {point.label: point for points in kinds.values() for point in points}
    return FAMILIES | drawn


STRUCTURES = draw_structures(DRAWN)


@cache
def read_text() -> tasks.train_mlp_lm.NextCharacter:
    with torch.device("cpu"):  # also where a model is made without values
        options = {"context": 16, "depth": 3, "batch": 0}
        return tasks.of_examples(tasks.train_mlp_lm.NextCharacter, 0, **options)


def draw_text(seed: int) -> tasks.Windows:
    return tasks.Windows(read_text(), 1_000_003 * seed + 3)


KINDS: dict[str, Any] = {"teacher": tasks.Teacher, "digits": tasks.Digits, "text": draw_text}
SQUARE = {"teacher": ["2", "4"], "digits": ["2", "4"], "text": ["blocks.*.linear"]}  # structured
LISTS = {f"rows/{task}": {"task": task} for task in KINDS}


def build(task: str, width: int) -> nn.Module:
    if task == "text":
        return read_text().model(width)
    kind = KINDS[task]
    return models.dense_mlp(kind.inputs, width, kind.outputs)


def train(
    task: str, structure: str, width: int, seed: int, steps: dict[str, int], batch: int
) -> Row:
    """A search of one run."""
    data = KINDS[task](seed)

    def descend(model: nn.Module, groups: list[dict[str, Any]], seed: int) -> float:
        optimizer = torch.optim.Adam(groups)
        loss = training.train(model, optimizer, data, steps[task], batch=batch)
        return math.nan if loss is None else loss

    found = run(
        partial(build, task),
        descend,
        {structure: STRUCTURES[structure]},
        [width],
        lr=LR[task],
        base=models.BASE_WIDTH,
        seeds=[seed],
        example=KINDS[task](seed).new(1)[0],
        include=SQUARE[task],
        progress=False,
    )
    return asdict(found.rows[0])


def time_steps(
    task: str, structures: Sequence[str], widths: Sequence[int], batch: int, seconds: float
) -> list[Row]:
    """Milliseconds of a training step of every model, in turns, on one batch."""
    data = KINDS[task](0)
    x, y = data.batch(batch)

    def work(name: str, width: int) -> Callable[[], None]:
        options = {"include": SQUARE[task], "init": "mup"}
        model = structlin.convert(build(task, width), STRUCTURES[name], **options)
        optimizer = torch.optim.Adam(structlin.param_groups(model, LR[task]))
        return training.step_of(optimizer, lambda: data.loss(model(x), y))

    works = {(name, width): work(name, width) for name in structures for width in widths}
    times = milliseconds(works, rounds=(2, 29), seconds=seconds)
    return [{"structure": name, "width": width, **each} for (name, width), each in times.items()]


def measure(chosen: Row, found: Row) -> Row:
    """The times of all steps, and what follows from them."""
    kept = found | in_lists(found["rows"], LISTS) | {"times": {}}
    for task in values(found["rows"], "task"):
        rows = select(found["rows"], task=task)
        grid = values(rows, "structure"), values(rows, "width")
        kept["times"][task] = time_steps(task, *grid, chosen["batch"], chosen["timed"])
    summaries = {task: summarise(of_kept(kept, task)) for task in kept["times"]}
    holds = {task: claims(summary) for task, summary in summaries.items()}
    return {"times": kept["times"], "summaries": summaries, "claims": holds}


# ---- what was found ------------------------------------------------------------------------------


def summarise(found: Search) -> dict[str, Any]:
    """Standings, frontier and effects by cost."""
    summary: dict[str, Any] = {"exponents": exponents(found.rows)}
    for cost in COSTS:
        kept = Search(tuple(row for row in found.rows if in_class(row)))
        summary[cost] = {
            "standings": [asdict(standing) for standing in found.standings(cost)],
            "frontier": asdict(found.frontier(cost)),
            "effects": {name: asdict(each) for name, each in found.effects(cost).items()},
            "class nu": asdict(kept.effects(cost)["nu"]),
        }
    return summary


def in_class(row: Trial) -> bool:
    """Whether a model shares hardly any parameter and has full rank."""
    return row.omega <= CLASS["omega"] and row.psi >= CLASS["psi"]


def exponents(rows: Sequence[Trial]) -> dict[str, Estimate]:
    """a of loss ~ FLOPs^-a over the widths: dense's, the mean of the other structures without
    sharing and of full rank, and the difference, by seed."""
    curves: dict[tuple[str, int], Curve] = defaultdict(list)
    for row in rows:
        if row.loss is not None and in_class(row):
            curves[row.structure, row.seed].append((math.log(row.flops), math.log(row.loss)))
    slopes: dict[int, dict[str, float]] = defaultdict(dict)
    for (name, seed), curve in curves.items():
        if len(curve) > 1:
            slopes[seed][name] = exponent(curve)
    dense = [by_name["dense"] for by_name in slopes.values()]
    others = [fmean(v for k, v in by_name.items() if k != "dense") for by_name in slopes.values()]
    return {
        "dense": student(dense),
        "class": student(others),
        "difference": differences(others, dense),
    }


def claims(summary: Row) -> dict[str, bool | None]:
    """The paper's findings at equal FLOPs; None: undecided. Factors are those of a rise by 0.5."""
    found = summary["flops"]
    effects, nu = found["effects"], {end: value - 1 for end, value in found["class nu"].items()}
    return {
        "less parameter sharing (omega) has the lower loss": above(effects["omega"], 1),
        "more rank (psi) has the lower loss": below(effects["psi"], 1),
        "among structures of full rank without sharing, compute (nu) changes the loss by at most a "
        "tenth": within(nu, NEGLIGIBLE - 1),
    }


def of_kept(result: dict[str, Any], task: str) -> Search:
    """The search whose rows a result has, with the seconds that were timed."""
    steps = result["setting"]["steps"][task]
    seconds = {
        (row["structure"], row["width"]): steps * row["median"] / 1e3
        for row in result["times"][task]
    }
    trials = [Trial(**row) for row in result["rows"][task]]
    return Search(tuple(replace(t, seconds=seconds[t.structure, t.width]) for t in trials))


def show_effects(result: Row) -> str:
    """By what the loss is multiplied if a measure rises by 0.5, at equal cost."""
    rows = []
    for task, summary in result["summaries"].items():
        for cost in COSTS:
            found = summary[cost]["effects"]
            cells = [report.interval(found[name], 2, report.same) for name in MEASURES]
            rows.append([f"{task}, equal {'FLOPs' if cost == 'flops' else cost}", *cells])
    return report.table(["", *(f"{name} + 0.5" for name in MEASURES)], rows)


def show_places(result: Row) -> str:
    """Which place each family has among all structures at equal FLOPs, and its loss over that of
    the common curve, task by task."""
    tasks = list(result["summaries"])
    found: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for task in tasks:
        standings = result["summaries"][task]["flops"]["standings"]
        for place, row in enumerate(standings, start=1):
            if row["structure"] in FAMILIES:
                found[row["structure"]].append(f"{place} ({row['ratio']['value']:.2f})")
    return report.table(["", *tasks], [[name, *cells] for name, cells in found.items()])


def show(result: Row) -> list[Any]:
    slopes = {task: summary["exponents"] for task, summary in result["summaries"].items()}
    tables = report.tables({"claims": result["claims"], "exponents": slopes})
    return [show_effects(result), show_places(result), *tables]


def draw(result: Row) -> figures.Figure:
    places = [(task, cost) for task in result["summaries"] for cost in COSTS]
    figure, grid = figures.panels(places, columns=len(COSTS), size=5)
    for axes, (task, cost) in zip(grid, places, strict=True):
        of_kept(result, task).draw(axes, cost)
        text = "FLOPs of a forward pass of one sample" if cost == "flops" else "seconds"
        axes.set(title=task, xlabel=text, ylabel="loss on new samples")
    return figure


EXPERIMENT = Experiment(
    name="search",
    about=__doc__,
    run=train,
    axes={
        "task": [*KINDS],
        "structure": [*STRUCTURES],
        "width": lambda job: WIDTHS[job["task"]],
    },
    lists=LISTS,
    sizes={"steps": STEPS, "batch": BATCH},
    note={"lr": LR, "optimizer": "Adam, cosine"},
    smoke={
        # not text: there the narrowest model is the best for long, and one point is no frontier
        "task": ["teacher", "digits"],
        "structure": [*draw_structures(1)],
        "width": [64, 256],
        "steps": {"teacher": 2, "digits": 2},
        "timed": 0.0,
    },
    extra={"timed": 15.0},
    analyse=lambda rows: {},
    beside=measure,
    show=show,
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
