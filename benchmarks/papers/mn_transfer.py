"""Does dividing updates by their modular norm make the learning rate transfer? MN figures 1, 4 and
9 to 12.

    python -m benchmarks.papers.mn_transfer                  # results/papers/mn_transfer.{json,png}
    python -m benchmarks.papers.mn_transfer --networks GPT   # first this one; what is kept stays
    python -m benchmarks.papers.mn_transfer --smoke          # seconds

The paper, section 4: "normed optimization, with both Adam and SGD as the base optimizer, allows for
successful learning rate transfer across width and depth for GPT training on OpenWebText (Figure 1),
as well as ResMLP and ResNet training on CIFAR-10 (Figure 4)". D.5: normed Adam has "significantly
better transfer across width. The difference in depth transfer is less stark", it "matches or
outperforms unnormed Adam in both test and training loss", and "normed SGD consistently
significantly outperforms ordinary SGD".

Here: the networks of `mn_tasks`, 50 steps, 3 seeds; plain optimizers in the paper's
parametrisation. Rates go by factors of 2 from the best of the size before until the best has both
its neighbours, each the mean of the seeds' log losses; where the optimum lies between is the vertex
of a parabola, for each seed.

Fixed before the runs: a transfer is successful if from the smallest size to the largest the optimum
moves by less than a factor of 2; it is better than another if it moves by less, seed by seed; a
loss matches another if it is below 1.05 of it, both at their best rates.
"""

import argparse
import json
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.papers import mn_tasks, sweeps
from benchmarks.papers.intervals import Estimate, student
from benchmarks.runs import keep, parser, run_all

SIZES = {
    "ResMLP": {"width": [16, 256], "blocks": [2, 18]},
    "ResNet": {"width": [8, 32], "blocks": [1, 6]},
    "GPT": {"width": [32, 64, 128], "blocks": [1, 6]},
}
BASE = {  # where only the other one changes
    "ResMLP": {"width": 32, "blocks": 3},
    "ResNet": {"width": 16, "blocks": 3},
    "GPT": {"width": 32, "blocks": 3},
}
STARTS = {  # log2 of the rates from which the search goes, at the smallest size
    "ResMLP": {"normed Adam": 0, "Adam": -5, "normed SGD": 0, "SGD": 2},
    "ResNet": {"normed Adam": 0, "Adam": -5, "normed SGD": 0, "SGD": 2},
    "GPT": {"normed Adam": 0, "Adam": -5, "normed SGD": 0, "SGD": 0},
}
SAMPLES = {"ResMLP": 64, "ResNet": 32, "GPT": 8}  # of a batch

Run = tuple[str, str, int, str, float, int]  # network, axis, size, method, lr, seed
Row = dict[str, Any]


def train(run: Run, steps: int) -> Row:
    network, axis, size, method, lr, seed = run
    torch.manual_seed(seed)
    net = mn_tasks.build(network, **{**BASE[network], axis: size})
    found = mn_tasks.fit(net, network, method, lr, steps=steps, size=SAMPLES[network], seed=seed)
    named = dict(zip(("network", "axis", "size", "method", "lr", "seed"), run, strict=True))
    return named | {"loss": found["train"], "test": found["test"]}


# ---- what the rows say ---------------------------------------------------------------------------


def of(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if wanted.items() <= row.items()]


