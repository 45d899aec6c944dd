"""The training loop, and what is counted of a model."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.tasks import Task, compare

Curve = list[tuple[int, float | None]]  # steps, held-out loss
HELD_OUT_SAMPLES = 8192  # of a final loss
WARM_UP = 100  # steps, of `warm_up`
SCHEDULES: dict[str, Callable[[float], float]] = {  # share of the steps -> share of the rate
    "cosine": lambda share: 0.5 + 0.5 * math.cos(math.pi * share),
    "linear": lambda share: 1 - share,
    "constant": lambda share: 1.0,
}


def descend(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    steps: int,
    *,
    schedule: str | Callable[[int], float] = "cosine",
    warmup: int = 0,
    after: Callable[[int], Any] = lambda step: None,
) -> bool:
    """`steps` steps on `loss(step)`; False, at once, when a loss or a
    gradient is not finite.

    Args:
        schedule: what the learning rate does after a linear rise for `warmup` steps: falls to zero
            as a "cosine" or "linear", or is "constant"; or step -> its share of the rate.
        after: is called with every step that was made.
    """

    def rate(step: int) -> float:
        if callable(schedule):
            return schedule(step)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return SCHEDULES[schedule]((step - warmup) / max(1, steps - warmup))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(steps):
        value = loss(step)
        if not math.isfinite(value.item()):
            return False
        optimizer.zero_grad()
        value.backward()
        try:
            optimizer.step()
        except FloatingPointError:  # Muon's, on gradients that are not finite
            return False
        scheduler.step()
        after(step)
    return True


def step_of(optimizer: torch.optim.Optimizer, loss: Callable[[], Any]) -> Callable[[], None]:
    """A training step, to be timed."""

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    steps: int,
    *,
    batch: int,
    **options: Any,
) -> float | None:
    """`descend` on batches of a task; the loss on its new samples, None where it is not finite."""

    def loss(step: int) -> Tensor:
        x, y = task.batch(batch)
        return task.loss(model(x), y)

    return evaluate(model, task) if descend(optimizer, loss, steps, **options) else None


def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: compare.Task,
    steps: int,
    *,
    points: int,
    loss: Callable[[int], Tensor] | None = None,
    rate: Callable[[int, int], float] = compare.warmup_cosine,
) -> Curve:
    """Train as examples/ do; the held-out loss at `points` and at the end, None where it is not
    finite.

    Args:
        loss: of a step; None: the cross-entropy of the task's batch.
        rate: (step, steps) -> learning rate relative to its peak.
    """
    curve: Curve = []

    def loss_of(step: int) -> Tensor:
        return cross_entropy(model, *task.batch(step))

    def look(step: int) -> None:
        if (step + 1) % max(1, steps // points) == 0 or step + 1 == steps:
            held = compare.evaluate(model.eval(), task.heldout, "cpu")[0]
            curve.append((step + 1, finite(held)))
            model.train()

    schedule = partial(rate, steps=steps)
    if not descend(optimizer, loss or loss_of, steps, schedule=schedule, after=look):
        curve.append((steps, None))
    return curve


def warm_up(step: int, steps: int) -> float:
    """The examples' schedule with a warm-up of WARM_UP steps, a fifth of the steps at most.

    >>> [round(warm_up(step, 2000), 3) for step in (0, 99, 1050, 1999)]
    [0.01, 1.0, 0.55, 0.1]
    """
    return compare.warmup_cosine(step, steps, min(WARM_UP, steps // 5))


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens, or images."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, samples: int = HELD_OUT_SAMPLES) -> float | None:
    x, y = task.new(samples)
    return finite(task.loss(model(x), y).item())


def finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def forward_flops(model: nn.Module, example: Tensor) -> int:
    """FLOPs of the forward pass of `example`, 2 per multiply-add, of all matrix products."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    return int(counter.get_total_flops())


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
