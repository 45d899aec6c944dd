"""The models that the experiments train, by width and depth, and the structures that they take."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin

HEAD = 32  # features of an attention head, at every width
HEAD_STD = 0.02  # of the start of the output layer, as GPT-2's; other heads start at zero
BASE_WIDTH = 64  # where the learning rates are meant; muP takes them to other widths

STRUCTURES: dict[str, Callable[[int], structlin.Family]] = {
    "dense": lambda width: structlin.Dense(),
    "low-rank": lambda width: structlin.LowRank(rank=math.isqrt(width)),
    "Kronecker": lambda width: structlin.Kronecker(),
    "TT r=4": lambda width: structlin.TT(rank=4),
    "Monarch": lambda width: structlin.Monarch(blocks=4),
    "Monarch b=4": lambda width: structlin.Monarch(blocks=4),
    "Monarch b=16": lambda width: structlin.Monarch(blocks=16),
    "BTT r=1": lambda width: structlin.BTT(rank=1),
    "BTT r=2": lambda width: structlin.BTT(rank=2),
    "BTT r=4": lambda width: structlin.BTT(rank=4),
    "BTT r=1, 3 cores": lambda width: structlin.BTT(rank=1, cores=3),
    "BTT r=2, 3 cores": lambda width: structlin.BTT(rank=2, cores=3),
    "BTT r=4, 3 cores": lambda width: structlin.BTT(rank=4, cores=3),
    "BTT r=1, 4 cores": lambda width: structlin.BTT(rank=1, cores=4),
}


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with ReLUs between them, as torch starts them: layers 0, 2, 4, ..."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def structured_mlp(
    inputs: int, width: int, outputs: int, family: structlin.Family
) -> nn.Sequential:
    """Three hidden layers of ReLUs, the two square matrices structured. The head starts at zero,
    and so do the biases."""
    model = mlp(inputs, width, width, width, outputs)
    nn.init.normal_(model[0].weight, std=inputs**-0.5)
    nn.init.zeros_(model[6].weight)
    for layer in (model[0], model[2], model[4], model[6]):
        nn.init.zeros_(layer.bias)
    return structlin.convert(model, family, include=["2", "4"], init="mup")


# ---- Transformers --------------------------------------------------------------------------------


class Attention(nn.Module):
    """`heads` heads of HEAD features; None: as many as fill the width."""

    def __init__(self, width: int, causal: bool, heads: int | None) -> None:
        super().__init__()
        heads_width = HEAD * heads if heads else width
        self.causal = causal
        self.c_attn = nn.Linear(width, 3 * heads_width, bias=False)
        self.c_proj = nn.Linear(heads_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        qkv = self.c_attn(x).unflatten(-1, (3, -1, HEAD))  # (batch, tokens, 3, heads, HEAD)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, HEAD)
        # muP: not 1 / sqrt
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=1 / HEAD)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, causal: bool, heads: int | None) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=False)
        self.attn = Attention(width, causal, heads)
        self.ln_2 = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """That of examples/train_gpt.py, with a number of heads of its own."""

    def __init__(
        self, vocabulary: int, context: int, width: int, depth: int, heads: int | None = None
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, True, heads) for _ in range(depth)))
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        initialise(self, embedding=0.2)
        # Positions start as sines and cosines at width / 2 frequencies, from 1 down to
        # 1 / (2 context); sqrt(2) gives them unit mean square. `waves` is (context, width).
        frequencies = (2 * context) ** -(torch.arange(0, width, 2) / width)
        angles = torch.arange(context)[:, None] * frequencies
        waves = math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]
        with torch.no_grad():
            self.wpe.weight.copy_(0.2 * waves)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, tokens) -> (batch, tokens, vocabulary)
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return self.lm_head(self.ln_f(self.blocks(x)))


class ViT(nn.Module):
    def __init__(
        self, shape: torch.Size, patch: int, classes: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        channels, height, columns = shape
        self.patch = patch
        self.patch_embedding = nn.Linear(channels * patch * patch, width)
        self.position = nn.Embedding(height * columns // patch**2, width)
        self.blocks = nn.Sequential(*(Block(width, False, heads) for _ in range(depth)))
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, classes)
        initialise(self, embedding=1)

    # (batch, channels, height, columns) -> (batch, classes)
    def forward(self, images: Tensor) -> Tensor:
        # (batch, patches, channels * patch * patch)
        patches = F.unfold(images, self.patch, stride=self.patch).mT
        x = self.patch_embedding(patches) + self.position.weight  # (batch, patches, width)
        features = self.ln_f(self.blocks(x))
        return self.head(features.mean(1))


@torch.no_grad()
def initialise(model: nn.Module, *, embedding: float) -> None:
    """muP: hidden layers 1 / sqrt(fan_in); zero for the head and the last linear layer of each
    residual branch.

    Args:
        embedding: standard deviation of embeddings, the same at every width.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("head", "c_proj")):
            module.weight.zero_()
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0, module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0, embedding)


def build(
    task: Any,
    width: int,
    structure: structlin.Family | None,
    seed: int,
    device: str,
    **changes: Any,
) -> nn.Module:
    """The dense model of a task whose head starts small, or converted.

    Args:
        changes: options of `convert` beside those of the task.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = task.model(width)
        if structure is not None:
            options = {"init": "mup", "zero_init": ["*c_proj"], "weight_norm": task.weight_norm}
            structlin.convert(model, structure, **options | changes)
        for name, head in model.named_children():
            if not name.endswith("head"):
                continue
            if isinstance(head, structlin.StructuredLinear):
                head.match_norm_(HEAD_STD * math.sqrt(head.in_features * head.out_features))
            else:
                nn.init.normal_(head.weight, std=HEAD_STD)
    return model
