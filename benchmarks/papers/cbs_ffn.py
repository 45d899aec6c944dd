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

from typing import Any

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, training
from benchmarks.harness.experiment import Experiment, Row, Search
from benchmarks.harness.models import BASE_WIDTH, ViT
from benchmarks.harness.statistics import log_ratios, select, student, tuned
from benchmarks.harness.tasks import MixedDigits

WIDTH, BATCH = 144, 32
FFN = [f"blocks.{2 * n + 1}.*" for n in range(ViT.depth)]
STARTS = {"aware": 2.0**-8, "naive": 2.0**-6}  # of the searches
PARTS = ("loss", "error")


def build(width: int) -> nn.Module:
    model = ViT(MixedDigits.inputs, width, MixedDigits.outputs)
    return structlin.convert(
        model, structlin.BTT(rank=1), include=FFN, init="mup", zero_init=["*c_proj"]
    )


def make_optimizer(model: nn.Module, rule: str, lr: float) -> torch.optim.Optimizer:
    with torch.device("meta"):
        base = ViT(MixedDigits.inputs, BASE_WIDTH, MixedDigits.outputs)
    groups = structlin.param_groups(model, lr, base=base, structure_aware=rule == "aware")
    return torch.optim.AdamW(groups, lr, fused=True)


def train(method: str, size: int, lr: float, seed: int, steps: int, samples: int) -> Row:
    """The held-out loss and error, None where they are not finite."""
    torch.manual_seed(seed)
    model, data = build(size), MixedDigits(seed)
    descent = make_optimizer(model, method, lr)

    def loss(step: int) -> Tensor:
        x, y = data.batch(BATCH)
        return data.loss(model(x), y)

    training.descend(descent, loss, steps, warmup=steps // 20)
    return evaluate(model, MixedDigits(-1 - seed, heldout=True), samples)


@torch.no_grad()
def evaluate(model: nn.Module, new: MixedDigits, samples: int) -> Row:
    x, y = new.batch(samples)
    loss = training.finite(new.loss(model(x), y).item())
    x, y = new.draw(samples)
    error = (model(x).argmax(1) != y.argmax(1)).float().mean().item()
    return {"loss": loss, "error": error if loss is not None else None}


def compare(rows: list[Row]) -> dict[str, Any]:
    """For each measure and rule the best rate and the logs at it, by seed, "tuned"; and the logs of
    the aware rule's over the naive one's, each at its best rate, "aware / naive"."""
    found = {
        part: {rule: tuned(select(rows, method=rule), part) for rule in STARTS} for part in PARTS
    }
    return {
        "tuned": found,
        "aware / naive": {
            part: student(log_ratios(by_rule["aware"], by_rule["naive"]))
            for part, by_rule in found.items()
        },
    }


EXPERIMENT = Experiment(
    name="papers/cbs_ffn",
    about=__doc__,
    run=train,
    axes={"method": [*STARTS], "size": [WIDTH]},
    rates=Search("size", start=lambda job: STARTS[job["method"]]),
    sizes={"steps": 500, "samples": 2048},
    note={"width": WIDTH, "batch": BATCH, "structure": "BTT(rank=1)"},
    smoke={"steps": 2, "samples": 64, "size": [64]},
    analyse=compare,
    draw=lambda result: figures.rates(result["rows"], panel=["method"], line=["size"]),
)

if __name__ == "__main__":
    EXPERIMENT.main()
