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

from typing import Any

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.record import read
from benchmarks.harness.statistics import (
    Curve,
    best_points,
    curve_of,
    exponent,
    gap,
    seeds_of,
    select,
    student,
    values,
)
from benchmarks.papers.cbs import RULES, train_mlp
from benchmarks.papers.cbs_scaling import LR, STEPS, WIDTHS

NAMES = ("BTT r=1", "Kronecker", "Monarch b=4")


def train(
    task: str, structure: str, width: int, lr: float, seed: int, steps: dict[str, int]
) -> Row:
    return train_mlp(task, structure, width, lr, seed, steps[task], rule="naive")


def kept() -> list[Row]:
    """The rows of the aware rule, and dense's."""
    rows: list[Row] = read("papers/cbs_scaling")["rows"]
    return rows


def compare(naive: list[Row], aware: list[Row], dense: list[Row]) -> dict[str, Any]:
    """For one task and structure, over the seeds that all have: "exponents" of the two rules, the
    "share" of the aware one that the naive rule has, and log ratios to dense's loss at equal FLOPs,
    "against_dense"."""
    widths, seeds = values(naive, "width"), seeds_of(naive)
    of_rule = {"naive": naive, "aware": [row for row in aware if row["width"] in widths]}

    def curves(rows: list[Row]) -> list[Curve]:
        return [curve_of(rows, [seed]) for seed in seeds]

    powers = {rule: [*map(exponent, curves(of_rule[rule]))] for rule in RULES}
    return {
        "exponents": {rule: student(powers[rule]) for rule in RULES},
        "share": student([n / a for n, a in zip(powers["naive"], powers["aware"], strict=True)]),
        "against_dense": {
            rule: student([*map(gap, curves(of_rule[rule]), curves(dense))]) for rule in RULES
        },
    }


def analyse(rows: list[Row]) -> Row:
    found: dict[str, dict[str, Any]] = {}
    for task in sorted(values(rows, "task")):
        aware = select(kept(), task=task)
        found[task] = {
            name: compare(
                select(rows, task=task, structure=name),
                select(aware, structure=name),
                select(aware, structure="dense"),
            )
            for name in values(rows, "structure")
        }
    return {"comparisons": found}


def draw(result: Row) -> figures.Figure:
    aware = [row for row in kept() if row["structure"] in ("dense", *NAMES)]
    found = [row | {"rule": "naive"} for row in result["rows"]]
    found += [row | {"rule": "aware"} for row in aware]
    points = best_points(found, "task", "structure", "rule")
    return figures.curves(points, "flops", panel=["task"], line=["structure", "rule"])


EXPERIMENT = Experiment(
    name="papers/cbs_untuned",
    about=__doc__,
    run=train,
    axes={
        "task": [*STEPS],
        "structure": NAMES,
        "width": lambda job: WIDTHS[job["structure"]],
        "lr": [LR],
    },
    sizes={"steps": STEPS},
    note={"batch": 256, "optimizer": "Adam, cosine", "lr": LR},
    smoke={"steps": {"digits": 2}, "task": ["digits"], "width": [64, 256]},
    analyse=analyse,
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
