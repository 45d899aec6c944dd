"""The networks and the training of MN's experiments: a ResMLP on digits, a GPT on characters, four
optimizers.

MN (arXiv:2405.14813) trains ResMLPs on CIFAR-10 and GPTs on OpenWebText for 10000 steps. Here both
are the same compounds of `structlin.modular`, much smaller: scikit-learn's digits, and the texts of
pydoc; some dozens of steps. As in the paper: batches of random samples, no weight decay, the
learning rate falls linearly to zero, Adam with betas (0.9, 0.99), SGD with momentum 0.9; "normed"
means that each update is divided by its modular norm.
"""

import math
import pydoc_data.topics
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.runs import digits
from structlin import modular
from structlin.optim import Normed

METHODS = ("normed Adam", "Adam", "normed SGD", "SGD")
NETWORKS = ("ResMLP", "GPT")
CONTEXT, HEADS = 32, 4


@cache
def characters() -> tuple[Tensor, int]:
    """pydoc's topics as ids, and how many characters there are; what is no ASCII is left out."""
    topics = pydoc_data.topics.topics
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    found, ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).unique(return_inverse=True)
    return ids, len(found)


def build(
    network: str, *, width: int, blocks: int, context: int = CONTEXT, **options: Any
) -> modular.Module:
    """`options` are those of the compound; `context` is the GPT's."""
    if network == "ResMLP":
        return modular.ResMLP(64, 10, width=width, blocks=blocks, block_depth=2, **options)
    return modular.GPT(
        characters()[1], context=context, width=width, heads=HEADS, blocks=blocks, **options
    )


def batch(
    network: str, size: int, random: torch.Generator, context: int = CONTEXT
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, as the network takes them; a GPT's are windows of `context`."""
    if network == "ResMLP":
        x, y = digits()
        chosen = torch.randint(len(x), (size,), generator=random)
        return x[chosen], y[chosen]
    ids, _ = characters()
    starts = torch.randint(len(ids) - context - 1, (size,), generator=random)
    windows = ids[starts[:, None] + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def loss(net: modular.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


def optimizer(net: modular.Module, method: str, lr: float) -> torch.optim.Optimizer:
    base: torch.optim.Optimizer
    if method.endswith("Adam"):
        base = torch.optim.Adam(net.parameters(), lr, betas=(0.9, 0.99))
    else:
        base = torch.optim.SGD(net.parameters(), lr, momentum=0.9, dampening=0.9)
    return Normed(base, net, masses=modular.masses(net)) if method.startswith("normed") else base


def train(
    net: modular.Module,
    network: str,
    method: str,
    lr: float,
    *,
    steps: int,
    size: int,
    seed: int,
    context: int = CONTEXT,
) -> float | None:
    """The loss at the end on 2048 samples (64 windows of a GPT), None where it is not finite."""
    random = torch.Generator().manual_seed(seed)
    descent = optimizer(net, method, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(descent, lambda step: 1 - step / steps)
    for _ in range(steps):
        value = loss(net, *batch(network, size, random, context))
        if not math.isfinite(value.item()):
            return None
        descent.zero_grad()
        value.backward()
        descent.step()
        schedule.step()
    with torch.no_grad():
        samples = 64 if network == "GPT" else 2048
        new = batch(network, samples, torch.Generator().manual_seed(-1), context)
        final = loss(net, *new).item()
    return final if math.isfinite(final) else None
