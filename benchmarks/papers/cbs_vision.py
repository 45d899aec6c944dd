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

Here: scikit-learn's digits with the paper's augmentation; its residual MLPs (E.1) and its ViT, with
all matrices of the blocks structured. AdamW with a cosine to zero; muP and `param_groups` take the
base rate, meant at width 64, to the other widths. The ViTs have dense's best. In the MLPs, where
that of BTT is half of dense's, each structure has its own, found by factors of 2 on seed 0. TT has
rank 4 in the MLPs: 16 costs more than dense at these widths. Losses are those of held-out images,
moved and mixed. Exponents and losses at equal FLOPs are those of `cbs_scaling`, seed by seed, with
Student's intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations as pairs_of
from statistics import fmean

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, models, training
from benchmarks.harness.experiment import Axis, Experiment, Row, Runs, Tune, tune
from benchmarks.harness.models import BASE_WIDTH, STRUCTURES
from benchmarks.harness.statistics import (
    best,
    best_points,
    curve_of,
    curve_of_rates,
    differences,
    exponent,
    gap,
    seeds_of,
    select,
    student,
)
from benchmarks.harness.tasks import MixedDigits
from benchmarks.harness.training import HELD_OUT_SAMPLES


@dataclass(frozen=True)
class Study:
    """Models of one kind, and how they are trained."""

    name: str  # of the result
    setup: str  # of its rows
    kind: type[nn.Module]
    zero: Sequence[str]  # the layers that start at zero
    start: float  # the first rate of a climb
    steps: int
    batch: int
    widths: Mapping[str, tuple[int, ...]]  # of each structure; the first is "dense", the last ours
    lr: float | None  # of all structures; None: each has its own best at the base width

    def build(self, width: int, structure: str) -> nn.Module:
        model = self.kind(MixedDigits.inputs, width, MixedDigits.outputs)
        family = STRUCTURES[structure](width)
        return structlin.convert(model, family, include="blocks.*", init="mup", zero_init=self.zero)

    def climb(self, runs: Runs, structure: str) -> float:
        """The best base rate, found at the base width on seed 0."""
        where = {"setup": self.setup, "structure": structure, "width": BASE_WIDTH}
        return best(curve_of_rates(tune(runs, where, [0], Tune(lambda job: self.start))))

    def design(self, runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
        found = []
        for structure in axes["structure"]:
            lr = self.climb(runs, structure) if self.lr is None else self.lr
            where = {"setup": self.setup, "structure": structure, "lr": lr}
            widths = axes["width"](where)
            found += runs.of(
                where | {"width": width, "seed": seed} for width in widths for seed in axes["seed"]
            )
        return found

    def analyse(self, rows: list[Row]) -> Row:
        """The "exponents", and for every two structures by how much the first one's is larger and
        the log of its loss over the second one's at equal FLOPs."""
        seeds = seeds_of(rows)
        curves = {
            structure: [curve_of(select(rows, structure=structure), [seed]) for seed in seeds]
            for structure in self.widths
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
                for first, second in pairs_of(reversed([*self.widths]), 2)
            ],
        }


STUDIES = (
    Study(
        "cbs_mlp",
        "digits MLP",
        models.Perceptron,
        ("*c_proj",),
        start=2**-7,
        steps=400,
        batch=128,
        widths={
            "dense": (32, 64, 128, 256),
            "low-rank": (64, 256),
            "Kronecker": (64, 144, 256, 576),
            "TT r=4": (64, 144, 256),
            "Monarch b=4": (64, 128, 256),
            "BTT r=1": (64, 144, 256, 576),
        },
        lr=None,
    ),
    Study(
        "cbs_vit",
        "digits ViT",
        models.ViT,
        ("*c_proj", "*query"),
        start=2**-8,
        steps=500,
        batch=64,
        widths={
            "dense": (32, 64, 128),
            "Kronecker": (64, 144, 256),
            "TT r=8": (48, 80, 144),
            "Monarch b=4": (64, 128),
            "BTT r=1": (64, 144, 256),
        },
        lr=2.0**-8,
    ),
)


def train(
    setup: str,
    structure: str,
    width: int,
    lr: float,
    seed: int,
    *,
    steps: int,
    batch: int,
    samples: int,
) -> Row:
    """The loss on new samples (None: diverged), parameters and FLOPs of a forward pass of one
    sample."""
    (study,) = (study for study in STUDIES if study.setup == setup)
    torch.manual_seed(seed)
    model, task = study.build(width, structure), MixedDigits(seed)
    with torch.device("meta"):
        base = study.build(BASE_WIDTH, "dense")
    groups = structlin.param_groups(model, lr, base=base)
    optimizer = torch.optim.AdamW(groups, lr, fused=True)

    def loss(step: int) -> Tensor:
        x, y = task.batch(batch)
        return task.loss(model(x), y)

    training.descend(optimizer, loss, steps, warmup=steps // 20)
    x, y = task.new(samples)
    with torch.no_grad():
        parts = zip(x.split(1024), y.split(1024), strict=True)
        final = fmean(task.loss(model(part), target).item() for part, target in parts)
    return {
        "loss": training.finite(final),
        "params": training.count_params(model),
        "flops": training.forward_flops(model, x[:1]),
    }


def experiment(study: Study) -> Experiment:
    return Experiment(
        name=f"papers/{study.name}",
        about=__doc__,
        run=train,
        axes={
            "setup": [study.setup],
            "structure": [*study.widths],
            "width": lambda job: study.widths[job["structure"]],
            "lr": [],
        },
        sizes={"steps": study.steps, "batch": study.batch, "samples": HELD_OUT_SAMPLES},
        note={"base": BASE_WIDTH, "lr": study.lr},
        smoke={
            "steps": 2,
            "batch": 8,
            "samples": 64,
            "width": lambda job: [study.widths[job["structure"]][n] for n in (0, -1)],
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
