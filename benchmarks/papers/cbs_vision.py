"""Which structures scale better than dense in residual MLPs and ViTs? Figure 4 of "Compute Better
Spent".

    python -m benchmarks.papers.cbs_vision            # results/papers/cbs_{mlp,vit}.{json,png}
    python -m benchmarks.papers.cbs_vision --smoke    # seconds

The paper trains MLPs on CIFAR-10 and ViTs on CIFAR-100, of growing width, all layers but the first
and the classifier structured: "1) BTT achieves the best scaling, and 2) structures with FLOPs equal
to parameters scale better than those with parameter sharing (Kronecker and TT)" (figure 4); Monarch
of 4 blocks "achieves equal or lower train and test error than dense for the same amount of compute,
though it does not improve the scaling exponent of training error" (section 4). Base learning rates
are tuned for dense at a small width; TT has rank 16 in MLPs and 8 in ViTs (E.2).

Here: the models, the digits and the steps of `time_to_loss`, whose kept rows have dense, BTT and,
in MLPs, low-rank layers; the others are trained here, at the same base rate, dense's best at width
64. In the MLPs, where that of BTT is half of dense's, each structure has its own best at width 64,
found by factors of 2 on seed 0. TT has rank 4 in the MLPs: 16 costs more than dense at these
widths. Losses are those of held-out images, moved and mixed. Exponents and losses at equal FLOPs
are those of `cbs_scaling`, seed by seed, with Student's intervals.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import combinations
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks import time_to_loss
from benchmarks.papers.cbs_report import interval, ratio
from benchmarks.papers.cbs_scaling import curve_of, exponent, gap
from benchmarks.papers.intervals import student
from benchmarks.record import read
from benchmarks.runs import keep, parser, resume
from benchmarks.time_to_loss import Job, Setup, losses_of, next_rates


@dataclass(frozen=True)
class Study:
    """Models of one kind: those of `time_to_loss` that are read, and those that are trained."""

    name: str  # of the result
    setup: str  # of `time_to_loss`
    kept: tuple[str, ...]
    new: dict[str, tuple[int, ...]]  # widths
    lr: float | None  # of all structures; None: each has its own best at the base width

    @property
    def structures(self) -> tuple[str, ...]:  # "dense" first
        return (*self.kept[:-1], *self.new, self.kept[-1])


STUDIES = (
    Study(
        "cbs_mlp",
        "digits MLP",
        ("dense", "low-rank", "BTT r=1"),
        {"Kronecker": (64, 144, 256, 576), "TT r=4": (64, 144, 256), "Monarch b=4": (64, 128, 256)},
        lr=None,
    ),
    Study(
        "cbs_vit",
        "digits ViT",
        ("dense", "BTT r=1"),
        {"Kronecker": (64, 144, 256), "TT r=8": (48, 80, 144), "Monarch b=4": (64, 128)},
        lr=2.0**-8,
    ),
)


def job_of(row: dict[str, Any]) -> Job:
    return Job(*(row[field.name] for field in fields(Job)))


def compare(rows: list[dict[str, Any]], structures: Sequence[str]) -> dict[str, Any]:
    """The "exponents", and for every two structures by how much the first one's is larger and the
    log of its loss over the second one's at equal FLOPs."""
    by_structure = {
        structure: [row for row in rows if row["structure"] == structure]
        for structure in structures
    }
    seeds = sorted({row["seed"] for row in rows})

    def curves(structure: str) -> list[Any]:
        return [curve_of(by_structure[structure], [seed]) for seed in seeds]

    powers = {
        structure: [exponent(curve) for curve in curves(structure)] for structure in structures
    }

    def differences(first: str, second: str) -> Sequence[float]:
        return [a - b for a, b in zip(powers[first], powers[second], strict=True)]

    def gaps(first: str, second: str) -> Sequence[float]:
        return [gap(a, b) for a, b in zip(curves(first), curves(second), strict=True)]

    return {
        "exponents": {structure: student(values) for structure, values in powers.items()},
        "pairs": [
            {"pair": [*pair], "steeper": student(differences(*pair)), "loss": student(gaps(*pair))}
            for pair in combinations(reversed(structures), 2)
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


def plot(rows: list[dict[str, Any]], structures: Sequence[str]) -> Figure:
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axes = figure.subplots()
    seeds = sorted({row["seed"] for row in rows})
    for n, structure in enumerate(structures):
        curve = curve_of([row for row in rows if row["structure"] == structure], seeds)
        flops, losses = zip(*((math.exp(x), math.exp(y)) for x, y in curve), strict=True)
        axes.loglog(flops, losses, color=f"C{n}", marker="osD^vP"[n], label=structure)
    axes.set(xlabel="FLOPs of a forward pass of one image", ylabel="held-out loss")
    axes.legend(fontsize="small")
    return figure


def run(study: Study, options: argparse.Namespace) -> None:
    earlier, setup = read("time_to_loss"), time_to_loss.SETUPS[study.setup]
    setting = {"steps": setup.steps, "batch": setup.batch, "base": setup.base, "lr": study.lr}
    changes, widths = {}, study.new
    if options.smoke:
        changes = {"steps": 2, "batch": 8, "samples": 64}
        widths = {structure: (all_[0], all_[-1]) for structure, all_ in widths.items()}

    def rows_of(jobs: Sequence[Job]) -> list[dict[str, Any]]:
        function = partial(time_to_loss.train, changes=changes)
        return resume(function, jobs, options, study.name, setting, job_of)

    rates = {structure: earlier["lrs"][study.setup][structure] for structure in study.kept}
    rates |= find_rates(study, setup, rows_of)
    kept = [
        row
        for row in earlier["rows"]
        if row["setup"] == study.setup and rates.get(row["structure"]) == row["lr"]
        if row["structure"] in study.kept
    ]
    jobs = [
        Job(study.setup, structure, width, rates[structure], seed)
        for structure, all_ in widths.items()
        for width in all_
        for seed in sorted({row["seed"] for row in kept})
    ]
    jobs.sort(key=lambda job: (job.seed, -job.width))
    rows = kept + rows_of(jobs)
    compared = compare(rows, study.structures)
    show(compared, Console(width=120))
    content = {"setting": setting, "rates": rates, **compared, "kept": study.kept, "rows": rows}
    keep(options, study.name, plot(rows, study.structures), **content)


def find_rates(
    study: Study, setup: Setup, rows_of: Callable[[Sequence[Job]], list[dict[str, Any]]]
) -> dict[str, float]:
    """structure -> base rate of those trained here: the study's, or the best of a climb."""
    if study.lr is not None:
        return dict.fromkeys(study.new, study.lr)
    rates = {}
    for structure in study.new:
        losses: dict[float, float] = {}
        while tried := next_rates(losses, setup.start):
            rows = rows_of([Job(study.setup, structure, setup.base, lr, 0) for lr in tried])
            losses |= losses_of(rows)
        rates[structure] = min(losses, key=losses.__getitem__)
    return rates


def main() -> None:
    options = parser(__doc__).parse_args()
    for study in STUDIES:
        run(study, options)


if __name__ == "__main__":
    main()
