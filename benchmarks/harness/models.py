"""The models that the experiments train, by width and depth, and the structures that they take."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import structlin
from benchmarks.harness.tasks import MixedDigits, compare

BASE_WIDTH = 64  # where the learning rates are meant; muP takes them to other widths

STRUCTURES: dict[str, Callable[[int], structlin.Family]] = {
    "dense": lambda width: structlin.Dense(),
    "low-rank": lambda width: structlin.LowRank(rank=math.isqrt(width)),
    "Kronecker": lambda width: structlin.Kronecker(),
    "TT r=4": lambda width: structlin.TT(rank=4),
    "TT r=8": lambda width: structlin.TT(rank=8),
    "BlockDiagonal b=4": lambda width: structlin.BlockDiagonal(blocks=4),
    "Monarch": lambda width: structlin.Monarch(blocks=4),
    "Monarch b=4": lambda width: structlin.Monarch(blocks=4),
    "Monarch b=16": lambda width: structlin.Monarch(blocks=16),
    "Monarch 16": lambda width: structlin.Monarch(blocks=16),
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


def dense_mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Three hidden layers of ReLUs. The head starts at zero, and so do the biases."""
    model = mlp(inputs, width, width, width, outputs)
    nn.init.normal_(model[0].weight, std=inputs**-0.5)
    nn.init.zeros_(model[6].weight)
    for layer in (model[0], model[2], model[4], model[6]):
        nn.init.zeros_(layer.bias)
    return model


def structured_mlp(
    inputs: int, width: int, outputs: int, family: structlin.Family
) -> nn.Sequential:
    """`dense_mlp` with its two square matrices structured."""
    return structlin.convert(
        dense_mlp(inputs, width, outputs), family, include=["2", "4"], init="mup"
    )


# ---- "Compute Better Spent", appendix E ----------------------------------------------------------


class Perceptron(nn.Module):
    """Residual blocks h + W2 gelu(W1 norm(h)) with four times the width inside (E.1).

    The paper scales the first layer's rate by 0.1 because images are much wider than the base
    width; digits are not.
    """

    depth = 3  # blocks

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.blocks = nn.Sequential(
            *(_Residual(width, compare.MLP(width)) for _ in range(self.depth))
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, outputs)
        compare.initialise(self, embedding=1)

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs) -> (batch, outputs)
        return self.head(self.norm(self.blocks(self.embed(x))))


class ViT(nn.Module):
    """Attention scaled by 1 / `features`, queries and keys normalised, queries zero at the start
    (E.1, E.2); mean pooling."""

    depth, patch, features = 3, 2, 16  # blocks; pixels; features of an attention head

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(self.patch**2, width)
        self.position = nn.Embedding(inputs // self.patch**2, width)
        self.blocks = nn.Sequential(
            *(
                _Residual(width, part(width))
                for _ in range(self.depth)
                for part in (_Attention, compare.MLP)
            )
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, outputs)
        compare.initialise(self, embedding=1)
        for block in self.blocks[::2]:
            nn.init.zeros_(block.part.query.weight)

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs) -> (batch, outputs)
        side = MixedDigits.side // self.patch
        patches = rearrange(
            x, "n (h p w q) -> n (h w) (p q)", p=self.patch, q=self.patch, w=side, h=side
        )
        x = self.embed(patches) + self.position.weight  # (batch, tokens, width)
        return self.head(self.norm(self.blocks(x)).mean(1))


class _Residual(nn.Module):
    def __init__(self, width: int, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(width, bias=False), part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.norm(x))


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.c_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.query_norm, self.key_norm = (nn.LayerNorm(ViT.features, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        q, k, v = (
            rearrange(layer(x), "n t (h d) -> n h t d", d=ViT.features)
            for layer in (self.query, self.key, self.value)
        )
        q, k = self.query_norm(q), self.key_norm(k)
        y = F.scaled_dot_product_attention(q, k, v, scale=1 / ViT.features)
        return self.c_proj(rearrange(y, "n h t d -> n t (h d)"))


# ---- nanoGPT -------------------------------------------------------------------------------------


class NanoGPT(nn.Module):
    """nanoGPT's architecture with its initialisation (github.com/karpathy/nanoGPT, model.py),
    without dropout and biases: Gaussian weights of std 0.02, those that end a branch smaller by
    sqrt(2 blocks); x + f(x); attention scaled by 1 / sqrt(d); the head is the embedding."""

    heads = 4

    def __init__(self, vocabulary: int, *, context: int, width: int, blocks: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_NanoBlock(width, self.heads) for _ in range(blocks)))
        self.ln_f = nn.LayerNorm(width, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                branches = 2 * blocks if name.endswith("_proj.weight") else 1
                nn.init.normal_(weight, std=0.02 / math.sqrt(branches))

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, tokens) -> (batch, tokens, vocabulary)
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        return F.linear(self.ln_f(self.blocks(x)), self.wte.weight)


class _NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.attn_proj = nn.Linear(width, width, bias=False)
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.mlp_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, features)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))
