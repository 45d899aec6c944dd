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
Errors: Student's 95 % intervals of what each seed gives, on the pages and in verdicts. The file has
bootstrap intervals over the seeds as well, each drawn with all its widths and structures; with
three seeds these are about the range over the seeds.
"""

from collections.abc import Callable, Iterable
from itertools import chain, product
from math import log
from typing import Any

import torch

import structlin
from benchmarks.harness import training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.models import BASE_WIDTH, STRUCTURES, structured_mlp
from benchmarks.harness.report import factor, listed, number, table
from benchmarks.harness.shown import Claim, Holds
from benchmarks.harness.statistics import (
    Curve,
    Estimate,
    above,
    below,
    bootstrap,
    curve_of,
    exponent,
    gap,
    one,
    seeds_of,
    select,
    student,
    values,
)
from benchmarks.harness.tasks import Digits, Teacher

TASKS: dict[str, type[Teacher] | type[Digits]] = {"teacher": Teacher, "digits": Digits}
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
    task: str,
    structure: str,
    width: int,
    lr: float,
    seed: int,
    steps: dict[str, int],
    *,
    rule: str = "aware",
) -> Row:
    """Train an MLP of three hidden layers, the two square ones structured, by Adam; its loss on new
    samples (None: diverged), parameters and FLOPs per sample.

    Args:
        lr: of the dense model at `BASE_WIDTH`; muP takes it to `width`.
    """
    torch.manual_seed(seed)
    data = TASKS[task](seed)
    model = structured_mlp(data.inputs, width, data.outputs, STRUCTURES[structure](width))
    base = {width: BASE_WIDTH}
    groups = structlin.param_groups(model, lr, base=base, structure_aware=rule == "aware")
    loss = training.train(model, torch.optim.Adam(groups, lr), data, steps[task], batch=256)
    cost = structlin.cost(model, torch.zeros(1, data.inputs))
    return {"loss": loss, "params": cost.params, "flops": cost.flops}


def compare(rows: list[Row]) -> dict[str, Any]:
    """The exponents of one task's structures, and estimates of how pairs of them compare."""
    seeds = seeds_of(rows)
    structures = [name for name in WIDTHS if name in values(rows, "structure")]

    def measured(statistic: Any, *names: str) -> Estimate:
        runs = [select(rows, structure=name) for name in names]
        return bootstrap(lambda drawn: statistic(*(curve_of(r, drawn) for r in runs)), seeds)

    def pairs(of: Iterable[tuple[str, str]], statistic: Any) -> list[Row]:
        present = [pair for pair in of if {*pair} <= {*structures}]
        return [{"pair": pair, **measured(statistic, *pair)} for pair in present]

    return {
        "exponents": {name: measured(exponent, name) for name in structures},
        "against_dense": {name: measured(gap, name, "dense") for name in structures},
        "log_ratios": pairs(BETTER, gap),
        "exponent_differences": pairs(STEEPER, steeper),
    }


# ---- what the pages show -------------------------------------------------------------------------

SHARED = ("Kronecker", "TT r=4")  # structures that share parameters
FIGURE_4 = ("dense", "low-rank", *SHARED, "Monarch b=4", "BTT r=1")
NEGLIGIBLE = 1.02  # a loss over another that is not above it
CHEAPER = [("BTT r=1", "BTT r=2"), ("BTT r=2", "BTT r=4"), ("Monarch b=16", "Monarch b=4")]
CHEAPER_3 = [(f"BTT r={r}, 3 cores", f"BTT r={2 * r}, 3 cores") for r in (1, 2)]
MORE_CORES = [("BTT r=1", f"BTT r=1, {n} cores") for n in (3, 4)]


def over_seeds(
    result: Row, task: str, statistic: Callable[..., float], *structures: str
) -> Estimate:
    """A statistic of the structures' curves on one task, with Student's interval over the seeds."""
    rows = select(result["rows"], task=task)
    runs = [select(rows, structure=name) for name in structures]
    by_seed = []
    for seed in seeds_of(rows):
        by_seed.append(statistic(*(curve_of(curve_rows, [seed]) for curve_rows in runs)))
    return student(by_seed)


def steeper(curve: Curve, compared: Curve) -> float:
    return exponent(curve) - exponent(compared)


def ratios(result: Row, structure: str, compared: str = "dense") -> list[Estimate]:
    """The logs of a structure's loss over another's at equal FLOPs, on both tasks."""
    return [over_seeds(result, task, gap, structure, compared) for task in STEPS]


def losses(result: Row, *pair: str) -> str:
    return " and ".join(map(factor, ratios(result, *pair)))


def lower(result: Row, pairs: Iterable[tuple[str, str]], than: float = 1.0) -> list[bool | None]:
    estimates = chain.from_iterable(ratios(result, *pair) for pair in pairs)
    return [below(estimate, log(than)) for estimate in estimates]


def powers(result: Row, structure: str) -> str:
    exponents = [over_seeds(result, task, exponent, structure)["value"] for task in STEPS]
    return " and ".join(f"{value:.3f}" for value in exponents)


def steeper_than_others(result: Row) -> dict[str, Estimate]:
    """By how much the exponent of BTT of rank 1 exceeds that of each other structure of figure 4,
    on each task."""
    excesses = {}
    for task, name in product(STEPS, FIGURE_4):
        if name != "BTT r=1":
            excesses[f"{name}, {task}"] = over_seeds(result, task, steeper, "BTT r=1", name)
    return excesses


def flatter(result: Row) -> list[Estimate]:
    """By how much the exponents of `SHARED` exceed dense's, each on both tasks."""
    pairs = product(SHARED, STEPS)
    return [over_seeds(result, task, steeper, name, "dense") for name, task in pairs]


