"""The parts of a model that its layers' names and places tell: ends of branches, blocks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from .linears import Layer
from .parameters import named_modules, parameters_of, weights_of

# Searched, case ignored, in the dotted name of a layer whose role is the one given.
_ENDS = {
    "attention": r"(^|\.)(o|wo|proj|dense|out_lin|(o|c|out)_proj|to_out(\.\d+)?)$",
    "ffn": r"(^|\.)(w2|wo|fc2|lin2|linear2|proj|fc_out|(c|down)_proj|dense_4h_to_h|output\.dense)$",
    "other": r"(^|\.)c_proj$",  # of a block that has no module for its attention and its MLP
}


def find_ends(layers: Sequence[Layer]) -> list[Layer]:
    """The last linear layer of each residual branch: of attention and of the MLP after it.

    By its name; in a plain nn.Sequential of an MLP it is the last one.
    """
    last_numbered: dict[str, Layer] = {}  # of each folder whose layers are only numbered
    for layer in layers:
        folder, _, child = layer.name.rpartition(".")
        if layer.role == "ffn" and child.isdigit():
            last_numbered[folder] = layer
    ends = []
    for layer in layers:
        pattern = _ENDS.get(layer.role, r"$^")
        is_named_so = re.search(pattern, layer.name, re.IGNORECASE)
        if is_named_so or layer in last_numbered.values():
            ends.append(layer)
    return ends


def _repeats(parent: nn.Module, child: nn.Module) -> bool:
    """Whether `child` stands in an nn.ModuleList, or beside others of its class in an
    nn.Sequential."""
    if isinstance(child, nn.ModuleList):
        return False
    alike = sum(type(module) is type(child) for module in parent.children())
    return isinstance(parent, nn.ModuleList) or (isinstance(parent, nn.Sequential) and alike > 1)


def find_block(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """The block that holds what has this dotted name: the outermost module on its way that
    is repeated, has modules of its own and is no layer; None outside of all blocks."""
    attributes = name.split(".")
    paths = [".".join(attributes[:n]) for n in range(len(attributes))]
    for parent, child in pairwise(paths):
        if child not in modules:
            return None
        module = modules[child]
        if _repeats(modules[parent], module) and any(module.children()) and not weights_of(module):
            return child
    return None


def blocks_of_parameters(model: nn.Module) -> dict[str, str]:
    """Parameter name -> name of its block, see `find_block`, for those that are in one.

    >>> mlp = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> blocks = blocks_of_parameters(nn.Sequential(nn.Linear(4, 4), mlp(), mlp()))
    >>> blocks["1.0.weight"], blocks["2.2.bias"], "0.weight" in blocks
    ('1', '2', False)
    """
    modules = dict(named_modules(model))
    blocks = {}
    for info in parameters_of(model):
        block = find_block(modules, info.name)
        if block is not None:
            blocks[info.name] = block
    return blocks


class Block(NamedTuple):
    """Some layers of a model that are in one block."""

    name: str
    layers: list[Layer]


def blocks_of_layers(model: nn.Module, layers: Iterable[Layer]) -> dict[nn.Module, Block]:
    """The blocks that hold these layers, see `find_block`; if there is none, the model is the
    block.

    >>> from structlin._model.linears import linear_layers
    >>> mlp = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> model = nn.Sequential(nn.Linear(4, 4), mlp(), mlp())
    >>> blocks = blocks_of_layers(model, linear_layers(model)).values()
    >>> [(block.name, len(block.layers)) for block in blocks]
    [('1', 2), ('2', 2)]
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = list(layers)
    blocks: dict[nn.Module, Block] = {}
    for layer in layers:
        name = find_block(modules, layer.name)
        if name is not None:
            block = blocks.setdefault(modules[name], Block(name, []))
            block.layers.append(layer)
    if not blocks and all(layer.module is not model for layer in layers):
        return {model: Block("", layers)}
    return blocks
