"""Does the dense model's learning rate carry over to structures and widths? Figure 2 of "Compute
Better Spent".

    python -m benchmarks.training.lr_transfer          # in full: results/lr_transfer.json
    python -m benchmarks.training.lr_transfer --smoke  # seconds
    python -m benchmarks.training.lr_transfer --structures low-rank  # the others' rows are kept

An MLP of three hidden layers on scikit-learn's digits, Adam, no schedule. All its matrices but the
head's are structured; the head stays dense, starts at zero and follows muP across widths. For each
structure, width, rule (naive: cores at the dense layer's rate; aware: `param_groups`) and base
learning rate: the final loss on the whole training set (figure 2b), and the RMS of the change of
the last hidden features over training (figure 2a). Both rules also with four times the rate for the
head, in the structured models and in the dense one.
"""

from collections.abc import Sequence
from itertools import product

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import nn

import structlin
from benchmarks.harness import models, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.models import BASE_WIDTH
from benchmarks.harness.report import table
from benchmarks.harness.statistics import best, losses, shifts, values
from benchmarks.harness.tasks import PlainDigits

STRUCTURES = {
    name: models.STRUCTURES[name]
    for name in ("dense", "low-rank", "Kronecker", "Monarch", "TT r=4", "BTT r=1", "BTT r=4")
}
HEAD = ", head x4"
RULES = ("naive", "aware")
WIDTHS = [64, 256, 1024]
BATCH = 256


def rules_of(job: Row) -> list[str]:
    """For dense both rules are the same."""
    rules = RULES[job["structure"] == "dense" :]
    return [rule + head for head in ("", HEAD) for rule in rules]


def mlp(structure: str, width: int) -> nn.Sequential:
    model = models.mlp(64, width, width, width, 10)
    nn.init.zeros_(model[-1].weight)
    for layer in model[::2]:
        nn.init.zeros_(layer.bias)
    return structlin.convert(model, STRUCTURES[structure](width), exclude="6", init="mup")


def make_optimizer(model: nn.Module, lr: float, width: int, rule: str) -> torch.optim.Optimizer:
    options = {"base": {width: BASE_WIDTH}, "structure_aware": rule.startswith("aware")}
    masses = {"6": 4} if rule.endswith(HEAD) else None
    return torch.optim.Adam(structlin.param_groups(model, lr, masses=masses, **options))


def train(structure: str, width: int, rule: str, lr: float, seed: int, steps: int) -> Row:
    """The final loss on all images, and the RMS change of the last hidden features."""
    torch.manual_seed(seed)
    model, task = mlp(structure, width), PlainDigits()
    features = model[:-1]
    before, optimizer = features(task.x).detach(), make_optimizer(model, lr, width, rule)
    final = training.train(model, optimizer, task, steps, batch=BATCH, schedule="constant")
    change = (features(task.x).detach() - before).square().mean().sqrt().item()
    return {"loss": final, "feature_change": training.finite(change)}


def markdown(result: Row) -> str:
    """The table of docs/optimizers.md: log2 of the best learning rate over dense's at width 64."""
    widths = sorted(values(result["table"], "width"))
    cells = {
        (row["structure"], row["width"], row["rule"]): f"{row['shift']:+.0f}"
        for row in result["table"]
    }
    columns = [*product(RULES, widths)]
    lines = [
        [name, *(cells.get((name, width, rule), "-") for rule, width in columns)]
        for name in STRUCTURES
    ]
    for statistic in ("mean", "largest"):
        found = result[f"{statistic}_shift"]
        numbers = [f"{found[rule]:.2f}" if width == widths[0] else "" for rule, width in columns]
        lines.append([f"{statistic} distance, all structures and widths", *numbers])
    names = {"naive": "naive", "aware": "ours"}
    return table(["", *(f"{names[rule]} {width}" for rule, width in columns)], lines)


def plot_some(result: Row, structures: Sequence[str]) -> Figure:
    """Loss against the base learning rate: a row for each rule, a column for each of
    `structures`."""
    curves = losses(result["rows"], by=("structure", "width", "rule"))
    widths = sorted(values(result["rows"], "width"))
    figure = Figure(figsize=(4 * len(structures), 5), layout="constrained")
    axes = figure.subplots(len(RULES), len(structures), sharex=True, sharey="col", squeeze=False)
    colours = colormaps["viridis"]([0.0, 0.45, 0.85])
    titles = {"naive": "cores at the dense rate", "aware": "param_groups"}
    for (line, rule), (column, structure) in product(enumerate(RULES), enumerate(structures)):
        axis = axes[line, column]
        for width, colour in zip(widths, colours, strict=True):
            means = curves[structure, width, rule]
            lr = best(means)
            axis.plot(list(means), list(means.values()), ".-", color=colour, label=f"width {width}")
            axis.plot([lr], [means[lr]], "o", color=colour, markersize=8)
        axis.axvline(result["reference_lr"], color="0.7", zorder=0)
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", title=f"{structure}, {titles[rule]}")
    for axis in axes[-1]:
        axis.set_xlabel("base learning rate; gray: dense's best")
    for axis in axes[:, 0]:
        axis.set_ylabel("final training loss")
    axes[0, 0].legend()
    return figure


EXPERIMENT = Experiment(
    name="lr_transfer",
    about=__doc__,
    run=train,
    axes={
        "structure": [*STRUCTURES],
        "width": WIDTHS,
        "rule": rules_of,
        "lr": [2.0**power for power in range(-9, -1)],
    },
    sizes={"steps": 60},
    note={"batch": BATCH, "optimizer": "Adam", "data": "digits"},
    smoke={"steps": 3, "width": [64], "lr": [2.0**-8, 2.0**-7], "seeds": 1},
    analyse=lambda rows: shifts(rows, BASE_WIDTH),
)

if __name__ == "__main__":
    EXPERIMENT.main()
