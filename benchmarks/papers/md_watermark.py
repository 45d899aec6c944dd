"""Does training erase what was written into the initial weights of a wide layer? MD figure 2.

    python -m benchmarks.papers.md_watermark            # results/papers/md_watermark.{json,png}
    python -m benchmarks.papers.md_watermark --smoke    # seconds

The letter "a" is cut out of the initial 1024 x 1024 matrix of an MLP: its entries there are zero.
Without dualization the letter is said to be there still after training, at every learning rate that
is stable (which is why weights of wide networks were said not to move); with it the letter is gone
at the largest stable one, and the accuracy is higher. The reason given: of two steps of equal
spectral norm, the entries of the one with the larger stable rank
|G|_F^2 / |G|_2^2 move further, and that of gradients is small at any width.

As in the paper: three layers, squared error, batches of 1024, no momentum; without dualization each
gradient is divided by its spectral norm, so that equal rates make steps of equal norm. Smaller:
digits instead of CIFAR-10, 60 steps instead of 1000; polar factors by "fast", 6 near-exact steps,
instead of (3, -3.2, 1.2) x 10.
"""

import argparse
import math
from functools import partial
from itertools import pairwise, product
from pathlib import Path
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
from benchmarks.papers import md_sweeps
from benchmarks.runs import digits, keep, parser, run_all

LRS = {
    "plain": [2.0**power for power in range(-1, 4)],
    "dualized": [2.0**power for power in range(-1, 3)],
}
STABLE, ERASED, VISIBLE = (
    0.95,
    0.9,
    0.5,
)  # accuracy from which a run is stable; bounds of `contrast`
MASS = 1 / 3  # of each layer: a rate of 1 is a step of norm 1 in the modular norm

Run = tuple[str, float]  # method, lr


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


def train(run: Run, width: int, steps: int, batch: int = 1024) -> dict[str, Any]:
    method, lr = run
    torch.manual_seed(0)
    x, y = digits()
    targets = F.one_hot(y).float()
    model, mask = mlp(width), letter(width)
    weight = model[2].weight
    with torch.no_grad():
        weight[mask] = 0
    masses = {"*": MASS}
    descent: torch.optim.Optimizer
    if method == "dualized":
        descent = structlin.optim.Muon(
            model, lr, momentum=0, nesterov=False, method="fast", masses=masses
        )
    else:
        descent = structlin.optim.Normed(
            torch.optim.SGD(model.parameters(), lr), model, masses=masses
        )
    accuracies = []
    for _ in range(steps):
        chosen = torch.randint(len(x), (batch,))
        outputs = model(x[chosen])
        descent.zero_grad()
        (outputs - targets[chosen]).square().mean().backward()
        descent.step()
        accuracies.append((outputs.argmax(1) == y[chosen]).float().mean().item())
    last = accuracies[-10:]
    final = weight.detach()
    return {
        "method": method, "lr": lr, "accuracy": sum(last) / len(last),
        "contrast": contrast(final, mask),
        "picture": F.avg_pool2d(final.square()[None], width // 64)[0].sqrt(),
    }  # fmt: skip


def stable_ranks(width: int, batch: int = 1024) -> dict[str, Any]:
    """Of the hidden matrix's gradient at initialisation, and of its polar factor."""
    torch.manual_seed(0)
    x, y = digits()
    model = mlp(width)
    (model(x[:batch]) - F.one_hot(y[:batch])).square().mean().backward()
    gradient = model[2].weight.grad
    assert gradient is not None
    dual = structlin.dualize(gradient, method="fast")
    return {"width": width, "gradient": stable_rank(gradient), "dualized": stable_rank(dual)}


def stable_rank(matrix: Tensor) -> float:
    return (matrix.square().sum() / torch.linalg.matrix_norm(matrix, 2).square()).item()


def claims(rows: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> dict[str, bool]:
    at = {method: fastest([row for row in rows if row["method"] == method]) for method in LRS}
    top = {
        method: max(row["accuracy"] for row in rows if row["method"] == method) for method in LRS
    }
    widest = ranks[-1]
    return {
        "dualized training erases the letter at its largest stable lr": at["dualized"]["contrast"]
        >= ERASED,
        "plain training leaves it visible at its largest stable lr": at["plain"]["contrast"]
        < VISIBLE,
        "dualized training reaches a higher accuracy": top["dualized"] > top["plain"],
        "the gradient's stable rank is small, the dualized one's at least 10 times as large": (
            widest["dualized"] > 10 * widest["gradient"]
        ),
    }


def fastest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The run at the largest stable learning rate; the most accurate one if none is stable."""
    stable = [row for row in rows if row["accuracy"] >= STABLE]
    return (
        max(stable, key=lambda row: row["lr"])
        if stable
        else max(rows, key=lambda row: row["accuracy"])
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    if options.smoke:
        options.width, options.steps = 64, 2
    runs: list[Run] = [(method, lr) for method, lrs in LRS.items() for lr in lrs]
    rows = run_all(partial(train, width=options.width, steps=options.steps), runs, options)
    widths = [2**power for power in range(5, 12) if 2**power <= options.width]
    ranks = run_all(stable_ranks, widths, options)
    figure = plot(rows, ranks)
    rows = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
    result = {"claims": claims(rows, ranks), "rows": rows, "stable_ranks": ranks}
    console = Console(width=150)
    show(rows, ranks, console, options)
    if not options.smoke:
        md_sweeps.say(console, result["claims"])
    setting = {
        "width": options.width,
        "steps": options.steps,
        "batch": 1024,
        "data": "digits",
        "stable from": STABLE,
    }
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
        "contrast of the letter"
    )
    table.add_column("lr", justify="right")
    for method, what in product(LRS, ("accuracy", "contrast")):
        table.add_column(f"{method}, {what}", justify="right")
    for lr in sorted({row["lr"] for row in rows}):
        cells = []
        for method in LRS:
            row = next((row for row in rows if (row["method"], row["lr"]) == (method, lr)), None)
            cells += [f"{row['accuracy']:.3f}", f"{row['contrast']:.2f}"] if row else ["", ""]
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
    columns = max(map(len, LRS.values()))
    grid = figure.subplots(2, columns + 1)
    top = max(row["picture"].median().item() for row in rows if row["lr"] <= 1)
    for line, method in zip(grid, LRS, strict=True):
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
        for method in LRS:
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
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--steps", type=int, default=60)
    return options


if __name__ == "__main__":
    main()
