"""How much each layer keeps: the rank, or number of blocks, that does the model least harm."""

import heapq
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from torch import Tensor, nn

from .._arguments import require_choice
from .._families import Family, Split
from .._model.decide import Decision
from .._model.survey import Layer
from .._projection.curve import COUNTS, Curve, Size, list_sizes, measure_curve
from .calibration import Observed
from .sensitivity import Covariances, Loss, measure_covariances, measure_sensitivities
from .travel import correct_curves

ALLOCATIONS = ("sensitivity", "error")
NEGLIGIBLE_GAIN = 1e-12  # in squared relative error: rounding


@dataclass(frozen=True)
class Share:
    """What `compress` keeps, see there.

    Raises:
        ValueError: `keep` is no fraction; `count` or `allocation` is unknown, or given without
            `keep`.
    """

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
        known = {"count": tuple(COUNTS), "allocation": ALLOCATIONS}
        for name, values in known.items():
            value = getattr(self, name)
            require_choice(name, value, values)
        if keep is None and self.count != "params":
            raise ValueError(f"count={self.count!r} goes with a fraction to keep, say keep=0.5")


Offers = Mapping[nn.Module, Sequence[Size]]  # by the layers whose size is open
Weights = Mapping[nn.Module, Tensor]  # of a squared error of each output of a layer


def list_offers(decisions: Sequence[Decision], share: Share) -> Offers:
    """The sizes that each layer of an open size could have.

    Raises:
        ValueError: a structure has no size to choose, or none that costs less than dense; the
            smallest sizes cost more than what is kept.
    """
    found, without = {}, dict[str, str]()
    for layer, structure in ((d.layer, d.structure) for d in decisions if d.resolved is None):
        if structure is None:
            continue
        if not isinstance(structure, Family):
            raise ValueError(
                f"keep={share.keep}: structure={structure!r} has no size to choose; keep=None "
                "keeps it as it is, and a family such as LowRank(rank=1) has sizes"
            )
        widths = layer.in_features, layer.out_features
        found[layer.module] = list_sizes(structure, *widths, share.count)
        if len(found[layer.module]) == 1:
            kind = type(structure.of if isinstance(structure, Split) else structure).__name__
            without[layer.name] = f"{layer.name!r} ({kind} of {widths[0]} -> {widths[1]})"
    if without:
        raise ValueError(
            f"keep={share.keep}: no size has fewer {COUNTS[share.count]} than dense in these "
            f"layers: {', '.join(without.values())}; exclude={[*without]} leaves them dense"
        )
    if share.keep is not None and found:
        _require_room([*found.values()], share.keep, share.count)
    return found


def weigh_outputs(
    model: nn.Module,
    layers: Sequence[Layer],
    offers: Offers,
    share: Share,
    seen: Observed | None,
    loss: Loss,
) -> Weights:
    """What errors of the layers' outputs weigh, see `measure_sensitivities`; nothing where no
    gradients are asked for, or none can be taken for sizes that are given.

    Raises:
        ValueError: what `measure_sensitivities` raises; sizes are to be chosen by gradients, but
            no call of the model can be made again.
    """
    if seen is None or share.allocation != "sensitivity":
        return {}
    if seen.calls:
        return measure_sensitivities(model, layers, seen.calls, loss)
    if not offers and loss is None:
        return {}
    raise ValueError(
        "allocation='sensitivity' needs calls of the model that can be made again: give "
        "batches in place of a function, or take allocation='error'"
    )


def measure_curves(
    model: nn.Module,
    decisions: Sequence[Decision],
    offers: Offers,
    share: Share,
    seen: Observed | None,
    outputs: Weights,
    loss: Loss,
    *,
    progress: bool | None = None,
) -> list[Curve]:
    """What each size of the layers that have offers would lose, in their order; nothing where no
    errors are asked for. They are the same whatever is kept.

    Args:
        seen: what `observe` returned for all layers that are converted; None: without data.
        outputs: what `weigh_outputs` returned for them, of `loss`.
    """
    if share.keep is None:
        return []
    layers = _find_open(decisions, offers)
    covariances: Covariances = ((layer, None) for layer in layers)
    if seen is not None and layers:
        covariances = measure_covariances(model, layers, seen, progress=progress)
    with closing(covariances):
        found = {
            layer.module: measure_curve(
                layer.matrix, offers[layer.module], covariance, outputs.get(layer.module)
            )
            for layer, covariance in covariances
        }
    curves = [found[layer.module] for layer in layers]
    if outputs and seen is not None and curves:
        curves = correct_curves(model, layers, curves, seen, outputs, loss)
    return curves


