"""The networks and the training of MN's experiments: a ResMLP and a ResNet on digits, a GPT on
characters, four optimizers.

MN (arXiv:2405.14813) trains ResMLPs and ResNets on CIFAR-10 and GPTs on OpenWebText for 10000
steps. Here they are the same compounds of `structlin.modular`, much smaller: scikit-learn's digits,
and the texts of pydoc; some dozens of steps. As in the paper: batches of random samples, no weight
decay, the learning rate falls linearly to zero, Adam with betas (0.9, 0.99), SGD with momentum 0.9;
"normed" means that each update is divided by its modular norm, and the plain optimizers make the
steps of the paper's parametrisation (`paper_groups`), where a layer multiplies by its scale
in the forward pass.
"""

import math
import pydoc_data.topics
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers import tasks
from benchmarks.runs import digits
from structlin import modular
from structlin.optim import Normed

METHODS = ("normed Adam", "Adam", "normed SGD", "SGD")
NETWORKS = ("ResMLP", "ResNet", "GPT")  # of the algebra
SETS = ("train", "test")
CONTEXT, HEADS = 32, 4
EVALUATED = {"ResMLP": 4096, "ResNet": 1024, "GPT": 64}  # samples of a loss

Batch = tuple[Tensor, Tensor]  # inputs and targets, as the network takes them


CORPORA = ("documentation", "Python", "C++")


@cache
def characters(corpus: str = "documentation") -> tuple[Tensor, int]:
    """A text as ids, and how many characters there are; what is no ASCII is left out. The texts of
    pydoc's topics, or the first million characters of the standard library's modules or of
    PyTorch's headers."""
    if corpus == "documentation":
        topics = pydoc_data.topics.topics
        text = "".join(topics[name] for name in sorted(topics))
    else:
        headers = Path(torch.__file__).parent / "include" / "ATen"
        files = {
            "Python": Path(sysconfig.get_path("stdlib")).glob("*.py"),
            "C++": headers.glob("*.h"),
        }
        text = "".join(path.read_text("utf-8", "ignore") for path in sorted(files[corpus]))
        text = text[:1_000_000]
    ascii_ = bytearray(text.encode("ascii", "ignore"))
    found, ids = torch.frombuffer(ascii_, dtype=torch.uint8).unique(return_inverse=True)
    return ids, len(found)


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
        return modular.ResMLP(64, 10, width=width, blocks=blocks, block_depth=2, **options)
    if network == "ResNet":
        return modular.ResNet(1, 10, width=width, blocks=blocks, **options)
    vocabulary = characters(corpus)[1]
    return modular.GPT(
        vocabulary, context=context, width=width, heads=HEADS, blocks=blocks, **options
    )


def batch(network: str, size: int, random: torch.Generator, context: int = CONTEXT) -> Batch:
    """Inputs and targets, as the network takes them; a GPT's are windows of `context`."""
    if network == "ResMLP":
        x, y = digits()
        chosen = torch.randint(len(x), (size,), generator=random)
        return x[chosen], y[chosen]
    return windows(characters()[0], size, random, context)


def windows(ids: Tensor, size: int, random: torch.Generator, context: int = CONTEXT) -> Batch:
    starts = torch.randint(len(ids) - context - 1, (size,), generator=random)
    chosen = ids[starts[:, None] + torch.arange(context + 1)]
    return chosen[:, :-1], chosen[:, 1:]


def sampler(
    network: str, seed: int, part: str, corpus: str = "documentation"
) -> Callable[[int], Batch]:
    """What draws a batch of a given size from the "train" or the "test" part: moved and noisy
    digits, so that a loss does not come to nothing, of three quarters of the images or of the
    others; windows of the first nine tenths of the text or of the last."""
    if network == "GPT":
        ids, _ = characters(corpus)
        cut = len(ids) - len(ids) // 10
        random = torch.Generator().manual_seed(seed)
        chosen = ids[:cut] if part == "train" else ids[cut:]
        return lambda size: windows(chosen, size, random)
    task = split(seed, part)
    if network == "ResMLP":
        return task.batch

    def images(size: int) -> Batch:
        x, y = task.batch(size)
        return x.view(-1, 1, 8, 8), y

    return images


def split(seed: int, part: str) -> tasks.Digits:
    """The task on three quarters of the images, or on the others."""
    task = tasks.Digits(seed)
    held = torch.arange(len(task.labels)) % 4 == 0
    chosen = held if part == "test" else ~held
    task.moved, task.labels = task.moved[:, chosen], task.labels[chosen]
    return task


def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


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


def descend(
    net: modular.Module,
    method: str,
    lr: float,
    steps: int,
    draw: Callable[[], Batch],
) -> bool:
    """Train on what `draw` returns, the rate falling linearly to zero; False once a loss is not
    finite."""
    descent = optimizer(net, method, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(descent, lambda step: 1 - step / steps)
    for _ in range(steps):
        value = loss(net, *draw())
        if not math.isfinite(value.item()):
            return False
        descent.zero_grad()
        value.backward()
        descent.step()
        schedule.step()
    return True


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
    """Train on batches of `sampler`; the losses at the end on new samples of both parts, None where
    they are not finite."""
    draw = sampler(network, seed, "train", corpus)
    if not descend(net, method, lr, steps, lambda: draw(size)):
        return dict.fromkeys(SETS)
    with torch.no_grad():
        new = {
            part: sampler(network, 1000 + seed, part, corpus)(EVALUATED[network]) for part in SETS
        }
        found = {part: loss(net, *samples).item() for part, samples in new.items()}
    return {part: final if math.isfinite(final) else None for part, final in found.items()}


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
    if not descend(net, method, lr, steps, lambda: batch(network, size, random, context)):
        return None
    with torch.no_grad():
        samples = 64 if network == "GPT" else 2048
        new = batch(network, samples, torch.Generator().manual_seed(-1), context)
        final = loss(net, *new).item()
    return final if math.isfinite(final) else None
