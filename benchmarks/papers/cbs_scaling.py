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

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import fmean, linear_regression
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import structlin
from benchmarks.papers import tasks
from benchmarks.papers.cbs_report import Claim, claim, interval, ratio, show_claims
from benchmarks.runs import ONLY, keep, parser, rows_of_others, run_all

Curve = list[tuple[float, float]]  # log FLOPs, log loss; ascending
Run = tuple[str, str, int, float, int, int]  # task, structure, width, lr, seed, steps

STRUCTURES: dict[str, tuple[Callable[[int], structlin.Family], list[int]]] = {
    "dense": (lambda width: structlin.Dense(), [32, 64, 128, 256]),
    "low-rank": (lambda width: structlin.LowRank(rank=math.isqrt(width)), [64, 144, 256, 576]),
    "Kronecker": (lambda width: structlin.Kronecker(), [64, 144, 256, 576]),
    "TT r=4": (lambda width: structlin.TT(rank=4), [64, 144, 256]),
    "Monarch b=4": (lambda width: structlin.Monarch(blocks=4), [64, 128, 256]),
    "Monarch b=16": (lambda width: structlin.Monarch(blocks=16), [64, 128, 256, 512]),
    "BTT r=1": (lambda width: structlin.BTT(rank=1), [64, 144, 256, 576]),
    "BTT r=2": (lambda width: structlin.BTT(rank=2), [64, 144, 256, 400]),
    "BTT r=4": (lambda width: structlin.BTT(rank=4), [64, 144, 256]),
    "BTT r=1, 3 cores": (lambda width: structlin.BTT(rank=1, cores=3), [64, 216, 512, 1000]),
    "BTT r=2, 3 cores": (lambda width: structlin.BTT(rank=2, cores=3), [64, 216, 512]),
    "BTT r=4, 3 cores": (lambda width: structlin.BTT(rank=4, cores=3), [64, 216, 512]),
    "BTT r=1, 4 cores": (lambda width: structlin.BTT(rank=1, cores=4), [81, 256, 625, 1296]),
}
STEPS = {"teacher": 400, "digits": 200}
LR = 2.0**-6  # the best of powers of 2 for the dense model at width 64, on both tasks
RATES = {"dense": (LR / 2, LR, 2 * LR)}
RESAMPLES = 1000

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


def train(run: Run) -> dict[str, Any]:
    task, structure, width, lr, seed, steps = run
    family = STRUCTURES[structure][0](width)
    result = tasks.train_mlp(task, family, width, lr, seed, steps)
    return {"task": task, "structure": structure, "width": width, "lr": lr, "seed": seed, **result}


# ---- fits ----------------------------------------------------------------------------------------


def exponent(curve: Curve) -> float:
    """a of the power law loss ~ FLOPs^-a, by least squares in logarithms."""
    return -linear_regression(*zip(*curve, strict=True)).slope


def gap(first: Curve, second: Curve, points: int = 33) -> float:
    """Mean of log(loss of `first` / loss of `second`) at equal FLOPs, evenly in log FLOPs where
    both have values.

    Raises:
        ValueError: there are no FLOPs that both reach.
    """
    low, high = max(first[0][0], second[0][0]), min(first[-1][0], second[-1][0])
    if low >= high:
        raise ValueError(
            f"the curves share no FLOPs: one starts at {math.exp(low):.3g}, "
            f"one ends at {math.exp(high):.3g}"
        )
    at = np.linspace(low, high, points)
    ours, theirs = (np.interp(at, *zip(*curve, strict=True)) for curve in (first, second))
    return float((ours - theirs).mean())


