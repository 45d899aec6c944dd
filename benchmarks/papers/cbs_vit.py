"""Which structures scale better than dense in a ViT? Figure 4c-d of "Compute Better Spent".

    python -m benchmarks.papers.cbs_vit            # results/papers/cbs_vit.{json,png}
    python -m benchmarks.papers.cbs_vit --smoke    # seconds

The paper trains ViTs of growing width on CIFAR-100, all layers but the classifier structured:
"1) BTT achieves the best scaling, and 2) structures with FLOPs equal to parameters scale better
than those with parameter sharing (Kronecker and TT)" (figure 4); Monarch of 4 blocks "achieves
equal or lower train and test error than dense for the same amount of compute, though it does not
improve the scaling exponent of training error" (section 4). Its ViTs have TT of rank 8 (E.2), and
one base learning rate, tuned for dense at a small width.

Here: the ViT, the digits and the steps of `time_to_loss`, whose kept rows have dense and BTT at
its base rate, 2^-8, the best of dense at width 64 (and of BTT); the others are trained at that
rate. Losses are those of held-out images, moved and mixed. Exponents and losses at equal FLOPs are
those of `cbs_scaling`, seed by seed, with Student's intervals. Low-rank layers, which the figure
has too, are not run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from itertools import combinations
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn

import structlin
from benchmarks import time_to_loss
from benchmarks.papers import vision
from benchmarks.papers.cbs_report import interval, ratio
from benchmarks.papers.cbs_scaling import curve_of, exponent, gap
from benchmarks.papers.intervals import student
from benchmarks.record import read
from benchmarks.runs import keep, parser, resume
from benchmarks.time_to_loss import Job

SETUP = "digits ViT"
LR = 2.0**-8
KEPT = ("dense", "BTT r=1")  # of `time_to_loss`, at LR
NEW: dict[str, tuple[Callable[[int], structlin.Family], tuple[int, ...]]] = {
    "Kronecker": (lambda width: structlin.Kronecker(), (64, 144, 256)),
    "TT r=8": (lambda width: structlin.TT(rank=8), (48, 80, 144)),
    "Monarch b=4": (lambda width: structlin.Monarch(blocks=4), (64, 128)),
}
STRUCTURES = ("dense", "Kronecker", "TT r=8", "Monarch b=4", "BTT r=1")


def build(width: int, structure: str) -> nn.Module:
    if structure == "dense":
        return time_to_loss.SETUPS[SETUP].build(width, structure)
    model = vision.ViT(vision.MixedDigits.inputs, width, vision.MixedDigits.outputs)
    family, zero = NEW[structure][0](width), ("*c_proj", "*query")
    return structlin.convert(model, family, include="blocks.*", zero_init=zero)


def job_of(row: dict[str, Any]) -> Job:
    return Job(*(row[field.name] for field in fields(Job)))


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The "exponents", and for every two structures by how much the first one's is larger and the
    log of its loss over the second one's at equal FLOPs."""
    by_structure = {
        structure: [row for row in rows if row["structure"] == structure]
        for structure in STRUCTURES
    }
    seeds = sorted({row["seed"] for row in rows})

    def curves(structure: str) -> list[Any]:
        return [curve_of(by_structure[structure], [seed]) for seed in seeds]

    powers = {
        structure: [exponent(curve) for curve in curves(structure)] for structure in STRUCTURES
    }

    def differences(first: str, second: str) -> Sequence[float]:
        return [a - b for a, b in zip(powers[first], powers[second], strict=True)]

    def gaps(first: str, second: str) -> Sequence[float]:
        return [gap(a, b) for a, b in zip(curves(first), curves(second), strict=True)]

    return {
        "exponents": {structure: student(values) for structure, values in powers.items()},
        "pairs": [
            {"pair": [*pair], "steeper": student(differences(*pair)), "loss": student(gaps(*pair))}
            for pair in combinations(reversed(STRUCTURES), 2)
        ],
    }


# ---- the program ---------------------------------------------------------------------------------


def show(compared: dict[str, Any], console: Console) -> None:
    for structure, found in compared["exponents"].items():
        console.print(f"{structure}: loss ~ FLOPs^-a, a = {interval(found)}")
    table = Table(title="the first against the second")
    for title in ("structures", "exponent larger by", "loss / the second's at equal FLOPs"):
        table.add_column(title)
    for row in compared["pairs"]:
        table.add_row(", ".join(row["pair"]), interval(row["steeper"]), ratio(row["loss"]))
    console.print(table)


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axes = figure.subplots()
    seeds = sorted({row["seed"] for row in rows})
    for n, structure in enumerate(STRUCTURES):
        curve = curve_of([row for row in rows if row["structure"] == structure], seeds)
        flops, losses = zip(*((math.exp(x), math.exp(y)) for x, y in curve), strict=True)
        axes.loglog(flops, losses, color=f"C{n}", marker="osD^vP"[n], label=structure)
    axes.set(xlabel="FLOPs of a forward pass of one image", ylabel="held-out loss")
    axes.legend(fontsize="small")
    return figure


def main() -> None:
    options = parser(__doc__)
    arguments = options.parse_args()
    kept = [
        row
        for row in read("time_to_loss")["rows"]
        if (row["setup"], row["lr"]) == (SETUP, LR) and row["structure"] in KEPT
    ]
    seeds = sorted({row["seed"] for row in kept})
    widths = {structure: widths for structure, (_, widths) in NEW.items()}
    changes: dict[str, Any] = {"build": build}
    if arguments.smoke:
        changes |= {"steps": 2, "batch": 8, "samples": 64}
        widths = {structure: (all_[0], all_[-1]) for structure, all_ in widths.items()}
    jobs = [
        Job(SETUP, structure, width, LR, seed)
        for structure, all_ in widths.items()
        for width in all_
        for seed in seeds
    ]
    jobs.sort(key=lambda job: (job.seed, -job.width))
    setup = time_to_loss.SETUPS[SETUP]
    setting = {"steps": setup.steps, "batch": setup.batch, "base": setup.base, "lr": LR}
    function = partial(time_to_loss.train, changes=changes)
    rows = kept + resume(function, jobs, arguments, "cbs_vit", setting, job_of)
    compared = compare(rows)
    show(compared, Console(width=120))
    content = {"setting": setting, **compared, "kept": KEPT, "rows": rows}
    keep(arguments, "cbs_vit", plot(rows), **content)


if __name__ == "__main__":
    main()
