"""The order in which a layer's cores lie, where it is not the one that their structure was declared
with.

The same numbers in another order have the same shape, and a distributed checkpoint compares names
and shapes alone. So a core that is stored anew has a name that says so, `cores.0_i2`: a checkpoint
of one order never fills a model of the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._structure.cut import outermost
from .._structure.structure import Core, Structure
from .linear import StructuredLinear


class OrderedCores(nn.ParameterList):
    """Cores whose names say how they lie: "0_i2" is core 0, stored with axis i2 outermost in its
    dimension. Numbers find them as in any ParameterList.

    Args:
        names: of the cores, one each.
        declared: the structure that says how they lay before.
    """

    def __init__(
        self, cores: Sequence[nn.Parameter], names: Sequence[str], declared: Structure
    ) -> None:
        super().__init__()
        self._size = len(cores)
        self.stored_names = tuple(names)
        self.declared = declared
        for name, core in zip(names, cores, strict=True):
            self.register_parameter(name, core)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self._find_name(name))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self._find_name(name), value)

    def _find_name(self, name: str) -> str:
        """The name of the core that `nn.ParameterList` calls by its number."""
        names = vars(self).get("stored_names", ())
        is_number = name.isdigit() and int(name) < len(names)
        return names[int(name)] if is_number else name


@torch.no_grad()
def store_outermost_(layer: StructuredLinear, axis: str) -> StructuredLinear:
    """Store the cores of a layer so that `axis` is outermost in its dimension; same function.

    `ColwiseParallel` and the others do so by themselves, as only then a process holds one slice of
    each core. Call this to read a checkpoint that they have made on one process without them. Only
    BTT of rank 2 and more, BTT of three cores and declared structures ever change; a core that does
    has another name, and the layer's state another structure, so that states of the two orders are
    never taken for each other.

    Returns:
        `layer`.

    Raises:
        ValueError: the structure has no such axis; the layer lies on several processes.

    >>> from structlin import BTT
    >>> layer = StructuredLinear(64, 64, BTT(rank=2))
    >>> list(store_outermost_(layer, "i2").state_dict())
    ['bias', 'cores.0_i2', 'cores.1']
    >>> list(store_as_declared_(layer).state_dict())
    ['bias', 'cores.0', 'cores.1']
    """
    store_as_declared_(layer)
    declared = layer.structure
    stored = outermost(declared, axis)
    if stored == declared:
        return layer
    pairs = zip(declared.subscripts, stored.subscripts, strict=True)
    names = [
        f"{n}_{axis}" if before != after else str(n) for n, (before, after) in enumerate(pairs)
    ]
    _reorder_(layer, stored)
    layer.cores = OrderedCores(list(layer.cores), names, declared)
    layer.core_names = names
    return layer


@torch.no_grad()
def store_as_declared_(layer: StructuredLinear) -> StructuredLinear:
    """The inverse of `store_outermost_`: the cores lie as their structure was declared.

    Returns:
        `layer`.

    Raises:
        ValueError: the layer lies on several processes.

    >>> from structlin import BTT
    >>> layer = StructuredLinear(64, 64, BTT(rank=2))
    >>> before = layer.cores[0].clone()
    >>> store_as_declared_(store_outermost_(layer, "i2")).cores[0].equal(before)
    True
    """
    cores = layer.cores
    if any(hasattr(core, "full_tensor") for core in cores):
        raise ValueError("the cores lie on several processes: store them before they are sharded")
    if isinstance(cores, OrderedCores):
        _reorder_(layer, cores.declared)
        layer.cores = nn.ParameterList(list(cores))
        layer.core_names = [str(n) for n in range(len(cores))]
    return layer


def _reorder_(layer: StructuredLinear, structure: Structure) -> None:
    """Move the numbers of the layer's cores to where `structure`, the same einsum, has them."""
    cores = zip(layer.cores, layer.structure.cores, structure.cores, strict=True)
    for parameter, before, after in cores:
        if before.axes != after.axes:
            parameter.copy_(_permute(parameter, before, after, structure))
    layer.structure = structure


def _permute(
    parameter: torch.Tensor, before: Core, after: Core, structure: Structure
) -> torch.Tensor:
    """The core, one dimension for each axis, in the new order of axes, and as a core again."""
    separate = parameter.view([structure.sizes[axis] for axis in before.axes])
    moved = separate.permute([before.axes.index(axis) for axis in after.axes])
    return moved.reshape(parameter.shape).clone()
