"""Is a mixture of structured experts worth its parameters? Loss at equal FLOPs, on the GPT of
examples/.

    python -m benchmarks.training.moe            # in full: results/moe.{json,png}
    python -m benchmarks.training.moe --smoke    # seconds

BTT-MoE (arXiv:2410.02117) puts `structlin.moe.Mixture` in the place of every linear layer of the
blocks. Each model has the largest width at which a forward pass of one sequence costs no more than
dense's, router included: a mixture of 2 experts spends what BTT of rank 2 does. Steps and batches
are the same; muP and `param_groups` take a dense model's rate to each model. That rate is tuned for
each kind, on seed 0: by factors of 2 from the example's until the best has both its neighbours.
The rate rises for `training.WARM_UP` steps. Mixtures add 0.01 of `load_balancing_loss` to the loss
that they train on; the held-out loss is cross-entropy alone. Then the models take turns for the
milliseconds of a step, on one thread and on two. Runs that an earlier result in --out has are not
repeated.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, report, training
from benchmarks.harness.experiment import Experiment, Row, Tune
from benchmarks.harness.statistics import curve_of_rates, select, tuned_on_first, values
from benchmarks.harness.tasks import compare, of_examples, train_gpt
from benchmarks.harness.timing import interleaved, spread, wall
from structlin import BTT
from structlin.moe import Mixture, load_balancing_loss

BALANCE = 0.01  # as in the paper's code
LR = 2e-3  # the example's, of the dense model; where the search for each kind's begins
SIZES = {"width": 128, "depth": 2, "context": 64, "batch": 8, "heads": 4}
WIDEST = 1024
THREADS = (1, 2)  # of a timed step


@dataclass(frozen=True)
class Kind:
    structure: structlin.Family | None = None  # None: dense
    experts: int = 0  # 0: no mixture


KINDS = {
    "dense": Kind(),
    "BTT r=1": Kind(BTT(rank=1)),
    "BTT r=2": Kind(BTT(rank=2)),
    "BTT r=1 + SiLU": Kind(BTT(rank=1).activate()),
    "BTT-MoE, 2 of 8": Kind(BTT(rank=1), 8),
}


def make_task(seed: int, sizes: Mapping[str, int]) -> train_gpt.Text:
    return of_examples(train_gpt.Text, seed, **sizes)


def build(
    task: train_gpt.Text, name: str, width: int, seed: int = 0, device: str = "cpu"
) -> nn.Module:
    kind = KINDS[name]
    model = compare.build(task, width, None if kind.experts else kind.structure, seed, device)
    return mix(model, kind.structure, kind.experts, task) if kind.experts else model


def mix(
    model: nn.Module, family: structlin.Family | None, experts: int, task: compare.Task
) -> nn.Module:
    """A dense model of the task with a mixture for each linear layer that `convert` would take."""
    device = next(model.parameters()).device
    for decision in structlin.plan(model, family, zero_init=task.zero_init).decisions:
        if decision.structure is not None:
            layer = decision.layer
            options = {"weight_norm": task.weight_norm, "zero_init": decision.zero_init}
            options |= {"experts": experts, "device": device}
            widths = layer.in_features, layer.out_features
            model.set_submodule(layer.name, Mixture(*widths, family, False, **options))
    return model


def count_flops(task: train_gpt.Text, name: str, width: int) -> int:
    """A token, forward."""
    model = build(task, name, width, device="meta")
    return structlin.cost(model, compare.example_of(task)).flops // task.tokens


@cache
def find_width(name: str, *sizes: tuple[str, int]) -> int:
    """The largest width, a multiple of 32, of no more FLOPs than the dense model of `sizes`."""
    task, dense = make_task(0, dict(sizes)), dict(sizes)["width"]
    if name == "dense":
        return dense
    budget = count_flops(task, "dense", dense)
    widths = range(32, WIDEST + 1, 32)
    return max(width for width in widths if count_flops(task, name, width) <= budget)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = training.cross_entropy(model, inputs, targets)
    mixed = any(isinstance(module, Mixture) for module in model.modules())
    return loss + BALANCE * load_balancing_loss(model) if mixed else loss


def make_trainer(
    task: train_gpt.Text, name: str, lr: float, seed: int, sizes: Mapping[str, int]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(task, name, find_width(name, *sizes.items()), seed)
    base = build(task, name, sizes["width"], device="meta")
    groups = structlin.param_groups(model, lr, base=base)
    return model, torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)


def train(kind: str, lr: float, seed: int, steps: int, sizes: dict[str, int]) -> Row:
    task = make_task(seed, sizes)
    model, optimizer = make_trainer(task, kind, lr, seed, sizes)

    def loss(step: int) -> Tensor:
        return loss_of(model, *task.batch(step))

    schedule = {"points": 8, "rate": training.warm_up}
    curve = training.follow(model, optimizer, task, steps, loss=loss, **schedule)
    return {"loss": curve[-1][1], "curve": curve, "largest_share": measure_share(model, task)}


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


def time_steps(
    kinds: list[str], sizes: Mapping[str, int], seconds: float, threads: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of a training step of each kind, over dense's of the same round."""
    torch.set_num_threads(threads)
    task = make_task(0, sizes)
    works: dict[str, Callable[[], None]] = {}
    for name in kinds:
        model, optimizer = make_trainer(task, name, LR, 0, sizes)
        loss = partial(loss_of, model, *task.batch(0))
        works[name] = training.step_of(optimizer, loss)
        works[name]()
    until = time.perf_counter() + seconds
    clock = partial(wall, device="cpu")
    times = interleaved(works, clock, rounds=(3, 15), until=until, end=math.inf)
    return {
        name: spread([a / b for a, b in zip(samples, times["dense"], strict=True)])
        for name, samples in times.items()
    }


