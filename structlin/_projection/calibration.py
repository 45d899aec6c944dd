"""The covariance of the inputs of a model's layers, measured in one pass over a few batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Calibration = Iterable[Any] | Callable[[nn.Module], Any]

ROWS = 8192  # inputs that are turned into float32 at a time


@torch.no_grad()
def covariances(model: nn.Module, layers: Sequence[nn.Module], calibration: Calibration) -> list[Tensor | None]:
    """`X^T X / N` over all inputs X that each of `layers` sees: `(in_features, in_features)`, float64.

    The model runs in eval mode without gradients; every module's mode is restored, and no hook stays, also on an error.

    Args:
        calibration: an iterable of batches (a mapping is passed as keywords, a tuple or list as positions, anything
            else as the one argument), or a function that runs the model that it is given.

    Returns:
        For each layer its covariance; None if no input reached it.

    Raises:
        TypeError: `calibration` is a single batch, or neither iterable nor callable.
        ValueError: there is no batch, no layer saw an input, or an input is not finite.

    >>> layer = nn.Linear(2, 3)
    >>> covariances(layer, [layer], [torch.tensor([[1.0, 0.0], [1.0, 2.0]])])
    [tensor([[1., 1.],
            [1., 2.]], dtype=torch.float64)]
    """
    runs = callable(calibration) and not isinstance(calibration, Iterable)
    if isinstance(calibration, Tensor | Mapping | str) or not (runs or isinstance(calibration, Iterable)):
        raise TypeError(
            f"calibration={type(calibration).__name__} must be an iterable of batches, for example [batch], "
            "or a function that runs the model"
        )
    sums: dict[nn.Module, Tensor] = {}
    counts = dict.fromkeys(layers, 0)

    def collect(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        rows = x.detach().reshape(-1, x.shape[-1])
        if module not in sums:
            sums[module] = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64, device=x.device)
        for part in rows.split(ROWS):
            wide = part if part.dtype == torch.float64 else part.float()
            sums[module] += wide.mT @ wide
        counts[module] += len(rows)

    modes = {module: module.training for module in model.modules()}
    handles = [layer.register_forward_pre_hook(collect, with_kwargs=True) for layer in counts]
    batches = 0
    try:
        model.eval()
        if runs:
            calibration(model)  # type: ignore[operator]
            batches = 1
        else:
            for batch in calibration:  # type: ignore[union-attr]
                run(model, batch)
                batches += 1
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    if not batches:
        raise ValueError("calibration has no batch; a generator can be read only once")
    if not any(counts.values()):
        raise ValueError("calibration: none of the layers to convert saw an input; the model does not call them")
    if any(not total.isfinite().all() for total in sums.values()):
        raise ValueError("calibration: a layer's inputs are not finite")
    return [sums[layer] / counts[layer] if counts[layer] else None for layer in layers]


def run(model: nn.Module, batch: Any) -> None:
    """`model` on a batch: a mapping is passed as keywords, a tuple or list as positions, else as the one argument."""
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)
