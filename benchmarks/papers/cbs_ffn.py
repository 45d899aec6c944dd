"""Both rules tuned where structures differ across layers: figure 3 of "Compute Better Spent".

    python -m benchmarks.papers.cbs_ffn            # results/papers/cbs_ffn.{json,png}
    python -m benchmarks.papers.cbs_ffn --smoke    # seconds

"Structure-aware learning rates improve performance even after tuning the learning [rate] with grid
search. Test error of ViT (d = 1024) on CIFAR-10 where the feed-forward layers are replaced using
BTT", and attention stays dense; "the naive approach would have to choose between using a learning
rate too large for the attention projection or a learning rate too small for the FFN" (section 3.3).

Here: the ViT of `vision` of width 144 on digits, BTT of rank 1 in its FFNs, whose cores the rule
gives 6 and 12 times dense's rate (1024: 16 and 32); 500 steps of 32 by AdamW, a cosine to zero, 3
seeds. Rates go by factors of 2 until the best, over the seeds, has both its neighbours. The loss
is that of held-out images, moved and mixed; the error is the share of such images, moved and not
mixed, that is misclassified. Rates of dense layers are muP's, relative to the dense ViT of width
64, layer by layer as the paper's code has it (its text has one base width for all layers).
"""

from functools import partial
from itertools import product
from math import isfinite, log2
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

import structlin
from benchmarks.papers import sweeps, tasks
from benchmarks.papers.cbs_report import ratio
from benchmarks.papers.intervals import student
from benchmarks.papers.vision import DEPTH, MixedDigits, ViT
from benchmarks.runs import keep, parser, resume

WIDTH, STEPS, BATCH = 144, 500, 32
FFN = [f"blocks.{2 * n + 1}.*" for n in range(DEPTH)]
STARTS = {"aware": 2.0**-8, "naive": 2.0**-6}  # of the searches
PARTS = ("loss", "error")
SAMPLES = 2048

Run = tuple[str, int, float, int]  # rule, width, lr, seed


def build(width: int) -> nn.Module:
    model = ViT(MixedDigits.inputs, width, MixedDigits.outputs)
    return structlin.convert(
        model, structlin.BTT(rank=1), include=FFN, init="mup", zero_init=["*c_proj"]
    )


def train(run: Run, steps: int, samples: int) -> dict[str, Any]:
    """A row; what is measured is None where it is not finite."""
    rule, width, lr, seed = run
    torch.manual_seed(seed)
    model, data = build(width), MixedDigits(seed)
    with torch.device("meta"):
        base = ViT(data.inputs, tasks.BASE_WIDTH, data.outputs)
    groups = structlin.param_groups(model, lr, base=base, structure_aware=rule != "naive")

    def loss(step: int) -> Tensor:
        x, y = data.batch(BATCH)
        return data.loss(model(x), y)

    tasks.descend(torch.optim.AdamW(groups, lr, fused=True), loss, steps, warmup=steps // 20)
    named = {"method": rule, "size": width, "lr": lr, "seed": seed}
    return named | evaluate(model, MixedDigits(-1 - seed, heldout=True), samples)


@torch.no_grad()
def evaluate(model: nn.Module, new: MixedDigits, samples: int) -> dict[str, float | None]:
    x, y = new.batch(samples)
    loss = new.loss(model(x), y).item()
    x, y = new.draw(samples)
    error = (model(x).argmax(1) != y.argmax(1)).float().mean().item()
    return {"loss": loss, "error": error} if isfinite(loss) else dict.fromkeys(PARTS)


def job_of(row: dict[str, Any]) -> Run:
    return row["method"], row["size"], row["lr"], row["seed"]


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each measure and rule the best rate and the logs at it, by seed, "tuned"; and the logs of
    the aware rule's over the naive one's, each at its best rate, "aware / naive"."""
    tuned = {
        part: {
            rule: sweeps.tuned((row for row in rows if row["method"] == rule), part)
            for rule in STARTS
        }
        for part in PARTS
    }
    ratios = {
        part: [
            found["aware"]["logs"][seed] - found["naive"]["logs"][seed]
            for seed in sorted(found["naive"]["logs"])
        ]
        for part, found in tuned.items()
    }
    return {
        "tuned": tuned,
        "aware / naive": {part: student(values) for part, values in ratios.items()},
    }


# ---- the program ---------------------------------------------------------------------------------


def show(compared: dict[str, Any], console: Console) -> None:
    for part, by_rule in compared["tuned"].items():
        for rule, found in by_rule.items():
            mean = sum(found["logs"].values()) / len(found["logs"])
            end = ", at an end" if found["at end"] else ""
            console.print(
                f"{part}, {rule}: {torch.tensor(mean).exp():.4f} at 2^{log2(found['lr']):g}{end}"
            )
    for part, found in compared["aware / naive"].items():
        console.print(f"{part}: aware has {ratio(found)} of naive's, each at its best rate")


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, rule in zip(figure.subplots(1, len(STARTS), sharey=True), STARTS, strict=True):
        sweeps.plot(axes, rows, rule, "width")
        axes.set_ylabel("held-out loss")
    return figure


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    width, steps, seeds, samples = WIDTH, STEPS, arguments.seeds, SAMPLES
    if arguments.smoke:
        width, steps, seeds, samples = 64, 2, 2, 64
    setting = {"width": width, "steps": steps, "batch": BATCH, "structure": "BTT(rank=1)"}
    function = partial(train, steps=steps, samples=samples)
    rows: list[dict[str, Any]] = []
    for rule, start in STARTS.items():

        def run(size: int, lrs: list[float], rule: str = rule) -> list[dict[str, Any]]:
            runs = [(rule, size, lr, seed) for lr, seed in product(lrs, range(seeds))]
            return resume(function, runs, arguments, "cbs_ffn", setting, job_of)

        found = run(width, [start]) if arguments.smoke else sweeps.search(run, [width], start)
        rows += found
    compared = compare(rows)
    show(compared, Console(width=120))
    keep(arguments, "cbs_ffn", plot(rows), setting=setting, **compared, rows=rows)


if __name__ == "__main__":
    main()
