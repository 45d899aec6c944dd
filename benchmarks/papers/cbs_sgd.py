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

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.models import BASE_WIDTH
from benchmarks.harness.statistics import select, shifts, values
from benchmarks.papers.cbs import TASKS, rules, train_mlp

STRUCTURES = ("dense", "low-rank", "Kronecker", "TT r=4", "BTT r=4")
LRS = [2.0**power for power in range(-2, 3)]
LOW = [2.0**-4, 2.0**-3]  # of low-rank too, whose first core is large
BATCH = 128


def train(
    task: str, structure: str, width: int, rule: str, lr: float, seed: int, steps: int
) -> Row:
    found = train_mlp(
        task, structure, width, lr, seed, steps, rule=rule, optimizer="sgd", batch=BATCH
    )
    return {"loss": found["loss"]}


EXPERIMENT = Experiment(
    name="papers/cbs_sgd",
    about=__doc__,
    run=train,
    axes={
        "task": [*TASKS],
        "structure": STRUCTURES,
        "width": [BASE_WIDTH, 256],
        "rule": rules,
        "lr": lambda job: [*(LOW if job["structure"] == "low-rank" else []), *LRS],
    },
    seeds=2,
    sizes={"steps": 80},
    note={"batch": BATCH, "optimizer": "SGD, cosine"},
    smoke={"steps": 2, "lr": LRS[:2], "seeds": 1},
    analyse=lambda rows: {
        "shifts": {
            task: shifts(select(rows, task=task), BASE_WIDTH) for task in values(rows, "task")
        }
    },
    draw=lambda result: figures.rates(
        result["rows"], panel=["task", "structure"], line=["rule", "width"]
    ),
)

if __name__ == "__main__":
    EXPERIMENT.main()
