"""Does dividing updates by their modular norm make the learning rate transfer? MN figures 1, 4, 5.

    python -m benchmarks.papers.mn_transfer            # results/papers/mn_transfer.{json,png}
    python -m benchmarks.papers.mn_transfer --smoke    # seconds

"We found that normed optimization, with both Adam and SGD as the base optimizer, allows for
successful learning rate transfer across width and depth for GPT training on OpenWebText (Figure 1),
as well as ResMLP and ResNet training on CIFAR-10 (Figure 4)"; "We actually found unnormed Adam
using our GPT architecture transferred learning rate better than in nanoGPT" (figure 5, D.4).

Here: the networks and optimizers of `mn_tasks`, 8 to 256 features, 1 to 18 blocks, 50 steps (GPTs
40), 3 seeds. Rates go by factors of 2 from the best of the size before until the best has both its
neighbours; optima lie between, on a parabola, for each seed. Fixed before the runs: a transfer
succeeds if from the smallest size to the largest the optimum moves by less than a factor of 2, as
in `mn_context`; Adam transfers better in one GPT if its optimum moves less there.
"""

import argparse
from functools import partial
from itertools import product
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.papers import mn_tasks, sweeps
from benchmarks.papers.intervals import Estimate, student
from benchmarks.runs import keep, parser, run_all

STARTS = {"normed Adam": 1.0, "Adam": 2.0**-6, "normed SGD": 1.0, "SGD": 4.0}  # of the search
SIZES = {
    ("ResMLP", "width"): [16, 64, 256],
    ("ResMLP", "blocks"): [2, 6, 18],
    ("ResNet", "width"): [8, 32],
    ("ResNet", "blocks"): [1, 6],
    ("GPT", "width"): [16, 32, 64],
    ("GPT", "blocks"): [1, 3, 6],
    ("nanoGPT", "width"): [16, 32, 64],
    ("nanoGPT", "blocks"): [1, 3, 6],
}
BASE = {"width": 32, "blocks": 3}  # where only the other one changes
NARROW = {"ResNet": {"width": 8}}  # but for these
SAMPLES = {"ResMLP": 128, "ResNet": 64, "GPT": 8, "nanoGPT": 8}  # of a batch

Run = tuple[str, str, int, str, float, int]  # network, axis, size, method, lr, seed


def methods(network: str) -> list[str]:
    return ["Adam"] if network == "nanoGPT" else list(STARTS)


def train(run: Run, steps: int) -> dict[str, Any]:
    network, axis, size, method, lr, seed = run
    torch.manual_seed(seed)
    net = mn_tasks.build(network, **{**BASE, **NARROW.get(network, {}), axis: size})
    found = mn_tasks.train(net, network, method, lr, steps=steps, size=SAMPLES[network], seed=seed)
    return {
        "network": network,
        "axis": axis,
        "size": size,
        "method": method,
        "lr": lr,
        "seed": seed,
        "loss": found,
    }


def estimates(rows: list[dict[str, Any]], panels: list[tuple[str, str]]) -> dict[str, Any]:
    """ "transfer": `sweeps.moves` of each network and axis, and method; "nanoGPT": by axis, by how
    much more Adam's optimum moves there than in the GPT (in factors of 2, without its sign)."""
    moves = {
        f"{network}, {axis}": {
            method: sweeps.moves(of(rows, network, axis, method)) for method in methods(network)
        }
        for network, axis in panels
    }
    return {"transfer": moves, "nanoGPT": {axis: excess(rows, axis) for axis in BASE}}


def excess(rows: list[dict[str, Any]], axis: str) -> Estimate:
    def moved(network: str, seed: int) -> float:
        mine = [row for row in of(rows, network, axis, "Adam") if row["seed"] == seed]
        optima = sweeps.transfer(mine)["Adam"]["optima"]
        return abs(optima[max(optima)] - optima[min(optima)])

    seeds = sorted({row["seed"] for row in rows})
    return student([moved("nanoGPT", seed) - moved("GPT", seed) for seed in seeds])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    sizes, few = SIZES, options.steps * 4 // 5
    if options.smoke:
        options.steps, options.seeds, few = 2, 2, 2
        sizes = {key: [8, 16] if key[1] == "width" else [1, 2] for key in SIZES}
    steps = {name: options.steps if name in mn_tasks.IMAGES else few for name in SAMPLES}

    def run(key: tuple[str, str], method: str, size: int, lrs: list[float]) -> list[dict[str, Any]]:
        runs = [(*key, size, method, lr, seed) for lr, seed in product(lrs, range(options.seeds))]
        return run_all(partial(train, steps=steps[key[0]]), runs, options)

    rows = [
        row
        for key, all_ in sizes.items()
        for method in methods(key[0])
        for row in sweeps.search(partial(run, key, method), all_, STARTS[method])
    ]
    found = {f"{key[0]}, {key[1]}": sweeps.transfer(of(rows, *key)) for key in sizes}
    result = {"transfer": found, "estimates": estimates(rows, list(sizes))}
    console = Console(width=140)
    for (network, axis), by_method in zip(sizes, found.values(), strict=True):
        console.print(sweeps.table(f"{network}, {steps[network]} steps", by_method, axis))
    console.print(result["estimates"])
    setting = {
        "steps": steps,
        "seeds": options.seeds,
        "base": BASE,
        "narrow": NARROW,
        "samples": SAMPLES,
        "data": "digits, pydoc topics",
    }
    keep(options, "mn_transfer", plot(rows, list(sizes)), setting=setting, **result, rows=rows)
    return result


def of(
    rows: list[dict[str, Any]], network: str, axis: str, method: str | None = None
) -> list[dict[str, Any]]:
    chosen = [row for row in rows if (row["network"], row["axis"]) == (network, axis)]
    return [row for row in chosen if method in (None, row["method"])]


def plot(rows: list[dict[str, Any]], panels: list[tuple[str, str]]) -> Figure:
    figure = Figure(figsize=(15, 3.2 * len(panels)), layout="constrained")
    for line, (network, axis) in zip(
        figure.subplots(len(panels), len(STARTS), sharey="row"), panels, strict=True
    ):
        chosen = of(rows, network, axis)
        least = min(row["loss"] for row in chosen if row["loss"] is not None)
        for axes, method in zip(line, methods(network), strict=False):
            sweeps.plot(axes, chosen, method, axis)
            axes.set_ylim(0.8 * least, 5)
            axes.set_title(f"{network}, {method}")
        line[0].set_ylabel("final loss (nats)")
        line[len(methods(network)) - 1].legend(fontsize=8)
    return figure


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument(
        "--steps", type=int, default=50, help="of images; the GPTs make 4/5 of them"
    )
    options.add_argument("--seeds", type=int, default=3)
    return options


if __name__ == "__main__":
    main()
