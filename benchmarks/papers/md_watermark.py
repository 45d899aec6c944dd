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

import argparse
import math
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib import get_data_path
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.papers import tasks
from benchmarks.papers.intervals import student
from benchmarks.papers.polar_factors import PAPERS
from benchmarks.runs import keep, parser, run_all

METHODS = ("plain", "dualized")
LRS = [2.0**power for power in range(-2, 2)]
SHORT, ERASED, VISIBLE = 0.03, 0.8, 0.5  # of the accuracy; bounds of `contrast`
LAYERS = 3

Run = tuple[str, float, int]  # method, lr, seed


def letter(size: int) -> Tensor:
    """`(size, size)`, True where the letter is."""
    font = ImageFont.truetype(str(Path(get_data_path(), "fonts/ttf/DejaVuSans.ttf")), size)
    picture = Image.new("L", (size, size))
    ImageDraw.Draw(picture).text((size / 2, size / 2), "a", fill=255, font=font, anchor="mm")
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(size, size) > 127


def mlp(width: int) -> nn.Sequential:
    linears = [nn.Linear(m, n, bias=False) for m, n in pairwise((64, width, width, 10))]
    for linear in linears:
        nn.init.orthogonal_(linear.weight, gain=math.sqrt(linear.out_features / linear.in_features))
    return nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])


def contrast(weight: Tensor, mask: Tensor) -> float:
    """RMS entry inside the letter over that outside: 0 as it was cut, 1 when it is gone."""
    return (weight[mask].square().mean() / weight[~mask].square().mean()).sqrt().item()


def spectral_norm(matrix: Tensor, vector: Tensor) -> Tensor:
    """By power iteration from `vector`, which it leaves at what it found."""
    for _ in range(4):
        vector.copy_(matrix.T @ (matrix @ vector))
        vector.div_(vector.norm().clamp_min(torch.finfo(vector.dtype).tiny))
    return (matrix @ vector).norm()


@torch.no_grad()
def descend_normalised(weights: list[nn.Parameter], vectors: list[Tensor], lr: float) -> None:
    """One step against the gradients, each over its spectral norm and the number of layers."""
    for weight, vector in zip(weights, vectors, strict=True):
        assert weight.grad is not None
        norm = spectral_norm(weight.grad, vector).clamp_min(torch.finfo(vector.dtype).tiny)
        weight.sub_(weight.grad / norm, alpha=lr / LAYERS)


