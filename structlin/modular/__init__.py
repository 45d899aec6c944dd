"""The modular norm as an algebra of modules: composing a network composes its norm, duality map and
sharpness."""

from .atoms import Conv2D, Embed, Linear, Structured
from .bonds import (
    GELU,
    Abs,
    AvgPool,
    Flatten,
    FunctionalAttention,
    LayerNorm,
    MeanSubtract,
    MergeHeads,
    ReLU,
    RMSDivide,
    ScaledGELU,
    ScaledReLU,
    SplitHeads,
)
from .module import Bond, Composite, Identity, Module, masses

__all__ = [
    "GELU",
    "Abs",
    "AvgPool",
    "Bond",
    "Composite",
    "Conv2D",
    "Embed",
    "Flatten",
    "FunctionalAttention",
    "Identity",
    "LayerNorm",
    "Linear",
    "MeanSubtract",
    "MergeHeads",
    "Module",
    "RMSDivide",
    "ReLU",
    "ScaledGELU",
    "ScaledReLU",
    "SplitHeads",
    "Structured",
    "masses",
]
