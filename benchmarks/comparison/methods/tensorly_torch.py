"""TensorLy-Torch's factorized layer, a TT matrix of two cores."""

from tltorch import FactorizedLinear
from torch import nn

import structlin
from benchmarks.comparison.methods import Method, replace_layers


def build(in_features: int, out_features: int) -> nn.Module:
    sizes = structlin.TT(rank=8).structure(in_features, out_features).sizes
    inputs, outputs = ((sizes[f"{axis}1"], sizes[f"{axis}2"]) for axis in "ji")
    options = {"factorization": "BlockTT", "rank": (1, 8, 1), "implementation": "factorized"}
    return FactorizedLinear(inputs, outputs, bias=False, **options)


METHODS = [Method("TT r=8, TensorLy", replace_layers(build), "tensorly-torch")]
