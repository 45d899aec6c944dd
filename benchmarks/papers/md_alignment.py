"""How far do updates align with activations, and do the weights move? MD sections 6.4 and 6.5.

    python -m benchmarks.papers.md_alignment            # results/papers/md_alignment.{json,png}
    python -m benchmarks.papers.md_alignment --smoke    # seconds

The paper, 6.4: "to what extent do gradient updates to neural network layers align with incoming
activation vectors? [...] Duality maps [...] may help simplify the answer to this question, since
they project gradients to scaled semi-orthogonal matrices for which all singular values have the
same magnitude." 6.5: a duality map "ramps up the stable rank of updates, so the weights should move
a non-trivial relative amount at large width even in the Frobenius norm - provided the batch size is
not too small".

Here: the hidden square layer of the MLP of `md_width` on the digits, widths 64 to 256, 40 steps at
the best rates of that experiment, 3 seeds. Alignment is RMS(dW x) / (|dW| RMS(x)), with |.| the RMS
-> RMS norm: how much of the largest change that an update of its size can make is made, for the
activations x of the step after it. Movement is |W - W0|_F / |W0|_F at the end. Batches have 512
images and, for dualized training, 8.

Fixed before the runs. The answer is simple if the alignment with large batches does not go with the
width (a power between -0.15 and 0.15) and is above 0.9, as of an isometry. Weights move a
non-trivial amount if the movement does not go with the width (the same band); it does with small
batches, and by Adam, if the power is below -0.15.
"""

import math
from itertools import product
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

import structlin
from benchmarks.papers import md_width, tasks
from benchmarks.papers.intervals import Estimate, student
from benchmarks.papers.sweeps import slope
from benchmarks.runs import keep, parser, run_all

WAYS = {  # how the updates are made, and of how many images
    "dualized": ("dualized", 512),
    "dualized, small batches": ("dualized", 8),
    "Adam": ("Adam, muP", 512),
}
LRS = {"dualized": 2.0**-4, "Adam, muP": 2.0**-1}
WIDTHS, STEPS = (64, 128, 256), 40
ISOMETRY = 0.9  # the least alignment that counts as one
NUMBERS = ("alignment", "movement")

Run = tuple[str, int, int]  # way, width, seed
Row = dict[str, Any]


def alignment(update: Tensor, x: Tensor) -> float:
    """RMS(dW x) / (|dW| RMS(x)) of a square dW `(n, n)` and a batch `(samples, n)`; 1 where every x
    is enlarged as much as any vector can be."""
    size = torch.linalg.matrix_norm(update, 2)
    return ((x @ update.T).norm() / (size * x.norm())).item()


def make_optimizer(method: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if method == "dualized":
        return structlin.optim.Muon(model, lr, momentum=0, nesterov=False, method="ns")
    return md_width.optimizer(method, model, lr)


def train(run: Run, steps: int = STEPS) -> Row:
    """The mean alignment over the steps, and the movement."""
    way, width, seed = run
    method, batch = WAYS[way]
    torch.manual_seed(seed)
    task, model = tasks.Digits(seed), md_width.mlp(method, width)
    descent, weight = make_optimizer(method, model, LRS[method]), model[2].weight
    start, found = weight.detach().clone(), []
    x, y = task.batch(batch)
    for _ in range(steps):
        loss = task.loss(model(x), y)
        descent.zero_grad()
        loss.backward()
        before = weight.detach().clone()
        descent.step()
        x, y = task.batch(batch)
        with torch.no_grad():
            found.append(alignment(weight - before, model[:2](x)))
    moved = (weight.detach() - start).norm() / start.norm()
    return {"way": way, "width": width, "seed": seed} | dict(
        zip(NUMBERS, (fmean(found), moved.item()), strict=True)
    )


def estimates(rows: list[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """Way -> number -> its mean at each width, and the power of the width with which it goes."""
    return {
        way: {name: estimate([row for row in rows if row["way"] == way], name) for name in NUMBERS}
        for way in dict.fromkeys(row["way"] for row in rows)
    }


def estimate(rows: list[Row], name: str) -> dict[str, Any]:
    by_seed = {
        seed: [row for row in rows if row["seed"] == seed]
        for seed in sorted({row["seed"] for row in rows})
    }
    powers = [
        slope([math.log(row["width"]) for row in found], [math.log(row[name]) for row in found])
        for found in by_seed.values()
    ]
    widths: dict[str, Estimate] = {
        str(width): student([row[name] for row in rows if row["width"] == width])
        for width in sorted({row["width"] for row in rows})
    }
    return {"power": student(powers), "widths": widths}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    chosen = options.parse_args(arguments)
    widths = (8, 16) if chosen.smoke else WIDTHS
    runs: list[Run] = list(product(WAYS, widths, range(chosen.seeds)))
    rows = run_all(train, runs, chosen)
    found = estimates(rows)
    Console(width=120).print(found)
    setting = {"steps": STEPS, "lrs": LRS, "ways": WAYS, "data": "tasks.Digits"}
    keep(chosen, "md_alignment", plot(found), setting=setting, estimates=found, rows=rows)
    return {"estimates": found, "rows": rows}


def plot(found: dict[str, dict[str, dict[str, Any]]]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(NUMBERS)), NUMBERS, strict=True):
        for way, numbers in found.items():
            by_width = numbers[name]["widths"]
            means = [each["value"] for each in by_width.values()]
            axes.loglog([int(width) for width in by_width], means, ".-", label=way)
        axes.set(xlabel="width", ylabel=name)
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