def transfers(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """ "network, axis" -> method -> how its best rate moves: that of the means, `sweeps.transfer`,
    and "estimates" over the seeds, `sweeps.moves`."""
    found = {}
    for network, axis in dict.fromkeys((row["network"], row["axis"]) for row in rows):
        chosen = of(rows, network=network, axis=axis)
        found[f"{network}, {axis}"] = {
            method: row | {"estimates": sweeps.moves(of(chosen, method=method))}
            for method, row in sweeps.transfer(chosen).items()
        }
    return found


def better(rows: list[Row], axis: str, first: tuple[str, str], second: tuple[str, str]) -> Estimate:
    """By how many factors of 2 more the optimum of the second (network, method) moves than that of
    the first, both without their signs."""
    ours, theirs = (
        sweeps.moved_by_seed(of(rows, axis=axis, network=network, method=method))
        for network, method in (first, second)
    )
    return student([abs(b) - abs(a) for a, b in zip(ours, theirs, strict=True)])


def comparisons(rows: list[Row]) -> dict[str, Any]:
    """Network -> optimizer -> axis -> by how much more the plain one's rate moves than the normed
    one's; the losses of normed over plain at every size."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    return {
        "transfer": {
            name: {
                method: {
                    axis: better(rows, axis, (name, f"normed {method}"), (name, method))
                    for axis in axes
                }
                for method in ("Adam", "SGD")
            }
            for name in networks
        },
        "losses": [
            row
            for name, method in product(networks, ("Adam", "SGD"))
            for row in losses(rows, (name, f"normed {method}"), (name, method))
        ],
    }


def losses(rows: list[Row], first: tuple[str, str], second: tuple[str, str]) -> list[Row]:
    """For each size and set the log of the first (network, method)'s loss over the second's, each
    at its best rate."""
    found = []
    sizes = dict.fromkeys((row["axis"], row["size"]) for row in of(rows, network=first[0]))
    for (axis, size), part in product(sizes, ("loss", "test")):
        ours, theirs = (
            sweeps.tuned(of(rows, axis=axis, size=size, network=network, method=method), part)
            for network, method in (first, second)
        )
        ratios = [ours["logs"][seed] - theirs["logs"][seed] for seed in sorted(ours["logs"])]
        where = {"axis": axis, "size": size, "set": "train" if part == "loss" else part}
        found.append({"pair": [first, second], **where, **student(ratios)})
    return found


# ---- the program ---------------------------------------------------------------------------------


def finished(path: Path, setting: Mapping[str, Any]) -> dict[Run, Row]:
    """Runs of an earlier result of the same setting."""
    content = json.loads(path.read_text()) if path.exists() else {}
    rows = content["rows"] if content.get("setting") == setting else []
    keys = ("network", "axis", "size", "method", "lr", "seed")
    return {tuple(row[key] for key in keys): row for row in rows}  # type: ignore[misc]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    steps, sizes = options.steps, SIZES
    if options.smoke:
        steps, options.seeds = 2, 2
        sizes = {network: {"width": [8]} for network in SIZES}
    setting = {
        "steps": steps,
        "seeds": options.seeds,
        "base": BASE,
        "samples": SAMPLES,
        "data": "digits, moved, noisy; pydoc topics",
    }
    kept = finished(options.out / "mn_transfer.json", setting)

    def run(network: str, axis: str, method: str, size: int, lrs: list[float]) -> list[Row]:
        runs: list[Run] = [
            (network, axis, size, method, lr, seed)
            for lr, seed in product(lrs, range(options.seeds))
        ]
        missing = [run for run in runs if run not in kept]
        done = run_all(partial(train, steps=steps), missing, options)
        return [*(kept[run] for run in runs if run in kept), *done]

    chosen = {*options.networks, *(run[0] for run in kept)}
    rows = [
        row
        for network in SIZES
        if network in chosen
        for axis, all_ in sizes[network].items()
        for method, start in STARTS[network].items()
        for row in sweeps.search(partial(run, network, axis, method), all_, 2.0**start)
    ]
    result = {"transfer": transfers(rows), "comparisons": comparisons(rows)}
    console = Console(width=140)
    for name, by_method in result["transfer"].items():
        console.print(sweeps.table(f"{name}, {steps} steps", by_method, name.split(", ")[1]))
    console.print(result["comparisons"])
    keep(options, "mn_transfer", plot(rows), setting=setting, **result, rows=rows)
    return result


def plot(rows: list[Row]) -> Figure:
    panels = list(dict.fromkeys((row["network"], row["axis"]) for row in rows))
    figure = Figure(figsize=(15, 3.2 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), len(mn_tasks.METHODS), sharey="row", squeeze=False)
    for line, (network, axis) in zip(grid, panels, strict=True):
        chosen = of(rows, network=network, axis=axis)
        finite = [row["loss"] for row in chosen if row["loss"] is not None]
        for axes, method in zip(line, mn_tasks.METHODS, strict=True):
            sweeps.plot(axes, chosen, method, axis)
            axes.set_ylim(0.9 * min(finite), min(5, 1.1 * max(finite)))
            axes.set_title(f"{network}, {method}")
            axes.legend(fontsize=8)
        line[0].set_ylabel("training loss at the end (nats)")
    return figure


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--networks", nargs="+", choices=list(SIZES), default=list(SIZES))
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--seeds", type=int, default=3)
    return options


if __name__ == "__main__":
    main()
