"""Monarch of torch-structured, by the authors of Monarch. Its import needs triton, on a CPU too."""

from torch import nn
from torch_structured.monarch.monarch_linear import MonarchLinear

from benchmarks.comparison.methods import Method, replace_layers


def build(in_features: int, out_features: int) -> nn.Module:
    return MonarchLinear(in_features, out_features, bias=False, nblocks=4)


METHODS = [Method("Monarch, torch-structured", replace_layers(build), "torch-structured")]