def compare_kinds(
    rows: list[Row], sizes: Mapping[str, int], times: Mapping[int, Mapping[str, Row]]
) -> list[Row]:
    """A row for each kind, of its runs at its best rate."""
    task, found = make_task(0, sizes), []
    for name in sorted(values(rows, "kind"), key=[*KINDS].index):
        tried = curve_of_rates(select(rows, kind=name, seed=0))
        runs, width = tuned_on_first(rows, kind=name), find_width(name, *sizes.items())
        shares = [row["largest_share"] for row in runs if row["largest_share"] is not None]
        model = build(task, name, width, device="meta")
        found.append(
            {
                "kind": name,
                "width": width,
                "lr": runs[0]["lr"],
                "losses": [run["loss"] for run in runs],
                "tried": sorted(tried.items()),
                "params": training.count_params(model),
                "flops": count_flops(task, name, width),
                "largest_share": fmean(shares) if shares else None,
                "step": {str(threads): kinds[name] for threads, kinds in times.items()},
            }
        )
    return found


def measure(chosen: Row, found: Row) -> Row:
    rows, sizes = found["rows"], chosen["sizes"]
    kinds, seconds, before = values(rows, "kind"), chosen["seconds"], torch.get_num_threads()
    times = {threads: time_steps(kinds, sizes, seconds, threads) for threads in THREADS}
    torch.set_num_threads(before)
    return {"table": compare_kinds(rows, sizes, times)}


def markdown(result: Row) -> str:
    """The table of docs/mixtures.md."""
    cells = []
    for row in result["table"]:
        numbers = [str(row["width"]), f"{row['params']:,}", f"{row['flops']:,}", f"{row['lr']:g}"]
        steps = " / ".join(f"{each['median']:.1f}" for each in row["step"].values())
        cells.append([row["kind"], *numbers, report.losses(row["losses"]), steps])
    titles = ["", "width", "params", "FLOPs per token", "rate", "held-out loss, by seed"]
    return report.table([*titles, "ms per step over dense's, 1 / 2 threads"], cells)


def draw(result: Row) -> figures.Figure:
    sizes = result["setting"]["sizes"]
    tokens = 3 * sizes["batch"] * sizes["context"]
    points = [
        {"kind": row["kind"], "training FLOPs": tokens * row["flops"] * step, "loss": loss}
        for row in result["table"]
        for run in select(result["rows"], kind=row["kind"], lr=row["lr"])
        for step, loss in run["curve"]
    ]
    return figures.curves(points, "training FLOPs", line=["kind"])


EXPERIMENT = Experiment(
    name="moe",
    about=__doc__,
    run=train,
    axes={"kind": [*KINDS]},
    rates=Tune(start=lambda job: LR),
    sizes={"steps": 400, "sizes": SIZES},
    note={
        "start": LR,
        "balance": BALANCE,
        "head_std": train_gpt.Text.head_std,
        "warm_up": training.WARM_UP,
    },
    smoke={
        "steps": 2,
        "sizes": {"width": 32, "depth": 1, "context": 16, "batch": 2, "heads": 1},
        "kind": [name for name in KINDS if name != "BTT r=2"],
        "seconds": 0.0,
        "seeds": 1,
    },
    extra={"seconds": 15.0},
    analyse=lambda rows: {},
    beside=measure,
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
