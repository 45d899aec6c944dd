"""Does a dense branch that fades away help a structured layer to train? The GPT of examples/.

    python -m benchmarks.training.self_guided            # in full: results/self_guided.{json,png}
    python -m benchmarks.training.self_guided --smoke    # seconds

Self-guided training (arXiv:2406.16450): y = alpha W x + (1 - alpha) B x, with W dense, which starts
as B's matrix, and alpha a cosine from 1 to 0 over the first half of the steps; then B alone is
left. "at random" computes W x with probability alpha only, and B x alone otherwise, as the paper
does to save FLOPs. The plain layers train for as many steps, and for as many training FLOPs as
those at random have spent on average. All at the dense model's rate, taken over by `param_groups`.
Runs that an earlier result in --out has are not repeated.
"""

import math
import random
from itertools import product

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import select, values
from benchmarks.training.moe import LR, SIZES, compare, loss_of, make_task
from structlin import BTT, LowRank, StructuredLinear

STRUCTURES = {"BTT r=1": BTT(rank=1), "low-rank 16": LowRank(rank=16)}
WAYS = ("plain", "plain, equal FLOPs", "self-guided", "self-guided, at random")
GUIDED = 0.5  # of the steps
SPENT = GUIDED / 2  # mean of alpha over all steps


class SelfGuided(nn.Module):
    """`alpha W x + (1 - alpha) B x` in training, `B x` else; W starts as the matrix of B."""

    def __init__(self, layer: StructuredLinear, at_random: bool) -> None:
        super().__init__()
        self.layer, self.at_random, self.alpha = layer, at_random, 1.0
        self.guide = nn.Linear(layer.in_features, layer.out_features, bias=False)
        self.guide.weight = nn.Parameter(layer.to_dense().detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        idle = not self.training or self.alpha == 0
        if idle or (self.at_random and random.random() >= self.alpha):
            return y
        return self.alpha * self.guide(x) + (1 - self.alpha) * y


def guide(model: nn.Module, at_random: bool) -> list[SelfGuided]:
    """Put a dense branch beside every structured layer, in place."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, StructuredLinear)]
    for name, layer in layers:
        model.set_submodule(name, SelfGuided(layer, at_random))
    return [module for module in model.modules() if isinstance(module, SelfGuided)]


def alpha_at(step: int, steps: int) -> float:
    """A cosine from 1 to 0 over the guided steps.

    >>> [round(alpha_at(step, 8), 2) for step in (0, 2, 4, 8)]
    [1.0, 0.5, 0.0, 0.0]
    """
    done = min(1.0, step / (GUIDED * steps))
    return 0.5 * (1 + math.cos(math.pi * done))


def count_steps(structure: str, steps: int, sizes: dict[str, int]) -> int:
    """Steps of the plain layers that cost what those with a branch at random do."""
    task, family, width = make_task(0, sizes), STRUCTURES[structure], sizes["width"]
    model = compare.build(task, width, family, 0, "meta")
    layers = [module for module in model.modules() if isinstance(module, StructuredLinear)]
    dense = sum(2 * layer.in_features * layer.out_features for layer in layers)
    return round(steps * (1 + SPENT * dense / compare.forward_flops(task, width, family)))


def train(structure: str, way: str, seed: int, steps: int, sizes: dict[str, int]) -> Row:
    taken = count_steps(structure, steps, sizes) if way == "plain, equal FLOPs" else steps
    task = make_task(seed, sizes)
    model = compare.build(task, sizes["width"], STRUCTURES[structure], seed)
    random.seed(seed)
    layers = guide(model, way.endswith("random")) if way.startswith("self") else []
    groups = structlin.param_groups(model, LR)
    optimizer = torch.optim.AdamW(groups, LR, betas=(0.9, 0.95), fused=True)

    def loss(step: int) -> Tensor:
        for layer in layers:
            layer.alpha = alpha_at(step, taken)
        return loss_of(model, *task.batch(step))

    curve = training.follow(model, optimizer, task, taken, points=4, loss=loss)
    return {"steps": taken, "loss": curve[-1][1], "curve": curve}


def losses_of(rows: list[Row], structure: str, way: str) -> list[float]:
    found = select(rows, structure=structure, way=way)
    return [row["loss"] for row in sorted(found, key=lambda row: row["seed"])]


def draw(result: Row) -> figures.Figure:
    points = [
        {"structure": row["structure"], "way": row["way"], "step": step, "loss": loss}
        for row in result["rows"]
        for step, loss in row["curve"]
    ]
    return figures.curves(points, "step", panel=["structure"], line=["way"], log="y")


EXPERIMENT = Experiment(
    name="self_guided",
    about=__doc__,
    run=train,
    axes={"structure": [*STRUCTURES], "way": WAYS},
    sizes={"steps": 400, "sizes": SIZES},
    note={"lr": LR, "guided": GUIDED},
    smoke={
        "steps": 4,
        "sizes": {"width": 32, "depth": 1, "context": 16, "batch": 2, "heads": 1},
        "seeds": 1,
    },
    analyse=lambda rows: {
        "losses": [
            {"structure": structure, "way": way, "by seed": losses_of(rows, structure, way)}
            for structure, way in product(values(rows, "structure"), WAYS)
        ]
    },
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
