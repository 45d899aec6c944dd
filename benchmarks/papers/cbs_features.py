"""By how much does a training step change the features? Figure 2a of "Compute Better Spent".

    python -m benchmarks.papers.cbs_features            # results/papers/cbs_features.{json,png}
    python -m benchmarks.papers.cbs_features --smoke    # seconds

The paper (section 3.3): "We train an MLP with 2 hidden layers without bias on CIFAR-10 with width
16 to 4096 and a base learning rate 3e-3. For a given width, we track the root mean square (RMS) of
h_{t+1} - h_t at every step t, where h_t is the activation of the last layer before the
classification head. We then plot the average RMS over 500 steps. [...] structure-aware learning
rate scaling produces consistent feature learning for all structures used with no tuning. In
contrast, the naive approach causes much smaller or vanishing updates to the features. The effect is
most pronounced for BTT and Kronecker."

Here: that network, rate and quantity, with Monarch of 16 blocks as in the paper, but on
`tasks.Digits` in batches of 64, and widths 64 to 1024. h is read on 64 images that stay the same.
All matrices but the head's are structured (of low-rank not the first, as in appendix E.2); the head
starts at zero; Adam, no schedule. What the words mean was fixed before the runs: "consistent" is
within a factor of 2 from the least width to the largest, "much smaller" is below half of the aware
rule's at the largest.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn

import structlin
from benchmarks.papers import tasks
from benchmarks.papers.intervals import Estimate, student
from benchmarks.runs import keep, parser, run_all

STRUCTURES: dict[str, Callable[[int], structlin.Family]] = {
    "dense": lambda width: structlin.Dense(),
    "low-rank": lambda width: structlin.LowRank(rank=math.isqrt(width)),
    "Kronecker": lambda width: structlin.Kronecker(),
    "Monarch b=16": lambda width: structlin.Monarch(blocks=16),
    "BTT r=1": lambda width: structlin.BTT(rank=1),
}
RULES = ("naive", "aware")
WIDTHS = (64, 256, 1024)
LR, STEPS, BATCH = 3e-3, 500, 64

Run = tuple[str, int, str, int]  # structure, width, rule, seed


def build_mlp(structure: str, width: int) -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(tasks.Digits.inputs, width, bias=False), nn.ReLU(),
        nn.Linear(width, width, bias=False), nn.ReLU(),
        nn.Linear(width, tasks.Digits.outputs, bias=False),
    )  # fmt: skip
    nn.init.normal_(model[0].weight, std=tasks.Digits.inputs**-0.5)
    nn.init.zeros_(model[4].weight)
    include = ["2"] if structure == "low-rank" else ["0", "2"]
    return structlin.convert(model, STRUCTURES[structure](width), include=include, init="mup")


def train(run: Run, steps: int) -> dict[str, Any]:
    """A row: the mean over `steps` of the RMS by which a step changes the last features."""
    structure, width, rule, seed = run
    torch.manual_seed(seed)
    task, model = tasks.Digits(seed), build_mlp(structure, width)
    aware, base = rule == "aware", {width: tasks.BASE_WIDTH}
    groups = structlin.param_groups(model, LR, base=base, structure_aware=aware)
    optimizer, features = torch.optim.Adam(groups), model[:-1]
    probe, _ = task.batch(BATCH)
    with torch.no_grad():
        before = features(probe)  # (BATCH, width)
    changes = []
    for _ in range(steps):
        x, y = task.batch(BATCH)
        value = task.loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        with torch.no_grad():
            after = features(probe)
            changes.append((after - before).square().mean().sqrt().item())
        before = after
    named = {"structure": structure, "width": width, "rule": rule, "seed": seed}
    return {**named, "change": fmean(changes), "loss": value.item()}


# ---- what the rows say ---------------------------------------------------------------------------


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Estimates of logarithms, by structure: "growth" of each rule from the least width to the
    largest, and "shortfall", naive over aware at the largest; "pronounced", by how much less the
    shortfall of the first of a pair is than that of the second."""
    changes = {
        (row["structure"], row["rule"], row["width"], row["seed"]): math.log(row["change"])
        for row in rows
    }
    seeds = sorted({row["seed"] for row in rows})
    least, largest = (pick(row["width"] for row in rows) for pick in (min, max))
    structures = [name for name in STRUCTURES if name != "dense"]

    def growth(structure: str, rule: str, seed: int) -> float:
        last, first = (changes[structure, rule, width, seed] for width in (largest, least))
        return last - first

    def shortfall(structure: str, seed: int) -> float:
        naive, aware = (changes[structure, rule, largest, seed] for rule in RULES)
        return naive - aware

    def estimate(of: Callable[[int], float]) -> Estimate:
        return student([of(seed) for seed in seeds])

    return {
        "growth": {
            rule: {name: estimate(partial(growth, name, rule)) for name in structures}
            for rule in RULES
        },
        "dense": estimate(partial(growth, "dense", "aware")),
        "shortfall": {name: estimate(partial(shortfall, name)) for name in structures},
        "pronounced": [
            {
                "pair": pair,
                **estimate(
                    lambda seed, pair=pair: shortfall(pair[0], seed) - shortfall(pair[1], seed)
                ),
            }
            for pair in product(("BTT r=1", "Kronecker"), ("Monarch b=16", "low-rank"))
        ],
    }


# ---- the program ---------------------------------------------------------------------------------


def means(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[int, float]]:
    """(structure, rule) -> width -> geometric mean of the change over the seeds."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        key, width = (row["structure"], row["rule"]), row["width"]
        logs = [
            math.log(other["change"])
            for other in rows
            if (other["structure"], other["rule"], other["width"]) == (*key, width)
        ]
        found.setdefault(key, {})[width] = math.exp(fmean(logs))
    return {key: dict(sorted(by_width.items())) for key, by_width in found.items()}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="mean RMS change of the last features by a step")
    widths = sorted({row["width"] for row in rows})
    for title in ("structure", "rule", *map(str, widths)):
        table.add_column(title, justify="left" if title in ("structure", "rule") else "right")
    for (structure, rule), by_width in means(rows).items():
        table.add_row(structure, rule, *(f"{change:.3f}" for change in by_width.values()))
    console.print(table)


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes, colours = figure.subplots(), {name: f"C{n}" for n, name in enumerate(STRUCTURES)}
    for (structure, rule), by_width in means(rows).items():
        style = {"color": colours[structure], "ls": "-" if rule == "aware" else "--"}
        label = structure if structure == "dense" else f"{structure}, {rule}"
        axes.loglog(list(by_width), list(by_width.values()), marker="o", label=label, **style)
    axes.set(xlabel="width", ylabel="mean RMS change of the last features by a step")
    axes.legend(fontsize="small")
    return figure


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    steps, seeds = (3, 2) if arguments.smoke else (STEPS, arguments.seeds)
    runs: list[Run] = [
        (structure, width, rule, seed)
        for width, structure, rule, seed in product(
            WIDTHS[:2] if arguments.smoke else WIDTHS, STRUCTURES, RULES, range(seeds)
        )
        if rule == "aware" or structure != "dense"  # one core: both rules are the same
    ]
    runs.sort(key=lambda run: -run[1])
    rows = run_all(partial(train, steps=steps), runs, arguments)
    rows.sort(key=lambda row: (list(STRUCTURES).index(row["structure"]), row["rule"], row["width"]))
    setting = {"lr": LR, "steps": steps, "batch": BATCH, "optimizer": "Adam", "data": "digits"}
    show(rows, Console(width=120))
    keep(arguments, "cbs_features", plot(rows), setting=setting, **compare(rows), rows=rows)


if __name__ == "__main__":
    main()
