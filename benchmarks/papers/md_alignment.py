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
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import power, select, student, values
from benchmarks.harness.tasks import Digits
from benchmarks.papers import md_width

WAYS = {  # how the updates are made, and of how many images
    "dualized": ("dualized", 512),
    "dualized, small batches": ("dualized", 8),
    "Adam": ("Adam, muP", 512),
}
LRS = {"dualized": 2.0**-4, "Adam, muP": 2.0**-1}
ISOMETRY = 0.9  # the least alignment that counts as one
NUMBERS = ("alignment", "movement")


def alignment(update: Tensor, x: Tensor) -> float:
    """RMS(dW x) / (|dW| RMS(x)) of a square dW `(n, n)` and a batch `(samples, n)`; 1 where every x
    is enlarged as much as any vector can be."""
    size = torch.linalg.matrix_norm(update, 2)
    return ((x @ update.T).norm() / (size * x.norm())).item()


def make_optimizer(method: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if method == "dualized":
        return structlin.optim.Muon(model, lr, momentum=0, method="ns")
    return md_width.optimizer(method, model, lr)


def train(way: str, width: int, seed: int, steps: int) -> Row:
    """The mean alignment over the steps, and the movement."""
    method, batch = WAYS[way]
    torch.manual_seed(seed)
    task, model = Digits(seed), md_width.mlp(method, width)
    descent, weight = make_optimizer(method, model, LRS[method]), model[2].weight
    start, found = weight.detach().clone(), []
    x, y = task.batch(batch)
    for _ in range(steps):  # no `training.descend`: an update is read on the batch after it
        loss = task.loss(model(x), y)
        descent.zero_grad()
        loss.backward()
        before = weight.detach().clone()
        descent.step()
        x, y = task.batch(batch)
        with torch.no_grad():
            found.append(alignment(weight - before, model[:2](x)))
    moved = (weight.detach() - start).norm() / start.norm()
    return {"alignment": fmean(found), "movement": moved.item()}


def estimates(rows: list[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """Way -> number -> its mean at each width, and the power of the width with which it goes."""
    return {
        way: {name: estimate(select(rows, way=way), name) for name in NUMBERS}
        for way in values(rows, "way")
    }


def estimate(rows: list[Row], name: str) -> dict[str, Any]:
    return {
        "power": student(power(rows, name, math.log)),
        "widths": {
            str(width): student([row[name] for row in select(rows, width=width)])
            for width in sorted(values(rows, "width"))
        },
    }


EXPERIMENT = Experiment(
    name="papers/md_alignment",
    about=__doc__,
    run=train,
    axes={"way": [*WAYS], "width": [64, 128, 256]},
    sizes={"steps": 40},
    note={"lrs": LRS, "ways": WAYS, "data": "tasks.Digits"},
    smoke={"width": [8, 16]},
    analyse=lambda rows: {"estimates": estimates(rows)},
    draw=lambda result: figures.curves(
        [row | {"of": name, "number": row[name]} for row in result["rows"] for name in NUMBERS],
        "width",
        "number",
        panel=["of"],
        line=["way"],
    ),
)

if __name__ == "__main__":
    EXPERIMENT.main()
