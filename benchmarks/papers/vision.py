"""The MLP, the ViT and the augmentation of "Compute Better Spent" (appendix E), at the size of
scikit-learn's digits.

The paper trains on CIFAR with random crops, flips, mixup (alpha 0.8) and labels smoothed by 0.3.
The same here but for flips, which would make another digit of some. Its MLPs scale the first
layer's rate by 0.1 because images are much wider than the base width; digits are not.
"""

from functools import cache

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from benchmarks.papers.tasks import Batch, compare
from benchmarks.runs import digits

CLASSES, SIDE, PATCH, HEAD = 10, 8, 2, 16
DEPTH = 3  # blocks
MIXUP, SMOOTHING = 0.8, 0.3


class MixedDigits:
    """Digits moved by up to a pixel either way and mixed in pairs; a fifth of them is held out.

    A target is a distribution over the classes; the loss is the divergence from it (nats), so that
    what mixup and smoothing add to any model's cross-entropy is not in it.
    """

    inputs, outputs = SIDE * SIDE, CLASSES

    def __init__(self, seed: int, *, heldout: bool = False) -> None:
        self.random = torch.Generator().manual_seed(1_000_003 * seed + 3)
        self.images, self.labels = _fold(heldout)

    def batch(self, size: int) -> Batch:  # (size, inputs), (size, classes)
        first, second = (self.draw(size) for _ in range(2))
        share = self._beta(size)[:, None]
        return tuple(share * a + (1 - share) * b for a, b in zip(first, second, strict=True))

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(-1), targets, reduction="batchmean")

    def draw(self, size: int) -> Batch:  # moved, not mixed
        chosen = torch.randint(len(self.images), (size,), generator=self.random)
        down, right = torch.randint(3, (2, size, 1), generator=self.random)
        y, x = (move + torch.arange(SIDE) for move in (down, right))
        padded = F.pad(self.images, (1, 1, 1, 1), value=self.images.min().item())
        moved = padded[chosen[:, None, None], y[:, :, None], x[:, None]]  # (size, SIDE, SIDE)
        labels = F.one_hot(self.labels[chosen], CLASSES)
        return moved.flatten(1), (1 - SMOOTHING) * labels + SMOOTHING / CLASSES

    def _beta(self, size: int) -> Tensor:
        """Beta(MIXUP, MIXUP) from this task's own generator: a ratio of gammas, each by Joehnk's
        rejection."""
        found = torch.empty(0)
        while len(found) < size:
            u, v = torch.rand(2, 4 * size, generator=self.random) ** (1 / MIXUP)
            found = torch.cat([found, (u / (u + v))[u + v <= 1]])
        return found[:size]


class Perceptron(nn.Module):
    """Residual blocks h + W2 gelu(W1 norm(h)) with four times the width inside (E.1)."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.blocks = nn.Sequential(*(_Residual(width, compare.MLP(width)) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, outputs)
        compare.initialise(self, embedding=1)

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs) -> (batch, outputs)
        return self.head(self.norm(self.blocks(self.embed(x))))


class ViT(nn.Module):
    """Attention scaled by 1 / HEAD, queries and keys normalised, queries zero at the start (E.1,
    E.2); mean pooling."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, width)
        self.position = nn.Embedding(inputs // PATCH**2, width)
        self.blocks = nn.Sequential(
            *(
                _Residual(width, part(width))
                for _ in range(DEPTH)
                for part in (_Attention, compare.MLP)
            )
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, outputs)
        compare.initialise(self, embedding=1)
        for block in self.blocks[::2]:
            nn.init.zeros_(block.part.query.weight)

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs) -> (batch, outputs)
        patches = rearrange(
            x, "n (h p w q) -> n (h w) (p q)", p=PATCH, q=PATCH, w=SIDE // PATCH, h=SIDE // PATCH
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
        self.query_norm, self.key_norm = (nn.LayerNorm(HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        q, k, v = (
            rearrange(layer(x), "n t (h d) -> n h t d", d=HEAD)
            for layer in (self.query, self.key, self.value)
        )
        q, k = self.query_norm(q), self.key_norm(k)
        y = F.scaled_dot_product_attention(q, k, v, scale=1 / HEAD)
        return self.c_proj(rearrange(y, "n h t d -> n t (h d)"))


@cache
def _fold(heldout: bool) -> Batch:
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = len(order) // 5
    chosen = order[:cut] if heldout else order[cut:]
    return images[chosen].unflatten(1, (SIDE, SIDE)), labels[chosen]
