"""Is a mixture of structured experts worth its parameters? Loss at equal FLOPs, on the GPT of
examples/.

    python -m benchmarks.moe            # in full: results/moe.{json,png}
    python -m benchmarks.moe --smoke    # seconds

BTT-MoE (arXiv:2410.02117) puts `structlin.moe.Mixture` in the place of every linear layer of the
blocks. Each model has the largest width at which a forward pass of one sequence costs no more than
dense's, router included: a mixture of 2 experts spends what BTT of rank 2 does. Steps and batches
are the same; muP and `param_groups` take a dense model's rate to each model. That rate is tuned for
each kind, on seed 0: by factors of 2 from the example's until the best has both its neighbours.
Mixtures add 0.01 of `load_balancing_loss` to the loss that they train on; the held-out loss is
cross-entropy alone. Then the models take turns for the milliseconds of a step. Runs that an earlier
result in --out has are not repeated.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.papers.sweeps import best, untried
from benchmarks.record import RESULTS, table
from benchmarks.runs import keep, parser, resume
from benchmarks.timing import interleaved, spread, wall
from structlin import BTT
from structlin.moe import Mixture, load_balancing_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import compare
import train_gpt

BALANCE = 0.01  # as in the paper's code
LR = 2e-3  # the example's, of the dense model; where the search for each kind's begins
SIZES = {"width": 128, "depth": 2, "context": 64, "batch": 8, "heads": 4}
WIDEST = 1024


@dataclass(frozen=True)
class Kind:
    structure: structlin.Family | None = None  # None: dense
    experts: int = 0  # 0: no mixture


KINDS = {
    "dense": Kind(),
    "BTT r=1": Kind(BTT(rank=1)),
    "BTT r=2": Kind(BTT(rank=2)),
    "BTT-MoE, 2 of 8": Kind(BTT(rank=1), 8),
}
Run = tuple[str, float, int]  # kind, learning rate, seed


def make_task(seed: int, steps: int) -> train_gpt.Text:
    return train_gpt.Text(argparse.Namespace(data=None, seed=seed, steps=steps, **SIZES))


def build(
    task: train_gpt.Text, name: str, width: int, seed: int = 0, device: str = "cpu"
) -> nn.Module:
    kind = KINDS[name]
    if not kind.experts:
        return compare.build(task, width, kind.structure, seed, device)
    model = compare.build(task, width, None, seed, device)
    for decision in structlin.plan(model, kind.structure, zero_init=task.zero_init).decisions:
        if decision.structure is not None:
            layer = decision.layer
            options = {"weight_norm": task.weight_norm, "zero_init": decision.zero_init}
            options |= {"experts": kind.experts, "device": device}
            widths = layer.in_features, layer.out_features
            model.set_submodule(layer.name, Mixture(*widths, kind.structure, False, **options))
    return model


def count_flops(task: train_gpt.Text, name: str, width: int) -> int:
    """A token, forward."""
    model = build(task, name, width, device="meta")
    return structlin.cost(model, compare.example_of(task)).flops // task.tokens


def find_width(task: train_gpt.Text, name: str) -> int:
    """The largest width, a multiple of 32, of no more FLOPs than the dense model."""
    budget = count_flops(task, "dense", SIZES["width"])
    if name == "dense":
        return SIZES["width"]
    widths = range(32, WIDEST + 1, 32)
    return max(width for width in widths if count_flops(task, name, width) <= budget)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    mixed = any(isinstance(module, Mixture) for module in model.modules())
    return loss + BALANCE * load_balancing_loss(model) if mixed else loss


def make_trainer(
    task: train_gpt.Text, name: str, width: int, lr: float, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, base = (
        build(task, name, width, seed),
        build(task, name, SIZES["width"], device="meta"),
    )
    groups = structlin.param_groups(model, lr, base=base)
    return model, torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)


def train(run: Run, steps: int, widths: dict[str, int]) -> dict[str, Any]:
    name, lr, seed = run
    task = make_task(seed, steps)
    model, optimizer = make_trainer(task, name, widths[name], lr, seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: compare.warmup_cosine(step, steps)
    )
    curve = []
    for step in range(steps):
        loss = loss_of(model.train(), *task.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, steps // 8) == 0 or step + 1 == steps:
            curve.append((step + 1, compare.evaluate(model.eval(), task.heldout, "cpu")[0]))
    row = {"kind": name, "lr": lr, "seed": seed, "loss": curve[-1][1], "curve": curve}
    return row | {"largest_share": measure_share(model, task)}


def job_of(row: dict[str, Any]) -> Run:
    return row["kind"], row["lr"], row["seed"]


def tune(name: str, train_all: Callable[[list[Run]], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of one kind's runs on seed 0: by factors of 2 until the best rate has both its
    neighbours."""
    rows: list[dict[str, Any]] = []
    while rates := untried({row["lr"]: row["loss"] for row in rows}, LR):
        rows += train_all([(name, lr, 0) for lr in rates])
    return rows


