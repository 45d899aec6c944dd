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
from itertools import product
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.papers import tasks
from benchmarks.papers.cbs_report import Claim, claim, show_claims
from benchmarks.papers.intervals import Estimate, student
from benchmarks.runs import keep, parser, run_all

MODELS = ("dense", "BTT", "BTT, normalised")
ALTERNATIVES = {"BTT, a quarter of the rate": (0.25, 0.0), "BTT, weight decay 1": (1.0, 1.0)}
LRS = {"usual": 2.0**-9, "large": 2.0**-5}
SETTING = {"width": 128, "batch": 8, "context": 64, "depth": 2, "rank": 2}
STEPS, EVERY = {"usual": 500, "large": 150}, 5

Run = tuple[str, float, int, int]  # model, lr, seed, steps


def train(run: Run) -> dict[str, Any]:
    name, lr, seed, steps = run
    task = tasks.characters(seed, SETTING["batch"], SETTING["context"], SETTING["depth"])
    torch.manual_seed(seed)
    model = task.model(SETTING["width"])
    if name != "dense":
        btt = structlin.BTT(rank=SETTING["rank"])
        structlin.convert(
            model,
            btt,
            init="mup",
            zero_init=["*c_proj"],
            weight_norm=name.endswith("normalised"),
        )
    sizes: list[float] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes.append(inputs[0].detach().square().mean().sqrt().item())

    def loss(step: int) -> Tensor:
        inputs, targets = task.batch(step)
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    hook = model.ln_f.register_forward_pre_hook(record)
    factor, decay = ALTERNATIVES.get(name, (1.0, 0.0))
    groups = structlin.param_groups(model, factor * lr, weight_decay=decay)
    tasks.descend(torch.optim.AdamW(groups, betas=(0.9, 0.95)), loss, steps, decay=False)
    hook.remove()
    final, _ = tasks.compare.evaluate(model, task.heldout, "cpu")
    curve = [
        [step, size] for step, size in enumerate(sizes) if step % EVERY == 0 or step + 1 == steps
    ]
    finite = math.isfinite(final) and all(math.isfinite(size) for size in sizes)
    row = {"model": name, "lr": lr, "seed": seed}
    return row | {"loss": final if finite else None, "rms": curve if finite else None}


