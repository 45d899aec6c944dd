"""Does the best learning rate stay where it is when the network gets wider? MD figure 1.

    python -m benchmarks.papers.md_width            # results/papers/md_width.{json,png}
    python -m benchmarks.papers.md_width --smoke    # seconds

The paper trains MLPs of growing width on CIFAR-10 and says: the best learning rate of Adam in the
standard parametrisation (SP) falls with width, under muP it stays, under dualized training it stays
too, and dualized training reaches the lowest loss. Here: three linear layers without biases and
ReLU on scikit-learn's digits (1797 images of 64 pixels), batches of 128, a few dozen steps with the
rate decayed linearly to zero; the final loss on all images.

- Adam, SP: entries of variance 1 / fan_in, one rate for all layers.
- Adam, muP: `param_groups(base=...)` with the smallest width as base, the head starts at zero.
- dualized: semi-orthogonal initialisation, `Muon` without momentum and the paper's (2, -1.5, 0.5) x
  5; a rate of 1 is a step of operator norm 1.

From width 1024 on there is one seed, and the dualized runs, which take most of the time, are made
at the best rate of the largest width below, at half of it, at twice and at four times it. Runs that
an earlier result in --out has are not made again.
"""

import argparse
import json
import math
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from torch import nn

import structlin
from benchmarks.papers import md_sweeps
from benchmarks.runs import digits, keep, parser, run_all

METHODS = {
    "Adam, SP": [2.0**power for power in range(-12, -2)],
    "Adam, muP": [2.0**power for power in range(-8, -1)],
    "dualized": [2.0**power for power in range(-4, 3)],
}
COSTLY = 1024  # width from which there is one seed

Run = tuple[str, int, float, int]  # method, width, lr, seed


def mlp(method: str, width: int) -> nn.Sequential:
    """64 -> width -> width -> 10, started as `method` asks for."""
    sizes = (64, width, width, 10)
    linears = [nn.Linear(m, n, bias=False) for m, n in pairwise(sizes)]
    for linear in linears:
        if method == "dualized":
            nn.init.orthogonal_(
                linear.weight, gain=math.sqrt(linear.out_features / linear.in_features)
            )
        else:
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    if method == "Adam, muP":
        nn.init.zeros_(linears[-1].weight)
    return nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])


def optimizer(
    method: str, model: nn.Module, width: int, lr: float, base: int
) -> torch.optim.Optimizer:
    if method == "Adam, SP":
        return torch.optim.Adam(model.parameters(), lr)
    if method == "Adam, muP":
        return torch.optim.Adam(structlin.param_groups(model, lr, base={width: base}))
    return structlin.optim.Muon(model, lr, momentum=0, nesterov=False, method="quintic", steps=5)


def train(run: Run, steps: int, base: int, batch: int = 128) -> dict[str, Any]:
    method, width, lr, seed = run
    torch.manual_seed(seed)
    x, y = digits()
    model = mlp(method, width)
    descent = optimizer(method, model, width, lr, base)
    schedule = torch.optim.lr_scheduler.LambdaLR(descent, lambda step: 1 - step / steps)
    for _ in range(steps):
        chosen = torch.randint(len(x), (batch,))
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        descent.zero_grad()
        loss.backward()
        descent.step()
        schedule.step()
    with torch.no_grad():
        final = F.cross_entropy(model(x), y).item()
    return {
        "method": method, "size": width, "lr": lr, "seed": seed,
        "loss": final if math.isfinite(final) else None,
    }  # fmt: skip


def finished(path: Path, setting: dict[str, Any]) -> dict[Run, dict[str, Any]]:
    """Runs of an earlier result of the same setting."""
    content = json.loads(path.read_text()) if path.exists() else {}
    rows = content["rows"] if content.get("setting") == setting else []
    return {(row["method"], row["size"], row["lr"], row["seed"]): row for row in rows}


def claims(found: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Of the paper, computed from `md_sweeps.transfer`."""
    adam, mup, dualized = found["Adam, SP"], found["Adam, muP"], found["dualized"]
    least = {n: min(adam["losses"][n], mup["losses"][n]) for n in dualized["losses"]}
    return {
        "Adam's best lr falls with width in SP, by a factor of 2 or more in 4 doublings": adam[
            "drift"
        ]
        < -0.25,
        "Adam's best lr stays within a factor of 4 under muP": mup["range"] <= 2,
        "the dualized best lr stays within a factor of 4": dualized["range"] <= 2
        and dualized["bracketed"],
        "dualized training ends lowest at every width": all(
            loss < least[n] for n, loss in dualized["losses"].items()
        ),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    if options.smoke:
        options.widths, options.steps, options.seeds = [8, 16], 2, 1
    base = min(options.widths)
    setting = {
        "steps": options.steps, "seeds": options.seeds, "batch": 128, "data": "digits",
        "base": base, "costly": COSTLY,
    }  # fmt: skip
    kept = finished(options.out / "md_width.json", setting)

    def rows_of(runs: list[Run]) -> list[dict[str, Any]]:
        missing = [run for run in runs if run not in kept]
        work = partial(train, steps=options.steps, base=base)
        return [kept[run] for run in runs if run in kept] + run_all(work, missing, options)

    wide = sorted((width for width in options.widths if width >= COSTLY), reverse=True)
    rows = rows_of(
        [
            (method, width, lr, seed)
            for width, (method, lrs) in product(
                sorted(options.widths, reverse=True), METHODS.items()
            )
            for lr, seed in product(lrs, range(1 if width in wide else options.seeds))
            if method != "dualized" or width not in wide
        ]
    )
    if wide:
        below = md_sweeps.transfer(rows)["dualized"]["optima"]
        centre = 2.0 ** round(below[max(below)])
        rows += rows_of(
            [
                ("dualized", width, factor * centre, 0)
                for width, factor in product(wide, (0.5, 1, 2, 4))
            ]
        )
    found = md_sweeps.transfer(rows)
    result = {"claims": claims(found), "transfer": found}
    console = Console(width=150)
    console.print(md_sweeps.table(f"{options.steps} steps on digits", found, "width"))
    if not options.smoke:
        md_sweeps.say(console, result["claims"])
    keep(options, "md_width", plot(rows), setting=setting, **result, rows=rows)
    return result


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    for axes, method in zip(figure.subplots(1, 3, sharey=True), METHODS, strict=True):
        md_sweeps.plot(axes, rows, method, "width")
        axes.set_ylabel("final loss (nats)")
    axes.legend(fontsize=8)
    return figure


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument(
        "--widths", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024, 2048]
    )
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--seeds", type=int, default=2)
    return options


if __name__ == "__main__":
    main()
