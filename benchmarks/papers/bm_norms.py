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
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.papers import sweeps
from benchmarks.papers.bm_metrics import FAMILIES
from benchmarks.papers.intervals import student
from benchmarks.runs import digits, keep, parser, run_all

TRAINED = ("dense", "BTT r=4")
WIDTHS = (64, 128, 256)
STATES = ("fresh", "trained")
LR, STEPS, BATCH = 2.0**-4, 40, 128

Run = tuple[str, int, int]  # structure, width, seed


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


def train(run: Run, steps: int) -> list[dict[str, Any]]:
    """The FFN's numbers before and after training."""
    structure, width, seed = run
    torch.manual_seed(seed)
    x, y = digits()
    model = FFN(width, FAMILIES[structure](width))
    row = {"structure": structure, "width": width, "seed": seed}
    rows = [row | {"state": STATES[0]} | measure(model, x)]
    descent = structlin.optim.Muon(model, LR, method="ns")
    for _ in range(steps):
        chosen = torch.randint(len(x), (BATCH,))
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        descent.zero_grad()
        loss.backward()
        descent.step()
    return [*rows, row | {"state": STATES[1]} | measure(model, x)]


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


def estimates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each structure and state the power of the width with which the middle goes, its least and
    largest value, and the largest share of the bound."""
    found = []
    for structure, state in product(TRAINED, STATES):
        mine = [row for row in rows if (row["structure"], row["state"]) == (structure, state)]
        powers = []
        for seed in sorted({row["seed"] for row in mine}):
            curve = [row for row in mine if row["seed"] == seed]
            axes = ([math.log2(row[key]) for row in curve] for key in ("width", "middle"))
            powers.append(sweeps.slope(*axes))
        middles = [row["middle"] for row in mine]
        found.append({
            "structure": structure, "state": state, "power": student(powers),
            "middle": [min(middles), max(middles)],
            "largest share": max(row["share"] for row in mine),
        })  # fmt: skip
    return found


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="an FFN of which only the input is normalised")
    for title in ("FFN", "middle", "power of the width", "largest share of the bound"):
        table.add_column(title)
    for row in result["estimates"]:
        power = "{value:+.2f} ({low:+.2f} to {high:+.2f})".format(**row["power"])
        middle = "{:.2f} to {:.2f}".format(*row["middle"])
        name = f"{row['structure']}, {row['state']}"
        table.add_row(name, middle, power, f"{row['largest share']:.2f}")
    console.print(table)
    console.print("Norm(x) W against (x W) / RMS(x), largest difference:", result["sides"])


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {"middle": "RMS of what W_down reads", "share": "worst output over its bound"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for n, (structure, state) in enumerate(product(TRAINED, STATES)):
            mine = [row for row in rows if (row["structure"], row["state"]) == (structure, state)]
            points = [row["width"] for row in mine], [row[key] for row in mine]
            axes.plot(*points, "os^d"[n], label=f"{structure}, {state}")
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="width")
        axes.legend(fontsize=8)
    return figure


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    chosen = options.parse_args(arguments)
    widths, steps = (WIDTHS[:2], 2) if chosen.smoke else (WIDTHS, STEPS)
    runs: list[Run] = list(product(TRAINED, reversed(widths), range(chosen.seeds)))
    rows = [row for pair in run_all(partial(train, steps=steps), runs, chosen) for row in pair]
    result = {"sides": compare_sides(), "estimates": estimates(rows)}
    show(result, Console(width=120))
    setting = {"widths": widths, "steps": steps, "batch": BATCH, "lr": LR, "data": "digits"}
    keep(chosen, "bm_norms", plot(rows), setting=setting, **result, rows=rows)
    return result


if __name__ == "__main__":
    main()
