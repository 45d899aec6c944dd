"""What the tools share: seeds, checks, numbers and figures."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PathLike = str | os.PathLike[str]

Number = TypeVar("Number", int, float)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's random numbers from `seed`; afterwards where they were."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def built(build: Callable[[int], nn.Module], width: int) -> nn.Module:
    model = build(width)
    if not isinstance(model, nn.Module):
        raise TypeError(f"build({width}) returned {described(model)}, not a torch.nn.Module")
    return model


def positive(name: str, values: Iterable[Number]) -> list[Number]:
    found = list(values)
    for value in found:
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={found}: {value!r} is not positive and finite")
    return found


def described(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return type(value).__name__ + shape


def number(value: float) -> str:
    """With four decimals, or a power of ten where they would not do."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or not value else f"{value:.2e}"


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def saved(figure: "Figure", path: PathLike | None) -> "Figure":
    if path is not None:
        figure.savefig(path, dpi=90)
    return figure


def checked(model: nn.Module) -> nn.Module:
    """`model`, if its parameters have values that are all here."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} must be a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"model={type(model).__name__}: {name} is on meta; materialise it first (to_empty)")
        if hasattr(parameter, "full_tensor"):
            raise ValueError(f"model={type(model).__name__}: {name} is sharded (DTensor), which is not supported")
    return model
