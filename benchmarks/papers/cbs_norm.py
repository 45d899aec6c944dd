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
GROWTH, LOSS = "growth / BTT's", "loss / BTT's"  # of the estimates
STOPPED = math.log(1 / 2)  # of the growth without: growth below it counts as eliminated
STEPS, EVERY = {"usual": 500, "large": 150}, 5


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
    descent, count = torch.optim.AdamW(groups, betas=(0.9, 0.95)), steps[LABELS[lr]]
    finite = training.descend(descent, loss, count, schedule="constant")
    hook.remove()
    final = training.held_out(net, task.heldout)
    finite = finite and math.isfinite(final) and all(map(math.isfinite, sizes))
    curve = [[n, size] for n, size in enumerate(sizes) if n % EVERY == 0 or n + 1 == count]
    return {"loss": final if finite else None, "rms": curve if finite else None}


def tabulate(rows: list[Row]) -> list[Row]:
    """Means over the seeds for each model and rate: RMS at the start, half-way and at the end,
    growth, loss."""
    table = []
    for (label, lr), model in product(LRS.items(), (*MODELS, *ALTERNATIVES)):
        found = select(rows, model=model, lr=lr)
        if not found:
            continue
        row: Row = {"lr": label, "model": model, "loss": None}
        if all(each["loss"] is not None for each in found):
            curves = [[size for _, size in each["rms"]] for each in found]
            places = {"start": 0, "half": len(curves[0]) // 2, "end": -1}
            row |= {name: fmean(curve[n] for curve in curves) for name, n in places.items()}
            row["loss"] = fmean(each["loss"] for each in found)
        table.append(row)
    return table


def estimates(rows: list[Row]) -> dict[str, dict[str, dict[str, Estimate]]]:
    """rate -> model -> logs of its growth and of its loss over those of BTT without normalisation,
    and of the growth itself; of models that no seed lets diverge."""
    found: dict[str, dict[str, dict[str, Estimate]]] = {}
    for label, lr in LRS.items():
        at_rate = sorted(select(rows, lr=lr), key=lambda row: row["seed"])
        plain, found[label] = select(at_rate, model="BTT"), {}
        for model in values(at_rate, "model"):
            mine = select(at_rate, model=model)
            if model in ("dense", "BTT") or any(row["loss"] is None for row in (*plain, *mine)):
                continue
            found[label][model] = {
                "growth": student([*map(growth, mine)]),
                GROWTH: differences([*map(growth, mine)], [*map(growth, plain)]),
                LOSS: student(
                    [
                        math.log(row["loss"] / other["loss"])
                        for row, other in zip(mine, plain, strict=True)
                    ]
                ),
            }
    return found


def growth(row: Row) -> float:
    """The log of the RMS at the end over that at the start."""
    return math.log(row["rms"][-1][1] / row["rms"][0][1])


def normed(found: Row, key: str) -> list[Estimate]:
    """What normalisation does, at the usual and at the large rate."""
    return [by_model["BTT, normalised"][key] for by_model in found["estimates"].values()]


def others(found: Row) -> dict[str, dict[str, Estimate]]:
    return {name: found["estimates"]["usual"][name] for name in ALTERNATIVES}


def both(estimates: Iterable[Estimate]) -> str:
    return " and ".join(map(factor, estimates))


CLAIMS = [
    Claim(
        "CBS 7",
        "normalisation stops the growth of activations",
        '"normalization eliminates the unbounded growth of the activations" of a BTT GPT',
        lambda found: (
            [below(each, STOPPED) for each in normed(found, GROWTH)],
            f"they grow by {both(normed(found, 'growth'))}, {both(normed(found, GROWTH))} of the "
            "factor without (usual rate, large rate); eliminated: below half",
        ),
    ),
    Claim(
        "CBS 7",
        "normalisation improves validation loss",
        '"weight normalization also improves validation loss"',
        lambda found: (
            [*map(below, normed(found, LOSS))],
            f"{both(normed(found, LOSS))} of the loss without (usual rate, large rate)",
        ),
    ),
    Claim(
        "CBS 7",
        "lower rates or more decay only slow the growth, at a cost",
        '"alternatives such as lowering the learning rate and increasing weight decay [...] '
        'only reduce the rate of growth at the cost of worse performance"',
        lambda found: (
            [
                *(below(each[GROWTH]) for each in others(found).values()),  # they reduce it,
                *(above(each[GROWTH], STOPPED) for each in others(found).values()),  # no more,
                *(above(each[LOSS]) for each in others(found).values()),  # and cost
            ],
            "; ".join(
                f"{name.removeprefix('BTT, ')}: {factor(each[GROWTH])} of the growth, "
                f"{factor(each[LOSS])} of the loss"
                for name, each in others(found).items()
            )
            + "; below half of the growth it counts as stopped, not as reduced",
        ),
    ),
]


def numbers(result: Row) -> dict[str, str]:
    losses = {(row["lr"], row["model"]): row["loss"] for row in result["table"]}
    found = {
        "cbs.norm_usual": ("usual", "normalised"),
        "cbs.norm_large": ("large", "normalised"),
        "cbs.norm_quarter": ("usual", "a quarter of the rate"),
        "cbs.norm_decay": ("usual", "weight decay 1"),
    }
    return {
        name: f"{100 * (losses[rate, f'BTT, {model}'] / losses[rate, 'BTT'] - 1):+.0f}"
        for name, (rate, model) in found.items()
    }


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
