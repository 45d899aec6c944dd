"""Weight normalisation keeps a structured GPT's activations from growing: figure 7 of "Compute
Better Spent".

    python -m benchmarks.papers.cbs_norm            # the full result, four core-minutes
    python -m benchmarks.papers.cbs_norm --smoke    # seconds

The paper trains GPT-2 with BTT layers on OpenWebText: the activations "grow without bound slowly
over time", unless each core M is replaced by gamma min(1, sigma / RMS(M)) M (section 5.1). That
"also improves validation loss, which is in contrast to alternatives such as lowering the learning
rate and increasing weight decay which we found to only reduce the rate of growth at the cost of
worse performance."

Here: the GPT of examples/ by characters, width 128, two blocks, BTT of rank 2 in all matrices but
the head, AdamW without weight decay at a constant rate: 500 steps at the usual rate of 2^-9, 150 at
one 16 times larger. Recorded on the training batches: the RMS of the residual stream where it
enters the last LayerNorm. Dense matrices (without normalisation) are there to compare. The
alternatives, at the usual rate: a quarter of it, and a weight decay of 1. What they do is compared
seed by seed, at the end of training: the growth is the RMS over that at the start.
"""

import math
from collections.abc import Iterable
from itertools import product
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.harness import tasks, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.report import factor, rate, table
from benchmarks.harness.shown import Claim
from benchmarks.harness.statistics import (
    Estimate,
    above,
    below,
    differences,
    select,
    student,
    values,
)

MODELS = ("dense", "BTT", "BTT, normalised")
ALTERNATIVES = {"BTT, a quarter of the rate": (0.25, 0.0), "BTT, weight decay 1": (1.0, 1.0)}
LRS = {"usual": 2.0**-9, "large": 2.0**-5}
LABELS = {lr: label for label, lr in LRS.items()}
SETTING = {"width": 128, "batch": 8, "context": 64, "depth": 2, "rank": 2}
GROWTH = "growth / BTT's"  # of the estimates, as the next one
LOSS = "loss / BTT's"
STOPPED = math.log(1 / 2)  # of the growth without: growth below it counts as eliminated
STEPS = {"usual": 500, "large": 150}
EVERY = 5  # steps between two points of the curve that is kept


