"""How much each layer keeps: the rank, or number of blocks, that does the model least harm."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

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
from .replay import Call, Replay
from .sensitivity import Inputs, Loss, count_rows, list_inputs, measure_change

# Shares of a dense layer's cost that a block's layers keep while the harm is measured. By trial:
# SmolLM2-135M at 0.6, calibrated on 8 k tokens, had 20 % less excess perplexity on C4 than without.
SHARES = 0.75, 0.4
TOLERANCE = 0.25  # of a ratio: a block within it is as predicted
CHECKED_CALLS = 4  # at most about, of those that the covariances are measured on
CHECKED_ROWS = 2048  # of outputs, after which no further call is checked


def check_keep(name: str, keep: Any) -> float | None:
    is_number = isinstance(keep, Real) and not isinstance(keep, bool)
    if keep is not None and not (is_number and 0 < keep <= 1):
        kind = ValueError if is_number else TypeError
        raise kind(
            f"{name}={keep!r} must be a fraction above 0 and at most 1, or None, which keeps the "
            "structure's own size"
        )
    return None if keep is None else float(keep)


@dataclass(frozen=True)
class Share:
    """What `compress` keeps, see there."""

    keep: float | None
    count: str = "params"
    allocation: str = "sensitivity"

    def __post_init__(self) -> None:
        check_keep("keep", self.keep)
        require_choice("count", self.count, COUNTS)
        require_choice("allocation", self.allocation, ("sensitivity", "error"))
        if self.keep is None and self.count != "params":
            raise ValueError(f"count={self.count!r} goes with a fraction to keep, say keep=0.5")


class Offer(NamedTuple):
    """A layer whose size is open, and the sizes that it could have, ascending in cost."""

    layer: Layer
    sizes: Sequence[Size]


Offers = Sequence[Offer]


class Change(NamedTuple):
    """What is added to a layer's output: `x @ matrix.T + bias`."""

    matrix: Tensor  #: B - W: (out, in)
    bias: Tensor | None  #: it takes away the mean of what the matrix adds: (out,)


class Checked(NamedTuple):
    """A call in which harm is measured, and what the dense model returns in it."""

    call: Call
    before: Any


Curves = Mapping[nn.Module, Curve]  # of the layers with an offer, in their order
Weights = Mapping[nn.Module, Tensor]  # of a squared error of each output of a layer


def list_offers(decisions: Sequence[Decision], share: Share) -> Offers:
    """The sizes that each layer of an open size could have.

    Raises:
        ValueError: a structure has no size to choose, or none that costs less than dense; the
            smallest sizes cost more than what is kept.
    """
    offers: list[Offer] = []
    refused: dict[str, str] = {}  # layer without a smaller size -> what it is
    for decision in decisions:
        layer = decision.layer
        structure = decision.structure
        if structure is None or decision.resolved is not None:
            continue
        if not isinstance(structure, Family):
            raise ValueError(
                f"keep={share.keep}: structure={structure!r} has no size to choose; keep=None "
                "keeps it as it is, and a family such as LowRank(rank=1) has sizes"
            )
        sizes = list_sizes(structure, layer.in_features, layer.out_features, share.count)
        if layer.count > 1:  # all matrices of experts get the same
            sizes = tuple(size._replace(cost=size.cost * layer.count) for size in sizes)
        offers.append(Offer(layer, sizes))
        if len(sizes) == 1:  # dense alone
            kind = type(structure.of if isinstance(structure, Split) else structure).__name__
            widths = f"{layer.in_features} -> {layer.out_features}"
            refused[layer.name] = f"{layer.name!r} ({kind} of {widths})"
    if refused:
        raise ValueError(
            f"keep={share.keep}: no size has fewer {COUNTS[share.count]} than dense in these "
            f"layers: {', '.join(refused.values())}; exclude={[*refused]} leaves them dense"
        )
    if share.keep is not None and offers:
        _require_room([offer.sizes for offer in offers], share.keep, share.count)
    return offers


