"""Parameters that lie on several processes: their parts, and how the parts become whole.

Blocks that are whole on each process need no communication: those of a core sharded on its first
dimension, as FSDP2 does it, and vectors. Every other matrix is gathered, and each process computes
its factor. Nothing here depends on the backend.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .._model.parameters import Weight, parameters_of
from .._structure.arguments import require_integer


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
        gradient = gradient.redistribute(placements=layout.placements)  # type: ignore[attr-defined]
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
    if gradient_layout.mesh != mesh:
        return (
            f"is on {mesh} and its gradient on {gradient_layout.mesh}: both must be on one device "
            "mesh"
        )
    return ""


class _Layout(NamedTuple):
    """Where the parts of a DTensor lie."""

    mesh: Any
    placements: tuple[Any, ...]


def _layout(tensor: Tensor) -> _Layout | None:
    """The layout of a DTensor; None for any other tensor."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter or not hasattr(tensor, "device_mesh"):
        return None
    return _Layout(tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]


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
    require_integer("world_size", world_size)
    placements = WeakIdKeyDictionary()
    for info in parameters_of(model):
        parameter = info.parameter
        if info.weight.core is not None and len(parameter) < world_size:
            sides = sorted((1, 2), key=lambda dim: -parameter.shape[dim])
            cuts = (Shard(dim) for dim in sides if parameter.shape[dim] % world_size == 0)
            placements[parameter] = next(cuts, None)
    return placements.get


def join_parts(parameter: Tensor, weight: Weight, local: Tensor) -> Tensor:
    """What is cut as `parameter` is and has the part `local` here: whole, or in whole blocks.

    Only cuts through blocks are undone. A core on FSDP2 and tensor parallelism may be cut between
    its blocks by the one and through them by the other: each process then has its share of the
    blocks.
    """
    layout = _layout(parameter)
    if layout is None:
        return local
    _, placements = layout
    distributed = _as_dtensor(parameter, local, placements)
    blocks: Tensor = distributed.redistribute(
        placements=_in_whole_blocks(parameter, weight)
    ).to_local()
    return blocks


def take_part(parameter: Tensor, weight: Weight, joined: Tensor) -> Tensor:
    """The inverse of `join_parts`."""
    layout = _layout(parameter)
    if layout is None:
        return joined
    _, placements = layout
    blocks = _as_dtensor(parameter, joined, _in_whole_blocks(parameter, weight))
    local: Tensor = blocks.redistribute(placements=placements).to_local()
    return local


def cut_as(parameter: Tensor, weight: Weight, local: Tensor) -> Tensor:
    """State of the blocks that this process holds, `local` `(blocks, ...)`, as what it is of all of
    them; where every process has the whole parameter, `local` itself."""
    layout = _layout(parameter)
    if layout is None:
        return local
    placements = _in_whole_blocks(parameter, weight)
    if all(placement.is_replicate() for placement in placements):
        return local
    shape = torch.Size((len(parameter) * weight.fused, *local.shape[1:]))
    state: Tensor = _as_dtensor(parameter, local, placements, shape)
    return state


def gather_whole(parameter: Tensor, local: Tensor) -> Tensor:
    """What is cut as `parameter` is and has the part `local` here."""
    layout = _layout(parameter)
    if layout is None:
        return local
    _, placements = layout
    whole: Tensor = _as_dtensor(parameter, local, placements).full_tensor()
    return whole


def _as_dtensor(
    parameter: Any, local: Tensor, placements: tuple[Any, ...], shape: torch.Size | None = None
) -> Any:
    """The part `local`, on the mesh of `parameter`, of what has its shape or another."""
    from torch.distributed.tensor import DTensor

    shape = shape or parameter.shape
    stride = torch.empty(shape, device="meta").stride()
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _in_whole_blocks(parameter: Any, weight: Weight) -> tuple[Any, ...]:
    """The placements, without those that cut through blocks; through a matrix all of them do."""
    from torch.distributed.tensor import Replicate

    placements: tuple[Any, ...] = parameter.placements
    # FSDP2 over a cut of the same dimension is no Shard, but has a `dim` too
    is_first = [getattr(placement, "dim", None) == 0 for placement in placements]
    has_blocks = weight.is_in_blocks
    if weight.fused > 1:  # uneven parts of the parameter are no even ones of its matrices' state
        mesh_sizes = zip(parameter.device_mesh.shape, is_first, strict=True)
        pieces = prod(size for size, cuts_blocks in mesh_sizes if cuts_blocks)
        has_blocks = has_blocks and len(parameter) % pieces == 0
    return tuple(
        placement if has_blocks and cuts_blocks else Replicate()
        for placement, cuts_blocks in zip(placements, is_first, strict=True)
    )
