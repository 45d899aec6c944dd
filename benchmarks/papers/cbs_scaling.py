"""Loss against compute by structure, rank, number of blocks and cores: figures 4, 5, 11 and 12 of
"Compute Better Spent".

    python -m benchmarks.papers.cbs_scaling            # the full result, ten core-minutes
    python -m benchmarks.papers.cbs_scaling --smoke    # seconds
    python -m benchmarks.papers.cbs_scaling --structures low-rank    # the others' rows are kept

The paper trains MLPs and ViTs of growing width on CIFAR-10/100 with augmentation, for the same
number of epochs each. It claims (fig. 4) that the loss is a power law of compute whose exponent
depends on the structure; that BTT, which has a parameter for every multiplication, beats dense
matrices at the same compute and has the larger exponent; that structures which share their
parameters (Kronecker, TT) do worse; and (fig. 5) that less compute per dimension is better at the
same compute: a lower rank of BTT, of two cores and of three (fig. 11), more blocks of Monarch; more
than two cores bring "no or negligible improvement" (fig. 12).

Here: MLPs of three hidden layers, the two square matrices structured, Adam with a cosine, as many
samples for every model, and one base learning rate, that of the dense model at width 64, taken to
every structure and width by `param_groups`; dense alone has the best of three at each width. Two
tasks: `tasks.Teacher`, where every sample is new, and digits with shifts and noise. Smaller than
the paper: widths 32 to 1000, where the paper's go to 16384, and no ViT. A seed is another teacher
(or other noise), another initialisation and other samples.

The exponent a of loss ~ FLOPs^-a is a least-squares slope in logarithms; FLOPs are those of a
forward pass, all layers counted. Two structures are compared at equal FLOPs: the geometric mean of
the ratio of their losses over the FLOPs that both reach, each curve interpolated in logarithms.
Errors: bootstrap over the seeds, each drawn with all its widths and structures. With three seeds a
95 % interval is about the range over the seeds.
"""

from collections.abc import Iterable
from typing import Any

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import (
    Curve,
    Estimate,
    best_points,
    bootstrap,
    curve_of,
    exponent,
    gap,
    seeds_of,
    select,
    values,
)
from benchmarks.papers.cbs import train_mlp

WIDTHS = {
    "dense": [32, 64, 128, 256],
    "low-rank": [64, 144, 256, 576],
    "Kronecker": [64, 144, 256, 576],
    "TT r=4": [64, 144, 256],
    "Monarch b=4": [64, 128, 256],
    "Monarch b=16": [64, 128, 256, 512],
    "BTT r=1": [64, 144, 256, 576],
    "BTT r=2": [64, 144, 256, 400],
    "BTT r=4": [64, 144, 256],
    "BTT r=1, 3 cores": [64, 216, 512, 1000],
    "BTT r=2, 3 cores": [64, 216, 512],
    "BTT r=4, 3 cores": [64, 216, 512],
    "BTT r=1, 4 cores": [81, 256, 625, 1296],
}
STEPS = {"teacher": 400, "digits": 200}
LR = 2.0**-6  # the best of powers of 2 for the dense model at width 64, on both tasks
DENSE_RATES = [LR / 2, LR, 2 * LR]

BETTER = (  # the paper: at equal FLOPs the first has the lower loss
    ("BTT r=1", "dense"),
    ("BTT r=1", "low-rank"),
    ("BTT r=1", "Kronecker"),
    ("BTT r=4", "TT r=4"),
    ("BTT r=1", "BTT r=2"),
    ("BTT r=2", "BTT r=4"),
    ("BTT r=1", "BTT r=1, 3 cores"),
    ("BTT r=1", "BTT r=1, 4 cores"),
    ("BTT r=1, 3 cores", "BTT r=2, 3 cores"),
    ("BTT r=2, 3 cores", "BTT r=4, 3 cores"),
    ("Monarch b=16", "Monarch b=4"),
)
STEEPER = (("BTT r=1", "dense"),)  # the paper: the first has the larger exponent


def train(
    task: str, structure: str, width: int, lr: float, seed: int, steps: dict[str, int]
) -> Row:
    return train_mlp(task, structure, width, lr, seed, steps[task])


def compare(rows: list[Row]) -> dict[str, Any]:
    """The exponents of one task's structures, and estimates of how pairs of them compare."""
    seeds, structures = seeds_of(rows), [n for n in WIDTHS if n in values(rows, "structure")]

    def measured(statistic: Any, *names: str) -> Estimate:
        mine = [select(rows, structure=name) for name in names]
        return bootstrap(lambda drawn: statistic(*(curve_of(r, drawn) for r in mine)), seeds)

    def steeper(first: Curve, second: Curve) -> float:
        return exponent(first) - exponent(second)

    def pairs(of: Iterable[tuple[str, str]], statistic: Any) -> list[Row]:
        return [
            {"pair": pair, **measured(statistic, *pair)} for pair in of if {*pair} <= {*structures}
        ]

    return {
        "exponents": {name: measured(exponent, name) for name in structures},
        "against_dense": {name: measured(gap, name, "dense") for name in structures},
        "log_ratios": pairs(BETTER, gap),
        "exponent_differences": pairs(STEEPER, steeper),
    }


EXPERIMENT = Experiment(
    name="papers/cbs_scaling",
    about=__doc__,
    run=train,
    axes={
        "task": [*STEPS],
        "structure": [*WIDTHS],
        "width": lambda job: WIDTHS[job["structure"]],
        "lr": lambda job: DENSE_RATES if job["structure"] == "dense" else [LR],
    },
    sizes={"steps": STEPS},
    note={"batch": 256, "optimizer": "Adam, cosine", "lr": LR},
    smoke={
        "seeds": 1,
        "steps": dict.fromkeys(STEPS, 2),
        "width": lambda job: (WIDTHS[job["structure"]][0], WIDTHS[job["structure"]][-1]),
    },
    analyse=lambda rows: {
        "comparisons": {task: compare(select(rows, task=task)) for task in values(rows, "task")}
    },
    draw=lambda result: figures.curves(
        best_points(result["rows"], "task", "structure"),
        "flops",
        panel=["task"],
        line=["structure"],
    ),
)

if __name__ == "__main__":
    EXPERIMENT.main()