def measure_curves(
    replay: Replay | None, offers: Offers, outputs: Weights, loss: Loss, progress: bool | None
) -> Curves:
    """What each of the sizes would lose, layer by layer. It is the same whatever is kept."""
    layers = [offer.layer for offer in offers]
    all_inputs = (Inputs(layer, None, None) for layer in layers)
    if replay is not None and layers:
        all_inputs = list_inputs(replay, layers, progress=progress)
    sizes_of = {offer.layer.module: offer.sizes for offer in offers}
    curve_of: dict[nn.Module, Curve] = {}  # in the order in which the model calls the layers
    with closing(all_inputs):
        for layer, _, covariance in all_inputs:
            sizes = sizes_of[layer.module]
            if layer.matrix.is_meta:
                curve_of[layer.module] = _guess_curve(sizes)
            else:
                output = outputs.get(layer.module)
                curve_of[layer.module] = measure_curve(layer.matrix, sizes, covariance, output)
    curves = {layer.module: curve_of[layer.module] for layer in layers}
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
    named_blocks = blocks_of_layers(replay.model, [offer.layer for offer in offers]).values()
    if callable(loss) or len(named_blocks) < 2:
        return curves
    rank = {module: n for n, module in enumerate(replay.order)}
    blocks: list[list[Layer]] = []
    for _, layers in named_blocks:
        called = [layer for layer in layers if layer.module in rank]
        if called:
            blocks.append(called)
    blocks.sort(key=lambda layers: rank[layers[0].module])

    corrected = dict(curves)
    checked_calls = _list_checked(replay)
    predicted_in_turn = 0
    for block in blocks:
        ratios = _measure_ratios(replay, block, corrected, outputs, loss, checked_calls)
        for layer in block:
            corrected[layer.module] = _scale(corrected[layer.module], ratios)
        is_predicted = all(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
        predicted_in_turn = predicted_in_turn + 1 if is_predicted else 0
        if predicted_in_turn == 2:
            break
    return corrected


def _list_checked(replay: Replay) -> list[Checked]:
    """Calls that lie evenly spread among the few: the first ones that have `CHECKED_ROWS` rows of
    outputs together, or all."""
    checked_calls: list[Checked] = []
    rows = 0
    for call in replay.few[:: max(1, len(replay.few) // CHECKED_CALLS)]:
        before = replay.run(call)
        checked_calls.append(Checked(call, before))
        rows += count_rows(before, call.masks)
        if rows >= CHECKED_ROWS:
            break
    return checked_calls


def _measure_ratios(
    replay: Replay,
    layers: Sequence[Layer],
    curves: Curves,
    outputs: Weights,
    loss: Loss,
    checked_calls: Sequence[Checked],
) -> list[float]:
    """For each of `SHARES`, what errors of these layers do, over what is predicted; 1 where nothing
    is, or where the outputs are not finite or of other shapes with these errors."""
    predicted_harm = [0.0] * len(SHARES)
    measured_harm = [0.0] * len(SHARES)
    changes: list[dict[nn.Module, Change]] = [{} for _ in SHARES]

    # A layer keeps a share as the structured B nearest to its W. What that does to the outputs is
    # predicted as the layer's own curve does, `whole` times the squared relative error.
    with closing(list_inputs(replay, layers, progress=False)) as all_inputs:
        for layer, mean, covariance in all_inputs:
            curve = curves[layer.module]
            weight = layer.matrix
            carried = mean if layer.module in replay.biases else None  # what a bias makes up for
            metric: dict[str, Any] = {"covariance": covariance, "output": outputs.get(layer.module)}
            for n, share in enumerate(SHARES):
                structure = _largest_within(curve.sizes, share).structure
                cores = project(weight.double(), structure, **metric, sweeps=0)
                error = relative_error(weight, structure, cores, **metric)
                predicted_harm[n] += curve.whole * error**2
                matrix = to_dense(structure, cores)[: len(weight), : weight.shape[1]]
                difference = matrix.to(weight) - weight
                bias = None if carried is None else -(difference @ carried.to(weight))
                changes[n][layer.module] = Change(difference, bias)

    for call, before in checked_calls:
        for n, change_of in enumerate(changes):
            after = _run_changed(replay, call, change_of)
            measured_harm[n] += measure_change(before, after, loss, call.masks)
            del after  # before the next run

    ratios = [1.0] * len(SHARES)
    for n, predicted in enumerate(predicted_harm):
        if predicted > 0 and math.isfinite(measured_harm[n]):
            ratios[n] = measured_harm[n] / (len(checked_calls) * predicted)
    return ratios


def _largest_within(sizes: Sequence[Size], share: float) -> Size:
    """The last size that costs at most this share of dense; the smallest if none does."""
    limit = share * sizes[-1].cost
    fitting = [size for size in sizes if size.cost <= limit]
    return fitting[-1] if fitting else sizes[0]


def _run_changed(replay: Replay, call: Call, change_of: Mapping[nn.Module, Change]) -> Any:
    """What the model returns where the outputs of these layers change so."""

    def add_change(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        change = change_of[layer]
        return y + F.linear(x, change.matrix, change.bias)

    return replay.run(call, change_of, add_change)


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
    for (high_share, high_value), (low_share, low_value) in pairwise(points):
        if share >= low_share:
            weight = (high_share - share) / (high_share - low_share)
            return (1 - weight) * high_value + weight * low_value
    _, last_value = points[-1]
    return last_value


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
    sizes = allocate([*curves.values()], share.keep, weights)
    size_of = dict(zip(curves, sizes, strict=True))
    sized_decisions = []
    for decision in decisions:
        size = size_of.get(decision.layer.module)
        if size is not None and isinstance(size.family, Dense):
            decision = replace(decision, structure=None, reason="dense: within what is kept")
        elif size is not None:
            decision = replace(decision, structure=size.family, resolved=size.structure)
        sized_decisions.append(decision)
    return sized_decisions


def allocate(curves: Sequence[Curve], keep: float, weights: Sequence[float]) -> list[Size]:
    """A size for each layer: the least sum of weight times squared error within `keep`, to 1 %.

    See `knapsack.choose`, also for where 1 % does not hold. A larger `keep` never has a sum that is
    larger by more. The last size of a layer leaves it dense, without error; no other size costs as
    much.

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
    smallest = sum(sizes_of_layer[0].cost for sizes_of_layer in sizes)
    dense = sum(sizes_of_layer[-1].cost for sizes_of_layer in sizes)
    if smallest > keep * dense:
        smallest_keep = math.ceil(1e4 * smallest / dense) / 1e4
        raise ValueError(
            f"keep={keep} is {int(keep * dense):,} {COUNTS[count]}; the smallest structures of "
            f"these layers have {smallest:,}: keep={smallest_keep:.4f} or more"
        )
