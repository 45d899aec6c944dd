"""How much each layer keeps: the rank, or number of blocks, that does the model least harm."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .._engine.product import to_dense
from .._model.blocks import blocks_of_layers
from .._model.decide import Decision
from .._model.linears import Layer
from .._projection.curve import COUNTS, Curve, Size, list_sizes, measure_curve
from .._projection.solve import project, relative_error
from .._structure.arguments import require_choice
from .._structure.families import Dense, Family, Split
from .knapsack import choose
from .replay import Replay
from .sensitivity import Covariances, Loss, measure_change, measure_covariances

# Shares of a dense layer's cost that a block's layers keep while the harm is measured. By trial:
# SmolLM2-135M at 0.6 has 20 % less excess perplexity on C4 than without (docs/compress.md).
SHARES = 0.75, 0.4
TOLERANCE = 0.25  # of a ratio: a block within it is as predicted
CHECKED_CALLS = 4  # about, of those that the covariances are measured on


@dataclass(frozen=True)
class Share:
    """What `compress` keeps, see there."""

    keep: float | None
    count: str = "params"
    allocation: str = "sensitivity"

    def __post_init__(self) -> None:
        keep, number = self.keep, isinstance(self.keep, int | float)
        if keep is not None and (not number or isinstance(keep, bool) or not 0 < keep <= 1):
            raise ValueError(
                f"keep={keep!r} must be a fraction above 0 and at most 1, or None, which keeps "
                "the structure's own size"
            )
        require_choice("count", self.count, COUNTS)
        require_choice("allocation", self.allocation, ("sensitivity", "error"))
        if keep is None and self.count != "params":
            raise ValueError(f"count={self.count!r} goes with a fraction to keep, say keep=0.5")


Offers = Sequence[tuple[Layer, Sequence[Size]]]  # of the layers whose size is open
Curves = Mapping[nn.Module, Curve]  # of these layers, in their order
Weights = Mapping[nn.Module, Tensor]  # of a squared error of each output of a layer


def list_offers(decisions: Sequence[Decision], share: Share) -> Offers:
    """The sizes that each layer of an open size could have.

    Raises:
        ValueError: a structure has no size to choose, or none that costs less than dense; the
            smallest sizes cost more than what is kept.
    """
    found, without = list[tuple[Layer, Sequence[Size]]](), dict[str, str]()
    for layer, structure in ((d.layer, d.structure) for d in decisions if d.resolved is None):
        if structure is None:
            continue
        if not isinstance(structure, Family):
            raise ValueError(
                f"keep={share.keep}: structure={structure!r} has no size to choose; keep=None "
                "keeps it as it is, and a family such as LowRank(rank=1) has sizes"
            )
        widths = layer.in_features, layer.out_features
        found.append((layer, list_sizes(structure, *widths, share.count)))
        if len(found[-1][1]) == 1:
            kind = type(structure.of if isinstance(structure, Split) else structure).__name__
            without[layer.name] = f"{layer.name!r} ({kind} of {widths[0]} -> {widths[1]})"
    if without:
        raise ValueError(
            f"keep={share.keep}: no size has fewer {COUNTS[share.count]} than dense in these "
            f"layers: {', '.join(without.values())}; exclude={[*without]} leaves them dense"
        )
    if share.keep is not None and found:
        _require_room([sizes for _, sizes in found], share.keep, share.count)
    return found


def measure_curves(
    replay: Replay | None, offers: Offers, outputs: Weights, loss: Loss, progress: bool | None
) -> Curves:
    """What each of the sizes would lose, layer by layer. It is the same whatever is kept."""
    layers = [layer for layer, _ in offers]
    covariances: Covariances = ((layer, None) for layer in layers)
    if replay is not None and layers:
        covariances = measure_covariances(replay, layers, progress=progress)
    sizes, found = {layer.module: own for layer, own in offers}, dict[nn.Module, Curve]()
    with closing(covariances):
        for layer, covariance in covariances:
            own, output = sizes[layer.module], outputs.get(layer.module)
            if layer.matrix.is_meta:
                found[layer.module] = _guess_curve(own)
            else:
                found[layer.module] = measure_curve(layer.matrix, own, covariance, output)
    curves = {layer.module: found[layer.module] for layer in layers}
    if replay is None or not outputs:
        return curves
    return _correct_curves(replay, offers, curves, outputs, loss)


def _correct_curves(
    replay: Replay, offers: Offers, curves: Curves, outputs: Weights, loss: Loss
) -> Curves:
    """The curves, their errors times what those of their block do to the model's outputs, over what
    they predict.

    The prediction is of second order, layer by layer. It holds for most blocks; what the first ones
    lose can change more. So each is measured, from the first on, until two in turn are as
    predicted. A loss of the user's own may fall, so nothing is measured for it.
    """
    found = dict(curves)
    held_by = blocks_of_layers(replay.model, [layer for layer, _ in offers])
    rank = {module: n for n, module in enumerate(replay.order)}
    blocks = [[each for each in held if each.module in rank] for _, held in held_by.values()]
    predicted = 0  # blocks in turn
    if callable(loss) or len(blocks) < 2:
        return curves
    for held in sorted(filter(None, blocks), key=lambda held: rank[held[0].module]):
        ratios = _measure_ratios(replay, held, found, outputs, loss)
        found |= {each.module: _scale(found[each.module], ratios) for each in held}
        near = all(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
        predicted = predicted + 1 if near else 0
        if predicted == 2:
            break
    return found


def _measure_ratios(
    replay: Replay,
    layers: Sequence[Layer],
    curves: Curves,
    outputs: Weights,
    loss: Loss,
) -> list[float]:
    """For each of `SHARES`, what errors of these layers do, over what is predicted; 1 where nothing
    is, or where the outputs are not finite with these errors."""
    changes: list[dict[nn.Module, Tensor]] = [{} for _ in SHARES]  # B - W
    predicted, harms = ([0.0 for _ in SHARES] for _ in range(2))
    with closing(measure_covariances(replay, layers, progress=False)) as covariances:
        for layer, covariance in covariances:
            curve, weight = curves[layer.module], layer.matrix
            metric: dict[str, Any] = {"covariance": covariance, "output": outputs.get(layer.module)}
            for n, share in enumerate(SHARES):
                fit = [size for size in curve.sizes if size.cost <= share * curve.sizes[-1].cost]
                structure = (fit[-1] if fit else curve.sizes[0]).structure
                cores = project(weight.double(), structure, **metric, sweeps=0)
                error = relative_error(weight, structure, cores, **metric)
                predicted[n] += curve.whole * error**2
                matrix = to_dense(structure, cores)[: len(weight), : weight.shape[1]]  # (out, in)
                changes[n][layer.module] = matrix.to(weight) - weight
    calls = replay.few[:: max(1, len(replay.few) // CHECKED_CALLS)]
    for call in calls:
        before = replay.run(call)
        for n, own in enumerate(changes):

            def change(
                layer: nn.Module, x: Tensor, y: Tensor, own: dict[nn.Module, Tensor] = own
            ) -> Tensor:
                more = F.linear(x, own[layer])  # (B - W) x: (..., out); a bias carries its mean
                return y + (more - more.flatten(0, -2).mean(0) if layer in replay.biases else more)

            harms[n] += measure_change(before, replay.run(call, own, change), loss, call.masks)
    return [
        harm / (len(calls) * each) if each > 0 and math.isfinite(harm) else 1.0
        for harm, each in zip(harms, predicted, strict=True)
    ]


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


def _guess_curve(sizes: Sequence[Size]) -> Curve:
    """The curve of a matrix without values, by which all layers keep the same share: what is lost
    is the square of the share that is left out, for each number of the matrix."""
    dense = sizes[-1].cost
    return Curve(sizes, [dense * (1 - size.cost / dense) ** 2 for size in sizes], 1.0)


def choose_sizes(decisions: Sequence[Decision], share: Share, curves: Curves) -> list[Decision]:
    """The same decisions, with a size for each layer that has a curve."""
    if share.keep is None or not curves:
        return [*decisions]
    weights = [1.0] * len(curves)
    if share.allocation == "error":
        weights = [1 / curve.whole if curve.whole else 1.0 for curve in curves.values()]
    chosen = dict(zip(curves, allocate([*curves.values()], share.keep, weights), strict=True))
    found = []
    for decision in decisions:
        size = chosen.get(decision.layer.module)
        if size is not None and isinstance(size.family, Dense):
            decision = replace(decision, structure=None, reason="dense: within what is kept")
        elif size is not None:
            decision = replace(decision, structure=size.family, resolved=size.structure)
        found.append(decision)
    return found


def allocate(curves: Sequence[Curve], keep: float, weights: Sequence[float]) -> list[Size]:
    """A size for each layer: the least sum of weight times squared error within `keep`, to 1 %.

    See `knapsack.choose`. A larger `keep` never has a sum that is larger by more than 1 %. The last
    size of a layer leaves it dense, without error; no other size costs as much.

    Args:
        curves: of each layer, see `measure_curve`.
        keep: fraction of what the dense layers cost together, at most 1; the smallest sizes fit.
        weights: what a squared error of 1 in each layer does: for the sum of squared relative
            errors, 1 / `whole`.

    >>> import torch
    >>> from structlin import LowRank
    >>> plain, hard = torch.ones(16, 16), torch.eye(16)
    >>> sizes = list_sizes(LowRank(rank=1), 16, 16, "params")
    >>> curves = [measure_curve(weight, sizes) for weight in (plain, hard)]
    >>> [size.family for size in allocate(curves, 0.5, [1.0, 1.0])]
    [LowRank(rank=1), LowRank(rank=7)]
    """
    limit = keep * sum(curve.sizes[-1].cost for curve in curves)
    options = choose(curves, limit, weights).options
    return [curve.sizes[option] for curve, option in zip(curves, options, strict=True)]


def _require_room(sizes: Sequence[Sequence[Size]], keep: float, count: str) -> None:
    spent, total = (sum(own[n].cost for own in sizes) for n in (0, -1))
    if spent > keep * total:
        least = math.ceil(1e4 * spent / total) / 1e4
        raise ValueError(
            f"keep={keep} is {int(keep * total):,} {COUNTS[count]}; the smallest structures of "
            f"these layers have {spent:,}: keep={least:.4f} or more"
        )
