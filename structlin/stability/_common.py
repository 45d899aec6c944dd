"""What the tools share: seeds, models, numbers and figures."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PathLike = str | os.PathLike[str]


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Draw torch's random numbers from `seed` in the block; afterwards go on where they were."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def build_model(
    build: Callable[[int], nn.Module], width: int, earlier: "WeakSet[nn.Module] | None" = None
) -> nn.Module:
    """`build(width)`, which joins the `earlier` models.

    Raises:
        TypeError: it is no module.
        ValueError: it is one of the earlier ones.
    """
    model = build(width)
    if not isinstance(model, nn.Module):
        raise TypeError(f"build({width}) returned {describe(model)}, not a torch.nn.Module")
    if earlier is not None:
        if model in earlier:
            raise ValueError(f"build({width}) returned a model that it had returned before")
        earlier.add(model)
    return model


def describe(value: object) -> str:
    """Type and shape, for messages."""
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return type(value).__name__ + shape


def format_number(value: float) -> str:
    """Write a number with four decimals, or a power of ten where they would not do."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or not value else f"{value:.2e}"


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: PathLike | None) -> "Figure":
    """`figure`, written to `path` if there is one."""
    if path is not None:
        figure.savefig(path, dpi=90)
    return figure
