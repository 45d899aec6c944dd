"""Which structures of the two-core einsum space train best, and what do they have in common?

    python -m benchmarks.training.search                  # results/search.{json,png}
    python -m benchmarks.training.search --tasks teacher  # its runs alone
    python -m benchmarks.training.search --times          # the timing alone
    python -m benchmarks.training.search --report digits  # a result of one task alone
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
models take turns. Runs and times are kept in --runs as they finish, and the same command goes on.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

import structlin
from benchmarks.harness import models, tasks, training
from benchmarks.harness.experiment import keep, parser
from benchmarks.harness.record import RESULTS, save_json
from benchmarks.harness.report import table
from benchmarks.harness.statistics import Estimate, above, below, student, within
from benchmarks.harness.timing import interleaved, spread, wall
from structlin.search import Einsum, Search, Trial, run, sample

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_mlp_lm

# the best of powers of 2 for the dense model at width 64
LR = {"teacher": 2.0**-6, "digits": 2.0**-6, "text": 2.0**-7}
STEPS = {"teacher": 400, "digits": 200, "text": 800}
WIDTHS = {"teacher": [64, 256, 512], "digits": [64, 256, 512], "text": [64, 256]}
BATCH, SAMPLES = 256, 8192
SEEDS = 3
DRAWN = 9  # of each kind
COSTS = ("flops", "seconds")
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
SHARING = 0.3
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


class Text:
    """The next character after 16 of the standard library's text; the last tenth is held out."""

    inputs, depth = 16, 3
    loss = staticmethod(F.cross_entropy)

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(1_000_003 * seed + 3)

    def batch(self, size: int) -> tasks.Batch:
        text = read_text()
        starts = torch.randint(len(text.train) - self.inputs, (size,), generator=self.random)
        return text.windows(text.train, starts)


@cache
def read_text() -> train_mlp_lm.NextCharacter:
    options = {"data": None, "context": Text.inputs, "depth": Text.depth}
    with torch.device("cpu"):  # also where a model is made without values
        return train_mlp_lm.NextCharacter(argparse.Namespace(**options, seed=0, steps=0, batch=0))


KINDS: dict[str, Any] = {"teacher": tasks.Teacher, "digits": tasks.Digits, "text": Text}
STRUCTURED = {"text": ["blocks.*.linear"]}  # layers; of the others the two square ones


def build(task: str, width: int) -> nn.Module:
    if task == "text":
        return read_text().model(width)
    kind = KINDS[task]
    return models.dense_mlp(kind.inputs, width, kind.outputs)


def structured(task: str) -> list[str]:
    return STRUCTURED.get(task, ["2", "4"])


def heldout_batch(task: str, seed: int, samples: int) -> tasks.Batch:
    """Samples that no training sees."""
    if task == "text":
        inputs, targets = zip(*read_text().heldout, strict=True)
        return torch.cat(inputs)[:samples], torch.cat(targets)[:samples]
    new: tasks.Batch = KINDS[task](seed).new(samples)
    return new


def train(
    task: str, steps: int, samples: int, model: nn.Module, groups: list[dict[str, Any]], seed: int
) -> float:
    """The loss on samples that it was not trained on."""
    kind = KINDS[task]
    data = kind(seed)

    def loss(step: int) -> Tensor:
        x, y = data.batch(BATCH)
        return kind.loss(model(x), y)

    training.descend(torch.optim.Adam(groups), loss, steps)
    with torch.no_grad():
        x, y = heldout_batch(task, seed, samples)
        return kind.loss(model(x), y).item()


def time_steps(
    task: str, structures: dict[str, structlin.Family], widths: list[int], limit: float
) -> list[dict[str, Any]]:
    """Milliseconds of a training step of every model, in turns, on one batch."""
    kind = KINDS[task]
    x, y = kind(0).batch(BATCH)

    def work(family: structlin.Family, width: int) -> Callable[[], None]:
        model = structlin.convert(build(task, width), family, include=structured(task), init="mup")
        optimizer = torch.optim.Adam(structlin.param_groups(model, LR[task]))

        def step() -> None:
            optimizer.zero_grad()
            kind.loss(model(x), y).backward()
            optimizer.step()

        return step

    works = {(n, w): work(family, w) for n, family in structures.items() for w in widths}
    end = time.perf_counter() + limit
    times = interleaved(works, lambda step: wall(step, "cpu"), rounds=(3, 30), until=end)
    return [
        {"structure": name, "width": width, "rounds": len(samples) - 1}
        | {key: 1e3 * value for key, value in spread(samples[1:]).items()}  # the first warms up
        for (name, width), samples in times.items()
    ]


