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
    """64 -> width -> width -> 10, started as `method` asks for; "Adam, SP" leaves torch's start."""
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
        return structlin.optim.Muon(model, lr, momentum=0, method=QUINTIC, matrices="all")
    weights = list(model.parameters())
    if method == "Adam, SP":
        return torch.optim.Adam(weights, lr)
    return torch.optim.Adam([{"params": [w], "lr": lr / w.shape[1]} for w in weights])


def train(method: str, size: int, lr: float, seed: int, steps: int) -> Row:
    torch.manual_seed(seed)
    task = Digits(seed)
    model = mlp(method, size)
    descent = optimizer(method, model, lr)
    loss = training.train(model, descent, task, steps, batch=BATCH, schedule="constant")
    return {"loss": loss}


def by_seed(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """method -> how its best rate moves, over the seeds: "drift", its slope on log2 width, and
    "losses", width -> the logs of the least losses, seed by seed."""
    transfers = [transfer(select(rows, seed=seed)) for seed in seeds_of(rows)]
    methods: dict[str, dict[str, Any]] = {}
    for method in STARTS:
        log_losses = {}
        for width in transfers[0][method]["losses"]:
            log_losses[width] = [math.log(moves[method]["losses"][width]) for moves in transfers]
        drifts = [moves[method]["drift"] for moves in transfers]
        methods[method] = {"drift": drifts, "losses": log_losses}
    return methods


def estimates(rows: list[Row]) -> dict[str, Any]:
    """Drifts, by how much those of muP and dualized exceed half of SP's (both without their signs),
    and by width the log of the dualized loss over the better Adam's; with their intervals."""
    methods = by_seed(rows)
    drifts = {method: methods[method]["drift"] for method in STARTS}
    half = [abs(drift) / 2 for drift in drifts["Adam, SP"]]
    excesses = {}
    for method in ("Adam, muP", "dualized"):
        excesses[method] = differences([*map(abs, drifts[method])], half)
    shares = {}
    for width, losses in methods["dualized"]["losses"].items():
        sp_losses = methods["Adam, SP"]["losses"][width]
        mup_losses = methods["Adam, muP"]["losses"][width]
        shares[str(width)] = differences(losses, [*map(min, sp_losses, mup_losses)])
    return {
        "drift": {method: student(drift) for method, drift in drifts.items()},
        "excess": excesses,
        SHARE: shares,
    }


def drift(result: Row, method: str) -> str:
    return number(result["estimates"]["drift"][method])


CLAIMS = [
    Claim(
        "MD 1",
        "Adam's best rate drifts to the left with width",
        '"in standard parameterization (SP), Adam\'s optimal learning rate drifts to the left"',
        lambda result: (
            [below(result["estimates"]["drift"]["Adam, SP"])],
            f"by {drift(result, 'Adam, SP')} factors of 2 for a doubling of the width, 32 to 256; "
            f"{result['setting']['steps']} steps of the digits at a constant rate",
        ),
    ),
    Claim(
        "MD 1",
        "muP mostly corrects this drift",
        '"maximal update parameterization [...] mostly corrects this drift"',
        lambda result: (
            [below(result["estimates"]["excess"]["Adam, muP"])],
            f"{drift(result, 'Adam, muP')}; mostly: to less than half",
        ),
    ),
    Claim(
        "MD 1",
        "duality has a fairly stable best rate",
        '"our duality-based method has a fairly stable optimal learning rate"',
        lambda result: (
            [below(result["estimates"]["excess"]["dualized"])],
            f"{drift(result, 'dualized')}; fairly stable: less than half of SP's drift",
        ),
    ),
    Claim(
        "MD 1",
        "duality reaches much lower loss",
        'it "also reaches much lower loss"',
        lambda result: (
            [below(share, math.log(MUCH)) for share in result["estimates"][SHARE].values()],
            f"{listed(result['estimates'][SHARE])} of the better Adam's loss, by width; "
            f"much: below {MUCH}",
        ),
    ),
]


def numbers(result: Row) -> dict[str, str]:
    shares = result["estimates"][SHARE].values()
    return least_and_most("md.", [math.exp(share["value"]) for share in shares], ".2f")


def tabulate(result: Row) -> str:
    """The best rate by width, and the loss at it."""
    lines = []
    for method in STARTS:
        row = result["transfer"][method]
        cells = [f"{best:+.1f}; {row['losses'][n]:.3f}" for n, best in row["optima"].items()]
        lines.append([method.replace("SP", "standard"), *cells, f"{row['drift']:+.2f}"])
    widths = result["transfer"]["dualized"]["optima"]
    titles = ["log2 of the best rate; least loss", *widths, "per doubling"]
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
