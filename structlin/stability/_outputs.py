"""What the modules of a model see and make, in numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._model.calls import first_tensor
from .._model.parameters import named_modules
from ..duality import promote


@contextmanager
def watch_outputs(
    model: nn.Module, see: Callable[[str, Tensor | None, Tensor], None]
) -> Iterator[None]:
    """Calls `see(name, input, output)` for each module whose output no module inside of it made.

    Input and output are the first floating-point tensors of either; an input may be missing.
    """
    previous: list[Tensor] = []  # the last output that was seen, one at most

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            y = first_tensor(output)
            if y is None or not y.numel() or (previous and y is previous[0]):
                return
            previous[:] = [y]
            see(name, first_tensor((args, kwargs)), y)

        return record

    with ExitStack() as hooks:
        for name, module in modules_by_name(model):
            hooks.callback(module.register_forward_hook(hook(name), with_kwargs=True).remove)
        yield


def rms_of(x: Tensor) -> Tensor:
    return promote(x.detach()).square().mean().sqrt()


def rms_over_calls(values: Sequence[Tensor]) -> float:
    """The RMS over several calls of a module from each call's."""
    return torch.stack(list(values)).square().mean().sqrt().item()


def modules_by_name(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Named as without wrappers; the model itself under the name of its class."""
    for name, module in named_modules(model):
        yield name or type(module).__name__, module


def format_number(value: float) -> str:
    """A number with four decimals, or a power of ten where they would not do."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.2e}"