def choose_sizes(
    decisions: Sequence[Decision], offers: Offers, share: Share, curves: Sequence[Curve] | None
) -> list[Decision]:
    """The same decisions, with a size for each layer that has offers.

    Args:
        curves: what `measure_curves` returned for them; None: nothing is known, so that each layer
            keeps the same share.
    """
    if share.keep is None or not offers:
        return [*decisions]
    layers = _find_open(decisions, offers)
    if curves is None:
        sizes = share_evenly([offers[layer.module] for layer in layers], share.keep)
    else:
        weights = [1.0] * len(curves)
        if share.allocation == "error":
            weights = [1 / curve.whole if curve.whole else 1.0 for curve in curves]
        sizes = allocate(curves, share.keep, weights)
    chosen = {layer.module: size for layer, size in zip(layers, sizes, strict=True)}
    return [_take_size(decision, chosen.get(decision.layer.module)) for decision in decisions]


def _find_open(decisions: Sequence[Decision], offers: Offers) -> list[Layer]:
    """The layers whose size is open."""
    return [decision.layer for decision in decisions if decision.layer.module in offers]


def _take_size(decision: Decision, size: Size | None) -> Decision:
    if size is None:
        return decision
    if size.stays_dense:
        return replace(decision, structure=None, reason="dense: within what is kept")
    return replace(decision, structure=size.family, resolved=size.structure)


def allocate(curves: Sequence[Curve], keep: float, weights: Sequence[float]) -> list[Size]:
    """A size for each layer: the least sum of weight times squared error within `keep`.

    Greedy on the lower convex hull of each layer's curve: all layers start at the smallest size,
    then the step that lowers the sum most for its cost is taken, as long as it fits; of the first
    that does not, its layer gets the best size that does. The order of the steps does not depend on
    `keep`: a larger one never gives a layer a smaller size, nor a larger sum. The last step of
    a layer leaves it dense, without error, and no other size costs as much as that.

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
    spent = sum(curve.sizes[0].cost for curve in curves)
    paths = [_hull(curve) for curve in curves]
    taken = [0] * len(curves)  # steps of each layer on its path
    steps: list[tuple[float, int]] = []  # a heap: minus what a step gains for its cost, the layer
    found = [0] * len(curves)

    def consider(n: int) -> None:
        """Put the layer's next step on the heap, if it gains anything."""
        if taken[n] + 1 < len(paths[n]) and weights[n] > 0:
            gain, cost = _compare(curves[n], *paths[n][taken[n] : taken[n] + 2])
            heapq.heappush(steps, (-weights[n] * gain / cost, n))

    for n in range(len(curves)):
        consider(n)
    while steps:
        _, n = heapq.heappop(steps)
        here, there = paths[n][taken[n] : taken[n] + 2]
        fit = [
            m for m in range(here, there + 1) if spent + _compare(curves[n], here, m)[1] <= limit
        ]
        found[n] = min(fit, key=lambda m: curves[n].errors[m])
        if there not in fit:
            break
        spent += _compare(curves[n], here, there)[1]
        taken[n] += 1
        consider(n)
    return [curve.sizes[m] for curve, m in zip(curves, found, strict=True)]


def share_evenly(sizes: Sequence[Sequence[Size]], keep: float) -> list[Size]:
    """For each layer the largest of its sizes that costs at most that fraction of the dense one.

    Raises:
        ValueError: the smallest size of a layer costs more.
    """
    found = []
    for own in sizes:
        limit = keep * own[-1].cost
        if own[0].cost > limit:
            least = math.ceil(1e4 * own[0].cost / own[-1].cost) / 1e4
            raise ValueError(
                f"keep={keep}, the same for all layers: the smallest structure of one is "
                f"{own[0].family.label}, which needs {least:.4f} or more"
            )
        found.append(max((size for size in own if size.cost <= limit), key=lambda s: s.cost))
    return found


def _require_room(sizes: Sequence[Sequence[Size]], keep: float, count: str) -> None:
    """Raises: ValueError: the smallest sizes cost more than that share of the largest, dense."""
    spent, total = (sum(own[n].cost for own in sizes) for n in (0, -1))
    if spent > keep * total:
        least = math.ceil(1e4 * spent / total) / 1e4
        raise ValueError(
            f"keep={keep} is {int(keep * total):,} {COUNTS[count]}; the smallest structures of "
            f"these layers have {spent:,}: keep={least:.4f} or more"
        )


def _compare(curve: Curve, here: int, there: int) -> tuple[float, int]:
    """What the larger of two sizes gains in squared error, and what it costs more."""
    gain = curve.errors[here] - curve.errors[there]
    return gain, curve.sizes[there].cost - curve.sizes[here].cost


def _hull(curve: Curve) -> list[int]:
    """Indices of the lower convex hull of error against cost, ascending."""
    path: list[int] = []
    for n in range(len(curve.sizes)):
        while len(path) > 1 and _slope(curve, path[-1], n) >= _slope(curve, *path[-2:]):
            path.pop()
        if not path or curve.errors[path[-1]] - curve.errors[n] > NEGLIGIBLE_GAIN * curve.whole:
            path.append(n)
    return path


def _slope(curve: Curve, here: int, there: int) -> float:
    gain, cost = _compare(curve, here, there)
    return gain / cost
