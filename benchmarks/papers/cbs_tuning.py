"""Does the structure-aware rule still matter in an MLP that is structured throughout, once the
learning rate is tuned?

    python -m benchmarks.papers.cbs_tuning            # the full result, five core-minutes
    python -m benchmarks.papers.cbs_tuning --smoke    # seconds
    python -m benchmarks.papers.cbs_tuning --structures low-rank    # the others' rows are kept

A question of ours. "Compute Better Spent" calls the rule necessary for tuned rates where structures
differ across layers, and shows it with a structured FFN beside dense attention (figure 3); in an
MLP that is structured throughout a tuned naive rate is nearly the aware one. Its figure 1c, where
nothing is tuned, is `cbs_untuned`.

Here: the MLP of `tasks.mlp` on `tasks.Teacher`, 120 steps of Adam with a cosine, widths 64 and 256
(the paper: up to 4096), a grid of rates in factors of 2. Three ways to choose the rate are
compared, all by the geometric mean of the loss over the seeds:

- tuned: the best of the grid for this structure, width and rule;
- moved: the best of the grid for this structure and rule at width 64, taken to 256 by muP;
- dense's: the best of the dense model at width 64, what somebody uses who swaps the layers and
  tunes nothing.

Where all cores of a layer have the same multiplier (Kronecker, BTT of rank 1), the two rules differ
in one thing only: how fast the cores learn relative to the other parameters, here the first layer,
the head and the biases. So a third rule is run, aware with the others four times faster: it tells a
gain of the naive rule's cores from one of its others.

BlockDiagonal and BTT with three cores are here so that with results/lr_transfer.json every
structure has its landscape of figure 2b.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import structlin
from benchmarks.lr_transfer import best_lrs
from benchmarks.papers import tasks
from benchmarks.papers.cbs_report import Claim, claim, show_claims
from benchmarks.runs import ONLY, keep, parser, rows_of_others, run_all

STRUCTURES: dict[str, Callable[[int], structlin.Family]] = {
    "dense": lambda width: structlin.Dense(),
    "low-rank": lambda width: structlin.LowRank(rank=math.isqrt(width)),
    "Kronecker": lambda width: structlin.Kronecker(),
    "TT r=4": lambda width: structlin.TT(rank=4),
    "BlockDiagonal b=4": lambda width: structlin.BlockDiagonal(blocks=4),
    "BTT r=1": lambda width: structlin.BTT(rank=1),
    "BTT r=4": lambda width: structlin.BTT(rank=4),
    "BTT r=1, 3 cores": lambda width: structlin.BTT(rank=1, cores=3),
}
LRS = {  # of each rule
    "naive": [2.0**power for power in range(-7, -2)],
    "aware": [2.0**power for power in range(-7, -3)],
    "aware, others x4": [2.0**power for power in range(-9, -4)],
}
WIDTHS = (tasks.BASE_WIDTH, 256)
STEPS = 120
CHOICES = ("tuned", "moved", "dense's")
TIE = 0.01  # losses closer than this, relatively, are called equal

Run = tuple[str, int, str, float, int, int]  # structure, width, rule, lr, seed, steps


def train(run: Run) -> dict[str, Any]:
    structure, width, rule, lr, seed, steps = run
    family, others = STRUCTURES[structure](width), 4.0 if rule.endswith("x4") else 1.0
    aware = rule != "naive"
    result = tasks.train_mlp(
        "teacher", family, width, lr, seed, steps, aware=aware, others=others, batch=128
    )
    return {
        "structure": structure,
        "width": width,
        "rule": rule,
        "lr": lr,
        "seed": seed,
        "loss": result["loss"],
    }


def tabulate(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each structure, width and rule: the best rate, and the loss at each of the three choices
    (None: not run, or diverged)."""
    best, table = best_lrs(rows), []
    dense, _ = best["dense", tasks.BASE_WIDTH, "aware"]
    for (structure, width, rule), (lr, means) in best.items():
        small, _ = best[structure, tasks.BASE_WIDTH, rule]
        losses = {
            name: means.get(rate, math.inf)
            for name, rate in (("tuned", lr), ("moved", small), ("dense's", dense))
        }
        losses = {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}
        at_end = lr in (min(means), max(means))
        table.append(
            {
                "structure": structure,
                "width": width,
                "rule": rule,
                "best_lr": lr,
                "at_end": at_end,
                **losses,
            }
        )
    return table


