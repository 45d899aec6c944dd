"""The training loop, and what is counted of a model."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.tasks import Batch, Characters, Images, Task

Curve = list[tuple[int, float | None]]  # steps, held-out loss
HELD_OUT_SAMPLES = 8192  # of a final loss
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
    after: Callable[[int], Any] = lambda step: None,
) -> bool:
    """`steps` steps on `loss(step)`; False, at once, when a loss or a gradient is not finite.

    Args:
        schedule: the learning rate falls to zero as a "cosine" or "linear", or is "constant"; or
            step -> its share of the rate.
        after: is called with every step that was made.
    """

    def rate(step: int) -> float:
        return schedule(step) if callable(schedule) else SCHEDULES[schedule](step / steps)

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

    is_finite = descend(optimizer, loss, steps, **options)
    return evaluate(model, task) if is_finite else None


def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Characters | Images,
    steps: int,
    warmup: int,
) -> Curve:
    """Train a Transformer, with a linear warm-up and a cosine to a tenth; the held-out loss five
    times and at the end, None where it is not finite."""
    curve: Curve = []

    def loss(step: int) -> Tensor:
        return cross_entropy(model, *task.batch(step))

    def look(step: int) -> None:
        steps_done = step + 1
        if steps_done % max(1, steps // 5) == 0 or steps_done == steps:
            model.eval()
            curve.append((steps_done, finite(held_out(model, task.heldout))))
            model.train()

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        share = (step - warmup) / max(1, steps - warmup)
        return 0.55 + 0.45 * math.cos(math.pi * share)

    if not descend(optimizer, loss, steps, schedule=rate, after=look):
        curve.append((steps, None))
    return curve


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens, or images."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def held_out(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The loss, averaged over all targets."""
    loss = 0.0
    for inputs, targets in batches:
        logits = model(inputs).flatten(0, -2)
        loss += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
    return loss / sum(targets.numel() for _, targets in batches)


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, samples: int = HELD_OUT_SAMPLES) -> float | None:
    x, y = task.new(samples)
    return finite(task.loss(model(x), y).item())


def finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
