"""Does dividing updates by their modular norm make the learning rate transfer? MN figures 1, 4 and
9 to 12.

    python -m benchmarks.papers.mn_transfer                  # results/papers/mn_transfer.{json,png}
    python -m benchmarks.papers.mn_transfer --networks GPT   # first this one; what is kept stays
    python -m benchmarks.papers.mn_transfer --smoke          # seconds

The paper, section 4: "normed optimization, with both Adam and SGD as the base optimizer, allows for
successful learning rate transfer across width and depth for GPT training on OpenWebText (Figure 1),
as well as ResMLP and ResNet training on CIFAR-10 (Figure 4)". D.5: normed Adam has "significantly
better transfer across width. The difference in depth transfer is less stark", it "matches or
outperforms unnormed Adam in both test and training loss", and "normed SGD consistently
significantly outperforms ordinary SGD".

Here: the networks of `mn_tasks`, 50 steps, 3 seeds; plain optimizers in the paper's
parametrisation. Rates go by factors of 2 from the best of the size before until the best has both
its neighbours, each the mean of the seeds' log losses; where the optimum lies between is the vertex
of a parabola, for each seed.

Fixed before the runs: a transfer is successful if from the smallest size to the largest the optimum
moves by less than a factor of 2; it is better than another if it moves by less, seed by seed; a
loss matches another if it is below 1.05 of it, both at their best rates.
"""

from itertools import product
from typing import Any

import torch

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row, Search
from benchmarks.harness.statistics import (
    Estimate,
    differences,
    log_ratios,
    moved_by_seed,
    select,
    student,
    tuned,
    values,
)
from benchmarks.papers import mn_tasks

SIZES = {
    "ResMLP": {"width": [16, 256], "blocks": [2, 18]},
    "ResNet": {"width": [8, 32], "blocks": [1, 6]},
    "GPT": {"width": [32, 64, 128], "blocks": [1, 6]},
}
BASE = {  # where only the other one changes
    "ResMLP": {"width": 32, "blocks": 3},
    "ResNet": {"width": 16, "blocks": 3},
    "GPT": {"width": 32, "blocks": 3},
}
STARTS = {  # log2 of the rates from which the search goes, at the smallest size
    "ResMLP": {"normed Adam": 0, "Adam": -5, "normed SGD": 0, "SGD": 2},
    "ResNet": {"normed Adam": 0, "Adam": -5, "normed SGD": 0, "SGD": 2},
    "GPT": {"normed Adam": 0, "Adam": -5, "normed SGD": 0, "SGD": 0},
}
SAMPLES = {"ResMLP": 64, "ResNet": 32, "GPT": 8}  # of a batch


def train(network: str, axis: str, method: str, size: int, lr: float, seed: int, steps: int) -> Row:
    torch.manual_seed(seed)
    net = mn_tasks.build(network, **{**BASE[network], axis: size})
    found = mn_tasks.fit(net, network, method, lr, steps=steps, size=SAMPLES[network], seed=seed)
    return {"loss": found["train"], "test": found["test"]}


def better(rows: list[Row], axis: str, first: tuple[str, str], second: tuple[str, str]) -> Estimate:
    """By how many factors of 2 more the optimum of the second (network, method) moves than that of
    the first, both without their signs."""
    ours, theirs = (
        moved_by_seed(select(rows, axis=axis, network=network, method=method))
        for network, method in (first, second)
    )
    return differences([*map(abs, theirs)], [*map(abs, ours)])


def losses(rows: list[Row], first: tuple[str, str], second: tuple[str, str]) -> list[Row]:
    """For each size and set the log of the first (network, method)'s loss over the second's, each
    at its best rate."""
    found = []
    sizes = dict.fromkeys((row["axis"], row["size"]) for row in select(rows, network=first[0]))
    for (axis, size), part in product(sizes, ("loss", "test")):
        ours, theirs = (
            tuned(select(rows, axis=axis, size=size, network=network, method=method), part)
            for network, method in (first, second)
        )
        where = {"axis": axis, "size": size, "set": "train" if part == "loss" else part}
        found.append({"pair": [first, second], **where, **student(log_ratios(ours, theirs))})
    return found


def comparisons(rows: list[Row]) -> dict[str, Any]:
    """Network -> optimizer -> axis -> by how much more the plain one's rate moves than the normed
    one's; the losses of normed over plain at every size."""
    networks, axes, kinds = values(rows, "network"), values(rows, "axis"), ("Adam", "SGD")

    def pair(network: str, kind: str) -> tuple[tuple[str, str], tuple[str, str]]:
        return (network, f"normed {kind}"), (network, kind)

    return {
        "transfer": {
            name: {
                kind: {axis: better(rows, axis, *pair(name, kind)) for axis in axes}
                for kind in kinds
            }
            for name in networks
        },
        "losses": [
            row
            for name, kind in product(networks, kinds)
            for row in losses(rows, *pair(name, kind))
        ],
    }


EXPERIMENT = Experiment(
    name="papers/mn_transfer",
    about=__doc__,
    run=train,
    axes={
        "network": [*SIZES],
        "axis": ["width", "blocks"],
        "method": mn_tasks.METHODS,
        "size": lambda job: SIZES[job["network"]][job["axis"]],
    },
    rates=Search("size", start=lambda job: 2.0 ** STARTS[job["network"]][job["method"]]),
    sizes={"steps": 50},
    note={"base": BASE, "samples": SAMPLES, "data": "digits, moved, noisy; pydoc topics"},
    smoke={"steps": 2, "axis": ["width"], "size": [8]},
    analyse=lambda rows: {
        "transfer": mn_tasks.transfers(rows, "network", "axis"),
        "comparisons": comparisons(rows),
    },
    draw=lambda result: figures.rates(
        result["rows"], panel=["network", "axis", "method"], line=["size"]
    ),
)

if __name__ == "__main__":
    EXPERIMENT.main()
