"""Are layers stable, at initialisation and over training, at every width? "Beyond MuP 2".

    python -m benchmarks.papers.bm_metrics            # results/papers/bm_metrics.{json,png}
    python -m benchmarks.papers.bm_metrics --smoke    # seconds

For a linear layer on inputs of unit RMS three numbers are to stay of order 1 (see
`structlin.stability`): forward, dependency = sqrt(d_in / d_out) |W|_2 and update = sqrt(d_in /
d_out) |dW|_2. The article derives from them

- the initial variance: entries of std sqrt(d_out / d_in) / (sqrt d_in + sqrt d_out),
  `init="spectral"`, make the dependency 1, and exactly so in wide layers;
- the optimizer: dW = lr sqrt(d_out / d_in) U V^T, which is `Muon`, makes the update lr at every
  width.

It gives formulas and no figure. Here they are measured, with dense and with structured layers: the
dependency of fresh layers by width, initialisation and structure; then the three numbers of the
hidden layer of an MLP on digits, whose inputs are divided by their RMS, over 40 steps, by width and
optimizer. Powers are the slopes of log2 of a number on log2 of the width; AdamW with one rate for
all is there to show what a growing update looks like.
"""

import math
from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.models import BASE_WIDTH, STRUCTURES
from benchmarks.harness.statistics import select, slope
from benchmarks.harness.tasks import PlainDigits
from structlin import stability

FAMILIES = {
    name: STRUCTURES[name] for name in ("dense", "low-rank", "Monarch", "BTT r=1", "BTT r=4")
}
INITS = ("spectral", "mup", "orthogonal")
TRAINED = ("dense", "low-rank", "BTT r=4")
OPTIMIZERS = ("Muon", "AdamW, muP", "AdamW, one lr")
LRS = {"Muon": 2.0**-4, "AdamW, muP": 2.0**-8, "AdamW, one lr": 2.0**-8}
WIDTHS = [64, 256, 1024]
BATCH = 128
NUMBERS = ("forward", "dependency", "update")


def fresh(structure: str, init: str, width: int) -> Row:
    """The dependency of a new layer, and the largest of its cores'; the median of 5."""
    torch.manual_seed(0)
    found, cores = [], []
    for _ in range(5):
        layer = structlin.StructuredLinear(
            width, width, FAMILIES[structure](width), bias=False, init=init
        )
        (reading,) = stability.metrics(layer, torch.randn(8, width)).rows
        found.append(reading.dependency)
        norms = [
            torch.linalg.matrix_norm(core, 2).max() * math.sqrt(core.shape[2] / core.shape[1])
            for core in layer.cores
        ]
        cores.append(max(norm.item() for norm in norms))
    return {
        "structure": structure, "init": init, "width": width,
        "dependency": sorted(found)[2], "largest core": sorted(cores)[2],
    }  # fmt: skip


class MLP(nn.Module):
    """64 -> width -> width -> 10; the square matrix, `hidden`, is structured. Inputs of the last
    two have RMS 1."""

    def __init__(self, width: int, family: structlin.Family) -> None:
        super().__init__()
        self.input = nn.Linear(64, width, bias=False)
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.hidden = structlin.StructuredLinear(width, width, family, bias=False, init="spectral")
        self.head = nn.Linear(width, 10, bias=False)
        nn.init.normal_(self.input.weight, std=1 / 8)
        nn.init.normal_(self.head.weight, std=1 / width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.input(x)))
        return self.head(self.norm(F.relu(self.hidden(x))))


def make_optimizer(name: str, model: nn.Module, width: int) -> torch.optim.Optimizer:
    if name == "Muon":
        return structlin.optim.Muon(model, LRS[name], method="ns")
    aware = name == "AdamW, muP"
    groups = structlin.param_groups(
        model, LRS[name], base={width: BASE_WIDTH} if aware else None, structure_aware=aware
    )
    return torch.optim.AdamW(groups)


def train(structure: str, optimizer: str, width: int, steps: int) -> Row:
    torch.manual_seed(0)
    task, model = PlainDigits(), MLP(width, FAMILIES[structure](width))
    descent = make_optimizer(optimizer, model, width)
    with stability.watch(model, every=max(1, steps // 5)) as log:
        loss = training.train(model, descent, task, steps, batch=BATCH, schedule="constant")
    readings = [row for row in log.rows if row.layer == "hidden" and row.update is not None]
    return {
        "loss": loss,
        "steps": [row.step for row in readings],
        **{number: [getattr(row, number) for row in readings] for number in NUMBERS},
    }


def exponents(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """structure -> optimizer -> number -> its power of the width, at the last reading."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for structure, name in product(TRAINED, OPTIMIZERS):
        chosen = select(rows, structure=structure, optimizer=name)
        widths = [math.log2(row["width"]) for row in chosen]
        found.setdefault(structure, {})[name] = {
            number: slope(widths, [math.log2(row[number][-1]) for row in chosen])
            for number in NUMBERS
        }
    return found


def all_fresh(widths: Sequence[int]) -> Row:
    return {"fresh": [fresh(*each) for each in product(FAMILIES, INITS, widths)]}


def draw(result: Row) -> figures.Figure:
    points = [
        {key: row[key] for key in ("structure", "optimizer", "width")}
        | {"number": number, "step": step, "value": value}
        for row in result["rows"]
        for number in NUMBERS
        for step, value in zip(row["steps"], row[number], strict=True)
    ]
    return figures.curves(
        points, "step", "value", panel=["structure", "number"], line=["optimizer", "width"],
        log="y", columns=3,
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="papers/bm_metrics",
    about=__doc__,
    run=train,
    axes={"structure": TRAINED, "optimizer": OPTIMIZERS, "width": WIDTHS},
    seeds=0,
    sizes={"steps": 40},
    note={"widths": WIDTHS, "batch": BATCH, "data": "digits", "lr": LRS},
    smoke={"steps": 2, "width": [16, 64]},
    beside=lambda chosen, found: all_fresh(chosen["width"]),
    analyse=lambda rows: {"exponents": exponents(rows)},
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
