"""TensorLy-Torch's factorized layer, a TT matrix of two cores."""

from tltorch import FactorizedLinear
from torch import nn

import structlin
from benchmarks.comparison.methods import Method, replace_layers


def build(in_features: int, out_features: int) -> nn.Module:
    sizes = structlin.TT(rank=8).structure(in_features, out_features).sizes
    inputs = (sizes["j1"], sizes["j2"])
    outputs = (sizes["i1"], sizes["i2"])
    options = {"factorization": "BlockTT", "rank": (1, 8, 1), "implementation": "factorized"}
    return FactorizedLinear(inputs, outputs, bias=False, **options)


METHODS = [Method("TT r=8, TensorLy", replace_layers(build), "tensorly-torch")]
