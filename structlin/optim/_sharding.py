"""Parameters that lie on several processes: their parts, and how the parts become whole.

Blocks that are whole on each process need no communication: those of a core sharded on its first
dimension, as FSDP2 does it, and vectors. Every other matrix is gathered, and each process computes
its factor. Nothing here depends on the backend.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .._model.parameters import Weight, parameters_of
from .._structure.arguments import require_positive


def local_part(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds; any other tensor itself."""
    return tensor if _layout(tensor) is None else tensor.to_local()  # type: ignore[attr-defined]


def local_gradient(parameter: Tensor) -> Tensor:
    """The gradient of the part of a parameter that this process holds, dense.

    Under tensor parallelism a gradient may be placed otherwise than its parameter: that of a
    replicated parameter is `Partial`, a sum over processes that is still to be made. Processes wait
    for one another here.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        return gradient.to_dense()
    layout = _layout(parameter)
    if layout is not None and _layout(gradient) != layout:
        _, placements = layout
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local_part(gradient)


def find_misplaced(parameter: Tensor) -> str:
    """Why no process can read its part of the gradient, as the end of a sentence; empty if each
    can. Every process finds the same, and none waits for another."""
    gradient = parameter.grad
    if gradient is None:
        return ""
    layout = _layout(parameter)
    gradient_layout = _layout(gradient)
    if layout is None and gradient_layout is None:
        return ""
    if layout is None:
        return (
            "is a plain tensor and its gradient a DTensor: pass the parameter to "
            "distribute_tensor too, or take gradient.full_tensor()"
        )
    mesh, placements = layout
    if any(placement.is_partial() for placement in placements):
        return (
            f"has the placements {placements}, a sum that is still to be made: call "
            "redistribute on the parameter, then make the optimizer"
        )
    if gradient_layout is None:
        return (
            "is a DTensor and its gradient a plain tensor: set "
            "parameter.grad = distribute_tensor(gradient, parameter.device_mesh, "
            "parameter.placements)"
        )
    if gradient_layout[0] != mesh:
        return (
            f"is on {mesh} and its gradient on {gradient_layout[0]}: both must be on one device "
            "mesh"
        )
    return ""


def _layout(tensor: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """Device mesh and placements, of a DTensor."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter or not hasattr(tensor, "device_mesh"):
        return None
    return tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]


def shard_placement_fn(model: nn.Module, world_size: int = 0) -> Callable[[nn.Parameter], Any]:
    """Makes what FSDP2's `fully_shard(model, shard_placement_fn=shard_placement_fn(model, 8))`
    takes: where each parameter is cut. Call this before the first `fully_shard`.

    FSDP2 cuts dimension 0, the blocks of a core, so that `Muon` needs no communication. A core of
    fewer blocks than processes is cut along the long side of its blocks, where `world_size` divides
    it (FSDP2 asks for that), else along the short side: every process has a part, and `Muon`
    gathers them. Everything else stays as it is.

    Raises:
        ValueError, TypeError: `world_size` is below 1; `model` is no module.

    >>> from structlin import BTT, LowRank, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64)), LowRank(rank=4))
    >>> place = shard_placement_fn(model, 4)
    >>> [place(core) for core in model[0].cores]  # of shapes (1, 4, 64) and (1, 64, 4)
    [Shard(dim=2), Shard(dim=1)]
    >>> model = convert(nn.Sequential(nn.Linear(64, 64)), BTT())  # of 8 blocks
    >>> [shard_placement_fn(model, 4)(core) for core in model[0].cores]
    [None, None]
    """
    from torch.distributed.tensor import Shard

    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={type(model).__name__} must be a torch.nn.Module: pass fully_shard what this "
            "makes, shard_placement_fn=structlin.optim.shard_placement_fn(model, world_size)"
        )
    require_positive("world_size", world_size)
    placements = WeakIdKeyDictionary()
    for info in parameters_of(model):
        parameter = info.parameter
        if info.weight.core is not None and len(parameter) < world_size:
            sides = sorted((1, 2), key=lambda dim: -parameter.shape[dim])
            cuts = (Shard(dim) for dim in sides if parameter.shape[dim] % world_size == 0)
            placements[parameter] = next(cuts, None)
    return placements.get


def join_parts(parameter: Tensor, weight: Weight, local: Tensor) -> Tensor:
    """What is cut as `parameter` is and has the part `local` here: whole, or in whole blocks."""
    return local if _has_whole_blocks(parameter, weight) else gather_whole(parameter, local)


def take_part(parameter: Tensor, weight: Weight, joined: Tensor) -> Tensor:
    """The inverse of `join_parts`."""
    from torch.distributed.tensor import distribute_tensor

    layout = _layout(parameter)
    if layout is None or _has_whole_blocks(parameter, weight):
        return joined
    return distribute_tensor(joined, *layout, src_data_rank=None).to_local()


def cut_as(parameter: Tensor, weight: Weight, local: Tensor) -> Tensor:
    """State of the blocks that this process holds, `local` `(blocks, ...)`, as what it is of all of
    them; where every process has the whole parameter, `local` itself."""
    from torch.distributed.tensor import DTensor

    layout = _layout(parameter)
    if layout is None or not _has_whole_blocks(parameter, weight):
        return local
    shape = torch.Size((len(parameter) * weight.fused, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, *layout, shape=shape, stride=stride)


def gather_whole(parameter: Tensor, local: Tensor) -> Tensor:
    """What is cut as `parameter` is and has the part `local` here."""
    from torch.distributed.tensor import DTensor

    layout = _layout(parameter)
    if layout is None:
        return local
    found = DTensor.from_local(local, *layout, shape=parameter.shape, stride=parameter.stride())
    return found.full_tensor()


def _has_whole_blocks(parameter: Tensor, weight: Weight) -> bool:
    layout = _layout(parameter)
    if layout is None:
        return True
    mesh, placements = layout
    in_blocks = weight.is_in_blocks
    if weight.fused > 1:  # else state of all blocks would be cut elsewhere than the parameter
        in_blocks = in_blocks and len(parameter) % mesh.size() == 0
    return all(
        placement.is_replicate() or (in_blocks and placement.dim == 0) for placement in placements
    )
