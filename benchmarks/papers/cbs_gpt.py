"""GPT loss against compute, with and without the head's: figure 9 of "Compute Better Spent".

    python -m benchmarks.papers.cbs_gpt            # the full result, fifteen core-minutes
    python -m benchmarks.papers.cbs_gpt --smoke    # seconds

The paper trains GPT-2 on OpenWebText, dense and with normalised BTT of rank 4 in every matrix, the
language modelling head included; BTT's attention has 6 heads at widths 1024 to 2048, those of the
narrowest dense model, "since otherwise we would spend too much compute in the attention layers
relative to the FFN layers" (G.2). "(a) When including language modeling head compute, BTT is more
efficient than dense. (b) When excluding language modeling head compute, BTT and dense perform
similarly"; "the improvement primarily comes from reducing the compute spent in the language
modeling head".

Here: the GPT of examples/ on the text of the Python standard library in words, with a vocabulary of
2048 so that the head is a large part of these small models too; two blocks, widths 64 to 256 dense,
with as many heads of 32 features as fill the width, and 144 to 576 with normalised BTT of rank 4
and the 2 heads of the narrowest dense model; 300 steps of AdamW with a fifth of warm-up and a
cosine, 3 seeds. One base learning rate, 2^-7, is carried to every model by muP, as in the paper;
dense also has the best of three at each width, half and twice that too. FLOPs are those of a
forward pass per token, attention included. Losses are compared at equal FLOPs as in cbs_scaling,
seed by seed, with Student's intervals. Fixed before the runs: "similarly" is within 2 % of each
other, and the gain comes primarily from the head if less than half of its logarithm is left where
the head's FLOPs are not counted.

A batch has 512 tokens, a thousandth of the paper's, and most words are in none of them. At Adam's
usual eps of 1e-8 the rows of a dense head that belong to such words then move at full rate on
noise; a BTT head, whose cores are shared by many words, does not. To compare structures and not
that, eps is 1e-4 for all; the models of width 64 are also trained with 1e-8, to show how much it
matters.
"""

from itertools import product
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.papers import tasks
from benchmarks.papers.cbs_report import Claim, claim, interval, ratio, show_claims
from benchmarks.papers.cbs_scaling import Curve, curve_of, gap
from benchmarks.papers.intervals import Estimate, above, below, student, within
from benchmarks.runs import keep, parser, resume

WIDTHS = {"dense": [64, 128, 256], "BTT": [144, 256, 400, 576]}
SETTING = {"batch": 8, "context": 64, "depth": 2, "vocabulary": 2048, "rank": 4, "heads": 2}
LR = 2.0**-7
RATES = {"dense": (LR / 2, LR, 2 * LR), "BTT": (LR,)}
EPS, USUAL_EPS = 1e-4, 1e-8
STEPS = 300
EQUAL = log(1.02)  # losses perform similarly if the logarithm of their ratio is closer to 0

Run = tuple[str, int, float, float, int, int]  # structure, width, lr, eps, seed, steps


def build(task: tasks.Words, structure: str, width: int) -> nn.Module:
    if structure == "BTT":
        task.heads = SETTING["heads"]  # else as many as fill the width
    model = task.model(width)
    if structure == "BTT":
        zero = ["*c_proj", "lm_head"]
        btt = structlin.BTT(rank=SETTING["rank"])
        include = ["*c_attn", "*c_fc", *zero]
        structlin.convert(model, btt, include=include, init="mup", zero_init=zero, weight_norm=True)
    return model


def train(run: Run) -> dict[str, Any]:
    structure, width, lr, eps, seed, steps = run
    task = tasks.Words(
        seed, SETTING["batch"], SETTING["context"], SETTING["depth"], SETTING["vocabulary"]
    )
    torch.manual_seed(seed)
    model = build(task, structure, width)
    groups = structlin.param_groups(model, lr, base=task.model(tasks.BASE_WIDTH))

    def loss(step: int) -> Tensor:
        inputs, targets = task.batch(step)
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    tasks.descend(
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=eps), loss, steps, warmup=steps // 5
    )
    final, _ = tasks.compare.evaluate(model, task.heldout, "cpu")
    head = tasks.forward_flops(model.lm_head, torch.zeros(1, width))
    total = tasks.forward_flops(model, task.heldout[0][0][:1]) // SETTING["context"]
    row = {
        "structure": structure,
        "width": width,
        "lr": lr,
        "eps": eps,
        "seed": seed,
        "steps": steps,
        "loss": final,
    }
    return row | {"flops": total, "head_flops": head, "body_flops": total - head}


def job_of(row: dict[str, Any]) -> Run:
    names = ("structure", "width", "lr", "eps", "seed", "steps")
    structure, width, lr, eps, seed, steps = (row[name] for name in names)
    return structure, width, lr, eps, seed, steps


