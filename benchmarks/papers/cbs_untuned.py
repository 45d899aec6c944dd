"""Do structured models saturate where each core has the dense layer's rate? Figure 1c of "Compute
Better Spent".

    python -m benchmarks.papers.cbs_untuned            # results/papers/cbs_untuned.json
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
from collections.abc import Sequence
from functools import partial, reduce
from itertools import chain
from typing import Any

from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.record import read
from benchmarks.harness.report import factor, least_and_most, number
from benchmarks.harness.shown import Claim
from benchmarks.harness.statistics import (
    Curve,
    Estimate,
    above,
    below,
    curve_of,
    exponent,
    gap,
    seeds_of,
    select,
    student,
    values,
)
from benchmarks.papers.cbs_scaling import LR, STEPS, WIDTHS, train

RULES = ("naive", "aware")

NAMES = ("BTT r=1", "Kronecker", "Monarch b=4")


def read_aware() -> list[Row]:
    """The rows of the aware rule, and dense's."""
    rows: list[Row] = read("papers/cbs_scaling")["rows"]
    return rows


def compare(naive: list[Row], aware: list[Row], dense: list[Row]) -> dict[str, Any]:
    """For one task and structure, over the seeds that all have: "exponents" of the two rules, the
    "share" of the aware one that the naive rule has, and log ratios to dense's loss at equal FLOPs,
    "against_dense"."""
    widths = values(naive, "width")
    seeds = seeds_of(naive)

    def curves(rows: list[Row]) -> list[Curve]:
        return [curve_of(rows, [seed]) for seed in seeds]

    curves_of_rule = {
        "naive": curves(naive),
        "aware": curves([row for row in aware if row["width"] in widths]),
    }
    exponents = {}
    against_dense = {}
    for rule, rule_curves in curves_of_rule.items():
        exponents[rule] = [*map(exponent, rule_curves)]
        against_dense[rule] = student([*map(gap, rule_curves, curves(dense))])
    pairs = zip(exponents["naive"], exponents["aware"], strict=True)
    return {
        "exponents": {rule: student(exponents[rule]) for rule in RULES},
        "share": student([naive_power / aware_power for naive_power, aware_power in pairs]),
        "against_dense": against_dense,
    }


def analyse(rows: list[Row]) -> Row:
    comparisons: dict[str, dict[str, Any]] = {}
    for task in sorted(values(rows, "task")):
        aware = select(read_aware(), task=task)
        dense = select(aware, structure="dense")
        comparisons[task] = {}
        for name in values(rows, "structure"):
            naive_runs = select(rows, task=task, structure=name)
            aware_runs = select(aware, structure=name)
            comparisons[task][name] = compare(naive_runs, aware_runs, dense)
    return {"comparisons": comparisons}


def both(result: Row, structure: str, *keys: str) -> list[Any]:
    """What `keys` name of a structure, on both tasks."""
    measured = []
    for by_structure in result["comparisons"].values():
        measured.append(reduce(dict.__getitem__, keys, by_structure[structure]))
    return measured


def shares(result: Row, structures: Sequence[str]) -> list[Estimate]:
    """The naive rule's share of the exponent, of each structure on both tasks."""
    return [*chain.from_iterable(both(result, name, "share") for name in structures)]


def words(result: Row, structure: str, *keys: str) -> str:
    show = number if keys == ("share",) else factor
    return " and ".join(map(show, both(result, structure, *keys)))


CLAIMS = [
    Claim(
        "CBS 1c",
        "structured models quickly saturate without the rule",
        '"structured models quickly saturate as they are scaled up without structure-aware '
        'learning rates" (nothing tuned but dense)',
        lambda result: (
            [below(share, 1 / 2) for share in shares(result, NAMES[:2])],
            "the naive rule's exponent is "
            + ", ".join(f"{words(result, n, 'share')} of the aware rule's ({n})" for n in NAMES[:2])
            + f"; {' and '.join(result['comparisons'])}, widths to 576; saturated: below half",
        ),
    ),
    Claim(
        "CBS 1c",
        "Monarch is an exception",
        '"Monarch is an exception" (4 blocks)',
        lambda result: (
            [above(share, 1 / 2) for share in shares(result, ["Monarch b=4"])],
            f"there the share is {words(result, 'Monarch b=4', 'share')}",
        ),
    ),
    Claim(
        "CBS 1c",
        "without the rule the benefit does not emerge",
        'without the rule "the benefit of structured layers does not emerge"',
        lambda result: (
            [
                *map(below, both(result, "BTT r=1", "against_dense", "aware")),
                *map(above, both(result, "BTT r=1", "against_dense", "naive")),
            ],
            f"at equal FLOPs BTT r=1 has {words(result, 'BTT r=1', 'against_dense', 'naive')} of "
            f"dense's loss without, {words(result, 'BTT r=1', 'against_dense', 'aware')} with it",
        ),
    ),
]


def numbers(result: Row) -> dict[str, str]:
    losses = {}
    for rule in RULES:
        gaps = both(result, "BTT r=1", "against_dense", rule)
        ratios = [f"{math.exp(gap['value']):.2f}" for gap in gaps]
        losses[f"cbs.untuned_{rule}"] = " and ".join(ratios)
    naive_shares = [share["value"] for share in shares(result, NAMES)]
    return losses | least_and_most("cbs.untuned_", naive_shares, ".2f")


EXPERIMENT = Experiment(
    name="papers/cbs_untuned",
    about=__doc__,
    numbers=numbers,
    claims=CLAIMS,
    place="results/compute_better_spent.md#nothing-tuned",
    run=partial(train, rule="naive"),
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
)

if __name__ == "__main__":
    EXPERIMENT.main()