def kept_times(
    path: Path, task: str, structures: dict[str, structlin.Family], widths: list[int], limit: float
) -> list[dict[str, Any]]:
    """Those of the file, or new ones, which it then keeps; without a limit they are not kept."""
    if limit and path.exists():
        rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
        if {(row["structure"], row["width"]) for row in rows} == {
            (name, width) for name in structures for width in widths
        }:
            return rows
    rows = time_steps(task, structures, widths, limit)
    if limit:
        save_json(path, rows=rows)
    return rows


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
    curves: dict[tuple[str, int], list[Trial]] = defaultdict(list)
    for row in rows:
        if row.loss is not None and in_class(row):
            curves[row.structure, row.seed].append(row)
    slopes: dict[int, dict[str, float]] = defaultdict(dict)
    for (name, seed), curve in curves.items():
        if len(curve) > 1:
            x, y = ([math.log(v) for v in vs] for vs in zip(*map(point, curve), strict=True))
            slopes[seed][name] = -linear_regression(x, y).slope
    dense = [by_name["dense"] for by_name in slopes.values()]
    others = [fmean(v for k, v in by_name.items() if k != "dense") for by_name in slopes.values()]
    differences = [one - other for one, other in zip(others, dense, strict=True)]
    return {
        "dense": student(dense),
        "class": student(others),
        "difference": student(differences),
    }


def point(row: Trial) -> tuple[float, float]:
    assert row.loss is not None
    return row.flops, row.loss


def claims(summary: dict[str, Any]) -> dict[str, bool | None]:
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
    milliseconds = {(row["structure"], row["width"]): row for row in result["times"][task]}
    steps = result["setting"]["steps"][task]
    return Search(
        tuple(
            replace(
                Trial(**row),
                seconds=steps * milliseconds[row["structure"], row["width"]]["median"] / 1e3,
            )
            for row in result["rows"][task]
        )
    )


def show_effects(result: dict[str, Any]) -> str:
    """By what the loss is multiplied if a measure rises by 0.5, at equal cost."""
    rows = []
    for task, summary in result["summaries"].items():
        for cost in COSTS:
            found = summary[cost]["effects"]
            cells = [interval(found[name]) for name in ("omega", "psi", "nu")]
            rows.append([f"{task}, equal {'FLOPs' if cost == 'flops' else cost}", *cells])
    return table(["", "omega + 0.5", "psi + 0.5", "nu + 0.5"], rows)


def show_findings(result: dict[str, Any]) -> str:
    """What the paper says and what came out, task by task, as a list."""
    words = {True: "holds", False: "does not hold", None: "undecided"}
    lines = []
    for task, summary in result["summaries"].items():
        flops, rows = summary["flops"], result["rows"][task]
        lines += [
            f"{task}: {text}: **{words[holds]}**" for text, holds in result["claims"][task].items()
        ]
        nu, slopes = flops["class nu"], summary["exponents"]
        lines.append(
            f"{task}: among those of full rank without sharing nu + 0.5 multiplies the loss by "
            f"{interval(nu)}; their mean exponent of loss against FLOPs is "
            f"{interval(slopes['class'])}, dense's {interval(slopes['dense'])}"
        )
        best = {cost: summary[cost]["standings"][0]["structure"] for cost in COSTS}
        frontier = flops["frontier"]
        diverged = sum(row["loss"] is None for row in rows)
        sharing = [row["omega"] >= SHARING for row in flops["standings"]]
        ratios = [row["ratio"]["value"] for row in flops["standings"]]
        lines.append(
            f"{task}: the best at equal FLOPs is {best['flops']}, at equal seconds "
            f"{best['seconds']}; the frontier falls as FLOPs^-b with b = {interval(frontier['b'])} "
            f"to {interval(frontier['c'])}; the losses are {min(ratios):.2f} to "
            f"{max(ratios):.2f} of the common curve's at equal FLOPs; "
            f"{diverged} of {len(rows)} runs diverged; "
            f"{sum(sharing)} of {len(sharing)} structures have an omega of {SHARING} or more, on "
            "which what is said of omega rests"
        )
    return "\n".join(f"- {line}." for line in lines)