def train(lr: float, model: str, seed: int, steps: dict[str, int]) -> Row:
    """The held-out loss, and the RMS of the residual stream over training."""
    task = tasks.Characters(seed, **SETTING)
    torch.manual_seed(seed)
    net = task.model(SETTING["width"])
    if model != "dense":
        structlin.convert(
            net,
            structlin.BTT(rank=SETTING["rank"]),
            init="mup",
            zero_init=["*c_proj"],
            weight_norm=model.endswith("normalised"),
        )
    sizes: list[float] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes.append(inputs[0].detach().square().mean().sqrt().item())

    def loss(step: int) -> Tensor:
        inputs, targets = task.batch(step)
        return F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten())

    hook = net.ln_f.register_forward_pre_hook(record)
    factor, decay = ALTERNATIVES.get(model, (1.0, 0.0))
    groups = structlin.param_groups(net, factor * lr, weight_decay=decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    count = steps[LABELS[lr]]
    is_finite = training.descend(optimizer, loss, count, schedule="constant")
    hook.remove()
    final = training.held_out(net, task.heldout)
    if not (is_finite and math.isfinite(final) and all(map(math.isfinite, sizes))):
        return {"loss": None, "rms": None}
    curve = [[n, size] for n, size in enumerate(sizes) if n % EVERY == 0 or n + 1 == count]
    return {"loss": final, "rms": curve}


def tabulate(rows: list[Row]) -> list[Row]:
    """Means over the seeds for each model and rate: RMS at the start, half-way and at the end, and
    the loss; the loss alone, None, where a seed diverged."""
    table = []
    for (label, lr), model in product(LRS.items(), (*MODELS, *ALTERNATIVES)):
        runs = select(rows, model=model, lr=lr)
        if not runs:
            continue
        row: Row = {"lr": label, "model": model, "loss": None}
        if all(run["loss"] is not None for run in runs):
            curves = [[size for _, size in run["rms"]] for run in runs]
            places = {"start": 0, "half": len(curves[0]) // 2, "end": -1}
            for name, n in places.items():
                row[name] = fmean(curve[n] for curve in curves)
            row["loss"] = fmean(run["loss"] for run in runs)
        table.append(row)
    return table


def estimates(rows: list[Row]) -> dict[str, dict[str, dict[str, Estimate]]]:
    """rate -> model -> logs of its growth and of its loss over those of BTT without normalisation,
    and of the growth itself; of models that no seed lets diverge."""
    by_rate: dict[str, dict[str, dict[str, Estimate]]] = {}
    for label, lr in LRS.items():
        at_rate = sorted(select(rows, lr=lr), key=lambda row: row["seed"])
        plain = select(at_rate, model="BTT")
        by_rate[label] = {}
        for model in values(at_rate, "model"):
            runs = select(at_rate, model=model)
            if model in ("dense", "BTT") or any(run["loss"] is None for run in (*plain, *runs)):
                continue
            growths = [*map(growth, runs)]
            log_ratios = []
            for run, plain_run in zip(runs, plain, strict=True):
                log_ratios.append(math.log(run["loss"] / plain_run["loss"]))
            by_rate[label][model] = {
                "growth": student(growths),
                GROWTH: differences(growths, [*map(growth, plain)]),
                LOSS: student(log_ratios),
            }
    return by_rate


def growth(row: Row) -> float:
    """The log of the RMS at the end over that at the start."""
    return math.log(row["rms"][-1][1] / row["rms"][0][1])


def normed(result: Row, key: str) -> list[Estimate]:
    """What normalisation does, at the usual and at the large rate."""
    return [by_model["BTT, normalised"][key] for by_model in result["estimates"].values()]


def alternatives(result: Row) -> dict[str, dict[str, Estimate]]:
    return {name: result["estimates"]["usual"][name] for name in ALTERNATIVES}


def both(estimates: Iterable[Estimate]) -> str:
    return " and ".join(map(factor, estimates))


CLAIMS = [
    Claim(
        "CBS 7",
        "normalisation stops the growth of activations",
        '"normalization eliminates the unbounded growth of the activations" of a BTT GPT',
        lambda result: (
            [below(estimate, STOPPED) for estimate in normed(result, GROWTH)],
            f"they grow by {both(normed(result, 'growth'))}, {both(normed(result, GROWTH))} of the "
            "factor without (usual rate, large rate); eliminated: below half",
        ),
    ),
    Claim(
        "CBS 7",
        "normalisation improves validation loss",
        '"weight normalization also improves validation loss"',
        lambda result: (
            [*map(below, normed(result, LOSS))],
            f"{both(normed(result, LOSS))} of the loss without (usual rate, large rate)",
        ),
    ),
    Claim(
        "CBS 7",
        "lower rates or more decay only slow the growth, at a cost",
        '"alternatives such as lowering the learning rate and increasing weight decay [...] '
        'only reduce the rate of growth at the cost of worse performance"',
        lambda result: (
            [
                # they reduce it, do not stop it, and cost
                *(below(estimate[GROWTH]) for estimate in alternatives(result).values()),
                *(above(estimate[GROWTH], STOPPED) for estimate in alternatives(result).values()),
                *(above(estimate[LOSS]) for estimate in alternatives(result).values()),
            ],
            "; ".join(
                f"{name.removeprefix('BTT, ')}: {factor(estimate[GROWTH])} of the growth, "
                f"{factor(estimate[LOSS])} of the loss"
                for name, estimate in alternatives(result).items()
            )
            + "; below half of the growth it counts as stopped, not as reduced",
        ),
    ),
]


def numbers(result: Row) -> dict[str, str]:
    losses = {(row["lr"], row["model"]): row["loss"] for row in result["table"]}
    models = {
        "cbs.norm_usual": ("usual", "normalised"),
        "cbs.norm_large": ("large", "normalised"),
        "cbs.norm_quarter": ("usual", "a quarter of the rate"),
        "cbs.norm_decay": ("usual", "weight decay 1"),
    }
    percents = {}
    for name, (lr, model) in models.items():
        ratio = losses[lr, f"BTT, {model}"] / losses[lr, "BTT"]
        percents[name] = f"{100 * (ratio - 1):+.0f}"
    return percents


def show_table(result: Row) -> str:
    """Figure 7: RMS of the residual stream, and the loss."""
    lines = []
    for row in result["table"]:
        form = ",.0f" if row["lr"] == "large" else ".1f"
        sizes = [f"{row['start']:.2f}", format(row["half"], form), format(row["end"], form)]
        label = f"{rate(LRS[row['lr']])}, {row['model']}"
        lines.append([label, *sizes, f"{row['loss']:.3f}"])
    return table(["rate, model", "start", "half-way", "end", "held-out loss"], lines)


EXPERIMENT = Experiment(
    name="papers/cbs_norm",
    about=__doc__,
    numbers=numbers,
    tables={"normalisation": show_table},
    claims=CLAIMS,
    place="results/compute_better_spent.md#weight-normalisation",
    run=train,
    axes={
        "lr": [*LRS.values()],
        "model": lambda job: (*MODELS, *(ALTERNATIVES if LABELS[job["lr"]] == "usual" else ())),
    },
    sizes={"steps": STEPS},
    note=SETTING | {"lrs": LRS},
    smoke={"steps": dict.fromkeys(STEPS, 4)},
    analyse=lambda rows: {"table": tabulate(rows), "estimates": estimates(rows)},
)

if __name__ == "__main__":
    EXPERIMENT.main()
