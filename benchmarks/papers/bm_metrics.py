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

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn

import structlin
from benchmarks.papers import sweeps
from benchmarks.runs import digits, keep, parser, run_all
from structlin import stability

FAMILIES: dict[str, Callable[[int], structlin.Family]] = {
    "dense": lambda width: structlin.Dense(),
    "low-rank": lambda width: structlin.LowRank(rank=math.isqrt(width)),
    "Monarch": lambda width: structlin.Monarch(blocks=4),
    "BTT r=1": lambda width: structlin.BTT(rank=1),
    "BTT r=4": lambda width: structlin.BTT(rank=4),
}
INITS = ("spectral", "mup", "orthogonal")
TRAINED = ("dense", "low-rank", "BTT r=4")
OPTIMIZERS = ("Muon", "AdamW, muP", "AdamW, one lr")
LRS = {"Muon": 2.0**-4, "AdamW, muP": 2.0**-8, "AdamW, one lr": 2.0**-8}
BASE_WIDTH = 64  # where both AdamWs are the same on a dense layer
NUMBERS = ("forward", "dependency", "update")

Fresh = tuple[str, str, int]  # structure, init, width
Run = tuple[str, str, int]  # structure, optimizer, width


def fresh(job: Fresh) -> dict[str, Any]:
    """The dependency of a new layer, and the largest of its cores'; the median of 5."""
    structure, init, width = job
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.relu(self.input(x)))
        return self.head(self.norm(F.relu(self.hidden(x))))


def optimizer(name: str, model: nn.Module, width: int) -> torch.optim.Optimizer:
    if name == "Muon":
        return structlin.optim.Muon(model, LRS[name], method="ns")
    aware = name == "AdamW, muP"
    groups = structlin.param_groups(
        model, LRS[name], base={width: BASE_WIDTH} if aware else None, structure_aware=aware
    )
    return torch.optim.AdamW(groups)


