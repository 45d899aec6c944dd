"""Does the dense model's learning rate carry over to structures under SGD? Appendix H of "Compute
Better Spent".

    python -m benchmarks.papers.cbs_sgd            # the full result, four core-minutes
    python -m benchmarks.papers.cbs_sgd --smoke    # seconds
    python -m benchmarks.papers.cbs_sgd --structures low-rank    # the others' rows are kept

The paper derives for SGD another rule than for Adam: a core's rate is (fan_out / fan_in) / (d_out /
d_in) that of a dense layer, so for low-rank V rank / d and U d / rank. It does not test it: that
with it the dense model's best rate is the structure's too, and that it is not with the naive rule
(every core at the dense layer's rate), are hypotheses of ours.

Here: the MLP of `tasks.mlp`, plain SGD with a cosine, 80 steps of 128 samples, widths 64 and 256,
rates in factors of 2 (low-rank's from a quarter of the others' lowest on, for its first core is
large), muP across widths. Two tasks: `tasks.Teacher` and the digits. A structure's
shift is log2 of its best rate over that of the dense model at width 64.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import structlin
from benchmarks.lr_transfer import best_lrs, shifts
from benchmarks.papers import tasks
from benchmarks.papers.cbs_report import Claim, claim, show_claims
from benchmarks.runs import ONLY, keep, parser, rows_of_others, run_all

STRUCTURES: dict[str, Callable[[int], structlin.Family]] = {
    "dense": lambda width: structlin.Dense(),
    "low-rank": lambda width: structlin.LowRank(rank=math.isqrt(width)),
    "Kronecker": lambda width: structlin.Kronecker(),
    "TT r=4": lambda width: structlin.TT(rank=4),
    "BTT r=4": lambda width: structlin.BTT(rank=4),
}
RULES = ("naive", "aware")
WIDTHS = (tasks.BASE_WIDTH, 256)
LRS = [2.0**power for power in range(-2, 3)]
LOW = [2.0**-4, 2.0**-3]  # of low-rank too, whose first core is large
STEPS = 80

Run = tuple[str, str, int, str, float, int, int]  # task, structure, width, rule, lr, seed, steps


def train(run: Run) -> dict[str, Any]:
    task, structure, width, rule, lr, seed, steps = run
    family, aware = STRUCTURES[structure](width), rule == "aware"
    result = tasks.train_mlp(
        task, family, width, lr, seed, steps, aware=aware, optimizer="sgd", batch=128
    )
    row = {
        "task": task,
        "structure": structure,
        "width": width,
        "rule": rule,
        "lr": lr,
        "seed": seed,
    }
    return row | {"loss": result["loss"]}


def at_dense_rate(table: list[dict[str, Any]], rule: str) -> dict[str, float]:
    """Over structures and widths: how often the dense model's best rate diverges, and what it costs
    where it does not (geometric mean of the loss over the least one)."""
    rows = [row for row in table if row["rule"] == rule and row["structure"] != "dense"]
    finite = [row for row in rows if row["loss_at_reference_lr"] is not None]
    logs = [math.log(row["loss_at_reference_lr"] / row["best_loss"]) for row in finite]
    cost = math.exp(sum(logs) / len(logs)) if logs else math.nan
    return {"diverged": len(rows) - len(finite), "of": len(rows), "cost": cost}


def claims(result: dict[str, Any]) -> list[Claim]:
    found = []
    for task, moved in result["shifts"].items():
        mean, largest = moved["mean_shift"], moved["largest_shift"]
        measured = ", ".join(
            f"{rule} {mean[rule]:.2f} on average, {largest[rule]:.0f} at most" for rule in RULES
        )
        text = (
            f"{task}: the best rate stays nearer to dense's with the rule than without "
            "(factors of 2)"
        )
        found.append(claim(text, mean["aware"] < mean["naive"], measured))
        text = f"{task}: with the rule it is within a factor of 2 for every structure and width"
        found.append(
            claim(text, largest["aware"] <= 1, f"{largest['aware']:.0f} factors of 2 at most")
        )
        costs = {rule: at_dense_rate(moved["table"], rule) for rule in RULES}
        shown = [f"{rule} {cost['diverged']} of {cost['of']}" for rule, cost in costs.items()]
        text = f"{task}: dense's best rate diverges less often with the rule than without"
        found.append(
            claim(text, costs["aware"]["diverged"] < costs["naive"]["diverged"], ", ".join(shown))
        )
    return found


# ---- the program ---------------------------------------------------------------------------------


def show(found: dict[str, Any], console: Console) -> None:
    for task, moved in found.items():
        cells = {(row["structure"], row["width"], row["rule"]): row for row in moved["table"]}
        table = Table(
            title=f"{task}: shift of the best rate from dense's, "
            f"2^{math.log2(moved['reference_lr']):g}; least loss"
        )
        table.add_column("structure")
        for rule, width in product(RULES, WIDTHS):
            table.add_column(f"{rule} {width}", justify="right")
        for structure in STRUCTURES:
            rows = [cells.get((structure, width, rule)) for rule, width in product(RULES, WIDTHS)]
            table.add_row(
                structure,
                *(f"{row['shift']:+.0f}; {row['best_loss']:.3f}" if row else "" for row in rows),
            )
        console.print(table)


def plot(rows: list[dict[str, Any]]) -> Figure:
    names = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(3 * len(STRUCTURES), 3.2 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), len(STRUCTURES), sharey="row", squeeze=False)
    for (line, task), (column, structure) in product(enumerate(names), enumerate(STRUCTURES)):
        axes = grid[line, column]
        best = best_lrs(row for row in rows if (row["task"], row["structure"]) == (task, structure))
        for (_, width, rule), (_, means) in sorted(best.items()):
            finite = {lr: mean for lr, mean in means.items() if math.isfinite(mean)}
            style = {"color": f"C{WIDTHS.index(width)}", "ls": "-" if rule == "aware" else "--"}
            axes.plot(
                list(finite), list(finite.values()), marker=".", label=f"{width}, {rule}", **style
            )
        axes.set_xscale("log", base=2)
        axes.set(title=f"{task}: {structure}", xlabel="base learning rate", yscale="log")
        axes.legend(fontsize="small")
    return figure


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--structures", nargs="+", choices=list(STRUCTURES), help=ONLY)
    arguments = options.parse_args(argv)
    low, lrs, steps, seeds = LOW, LRS, STEPS, arguments.seeds
    if arguments.smoke:
        low, lrs, steps, seeds = [], LRS[:2], 2, 1
    setting = {"steps": steps, "batch": 128, "optimizer": "SGD, cosine"}
    chosen, others, source = arguments.structures or list(STRUCTURES), [], None
    if arguments.structures:
        others, source = rows_of_others(arguments, "cbs_sgd", setting, chosen)
    runs: list[Run] = [
        (task, structure, width, rule, lr, seed, steps)
        for width, task, structure, rule, seed in product(
            reversed(WIDTHS), tasks.TASKS, chosen, RULES, range(seeds)
        )
        for lr in (low + lrs if structure == "low-rank" else lrs)
        if rule == "aware" or structure != "dense"  # for dense both rules are the same
    ]
    rows = [*others, *run_all(train, runs, arguments)]
    rows.sort(key=lambda row: (-row["width"], list(STRUCTURES).index(row["structure"])))
    found = {task: shifts([row for row in rows if row["task"] == task]) for task in tasks.TASKS}
    result: dict[str, Any] = {"setting": setting, "kept": source, "shifts": found}
    result["claims"] = claims(result)
    console = Console(width=120)
    show(found, console)
    show_claims(result["claims"], console, "hypotheses of ours")
    keep(arguments, "cbs_sgd", plot(rows), **result, rows=rows)


if __name__ == "__main__":
    main()
