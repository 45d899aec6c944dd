"""Do structured models saturate where each core has the dense layer's rate? Figure 1c of "Compute
Better Spent".

    python -m benchmarks.papers.cbs_untuned            # results/papers/cbs_untuned.{json,png}
    python -m benchmarks.papers.cbs_untuned --smoke    # seconds

The paper (figure 1c): "Scaling the learning rate in a structure-aware fashion is crucial for
performance, without which the benefit of structured layers does not emerge." Section 3.3: "the
performance of structured models quickly saturate as they are scaled up without structure-aware
learning rates. Monarch is an exception, for which the multipliers in Table 2 are closer to 1
because we use b = 4." Nothing is tuned there but the dense model at a small width.

Here: the networks, the tasks, the steps and the rate of `cbs_scaling` (tuned for dense at width
64), trained by the naive rule; its kept rows have the aware rule's and dense's losses. Widths go to
576, the paper's to 16384.

"Saturate" is measured as the share of the aware rule's exponent (of loss ~ FLOPs^-a) that the naive
rule has: with less than half of it a structure saturates. "The benefit" is a loss below dense's at
equal FLOPs, where dense has the best of three rates at each width. Both were fixed before the runs.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.papers import cbs_scaling, tasks
from benchmarks.papers.cbs_report import interval, ratio
from benchmarks.papers.cbs_scaling import LR, STRUCTURES, curve_of, exponent, gap
from benchmarks.papers.intervals import student
from benchmarks.record import read
from benchmarks.runs import keep, parser, run_all

NAMES = ("BTT r=1", "Kronecker", "Monarch b=4")
RULES = ("naive", "aware")

Run = tuple[str, str, int, int, int]  # task, structure, width, seed, steps


def train(run: Run) -> dict[str, Any]:
    task, structure, width, seed, steps = run
    family = STRUCTURES[structure][0](width)
    result = tasks.train_mlp(task, family, width, LR, seed, steps, aware=False)
    return {"task": task, "structure": structure, "width": width, "lr": LR, "seed": seed, **result}


def compare(naive: list[dict[str, Any]], kept: list[dict[str, Any]]) -> dict[str, Any]:
    """For each task and structure, over the seeds that both have: "exponents" of the two rules, the
    "share" of the aware one that the naive rule has, and log ratios to dense's loss at equal FLOPs,
    "against_dense".

    Args:
        naive: rows of the naive rule.
        kept: rows of `cbs_scaling`.
    """
    return {
        task: {
            structure: _compare(
                {"naive": _of(naive, task, structure), "aware": _of(kept, task, structure)},
                _of(kept, task, "dense"),
            )
            for structure in NAMES
        }
        for task in sorted({row["task"] for row in naive})
    }


def _compare(rows: dict[str, list[dict[str, Any]]], dense: list[dict[str, Any]]) -> dict[str, Any]:
    widths = {row["width"] for row in rows["naive"]}
    rows = {rule: [row for row in rows[rule] if row["width"] in widths] for rule in RULES}
    seeds = sorted({row["seed"] for row in rows["naive"]})
    powers = {rule: [exponent(curve_of(rows[rule], [seed])) for seed in seeds] for rule in RULES}
    gaps = {
        rule: [gap(curve_of(rows[rule], [seed]), curve_of(dense, [seed])) for seed in seeds]
        for rule in RULES
    }
    return {
        "exponents": {rule: student(values) for rule, values in powers.items()},
        "share": student(
            [ours / theirs for ours, theirs in zip(powers["naive"], powers["aware"], strict=True)]
        ),
        "against_dense": {rule: student(values) for rule, values in gaps.items()},
    }


def _of(rows: Iterable[dict[str, Any]], task: str, structure: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["task"], row["structure"]) == (task, structure)]


# ---- the program ---------------------------------------------------------------------------------


def show(compared: dict[str, Any], console: Console) -> None:
    table = Table(title="nothing tuned: exponents, and loss / dense's at equal FLOPs")
    titles = ("task", "structure", "naive's exponent", "aware's", "share", "naive / dense")
    for title in (*titles, "aware / dense"):
        table.add_column(title)
    for task, by_structure in compared.items():
        for structure, found in by_structure.items():
            table.add_row(
                task,
                structure,
                *(interval(found["exponents"][rule]) for rule in RULES),
                interval(found["share"]),
                *(ratio(found["against_dense"][rule]) for rule in RULES),
            )
    console.print(table)


def plot(naive: list[dict[str, Any]], kept: list[dict[str, Any]]) -> Figure:
    names = sorted({row["task"] for row in naive})
    figure = Figure(figsize=(6 * len(names), 4.5), layout="constrained")

    def draw(axes: Any, rows: list[dict[str, Any]], **style: Any) -> None:
        curve = curve_of(rows, _seeds(rows))
        axes.loglog(*zip(*((math.exp(x), math.exp(y)) for x, y in curve), strict=True), **style)

    for axes, task in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        draw(axes, _of(kept, task, "dense"), color="0.3", marker="o", label="dense")
        for n, structure in enumerate(NAMES):
            for rows, rule, line in ((naive, "naive", "v--"), (kept, "aware", "o-")):
                style = {"color": f"C{n}", "marker": line[0], "ls": line[1:]}
                draw(axes, _of(rows, task, structure), label=f"{structure}, {rule}", **style)
        axes.set(title=task, xlabel="FLOPs of a forward pass", ylabel="loss on new samples")
        axes.legend(fontsize="small")
    return figure


def _seeds(rows: Iterable[dict[str, Any]]) -> Sequence[int]:
    return sorted({row["seed"] for row in rows})


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--seeds", type=int, default=3, help="those of cbs_scaling, from the first"
    )
    options.add_argument("--tasks", nargs="+", choices=tasks.TASKS, default=list(tasks.TASKS))
    arguments = options.parse_args()
    steps = {task: cbs_scaling.STEPS[task] for task in arguments.tasks}
    seeds = arguments.seeds
    widths = {name: STRUCTURES[name][1] for name in NAMES}
    if arguments.smoke:
        steps, seeds, widths = (
            {"digits": 2},
            2,
            {name: [64, all_[2]] for name, all_ in widths.items()},
        )
    runs: list[Run] = [
        (task, structure, width, seed, steps[task])
        for task in steps
        for structure in NAMES
        for width in widths[structure]
        for seed in range(seeds)
    ]
    runs.sort(key=lambda run: -run[2] * run[4])
    naive = run_all(train, runs, arguments)
    kept = read("papers/cbs_scaling")["rows"]
    compared = compare(naive, kept)
    show(compared, Console(width=140))
    setting = {"steps": steps, "batch": 256, "optimizer": "Adam, cosine", "lr": LR}
    content = {"setting": setting, "comparisons": compared, "rows": naive}
    keep(arguments, "cbs_untuned", plot(naive, kept), **content)


if __name__ == "__main__":
    main()