def interval(found: dict[str, float]) -> str:
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def show_places(result: dict[str, Any]) -> str:
    """Which place each family has among all structures at equal FLOPs, and its loss over that of
    the common curve, task by task."""
    tasks = list(result["summaries"])
    found: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for task in tasks:
        standings = result["summaries"][task]["flops"]["standings"]
        for place, row in enumerate(standings, start=1):
            if row["structure"] in FAMILIES:
                found[row["structure"]].append(f"{place} ({row['ratio']['value']:.2f})")
    return table(["", *tasks], [[name, *cells] for name, cells in found.items()])


def plot(result: dict[str, Any]) -> Figure:
    names = list(result["rows"])
    figure = Figure(figsize=(13, 5 * len(names)), layout="constrained")
    all_axes = figure.subplots(len(names), len(COSTS), squeeze=False)
    for task, row_of_axes in zip(names, all_axes, strict=True):
        found = of_kept(result, task)
        for cost, axes in zip(COSTS, row_of_axes, strict=True):
            found.draw(axes, cost)
            text = "FLOPs of a forward pass of one sample" if cost == "flops" else "seconds"
            axes.set(title=task, xlabel=text, ylabel="loss on new samples")
    return figure


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parser(__doc__, RESULTS)
    arguments.add_argument("--tasks", nargs="+", choices=list(STEPS), help="run these alone")
    reported = "tasks of the result (default: all)"
    arguments.add_argument("--report", nargs="+", choices=list(STEPS), help=reported)
    arguments.add_argument("--seeds", type=int, default=SEEDS)
    arguments.add_argument("--runs", type=Path, default=Path("out/search"), help="kept runs")
    arguments.add_argument("--times", action="store_true", help="measure steps alone")
    arguments.add_argument("--timed", type=float, default=15.0, help="seconds for each task")
    options = arguments.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    steps, drawn, samples = STEPS, DRAWN, SAMPLES
    if options.smoke:
        # not text: there the narrowest model is the best for long, and one point is no frontier
        steps, drawn, samples = {"teacher": 2, "digits": 2}, 1, 64
        options.seeds, options.timed = 2, 0.0
    torch.set_num_threads(1)
    structures = draw_structures(drawn)
    setting = {"steps": steps, "batch": BATCH, "lr": LR, "optimizer": "Adam, cosine"}
    result: dict[str, Any] = {"setting": setting, "rows": {}, "times": {}, "summaries": {}}
    console = Console(width=140)
    times = {
        task: partial(
            kept_times,
            options.runs / f"{task}_times.json",
            task,
            structures,
            WIDTHS[task],
            options.timed,
        )
        for task in options.report or steps
    }
    if options.times:
        return {task: measure() for task, measure in times.items()}
    for task in options.tasks or options.report or steps:
        found = run(
            partial(build, task),
            partial(train, task, steps[task], samples),
            structures,
            WIDTHS[task],
            lr=LR[task],
            base=models.BASE_WIDTH,
            seeds=range(options.seeds),
            example=heldout_batch(task, 0, 1)[0],
            include=structured(task),
            path=None if options.smoke else options.runs / f"{task}.json",
            setting={"experiment": setting, "task": task, "samples": samples},
        )
        result["rows"][task] = [asdict(row) for row in found.rows]
    if options.tasks and not options.smoke:
        return result
    result["claims"] = {}
    for task in result["rows"]:
        result["times"][task] = times[task]()
        found = of_kept(result, task)
        result["summaries"][task] = summarise(found)
        result["claims"][task] = claims(result["summaries"][task])
        console.print(f"{task}\n{found}", markup=False, highlight=False)
        for claim, holds in result["claims"][task].items():
            text = {True: "holds", False: "does NOT hold", None: "undecided"}[holds]
            console.print(f"{text}: {claim}")
    keep(options, "search", plot(result), **result)
    return result


if __name__ == "__main__":
    main()