@torch.no_grad()
def measure_share(model: nn.Module, task: train_gpt.Text) -> float | None:
    """The largest expert's share of the assignments on held-out text, mean over the mixtures."""
    shares = []

    def look(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        _, chosen = module.route(arguments[0].flatten(0, -2))
        loads = chosen.flatten().bincount(minlength=module.experts)
        shares.append((loads.max() / loads.sum()).item())

    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    hooks = [module.register_forward_pre_hook(look) for module in mixtures]
    model.eval()(task.heldout[0][0])
    for hook in hooks:
        hook.remove()
    return fmean(shares) if shares else None


def time_steps(steps: int, widths: dict[str, int], seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds of a training step of each kind, over dense's of the same round."""
    task = make_task(0, steps)
    works: dict[str, Callable[[], None]] = {}
    for name, width in widths.items():
        model, optimizer = make_trainer(task, name, width, LR, 0)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            loss_of(model, *task.batch(0)).backward()
            optimizer.step()

        step()
        works[name] = step
    until = time.perf_counter() + seconds
    clock = partial(wall, device="cpu")
    times = interleaved(works, clock, rounds=(3, 15), until=until, end=math.inf)
    return {
        name: spread([a / b for a, b in zip(samples, times["dense"], strict=True)])
        for name, samples in times.items()
    }


def compare_kinds(
    rows: list[dict[str, Any]], widths: dict[str, int], times: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """A row for each kind, of its runs at its best rate."""
    task, found = make_task(0, 1), []
    for name, width in widths.items():
        tried = {row["lr"]: row["loss"] for row in rows if job_of(row)[::2] == (name, 0)}
        lr = best(tried)
        runs = [row for row in rows if job_of(row)[:2] == (name, lr)]
        runs.sort(key=lambda row: row["seed"])
        shares = [row["largest_share"] for row in runs if row["largest_share"] is not None]
        model = build(task, name, width, device="meta")
        row = {"kind": name, "width": width, "lr": lr, "losses": [run["loss"] for run in runs]}
        row["tried"] = sorted(tried.items())
        row["params"] = sum(parameter.numel() for parameter in model.parameters())
        row["flops"] = count_flops(task, name, width)
        row["largest_share"] = fmean(shares) if shares else None
        found.append(row | {"step": times[name]})
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/mixtures.md."""
    cells = []
    for row in result["table"]:
        figures = [str(row["width"]), f"{row['params']:,}", f"{row['flops']:,}", f"{row['lr']:g}"]
        losses = ", ".join(f"{loss:.3f}" for loss in row["losses"])
        cells.append([row["kind"], *figures, losses, f"{row['step']['median']:.1f}"])
    titles = ["", "width", "params", "FLOPs a token", "rate", "held-out loss, by seed"]
    return table([*titles, "ms a step / dense's"], cells)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    shown = Table(title="held-out loss (nats) at equal FLOPs, by seed")
    figures = ("width", "params", "FLOPs/token", "rate", "losses", "largest share", "step")
    for title in ("kind", *figures):
        shown.add_column(title, justify="left" if title == "kind" else "right")
    for row in rows:
        share = row["largest_share"]
        cells = [row["kind"], str(row["width"]), f"{row['params']:,}", f"{row['flops']:,}"]
        cells.append(f"{row['lr']:g}")
        cells.append(", ".join(f"{loss:.3f}" for loss in row["losses"]))
        shown.add_row(*cells, f"{share or 0:.2f}", f"x{row['step']['median']:.1f}")
    console.print(shown)


def plot(rows: list[dict[str, Any]], kinds: list[dict[str, Any]], tokens: int) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for n, row in enumerate(kinds):
        chosen = [run for run in rows if job_of(run)[:2] == (row["kind"], row["lr"])]
        for each in chosen:
            steps, losses = zip(*each["curve"], strict=True)
            flops = [3 * tokens * row["flops"] * step for step in steps]
            label = f"{row['kind']}, width {row['width']}" if each is chosen[0] else None
            axes.plot(flops, losses, color=f"C{n}", label=label, alpha=0.8)
    axes.set(xlabel="training FLOPs", ylabel="held-out loss (nats)", xscale="log", yscale="log")
    axes.legend()
    return figure


def main() -> None:
    arguments = parser(__doc__, RESULTS)
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--seeds", type=int, default=3)
    options = arguments.parse_args()
    structlin.show_config()  # builds the engine, so that no time has that in it
    seconds = 15.0
    if options.smoke:
        options.steps, options.seeds, seconds = 2, 1, 0.0
        SIZES.update(width=32, depth=1, batch=2, context=16, heads=1)
        del KINDS["BTT r=2"]
    task = make_task(0, options.steps)
    widths = {name: find_width(task, name) for name in KINDS}
    setting = {"steps": options.steps, "sizes": SIZES, "start": LR, "widths": widths}
    setting["balance"] = BALANCE
    function = partial(train, steps=options.steps, widths=widths)

    def train_all(jobs: list[Run]) -> list[dict[str, Any]]:
        return resume(function, jobs, options, "moe", setting, job_of)

    rows = []
    for name in reversed(KINDS):
        mine = train_all([(name, LR, 0)]) if options.smoke else tune(name, train_all)
        lr = best({row["lr"]: row["loss"] for row in mine})
        rows += mine + train_all([(name, lr, seed) for seed in range(1, options.seeds)])
    found = compare_kinds(rows, widths, time_steps(options.steps, widths, seconds))
    show(found, Console(width=140))
    figure = plot(rows, found, SIZES["batch"] * SIZES["context"])
    keep(options, "moe", figure, setting=setting, table=found, rows=rows)


if __name__ == "__main__":
    main()
