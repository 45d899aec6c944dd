"""The parts of a model that its layers' names and places tell: ends of branches, blocks."""

import re
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from .parameters import named_modules, parameters_of, weights_of
from .survey import Layer

# Searched, case ignored, in the dotted name of a layer whose role is the one given.
_ENDS = {
    "attention": r"(^|\.)(o|wo|proj|dense|out_lin|(o|c|out)_proj|to_out(\.\d+)?)$",
    "ffn": r"(^|\.)(w2|wo|fc2|lin2|linear2|proj|fc_out|(c|down)_proj|dense_4h_to_h|output\.dense)$",
}


def find_ends(layers: Sequence[Layer]) -> list[Layer]:
    """The last linear layer of each residual branch: of attention and of the MLP after it.

    By its name; in a plain nn.Sequential of an MLP it is the last one.
    """
    last: dict[str, Layer] = {}  # of each folder whose layers are only numbered
    for layer in layers:
        folder, _, own = layer.name.rpartition(".")
        if layer.role == "ffn" and own.isdigit():
            last[folder] = layer
    return [
        layer
        for layer in layers
        if _named(_ENDS.get(layer.role, r"$^"), layer) or layer in last.values()
    ]


def repeats(parent: nn.Module, child: nn.Module) -> bool:
    """Whether `child` stands in an nn.ModuleList, or beside others of its class in an
    nn.Sequential."""
    if isinstance(child, nn.ModuleList):
        return False
    alike = sum(type(module) is type(child) for module in parent.children())
    return isinstance(parent, nn.ModuleList) or (isinstance(parent, nn.Sequential) and alike > 1)


def blocks_of_parameters(model: nn.Module) -> dict[str, str]:
    """Parameter name -> the outermost module that repeats, has modules of its own and is no layer.

    >>> mlp = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> blocks = blocks_of_parameters(nn.Sequential(nn.Linear(4, 4), mlp(), mlp()))
    >>> blocks["1.0.weight"], blocks["2.2.bias"], "0.weight" in blocks
    ('1', '2', False)
    """
    modules, found = dict(named_modules(model)), {}
    for info in parameters_of(model):
        parts = info.name.split(".")
        paths = [".".join(parts[:n]) for n in range(len(parts))]
        for parent, child in pairwise(paths):
            if child not in modules:
                break
            module = modules[child]
            if not repeats(modules[parent], module) or weights_of(module):
                continue
            if any(module.children()):
                found[info.name] = child
                break
    return found


def _named(pattern: str, layer: Layer) -> bool:
    return re.search(pattern, layer.name, re.IGNORECASE) is not None
