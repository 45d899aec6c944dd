"""The networks of MN, written in the algebra of `structlin.modular`.

Source: Large et al. 2024 (arXiv:2405.14813), appendix B.5 to B.7.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from structlin.modular import (
    GELU,
    Abs,
    Bond,
    Composite,
    Conv2D,
    Embed,
    FunctionalAttention,
    Identity,
    LayerNorm,
    Linear,
    MeanSubtract,
    MergeHeads,
    Module,
    RMSDivide,
    SplitHeads,
)


class Enumerate(Bond):
    """Tokens `(..., tokens)` -> their positions `(tokens,)`, for an embedding of positions."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[-1], device=tokens.device)


class Flatten(Bond):
    """All dimensions but the first to one."""

    keeps_width = False

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(start_dim=1)


class AvgPool(Bond):
    """Images `(batch, channels, height, width)` -> the means of their channels, of one pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 1)


def residual(module: Module, depth: int) -> Module:
    """(1 - 1/L) Id + (1/L) M: of sensitivity 1 if M is, and with a sharpness that L of them in a
    row keep bounded.

    >>> residual(Linear(4, 4), depth=8).sensitivity
    1.0
    """
    if depth == 1:
        return module
    return (1 - 1 / depth) * Identity() + 1 / depth * module


def ResMLP(  # noqa: N802
    in_features: int,
    out_features: int,
    *,
    width: int,
    blocks: int,
    block_depth: int = 1,
    blocks_mass: float = 1.0,
) -> Composite:
    """A residual MLP: each of its blocks is `block_depth` times MeanSubtract o Abs o Linear o
    RMSDivide.

    Args:
        blocks_mass: of all blocks together; the input and the output layer have mass 1 each.

    >>> net = ResMLP(64, 10, width=32, blocks=8, block_depth=2)
    >>> round(net.mass, 6), round(net.sensitivity, 6)
    (3.0, 1.0)
    >>> [name for name, _ in net.named_parameters()][:2]
    ['input.1.linear.weight', 'blocks.0.0.1.0.0.1.linear.weight']
    """
    layer = MeanSubtract() @ Abs() @ Linear(width, width) @ RMSDivide()
    return Composite(
        input=Linear(in_features, width) @ Flatten(),
        blocks=(residual(layer**block_depth, blocks) ** blocks).tare(blocks_mass),
        head=Linear(width, out_features),
    )


def ResNet(  # noqa: N802
    in_channels: int,
    out_features: int,
    *,
    width: int,
    blocks: int,
    block_depth: int = 2,
    blocks_mass: float = 20.0,
) -> Composite:
    """A residual network of 3 x 3 convolutions of `width` channels, normalised over whole
    images.

    >>> net = ResNet(1, 10, width=4, blocks=2)
    >>> round(net.mass, 6), round(net.sensitivity, 6)
    (22.0, 1.0)
    """
    image = (-3, -2, -1)
    layer = MeanSubtract(image) @ Abs() @ Conv2D(width, width) @ RMSDivide(image)
    return Composite(
        input=Conv2D(in_channels, width),
        blocks=(residual(layer**block_depth, blocks) ** blocks).tare(blocks_mass),
        head=Linear(width, out_features) @ Flatten() @ AvgPool(),
    )


def Attention(  # noqa: N802
    width: int, *, heads: int, d_query: int, d_value: int, causal: bool
) -> Composite:
    """Multi-head attention of sensitivity 1: the tuple (Q, K, V) has 3, and a third of the
    attention is taken.

    The authors' code takes a third of Q, K and V instead, `FunctionalAttention(causal=causal) @
    (1 / 3 * query, 1 / 3 * key, 1 / 3 * value)` in this algebra: the sensitivity is the same, and
    the logits are a ninth of these.
    """
    query, key = (SplitHeads(heads) @ Linear(width, heads * d_query) for _ in range(2))
    value = SplitHeads(heads) @ Linear(width, heads * d_value)
    attended = 1 / 3 * FunctionalAttention(causal=causal) @ (query, key, value)
    return Linear(heads * d_value, width) @ MergeHeads() @ attended


def GPT(  # noqa: N802
    vocabulary: int,
    *,
    context: int,
    width: int,
    heads: int,
    blocks: int,
    d_query: int | None = None,
    d_value: int | None = None,
    blocks_mass: float = 5.0,
) -> Composite:
    """A causal transformer: tokens `(batch, tokens)` -> logits `(batch, tokens, vocabulary)`.

    Args:
        context: the largest number of tokens.
        d_query, d_value: widths of a head; None: width / heads.
        blocks_mass: of all blocks together; embeddings have mass 1 together, the output layer 1.

    Raises:
        ValueError: `heads` does not divide `width`, and the widths of a head are not given.

    >>> net = GPT(65, context=32, width=64, heads=4, blocks=3)
    >>> round(net.mass, 6), round(net.sensitivity, 6)
    (7.0, 1.0)
    >>> net(torch.zeros(2, 32, dtype=torch.long)).shape
    torch.Size([2, 32, 65])
    """
    if width % heads and None in (d_query, d_value):
        raise ValueError(f"heads={heads} does not divide width={width}: give d_query and d_value")
    head_widths = {"d_query": d_query or width // heads, "d_value": d_value or width // heads}
    tokens = Embed(vocabulary, width)
    positions = Embed(context, width) @ Enumerate()
    attention = Attention(width, heads=heads, causal=True, **head_widths) @ LayerNorm()
    mlp = Linear(4 * width, width) @ (2**0.5 * GELU()) @ Linear(width, 4 * width) @ LayerNorm()
    block = Composite(attn=residual(attention, 2 * blocks), mlp=residual(mlp, 2 * blocks))
    return Composite(
        embed=(1 / 2 * tokens + 1 / 2 * positions).tare(),
        blocks=(block**blocks).tare(blocks_mass),
        head=Linear(width, vocabulary) @ LayerNorm(),
    )
