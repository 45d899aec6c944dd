"""How much mass should the blocks have, and should it grow with their number? MN figures 3 and 6.

    python -m benchmarks.papers.mn_mass            # results/papers/mn_mass.{json,png}
    python -m benchmarks.papers.mn_mass --smoke    # seconds

In a residual network whose input and output layer have mass 1 each, the mass of all blocks together
is what is left to tune. The paper sweeps it, and the learning rate: the best mass of a ResMLP on
CIFAR-10 is 0.5 at every depth, and for a GPT the best mass and rate of a small one are the best of
a larger one (figures 3 and 6). The mass of the blocks is tared, that is kept at one value however
many they are; with free masses, 1 for each layer, the blocks of a deep network take all the
learning from the input and the output layer.

Here: ResMLP on digits (`mn_tasks`), over depth as in the paper and over width too, normed Adam, 50
steps. For every mass the loss is the least of three learning rates, each the mean of 4 seeds (2
with free masses), so that no mass wins by the length of its steps alone.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.papers import mn_tasks, sweeps
from benchmarks.runs import keep, parser, run_all

MASSES = [2.0**power for power in range(-4, 6, 2)]
MASS_LRS = [2.0**power for power in range(-1, 2)]
SIZES = {"width": [16, 64, 256], "blocks": [2, 18]}
BASE = {"width": 32, "blocks": 3}
DEPTHS = [2, 8, 32]
DEPTH_LRS = [2.0**power for power in range(-2, 4)]
LAYERS = 2  # of a block: the mass of free blocks is LAYERS * blocks

# axis, size, mass of the blocks (None: free), lr, seed
Run = tuple[str, int, float | None, float, int]


def train(run: Run, steps: int) -> dict[str, Any]:
    axis, size, mass, lr, seed = run
    torch.manual_seed(seed)
    shape = {**BASE, axis: size}
    total = LAYERS * shape["blocks"] if mass is None else mass
    net = mn_tasks.build("ResMLP", **shape, blocks_mass=total)
    found = mn_tasks.train(net, "ResMLP", "normed Adam", lr, steps=steps, size=128, seed=seed)
    return {"axis": axis, "size": size, "mass": mass, "lr": lr, "seed": seed, "loss": found}


def best_masses(rows: list[dict[str, Any]], axis: str) -> dict[int, dict[str, Any]]:
    """size -> best mass, log2 of it between the grid's points, and the least loss at each mass."""
    found = {}
    for size in sorted({row["size"] for row in rows if row["axis"] == axis}):
        chosen = [
            {**row, "method": str(row["mass"])}
            for row in rows
            if (row["axis"], row["size"]) == (axis, size)
        ]
        least = {
            float(mass): min(curve.values()) for (mass, _), curve in sweeps.losses(chosen).items()
        }
        curve = dict(sorted(least.items()))
        best = sweeps.best(curve)
        good = [mass for mass, loss in curve.items() if loss <= 1.25 * curve[best]]
        found[size] = {
            "optimum": sweeps.optimum(curve),
            "least": curve[best],
            "within 25 %": good,
            "curve": curve,
        }
    return found


def claims(
    masses: Mapping[str, Mapping[int, Mapping[str, Any]]], depth: Mapping[str, Any]
) -> dict[str, bool]:
    free, tared = depth["free"], depth["tared"]
    deepest = max(free["losses"])
    result = {}
    for axis, by_size in masses.items():
        shared = set.intersection(*(set(found["within 25 %"]) for found in by_size.values()))
        result[f"{axis}: one mass is within 25 % of the least loss at every size"] = bool(shared)
    result["tared: the best lr stays within a factor of 2 from 2 blocks to 32"] = (
        tared["range"] <= 1
    )
    result["free: the best lr moves more with depth than tared"] = free["range"] > tared["range"]
    result["the deepest network ends lower with tared mass than with free"] = (
        tared["losses"][deepest] < free["losses"][deepest]
    )
    return result


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    sizes, masses, depths = SIZES, MASSES, DEPTHS
    if options.smoke:
        options.steps, options.seeds = 2, 1
        sizes, masses, depths = {"width": [8, 16], "blocks": [1, 2]}, [0.5, 1.0, 2.0], [1, 2]
    seeds, few = range(options.seeds), range((options.seeds + 1) // 2)
    sweep: list[Run] = [
        (axis, size, mass, lr, seed)
        for axis, all_ in sizes.items()
        for size, mass, lr, seed in product(all_, masses, MASS_LRS, seeds)
    ]
    deep: list[Run] = [
        ("blocks", blocks, mass, lr, seed)
        for blocks, mass, lr, seed in product(depths, (1.0, None), DEPTH_LRS, few)
    ]
    work = partial(train, steps=options.steps)
    of_mass, of_depth = run_all(work, sweep, options), run_all(work, deep, options)
    found = {axis: best_masses(of_mass, axis) for axis in sizes}
    of_depth = [{**row, "method": "free" if row["mass"] is None else "tared"} for row in of_depth]
    depth = sweeps.transfer(of_depth)
    result = {"claims": claims(found, depth), "masses": found, "depth": depth}
    console = Console(width=140)
    show(found, console)
    console.print(sweeps.table("mass 1 for all blocks, or 1 for each layer", depth, "blocks"))
    if not options.smoke:
        sweeps.say(console, result["claims"])
    setting = {
        "steps": options.steps,
        "seeds": options.seeds,
        "base": BASE,
        "batch": 128,
        "data": "digits",
    }
    figure = plot(found, of_depth)
    keep(
        options,
        "mn_mass",
        figure,
        setting=setting,
        **result,
        rows={"mass": of_mass, "depth": of_depth},
    )
    return result


def show(masses: Mapping[str, Mapping[int, Mapping[str, Any]]], console: Console) -> None:
    table = Table(
        title="mass of all blocks together, where the input and the output layer have 1 each"
    )
    for title in ("", "best", "least loss", "masses within 25 % of it", "loss at mass 1"):
        table.add_column(title, justify="left" if not title else "right")
    for axis, by_size in masses.items():
        for size, found in by_size.items():
            good = found["within 25 %"]
            table.add_row(
                f"{axis} {size}", f"{2 ** found['optimum']:.3g}", f"{found['least']:.3g}",
                f"{min(good):g} to {max(good):g}", f"{found['curve'][1.0]:.3g}",
            )  # fmt: skip
    console.print(table)


def plot(
    masses: Mapping[str, Mapping[int, Mapping[str, Any]]], of_depth: list[dict[str, Any]]
) -> Figure:
    figure = Figure(figsize=(15, 4), layout="constrained")
    panels = figure.subplots(1, 4)
    for axes, (axis, by_size) in zip(panels, masses.items(), strict=False):
        for size, found in by_size.items():
            axes.plot(
                list(found["curve"]), list(found["curve"].values()), ".-", label=f"{axis} {size}"
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="mass of the blocks", ylabel="final loss (nats)")
        axes.legend(fontsize=8)
    for axes, method in zip(panels[2:], ("tared", "free"), strict=True):
        sweeps.plot(axes, of_depth, method, "blocks")
        axes.legend(fontsize=8)
    return figure


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--seeds", type=int, default=4, help="for free masses half of them")
    return options


if __name__ == "__main__":
    main()
