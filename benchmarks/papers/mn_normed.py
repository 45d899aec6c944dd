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
from itertools import product
from statistics import fmean

import torch

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import log_ratios, select, student, tuned, values
from benchmarks.papers import mn_tasks

LRS = {
    "normed Adam": [2.0**power for power in range(-3, 3)],
    "Adam": [2.0**power for power in range(-8, -2)],
    "normed SGD": [2.0**power for power in range(-3, 3)],
    "SGD": [2.0**power for power in range(-1, 5)],
}
BLOCKS, BATCH = 3, 64


def train(width: int, method: str, lr: float, seed: int, steps: int) -> dict[str, float | None]:
    """The losses are None where they are not finite."""
    torch.manual_seed(seed)
    net = mn_tasks.build("ResMLP", width=width, blocks=BLOCKS)
    return mn_tasks.fit(net, "ResMLP", method, lr, steps=steps, size=BATCH, seed=seed)


def compare(rows: list[Row]) -> list[Row]:
    """For each optimizer, width and set: the log of normed loss over plain loss, and both."""
    found = []
    for name, width, part in product(("Adam", "SGD"), values(rows, "width"), mn_tasks.SETS):
        normed, plain = (
            tuned(select(rows, width=width, method=method), part)
            for method in (f"normed {name}", name)
        )
        found.append(
            {
                "optimizer": name, "width": width, "set": part,
                **student(log_ratios(normed, plain)),
                "lrs": [normed["lr"], plain["lr"]],
                "at end": [normed["at end"], plain["at end"]],
                "losses": [math.exp(fmean(each["logs"].values())) for each in (normed, plain)],
            }
        )  # fmt: skip
    return found


EXPERIMENT = Experiment(
    name="papers/mn_normed",
    about=__doc__,
    run=train,
    axes={"width": [64], "method": [*LRS], "lr": lambda job: LRS[job["method"]]},
    sizes={"steps": 200},
    note={"blocks": BLOCKS, "batch": BATCH, "data": "digits, moved, noisy"},
    smoke={"steps": 3, "lr": lambda job: LRS[job["method"]][::5]},
    analyse=lambda rows: {"comparisons": compare(rows)},
    draw=lambda result: figures.rates(
        [
            row | {"set": part, "loss": row[part]}
            for row in result["rows"]
            for part in mn_tasks.SETS
        ],
        panel=["width", "set"],
        line=["method"],
    ),
)

if __name__ == "__main__":
    EXPERIMENT.main()
