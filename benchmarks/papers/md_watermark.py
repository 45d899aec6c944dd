"""Does training erase what was written into the initial weights of a wide layer? MD figure 2.

    python -m benchmarks.papers.md_watermark            # results/papers/md_watermark.{json,png}
    python -m benchmarks.papers.md_watermark --smoke    # seconds

The letter "a" is cut out of the initial hidden matrix of an MLP: its entries there are zero. "Not
only does dualized gradient descent reach higher training accuracies than the non-dualized method,
but dualized gradient descent also erases the watermark at the" largest stable learning rate, where
without dualization it is still there (which is why weights of wide networks were said not to move).
The reason given: of two steps of equal spectral norm, the entries of the one with the larger stable
rank |G|_F^2 / |G|_2^2 move further, and that of gradients is small at any width.

As in the paper's A.2: three layers, squared error, 1000 steps on batches of 1024, no momentum; a
gradient is divided by 3 and, without dualization, by its spectral norm, so that equal rates make
steps of equal norm; polar factors by (3, -3.2, 1.2) x 10. Smaller: digits (`tasks.Digits`, moved
and with noise) instead of CIFAR-10, a hidden matrix of width 256 instead of 1024, four rates. A run
is stable if its accuracy over the last 10 steps is at most `SHORT` below the best of its method and
seed; that, and the bounds of the contrast, were fixed before the runs.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, models, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import differences, seeds_of, select, student
from benchmarks.harness.tasks import Digits
from benchmarks.papers.polar_factors import PAPERS

METHODS = ("plain", "dualized")
LRS = [2.0**power for power in range(-2, 2)]
SHORT, ERASED, VISIBLE = 0.03, 0.8, 0.5  # of the accuracy; bounds of `contrast`
LAYERS, BATCH = 3, 1024


def letter(size: int) -> Tensor:
    """`(size, size)`, True where the letter is."""
    font = ImageFont.truetype(str(Path(get_data_path(), "fonts/ttf/DejaVuSans.ttf")), size)
    picture = Image.new("L", (size, size))
    ImageDraw.Draw(picture).text((size / 2, size / 2), "a", fill=255, font=font, anchor="mm")
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(size, size) > 127


def mlp(width: int) -> nn.Sequential:
    model = models.mlp(Digits.inputs, width, width, Digits.outputs, bias=False)
    for linear in model[::2]:
        nn.init.orthogonal_(linear.weight, gain=math.sqrt(linear.out_features / linear.in_features))
    return model


def contrast(weight: Tensor, mask: Tensor) -> float:
    """RMS entry inside the letter over that outside: 0 as it was cut, 1 when it is gone."""
    return (weight[mask].square().mean() / weight[~mask].square().mean()).sqrt().item()


def spectral_norm(matrix: Tensor, vector: Tensor) -> Tensor:
    """By power iteration from `vector`, which it leaves at what it found."""
    for _ in range(4):
        vector.copy_(matrix.T @ (matrix @ vector))
        vector.div_(vector.norm().clamp_min(torch.finfo(vector.dtype).tiny))
    return (matrix @ vector).norm()


class NormalisedDescent(torch.optim.Optimizer):
    """Steps against the gradients, each over its spectral norm and the number of layers."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        super().__init__(weights, {"lr": lr})
        self.vectors = {weight: torch.randn(weight.shape[1]) for weight in weights}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                norm = spectral_norm(weight.grad, self.vectors[weight])
                norm = norm.clamp_min(torch.finfo(weight.dtype).tiny)
                weight.sub_(weight.grad / norm, alpha=group["lr"] / LAYERS)


def make_optimizer(method: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    vectors = NormalisedDescent(list(model.parameters()), lr)
    if method == "plain":
        return vectors
    return structlin.optim.Muon(
        model,
        lr,
        momentum=0,
        method=PAPERS["quintic-steep"],
        masses={"*": 1 / LAYERS},
    )


def train(method: str, lr: float, seed: int, width: int, steps: int) -> Row:
    torch.manual_seed(seed)
    task, model, mask = Digits(seed), mlp(width), letter(width)
    weight, accuracies = model[2].weight, []
    with torch.no_grad():
        weight[mask] = 0

    def loss(step: int) -> Tensor:
        x, y = task.batch(BATCH)
        outputs = model(x)
        accuracies.append((outputs.argmax(1) == y).float().mean().item())
        return (outputs - F.one_hot(y, task.outputs)).square().mean()

    training.descend(make_optimizer(method, model, lr), loss, steps, schedule="constant")
    last = accuracies[-10:]
    return {
        "accuracy": sum(last) / len(last),
        "contrast": contrast(weight.detach(), mask),
    }


def stable_ranks(width: int) -> Row:
    """Of the hidden matrix's gradient at initialisation, and of its polar factor."""
    torch.manual_seed(0)
    x, y = Digits(0).batch(BATCH)
    model = mlp(width)
    (model(x) - F.one_hot(y)).square().mean().backward()
    gradient = model[2].weight.grad
    assert gradient is not None
    dual = structlin.dualize(gradient, method="fast")
    return {"width": width, "gradient": stable_rank(gradient), "dualized": stable_rank(dual)}


def stable_rank(matrix: Tensor) -> float:
    return (matrix.square().sum() / torch.linalg.matrix_norm(matrix, 2).square()).item()


def estimates(rows: list[Row]) -> dict[str, Any]:
    """Over the seeds: the contrast at each method's largest stable rate, and by how much the best
    accuracy of dualized training exceeds that of plain training."""
    runs = {m: [select(rows, method=m, seed=seed) for seed in seeds_of(rows)] for m in METHODS}
    fastest = {method: [*map(largest_stable, found)] for method, found in runs.items()}
    most = {m: [max(row["accuracy"] for row in each) for each in runs[m]] for m in METHODS}
    return {
        "lrs": {method: [row["lr"] for row in found] for method, found in fastest.items()},
        "contrast": {
            method: student([row["contrast"] for row in found]) for method, found in fastest.items()
        },
        "accuracy": differences(most["dualized"], most["plain"]),
    }


def largest_stable(rows: list[Row]) -> Row:
    """The run at the largest stable learning rate, of one method and seed."""
    least = max(row["accuracy"] for row in rows) - SHORT
    return max((row for row in rows if row["accuracy"] >= least), key=lambda row: row["lr"])


EXPERIMENT = Experiment(
    name="papers/md_watermark",
    about=__doc__,
    run=train,
    axes={"method": METHODS, "lr": LRS},
    sizes={"width": 256, "steps": 1000},
    note={"batch": BATCH, "stable": SHORT},
    smoke={"width": 64, "steps": 2},
    beside=lambda chosen, found: {
        "stable_ranks": [stable_ranks(2**p) for p in range(5, 12) if 2**p <= chosen["width"]]
    },
    analyse=lambda rows: {"estimates": estimates(rows)},
    draw=lambda result: figures.curves(
        result["rows"], "lr", "contrast", line=["method"], log="x", base=2
    ),
)

if __name__ == "__main__":
    EXPERIMENT.main()
