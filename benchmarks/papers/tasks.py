"""What the papers' experiments train on, and the small models that they train.

A teacher with unlimited data, the digits with shifts and noise, text in words; an MLP and the GPT
of examples/.
"""

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import structlin
from benchmarks.runs import digits

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import compare
import train_gpt

BASE_WIDTH = 64  # where the learning rates are meant; muP takes them to other widths
SQUARE = "2", "4"  # the matrices of the MLP that are structured
Batch = tuple[Tensor, Tensor]  # inputs, targets


# ---- regression on a teacher, classification of digits -------------------------------------------


class Teacher:
    """Regression of a fixed random MLP on Gaussian inputs: every batch is new, so the loss is the
    test loss.

    Two hidden layers of 256 ReLUs, random biases, features centred in each layer, 16 inputs, 4
    outputs of unit variance: a student that predicts the mean has loss 1. The teacher differs from
    seed to seed.
    """

    inputs, outputs, width = 16, 4, 256
    loss = staticmethod(F.mse_loss)

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(1_000_003 * seed + 1)
        widths = (self.inputs, self.width, self.width, self.outputs)
        self.weights = [self._normal(n, m) * (2 / m) ** 0.5 for m, n in pairwise(widths)]
        self.biases = [0.5 * self._normal(self.width) for _ in range(2)]
        y = self._raw(self._normal(8192, self.inputs))
        self.mean, self.std = y.mean(0), y.std(0)

    def batch(self, size: int) -> Batch:
        x = self._normal(size, self.inputs)
        return x, (self._raw(x) - self.mean) / self.std

    def _raw(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights[:-1], self.biases, strict=True):
            x = F.relu(x @ weight.T + bias)
            x = x - x.mean(1, keepdim=True)
        return x @ self.weights[-1].T

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)


class Digits:
    """Classification of scikit-learn's digits, each time moved by up to a pixel either way and with
    noise added."""

    inputs, outputs, noise = 64, 10, 0.5
    loss = staticmethod(F.cross_entropy)

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(1_000_003 * seed + 2)
        images, self.labels = digits()
        padded = F.pad(images.unflatten(1, (8, 8)), (1, 1, 1, 1), value=images.min().item())
        self.moved = torch.stack(
            [padded[:, i : i + 8, j : j + 8].flatten(1) for i in range(3) for j in range(3)]
        )

    def batch(self, size: int) -> Batch:
        move = torch.randint(9, (size,), generator=self.random)
        image = torch.randint(len(self.labels), (size,), generator=self.random)
        x = self.moved[move, image] + self.noise * torch.randn(
            size, self.inputs, generator=self.random
        )
        return x, self.labels[image]


TASKS: dict[str, type[Teacher] | type[Digits]] = {"teacher": Teacher, "digits": Digits}


def mlp(inputs: int, width: int, outputs: int, family: structlin.Family) -> nn.Sequential:
    """`dense_mlp` with its two square matrices structured."""
    return structlin.convert(
        dense_mlp(inputs, width, outputs), family, include=list(SQUARE), init="mup"
    )


def dense_mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Three hidden layers of ReLUs. The head starts at zero, and so do the biases."""
    model = nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs),
    )  # fmt: skip
    nn.init.normal_(model[0].weight, std=inputs**-0.5)
    nn.init.zeros_(model[6].weight)
    for layer in (model[0], model[2], model[4], model[6]):
        nn.init.zeros_(layer.bias)
    return model


def forward_flops(model: nn.Module, example: Tensor) -> int:
    """FLOPs of the forward pass of `example`, 2 per multiply-add, of all matrix products."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    return counter.get_total_flops()


def descend(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    steps: int,
    *,
    warmup: int = 0,
    decay: bool = True,
) -> None:
    """`steps` steps on `loss(step)`; the learning rate rises linearly for `warmup` steps, then,
    with `decay`, goes to zero as a cosine."""

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return (
            0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
            if decay
            else 1.0
        )

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(steps):
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        scheduler.step()


def train_mlp(
    task_name: str,
    family: structlin.Family,
    width: int,
    lr: float,
    seed: int,
    steps: int,
    *,
    aware: bool = True,
    others: float = 1.0,
    optimizer: str = "adam",
    batch: int = 256,
) -> dict[str, Any]:
    """Train an MLP on a task; its final loss on 8192 new samples (None: diverged), parameters and
    FLOPs a sample.

    Args:
        lr: of the dense model at `BASE_WIDTH`; muP takes it to `width`.
        aware: whether cores get the rate that their shape asks for, or that of a dense layer.
        others: factor on the rate of all that is no core.
        optimizer: "adam" or "sgd".
    """
    torch.manual_seed(seed)
    task = TASKS[task_name](seed)
    model = mlp(task.inputs, width, task.outputs, family)
    groups = structlin.param_groups(
        model, lr, optimizer=optimizer, base={width: BASE_WIDTH}, structure_aware=aware
    )
    if others != 1:
        groups = [
            {"params": [parameter], "lr": group["lr"] * (1 if ".cores." in name else others)}
            for group in groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        ]
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]

    def loss(step: int) -> Tensor:
        x, y = task.batch(batch)
        return task.loss(model(x), y)

    descend(kind(groups, lr), loss, steps)
    task = TASKS[task_name](seed)
    task.random.manual_seed(-1 - seed)
    with torch.no_grad():
        x, y = task.batch(8192)
        final = task.loss(model(x), y).item()
    params = sum(parameter.numel() for parameter in model.parameters())
    return {
        "loss": final if math.isfinite(final) else None,
        "params": params,
        "flops": forward_flops(model, x[:1]),
    }


# ---- text ----------------------------------------------------------------------------------------


def characters(seed: int, batch: int, context: int, depth: int) -> compare.Task:
    """The task of examples/train_gpt.py: the Python standard library's text by characters."""
    return train_gpt.Text(
        argparse.Namespace(data=None, seed=seed, steps=0, batch=batch, context=context, depth=depth)
    )


class Words(train_gpt.Text):
    """The same text in words, runs of spaces and single other characters, so that the head is a
    large part of a GPT.

    The `vocabulary - 1` most frequent pieces, and one token for all others.
    """

    def __init__(self, seed: int, batch: int, context: int, depth: int, vocabulary: int) -> None:
        self.options = argparse.Namespace(seed=seed, batch=batch, depth=depth)
        self.tokens, self.context, self.vocabulary = context, context, vocabulary
        ids = _word_ids(vocabulary)
        cut = len(ids) - len(ids) // 10
        self.train, heldout = ids[:cut], ids[cut:]
        starts = torch.linspace(0, len(heldout) - context - 1, 128).long()
        self.heldout = [self.windows(heldout, part) for part in starts.split(32)]


@cache
def _word_ids(vocabulary: int) -> Tensor:
    pieces = re.findall(r"\w+| +|\n *|.", train_gpt.read_text(None))
    frequent = {
        piece: n for n, (piece, _) in enumerate(Counter(pieces).most_common(vocabulary - 1))
    }
    return torch.tensor([frequent.get(piece, vocabulary - 1) for piece in pieces])
