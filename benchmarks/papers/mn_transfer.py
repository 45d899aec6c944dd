"""Does dividing updates by their modular norm make the learning rate transfer? MN figures 1 and 4.

    python -m benchmarks.papers.mn_transfer            # results/papers/mn_transfer.{json,png}
    python -m benchmarks.papers.mn_transfer --smoke    # seconds

The paper says: the best learning rate of normed Adam and of normed SGD stays where it is across
width and depth, that of Adam and SGD does not, so that with the rate tuned at a small scale only
the normed optimizers get better with size. Here: ResMLP on digits and GPT on characters
(`mn_tasks`), 16 to 256 features, 1 to 18 blocks, 50 steps (the GPT 40).
"""

import argparse
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.papers import mn_tasks, sweeps
from benchmarks.runs import keep, parser, run_all

LRS = {
    "normed Adam": [2.0**power for power in range(-2, 4)],
    "Adam": [2.0**power for power in range(-9, -1)],
    "normed SGD": [2.0**power for power in range(-2, 4)],
    "SGD": [2.0**power for power in range(-2, 5)],
}
SIZES = {
    ("ResMLP", "width"): [16, 64, 256],
    ("ResMLP", "blocks"): [2, 6, 18],
    ("GPT", "width"): [16, 32, 64],
    ("GPT", "blocks"): [1, 3, 6],
}
BASE = {"width": 32, "blocks": 3}  # where only the other one changes
SAMPLES = {"ResMLP": 128, "GPT": 8}  # of a batch

Run = tuple[str, str, int, str, float, int]  # network, axis, size, method, lr, seed


def train(run: Run, steps: Mapping[str, int]) -> dict[str, Any]:
    network, axis, size, method, lr, seed = run
    torch.manual_seed(seed)
    net = mn_tasks.build(network, **{**BASE, axis: size})
    found = mn_tasks.train(
        net, network, method, lr, steps=steps[network], size=SAMPLES[network], seed=seed
    )
    return {
        "network": network,
        "axis": axis,
        "size": size,
        "method": method,
        "lr": lr,
        "seed": seed,
        "loss": found,
    }


def claims(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, bool]:
    """Of the paper; `found` is `sweeps.transfer` of each network and axis."""
    result = {}
    for method in ("Adam", "SGD"):
        for name, by_method in found.items():
            normed, plain = by_method[f"normed {method}"], by_method[method]
            result[f"{name}: normed {method}'s best lr stays within a factor of 2"] = (
                normed["range"] <= 1
            )
            result[f"{name}: {method}'s best lr moves by more than normed {method}'s"] = (
                plain["range"] > normed["range"]
            )
    return result


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    steps, sizes = {"ResMLP": options.steps, "GPT": options.steps * 4 // 5}, SIZES
    if options.smoke:
        steps, sizes = (
            {"ResMLP": 2, "GPT": 2},
            {key: [8, 16] if key[1] == "width" else [1, 2] for key in SIZES},
        )
    runs: list[Run] = [
        (network, axis, size, method, lr, seed)
        for (network, axis), all_ in sizes.items()
        for size, (method, lrs) in product(all_, LRS.items())
        for lr, seed in product(lrs[:: 4 if options.smoke else 1], range(options.seeds))
    ]
    rows = run_all(partial(train, steps=steps), runs, options)
    found = {
        f"{network}, {axis}": sweeps.transfer(of(rows, network, axis)) for network, axis in sizes
    }
    result = {"claims": claims(found), "transfer": found}
    console = Console(width=140)
    for (network, axis), by_method in zip(sizes, found.values(), strict=True):
        console.print(sweeps.table(f"{network}, {steps[network]} steps", by_method, axis))
    if not options.smoke:
        sweeps.say(console, result["claims"])
    setting = {
        "steps": steps,
        "seeds": options.seeds,
        "base": BASE,
        "samples": SAMPLES,
        "data": "digits, pydoc topics",
    }
    keep(options, "mn_transfer", plot(rows, list(sizes)), setting=setting, **result, rows=rows)
    return result


def of(rows: list[dict[str, Any]], network: str, axis: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["network"], row["axis"]) == (network, axis)]


def plot(rows: list[dict[str, Any]], panels: list[tuple[str, str]]) -> Figure:
    figure = Figure(figsize=(15, 3.2 * len(panels)), layout="constrained")
    for line, (network, axis) in zip(
        figure.subplots(len(panels), len(LRS), sharey="row"), panels, strict=True
    ):
        chosen = of(rows, network, axis)
        least = min(row["loss"] for row in chosen if row["loss"] is not None)
        for axes, method in zip(line, LRS, strict=True):
            sweeps.plot(axes, chosen, method, axis)
            axes.set_ylim(0.8 * least, 5)
            axes.set_title(f"{network}, {method}")
        line[0].set_ylabel("final loss (nats)")
        line[-1].legend(fontsize=8)
    return figure


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument(
        "--steps", type=int, default=50, help="of the ResMLP; the GPT makes 4/5 of them"
    )
    options.add_argument("--seeds", type=int, default=1)
    return options


if __name__ == "__main__":
    main()
