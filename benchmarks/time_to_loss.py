"""How many times fewer FLOPs and seconds until the dense model's loss?

    python -m benchmarks.time_to_loss                  # results/time_to_loss.{json,png}
    python -m benchmarks.time_to_loss --setups teacher --budget 600
    python -m benchmarks.time_to_loss --smoke          # seconds

Figures 8 and 10 (b, c) of "Compute Better Spent": loss against compute and against time. Models of
growing width train for the same number of steps; a structure's losses, drawn against FLOPs or
seconds, are interpolated in logarithms, and the factor is how many times less than a dense model's
they are where they meet the dense model's loss. 0: never met, up to the widest model. A structure
whose narrowest model is already below counts with that model.

    teacher     regression of a random MLP, every sample new; MLPs of three hidden layers, the two
                square matrices structured
    digits MLP  scikit-learn's digits with the paper's augmentation; its residual MLPs (E.1), all
                matrices of the blocks structured; held-out loss
    digits ViT  the same with its ViT

Every structure has its best base learning rate: a climb by factors of 2 on seed 0 at the width
where rates are meant, dense and structured alike; muP and `param_groups` take it to the other
widths. At its widest model half and twice that rate are tried on seed 0, and shown. Adam(W) with a
cosine to zero. Intervals are 95 %, bootstrap over the seeds; with three they are about the range.

Seconds are steps times the milliseconds of a step, making the batch not counted: medians of rounds
in which all models take turns, measured after all losses. Runs are kept in the JSON as they finish;
the same command goes on, and repeats only the timing.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.papers import tasks, vision
from benchmarks.papers.cbs_scaling import estimate
from benchmarks.record import RESULTS, save_json
from benchmarks.runs import keep, parser, run_all
from benchmarks.timing import interleaved, spread, wall

STRUCTURES: dict[str, Callable[[int], structlin.Family]] = {
    "dense": lambda width: structlin.Dense(),
    "low-rank": lambda width: structlin.LowRank(rank=math.isqrt(width)),
    "Monarch 16": lambda width: structlin.Monarch(blocks=16),
    "BTT r=1": lambda width: structlin.BTT(rank=1),
    "Kronecker": lambda width: structlin.Kronecker(),  # these are of `papers.cbs_vision`
    "TT r=4": lambda width: structlin.TT(rank=4),
    "TT r=8": lambda width: structlin.TT(rank=8),
    "Monarch b=4": lambda width: structlin.Monarch(blocks=4),
}
RATES = [2.0**power for power in range(-12, -1)]  # where a climb may go
TIMED = 15.0
Point = tuple[float, float]  # FLOPs or seconds, loss


class Teacher(tasks.Teacher):
    """A wider teacher than that of the scaling laws: students gain from width for longer."""

    inputs, outputs, width = 32, 8, 512


def teacher_mlp(width: int, structure: str) -> nn.Module:
    return tasks.mlp(Teacher.inputs, width, Teacher.outputs, STRUCTURES[structure](width))


def vision_model(
    kind: type[nn.Module], zero: Sequence[str], width: int, structure: str
) -> nn.Module:
    model = kind(vision.MixedDigits.inputs, width, vision.MixedDigits.outputs)
    family = STRUCTURES[structure](width)
    return structlin.convert(model, family, include="blocks.*", init="mup", zero_init=zero)


@dataclass(frozen=True)
class Setup:
    """Data, model, and how it is trained."""

    data: Callable[[int], Any]  # seed -> has `batch`, `loss` and `random`
    new: Callable[[int], Any]  # the same, of samples that no training sees
    build: Callable[[int, str], nn.Module]  # width, structure -> model
    steps: int
    batch: int
    base: int  # the width where rates are meant, and found
    start: float  # the first rate of a climb
    widths: dict[str, tuple[int, ...]]  # ascending, by structure
    samples: int = 8192  # for the final loss


SETUPS = {
    "teacher": Setup(
        Teacher,
        Teacher,
        teacher_mlp,
        steps=300,
        batch=256,
        base=64,
        start=2**-6,
        widths={
            "dense": (128, 256, 512, 1024),
            "low-rank": (256, 1024, 4096),
            "Monarch 16": (256, 512, 1024),
            "BTT r=1": (256, 576, 1024, 2304, 4096),
        },
    ),
    "digits MLP": Setup(
        vision.MixedDigits,
        partial(vision.MixedDigits, heldout=True),
        partial(vision_model, vision.Perceptron, ("*c_proj",)),
        steps=400,
        batch=128,
        base=64,
        start=2**-7,
        widths={
            "dense": (32, 64, 128, 256),
            "low-rank": (64, 256),
            "Monarch 16": (64, 128, 256),
            "BTT r=1": (64, 144, 256, 576),
        },
    ),
    "digits ViT": Setup(
        vision.MixedDigits,
        partial(vision.MixedDigits, heldout=True),
        partial(vision_model, vision.ViT, ("*c_proj", "*query")),
        steps=500,
        batch=64,
        base=64,
        start=2**-8,
        widths={
            "dense": (32, 64, 128),
            "BTT r=1": (64, 144, 256),
        },
    ),
}
SMOKE = {
    "steps": 2,
    "batch": 8,
    "samples": 64,
    "widths": {"dense": (32, 64), "BTT r=1": (64, 144)},
}


# ---- a run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    setup: str
    structure: str
    width: int
    lr: float  # of a dense model of the base width
    seed: int


def trainer(
    setup: Setup, job: Job
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """A fresh model, its optimizer, and the loss of its next batch."""
    torch.manual_seed(job.seed)
    model, data = setup.build(job.width, job.structure), setup.data(job.seed)
    with torch.device("meta"):
        base = setup.build(setup.base, "dense")
    groups = structlin.param_groups(model, job.lr, base=base)

    def loss() -> Tensor:
        x, y = data.batch(setup.batch)
        return data.loss(model(x), y)

    return model, torch.optim.AdamW(groups, job.lr, fused=True), loss


def train(job: Job, changes: dict[str, Any]) -> dict[str, Any]:
    """The loss on new samples (None: diverged), parameters and FLOPs of a forward pass of one
    sample; `changes` of the setup are those of a smoke run."""
    setup = replace(SETUPS[job.setup], **changes)
    model, optimizer, loss = trainer(setup, job)
    tasks.descend(optimizer, lambda step: loss(), setup.steps, warmup=setup.steps // 20)
    new = setup.new(job.seed)
    new.random.manual_seed(-1 - job.seed)
    with torch.no_grad():
        x, y = new.batch(setup.samples)
        final = fmean(
            new.loss(model(part), target).item()
            for part, target in zip(x.split(1024), y.split(1024), strict=True)
        )
    return asdict(job) | {
        "loss": final if math.isfinite(final) else None,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "flops": tasks.forward_flops(model, x[:1]),
    }


def time_steps(
    name: str, setup: Setup, lrs: dict[str, float], limit: float
) -> list[dict[str, Any]]:
    """Milliseconds of a training step of every model, in turns, all on one batch: what making
    batches costs is the same for all, and not counted."""
    data = setup.data(0)
    x, y = data.batch(setup.batch)

    def work(structure: str, width: int) -> Callable[[], None]:
        model, optimizer, _ = trainer(setup, Job(name, structure, width, lrs[structure], 0))

        def step() -> None:
            value = data.loss(model(x), y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

        return step

    works = {
        (structure, width): work(structure, width)
        for structure, widths in setup.widths.items()
        for width in widths
    }
    end = time.perf_counter() + limit
    times = interleaved(works, lambda step: wall(step, "cpu"), rounds=(4, 100), until=end)
    return [
        {"setup": name, "structure": structure, "width": width, "rounds": len(samples) - 1}
        | {key: 1e3 * value for key, value in spread(samples[1:]).items()}  # the first warms up
        for (structure, width), samples in times.items()
    ]


# ---- the search for rates ------------------------------------------------------------------------


def next_rates(losses: dict[float, float], start: float) -> list[float]:
    """The rates to try next in a climb by factors of 2; none when the best has both its neighbours.

    >>> next_rates({}, 2**-6) == [2**-7, 2**-6, 2**-5]
    True
    >>> next_rates({2**-7: 3.0, 2**-6: 2.0, 2**-5: 1.0}, 2**-6) == [2**-4]
    True
    >>> next_rates({2**-7: 3.0, 2**-6: 1.0, 2**-5: 2.0}, 2**-6)
    []
    """
    best = min(losses, key=losses.__getitem__, default=start)
    wanted = (best / 2, best, 2 * best)
    return [lr for lr in wanted if lr not in losses and RATES[0] <= lr <= RATES[-1]]


def losses_of(rows: Sequence[dict[str, Any]], **wanted: Any) -> dict[float, float]:
    """Learning rate -> loss, infinite if diverged, of the rows that have what is `wanted`."""
    return {
        row["lr"]: math.inf if row["loss"] is None else row["loss"]
        for row in rows
        if wanted.items() <= row.items()
    }


# ---- factors -------------------------------------------------------------------------------------


def needed(curve: Sequence[Point], loss: float) -> float:
    """What the first point of `curve` at or below `loss` costs, linear in logarithms between two;
    infinite if none is.

    >>> curve = [(10.0, 1.0), (1000.0, 0.25)]
    >>> round(needed(curve, 0.5)), needed(curve, 2.0), needed(curve, 0.1)
    (100, 10.0, inf)
    """
    if curve[0][1] <= loss:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 <= loss:
            if math.isinf(y0):  # diverged
                return x1
            share = math.log(y0 / loss) / math.log(y0 / y1)
            return float(x0 * (x1 / x0) ** share)
    return math.inf


def curve_of(
    rows: Sequence[dict[str, Any]], costs: dict[int, float], seeds: Sequence[int]
) -> list[Point]:
    """(cost, geometric mean of the loss over `seeds`, of which one may come more than once), by
    ascending width; `costs` by width."""
    losses = {
        (row["width"], row["seed"]): math.inf if row["loss"] is None else math.log(row["loss"])
        for row in rows
    }
    return [
        (cost, math.exp(fmean(losses[width, seed] for seed in seeds)))
        for width, cost in sorted(costs.items())
    ]


def factors(
    rows: Sequence[dict[str, Any]], costs: dict[str, dict[int, float]]
) -> list[dict[str, Any]]:
    """How many times less than dense each structure needs for dense's loss, at each of dense's
    widths.

    Args:
        rows: of one setup, at the chosen rates.
        costs: structure -> width -> FLOPs or seconds.
    """
    seeds = sorted({row["seed"] for row in rows})
    by_structure = {
        structure: [row for row in rows if row["structure"] == structure] for structure in costs
    }

    def factor(structure: str, width: int, drawn: Sequence[int]) -> float:
        dense = curve_of(by_structure["dense"], costs["dense"], drawn)
        cost, loss = dense[sorted(costs["dense"]).index(width)]
        return cost / needed(curve_of(by_structure[structure], costs[structure], drawn), loss)

    return [
        {
            "structure": structure,
            "dense": width,
            **estimate(partial(factor, structure, width), seeds),
            "by_seed": [factor(structure, width, [seed]) for seed in seeds],
        }
        for structure in costs
        if structure != "dense"
        for width in sorted(costs["dense"])
    ]


def summarise(
    rows: Sequence[dict[str, Any]],
    lrs: dict[str, float],
    times: Sequence[dict[str, Any]],
    steps: int,
) -> dict[str, Any]:
    """The factors of one setup, in FLOPs and in seconds; and the losses around the chosen rate at
    each structure's widest model, on seed 0."""
    chosen = [row for row in rows if row["lr"] == lrs[row["structure"]]]
    flops: dict[str, dict[int, float]] = {structure: {} for structure in lrs}
    seconds: dict[str, dict[int, float]] = {structure: {} for structure in lrs}
    for time_row in times:
        structure, width = time_row["structure"], time_row["width"]
        seconds[structure][width] = steps * time_row["median"] / 1e3
        flops[structure][width] = next(
            row["flops"] for row in chosen if (row["structure"], row["width"]) == (structure, width)
        )
    chosen = [row for row in chosen if row["width"] in flops[row["structure"]]]
    checks = []
    for structure, costs in flops.items():
        losses = losses_of(rows, structure=structure, width=max(costs), seed=0)
        best = min(losses, key=losses.__getitem__)
        checks.append({
            "structure": structure,
            "width": max(costs),
            "losses": {f"2^{math.log2(lr):g}": losses[lr] for lr in sorted(losses)},
            "best_over_chosen": best / lrs[structure],
        })  # fmt: skip
    return {
        "flops": factors(chosen, flops),
        "seconds": factors(chosen, seconds),
        "checks": checks,
        "chosen": chosen,
    }