def compare(rows: list[dict[str, Any]]) -> dict[str, Estimate]:
    """log(BTT's loss / dense's) at equal FLOPs of the whole model, at equal FLOPs without the
    head's, by how much the second exceeds half of the first, the first with dense at BTT's rate,
    and the log ratio of the models of the base width at the usual eps."""
    seeds = sorted({row["seed"] for row in rows})

    def curve(structure: str, eps: float, flops: str, seed: int, *lrs: float) -> Curve:
        found = [row for row in rows if (row["structure"], row["eps"]) == (structure, eps)]
        found = [row for row in found if not lrs or row["lr"] in lrs]
        return curve_of([row | {"flops": row[flops]} for row in found], [seed])

    def gaps(flops: str, *lrs: float) -> list[float]:
        return [
            gap(*(curve(name, EPS, flops, seed, *lrs) for name in ("BTT", "dense")))
            for seed in seeds
        ]

    def usual(seed: int) -> float:
        ((_, btt),), ((_, dense),) = (
            curve(name, USUAL_EPS, "flops", seed) for name in ("BTT", "dense")
        )
        return btt - dense

    total, body = gaps("flops"), gaps("body_flops")
    left = [b - t / 2 for t, b in zip(total, body, strict=True)]
    return {
        "all FLOPs": student(total),
        "without the head's FLOPs": student(body),
        "beyond half of the gain": student(left),
        "all FLOPs, one rate": student(gaps("flops", LR)),
        "same width, usual eps": student([usual(seed) for seed in seeds]),
    }


def claims(result: dict[str, Any]) -> list[Claim]:
    """Each holds if the whole 95 % interval is on the paper's side."""
    total, body, left, *_ = result["log_ratios"].values()
    return [
        claim(
            "BTT has a lower loss than dense at equal FLOPs",
            below(total) is True,
            f"{ratio(total)} of it",
        ),
        claim(
            "without the head's FLOPs BTT and dense perform similarly: within 2 %",
            within(body, EQUAL) is True,
            f"{ratio(body)} of it",
        ),
        claim(
            "less than half of BTT's gain is left where the head's FLOPs are not counted",
            above(left) is True,
            f"log ratio without the head's less half of that with: {interval(left)}",
        ),
    ]


# ---- the program ---------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], console: Console) -> None:
    shown = Table(title="held-out loss (nats a token), forward FLOPs a token")
    for title in ("structure", "width", "FLOPs", "of the head", "loss by seed, at the best rate"):
        shown.add_column(title, justify="left" if title == "structure" else "right")
    for structure in WIDTHS:
        for width in sorted({row["width"] for row in rows if row["structure"] == structure}):
            found = [
                r for r in rows if (r["structure"], r["width"], r["eps"]) == (structure, width, EPS)
            ]
            if not found:
                continue  # the base width at the usual eps alone
            by_rate = {lr: [r for r in found if r["lr"] == lr] for lr in {r["lr"] for r in found}}
            best = min(by_rate.values(), key=lambda runs: sum(row["loss"] for row in runs))
            losses = ", ".join(f"{row['loss']:.4f}" for row in best)
            flops, share = best[0]["flops"], best[0]["head_flops"] / best[0]["flops"]
            shown.add_row(structure, str(width), f"{flops:,}", f"{share:.0%}", losses)
    console.print(shown)


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    seeds = sorted({row["seed"] for row in rows})
    titles = {"flops": "all FLOPs", "body_flops": "without the head's FLOPs"}
    for axes, (over, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for structure in WIDTHS:
            curve = curve_of(
                [
                    row | {"flops": row[over]}
                    for row in rows
                    if (row["structure"], row["eps"]) == (structure, EPS)
                ],
                seeds,
            )
            flops, losses = (
                torch.tensor(values).exp().tolist() for values in zip(*curve, strict=True)
            )
            axes.loglog(flops, losses, "o-", label=structure)
        axes.set(title=title, xlabel="forward FLOPs a token", ylabel="held-out loss (nats)")
        axes.legend()
    return figure


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    steps, seeds, chosen, rates = STEPS, arguments.seeds, WIDTHS, RATES
    if arguments.smoke:
        steps, seeds = 1, 2
        chosen = {structure: widths[:2] for structure, widths in WIDTHS.items()}
        rates = {structure: (LR,) for structure in WIDTHS}
    runs: list[Run] = [
        (structure, width, lr, EPS, seed, steps)
        for structure, widths in chosen.items()
        for width, lr, seed in product(reversed(widths), rates[structure], range(seeds))
    ]
    runs += [
        (name, tasks.BASE_WIDTH, lr, USUAL_EPS, seed, steps)
        for name, lr, seed in product(WIDTHS, rates["BTT"], range(seeds))
    ]
    setting = SETTING | {"steps": steps, "eps": EPS, "optimizer": "AdamW, cosine"}
    rows = resume(train, runs, arguments, "cbs_gpt", setting, job_of)
    result: dict[str, Any] = {"setting": setting, "log_ratios": compare(rows)}
    compared = result["log_ratios"]["same width, usual eps"]
    result["claims"] = claims(result)
    console = Console(width=120)
    show(rows, console)
    console.print(
        f"BTT's loss / dense's at width {tasks.BASE_WIDTH} and eps {USUAL_EPS}: {ratio(compared)}"
    )
    show_claims(result["claims"], console)
    keep(arguments, "cbs_gpt", plot(rows), **result, rows=rows)


if __name__ == "__main__":
    main()
