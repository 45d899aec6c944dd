"""GPT loss against compute, with and without the head's: figure 9 of "Compute Better Spent".

    python -m benchmarks.papers.cbs_gpt            # the full result, four core-minutes
    python -m benchmarks.papers.cbs_gpt --smoke    # seconds

The paper trains GPT-2 on OpenWebText, dense and with normalised BTT of rank 4 in every matrix, the
language modelling head included. It claims that BTT reaches a lower loss for the same compute, and
that the two are about equal when the compute of the head is not counted: the gain comes from the
head.

Here: the GPT of examples/ on the text of the Python standard library in words, with a vocabulary of
2048 so that the head is as large a part of these small models as GPT-2's is of the paper's (40 to
73 % of the dense models' FLOPs); two blocks, widths 32 to 128 dense and 64 to 256 with normalised
BTT of rank 2, 300 steps of AdamW with a fifth of warm-up and a cosine. One base learning rate, muP
across widths; dense has the better of two at each width. FLOPs are those of a forward pass per
token, attention included. Losses are compared at equal FLOPs as in cbs_scaling; with two seeds an
interval is the range over them.

A batch has 512 tokens, a thousandth of the paper's, and most words are in none of them. At Adam's
usual eps of 1e-8 the rows of a dense head that belong to such words then move at full rate on
noise; a BTT head, whose cores are shared by many words, does not. To compare structures and not
that, eps is 1e-4 for all; the models of width 64 are also trained with 1e-8, to show how much it
matters.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.papers import tasks
from benchmarks.papers.cbs_report import Claim, claim, ratio, show_claims
from benchmarks.papers.cbs_scaling import Curve, curve_of, estimate, gap
from benchmarks.runs import keep, parser, run_all

WIDTHS = {"dense": [32, 64, 128], "BTT": [64, 128, 256]}
SETTING = {"batch": 8, "context": 64, "depth": 2, "vocabulary": 2048, "rank": 2}
LR = 2.0**-7
RATES = {"dense": (LR / 2, LR)}
EPS, USUAL_EPS = 1e-4, 1e-8
STEPS = 300
EQUAL = 0.02  # losses closer than this, relatively, are about equal

Run = tuple[str, int, float, float, int, int]  # structure, width, lr, eps, seed, steps


def build(task: tasks.Words, structure: str, width: int) -> nn.Module:
    model = task.model(width)
    if structure == "BTT":
        zero = ["*c_proj", "lm_head"]
        btt = structlin.BTT(rank=SETTING["rank"])
        structlin.convert(
            model, btt, include=["*c_attn", "*c_fc", *zero], zero_init=zero, weight_norm=True
        )
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
        "loss": final,
    }
    return row | {"flops": total, "head_flops": head, "body_flops": total - head}


def compare(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """log(BTT's loss / dense's) at equal FLOPs of the whole model, at equal FLOPs without the
    head's, and of the models of the base width at the usual eps."""
    seeds = sorted({row["seed"] for row in rows})

    def curve(structure: str, eps: float, flops: str, drawn: Sequence[int]) -> Curve:
        found = [row for row in rows if (row["structure"], row["eps"]) == (structure, eps)]
        return curve_of([row | {"flops": row[flops]} for row in found], drawn)

    def measured(flops: str) -> dict[str, float]:
        return estimate(
            lambda drawn: gap(*(curve(name, EPS, flops, drawn) for name in ("BTT", "dense"))), seeds
        )

    def usual(drawn: Sequence[int]) -> float:
        ((_, btt),), ((_, dense),) = (
            curve(name, USUAL_EPS, "flops", drawn) for name in ("BTT", "dense")
        )
        return btt - dense

    found = {"all FLOPs": measured("flops"), "without the head's FLOPs": measured("body_flops")}
    return found | {"same width, usual eps": estimate(usual, seeds)}


def claims(result: dict[str, Any]) -> list[Claim]:
    total, body = (result["log_ratios"][key] for key in ("all FLOPs", "without the head's FLOPs"))
    text = "without the head's FLOPs BTT and dense are about equal"
    return [
        claim(
            "BTT has a lower loss than dense at equal FLOPs",
            total["high"] < 0,
            f"{ratio(total)} of it",
        ),
        claim(f"{text}: within {EQUAL:.0%}", abs(body["value"]) < EQUAL, f"{ratio(body)} of it"),
        claim(
            "BTT gains more where the head's FLOPs are counted than where they are not",
            total["high"] < body["low"],
            f"{ratio(total)} with, {ratio(body)} without",
        ),
    ]


# ---- the program ---------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], console: Console) -> None:
    shown = Table(title="held-out loss (nats a token), forward FLOPs a token")
    for title in ("structure", "width", "FLOPs", "of the head", "loss by seed, at the best rate"):
        shown.add_column(title, justify="left" if title == "structure" else "right")
    for structure, widths in WIDTHS.items():
        for width in widths:
            found = [
                r for r in rows if (r["structure"], r["width"], r["eps"]) == (structure, width, EPS)
            ]
            by_rate = {
                lr: [row for row in found if row["lr"] == lr] for lr in RATES.get(structure, (LR,))
            }
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
    options.add_argument("--seeds", type=int, default=2)
    arguments = options.parse_args()
    steps, seeds = (1, 1) if arguments.smoke else (STEPS, arguments.seeds)
    runs: list[Run] = [
        (structure, width, lr, EPS, seed, steps)
        for structure, widths in WIDTHS.items()
        for width, lr, seed in product(reversed(widths), RATES.get(structure, (LR,)), range(seeds))
    ]
    runs += [
        (name, tasks.BASE_WIDTH, LR, USUAL_EPS, seed, steps)
        for name, seed in product(WIDTHS, range(seeds))
    ]
    rows = run_all(train, runs, arguments)
    setting = SETTING | {
        "steps": steps,
        "lr": LR,
        "rates": RATES,
        "eps": EPS,
        "optimizer": "AdamW, cosine",
    }
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
