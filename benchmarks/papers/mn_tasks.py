"""The networks and the training of MN's experiments: a ResMLP and a ResNet on digits, a GPT on
characters, four optimizers.

MN (arXiv:2405.14813) trains ResMLPs and ResNets on CIFAR-10 and GPTs on OpenWebText for 10000
steps. Here they are the same networks, much smaller: scikit-learn's digits,
and the texts of pydoc; some dozens of steps. As in the paper: batches of random samples, no weight
decay, the learning rate falls linearly to zero, Adam with betas (0.9, 0.99), SGD with momentum 0.9;
"normed" means that each update is divided by its modular norm, and the plain optimizers make the
steps of the paper's parametrisation (`paper_groups`), where a layer multiplies by its scale
in the forward pass.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import training
from benchmarks.harness.experiment import Row
from benchmarks.harness.statistics import moves, select, transfer
from benchmarks.harness.tasks import Batch, Digits, PlainDigits, Task, Text, text
from benchmarks.papers import networks
from structlin import modular
from structlin.optim import Normed

METHODS = ("normed Adam", "Adam", "normed SGD", "SGD")
NETWORKS = ("ResMLP", "ResNet", "GPT")  # of the algebra
SETS = ("train", "test")
CONTEXT, HEADS = 32, 4
EVALUATED = {"ResMLP": 4096, "ResNet": 1024, "GPT": 64}  # samples of a loss


class Images(Digits):
    def batch(self, size: int) -> Batch:  # (size, 1, 8, 8)
        x, y = super().batch(size)
        return x.view(-1, 1, 8, 8), y


def build(
    network: str,
    *,
    width: int,
    blocks: int,
    context: int = CONTEXT,
    corpus: str = "documentation",
    **options: Any,
) -> modular.Module:
    """`options` are those of the compound; `context` and `corpus` are the GPT's."""
    if network == "ResMLP":
        return networks.ResMLP(64, 10, width=width, blocks=blocks, block_depth=2, **options)
    if network == "ResNet":
        return networks.ResNet(1, 10, width=width, blocks=blocks, **options)
    vocabulary = text(corpus)[1]
    return networks.GPT(
        vocabulary, context=context, width=width, heads=HEADS, blocks=blocks, **options
    )


def task(network: str, seed: int, part: str, corpus: str = "documentation") -> Task:
    """The "train" or the "test" part: moved and noisy digits, so that a loss does not come to
    nothing, of three quarters of the images or of the others; windows of the first nine tenths of
    the text or of the last."""
    if network == "GPT":
        return Text(seed, part, context=CONTEXT, corpus=corpus)
    return (Digits if network == "ResMLP" else Images)(seed, part)


def optimizer(net: nn.Module, method: str, lr: float) -> torch.optim.Optimizer:
    """Plain rates are those of the paper's parametrisation, where `net` is of the algebra."""
    name = method.removeprefix("normed ")
    groups: Any = net.parameters()
    if method == name and isinstance(net, modular.Module):
        groups = paper_groups(net, lr, optimizer=name.lower())
    base: torch.optim.Optimizer
    if name == "Adam":
        base = torch.optim.Adam(groups, lr, betas=(0.9, 0.99))
    else:
        base = torch.optim.SGD(groups, lr, momentum=0.9, dampening=0.9)
    return base if method == name else Normed(base, net, masses=modular.masses(net))


def paper_groups(net: modular.Module, lr: float, *, optimizer: str) -> list[dict[str, Any]]:
    """Return parameter groups by which plain Adam or SGD makes the steps of the paper's baselines.

    There a layer multiplies by its scale s in the forward pass. A gradient is then s times as
    large, and what it changes counts s times: the rate of SGD is s^2 lr, that of Adam s lr. s is
    sqrt(fan_out / fan_in) of a linear layer, sqrt(width) of an embedding, sqrt(c_out / c_in) / k^2
    of a convolution.

    Source: MN, appendix B.1.

    >>> net = modular.Linear(64, 16) @ modular.Embed(10, 64)
    >>> [(group["name"], group["lr"]) for group in paper_groups(net, 0.1, optimizer="sgd")]
    [('0.embedding.weight', 6.4), ('1.linear.weight', 0.025)]
    """
    power = 2 if optimizer == "sgd" else 1
    return [
        {"params": [layer.weight], "name": f"{name}.weight", "lr": lr * scale_of(layer) ** power}
        for name, layer in net.named_modules()
        if isinstance(layer, nn.Linear | nn.Embedding | nn.Conv2d)
    ]


def scale_of(layer: nn.Linear | nn.Embedding | nn.Conv2d) -> float:
    if isinstance(layer, nn.Embedding):
        return math.sqrt(layer.embedding_dim)
    fan_out, fan_in, *kernel = layer.weight.shape
    return math.sqrt(fan_out / fan_in) / math.prod(kernel)


def descend(net: nn.Module, method: str, lr: float, steps: int, data: Task, size: int) -> bool:
    """Train on batches of `size`, the rate falling linearly to zero; False once a loss is not
    finite."""

    def loss(step: int) -> Tensor:
        x, y = data.batch(size)
        return data.loss(net(x), y)

    return training.descend(optimizer(net, method, lr), loss, steps, schedule="linear")


@torch.no_grad()
def final_loss(net: nn.Module, data: Task, samples: int) -> float | None:
    x, y = data.batch(samples)
    return training.finite(data.loss(net(x), y).item())


def fit(
    net: nn.Module,
    network: str,
    method: str,
    lr: float,
    *,
    steps: int,
    size: int,
    seed: int,
    corpus: str = "documentation",
) -> dict[str, float | None]:
    """Train on the "train" part; the losses at the end on new samples of both parts, None where
    they are not finite."""
    if not descend(net, method, lr, steps, task(network, seed, "train", corpus), size):
        return dict.fromkeys(SETS)
    samples = EVALUATED[network]
    return {
        part: final_loss(net, task(network, 1000 + seed, part, corpus), samples) for part in SETS
    }


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
    """Train on all plain images, or on windows of the whole text; the loss at the end on 2048
    samples (64 windows), None where it is not finite."""

    def plain(of: int) -> Task:
        return Text(of, context=context) if network == "GPT" else PlainDigits(of)

    if not descend(net, method, lr, steps, plain(seed), size):
        return None
    return final_loss(net, plain(-1), 64 if network == "GPT" else 2048)


def transfers(rows: list[Row], *by: str) -> Row:
    """How each method's best rate moves: that of the means, and "estimates" over the seeds; for
    each value of `by`, if any."""
    if not by:
        return {
            method: found | {"estimates": moves(select(rows, method=method))}
            for method, found in transfer(rows).items()
        }
    groups = dict.fromkeys(tuple(row[name] for name in by) for row in rows)
    return {
        ", ".join(group): transfers(select(rows, **dict(zip(by, group, strict=True))))
        for group in groups
    }
