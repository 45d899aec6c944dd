"""The covariance of the inputs of a model's layers, measured in one pass over a few batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._model.survey import eval_mode, run

Calibration = Iterable[Any] | Callable[[nn.Module], Any]

ROWS = 8192  # inputs that are turned into float32 at a time


@torch.no_grad()
def measure_covariances(
    model: nn.Module, layers: Sequence[nn.Module], calibration: Calibration
) -> list[Tensor | None]:
    """`X^T X / N` over all inputs X of each layer: `(in_features, in_features)`, float64.

    The model runs in eval mode without gradients; every module's mode is restored, and no hook
    stays, also on an error.

    Args:
        calibration: an iterable of batches (a mapping is passed as keywords, a tuple or list as
            positions, anything else as the one argument), or a function that runs the model that
            it is given.

    Returns:
        For each layer its covariance; None if no input reached it.

    Raises:
        TypeError: `calibration` is a single batch, or neither iterable nor callable.
        ValueError: there is no batch, no layer saw an input, or an input is not finite.

    >>> layer = nn.Linear(2, 3)
    >>> measure_covariances(layer, [layer], [torch.tensor([[1.0, 0.0], [1.0, 2.0]])])
    [tensor([[1., 1.],
            [1., 2.]], dtype=torch.float64)]
    """
    _check(calibration)
    sums: dict[nn.Module, Tensor] = {}
    counts = dict.fromkeys(layers, 0)
    with eval_mode(model), _add_up(counts, sums):
        batches = _run_all(model, calibration)
    if not batches:
        raise ValueError("calibration has no batch; a generator can be read only once")
    if not any(counts.values()):
        raise ValueError(
            "calibration: none of the layers to convert saw an input; the model does not call them"
        )
    if any(not total.isfinite().all() for total in sums.values()):
        raise ValueError("calibration: a layer's inputs are not finite")
    return [sums[layer] / counts[layer] if counts[layer] else None for layer in layers]


def _check(calibration: Calibration) -> None:
    batch = isinstance(calibration, Tensor | Mapping | str)
    if batch or not (callable(calibration) or isinstance(calibration, Iterable)):
        raise TypeError(
            f"calibration={type(calibration).__name__} must be an iterable of batches, for example "
            "[batch], or a function that runs the model"
        )


def _run_all(model: nn.Module, calibration: Calibration) -> int:
    """Run the model on every batch; the number of batches."""
    if not isinstance(calibration, Iterable):
        calibration(model)
        return 1
    batches = 0
    for batch in calibration:
        run(model, batch)
        batches += 1
    return batches


@contextmanager
def _add_up(counts: dict[nn.Module, int], sums: dict[nn.Module, Tensor]) -> Iterator[None]:
    """While it is open: count the inputs of each layer of `counts`, and add X^T X to `sums`."""

    def collect(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        width = x.shape[-1]
        rows = x.detach().reshape(-1, width)  # (..., in_features) -> (N, in_features)
        if module not in sums:
            sums[module] = torch.zeros(width, width, dtype=torch.float64, device=x.device)
        for part in rows.split(ROWS):
            wide = part if part.dtype == torch.float64 else part.float()
            sums[module] += wide.mT @ wide  # (in_features, N) x (N, in_features)
        counts[module] += len(rows)

    handles = [layer.register_forward_pre_hook(collect, with_kwargs=True) for layer in counts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
