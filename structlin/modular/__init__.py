"""The modular norm as an algebra of modules: composing a network composes its norm, duality map and
sharpness."""

from .atoms import Conv2D, Embed, Linear, Structured
from .bonds import (
    GELU,
    Abs,
    FunctionalAttention,
    LayerNorm,
    MeanSubtract,
    MergeHeads,
    ReLU,
    RMSDivide,
    SplitHeads,
)
from .module import Bond, Composite, Identity, Module, masses

__all__ = [
    "GELU",
    "Abs",
    "Bond",
    "Composite",
    "Conv2D",
    "Embed",
    "FunctionalAttention",
    "Identity",
    "LayerNorm",
    "Linear",
    "MeanSubtract",
    "MergeHeads",
    "Module",
    "RMSDivide",
    "ReLU",
    "SplitHeads",
    "Structured",
    "masses",
]
