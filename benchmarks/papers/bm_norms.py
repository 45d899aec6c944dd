"""In Norm, and an FFN of which only the input is normalised: "Beyond MuP 2".

    python -m benchmarks.papers.bm_norms            # results/papers/bm_norms.{json,png}; a minute
    python -m benchmarks.papers.bm_norms --smoke    # seconds

The article divides a layer's input by its RMS ("In Norm", the gain of an RMSNorm left out) and says

- that it leaves "more room for speedup, because (x / |x|_RMS) W = x W / |x|_RMS": here both sides,
  for structured layers in float32; no time is measured;
- of y = phi(x W_up) W_down, phi of Lipschitz constant 1: |y|_RMS <= |x|_RMS times the dependencies
  sqrt(d_in / d_out) |W|_2 of both matrices. "In this way, even if we only apply RMS Norm to x, for
  the second parameter W_down, the same stability metric approximately holds, so Muon is also
  usable": here the FFN d -> 4 d -> d of ReLUs of a network on the digits, fresh
  (`init="spectral"`) and after 40 steps of `Muon`. The share is |y|_RMS over its bound for the
  worst input that 30 steps of power iteration find; the middle is the RMS of what W_down reads, on
  data: In Norm would make it 1, and its metrics are those of In Norm times this. "Approximately"
  was fixed before the runs as a power of the width between -0.15 and 0.15, as in `bm_metrics`.

Powers are the slopes of log2 of the middle on log2 of the width, for each of 3 seeds; intervals are
Student's.
"""

import math
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import power, select, student
from benchmarks.harness.tasks import PlainDigits
from benchmarks.papers.bm_metrics import FAMILIES

TRAINED = ("dense", "BTT r=4")
WIDTHS = [64, 128, 256]
STATES = ("fresh", "trained")
LR, BATCH = 2.0**-4, 128


class FFN(nn.Module):
    """64 -> width, then width -> 4 width -> width of ReLUs on an input of RMS 1, then the head."""

    def __init__(self, width: int, family: structlin.Family) -> None:
        super().__init__()
        options = {"bias": False, "init": "spectral"}
        self.input = nn.Linear(64, width, bias=False)
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.up = structlin.StructuredLinear(width, 4 * width, family, **options)
        self.down = structlin.StructuredLinear(4 * width, width, family, **options)
        self.head = nn.Linear(width, 10, bias=False)
        nn.init.normal_(self.input.weight, std=1 / 8)
        nn.init.normal_(self.head.weight, std=1 / width)

    def read(self, x: Tensor) -> Tensor:  # (batch, 64) -> (batch, width), of RMS 1
        return self.norm(F.relu(self.input(x)))

    def ffn(self, x: Tensor) -> Tensor:  # (batch, width) -> (batch, width)
        return self.down(F.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.ffn(self.read(x))))


def rms(x: Tensor) -> Tensor:  # (batch, features) -> (batch,)
    return x.square().mean(-1).sqrt()


def dependency(layer: structlin.StructuredLinear) -> float:
    """sqrt(d_in / d_out) |W|_2."""
    norm = torch.linalg.matrix_norm(layer.to_dense(), 2).item()
    return norm * math.sqrt(layer.in_features / layer.out_features)


def worst_gain(model: FFN, x: Tensor, steps: int = 30) -> float:
    """The largest |y|_RMS / |x|_RMS of the FFN that is found by x <- J(x)^T y from each row of `x`:
    power iteration, for y = J(x) x where phi is a ReLU."""
    for _ in range(steps):
        x = (x / rms(x)[:, None].clamp_min(1e-30)).detach().requires_grad_()
        (x,) = torch.autograd.grad(model.ffn(x).square().sum() / 2, x)
    x = x / rms(x)[:, None].clamp_min(1e-30)
    with torch.no_grad():
        return rms(model.ffn(x)).max().item()


def measure(model: FFN, x: Tensor) -> dict[str, float]:
    """Over inputs `x`: the middle, and the share of its bound that the worst output has."""
    with torch.no_grad():
        features = model.read(x)
        middle = rms(F.relu(model.up(features))).mean().item()
        bound = dependency(model.up) * dependency(model.down)
    return {"middle": middle, "share": worst_gain(model, features[:64]) / bound}


def train(structure: str, width: int, seed: int, steps: int) -> list[Row]:
    """The FFN's numbers before and after training."""
    torch.manual_seed(seed)
    task, model = PlainDigits(), FFN(width, FAMILIES[structure](width))
    rows = [{"state": STATES[0]} | measure(model, task.x)]
    descent = structlin.optim.Muon(model, LR, method="ns")
    training.train(model, descent, task, steps, batch=BATCH, schedule="constant")
    return [*rows, {"state": STATES[1]} | measure(model, task.x)]


@torch.no_grad()
def compare_sides(width: int = 256) -> dict[str, float]:
    """structure -> the largest difference between Norm(x) W and (x W) / RMS(x), over the RMS of
    both."""
    torch.manual_seed(0)
    x = torch.randn(64, width) * torch.logspace(-3, 3, 64)[:, None]  # of very different RMS
    found = {}
    for name, family in FAMILIES.items():
        layer = structlin.StructuredLinear(width, width, family(width), bias=False)
        first, then = layer(x / rms(x)[:, None]), layer(x) / rms(x)[:, None]
        found[name] = ((first - then).abs().max() / rms(first).mean()).item()
    return found


def estimates(rows: list[Row]) -> list[Row]:
    """For each structure and state the power of the width with which the middle goes, its least and
    largest value, and the largest share of the bound."""
    found = []
    for structure, state in product(TRAINED, STATES):
        mine = select(rows, structure=structure, state=state)
        middles = [row["middle"] for row in mine]
        found.append({
            "structure": structure, "state": state, "power": student(power(mine, "middle")),
            "middle": [min(middles), max(middles)],
            "largest share": max(row["share"] for row in mine),
        })  # fmt: skip
    return found


EXPERIMENT = Experiment(
    name="papers/bm_norms",
    about=__doc__,
    run=train,
    axes={"structure": TRAINED, "width": WIDTHS},
    sizes={"steps": 40},
    note={"widths": WIDTHS, "batch": BATCH, "lr": LR, "data": "digits"},
    smoke={"steps": 2, "width": WIDTHS[:2]},
    beside=lambda chosen, found: {"sides": compare_sides()},
    analyse=lambda rows: {"estimates": estimates(rows)},
    draw=lambda result: figures.curves(
        result["rows"], "width", "middle", panel=["structure"], line=["state"], base=2
    ),
)

if __name__ == "__main__":
    EXPERIMENT.main()
