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

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.models import BASE_WIDTH
from benchmarks.harness.statistics import best, losses
from benchmarks.papers.cbs import train_mlp

STRUCTURES = (
    "dense",
    "low-rank",
    "Kronecker",
    "TT r=4",
    "BlockDiagonal b=4",
    "BTT r=1",
    "BTT r=4",
    "BTT r=1, 3 cores",
)
LRS = {  # of each rule
    "naive": [2.0**power for power in range(-7, -2)],
    "aware": [2.0**power for power in range(-7, -3)],
    "aware, others x4": [2.0**power for power in range(-9, -4)],
}
CHOICES = ("tuned", "moved", "dense's")
BATCH = 128


def train(structure: str, width: int, rule: str, lr: float, seed: int, steps: int) -> Row:
    rule, _, others = rule.partition(", others x")
    found = train_mlp(
        "teacher", structure, width, lr, seed, steps,
        rule=rule, others=float(others or 1), batch=BATCH,
    )  # fmt: skip
    return {"loss": found["loss"]}


def tabulate(rows: list[Row]) -> list[Row]:
    """For each structure, width and rule: the best rate, and the loss at each of the three choices
    (None: not run, or diverged)."""
    curves, table = losses(rows, by=("structure", "width", "rule")), []
    dense = best(curves["dense", BASE_WIDTH, "aware"])
    for (structure, width, rule), curve in curves.items():
        rates = (best(curve), best(curves[structure, BASE_WIDTH, rule]), dense)
        found = [curve.get(rate, math.inf) for rate in rates]
        table.append(
            {
                "structure": structure,
                "width": width,
                "rule": rule,
                "best_lr": rates[0],
                "at_end": rates[0] in (min(curve), max(curve)),
                **{
                    name: loss if math.isfinite(loss) else None
                    for name, loss in zip(CHOICES, found, strict=True)
                },
            }
        )
    return table


def advantages(table: list[Row]) -> list[Row]:
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


def analyse(rows: list[Row]) -> Row:
    table = tabulate(rows)
    return {"table": table, "advantages": advantages(table)}


EXPERIMENT = Experiment(
    name="papers/cbs_tuning",
    about=__doc__,
    run=train,
    axes={
        "structure": STRUCTURES,
        "width": [BASE_WIDTH, 256],
        "rule": lambda job: [*LRS][job["structure"] == "dense" :],  # for dense naive is aware
        "lr": lambda job: LRS[job["rule"]],
    },
    seeds=2,
    sizes={"steps": 120},
    note={"batch": BATCH, "optimizer": "Adam, cosine", "lrs": LRS},
    smoke={"steps": 2, "lr": lambda job: LRS[job["rule"]][:2], "seeds": 1},
    analyse=analyse,
    draw=lambda result: figures.rates(result["rows"], panel=["structure"], line=["rule", "width"]),
)

if __name__ == "__main__":
    EXPERIMENT.main()
