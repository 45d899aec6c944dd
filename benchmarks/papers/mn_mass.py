"""How much mass should the blocks have, and should it grow with their number? MN figures 3 and 6.

    python -m benchmarks.papers.mn_mass            # results/papers/mn_mass.{json,png}
    python -m benchmarks.papers.mn_mass --smoke    # seconds

In a residual network whose input and output layer have mass 1 each, the mass of all blocks together
is what is left to tune. The paper sweeps it, and the learning rate: the best mass of a ResMLP on
CIFAR-10 is 0.5 at every depth, and for a GPT the best mass and rate of a small one are the best of
a larger one (figures 3 and 6). The mass of the blocks is tared, that is kept at one value however
many they are; with free masses, 1 for each layer, the blocks of a deep network take all the
learning from the input and the output layer.

Here: ResMLP on digits (`mn_tasks`), over depth as in the paper and over width too, normed Adam, 50
steps. For every mass the loss is the least of three learning rates, each the mean of 4 seeds (2
over depth), so that no mass wins by the length of its steps alone.
"""

import torch

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import best, losses, optimum, select, transfer, values
from benchmarks.papers import mn_tasks

MASSES = [2.0**power for power in range(-4, 6, 2)]
SIZES = {"width": [16, 64, 256], "blocks": [2, 18]}
DEPTHS = [2, 8, 32]
LRS = {"mass": [2.0**p for p in range(-1, 2)], "depth": [2.0**p for p in range(-2, 4)]}
BASE = {"width": 32, "blocks": 3}
LAYERS = 2  # of a block: the mass of free blocks is LAYERS * blocks
BATCH = 128


def train(
    sweep: str, axis: str, size: int, mass: float | None, lr: float, seed: int, steps: int
) -> Row:
    """`mass` is that of the blocks; None: free."""
    torch.manual_seed(seed)
    shape = {**BASE, axis: size}
    total = LAYERS * shape["blocks"] if mass is None else mass
    net = mn_tasks.build("ResMLP", **shape, blocks_mass=total)
    options = {"steps": steps, "size": BATCH, "seed": seed}
    return {"loss": mn_tasks.train(net, "ResMLP", "normed Adam", lr, **options)}


def best_masses(rows: list[Row]) -> dict[int, Row]:
    """size -> best mass, log2 of it between the grid's points, and the least loss at each mass, of
    one axis."""
    found = {}
    for size in sorted(values(rows, "size")):
        curves = losses(select(rows, size=size), by=("size", "mass"))
        curve = {mass: min(by_rate.values()) for (_, mass), by_rate in curves.items()}
        least = curve[best(curve)]
        found[size] = {
            "optimum": optimum(curve),
            "least": least,
            "within 25 %": [mass for mass, loss in curve.items() if loss <= 1.25 * least],
            "curve": curve,
        }
    return found


def analyse(rows: list[Row]) -> Row:
    masses, depth = (select(rows, sweep=sweep) for sweep in LRS)
    named = [row | {"method": "free" if row["mass"] is None else "tared"} for row in depth]
    return {
        "masses": {axis: best_masses(select(masses, axis=axis)) for axis in values(masses, "axis")},
        "depth": transfer(named),
    }


def masses_of(job: Row) -> list[float | None]:
    return [*MASSES] if job["sweep"] == "mass" else [1.0, None]


def sizes_of(job: Row) -> list[int]:
    return SIZES[job["axis"]] if job["sweep"] == "mass" else DEPTHS


EXPERIMENT = Experiment(
    name="papers/mn_mass",
    about=__doc__,
    run=train,
    axes={
        "sweep": [*LRS],
        "axis": lambda job: [*SIZES] if job["sweep"] == "mass" else ["blocks"],
        "size": sizes_of,
        "mass": masses_of,
        "lr": lambda job: LRS[job["sweep"]],
        "seed": lambda job: range(4 if job["sweep"] == "mass" else 2),
    },
    sizes={"steps": 50},
    note={"base": BASE, "batch": BATCH, "data": "digits"},
    smoke={
        "steps": 2,
        "seed": [0],
        "size": lambda job: [8, 16] if job["axis"] == "width" else [1, 2],
    },
    analyse=analyse,
    draw=lambda result: figures.curves(
        [
            {"mass": mass, "loss": loss, "axis": axis, "size": size}
            for axis, by_size in result["masses"].items()
            for size, found in by_size.items()
            for mass, loss in found["curve"].items()
        ],
        "mass",
        panel=["axis"],
        line=["size"],
        base=2,
    ),
)

if __name__ == "__main__":
    EXPERIMENT.main()