def curve_of(rows: Iterable[dict[str, Any]], seeds: Sequence[int]) -> Curve:
    """Mean log loss over `seeds` (a seed may come more than once) at each width, at the width's
    best learning rate."""
    by_width: dict[int, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    flops = {}
    for row in rows:
        by_width[row["width"]][row["lr"]][row["seed"]] = (
            math.inf if row["loss"] is None else math.log(row["loss"])
        )
        flops[row["width"]] = math.log(row["flops"])
    best = {
        width: min(rates.values(), key=lambda logs: fmean(logs.values()))
        for width, rates in by_width.items()
    }
    return sorted(
        (flops[width], fmean(logs[seed] for seed in seeds)) for width, logs in best.items()
    )


def estimate(statistic: Callable[[Sequence[int]], float], seeds: Sequence[int]) -> dict[str, float]:
    """`statistic` of all seeds, and the ends of its 95 % bootstrap interval."""
    draw = random.Random(0)
    drawn = sorted(statistic(draw.choices(seeds, k=len(seeds))) for _ in range(RESAMPLES))
    return {
        "value": statistic(seeds),
        "low": drawn[RESAMPLES // 40],
        "high": drawn[-1 - RESAMPLES // 40],
    }


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The exponents of one task's structures, and estimates of how pairs of them compare."""
    by_structure = {
        structure: [row for row in rows if row["structure"] == structure]
        for structure in STRUCTURES
    }
    seeds = sorted({row["seed"] for row in rows})

    def measured(statistic: Callable[..., float], *structures: str) -> dict[str, float]:
        return estimate(
            lambda drawn: statistic(*(curve_of(by_structure[s], drawn) for s in structures)), seeds
        )

    def steeper(first: Curve, second: Curve) -> float:
        return exponent(first) - exponent(second)

    return {
        "exponents": {structure: measured(exponent, structure) for structure in by_structure},
        "against_dense": {
            structure: measured(gap, structure, "dense") for structure in by_structure
        },
        "log_ratios": [{"pair": pair, **measured(gap, *pair)} for pair in BETTER],
        "exponent_differences": [{"pair": pair, **measured(steeper, *pair)} for pair in STEEPER],
    }


def claims(result: dict[str, Any]) -> list[Claim]:
    """Each holds if the whole 95 % interval is on the paper's side."""
    found = []
    for task, compared in result["comparisons"].items():
        for row in compared["exponent_differences"]:
            first, second = row["pair"]
            text = f"{task}: {first} has a larger exponent than {second}"
            found.append(claim(text, row["low"] > 0, f"by {interval(row)}"))
        for row in compared["log_ratios"]:
            first, second = row["pair"]
            text = f"{task}: {first} has a lower loss than {second} at equal FLOPs"
            found.append(claim(text, row["high"] < 0, f"{ratio(row)} of it"))
    return found


# ---- the program ---------------------------------------------------------------------------------


def show(result: dict[str, Any], console: Console) -> None:
    for task, compared in result["comparisons"].items():
        table = Table(title=f"{task}: loss ~ FLOPs^-a, with 95 % intervals")
        for title in ("structure", "a", "loss / dense's at equal FLOPs"):
            table.add_column(title, justify="left" if title == "structure" else "right")
        for structure, fitted in compared["exponents"].items():
            against = "" if structure == "dense" else ratio(compared["against_dense"][structure])
            table.add_row(structure, interval(fitted), against)
        console.print(table)


def plot(result: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(6.5 * len(result["comparisons"]), 5), layout="constrained")
    all_axes = figure.subplots(1, len(result["comparisons"]), squeeze=False)[0]
    seeds = sorted({row["seed"] for row in result["rows"]})
    for axes, (task, compared) in zip(all_axes, result["comparisons"].items(), strict=True):
        for n, (structure, fitted) in enumerate(compared["exponents"].items()):
            rows = [
                row
                for row in result["rows"]
                if (row["task"], row["structure"]) == (task, structure)
            ]
            flops, losses = zip(*curve_of(rows, seeds), strict=True)
            style = {
                "color": f"C{n}",
                "marker": "osD^vPX<>*hpd"[n],
                "lw": 2.5 if structure == "dense" else 1,
            }
            label = f"{structure}, a = {fitted['value']:.2f}"
            axes.loglog(
                [math.exp(x) for x in flops], [math.exp(y) for y in losses], label=label, **style
            )
        axes.set(
            title=task, xlabel="FLOPs of a forward pass of one sample", ylabel="loss on new samples"
        )
        axes.legend(fontsize="small")
    return figure


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--structures", nargs="+", choices=list(STRUCTURES), help=ONLY)
    arguments = options.parse_args()
    chosen = arguments.structures or list(STRUCTURES)
    structures = {name: STRUCTURES[name][1] for name in chosen}
    steps, seeds = STEPS, arguments.seeds
    if arguments.smoke:
        structures = {name: [widths[0], widths[-1]] for name, widths in structures.items()}
        steps, seeds = dict.fromkeys(STEPS, 2), 1
    setting = {"steps": steps, "batch": 256, "optimizer": "Adam, cosine", "lr": LR}
    others, source = [], None
    if arguments.structures:
        others, source = rows_of_others(arguments, "cbs_scaling", setting, chosen)
    runs: list[Run] = [
        (task, structure, width, lr, seed, steps[task])
        for task, (structure, widths), seed in product(steps, structures.items(), range(seeds))
        for width, lr in product(widths, RATES.get(structure, (LR,)))
    ]
    runs.sort(key=lambda run: -run[2] * run[5])
    rows = [*others, *run_all(train, runs, arguments)]
    by_task = {task: [row for row in rows if row["task"] == task] for task in steps}
    result = {
        "setting": setting,
        "kept": source,
        "comparisons": {task: compare(found) for task, found in by_task.items()},
    }
    result["claims"] = claims(result)
    result["rows"] = rows
    console = Console(width=120)
    show(result, console)
    show_claims(result["claims"], console)
    keep(arguments, "cbs_scaling", plot(result), **result)


if __name__ == "__main__":
    main()