def per_width(result: Row, structure: str, compared: str) -> dict[str, Estimate]:
    """Task and width -> log of the ratio of the losses, over the seeds."""
    rows = select(result["rows"], lr=LR)
    by_width = {}
    for task in values(rows, "task"):
        runs = select(rows, task=task, structure=structure)
        compared_runs = select(rows, task=task, structure=compared)
        shared_widths = {*values(runs, "width")} & {*values(compared_runs, "width")}
        for width in sorted(shared_widths):
            logs = []
            for run in select(runs, width=width):
                compared_run = one(compared_runs, width=width, seed=run["seed"])
                logs.append(log(run["loss"] / compared_run["loss"]))
            by_width[f"{task} {width}"] = student(logs)
    return by_width


def costlier(short: str, words: str, costly: str, cheap: str) -> Claim:
    """Figure 6: the costlier structure against the cheaper at each width they share."""

    def test(result: Row) -> tuple[Holds, str]:
        ratio_by_width = per_width(result, costly, cheap)
        holds = [*map(below, ratio_by_width.values())]
        return holds, f"{costly} has {listed(ratio_by_width)} of the loss of {cheap}"

    return Claim("CBS 6", short, words, test)


CLAIMS = [
    Claim(
        "CBS 4",
        "BTT is below dense at equal FLOPs, with the larger exponent",
        "BTT is below dense at equal FLOPs, with the larger exponent",
        lambda result: (
            [
                *lower(result, [("BTT r=1", "dense")]),
                *(above(over_seeds(result, task, steeper, *STEEPER[0])) for task in STEPS),
            ],
            f"{losses(result, 'BTT r=1')} of dense's loss (teacher, digits); exponents "
            f"{powers(result, 'BTT r=1')}, dense {powers(result, 'dense')}",
        ),
    ),
    Claim(
        "CBS 4",
        "BTT has the best scaling of the figure's structures",
        '"BTT achieves the best scaling" of the structures in the figure',
        lambda result: (
            [*map(above, steeper_than_others(result).values())],
            "the exponent of BTT r=1 is larger by "
            + listed(steeper_than_others(result), lambda estimate: number(estimate, 3)),
        ),
    ),
    Claim(
        "CBS 4",
        "Kronecker and TT are above dense at equal FLOPs",
        "structures that share parameters, Kronecker and TT, are above dense at equal FLOPs",
        lambda result: (
            [*map(above, chain.from_iterable(ratios(result, name) for name in SHARED))],
            f"Kronecker has {losses(result, 'Kronecker')} of dense's loss, TT r=4 "
            f"{losses(result, 'TT r=4')}",
        ),
    ),
    Claim(
        "CBS 4",
        "dense scales better than Kronecker and TT",
        '"structures with FLOPs equal to parameters scale better than those with parameter '
        'sharing (Kronecker and TT)": dense than these',
        lambda result: (
            [*map(below, flatter(result))],
            "their exponents exceed dense's by "
            + ", ".join(number(estimate, 3) for estimate in flatter(result))
            + " (Kronecker and TT r=4, each on teacher and digits)",
        ),
    ),
    Claim(
        "CBS 5",
        "lower BTT rank, more Monarch blocks: better at equal FLOPs",
        "a lower rank of BTT, more blocks of Monarch, are better at equal FLOPs",
        lambda result: (
            lower(result, CHEAPER),
            f"BTT r=1 has {losses(result, *CHEAPER[0])} of the loss of r=2, Monarch of 16 blocks "
            f"{losses(result, *CHEAPER[2])} of that of 4",
        ),
    ),
    costlier(
        "BTT of higher rank is better per unit width",
        '"BTT with a higher rank achieves lower train error per unit width"',
        "BTT r=4",
        "BTT r=1",
    ),
    costlier(
        "Monarch with fewer blocks is better per unit width",
        '"Monarch with fewer blocks achieves lower train error per unit width"',
        "Monarch b=4",
        "Monarch b=16",
    ),
    Claim(
        "CBS 11",
        "with three cores too, lower ranks are better",
        '"Lower BTT-ranks have better compute-efficiency for BTT with c=3"',
        lambda result: (
            lower(result, CHEAPER_3),
            f"r=1 has {losses(result, *CHEAPER_3[0])} of the loss of r=2 (teacher, digits), r=2 "
            f"{losses(result, *CHEAPER_3[1])} of that of r=4",
        ),
    ),
    Claim(
        "CBS 12",
        "more than two cores bring little or nothing",
        '"increasing c beyond 2 leads to no or negligible improvement"',
        lambda result: (
            lower(result, MORE_CORES, NEGLIGIBLE),
            f"two cores have {losses(result, *MORE_CORES[0])} of the loss of three, "
            f"{losses(result, *MORE_CORES[1])} of that of four; negligible: below {NEGLIGIBLE}",
        ),
    ),
]


def tabulate(result: Row) -> str:
    """Figures 4 and 5: exponents, and losses over dense's at equal FLOPs."""
    lines = []
    for structure in WIDTHS:
        cells = [structure]
        for task in STEPS:
            cells.append(number(over_seeds(result, task, exponent, structure), 3))
            if structure == "dense":
                cells.append("1")
            else:
                cells.append(factor(over_seeds(result, task, gap, structure, "dense")))
        lines.append(cells)
    titles = [[f"exponent, {task}", "loss / dense's at equal FLOPs"] for task in STEPS]
    return table(["", *chain.from_iterable(titles)], lines)


EXPERIMENT = Experiment(
    name="papers/cbs_scaling",
    about=__doc__,
    tables={"scaling": tabulate},
    claims=CLAIMS,
    place="results/compute_better_spent.md#loss-against-flops",
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
)

if __name__ == "__main__":
    EXPERIMENT.main()
