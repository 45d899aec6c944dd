"""What each parameter is, read from the module that owns it: a batch of matrices, embeddings, or neither."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .._linear import StructuredLinear
from .survey import is_conv1d

_LARGEST_STACK = 2**24  # elements that are worked on in one call: bounds the memory of a step
Masses = Mapping[str, float | tuple[float, ...]]
_CORE = "b m n -> b m n"
_WEIGHTS = ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class Geometry:
    """One parameter as a batch of matrices.

    Its steps are measured in the RMS->RMS operator norm of each matrix ("matrix"), in the l1->RMS norm, the RMS of
    each vector ("embedding"), or have no norm of their own ("other").
    """

    name: str
    kind: str = "other"
    fan_out: int = 1
    fan_in: int = 1
    mass: float = 1.0  #: length of a step at lr = 1; for a core its share of the layer's
    pattern: str = ""  #: einops: the parameter, dimensions from the third on flattened, -> (batch, m, n)
    sizes: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def is_core(self) -> bool:
        """Whether its first dimension counts independent blocks."""
        return self.pattern == _CORE

    def matrices(self, tensor: Tensor) -> Tensor:
        """The parameter, or its gradient, as `(batch, m, n)`."""
        return rearrange(tensor.flatten(2) if tensor.ndim > 3 else tensor, self.pattern, **self.sizes)

    def restored(self, matrices: Tensor, like: Tensor) -> Tensor:
        """The inverse of `matrices`, in the shape of `like`."""
        left, right = self.pattern.split("->")
        return rearrange(matrices, f"{right} -> {left}", **self.sizes).reshape(like.shape)


def geometries(model: nn.Module, masses: Masses | None = None) -> dict[Tensor, Geometry]:
    """The geometry of every parameter of `model`; a tied one is what it is first.

    Names are those of the model itself: wrappers (torch.compile, DDP, checkpointing) leave no trace.

    Args:
        masses: glob over layer names -> the length of the layer's step relative to the others, 1 without; for a
            structured layer also a tuple, the masses of its cores, which then need not be equal; it has their sum.

    Raises:
        ValueError: a pattern that matches no layer, a mass that is not positive, a tuple that does not fit.
    """
    unused = set(masses or {})
    found: dict[Tensor, Geometry] = {}
    wrapped = set[str]()  # full names of the modules that only wrap another
    for full, module in model.named_modules():
        wrapped.update(_join(full, child) for child in _WRAPPED if _wraps(module, child))
        name = _without(full, wrapped)
        owned = list(module.parameters(recurse=False))
        if isinstance(module, StructuredLinear):
            owned += module.cores
        if not owned or all(parameter in found for parameter in owned):
            continue
        matching = [pattern for pattern in masses or {} if fnmatchcase(name, pattern)]
        unused.difference_update(matching)
        mass = (masses or {})[matching[0]] if matching else 1.0
        for parameter, geometry in _of_module(name, module, mass):
            found.setdefault(parameter, geometry)
    if unused:
        raise ValueError(f"masses: {sorted(unused)[0]!r} matches no layer")
    return found


# Attributes in which a wrapper keeps its module.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "module")


def _wraps(module: nn.Module, child: str) -> bool:
    if child == "module" and not isinstance(module, DataParallel | DistributedDataParallel):
        return False  # an ordinary attribute of that name
    return list(module._modules) == [child]


def _without(name: str, wrapped: set[str]) -> str:
    """`name` without its parts that lead from a wrapper to its module."""
    parts = name.split(".")
    return ".".join(part for n, part in enumerate(parts) if ".".join(parts[: n + 1]) not in wrapped)


def _join(module: str, child: str) -> str:
    return f"{module}.{child}" if module else child


def in_stacks(matrices: list[Tensor], of_stacks: Callable[[Iterable[Tensor]], Iterable[Tensor]]) -> list[Tensor]:
    """What `of_stacks` makes of batches `(batch, m, n)`, those of equal shape, dtype and device in one stack.

    `of_stacks` keeps the first dimension, and may take one stack at a time or all of them.
    """
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for n, matrix in enumerate(matrices):
        alike[(*matrix.shape[-2:], matrix.dtype, matrix.device)].append(n)
    chunks = [chunk for members in alike.values() for chunk in _chunks(members, [matrices[n].numel() for n in members])]
    stacks = (matrices[chunk[0]] if len(chunk) == 1 else torch.cat([matrices[n] for n in chunk]) for chunk in chunks)
    results = list(matrices)
    for chunk, result in zip(chunks, of_stacks(stacks), strict=True):
        for n, part in zip(chunk, torch.split(result, [len(matrices[n]) for n in chunk]), strict=True):
            results[n] = part
    return results


def _chunks(members: list[int], sizes: list[int]) -> list[list[int]]:
    """Consecutive members of at most `_LARGEST_STACK` elements together."""
    chunks, room = [[members[0]]], _LARGEST_STACK - sizes[0]
    for member, size in zip(members[1:], sizes[1:], strict=True):
        if size > room:
            chunks.append([])
            room = _LARGEST_STACK
        chunks[-1].append(member)
        room -= size
    return chunks


def _of_module(
    name: str, module: nn.Module, mass: float | tuple[float, ...]
) -> Iterator[tuple[nn.Parameter, Geometry]]:
    if isinstance(module, StructuredLinear):
        shares = _shares(name, mass, len(module.cores))
        for n, (core, parameter, share) in enumerate(zip(module.structure.cores, module.cores, shares, strict=True)):
            yield (
                parameter,
                Geometry(_join(name, f"cores.{n}"), "matrix", core.fan_out, core.fan_in, share, _CORE),
            )
    elif isinstance(mass, tuple):
        raise ValueError(f"masses: {name!r} is no structured layer, it has one mass, not {mass!r}")
    else:
        mass = sum(_shares(name, mass, 1))
        for own, parameter in module.named_parameters(recurse=False):
            if own in _WEIGHTS:
                yield parameter, _of_weight(_join(name, own), module, parameter, mass)
    for own, parameter in module.named_parameters(recurse=False):
        yield parameter, Geometry(_join(name, own))


def _of_weight(name: str, module: nn.Module, weight: nn.Parameter, mass: float) -> Geometry:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Geometry(name, "embedding", module.embedding_dim, 1, mass)
    if isinstance(module, nn.MultiheadAttention) and name.endswith("in_proj_weight"):  # q, k and v below each other
        return Geometry(name, "matrix", weight.shape[0] // 3, weight.shape[1], mass, "(p m) n -> p m n", {"p": 3})
    if isinstance(module, nn.Linear | nn.MultiheadAttention):
        return Geometry(name, "matrix", weight.shape[0], weight.shape[1], mass, "m n -> 1 m n")
    if is_conv1d(module):
        return Geometry(name, "matrix", weight.shape[1], weight.shape[0], mass, "m n -> 1 m n")
    if isinstance(module, _ConvNd):
        kernel, sizes = prod(module.kernel_size), {"g": module.groups, "k": prod(module.kernel_size)}
        fan_out, fan_in = module.out_channels // module.groups, module.in_channels // module.groups
        pattern = "(g n) m k -> (g k) m n" if isinstance(module, _ConvTransposeNd) else "(g m) n k -> (g k) m n"
        return Geometry(name, "matrix", fan_out, fan_in, mass / kernel, pattern, sizes)
    return Geometry(name)


def _shares(name: str, mass: float | tuple[float, ...], cores: int) -> list[float]:
    """Step lengths of a layer's cores: their masses, or equal parts of the layer's."""
    if isinstance(mass, tuple) and len(mass) != cores:
        raise ValueError(f"masses: {name!r} has {cores} cores, {mass!r} has {len(mass)} masses")
    values = mass if isinstance(mass, tuple) else (mass,)
    if not all(value > 0 for value in values):
        raise ValueError(
            f"masses: {name!r} has {mass!r}; masses are positive (freeze a layer with requires_grad_(False))"
        )
    return list(mass) if isinstance(mass, tuple) else [mass / cores] * cores
