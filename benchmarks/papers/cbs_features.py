"""By how much does a training step change the features? Figure 2a of "Compute Better Spent".

    python -m benchmarks.papers.cbs_features            # results/papers/cbs_features.json
    python -m benchmarks.papers.cbs_features --smoke    # seconds

The paper (section 3.3): "We train an MLP with 2 hidden layers without bias on CIFAR-10 with width
16 to 4096 and a base learning rate 3e-3. For a given width, we track the root mean square (RMS) of
h_{t+1} - h_t at every step t, where h_t is the activation of the last layer before the
classification head. We then plot the average RMS over 500 steps. [...] structure-aware learning
rate scaling produces consistent feature learning for all structures used with no tuning. In
contrast, the naive approach causes much smaller or vanishing updates to the features. The effect is
most pronounced for BTT and Kronecker."

Here: that network, rate and quantity, with Monarch of 16 blocks as in the paper, but on
`tasks.Digits` in batches of 64, and widths 64 to 1024. h is read on 64 images that stay the same.
All matrices but the head's are structured (of low-rank not the first, as in appendix E.2); the head
starts at zero; Adam, no schedule. What the words mean was fixed before the runs: "consistent" is
within a factor of 2 from the least width to the largest, "much smaller" is below half of the aware
rule's at the largest.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import fmean, geometric_mean
from typing import Any

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import models, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.report import factor, least_and_most, listed, table
from benchmarks.harness.shown import Claim
from benchmarks.harness.statistics import (
    Estimate,
    below,
    seeds_of,
    select,
    student,
    values,
    within,
)
from benchmarks.harness.tasks import Digits

STRUCTURES = ("dense", "low-rank", "Kronecker", "Monarch b=16", "BTT r=1")
WIDTHS = (64, 256, 1024)
LR = 3e-3
BATCH = 64
RULES = ("naive", "aware")  # cores at the rate of a dense layer, or at that of their shape


def build_mlp(structure: str, width: int) -> nn.Sequential:
    model = models.mlp(Digits.inputs, width, width, Digits.outputs, bias=False)
    nn.init.normal_(model[0].weight, std=Digits.inputs**-0.5)
    nn.init.zeros_(model[4].weight)
    include = ["2"] if structure == "low-rank" else ["0", "2"]
    family = models.STRUCTURES[structure](width)
    return structlin.convert(model, family, include=include, init="mup")


def train(structure: str, width: int, rule: str, seed: int, steps: int) -> Row:
    """The mean over `steps` of the RMS by which a step changes the last features."""
    torch.manual_seed(seed)
    task = Digits(seed)
    model = build_mlp(structure, width)
    base = {width: models.BASE_WIDTH}
    groups = structlin.param_groups(model, LR, base=base, structure_aware=rule == "aware")
    probe, _ = task.batch(BATCH)
    with torch.no_grad():
        features = [model[:-1](probe)]  # (BATCH, width)
    losses: list[Tensor] = []
    changes: list[float] = []

    def loss(step: int) -> Tensor:
        x, y = task.batch(BATCH)
        losses.append(task.loss(model(x), y))
        return losses[-1]

    @torch.no_grad()
    def after(step: int) -> None:
        before = features.pop()
        features.append(model[:-1](probe))
        changes.append((features[0] - before).square().mean().sqrt().item())

    training.descend(torch.optim.Adam(groups), loss, steps, schedule="constant", after=after)
    return {"change": fmean(changes), "loss": losses[-1].item()}


def compare(rows: list[Row]) -> dict[str, Any]:
    """Estimates of logarithms, by structure: "growth" of each rule from the least width to the
    largest, and "shortfall", naive over aware at the largest; "pronounced", by how much less the
    shortfall of the first of a pair is than that of the second."""
    changes = {}
    for row in rows:
        key = (row["structure"], row["rule"], row["width"], row["seed"])
        changes[key] = math.log(row["change"])
    least = min(row["width"] for row in rows)
    largest = max(row["width"] for row in rows)
    structures = [name for name in STRUCTURES if name != "dense"]

    def growth(structure: str, rule: str, seed: int) -> float:
        at_least = changes[structure, rule, least, seed]
        return changes[structure, rule, largest, seed] - at_least

    def shortfall(structure: str, seed: int) -> float:
        aware = changes[structure, "aware", largest, seed]
        return changes[structure, "naive", largest, seed] - aware

    def difference(pair: tuple[str, str], seed: int) -> float:
        return shortfall(pair[0], seed) - shortfall(pair[1], seed)

    def estimate(of: Callable[[int], float]) -> Estimate:
        return student([of(seed) for seed in seeds_of(rows)])

    growths = {}
    for rule in RULES:
        growths[rule] = {name: estimate(partial(growth, name, rule)) for name in structures}
    pronounced = []
    for pair in product(("BTT r=1", "Kronecker"), ("Monarch b=16", "low-rank")):
        pronounced.append({"pair": pair, **estimate(partial(difference, pair))})
    return {
        "growth": growths,
        "dense": estimate(partial(growth, "dense", "aware")),
        "shortfall": {name: estimate(partial(shortfall, name)) for name in structures},
        "pronounced": pronounced,
    }


def describe_pair(estimate: Row) -> str:
    structure, compared = estimate["pair"]
    return f"{structure}'s naive share is {factor(estimate)} of that of {compared}"


CLAIMS = [
    Claim(
        "CBS 2a",
        "our rule gives consistent feature learning for all structures",
        '"structure-aware learning rate scaling produces consistent feature learning for all '
        'structures used"',
        lambda result: (
            [within(estimate, math.log(2)) for estimate in result["growth"]["aware"].values()],
            "the mean change of a step grows from width 64 to 1024 by a factor of "
            f"{listed(result['growth']['aware'])}, dense's by {factor(result['dense'])}",
        ),
    ),
    Claim(
        "CBS 2a",
        "the naive rule gives much smaller updates to the features",
        '"the naive approach causes much smaller or vanishing updates to the features"',
        lambda result: (
            [below(estimate, math.log(1 / 2)) for estimate in result["shortfall"].values()],
            f"at width 1024 it has {listed(result['shortfall'])} of the aware rule's",
        ),
    ),
    Claim(
        "CBS 2a",
        "the effect is largest for BTT and Kronecker",
        '"the effect is most pronounced for BTT and Kronecker"',
        lambda result: (
            [below(estimate) for estimate in result["pronounced"]],
            "; ".join(map(describe_pair, result["pronounced"])),
        ),
    ),
]


def numbers(result: Row) -> dict[str, str]:
    growths = [math.exp(growth["value"]) for growth in result["growth"]["aware"].values()]
    shares = {}
    for structure, shortfall in result["shortfall"].items():
        shares[structure] = math.exp(shortfall["value"])
    lowrank = shares.pop("low-rank")
    return {
        "cbs.short_lowrank": f"{lowrank:.2f}",
        **least_and_most("cbs.grown_", growths, ".2f"),
        **least_and_most("cbs.short_", shares.values(), ".2f"),
    }


def tabulate(result: Row) -> str:
    """Mean RMS change of the last features by a step, geometric mean over the seeds."""
    rows = result["rows"]
    widths = sorted(values(rows, "width"))
    lines = []
    for structure, rule in dict.fromkeys((row["structure"], row["rule"]) for row in rows):
        cells = [structure if structure == "dense" else f"{structure}, {rule}"]
        for width in widths:
            seeds = select(rows, structure=structure, rule=rule, width=width)
            cells.append(f"{geometric_mean(row['change'] for row in seeds):.3f}")
        lines.append(cells)
    return table(["", *(f"width {width}" for width in widths)], lines)


EXPERIMENT = Experiment(
    name="papers/cbs_features",
    about=__doc__,
    numbers=numbers,
    tables={"features": tabulate},
    claims=CLAIMS,
    place="results/compute_better_spent.md#feature-changes",
    run=train,
    axes={
        "structure": STRUCTURES,
        "width": WIDTHS,
        "rule": lambda job: RULES[job["structure"] == "dense" :],
    },
    sizes={"steps": 500},
    note={"lr": LR, "batch": BATCH, "optimizer": "Adam", "data": "digits"},
    smoke={"steps": 3, "width": WIDTHS[:2]},
    analyse=compare,
)

if __name__ == "__main__":
    EXPERIMENT.main()
