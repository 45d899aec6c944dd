"""The networks and the training of MN's experiments: a ResMLP and a ResNet on digits, GPTs on
characters, four optimizers.

MN (arXiv:2405.14813) trains ResMLPs and ResNets on CIFAR-10 and GPTs on OpenWebText for 10000
steps. Here they are the same compounds of `structlin.modular`, much smaller: scikit-learn's digits,
and the texts of pydoc; some dozens of steps. As in the paper: batches of random samples, no weight
decay, the learning rate falls linearly to zero, Adam with betas (0.9, 0.99), SGD with momentum 0.9;
"normed" means that each update is divided by its modular norm, and the plain optimizers make the
steps of the paper's parametrisation (`modular.paper_groups`), where a layer multiplies by its scale
in the forward pass. "nanoGPT" is what MN compares its GPT with (D.4).
"""

import math
import pydoc_data.topics
import sys
import sysconfig
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.runs import digits
from structlin import modular
from structlin.optim import Normed

METHODS = ("normed Adam", "Adam", "normed SGD", "SGD")
NETWORKS = ("ResMLP", "ResNet", "GPT", "nanoGPT")
IMAGES = ("ResMLP", "ResNet")
CONTEXT, HEADS = 32, 4


@cache
def characters(corpus: str = "topics") -> tuple[Tensor, int]:
    """One of CORPORA as ids, and how many characters there are; what is no ASCII is left out."""
    text = "".join(CORPORA[corpus]()).encode("ascii", "ignore")
    found, ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).unique(return_inverse=True)
    return ids, len(found)


def _topics() -> list[str]:
    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


def _modules() -> list[str]:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text("utf-8", "ignore") for path in paths]


def _names() -> list[str]:
    names = (unicodedata.name(chr(n), "") for n in range(sys.maxunicode + 1))
    return [f"{name}\n" for name in names if name]


# pydoc's texts, the source of Python's modules, the names of Unicode's characters
CORPORA = {"topics": _topics, "modules": _modules, "names": _names}


def build(
    network: str,
    *,
    width: int,
    blocks: int,
    context: int = CONTEXT,
    corpus: str = "topics",
    **options: Any,
) -> nn.Module:
    """`options` are those of the compound; `context` and `corpus` are the GPTs'."""
    if network == "ResMLP":
        return modular.ResMLP(64, 10, width=width, blocks=blocks, block_depth=2, **options)
    if network == "ResNet":
        return modular.ResNet(1, 10, width=width, blocks=blocks, **options)
    if network == "nanoGPT":
        return NanoGPT(characters(corpus)[1], context, width, blocks)
    return modular.GPT(
        characters(corpus)[1], context=context, width=width, heads=HEADS, blocks=blocks, **options
    )


def batch(
    network: str,
    size: int,
    random: torch.Generator,
    context: int = CONTEXT,
    corpus: str = "topics",
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, as the network takes them; a GPT's are windows of `context`."""
    if network in IMAGES:
        x, y = digits()
        chosen = torch.randint(len(x), (size,), generator=random)
        images = x[chosen]  # (size, pixels)
        return images.view(size, 1, 8, 8) if network == "ResNet" else images, y[chosen]
    ids, _ = characters(corpus)
    starts = torch.randint(len(ids) - context - 1, (size,), generator=random)
    windows = ids[starts[:, None] + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


def optimizer(net: nn.Module, method: str, lr: float) -> torch.optim.Optimizer:
    """One of METHODS; nanoGPT, which has no other parametrisation, takes plain ones alone."""
    kind = "adam" if method.endswith("Adam") else "sgd"
    normed = method.startswith("normed")
    groups: Any = net.parameters()
    if isinstance(net, modular.Module) and not normed:
        groups = modular.paper_groups(net, lr, optimizer=kind)
    base: torch.optim.Optimizer
    if kind == "adam":
        base = torch.optim.Adam(groups, lr, betas=(0.9, 0.99))
    else:
        base = torch.optim.SGD(groups, lr, momentum=0.9, dampening=0.9)
    return Normed(base, net, masses=modular.masses(net)) if normed else base


def train(
    net: nn.Module,
    network: str,
    method: str,
    lr: float,
    *,
    steps: int,
    size: int,
    seed: int,
    context: int = CONTEXT,
    corpus: str = "topics",
) -> float | None:
    """The loss at the end on 2048 samples (64 windows of a GPT), None where it is not finite."""
    random = torch.Generator().manual_seed(seed)
    descent = optimizer(net, method, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(descent, lambda step: 1 - step / steps)
    for _ in range(steps):
        value = loss(net, *batch(network, size, random, context, corpus))
        if not math.isfinite(value.item()):
            return None
        descent.zero_grad()
        value.backward()
        descent.step()
        schedule.step()
    with torch.no_grad():
        samples = 2048 if network in IMAGES else 64
        new = batch(network, samples, torch.Generator().manual_seed(-1), context, corpus)
        final = loss(net, *new).item()
    return final if math.isfinite(final) else None


class NanoGPT(nn.Module):
    """GPT-2 as nanoGPT has it: attention scaled by 1 / sqrt(d), residual branches added as they
    are, the head's weight that of the embedding, Gaussian weights of 0.02, the last of a branch
    over sqrt(2 blocks).

    Source: github.com/karpathy/nanoGPT, model.py.
    """

    def __init__(self, vocabulary: int, context: int, width: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.blocks = nn.TransformerEncoder(
            layer, blocks, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        ends = ("out_proj.weight", "linear2.weight")
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                end = name.endswith(ends)
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * blocks) if end else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, tokens) -> (batch, tokens, vocabulary)
        count = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(count))
        mask = nn.Transformer.generate_square_subsequent_mask(count)
        return F.linear(self.blocks(x, mask=mask, is_causal=True), self.tokens.weight)
