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

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations as pairs_of
from typing import Any

from benchmarks.harness import figures
from benchmarks.harness.experiment import Axis, Experiment, Row, Runs
from benchmarks.harness.models import BASE_WIDTH
from benchmarks.harness.record import read
from benchmarks.harness.statistics import (
    best_points,
    curve_of,
    differences,
    exponent,
    gap,
    seeds_of,
    select,
    student,
)
from benchmarks.harness.training import HELD_OUT_SAMPLES
from benchmarks.training import time_to_loss


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

    def kept_rows(self) -> list[Row]:
        """Of `time_to_loss`, at each structure's rate."""
        earlier = read("time_to_loss")
        rates = earlier["lrs"][self.setup]
        return [
            row
            for row in select(earlier["rows"], setup=self.setup)
            if row["structure"] in self.kept and row["lr"] == rates[row["structure"]]
        ]

    def design(self, runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
        found = []
        for structure in axes["structure"]:
            lr = time_to_loss.climb(runs, self.setup, structure) if self.lr is None else self.lr
            where = {"setup": self.setup, "structure": structure, "lr": lr}
            widths = axes["width"](where)
            found += runs.of(
                where | {"width": width, "seed": seed} for width in widths for seed in axes["seed"]
            )
        return [*self.kept_rows(), *found]

    def analyse(self, rows: list[Row]) -> Row:
        """The "exponents", and for every two structures by how much the first one's is larger and
        the log of its loss over the second one's at equal FLOPs."""
        seeds = seeds_of(rows)
        curves = {
            structure: [curve_of(select(rows, structure=structure), [seed]) for seed in seeds]
            for structure in self.structures
        }
        powers = {structure: [*map(exponent, found)] for structure, found in curves.items()}
        return {
            "rates": {row["structure"]: row["lr"] for row in rows},
            "exponents": {structure: student(found) for structure, found in powers.items()},
            "pairs": [
                {
                    "pair": [first, second],
                    "steeper": differences(powers[first], powers[second]),
                    "loss": student([*map(gap, curves[first], curves[second])]),
                }
                for first, second in pairs_of(reversed(self.structures), 2)
            ],
            "kept": self.kept,
        }


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


def train(setup: str, structure: str, width: int, lr: float, seed: int, **sizes: Any) -> Row:
    return time_to_loss.train(setup, structure, width, lr, seed, **{setup: sizes})


def experiment(study: Study) -> Experiment:
    setup = time_to_loss.SETUPS[study.setup]
    return Experiment(
        name=f"papers/{study.name}",
        about=__doc__,
        run=train,
        axes={
            "setup": [study.setup],
            "structure": [*study.new],
            "width": lambda job: study.new[job["structure"]],
            "lr": [],
        },
        sizes={"steps": setup.steps, "batch": setup.batch, "samples": HELD_OUT_SAMPLES},
        note={"base": BASE_WIDTH, "lr": study.lr},
        smoke={
            "steps": 2,
            "batch": 8,
            "samples": 64,
            "seeds": 3,  # as many as are kept
            "width": lambda job: (study.new[job["structure"]][0], study.new[job["structure"]][-1]),
        },
        design=study.design,
        analyse=study.analyse,
        draw=lambda result: figures.curves(
            best_points(result["rows"], "structure"), "flops", line=["structure"]
        ),
    )


EXPERIMENTS = [experiment(study) for study in STUDIES]

if __name__ == "__main__":
    for each in EXPERIMENTS:
        each.main()
