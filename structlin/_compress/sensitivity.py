"""What an error in each layer does to the model's outputs, and what the layers' inputs are like.

Both are measured on the dense model. They say where `compress` keeps most.
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._model.outputs import find_tensors
from .._model.survey import Layer
from .._progress import Bar
from .calibration import Call, Observed, measure_again, pick_calls, ready
from .moments import Moments
from .padding import select_rows
from .streams import Place, Streams, find_next

Covariances = Generator[tuple[Layer, Tensor | None], None, None]  # layer by layer

_REFUSED = "allocation='error' or 'uniform' is needed: 'sensitivity' takes gradients, but the model"


@torch.no_grad()
def measure_covariances(
    model: nn.Module, layers: Sequence[Layer], seen: Observed, *, progress: bool | None = None
) -> Covariances:
    """Each layer with the covariance of its inputs, in the dense model's order.

    One covariance is held at a time, as far as the calls of the model can be made again; it is that
    of a few of them. A layer that no input reaches, or none that varies, has none.
    """
    done = set[nn.Module]()
    with Bar("measure", len(layers), progress) as bar:

        def show(layer: Layer, moments: Moments | None) -> tuple[Layer, Tensor | None]:
            bar.show(layer.name)
            bar.advance()
            done.add(layer.module)
            return layer, _take_covariance(moments)

        if seen.calls is not None:
            for layer, moments in _measure_in_turn(model, layers, seen, pick_calls(seen.calls)):
                yield show(layer, moments)
        for layer in layers:
            if layer.module not in done:
                yield show(layer, seen.moments.get(layer.module))


def _take_covariance(moments: Moments | None) -> Tensor | None:
    """C_zz; with fewer rows than features C_zz + lam I, or errors would be free that the rows do
    not show."""
    if moments is None or not moments.count or not moments.ridge:
        return None
    covariance = moments.zz
    if moments.count < len(covariance):
        covariance.diagonal().add_(moments.ridge)
    return covariance


def _measure_in_turn(
    model: nn.Module, layers: Sequence[Layer], seen: Observed, calls: Sequence[Call]
) -> Iterator[tuple[Layer, Moments]]:
    """Each layer that these calls reach, with the moments of its inputs."""
    repeated = [layer for layer in layers if layer.module in seen.repeated]
    again = measure_again(model, repeated, calls)
    yield from ((layer, again[layer.module]) for layer in repeated if layer.module in again)
    by_module = {layer.module: layer for layer in layers if layer not in repeated}
    rank = {module: n for n, module in enumerate(seen.order)}
    with ready(model), Streams([Place(m) for m in by_module], len(calls)) as streams:
        masks = {streams.start(partial(call.run, model), call.state): call.masks for call in calls}
        while (module := find_next(masks, rank)) is not None:
            layer = by_module[module]
            moments = Moments(centred=module in seen.biases)
            waiting = {stream: stop for stream in masks if (stop := stream.stop_at(module))}
            for stream, stop in waiting.items():
                moments.add(select_rows(stop.input, masks[stream]))
            moments.require_finite(layer.name)
            yield layer, moments
            for stream in waiting:
                stream.resume()


def measure_sensitivities(
    model: nn.Module, layers: Sequence[Layer], calls: Sequence[Call]
) -> list[float]:
    """The squared relative change of the model's outputs for an error of 1 in each layer.

    The error is E |e|^2, of the layer's output for a token, and is taken to have no direction: with
    v random and g the gradient of <v, output> for the layer's output, what e changes is E |g|^2
    |e|^2 / out_features, added up over tokens. It is right for small errors. Each floating tensor
    in the model's output counts alike; padding does not. A few of the calls are made, each in the
    memory that training needs.

    Raises:
        ValueError: the model turns gradients off; none of its outputs has one, or one is not
            finite.

    >>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    >>> for layer, scale in zip(model, (1.0, 3.0)):
    ...     _ = layer.weight.data.copy_(scale * torch.eye(4))
    >>> from structlin._compress.calibration import observe
    >>> from structlin._model.survey import linear_layers
    >>> layers = linear_layers(model)
    >>> calls = observe(model, layers, [torch.eye(4)]).calls
    >>> first, second = measure_sensitivities(model, layers, calls)
    >>> round(first / second, 4)  # an error of the first is multiplied by 3
    9.0
    """
    totals = dict.fromkeys((layer.module for layer in layers), 0.0)
    generator, picked = torch.Generator().manual_seed(0), pick_calls(calls)
    with ready(model):
        for call in picked:
            for module, square in _take_gradients(model, call, totals, generator):
                totals[module] += square
    return [total / len(picked) for total in totals.values()]


def _take_gradients(
    model: nn.Module, call: Call, modules: Mapping[nn.Module, Any], generator: torch.Generator
) -> Iterator[tuple[nn.Module, float]]:
    """The squared gradient of each of the modules' outputs in this call, per entry of a row."""
    with call.state(), torch.enable_grad():
        result, outputs = _run_and_keep(model, call, [*modules])
        probe = _probe(result, call.masks, generator)
        tensors = [output for _, output in outputs]
        gradients = torch.autograd.grad(probe, tensors, allow_unused=True)
    if not math.isfinite(probe.item()):
        raise ValueError(f"{_REFUSED} returns values that are not finite")
    for (module, _), gradient in zip(outputs, gradients, strict=True):
        if gradient is not None:
            rows = select_rows(gradient, call.masks)
            yield module, rows.float().square().sum(dtype=torch.float64).item() / rows.shape[-1]


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