def train(run: Run, steps: int) -> dict[str, Any]:
    structure, name, width = run
    torch.manual_seed(0)
    x, y = digits()
    model = MLP(width, FAMILIES[structure](width))
    descent = optimizer(name, model, width)
    with stability.watch(model, every=max(1, steps // 5)) as log:
        for _ in range(steps):
            chosen = torch.randint(len(x), (128,))
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            descent.zero_grad()
            loss.backward()
            descent.step()
    readings = [row for row in log.layers()["hidden"] if row.update is not None]
    with torch.no_grad():
        final = F.cross_entropy(model(x), y).item()
    return {
        "structure": structure, "optimizer": name, "width": width, "loss": final,
        "steps": [row.step for row in readings],
        **{number: [getattr(row, number) for row in readings] for number in NUMBERS},
    }  # fmt: skip


def exponents(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """structure -> optimizer -> number -> its power of the width, at the last reading."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for structure, name in product(TRAINED, OPTIMIZERS):
        chosen = [row for row in rows if (row["structure"], row["optimizer"]) == (structure, name)]
        widths = [math.log2(row["width"]) for row in chosen]
        found.setdefault(structure, {})[name] = {
            number: sweeps.slope(widths, [math.log2(row[number][-1]) for row in chosen])
            for number in NUMBERS
        }
    return found


def claims(
    starts: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    powers: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, bool]:
    spectral = [row for row in starts if row["init"] == "spectral"]
    steps = {
        kind: [
            update / LRS["Muon"]
            for row in rows
            if row["optimizer"] == "Muon" and (row["structure"] == "dense") == (kind == "dense")
            for update in row["update"]
        ]
        for kind in ("dense", "structured")
    }
    steepest = {
        name: max(abs(power) for of in powers.values() for power in of[name].values())
        for name in OPTIMIZERS
    }
    return {
        "spectral: the dependency of a dense layer is within 10 % of 1 at every width": all(
            abs(row["dependency"] - 1) < 0.1 for row in spectral if row["structure"] == "dense"
        ),
        "spectral: so is that of a structured layer": all(
            abs(row["dependency"] - 1) < 0.1 for row in spectral if row["structure"] != "dense"
        ),
        "spectral: so is that of each of its cores alone": all(
            abs(row["largest core"] - 1) < 0.15 for row in spectral
        ),
        "Muon: the update of a dense layer is lr, to 1 %": all(
            abs(step - 1) < 0.01 for step in steps["dense"]
        ),
        "Muon: the update of a structured layer is between lr / 4 and 2 lr": all(
            0.25 < step < 2 for step in steps["structured"]
        ),
        "Muon: all three numbers go as a power of the width below 0.15": steepest["Muon"] < 0.15,
        "AdamW, muP: so they do": steepest["AdamW, muP"] < 0.15,
        "AdamW, one lr: the update of a dense layer grows as a power above 0.4": (
            powers["dense"]["AdamW, one lr"]["update"] > 0.4
        ),
        "AdamW, one lr: that of every structured layer grows as a power above 0.1": all(
            of["AdamW, one lr"]["update"] > 0.1 for of in powers.values()
        ),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    if options.smoke:
        options.widths, options.steps = [16, 64], 2
    starts = run_all(fresh, list(product(FAMILIES, INITS, options.widths)), options)
    rows = run_all(
        partial(train, steps=options.steps),
        list(product(TRAINED, OPTIMIZERS, options.widths)),
        options,
    )
    powers = exponents(rows)
    result = {"claims": claims(starts, rows, powers), "exponents": powers}
    console = Console(width=140)
    show(starts, rows, powers, console)
    if not options.smoke:
        sweeps.say(console, result["claims"])
    setting = {
        "widths": options.widths,
        "steps": options.steps,
        "batch": 128,
        "data": "digits",
        "lr": LRS,
    }
    keep(
        options,
        "bm_metrics",
        plot(starts, rows),
        setting=setting,
        **result,
        fresh=starts,
        rows=rows,
    )
    return result


def show(
    starts: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    powers: Mapping[str, Mapping[str, Mapping[str, float]]],
    console: Console,
) -> None:
    widths = sorted({row["width"] for row in rows})
    table = Table(title="dependency of fresh layers (largest norm of a core)")
    table.add_column("structure")
    table.add_column("init")
    for width in widths:
        table.add_column(f"width {width}", justify="right")
    for structure, init in product(FAMILIES, INITS):
        chosen = [row for row in starts if (row["structure"], row["init"]) == (structure, init)]
        table.add_row(
            structure,
            init,
            *(f"{row['dependency']:.2f} ({row['largest core']:.2f})" for row in chosen),
        )
    console.print(table)
    table = Table(
        title="hidden layer at the last reading: forward / dependency / update; powers of the width"
    )
    table.add_column("structure")
    table.add_column("optimizer")
    for heading in (*(f"width {width}" for width in widths), "powers"):
        table.add_column(heading, justify="right")
    for structure, name in product(TRAINED, OPTIMIZERS):
        chosen = [row for row in rows if (row["structure"], row["optimizer"]) == (structure, name)]
        cells = [" / ".join(f"{row[number][-1]:.3g}" for number in NUMBERS) for row in chosen]
        table.add_row(
            structure,
            name,
            *cells,
            " / ".join(f"{powers[structure][name][n]:+.2f}" for n in NUMBERS),
        )
    console.print(table)


def plot(starts: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(15, 10), layout="constrained")
    grid = figure.subplots(len(TRAINED), len(NUMBERS) + 1, sharex=False)
    widths = sorted({row["width"] for row in rows})
    shades = dict(zip(widths, (0.35, 0.65, 1.0, 1.0, 1.0), strict=False))
    for line, structure in zip(grid, TRAINED, strict=True):
        for axes, number in zip(line, NUMBERS, strict=False):
            for colour, (name, width) in zip(
                (c for c in ("C0", "C1", "C2") for _ in widths),
                product(OPTIMIZERS, widths),
                strict=True,
            ):
                (row,) = [
                    r
                    for r in rows
                    if (r["structure"], r["optimizer"], r["width"]) == (structure, name, width)
                ]
                axes.plot(
                    row["steps"],
                    row[number],
                    ".-",
                    color=colour,
                    alpha=shades[width],
                    label=f"{name}, {width}",
                )
            axes.set(title=f"{structure}: {number}", xlabel="step", yscale="log")
        for init in INITS:
            chosen = [row for row in starts if (row["structure"], row["init"]) == (structure, init)]
            line[-1].plot(
                [row["width"] for row in chosen],
                [row["dependency"] for row in chosen],
                ".-",
                label=init,
            )
        line[-1].axhline(1, color="0.8", zorder=0)
        line[-1].set_xscale("log", base=2)
        line[-1].set(title=f"{structure}: dependency at the start", xlabel="width", ylim=(0, None))
        line[-1].legend(fontsize=8)
    grid[0][0].legend(fontsize=6)
    return figure


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--widths", type=int, nargs="+", default=[64, 256, 1024])
    options.add_argument("--steps", type=int, default=40)
    return options


if __name__ == "__main__":
    main()
