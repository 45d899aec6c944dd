"""Linear layers of many packages in one GPT: the loss, and what a step costs.

    pip install peft==0.21.2 tensorly tensorly-torch==0.5.0 torch-structured==1.3.0 triton
    python -m benchmarks.comparison.layers             # results/comparison.{json,png}
    python -m benchmarks.comparison.layers --methods dense LoKr
    python -m benchmarks.comparison.layers --smoke     # seconds

Every method takes the place of all linear layers but the head in the GPT of examples/, and starts
as its package starts it. All see the same batches of the standard library's characters, with AdamW
and a cosine. The rate of each is tuned on seed 0: by factors of 2 until the best has both its
neighbours. Steps are timed in turns with dense, on one batch, without the making of the batch.
FLOPs are those of a forward pass, as torch counts them: what a package computes, not what a
structure needs.

To add a method, see `benchmarks.comparison.methods`. What is not installed is left out.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from statistics import geometric_mean

import torch
from torch import nn

import structlin
from benchmarks.comparison.methods import Method, find_methods
from benchmarks.harness import figures, report, training
from benchmarks.harness.experiment import Experiment, Row, Tune
from benchmarks.harness.statistics import best, curve_of_rates, one, select, values
from benchmarks.harness.tasks import Characters
from benchmarks.harness.timing import milliseconds

METHODS, LEFT_OUT = find_methods()
RATE = 4e-3  # where the search for each begins
OURS = "structlin"


@cache
def make_task(seed: int, **sizes: int) -> Characters:
    return Characters(seed, **sizes)


def build(method: Method, seed: int, sizes: Row) -> nn.Module:
    torch.manual_seed(seed)
    model = make_task(seed, **sizes).model(sizes["width"])
    method.convert(model)
    return model


def make_optimizer(method: Method, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(method.groups(model, lr), lr, betas=(0.9, 0.95), weight_decay=0.0)


def train(method: str, lr: float, seed: int, **sizes: int) -> Row:
    """The held-out loss; parameters that train; FLOPs of a forward pass over a batch."""
    task = make_task(seed, **sizes)
    model = build(METHODS[method], seed, sizes)
    optimizer = make_optimizer(METHODS[method], model, lr)
    warmup = max(1, sizes["steps"] // 20)
    curve = training.follow(model, optimizer, task, sizes["steps"], warmup)
    flops = structlin.cost(model, task.batch(0)[0]).flops
    return {
        "loss": curve[-1][1],
        "curve": curve,
        "params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops": flops,
    }


def time_steps(chosen: Row, result: Row) -> Row:
    """Milliseconds of a step of each method that has rows, in turns with dense."""
    sizes = {name: chosen[name] for name in EXPERIMENT.sizes}
    batch = make_task(0, **sizes).batch(0)

    def work(name: str) -> Callable[[], None]:
        model = build(METHODS[name], 0, sizes)
        optimizer = make_optimizer(METHODS[name], model, RATE)
        return training.step_of(optimizer, partial(training.cross_entropy, model, *batch))

    names = [name for name in values(result["rows"], "method") if name in METHODS]
    times = milliseconds({n: work(n) for n in names}, rounds=(3, 99), seconds=chosen["timed"])
    return {"threads": torch.get_num_threads(), "times": times, "left_out": LEFT_OUT}


def analyse(rows: list[Row]) -> Row:
    """Each method at its best rate."""
    table = []
    for name in values(rows, "method"):
        runs = select(rows, method=name)
        lr = best(curve_of_rates(select(runs, seed=0)))
        table.append(
            {
                "method": name,
                "package": METHODS[name].package,
                "lr": lr,
                "losses": [run["loss"] for run in select(runs, lr=lr)],
                "params": runs[0]["params"],
                "flops": runs[0]["flops"],
            }
        )
    return {"table": table}


def mean_loss(row: Row) -> float:
    """The geometric mean over seeds; infinite where a run diverged."""
    return math.inf if None in row["losses"] else geometric_mean(row["losses"])


def markdown(result: Row) -> str:
    """The table of docs/choose.md, the lowest loss first: FLOPs and milliseconds over dense's."""
    dense = one(result["table"], method="dense")
    times = result["times"]
    lines = []
    for row in sorted(result["table"], key=mean_loss):
        flops = row["flops"] / dense["flops"]
        ms = times[row["method"]]["median"] / times["dense"]["median"]
        numbers = [f"{mean_loss(row):.3f}", f"{flops:.2f}", f"{ms:.2f}"]
        lines.append([row["method"], row["package"], *numbers])
    return report.table(["", "package", "loss", "FLOPs", "ms"], lines)


def draw(result: Row) -> figures.Figure:
    """Loss against milliseconds of a step: circles for structlin's layers, squares for others'."""
    figure = figures.Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for row in result["table"]:
        loss = mean_loss(row)
        if loss == math.inf:
            continue
        ms = result["times"][row["method"]]["median"]
        axes.plot(ms, loss, "o" if row["package"] == OURS else "s")
        beside = {"xytext": (4, 4), "textcoords": "offset points"}
        axes.annotate(row["method"], (ms, loss), fontsize=8, **beside)
    axes.set(xscale="log", xlabel="milliseconds of a step", ylabel="held-out loss")
    return figure


EXPERIMENT = Experiment(
    name="comparison",
    about=__doc__,
    tables={"comparison": markdown},
    run=train,
    axes={"method": [*METHODS]},
    rates=Tune(lambda job: RATE),
    sizes={"width": 256, "depth": 2, "context": 64, "batch": 16, "steps": 300, "heads": 8},
    smoke={
        "width": 64,
        "heads": 2,
        "depth": 1,
        "batch": 2,
        "steps": 3,
        "method": ["dense", "BTT(rank=1)"],
        "seeds": 1,
        "timed": 0.0,
    },
    extra={"timed": 30.0},
    analyse=analyse,
    beside=time_steps,
    show=lambda result: [markdown(result), *result["left_out"]],
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
