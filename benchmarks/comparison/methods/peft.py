"""Layers of PEFT that are structured matrices: LoKr, a Kronecker product, and LoHa, an elementwise
product of two low-rank ones.

PEFT adds them to a frozen layer. Here that layer is zero, so the adapter is the whole layer; what
PEFT computes stays what it computes. They start at random: layers that all start as zero, as PEFT's
do, get no gradient.
"""

import peft
from torch import nn

from benchmarks.comparison.methods import Method, replace_layers

RANK = 64


class Alone(nn.Module):
    """An adapter of PEFT without the layer that it would adapt."""

    def __init__(self, config: peft.PeftConfig, in_features: int, out_features: int) -> None:
        super().__init__()
        base = nn.Linear(in_features, out_features, bias=False)
        nn.init.zeros_(base.weight)
        self.adapted = peft.get_peft_model(nn.Sequential(base), config).base_model.model[0]

    def forward(self, x):
        return self.adapted(x)


def lokr(in_features: int, out_features: int) -> nn.Module:
    config = peft.LoKrConfig(target_modules=["0"], r=RANK, alpha=RANK, init_weights=False)
    return Alone(config, in_features, out_features)


def loha(in_features: int, out_features: int) -> nn.Module:
    config = peft.LoHaConfig(target_modules=["0"], r=RANK, alpha=RANK, init_weights=False)
    return Alone(config, in_features, out_features)


METHODS = [
    Method("LoKr", replace_layers(lokr), "peft"),
    Method("LoHa", replace_layers(loha), "peft"),
]
