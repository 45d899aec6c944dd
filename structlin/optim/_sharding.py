"""The polar factor of matrices that lie on several processes, with little communication.

- Blocks that are whole on each process (a core sharded on its first dimension, which is what FSDP2
  does; empty shards too): none.
- A core sharded along the long side of its blocks (`shard_placement_fn`): one all-reduce of the
  small Gram matrices of all such cores together, in float64.
- Any other matrix that is sharded along one dimension (an nn.Linear under FSDP2): two all-to-alls
  for all of them together. Each matrix is made whole on one process, the matrices being divided
  evenly, and its factor handed back.
- Matrices sharded along several dimensions: each is gathered.

Nothing here depends on the backend.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .._arguments import require_module, require_positive
from .._model.parameters import Weight, parameters_of

Polar = Callable[[list[Weight], list[Tensor]], list[Tensor]]


def is_sharded(tensor: Tensor) -> bool:
    return _layout(tensor) is not None


def local_part(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds; any other tensor itself."""
    return tensor if _layout(tensor) is None else tensor.to_local()  # type: ignore[attr-defined]


def _layout(tensor: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """Device mesh and placements, of a DTensor."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter or not hasattr(tensor, "device_mesh"):
        return None
    return tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]


def shard_placement_fn(model: nn.Module, world_size: int = 0) -> Callable[[nn.Parameter], Any]:
    """Makes what FSDP2's `fully_shard(model, shard_placement_fn=shard_placement_fn(model, 8))`
    takes: where each parameter is cut.

    FSDP2 cuts dimension 0, the blocks of a core, so that `Muon` needs no communication; but a core
    of fewer blocks than processes leaves some of them empty, and one of a single block (low-rank,
    Kronecker) lies on the first alone. Such a core is cut along the long side of its blocks
    instead, where `world_size` divides it (FSDP2 asks for that), else along the short one;
    everything else stays as it is. Call this before the first `fully_shard`.

    Raises:
        ValueError: `world_size` is below 1.
        TypeError: `model` is no module, as where this function itself is passed to `fully_shard`.

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

    hint = ": pass fully_shard what this makes, "
    hint += "shard_placement_fn=structlin.optim.shard_placement_fn(model, world_size)"
    require_module("model", model, hint)
    require_positive("world_size", world_size)
    placements = WeakIdKeyDictionary()
    for info in parameters_of(model):
        parameter = info.parameter
        if info.weight.core is not None and len(parameter) < world_size:
            sides = sorted((1, 2), key=lambda dim: -parameter.shape[dim])
            cuts = (Shard(dim) for dim in sides if parameter.shape[dim] % world_size == 0)
            placements[parameter] = next(cuts, None)
    return placements.get


def polar_parts(
    params: list[Tensor],
    weights: list[Weight],
    updates: list[Tensor],
    polar: Polar,
) -> list[Tensor]:
    """What `polar` makes of the whole tensors, this process's part; `updates` are the local parts.

    Args:
        polar: from what they are and whole tensors to polar factors.
    """
    results = list(updates)
    routes: dict[tuple[str, Hashable], list[int]] = defaultdict(list)
    for n, p in enumerate(params):
        routes[_route(p, weights[n])].append(n)
    for (route, _), members in routes.items():
        own, local = [params[n] for n in members], [updates[n] for n in members]
        what = [weights[n] for n in members]
        if route == "whole":
            found = polar(what, local)
        elif route == "exchange":
            found = _by_exchange(own, what, local, polar)
        else:
            found = _by_gathering(own, what, local, polar)
        for n, result in zip(members, found, strict=True):
            results[n] = result
    return results


def agree(finite: bool, params: list[Tensor]) -> bool:
    """Whether `finite` holds on all processes of `params`: an all-reduce for each mesh dim."""
    meshes = {layout[0]: p.device for p in params if (layout := _layout(p)) is not None}
    for mesh, device in meshes.items():
        flag = torch.tensor(float(finite), device=device)
        for dim in range(mesh.ndim):
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        finite = bool(flag)
    return finite


def require_same_gradients(
    names: Mapping[Tensor, str],
    groups: Iterable[Mapping[str, list[Tensor]]],
    group: dist.ProcessGroup,
) -> None:
    """Compare which parameters have a gradient on the processes of `group`: one all-reduce.

    Raises:
        RuntimeError: on every process, if one has a gradient that another lacks: they would wait
            for each other.
    """
    params = [parameter for each in groups for parameter in each["params"]]
    present = [parameter.grad is not None for parameter in params]
    counts = torch.tensor(present, dtype=torch.int32, device=params[0].device)  # (parameters,)
    dist.all_reduce(counts, group=group)
    world = dist.get_world_size(group)
    partial = [n for n, count in enumerate(counts.tolist()) if 0 < count < world]
    if partial:
        found = ", ".join(names[params[n]] for n in partial[:5])
        raise RuntimeError(
            f"{found}: some processes of process_group have no gradient, others have one; nothing "
            "was changed. Let DDP average the gradients, or fill the missing ones with zeros"
        )


def divide_stacks(
    stacks: list[Tensor], dualize: Callable[[Tensor], Tensor], group: dist.ProcessGroup
) -> list[Tensor]:
    """`dualize` of each `(batch, m, n)`, the batches divided over `group`: one all-gather.

    All of the same dtype, and the same on all processes. The result is, bit for bit, the same on
    all of them.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    shares = [-(-len(stack) // world) for stack in stacks]
    mine = []
    for stack, share in zip(stacks, shares, strict=True):
        part = dualize(stack[rank * share : (rank + 1) * share])
        padding = part.new_zeros(share - len(part), *part.shape[1:])
        mine.append(torch.cat([part, padding]).flatten())
    flat = torch.cat(mine)
    gathered = flat.new_empty(world * len(flat))
    dist.all_gather_into_tensor(gathered, flat, group=group)
    parts = torch.split(gathered.view(world, -1), [len(part) for part in mine], dim=1)
    shapes = [
        (world * share, *stack.shape[1:]) for stack, share in zip(stacks, shares, strict=True)
    ]
    return [
        part.reshape(shape)[: len(stack)]
        for part, shape, stack in zip(parts, shapes, stacks, strict=True)
    ]


def _route(parameter: Tensor, weight: Weight) -> tuple[str, Hashable]:
    """How the factor of a parameter is found, and what those that go together have in common."""
    layout = _layout(parameter)
    if layout is None:
        return "whole", None
    mesh, placements = layout
    cuts = {
        n: placement.dim for n, placement in enumerate(placements) if not placement.is_replicate()
    }
    vectors_whole = weight.kind == "embedding" or weight.core is not None
    if weight.kind not in ("matrix", "embedding") or all(
        dim == 0 and vectors_whole for dim in cuts.values()
    ):
        return "whole", None
    if len(cuts) > 1 or not placements[next(iter(cuts))].is_shard():
        return "gather", None
    (mesh_dim,) = cuts
    return "exchange", (mesh, mesh_dim, parameter.dtype)


def _cut(parameter: Tensor) -> tuple[dist.ProcessGroup, int, int, list[int]]:
    """Return how a parameter is cut once: the processes, this one's rank, the dimension, each one's
    part."""
    layout = _layout(parameter)
    assert layout is not None
    mesh, placements = layout
    (mesh_dim,) = (n for n, placement in enumerate(placements) if placement.is_shard())
    world, dim = mesh.size(mesh_dim), placements[mesh_dim].dim
    size = parameter.shape[dim]
    share = -(-size // world)
    sizes = [min(max(size - rank * share, 0), share) for rank in range(world)]
    return mesh.get_group(mesh_dim), mesh.get_local_rank(mesh_dim), dim, sizes


def _by_exchange(
    params: list[Tensor], weights: list[Weight], updates: list[Tensor], polar: Polar
) -> list[Tensor]:
    """Each matrix whole on one process: two all-to-alls."""
    cuts = [_cut(p) for p in params]
    group, rank, world = cuts[0][0], cuts[0][1], len(cuts[0][3])
    owned = _divide(
        [p.numel() * min(w.fan_in, w.fan_out) for p, w in zip(params, weights, strict=True)], world
    )
    shapes = [
        [_part(p, cut[2], size) for size in cut[3]] for p, cut in zip(params, cuts, strict=True)
    ]
    # shapes[n][r] is that of the part of n that process r holds
    wholes: dict[int, list[Tensor]] = {n: [] for n in owned[rank]}
    outgoing = [[updates[n] for n in owned[r]] for r in range(world)]
    incoming = [[shapes[n][r] for n in owned[rank]] for r in range(world)]
    for parts in _all_to_all(outgoing, incoming, group, updates[0]):
        for n, part in zip(owned[rank], parts, strict=True):
            wholes[n].append(part)
    mine = polar(
        [weights[n] for n in owned[rank]],
        [torch.cat(parts, cuts[n][2]) for n, parts in wholes.items()],
    )

    split = [
        torch.split(whole, cuts[n][3], dim=cuts[n][2])
        for n, whole in zip(owned[rank], mine, strict=True)
    ]
    outgoing = [[parts[r] for parts in split] for r in range(world)]
    incoming = [[shapes[n][rank] for n in owned[r]] for r in range(world)]
    results = list(updates)
    for r, parts in enumerate(_all_to_all(outgoing, incoming, group, updates[0])):
        for n, part in zip(owned[r], parts, strict=True):
            results[n] = part
    return results


def _part(parameter: Tensor, dim: int, size: int) -> torch.Size:
    return torch.Size([*parameter.shape[:dim], size, *parameter.shape[dim + 1 :]])


def _divide(costs: list[int], world: int) -> list[list[int]]:
    """The items of each process: the costliest first, to the process with the least so far."""
    loads, owned = [0] * world, [list[int]() for _ in range(world)]
    for n in sorted(range(len(costs)), key=lambda n: -costs[n]):
        rank = loads.index(min(loads))
        owned[rank].append(n)
        loads[rank] += costs[n]
    return owned


def _all_to_all(
    outgoing: list[list[Tensor]],
    incoming: list[list[torch.Size]],
    group: dist.ProcessGroup,
    like: Tensor,
) -> list[list[Tensor]]:
    """Tensors for each process -> tensors of shapes `incoming` from each, alike to `like`."""
    flat = [part.reshape(-1) for parts in outgoing for part in parts]
    sent = [sum(part.numel() for part in parts) for parts in outgoing]
    received = [sum(shape.numel() for shape in shapes) for shapes in incoming]
    source = torch.cat([like.new_empty(0), *flat])
    target = source.new_empty(sum(received))
    dist.all_to_all_single(target, source, received, sent, group=group)
    offsets = [0, *accumulate(shape.numel() for shapes in incoming for shape in shapes)]
    parts = (target[start:end] for start, end in pairwise(offsets))
    return [[next(parts).view(shape) for shape in shapes] for shapes in incoming]


def gather_whole(parameter: Tensor, local: Tensor) -> Tensor:
    """The tensor that is cut as `parameter` is and has the part `local` here, gathered."""
    from torch.distributed.tensor import DTensor

    layout = _layout(parameter)
    assert layout is not None
    found = DTensor.from_local(local, *layout, shape=parameter.shape, stride=parameter.stride())
    return found.full_tensor()


def _by_gathering(
    params: list[Tensor], weights: list[Weight], updates: list[Tensor], polar: Polar
) -> list[Tensor]:
    from torch.distributed.tensor import distribute_tensor

    results = []
    for p, weight, update in zip(params, weights, updates, strict=True):
        layout = _layout(p)
        assert layout is not None
        (dual,) = polar([weight], [gather_whole(p, update)])
        results.append(distribute_tensor(dual, *layout, src_data_rank=None).to_local())
    return results
