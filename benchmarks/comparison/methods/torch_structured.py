"""Monarch of torch-structured (github.com/LarocheC/torch-structured), a package of its own: its
product is ported from the code of the Monarch paper, its layer and start are the package's.

On a rectangular layer it is another matrix than structlin's Monarch of as many blocks: its middle
is as wide as the input. Its import needs triton, on a CPU too.
"""

from torch import nn
from torch_structured.monarch.monarch_linear import MonarchLinear

from benchmarks.comparison.methods import Method, replace_layers


def build(in_features: int, out_features: int) -> nn.Module:
    return MonarchLinear(in_features, out_features, bias=False, nblocks=4)


METHODS = [Method("Monarch, torch-structured", replace_layers(build), "torch-structured")]
