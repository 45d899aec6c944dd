"""Which rank, or how many blocks, for each layer: the least total error within a number of parameters or FLOPs."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from .._families import Family, Split
from .solve import project, relative_error

NAMES = {"params": "parameters", "flops": "FLOPs a token"}  # what a budget may be a fraction of


@dataclass
class Choice:
    """One size of one layer: the family at that size, its cost, the projection and its relative error."""

    family: Family
    cost: int  #: parameters, or FLOPs per token
    cores: list[Tensor] = field(repr=False)
    error: float


def allocate(
    weights: Sequence[Tensor],
    families: Sequence[Family],
    budget: float,
    covariances: Sequence[Tensor | None],
    of: str = "params",
) -> list[Choice]:
    """A size of its family for each weight: least sum of squared relative errors, at a cost within `budget` of dense.

    Greedy: all layers start at the smallest size, then the step that lowers the error most for its cost is taken, as
    long as it fits. Where the error falls ever more slowly with size, as in an SVD, that is the optimum.

    Sizes are compared after one sweep (`project` with `sweeps=1`), only the chosen ones are solved in full. Where the
    closed form is optimal, that is the true error. Else it is an upper bound, and the search assumes that more sweeps
    would lower it by a similar factor in every layer; in tests/test_budget.py the root mean square of the errors stays
    within 1.1 (TT: 1.25) of what solving every candidate gives. The errors returned are those of the full solver.

    Args:
        weights: `(out_features, in_features)` each.
        families: of each weight: the kind; its `rank` or `blocks` is what is chosen. Ranks go 1, 2, 3, 4, 6, 8, 12, ...
        budget: fraction of what the dense weights cost together, above 0 and at most 1.
        covariances: of each layer's inputs, or None.
        of: the cost: "params", or "flops" per token. They differ where a structure shares its blocks (TT).

    Raises:
        ValueError: `budget` is out of range or below what the smallest sizes need; the family has nothing to choose;
            `of` is unknown.

    >>> import torch
    >>> from structlin import LowRank
    >>> plain, hard = torch.ones(16, 16), torch.eye(16)
    >>> [choice.family for choice in allocate([plain, hard], 2 * [LowRank(rank=1)], 0.5, [None, None])]
    [LowRank(rank=1), LowRank(rank=6)]
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ValueError(f"budget={budget!r} must be a fraction of the parameters or FLOPs, above 0 and at most 1")
    if of not in NAMES:
        raise ValueError(f"budget_of={of!r} is unknown; there are {', '.join(NAMES)}")
    total = sum(_dense(weight, of) for weight in weights)
    sizes = [_sizes(family, weight, of) for family, weight in zip(families, weights, strict=True)]
    firsts = [next(size) for size in sizes]
    spent = sum(cost for _, cost in firsts)
    if spent > budget * total:
        raise ValueError(
            f"budget={budget} is {int(budget * total):,} {NAMES[of]}; the smallest structures of these "
            f"layers have {spent:,}: budget={math.ceil(1e4 * spent / total) / 1e4:.4f} or more"
        )

    def choice(n: int, size: tuple[Family, int], **options: int) -> Choice:
        cores = project(weights[n], size[0], covariance=covariances[n], **options)
        return Choice(*size, cores, relative_error(weights[n], size[0], cores, covariance=covariances[n]))

    chosen = [choice(n, first, sweeps=1) for n, first in enumerate(firsts)]
    steps: list[tuple[float, int, Choice]] = []  # a heap: minus what a step gains a parameter, layer, where it leads

    def consider(n: int) -> None:
        """Put the layer's next size that lowers its error on the heap."""
        for size in sizes[n]:
            if chosen[n].error <= 1e-6 or spent + size[1] - chosen[n].cost > budget * total:
                return
            larger = choice(n, size, sweeps=1)
            gain = (chosen[n].error ** 2 - larger.error**2) / (larger.cost - chosen[n].cost)
            if gain > 0:
                heapq.heappush(steps, (-gain, n, larger))
                return

    for n in range(len(weights)):
        consider(n)
    while steps:
        _, n, larger = heapq.heappop(steps)
        if spent + larger.cost - chosen[n].cost <= budget * total:
            spent += larger.cost - chosen[n].cost
            chosen[n] = larger
            consider(n)
    return [choice(n, (estimate.family, estimate.cost)) for n, estimate in enumerate(chosen)]


def _dense(weight: Tensor, of: str) -> int:
    return weight.numel() if of == "params" else 2 * weight.numel()


def _sizes(family: Family, weight: Tensor, of: str) -> Iterator[tuple[Family, int]]:
    """The sizes of `family` that fit `weight` and cost no more than it, with their costs, ascending."""
    out_features, in_features = weight.shape
    whole = family
    if isinstance(whole, Split):
        family = whole.of
    options = {option.name for option in fields(family)}
    grid = sorted({base << k for base in (1, 2, 3) for k in range(16)})
    if "rank" in options:
        candidates: list[Family] = [replace(family, rank=rank) for rank in grid]  # type: ignore[call-arg]
    elif "blocks" in options:
        candidates = [replace(family, blocks=n) for n in range(min(weight.shape), 0, -1)]  # type: ignore[call-arg]
    else:
        raise ValueError(f"budget: {type(family).__name__} has neither rank nor blocks to choose")
    if isinstance(whole, Split):
        candidates = [replace(whole, of=candidate) for candidate in candidates]
    found: list[tuple[Family, int]] = []
    for candidate in candidates:
        try:
            structure = candidate.structure(in_features, out_features)
        except ValueError:
            continue
        cost = structure.params if of == "params" else structure.flops
        if cost <= _dense(weight, of) and (not found or cost > found[-1][1]):
            found.append((candidate, cost))
    if not found:
        raise ValueError(
            f"budget: no {type(family).__name__} of {in_features} -> {out_features} has as few {NAMES[of]} as dense"
        )
    return iter(found)