def advantages(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """naive loss / the rule's loss for each structure, width and choice of the rate; above 1 the
    rule wins."""
    cells = {(row["structure"], row["width"], row["rule"]): row for row in table}
    found = []
    for (structure, width, rule), row in cells.items():
        naive = cells.get((structure, width, "naive"))
        if rule != "naive" and naive is not None:
            ratios = {
                name: naive[name] / row[name] if naive[name] and row[name] else None
                for name in CHOICES
            }
            found.append({"structure": structure, "width": width, "rule": rule, **ratios})
    return found


def claims(result: dict[str, Any]) -> list[Claim]:
    """What one might expect of the rule; the paper does not claim it of such networks."""
    rows, found, means = result["advantages"], [], {}
    for width, choice, rule in product(WIDTHS, CHOICES, ("aware", "aware, others x4")):
        here = [
            row[choice]
            for row in rows
            if (row["width"], row["rule"]) == (width, rule) and row[choice]
        ]
        if (
            not here
            or (choice == "moved" and width == tasks.BASE_WIDTH)
            or (choice != "tuned" and rule != "aware")
        ):
            continue
        wins, losses = (
            sum(ratio > 1 + TIE for ratio in here),
            sum(ratio < 1 - TIE for ratio in here),
        )
        mean = means[width, choice, rule] = math.exp(sum(map(math.log, here)) / len(here))
        measured = (
            f"{wins} structures lower, {losses} higher, of {len(here)}; "
            f"naive / {rule} {mean:.2f} on average"
        )
        text = f"width {width}, {choice} rate: the rule ({rule}) ends lower than naive"
        found.append(claim(text, wins > losses and mean > 1 + TIE, measured))
    for choice in ("tuned", "dense's"):
        grown = [means.get((width, choice, "aware"), math.nan) for width in WIDTHS]
        measured = ", ".join(
            f"{mean:.2f} at {width}" for width, mean in zip(WIDTHS, grown, strict=True)
        )
        text = f"{choice} rate: naive / aware grows with width"
        found.append(claim(text, grown[-1] > grown[0] + TIE, measured))
    return found


# ---- the program ---------------------------------------------------------------------------------


def show(table: list[dict[str, Any]], console: Console) -> None:
    shown = Table(title="loss by the choice of the learning rate")
    for title in ("structure", "width", "rule", "log2 best lr", *CHOICES):
        shown.add_column(title, justify="left" if title in ("structure", "rule") else "right")
    for row in table:
        losses = [f"{row[name]:.4f}" if row[name] else "-" for name in CHOICES]
        lr = f"{math.log2(row['best_lr']):g}" + (" (end of grid)" if row["at_end"] else "")
        shown.add_row(row["structure"], str(row["width"]), row["rule"], lr, *losses)
    console.print(shown)


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(15, 6.4), layout="constrained")
    for axes, structure in zip(figure.subplots(2, 4).flat, STRUCTURES, strict=True):
        best = best_lrs(row for row in rows if row["structure"] == structure)
        for (_, width, rule), (_, means) in sorted(best.items()):
            style = {
                "color": f"C{WIDTHS.index(width)}",
                "ls": dict(zip(LRS, ("--", "-", ":"), strict=True))[rule],
            }
            finite = {lr: mean for lr, mean in means.items() if math.isfinite(mean)}
            axes.plot(
                list(finite), list(finite.values()), marker=".", label=f"{width}, {rule}", **style
            )
        axes.set_xscale("log", base=2)
        axes.set(title=structure, xlabel="base learning rate", yscale="log")
        axes.legend(fontsize="x-small")
    return figure


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--structures", nargs="+", choices=list(STRUCTURES), help=ONLY)
    arguments = options.parse_args(argv)
    steps, seeds = (2, 1) if arguments.smoke else (STEPS, arguments.seeds)
    setting = {"steps": steps, "batch": 128, "optimizer": "Adam, cosine", "lrs": LRS}
    chosen, others, source = arguments.structures or list(STRUCTURES), [], None
    if arguments.structures:
        others, source = rows_of_others(arguments, "cbs_tuning", setting, chosen)
    runs: list[Run] = [
        (structure, width, rule, lr, seed, steps)
        for width, structure, rule, seed in product(reversed(WIDTHS), chosen, LRS, range(seeds))
        for lr in (LRS[rule][:2] if arguments.smoke else LRS[rule])
        if rule != "naive" or structure != "dense"  # for dense both rules are the same
    ]
    rows = [*others, *run_all(train, runs, arguments)]
    rows.sort(key=lambda row: (-row["width"], list(STRUCTURES).index(row["structure"])))
    result: dict[str, Any] = {"setting": setting, "kept": source, "table": tabulate(rows)}
    result["advantages"] = advantages(result["table"])
    result["claims"] = claims(result)
    console = Console(width=120)
    show(result["table"], console)
    show_claims(result["claims"], console, "expectations of ours")
    keep(arguments, "cbs_tuning", plot(rows), **result, rows=rows)


if __name__ == "__main__":
    main()
