"""Does the best learning rate stay where it is when the network gets wider? MD figure 1.

    python -m benchmarks.papers.md_width            # results/papers/md_width.{json,png}
    python -m benchmarks.papers.md_width --smoke    # seconds

The paper trains MLPs of growing width on CIFAR-10 for 20 epochs at a constant rate: "In standard
parameterization (SP), Adam's optimal learning rate drifts to the left. Maximal update
parameterization mostly corrects this drift. Our duality-based method has a fairly stable optimal
learning rate and also reaches much lower loss." Here: three linear layers without biases and ReLU,
500 steps of 128 digits (`tasks.Digits`: moved and with noise, so that no model fits them all) at a
constant rate; the loss on 8192 new samples after the last one. Starts and rates are those of its
appendix A.1:

- Adam, SP: torch's own start (Kaiming uniform), one rate for all layers.
- Adam, muP: entries of standard deviation sqrt(min(in, out)) / in, a layer's rate is lr / in.
- dualized: semi-orthogonal start, `Muon` without momentum and the paper's (2, -1.5, 0.5) x 5; a
  rate of 1 is a step of operator norm 1.

Rates go by factors of 2 from the best of the width before until the best of a width has both its
neighbours; the least width's best rate is run at the largest too. Optima lie between, on a
parabola, for each seed. Fixed before the runs: Adam's rate drifts if it falls with the width; a
drift is corrected, and a rate "fairly stable", if it is less than half of that drift; "much lower"
is below 0.8 of the better Adam's loss. Runs that an earlier result in --out has are not made again.
"""

import math
from typing import Any

import torch
from torch import nn

import structlin
from benchmarks.harness import figures, models, training
from benchmarks.harness.experiment import Experiment, Row, Search
from benchmarks.harness.statistics import differences, seeds_of, select, student, transfer
from benchmarks.harness.tasks import Digits
from benchmarks.papers.polar_factors import PAPERS

STARTS = {"Adam, SP": 2.0**-7, "Adam, muP": 2.0**-1, "dualized": 2.0**-3}  # of the search for rates
MUCH = 0.8
BATCH = 128


def mlp(method: str, width: int) -> nn.Sequential:
    """64 -> width -> width -> 10, started as `method` asks for."""
    model = models.mlp(Digits.inputs, width, width, Digits.outputs, bias=False)
    for linear in model[::2]:
        if method == "Adam, muP":
            std = math.sqrt(min(linear.weight.shape)) / linear.in_features
            nn.init.normal_(linear.weight, std=std)
        elif method == "dualized":
            nn.init.orthogonal_(linear.weight)
    return model


def optimizer(method: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if method == "dualized":
        return structlin.optim.Muon(model, lr, momentum=0, method=PAPERS["quintic"][:5])
    weights = list(model.parameters())
    if method == "Adam, SP":
        return torch.optim.Adam(weights, lr)
    return torch.optim.Adam([{"params": [w], "lr": lr / w.shape[1]} for w in weights])


def train(method: str, size: int, lr: float, seed: int, steps: int) -> Row:
    torch.manual_seed(seed)
    task, model = Digits(seed), mlp(method, size)
    descent = optimizer(method, model, lr)
    return {"loss": training.train(model, descent, task, steps, batch=BATCH, schedule="constant")}


def by_seed(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """method -> how its best rate moves, over the seeds: "drift", its slope on log2 width, and
    "losses", width -> the logs of the least losses, seed by seed."""
    found = [transfer(select(rows, seed=seed)) for seed in seeds_of(rows)]
    return {
        method: {
            "drift": [each[method]["drift"] for each in found],
            "losses": {
                width: [math.log(each[method]["losses"][width]) for each in found]
                for width in found[0][method]["losses"]
            },
        }
        for method in STARTS
    }


def estimates(rows: list[Row]) -> dict[str, Any]:
    """Drifts, by how much those of muP and dualized exceed half of SP's (both without their signs),
    and by width the log of the dualized loss over the better Adam's; with their intervals."""
    found = by_seed(rows)
    drifts = {method: found[method]["drift"] for method in STARTS}
    half = [abs(drift) / 2 for drift in drifts["Adam, SP"]]
    least = {
        width: [*map(min, sp, found["Adam, muP"]["losses"][width])]
        for width, sp in found["Adam, SP"]["losses"].items()
    }
    return {
        "drift": {method: student(drift) for method, drift in drifts.items()},
        "excess": {
            method: differences([*map(abs, drifts[method])], half)
            for method in ("Adam, muP", "dualized")
        },
        "dualized / Adam": {
            str(width): differences(losses, least[width])
            for width, losses in found["dualized"]["losses"].items()
        },
    }


EXPERIMENT = Experiment(
    name="papers/md_width",
    about=__doc__,
    run=train,
    axes={"method": [*STARTS], "size": [32, 64, 128, 256]},
    rates=Search("size", start=lambda job: STARTS[job["method"]]),
    sizes={"steps": 500},
    note={"batch": BATCH, "data": "tasks.Digits"},
    smoke={"steps": 2, "size": [8, 16]},
    analyse=lambda rows: {"transfer": transfer(rows), "estimates": estimates(rows)},
    draw=lambda result: figures.rates(result["rows"], panel=["method"], line=["size"]),
)

if __name__ == "__main__":
    EXPERIMENT.main()