def train(run: Run, width: int, steps: int, batch: int = 1024) -> dict[str, Any]:
    method, lr, seed = run
    torch.manual_seed(seed)
    task, model, mask = tasks.Digits(seed), mlp(width), letter(width)
    weight, weights = model[2].weight, list(model.parameters())
    with torch.no_grad():
        weight[mask] = 0
    descent = structlin.optim.Muon(
        model,
        lr,
        momentum=0,
        nesterov=False,
        method=PAPERS["quintic-steep"],
        masses={"*": 1 / LAYERS},
    )
    vectors = [torch.randn(each.shape[1]) for each in weights]
    accuracies = []
    for _ in range(steps):
        x, y = task.batch(batch)
        outputs = model(x)
        model.zero_grad()
        (outputs - F.one_hot(y, task.outputs)).square().mean().backward()
        if method == "dualized":
            descent.step()
        else:
            descend_normalised(weights, vectors, lr)
        accuracies.append((outputs.argmax(1) == y).float().mean().item())
    last = accuracies[-10:]
    final = weight.detach()
    return {
        "method": method, "lr": lr, "seed": seed, "accuracy": sum(last) / len(last),
        "contrast": contrast(final, mask),
        "picture": F.avg_pool2d(final.square()[None], width // 64)[0].sqrt(),
    }  # fmt: skip


def stable_ranks(width: int, batch: int = 1024) -> dict[str, Any]:
    """Of the hidden matrix's gradient at initialisation, and of its polar factor."""
    torch.manual_seed(0)
    x, y = tasks.Digits(0).batch(batch)
    model = mlp(width)
    (model(x) - F.one_hot(y)).square().mean().backward()
    gradient = model[2].weight.grad
    assert gradient is not None
    dual = structlin.dualize(gradient, method="fast")
    return {"width": width, "gradient": stable_rank(gradient), "dualized": stable_rank(dual)}


def stable_rank(matrix: Tensor) -> float:
    return (matrix.square().sum() / torch.linalg.matrix_norm(matrix, 2).square()).item()


def estimates(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the seeds: the contrast at each method's largest stable rate, and by how much the best
    accuracy of dualized training exceeds that of plain training."""
    seeds = sorted({row["seed"] for row in rows})

    def of(method: str, seed: int) -> list[dict[str, Any]]:
        return [row for row in rows if (row["method"], row["seed"]) == (method, seed)]

    def best(method: str, seed: int) -> float:
        return max(row["accuracy"] for row in of(method, seed))

    fastest = {method: [largest_stable(of(method, seed)) for seed in seeds] for method in METHODS}
    return {
        "lrs": {method: [row["lr"] for row in found] for method, found in fastest.items()},
        "contrast": {
            method: student([row["contrast"] for row in found]) for method, found in fastest.items()
        },
        "accuracy": student([best("dualized", seed) - best("plain", seed) for seed in seeds]),
    }


def largest_stable(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The run at the largest stable learning rate, of one method and seed."""
    least = max(row["accuracy"] for row in rows) - SHORT
    return max((row for row in rows if row["accuracy"] >= least), key=lambda row: row["lr"])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    if options.smoke:
        options.width, options.steps, options.seeds = 64, 2, 2
    runs: list[Run] = list(product(METHODS, LRS, range(options.seeds)))
    rows = run_all(partial(train, width=options.width, steps=options.steps), runs, options)
    widths = [2**power for power in range(5, 12) if 2**power <= options.width]
    ranks = run_all(stable_ranks, widths, options)
    figure = plot(rows, ranks)
    rows = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
    result = {"estimates": estimates(rows), "rows": rows, "stable_ranks": ranks}
    console = Console(width=150)
    show(rows, ranks, console, options)
    console.print(result["estimates"])
    setting = {"width": options.width, "steps": options.steps, "batch": 1024, "stable": SHORT}
    keep(options, "md_watermark", figure, setting=setting, **result)
    return result


def show(
    rows: list[dict[str, Any]],
    ranks: list[dict[str, Any]],
    console: Console,
    options: argparse.Namespace,
) -> None:
    table = Table(
        title=f"width {options.width}, {options.steps} steps: accuracy (last 10 steps), "
        "contrast of the letter, means over the seeds"
    )
    table.add_column("lr", justify="right")
    for method, what in product(METHODS, ("accuracy", "contrast")):
        table.add_column(f"{method}, {what}", justify="right")
    for lr in LRS:
        cells = []
        for method in METHODS:
            found = [row for row in rows if (row["method"], row["lr"]) == (method, lr)]
            cells += [
                f"{fmean(row[what] for row in found):.3f}" for what in ("accuracy", "contrast")
            ]
        table.add_row(f"2^{math.log2(lr):g}", *cells)
    console.print(table)
    table = Table(
        title="stable rank of the hidden gradient at initialisation, and of its polar factor"
    )
    for title in ("width", "gradient", "dualized"):
        table.add_column(title, justify="right")
    for row in ranks:
        table.add_row(str(row["width"]), f"{row['gradient']:.1f}", f"{row['dualized']:.1f}")
    console.print(table)


def plot(rows: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(14, 5.5), layout="constrained")
    columns, rows = len(LRS), [row for row in rows if row["seed"] == 0]
    grid = figure.subplots(2, columns + 1)
    top = max(row["picture"].median().item() for row in rows if row["lr"] <= 1)
    for line, method in zip(grid, METHODS, strict=True):
        chosen = [row for row in rows if row["method"] == method]
        for axes, row in zip(line[:columns], chosen, strict=False):
            axes.imshow(row["picture"].numpy(), cmap="gray", vmin=0, vmax=2 * top)
            power = math.log2(row["lr"])
            axes.set_title(f"{method}, lr 2^{power:g}\naccuracy {row['accuracy']:.2f}", fontsize=9)
        for axes in line[:columns]:
            axes.axis("off")
    for axes, (what, values) in zip(
        grid[:, columns],
        {"contrast": rows, "stable rank": ranks}.items(),
        strict=True,
    ):
        for method in METHODS:
            if what == "contrast":
                chosen = [row for row in values if row["method"] == method]
                axes.plot(
                    [row["lr"] for row in chosen],
                    [row["contrast"] for row in chosen],
                    ".-",
                    label=method,
                )
            else:
                name = "gradient" if method == "plain" else method
                axes.plot(
                    [row["width"] for row in values],
                    [row[name] for row in values],
                    ".-",
                    label=name,
                )
                axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        axes.set_title(what, fontsize=9)
        axes.set_xlabel("learning rate" if what == "contrast" else "width")
        axes.legend(fontsize=8)
    return figure


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--seeds", type=int, default=3)
    return options


if __name__ == "__main__":
    main()