def tabulate(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds for each model and rate: RMS at the start, half-way and at the end,
    growth, loss."""
    table = []
    for (label, lr), model in product(LRS.items(), (*MODELS, *ALTERNATIVES)):
        found = [row for row in rows if (row["model"], row["lr"]) == (model, lr)]
        if not found:
            continue
        if any(row["loss"] is None for row in found):
            table.append({"lr": label, "model": model, "loss": None})
            continue
        curves = [[size for _, size in row["rms"]] for row in found]
        start, half, end = (
            fmean(curve[n] for curve in curves) for n in (0, len(curves[0]) // 2, -1)
        )
        loss = fmean(row["loss"] for row in found)
        table.append(
            {"lr": label, "model": model, "start": start, "half": half, "end": end, "loss": loss}
        )
    return table


def estimates(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Estimate]]]:
    """rate -> model -> logs of its growth and of its loss over those of BTT without normalisation,
    and of the growth itself; of models that no seed lets diverge."""
    found: dict[str, dict[str, dict[str, Estimate]]] = {}
    for label, lr in LRS.items():
        by_model: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: row["seed"]):
            if row["lr"] == lr and row["model"] != "dense":
                by_model.setdefault(row["model"], []).append(row)
        plain, found[label] = by_model.pop("BTT"), {}
        for model, mine in by_model.items():
            if any(row["loss"] is None for row in (*plain, *mine)):
                continue
            pairs = list(zip(mine, plain, strict=True))
            found[label][model] = {
                "growth": student([growth(row) for row in mine]),
                "growth / BTT's": student([growth(row) - growth(other) for row, other in pairs]),
                "loss / BTT's": student(
                    [math.log(row["loss"] / other["loss"]) for row, other in pairs]
                ),
            }
    return found


def growth(row: dict[str, Any]) -> float:
    """The log of the RMS at the end over that at the start."""
    return math.log(row["rms"][-1][1] / row["rms"][0][1])


def claims(result: dict[str, Any]) -> list[Claim]:
    rows = {(row["lr"], row["model"]): row for row in result["table"]}
    found = []
    for lr in LRS:
        plain, normed = rows[lr, "BTT"], rows[lr, "BTT, normalised"]
        if normed["loss"] is None or plain["loss"] is None:
            measured = (
                f"diverged: {[row['model'] for row in (plain, normed) if row['loss'] is None]}"
            )
            found.append(
                claim(
                    f"{lr} rate: only the normalised one is stable",
                    normed["loss"] is not None,
                    measured,
                )
            )
            continue
        text = f"{lr} rate: activations grow to more than twice the size without normalisation"
        found.append(
            claim(
                text,
                plain["end"] > 2 * normed["end"],
                f"{plain['end']:.2f} against {normed['end']:.2f}",
            )
        )
        text = f"{lr} rate: they still grow in the second half without it, by more than with it"
        growth = [row["end"] / row["half"] for row in (plain, normed)]
        holds = growth[0] > 1.05 and growth[0] > growth[1]
        found.append(claim(text, holds, "x {:.2f} without, x {:.2f} with".format(*growth)))
        text = f"{lr} rate: normalisation costs no loss (at most 1 % more)"
        measured = f"{plain['loss']:.3f} without, {normed['loss']:.3f} with"
        found.append(claim(text, normed["loss"] < 1.01 * plain["loss"], measured))
    return found


# ---- the program ---------------------------------------------------------------------------------


def show(table: list[dict[str, Any]], console: Console) -> None:
    shown = Table(title="RMS of the residual stream over training, and held-out loss (nats)")
    for title in ("rate", "model", "start", "half-way", "end", "loss"):
        shown.add_column(title, justify="left" if title in ("rate", "model") else "right")
    for row in table:
        cells = ["diverged"] * 4
        if row["loss"] is not None:
            cells = [f"{row[key]:.3f}" for key in ("start", "half", "end", "loss")]
        shown.add_row(row["lr"], row["model"], *cells)
    console.print(shown)


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (label, lr) in zip(
        figure.subplots(1, len(LRS), sharey=True), LRS.items(), strict=True
    ):
        for n, model in enumerate((*MODELS, *ALTERNATIVES)):
            curves = [
                row["rms"]
                for row in rows
                if (row["model"], row["lr"]) == (model, lr) and row["rms"]
            ]
            for number, curve in enumerate(curves):
                name = model if number == 0 else None
                axes.semilogy(*zip(*curve, strict=True), color=f"C{n}", label=name, alpha=0.8)
        axes.set(
            title=f"{label} rate, 2^{math.log2(lr):g}",
            xlabel="step",
            ylabel="RMS of the residual stream",
        )
        axes.legend()
    return figure


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    steps, seeds = (dict.fromkeys(STEPS, 4), 2) if arguments.smoke else (STEPS, arguments.seeds)
    models = {"usual": (*MODELS, *ALTERNATIVES), "large": MODELS}
    runs: list[Run] = [
        (model, lr, seed, steps[label])
        for label, lr in LRS.items()
        for model, seed in product(models[label], range(seeds))
    ]
    rows = run_all(train, runs, arguments)
    result: dict[str, Any] = {
        "setting": SETTING | {"steps": steps, "lrs": LRS},
        "table": tabulate(rows),
        "estimates": estimates(rows),
    }
    result["claims"] = claims(result)
    console = Console(width=120)
    show(result["table"], console)
    show_claims(result["claims"], console)
    keep(arguments, "cbs_norm", plot(rows), **result, rows=rows)


if __name__ == "__main__":
    main()
