"""How far errors travel: what those of a block do to the model's outputs, over what is predicted.

The prediction is of second order, layer by layer. It holds for small errors, and for most blocks of
a model. What the first blocks lose can change more: there it is measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._model.survey import Layer
from .._product import to_dense
from .._projection import project, relative_error
from .._projection.curve import Curve
from .calibration import Call, Observed, pick_calls, ready
from .kept import put_back
from .refine import find_blocks
from .sensitivity import Loss, measure_change, measure_covariances
from .streams import take_input

SHARES = 0.75, 0.4  # of a dense layer's cost that each layer of a block keeps while it is measured
NEAR = 0.25  # blocks within this of what is predicted: after two in turn no more are measured
CALLS = 4  # about, of those that the covariances are measured on

Changes = Mapping[nn.Module, Tensor]  # layer -> B - W


@torch.no_grad()
def correct_curves(
    model: nn.Module,
    layers: Sequence[Layer],
    curves: Sequence[Curve],
    seen: Observed,
    outputs: Mapping[nn.Module, Tensor],
    loss: Loss,
) -> list[Curve]:
    """The curves, their errors times what those of their block do over what they predict.

    Blocks are measured one by one from the first on, until the prediction holds. A loss of the
    user's own may fall, so nothing is measured for it.
    """
    held_by = find_blocks(model, layers)
    if callable(loss) or not seen.calls or len(held_by) < 2:
        return [*curves]
    found = dict(zip((layer.module for layer in layers), curves, strict=True))
    rank = {module: n for n, module in enumerate(seen.order)}
    calls = pick_calls(seen.calls)
    calls = calls[:: max(1, len(calls) // CALLS)]
    blocks = [[each for each in held if each.module in rank] for _, held in held_by.values()]
    near = 0
    for held in sorted(filter(None, blocks), key=lambda held: rank[held[0].module]):
        own = {layer.module: found[layer.module] for layer in held}
        ratios = _measure_ratios(model, held, own, seen, outputs, loss, calls)
        for module, curve in own.items():
            found[module] = _scale(curve, ratios)
        near = near + 1 if all(abs(ratio - 1) <= NEAR for ratio in ratios) else 0
        if near == 2:
            break
    return [found[layer.module] for layer in layers]


def _measure_ratios(
    model: nn.Module,
    layers: Sequence[Layer],
    curves: Mapping[nn.Module, Curve],
    seen: Observed,
    outputs: Mapping[nn.Module, Tensor],
    loss: Loss,
    calls: Sequence[Call],
) -> list[float]:
    """For each of `SHARES`, what errors of these layers do, over what is predicted; 1 where nothing
    is, or where the outputs are not finite with these errors."""
    changes: list[dict[nn.Module, Tensor]] = [{} for _ in SHARES]
    predicted = [0.0 for _ in SHARES]
    with closing(measure_covariances(model, layers, seen, progress=False)) as covariances:
        for layer, covariance in covariances:
            curve, weight = curves[layer.module], layer.matrix.detach()
            metric: dict[str, Any] = {"covariance": covariance}
            metric["output"] = outputs.get(layer.module)
            for n, share in enumerate(SHARES):
                structure = curve.sizes[_pick(curve, share)].structure
                cores = project(weight.double(), structure, **metric, sweeps=0)
                error = relative_error(weight, structure, cores, **metric)
                predicted[n] += curve.whole * error**2
                matrix = to_dense(structure, cores)[: len(weight), : weight.shape[1]]
                changes[n][layer.module] = matrix.to(weight) - weight
    harms = _measure_harms(model, changes, seen, loss, calls)
    return [
        harm / (len(calls) * each) if each > 0 and isfinite(harm) else 1.0
        for harm, each in zip(harms, predicted, strict=True)
    ]


def _pick(curve: Curve, share: float) -> int:
    """The largest size within a share of dense's cost; the smallest, if none is."""
    limit = share * curve.sizes[-1].cost
    return max((n for n, size in enumerate(curve.sizes) if size.cost <= limit), default=0)


def _measure_harms(
    model: nn.Module,
    changes: Sequence[Changes],
    seen: Observed,
    loss: Loss,
    calls: Sequence[Call],
) -> list[float]:
    """What each of these changes does to the outputs, summed over the calls."""
    harms = [0.0 for _ in changes]
    with ready(model), put_back(model):
        for call in calls:
            with call.state():
                before = call.run(model)
            for n, own in enumerate(changes):
                with call.state(), _changed(own, seen):
                    harms[n] += measure_change(before, call.run(model), loss, call.masks)
    return harms


@contextmanager
def _changed(changes: Changes, seen: Observed) -> Iterator[None]:
    """Within it the layers multiply by B; the bias of a layer that has one takes the mean."""

    def hook(change: Tensor, centred: bool) -> Callable[..., Tensor]:
        def add(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            more = F.linear(take_input(args, kwargs), change)
            if centred:
                more = more - more.flatten(0, -2).mean(0)
            return output + more

        return add

    with ExitStack() as stack:
        for module, change in changes.items():
            add = hook(change, module in seen.biases)
            stack.callback(module.register_forward_hook(add, with_kwargs=True).remove)
        yield


def _scale(curve: Curve, ratios: Sequence[float]) -> Curve:
    """The errors times the ratio at each size's share, linear between those measured."""
    points = [(1.0, 1.0), *zip(SHARES, ratios, strict=True)]
    errors = [
        error * _interpolate(points, size.cost / curve.sizes[-1].cost)
        for size, error in zip(curve.sizes, curve.errors, strict=True)
    ]
    for n in reversed(range(len(errors) - 1)):
        errors[n] = max(errors[n : n + 2])  # a larger size has no larger error
    return replace(curve, errors=errors)


def _interpolate(points: Sequence[tuple[float, float]], share: float) -> float:
    """`points` by falling shares; below the last one its value."""
    for (high, first), (low, last) in pairwise(points):
        if share >= low:
            part = (high - share) / (high - low)
            return (1 - part) * first + part * last
    return points[-1][1]
