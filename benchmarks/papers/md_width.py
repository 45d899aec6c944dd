"""Does the best learning rate stay where it is when the network gets wider? MD figure 1.

    python -m benchmarks.papers.md_width            # results/papers/md_width.json
    python -m benchmarks.papers.md_width --smoke    # seconds

The paper trains MLPs of growing width on CIFAR-10 for 20 epochs at a constant rate: "In standard
parameterization (SP), Adam's optimal learning rate drifts to the left. Maximal update
parameterization mostly corrects this drift. Our duality-based method has a fairly stable optimal
learning rate and also reaches much lower loss." Here: three linear layers without biases and ReLU,
500 steps of 128 digits (`tasks.Digits`: moved and with noise, so that no model fits them all) at a
constant rate; the loss on 8192 new samples after the last one. Starts and rates are those of its
appendix A.1 of the ICML version:

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
from benchmarks.harness import models, training
from benchmarks.harness.experiment import Experiment, Row, Search
from benchmarks.harness.report import least_and_most, listed, number, table
from benchmarks.harness.shown import Claim
from benchmarks.harness.statistics import below, differences, seeds_of, select, student, transfer
from benchmarks.harness.tasks import Digits

STARTS = {"Adam, SP": 2.0**-7, "Adam, muP": 2.0**-1, "dualized": 2.0**-3}  # of the search for rates
MUCH = 0.8
QUINTIC = ((2.0, -1.5, 0.5),) * 5  # of the polar factor
SHARE = "dualized / Adam"  # of the estimates
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
        return structlin.optim.Muon(model, lr, momentum=0, method=QUINTIC, dualize="all")
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
        SHARE: {
            str(width): differences(losses, least[width])
            for width, losses in found["dualized"]["losses"].items()
        },
    }


def drift(found: Row, method: str) -> str:
    return number(found["estimates"]["drift"][method])


CLAIMS = [
    Claim(
        "MD 1",
        "Adam's best rate drifts to the left with width",
        '"in standard parameterization (SP), Adam\'s optimal learning rate drifts to the left"',
        lambda found: (
            [below(found["estimates"]["drift"]["Adam, SP"])],
            f"by {drift(found, 'Adam, SP')} factors of 2 for a doubling of the width, 32 to 256; "
            f"{found['setting']['steps']} steps of the digits at a constant rate",
        ),
    ),
    Claim(
        "MD 1",
        "muP mostly corrects this drift",
        '"maximal update parameterization [...] mostly corrects this drift"',
        lambda found: (
            [below(found["estimates"]["excess"]["Adam, muP"])],
            f"{drift(found, 'Adam, muP')}; mostly: to less than half",
        ),
    ),
    Claim(
        "MD 1",
        "duality has a fairly stable best rate",
        '"our duality-based method has a fairly stable optimal learning rate"',
        lambda found: (
            [below(found["estimates"]["excess"]["dualized"])],
            f"{drift(found, 'dualized')}; fairly stable: less than half of SP's drift",
        ),
    ),
    Claim(
        "MD 1",
        "duality reaches much lower loss",
        'it "also reaches much lower loss"',
        lambda found: (
            [below(each, math.log(MUCH)) for each in found["estimates"][SHARE].values()],
            f"{listed(found['estimates'][SHARE])} of the better Adam's loss, by width; much: below "
            f"{MUCH}",
        ),
    ),
]


def numbers(result: Row) -> dict[str, str]:
    shares = result["estimates"][SHARE].values()
    return least_and_most("md.", [math.exp(found["value"]) for found in shares], ".2f")


def tabulate(result: Row) -> str:
    """The best rate by width, and the loss at it."""
    found, lines = result["transfer"], []
    for method in STARTS:
        row = found[method]
        cells = [f"{best:+.1f}; {row['losses'][n]:.3f}" for n, best in row["optima"].items()]
        lines.append([method.replace("SP", "standard"), *cells, f"{row['drift']:+.2f}"])
    titles = ["log2 of the best rate; least loss", *found["dualized"]["optima"], "per doubling"]
    return table(titles, lines)


EXPERIMENT = Experiment(
    name="papers/md_width",
    about=__doc__,
    numbers=numbers,
    tables={"width": tabulate},
    claims=CLAIMS,
    place="results/modular_duality.md#best-rate-against-width",
    run=train,
    axes={"method": [*STARTS], "size": [32, 64, 128, 256]},
    rates=Search(lambda job: STARTS[job["method"]]),
    sizes={"steps": 500},
    note={"batch": BATCH, "data": "tasks.Digits"},
    smoke={"steps": 2, "size": [8, 16]},
    analyse=lambda rows: {"transfer": transfer(rows), "estimates": estimates(rows)},
)

if __name__ == "__main__":
    EXPERIMENT.main()
