"""Does a dense branch that fades away help a structured layer to train? The GPT of examples/.

    python -m benchmarks.self_guided            # in full: results/self_guided.{json,png}
    python -m benchmarks.self_guided --smoke    # seconds

Self-guided training (arXiv:2406.16450): y = alpha W x + (1 - alpha) B x, with W dense, which starts
as B's matrix, and alpha a cosine from 1 to 0 over the first half of the steps; then B alone is
left. "at random" computes W x with probability alpha only, and B x alone otherwise, as the paper
does to save FLOPs. The plain layers train for as many steps, and for as many training FLOPs as
those at random have spent on average. All at the dense model's rate, taken over by `param_groups`.
Runs that an earlier result in --out has are not repeated.
"""

import json
import math
import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.moe import LR, SIZES, compare, loss_of, make_task
from benchmarks.record import RESULTS, table
from benchmarks.runs import keep, parser, run_all
from structlin import BTT, LowRank, StructuredLinear

STRUCTURES = {"BTT r=1": BTT(rank=1), "low-rank 16": LowRank(rank=16)}
WAYS = ("plain", "plain, equal FLOPs", "self-guided", "self-guided, at random")
GUIDED = 0.5  # of the steps
SPENT = GUIDED / 2  # mean of alpha over all steps
Run = tuple[str, str, int]  # structure, way, seed


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


def count_flops(structure: str | None) -> int:
    family = STRUCTURES[structure] if structure else None
    return compare.forward_flops(make_task(0, 1), SIZES["width"], family)


def count_steps(structure: str, steps: int) -> int:
    """Steps of the plain layers that cost what those with a branch at random do."""
    own = count_flops(structure)
    model = compare.build(make_task(0, 1), SIZES["width"], STRUCTURES[structure], 0, "meta")
    layers = [module for module in model.modules() if isinstance(module, StructuredLinear)]
    dense = sum(2 * layer.in_features * layer.out_features for layer in layers)
    return round(steps * (1 + SPENT * dense / own))


def train(run: Run, steps: int) -> dict[str, Any]:
    structure, way, seed = run
    taken = count_steps(structure, steps) if way == "plain, equal FLOPs" else steps
    task = make_task(seed, taken)
    model = compare.build(task, SIZES["width"], STRUCTURES[structure], seed)
    random.seed(seed)
    layers = guide(model, way.endswith("random")) if way.startswith("self") else []
    groups = structlin.param_groups(model, LR)
    optimizer = torch.optim.AdamW(groups, LR, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: compare.warmup_cosine(step, taken)
    )
    curve = []
    for step in range(taken):
        for layer in layers:
            layer.alpha = alpha_at(step, taken)
        loss = loss_of(model.train(), *task.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, taken // 4) == 0 or step + 1 == taken:
            curve.append((step + 1, compare.evaluate(model.eval(), task.heldout, "cpu")[0]))
    row = {"structure": structure, "way": way, "seed": seed, "steps": taken}
    return row | {"loss": curve[-1][1], "curve": curve}


def find_finished(path: Path, setting: dict[str, Any]) -> dict[Run, dict[str, Any]]:
    """Runs of an earlier result of the same setting: they are not repeated."""
    content = json.loads(path.read_text()) if path.exists() else {}
    rows = content["rows"] if content.get("setting") == setting else []
    return {(row["structure"], row["way"], row["seed"]): row for row in rows}


def losses_of(rows: list[dict[str, Any]], structure: str, way: str) -> list[float]:
    found = [row for row in rows if (row["structure"], row["way"]) == (structure, way)]
    return [row["loss"] for row in sorted(found, key=lambda row: row["seed"])]


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/mixtures.md: held-out losses by seed."""
    rows = result["rows"]
    structures = list(dict.fromkeys(row["structure"] for row in rows))
    steps = {(row["structure"], row["way"]): row["steps"] for row in rows}
    cells = []
    for structure, way in product(structures, WAYS):
        losses = ", ".join(f"{loss:.3f}" for loss in losses_of(rows, structure, way))
        cells.append([f"{structure}, {way}", str(steps[structure, way]), losses])
    return table(["", "steps", "held-out loss, by seed"], cells)


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, structure in zip(figure.subplots(1, len(STRUCTURES)), STRUCTURES, strict=True):
        for n, way in enumerate(WAYS):
            chosen = [row for row in rows if (row["structure"], row["way"]) == (structure, way)]
            for row in chosen:
                label = way if row is chosen[0] else None
                axes.plot(*zip(*row["curve"], strict=True), color=f"C{n}", label=label)
        axes.set(title=structure, xlabel="step", ylabel="held-out loss (nats)", yscale="log")
        axes.legend()
    return figure


def main() -> None:
    arguments = parser(__doc__, RESULTS)
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--seeds", type=int, default=3)
    options = arguments.parse_args()
    if options.smoke:
        options.steps, options.seeds = 4, 1
        SIZES.update(width=32, depth=1, batch=2, context=16, heads=1)
    setting = {"steps": options.steps, "sizes": SIZES, "lr": LR, "guided": GUIDED}
    kept = find_finished(options.out / "self_guided.json", setting)
    runs = [(s, way, n) for n, way, s in product(range(options.seeds), WAYS, STRUCTURES)]
    rows = [kept[run] for run in runs if run in kept]
    missing = [run for run in runs if run not in kept]
    rows += run_all(partial(train, steps=options.steps), missing, options)
    shown = Table("structure", "way", "steps", "held-out loss, by seed")
    for structure, way in product(STRUCTURES, WAYS):
        losses = losses_of(rows, structure, way)
        steps = next(r["steps"] for r in rows if (r["structure"], r["way"]) == (structure, way))
        shown.add_row(structure, way, str(steps), ", ".join(f"{loss:.3f}" for loss in losses))
    Console(width=120).print(shown)
    keep(options, "self_guided", plot(rows), setting=setting, rows=rows)


if __name__ == "__main__":
    main()
