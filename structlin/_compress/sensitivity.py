"""What a budget is shared by: the error of each layer at each size, and what such errors do to the
model. Both are measured on the dense model, with calibration data."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._model.outputs import find_tensors
from .._model.survey import Layer, eval_mode
from .._progress import Bar
from .calibration import (
    Call,
    Observed,
    check_finite,
    has_own_bias,
    observe,
    pick_calls,
    plain_calls,
    take_input,
)
from .moments import Moments
from .padding import select_rows
from .streams import Place, Streams

_REFUSED = "budget_by='error' or 'uniform' is needed: by 'effect' takes gradients, but the model"


@torch.no_grad()
def walk(
    model: nn.Module,
    layers: Sequence[Layer],
    seen: Observed,
    function: Callable[[Layer, Tensor | None], Any],
    *,
    progress: bool | None = None,
) -> list[Any]:
    """`function(layer, covariance of its inputs)` for each layer, in the dense model's order.

    One covariance is held at a time, as far as the calls of the model can be made again; it is that
    of a few of them. A layer that no input reaches, or none with a row, has none.
    """
    found: dict[nn.Module, Any] = {}
    with Bar("measure", len(layers), progress) as bar:

        def visit(layer: Layer, moments: Moments | None) -> None:
            bar.show(layer.name)
            covariance = moments.zz if moments is not None and moments.count else None
            found[layer.module] = function(layer, covariance)
            bar.advance()

        if seen.calls is not None:
            for layer, moments in _measure_in_turn(model, layers, seen):
                visit(layer, moments)
        for layer in layers:
            if layer.module not in found:
                visit(layer, seen.moments.get(layer.module))
    return [found[layer.module] for layer in layers]


def _measure_in_turn(
    model: nn.Module, layers: Sequence[Layer], seen: Observed
) -> Iterator[tuple[Layer, Moments]]:
    """Each layer that the calls reach, with the moments of its inputs."""
    assert seen.calls is not None
    calls = pick_calls(seen.calls)
    repeated = [layer for layer in layers if layer.module in seen.repeated]
    if repeated:
        again = observe(model, repeated, partial(_run_all, calls), measured=repeated)
        got_rows = (layer for layer in repeated if layer.module in again.moments)
        yield from ((layer, again.moments[layer.module]) for layer in got_rows)
    by_module = {layer.module: layer for layer in layers if layer not in repeated}
    rank = {module: n for n, module in enumerate(seen.order)}
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.enter_context(plain_calls(model))
        streams = stack.enter_context(Streams([Place(m) for m in by_module], len(calls)))
        running = [
            (streams.start(partial(call.run, model), call.state), call.masks) for call in calls
        ]
        while stops := [stream.stop for stream, _ in running if stream.stop is not None]:
            module = min((s.place.module for s in stops), key=lambda m: rank.get(m, len(rank)))
            layer = by_module[module]
            moments = Moments(centred=has_own_bias(model, module))
            waiting = [
                (stream, stream.stop, masks)
                for stream, masks in running
                if stream.stop is not None and stream.stop.place.module is module
            ]
            for _, stop, masks in waiting:
                moments.add(select_rows(take_input(stop.args, stop.kwargs), masks))
            check_finite(layer.name, moments)
            yield layer, moments
            for stream, *_ in waiting:
                stream.resume()


def _run_all(calls: Sequence[Call], model: nn.Module) -> None:
    for call in calls:
        call.run(model)


class Harms:
    """For each layer: the squared relative change of the model's outputs for an error of 1.

    The error is E |e|^2, of the layer's output for a token, and is taken to have no direction: with
    v random and g the gradient of <v, output> for the layer's output, what e changes is E |g|^2
    |e|^2 / out_features, added up over tokens. It is right for small errors. Each floating tensor
    in the model's output counts alike; padding does not.

    >>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    >>> for layer, scale in zip(model, (1.0, 3.0)):
    ...     _ = layer.weight.data.copy_(scale * torch.eye(4))
    >>> from structlin._model.survey import linear_layers
    >>> from structlin._compress.calibration import observe
    >>> layers = linear_layers(model)
    >>> harms = Harms(layers)
    >>> _ = observe(model, layers, [torch.eye(4)], run_call=harms.add)
    >>> first, second = harms.values()
    >>> round(first / second, 4)  # an error of the first is multiplied by 3
    9.0
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._sums = dict.fromkeys((layer.module for layer in layers), 0.0)
        self.calls = 0  #: that were added
        self._finite = True
        self._generator = torch.Generator().manual_seed(0)

    def add(self, call: Call, model: nn.Module) -> None:
        """Take gradients from this call, for which what training needs is held.

        Raises:
            ValueError: the model turns gradients off; none of its outputs has one.
        """
        self.calls += 1
        with call.state(), torch.enable_grad():
            result, outputs = _run_and_keep(model, call, [*self._sums])
            probe = _probe(result, call.masks, self._generator)
            gradients = torch.autograd.grad(
                probe,
                [output for _, output in outputs],
                allow_unused=True,
            )
        self._finite = self._finite and math.isfinite(probe.item())
        for (module, _), gradient in zip(outputs, gradients, strict=True):
            if gradient is not None:
                rows = select_rows(gradient, call.masks)
                square = rows.float().square().sum(dtype=torch.float64).item()
                self._sums[module] += square / rows.shape[-1]

    def measure(self, model: nn.Module, calls: Sequence[Call]) -> None:
        """Add a few of these calls, in eval mode."""
        with eval_mode(model), plain_calls(model):
            for call in pick_calls(calls):
                self.add(call, model)

    def values(self) -> list[float]:
        """Of the layers, in their order.

        Raises:
            ValueError: an output was not finite.
        """
        if not self._finite:
            raise ValueError(f"{_REFUSED} returns values that are not finite")
        return [total / self.calls for total in self._sums.values()]


def _run_and_keep(
    model: nn.Module, call: Call, modules: Sequence[nn.Module]
) -> tuple[Any, list[tuple[nn.Module, Tensor]]]:
    """What the model returns, and the outputs of the modules on the way, with their gradients."""
    outputs: list[tuple[nn.Module, Tensor]] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise ValueError(f"{_REFUSED} turns gradients off (no_grad or inference_mode)")
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        outputs.append((module, output))
        return output

    handles = [module.register_forward_hook(keep) for module in modules]
    try:
        return call.run(model), outputs
    finally:
        for handle in handles:
            handle.remove()


def _probe(output: Any, masks: list[Tensor], generator: torch.Generator) -> Tensor:
    """The product of each floating tensor in a model's output with a random one of its own
    inverse size, summed."""
    total = torch.zeros(())
    tensors = [tensor for _, tensor in find_tensors(output) if tensor.requires_grad]
    if not tensors:
        raise ValueError(f"{_REFUSED} returns no floating tensor that has a gradient")
    for tensor in tensors:
        rows = select_rows(tensor, masks) if tensor.ndim > 1 else tensor[None]
        v = torch.randn(rows.shape, generator=generator).to(rows)
        size = rows.detach().float().norm().item() or 1.0
        total = total.to(rows.device) + (v * rows).float().sum() / size
    return total