# ---- the report ----------------------------------------------------------------------------------


def words(row: dict[str, Any]) -> str:
    """A factor with its interval; "never" if dense's loss is not met."""
    if row["value"] == 0:
        return "never"
    return f"{row['value']:.1f} ({row['low']:.1f} to {row['high']:.1f})"


def markdown(result: dict[str, Any], setup: str, cost: str) -> str:
    """The table of the factors: a row for each structure, a column for each of dense's widths."""
    found = result["summaries"][setup][cost]
    widths = sorted({row["dense"] for row in found})
    lines = [
        f"| | {' | '.join(f'dense {width}' for width in widths)} |",
        "|---|" + "--:|" * len(widths),
    ]
    for structure in dict.fromkeys(row["structure"] for row in found):
        cells = [words(row) for row in found if row["structure"] == structure]
        lines.append(f"| {structure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def show(result: dict[str, Any], console: Console) -> None:
    for setup, summary in result["summaries"].items():
        for cost, title in (("flops", "FLOPs"), ("seconds", "seconds")):
            widths = sorted({row["dense"] for row in summary[cost]})
            table = Table(title=f"{setup}: how many times fewer {title} until dense's loss")
            for head in ("structure", *(f"dense {width}" for width in widths)):
                table.add_column(head, justify="left" if head == "structure" else "right")
            for structure in dict.fromkeys(row["structure"] for row in summary[cost]):
                mine = [row for row in summary[cost] if row["structure"] == structure]
                table.add_row(structure, *(words(row) for row in mine))
            console.print(table)
        for check in summary["checks"]:
            losses = ", ".join(f"{lr}: {loss:.4f}" for lr, loss in check["losses"].items())
            lr = result["lrs"][setup][check["structure"]]
            console.print(
                f"{check['structure']} {check['width']}, rate 2^{math.log2(lr):g}; losses {losses}"
            )


def plot(result: dict[str, Any]) -> Figure:
    """Loss against FLOPs and against seconds; bars from the least to the most of the seeds."""
    setups = result["summaries"]
    figure = Figure(figsize=(11, 3.8 * len(setups)), layout="constrained")
    grid = figure.subplots(len(setups), 2, squeeze=False, sharey="row")
    for (setup, summary), row_of_axes in zip(setups.items(), grid, strict=True):
        ms = {
            (row["structure"], row["width"]): row["median"]
            for row in result["times"]
            if row["setup"] == setup
        }
        for structure in result["lrs"][setup]:
            n = list(STRUCTURES).index(structure)
            points: dict[int, list[float]] = {}
            flops = {}
            for row in summary["chosen"]:
                if row["structure"] == structure and row["loss"] is not None:
                    points.setdefault(row["width"], []).append(row["loss"])
                    flops[row["width"]] = row["flops"]
            widths = sorted(points)
            means = [fmean(points[width]) for width in widths]
            bars = [
                [mean - min(points[width]) for mean, width in zip(means, widths, strict=True)],
                [max(points[width]) - mean for mean, width in zip(means, widths, strict=True)],
            ]
            seconds = [
                result["setting"][setup]["steps"] * ms[structure, width] / 1e3 for width in widths
            ]
            style = {"color": f"C{n}", "marker": "osD^"[n], "label": structure, "capsize": 2}
            for axes, x in zip(row_of_axes, ([flops[w] for w in widths], seconds), strict=True):
                axes.errorbar(x, means, yerr=bars, **style)
        for axes, label in zip(
            row_of_axes,
            ("FLOPs of a forward pass of one sample", "seconds of training"),
            strict=True,
        ):
            axes.set(xscale="log", yscale="log", xlabel=label, title=setup)
            axes.grid(alpha=0.3, which="both")
        row_of_axes[0].set_ylabel("loss on new samples")
        row_of_axes[0].legend(fontsize="small")
    return figure


# ---- the program ---------------------------------------------------------------------------------


class Runs:
    """The runs that there are: of an earlier result of the same setting, and each as it is
    done."""

    def __init__(self, options: argparse.Namespace, setting: dict[str, Any]) -> None:
        self.options, self.setting = options, setting
        self.path = options.out / "time_to_loss.json"
        self.end = time.monotonic() + options.budget
        kept = json.loads(self.path.read_text()) if self.path.exists() and not options.smoke else {}
        same = [name for name in setting if kept.get("setting", {}).get(name) == setting[name]]
        self.rows = [row for row in kept.get("rows", []) if row["setup"] in same]
        self.times = [row for row in kept.get("times", []) if row["setup"] in same]

    def of(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """The rows of `jobs`; those that there are not yet are made.

        Raises:
            SystemExit: the budget is spent.
        """
        missing = [job for job in dict.fromkeys(jobs) if self.find(job) is None]
        if missing:
            self.stop_when_spent()
        changes = SMOKE if self.options.smoke else {}
        run_all(partial(train, changes=changes), missing, self.options, each=self.add)
        return [row for job in jobs if (row := self.find(job)) is not None]

    def find(self, job: Job) -> dict[str, Any] | None:
        wanted = asdict(job)
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if not self.options.smoke:
            save_json(self.path, setting=self.setting, times=self.times, rows=self.rows)
            self.stop_when_spent()

    def stop_when_spent(self) -> None:
        if time.monotonic() > self.end:
            done = f"{len(self.rows)} runs are done"
            raise SystemExit(f"--budget is spent, {done}; the same command goes on")


def find_rates(runs: Runs, setups: dict[str, Setup]) -> dict[str, dict[str, float]]:
    """setup -> structure -> the best base rate, found at the base width on seed 0."""
    losses: dict[tuple[str, str], dict[float, float]] = {
        (name, structure): {} for name, setup in setups.items() for structure in setup.widths
    }
    while jobs := [
        Job(name, structure, setups[name].base, lr, 0)
        for (name, structure), found in losses.items()
        for lr in next_rates(found, setups[name].start)
    ]:
        rows = runs.of(jobs)
        for name, structure in losses:
            wanted = {"setup": name, "structure": structure, "width": setups[name].base, "seed": 0}
            losses[name, structure] |= losses_of(rows, **wanted)
    return {
        name: {
            structure: min(found, key=found.__getitem__)
            for (of, structure), found in losses.items()
            if of == name
        }
        for name in setups
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parser(__doc__, RESULTS)
    arguments.add_argument("--setups", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument(
        "--budget", type=float, default=math.inf, help="seconds after which no run is begun"
    )
    timed = "seconds of timing for each setup (default: %(default)s)"
    arguments.add_argument("--timed", type=float, default=TIMED, help=timed)
    options = arguments.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    changes, seeds, limit = ({}, options.seeds, options.timed)
    if options.smoke:
        changes, seeds, limit = SMOKE, 1, 0.0
    setups = {name: replace(SETUPS[name], **changes) for name in options.setups}
    setting = {
        name: {"steps": setup.steps, "batch": setup.batch, "base": setup.base}
        for name, setup in (SETUPS | setups).items()
    }
    runs = Runs(options, setting)
    lrs = find_rates(runs, setups)
    jobs = [
        Job(name, structure, width, lrs[name][structure], seed)
        for seed in range(seeds)
        for name, setup in setups.items()
        for structure, widths in setup.widths.items()
        for width in reversed(widths)
    ]
    jobs += [
        Job(name, structure, widths[-1], lrs[name][structure] * factor, 0)
        for name, setup in setups.items()
        for structure, widths in setup.widths.items()
        for factor in (0.5, 2)
    ]
    runs.of(jobs)
    for name, setup in setups.items():
        others = [row for row in runs.times if row["setup"] != name]
        runs.times = others + time_steps(name, setup, lrs[name], limit)
    result: dict[str, Any] = {"setting": setting, "threads": torch.get_num_threads(), "lrs": lrs}
    result |= {"times": runs.times, "summaries": {}, "rows": runs.rows}
    for name, setup in setups.items():
        rows, times = (
            [row for row in found if row["setup"] == name] for found in (runs.rows, runs.times)
        )
        result["summaries"][name] = summarise(rows, lrs[name], times, setup.steps)
    show(result, Console(width=120))
    keep(options, "time_to_loss", plot(result), **result)
    return result


if __name__ == "__main__":
    main()
