"""Does the best learning rate stay where it is when the network gets wider? MD figure 1.

    python -m benchmarks.papers.md_width            # results/papers/md_width.{json,png}
    python -m benchmarks.papers.md_width --smoke    # seconds

The paper trains MLPs of growing width on CIFAR-10 for 20 epochs at a constant rate: "In standard
parameterization (SP), Adam's optimal learning rate drifts to the left. Maximal update
parameterization mostly corrects this drift. Our duality-based method has a fairly stable optimal
learning rate and also reaches much lower loss." Here: three linear layers without biases and ReLU,
500 steps of 128 digits (`tasks.Digits`: moved and with noise, so that no model fits them all) at a
constant rate; the loss on 8192 new samples after the last one. Starts and rates are those of its
appendix A.1:

- Adam, SP: torch's own start (Kaiming uniform), one rate for all layers.
- Adam, muP: entries of standard deviation sqrt(min(in, out)) / in, a layer's rate is lr / in.
- dualized: semi-orthogonal start, `Muon` without momentum and the paper's (2, -1.5, 0.5) x 5; a
  rate of 1 is a step of operator norm 1.

Rates go by factors of 2 from the best of the width before until the best of a width has both its
neighbours; the least width's best rate is run at the largest too. Optima lie between, on a
parabola, for each seed. Fixed before the runs: Adam's rate drifts if it falls with the width; a
drift is corrected, and a rate "fairly stable", if it is less than half of that drift; "much lower"
is below 0.8 of the better Adam's loss. Runs that an earlier result in --out has are not made again.
"""

import argparse
import json
import math
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import nn

import structlin
from benchmarks.papers import sweeps, tasks
from benchmarks.papers.intervals import Estimate, student
from benchmarks.papers.polar_factors import PAPERS
from benchmarks.runs import keep, parser, run_all

STARTS = {"Adam, SP": 2.0**-7, "Adam, muP": 2.0**-1, "dualized": 2.0**-3}  # of the search for rates
MUCH = 0.8

Run = tuple[str, int, float, int]  # method, width, lr, seed


def mlp(method: str, width: int) -> nn.Sequential:
    """64 -> width -> width -> 10, started as `method` asks for."""
    sizes = (tasks.Digits.inputs, width, width, tasks.Digits.outputs)
    linears = [nn.Linear(m, n, bias=False) for m, n in pairwise(sizes)]
    for linear in linears:
        if method == "Adam, muP":
            std = math.sqrt(min(linear.weight.shape)) / linear.in_features
            nn.init.normal_(linear.weight, std=std)
        elif method == "dualized":
            nn.init.orthogonal_(linear.weight)
    return nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])


def optimizer(method: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if method == "dualized":
        return structlin.optim.Muon(
            model, lr, momentum=0, nesterov=False, method=PAPERS["quintic"], ns_steps=5
        )
    weights = list(model.parameters())
    if method == "Adam, SP":
        return torch.optim.Adam(weights, lr)
    return torch.optim.Adam([{"params": [w], "lr": lr / w.shape[1]} for w in weights])


def train(run: Run, steps: int, batch: int = 128) -> dict[str, Any]:
    method, width, lr, seed = run
    torch.manual_seed(seed)
    task, model = tasks.Digits(seed), mlp(method, width)
    descent = optimizer(method, model, lr)
    for _ in range(steps):
        x, y = task.batch(batch)
        loss = task.loss(model(x), y)
        descent.zero_grad()
        loss.backward()
        descent.step()
    task.random.manual_seed(-1 - seed)
    with torch.no_grad():
        x, y = task.batch(8192)
        final = task.loss(model(x), y).item()
    return {
        "method": method, "size": width, "lr": lr, "seed": seed,
        "loss": final if math.isfinite(final) else None,
    }  # fmt: skip


def finished(path: Path, setting: dict[str, Any]) -> dict[Run, dict[str, Any]]:
    """Runs of an earlier result of the same setting."""
    content = json.loads(path.read_text()) if path.exists() else {}
    rows = content["rows"] if content.get("setting") == setting else []
    return {(row["method"], row["size"], row["lr"], row["seed"]): row for row in rows}


def by_seed(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """method -> how its best rate moves, over the seeds: "drift", its slope on log2 width, and
    "losses", width -> the logs of the least losses, seed by seed."""
    seeds = sorted({row["seed"] for row in rows})
    found = [sweeps.transfer(row for row in rows if row["seed"] == seed) for seed in seeds]
    return {
        method: {
            "drift": [each[method]["drift"] for each in found],
            "losses": {
                width: [math.log(each[method]["losses"][width]) for each in found]
                for width in found[0][method]["losses"]
            },
        }
        for method in STARTS
    }


def estimates(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Drifts, by how much those of muP and dualized exceed half of SP's (both without their signs),
    and by width the log of the dualized loss over the better Adam's; with their intervals."""
    found = by_seed(rows)
    half = [abs(drift) / 2 for drift in found["Adam, SP"]["drift"]]

    def excess(method: str) -> Estimate:
        drifts = zip(found[method]["drift"], half, strict=True)
        return student([abs(drift) - limit for drift, limit in drifts])

    def ratio(width: int) -> Estimate:
        sp, mup, dualized = (found[method]["losses"][width] for method in STARTS)
        losses = zip(dualized, sp, mup, strict=True)
        return student([ours - min(theirs) for ours, *theirs in losses])

    return {
        "drift": {method: student(found[method]["drift"]) for method in STARTS},
        "excess": {method: excess(method) for method in STARTS if method != "Adam, SP"},
        "dualized / Adam": {str(width): ratio(width) for width in found["dualized"]["losses"]},
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    if options.smoke:
        options.widths, options.steps, options.seeds = [8, 16], 2, 2
    setting = {"steps": options.steps, "seeds": options.seeds, "batch": 128, "data": "tasks.Digits"}
    kept = finished(options.out / "md_width.json", setting)

    def run(method: str, width: int, lrs: list[float]) -> list[dict[str, Any]]:
        runs = [(method, width, lr, seed) for lr, seed in product(lrs, range(options.seeds))]
        missing = [run for run in runs if run not in kept]
        done = run_all(partial(train, steps=options.steps), missing, options)
        return [*(kept[run] for run in runs if run in kept), *done]

    widths = sorted(options.widths)
    rows = [
        row
        for method, start in STARTS.items()
        for row in sweeps.search(partial(run, method), widths, start)
    ]
    found = sweeps.transfer(rows)
    result = {"transfer": found, "estimates": estimates(rows)}
    console = Console(width=150)
    console.print(sweeps.table(f"{options.steps} steps on digits", found, "width"))
    console.print(result["estimates"])
    keep(options, "md_width", plot(rows), setting=setting, **result, rows=rows)
    return result


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    for axes, method in zip(figure.subplots(1, 3, sharey=True), STARTS, strict=True):
        sweeps.plot(axes, rows, method, "width")
        axes.set_ylabel("final loss (nats)")
    axes.legend(fontsize=8)
    return figure


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--seeds", type=int, default=3)
    return options


if __name__ == "__main__":
    main()
