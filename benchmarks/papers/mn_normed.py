"""Does normed training end lower than plain training, each at its best rate? MN appendix D.5.

    python -m benchmarks.papers.mn_normed            # results/papers/mn_normed.{json,png}
    python -m benchmarks.papers.mn_normed --smoke    # seconds

The paper (D.5, "Full sweeps", of GPTs on OpenWebText and TinyStories, ResMLP and ResNet on
CIFAR-10): "We consistently find that the normed Adam optimizer matches or outperforms unnormed Adam
in both test and training loss [...]. Notice too that normed SGD consistently significantly
outperforms ordinary SGD".

Here: the ResMLP of `mn_tasks`, of width 64 and 3 blocks. The plain optimizers make the steps of the
paper's parametrisation (`paper_groups`), where a layer multiplies by its scale in the
forward pass. The digits are moved and noisy (`tasks.Digits`), so that 200 steps do not bring the
loss to nothing; three quarters of the images are trained on, the others give the test loss. Every
method has the best of six rates, for the training and the test loss apart, by the mean of its
logarithm over the seeds; a best rate at an end of its grid is said to be one. The size, the steps
and the grids were fixed before the runs; "matches" is an interval over the seeds that ends below
1.05 of the plain optimizer's loss.
"""

import math
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.papers import mn_tasks, sweeps
from benchmarks.papers.cbs_report import ratio
from benchmarks.papers.intervals import student
from benchmarks.runs import keep, parser, run_all

LRS = {
    "normed Adam": [2.0**power for power in range(-3, 3)],
    "Adam": [2.0**power for power in range(-8, -2)],
    "normed SGD": [2.0**power for power in range(-3, 3)],
    "SGD": [2.0**power for power in range(-1, 5)],
}
BLOCKS, STEPS, BATCH = 3, 200, 64

Run = tuple[int, str, float, int]  # width, method, lr, seed


def train(run: Run, steps: int) -> dict[str, Any]:
    """A row; the losses are None where they are not finite."""
    width, method, lr, seed = run
    torch.manual_seed(seed)
    net = mn_tasks.build("ResMLP", width=width, blocks=BLOCKS)
    found = mn_tasks.fit(net, "ResMLP", method, lr, steps=steps, size=BATCH, seed=seed)
    return {"width": width, "method": method, "lr": lr, "seed": seed, **found}


# ---- what the rows say ---------------------------------------------------------------------------


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each optimizer, width and set: the log of normed loss over plain loss, and both."""
    widths, found = sorted({row["width"] for row in rows}), []
    for name, width, part in product(("Adam", "SGD"), widths, mn_tasks.SETS):
        normed, plain = (
            sweeps.tuned((row for row in rows if (row["width"], row["method"]) == key), part)
            for key in ((width, f"normed {name}"), (width, name))
        )
        ratios = [normed["logs"][seed] - plain["logs"][seed] for seed in sorted(plain["logs"])]
        found.append(
            {
                "optimizer": name, "width": width, "set": part, **student(ratios),
                "lrs": [normed["lr"], plain["lr"]],
                "at end": [normed["at end"], plain["at end"]],
                "losses": [math.exp(fmean(each["logs"].values())) for each in (normed, plain)],
            }
        )  # fmt: skip
    return found


# ---- the program ---------------------------------------------------------------------------------


def show(compared: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="normed against plain, each at its best rate")
    for title in ("optimizer", "width", "set", "normed", "plain", "normed / plain", "log2 rates"):
        table.add_column(title)
    for row in compared:
        ends = zip(row["lrs"], row["at end"], strict=True)
        table.add_row(
            row["optimizer"],
            str(row["width"]),
            row["set"],
            *(f"{loss:.3f}" for loss in row["losses"]),
            ratio(row),
            ", ".join(f"{math.log2(lr):+g}" + " (end)" * end for lr, end in ends),
        )
    console.print(table)


def plot(rows: list[dict[str, Any]]) -> Figure:
    widths = sorted({row["width"] for row in rows})
    figure = Figure(figsize=(5 * len(widths), 7), layout="constrained")
    grid = figure.subplots(2, len(widths), sharey="row", squeeze=False)
    for (line, part), (column, width) in product(enumerate(mn_tasks.SETS), enumerate(widths)):
        axes = grid[line, column]
        for n, method in enumerate(LRS):
            chosen = [row for row in rows if (row["width"], row["method"]) == (width, method)]
            finite = [row for row in chosen if row[part] is not None]
            rates = sorted({row["lr"] for row in finite})
            means = [
                math.exp(fmean(math.log(row[part]) for row in finite if row["lr"] == lr))
                for lr in rates
            ]
            axes.loglog(rates, means, ".-", color=f"C{n}", label=method)
        axes.set(title=f"width {width}, {part}", xlabel="learning rate", ylabel="loss (nats)")
        axes.legend(fontsize="small")
    return figure


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--widths", type=int, nargs="+", default=[64])
    arguments = options.parse_args()
    steps, seeds = (3, 2) if arguments.smoke else (STEPS, arguments.seeds)
    runs: list[Run] = [
        (width, method, lr, seed)
        for width, (method, lrs) in product(sorted(arguments.widths, reverse=True), LRS.items())
        for lr, seed in product(lrs[:: 5 if arguments.smoke else 1], range(seeds))
    ]
    rows = run_all(partial(train, steps=steps), runs, arguments)
    compared = compare(rows)
    show(compared, Console(width=120))
    setting = {"blocks": BLOCKS, "steps": steps, "batch": BATCH, "data": "digits, moved, noisy"}
    keep(arguments, "mn_normed", plot(rows), setting=setting, comparisons=compared, rows=rows)


if __name__ == "__main__":
    main()
