"""What the modules of a model see and make, for the length of a `with` block."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .._model.parameters import named_modules
from ..duality import promote

See = Callable[[str, Tensor | None, Tensor], None]


@contextmanager
def watch_outputs(model: nn.Module, see: See) -> Iterator[None]:
    """Calls `see(name, input, output)` for each module whose output no module inside of it made.

    Input and output are the first floating-point tensors of either; an input may be missing.
    """
    last: list[Tensor] = []

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            made = first_tensor(output)
            if made is None or any(made is one for one in last):
                return
            last[:] = [made]
            see(name, first_tensor((args, kwargs)), made)

        return record

    handles = []
    try:
        for name, module in modules_by_name(model):
            handles.append(module.register_forward_hook(hook(name), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def modules_by_name(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Named as without wrappers; the model itself under the name of its class."""
    for name, module in named_modules(model):
        yield name or type(module).__name__, module


def first_tensor(values: Any) -> Tensor | None:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return next((tensor for tensor in tensors if tensor.numel()), None)


def rms_of(x: Tensor) -> Tensor:
    return promote(x.detach()).square().mean().sqrt()


def rms_over_calls(values: Sequence[Tensor]) -> float:
    """The RMS over several calls of a module from each call's."""
    return torch.stack(list(values)).square().mean().sqrt().item()
