"""Which rank, or how many blocks, for each layer: the least total error within a budget."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from torch import Tensor

from .._families import Family, Split
from .._structure import Structure
from .solve import project, relative_error

NAMES = {"params": "parameters", "flops": "FLOPs a token"}  # what a budget may be a fraction of


class Size(NamedTuple):
    """One size that a layer could have."""

    family: Family
    structure: Structure  #: the family's, for the layer's widths
    cost: int  #: parameters, or FLOPs a token


@dataclass
class Choice:
    """A size of a layer, the projection to it and its relative error."""

    size: Size
    cores: list[Tensor] = field(repr=False)
    error: float


def check_budget(budget: float | None, of: str) -> None:
    """Raises: ValueError: `budget` is no fraction; `of` is unknown, or given without a budget."""
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if budget is not None and not (number and 0 < budget <= 1):
        raise ValueError(f"budget={budget!r} must be a fraction of the parameters or FLOPs, above 0, at most 1")
    if of not in NAMES or (budget is None and of != "params"):
        known = " or ".join(map(repr, NAMES))
        raise ValueError(f"budget_of={of!r}: it is {known}, and goes with a budget, for example budget=0.5")


def allocate(
    weights: Sequence[Tensor],
    families: Sequence[Family],
    budget: float,
    covariances: Sequence[Tensor | None],
    of: str = "params",
) -> list[Choice]:
    """A size of its family for each weight: least sum of squared relative errors within a budget.

    Greedy: all layers start at the smallest size, then the step that lowers the error most for its
    cost is taken, as long as it fits. Where the error falls ever more slowly with size, as in an
    SVD, that is the optimum.

    Sizes are compared after one sweep (`project` with `sweeps=1`), only the chosen ones are solved
    in full. Where the closed form is optimal, that is the true error. Else it is an upper bound,
    and the search assumes that more sweeps would lower it by a similar factor in every layer; in
    tests/test_budget.py the root mean square of the errors stays within 1.1 (TT: 1.25) of what
    solving every candidate gives. The errors returned are those of the full solver.

    Args:
        weights: `(out_features, in_features)` each.
        families: of each weight: the kind; its `rank` or `blocks` is what is chosen. Ranks go 1, 2,
            3, 4, 6, 8, 12, ...
        budget: fraction of what the dense weights cost together, above 0 and at most 1.
        covariances: of each layer's inputs, or None.
        of: the cost: "params", or "flops" per token. They differ where a structure shares its
            blocks (TT).

    Raises:
        ValueError: `budget` is below what the smallest sizes need; a family has nothing to choose.

    >>> import torch
    >>> from structlin import LowRank
    >>> plain, hard = torch.ones(16, 16), torch.eye(16)
    >>> choices = allocate([plain, hard], 2 * [LowRank(rank=1)], 0.5, [None, None])
    >>> [choice.size.family for choice in choices]
    [LowRank(rank=1), LowRank(rank=6)]
    """
    total = sum(_dense_cost(weight, of) for weight in weights)
    sizes = [_sizes(family, weight, of) for family, weight in zip(families, weights, strict=True)]
    firsts = [next(size) for size in sizes]
    spent = sum(size.cost for size in firsts)
    if spent > budget * total:
        least = math.ceil(1e4 * spent / total) / 1e4
        raise ValueError(
            f"budget={budget} is {int(budget * total):,} {NAMES[of]}; the smallest structures of "
            f"these layers have {spent:,}: budget={least:.4f} or more"
        )

    def choose(n: int, size: Size, **options: int) -> Choice:
        weight, covariance = weights[n], covariances[n]
        cores = project(weight, size.structure, covariance=covariance, **options)
        error = relative_error(weight, size.structure, cores, covariance=covariance)
        return Choice(size, cores, error)

    chosen = [choose(n, first, sweeps=1) for n, first in enumerate(firsts)]
    # a heap: minus what a step gains for its cost, the layer, where the step leads
    steps: list[tuple[float, int, Choice]] = []

    def consider(n: int) -> None:
        """Put the layer's next size that lowers its error on the heap."""
        now = chosen[n]
        for size in sizes[n]:
            if now.error <= 1e-6 or spent + size.cost - now.size.cost > budget * total:
                return
            larger = choose(n, size, sweeps=1)
            gain = (now.error**2 - larger.error**2) / (size.cost - now.size.cost)
            if gain > 0:
                heapq.heappush(steps, (-gain, n, larger))
                return

    for n in range(len(weights)):
        consider(n)
    while steps:
        _, n, larger = heapq.heappop(steps)
        more = larger.size.cost - chosen[n].size.cost
        if spent + more <= budget * total:
            spent += more
            chosen[n] = larger
            consider(n)
    return [choose(n, estimate.size) for n, estimate in enumerate(chosen)]


def _dense_cost(weight: Tensor, of: str) -> int:
    return weight.numel() if of == "params" else 2 * weight.numel()


def _sizes(family: Family, weight: Tensor, of: str) -> Iterator[Size]:
    """The sizes of `family` that fit `weight` and cost no more than it, ascending."""
    out_features, in_features = weight.shape
    found: list[Size] = []
    for candidate in _candidates(family, min(weight.shape)):
        try:
            structure = candidate.structure(in_features, out_features)
        except ValueError:
            continue
        cost = structure.params if of == "params" else structure.flops
        if cost <= _dense_cost(weight, of) and (not found or cost > found[-1].cost):
            found.append(Size(candidate, structure, cost))
    if not found:
        kind = type(family.of if isinstance(family, Split) else family).__name__
        raise ValueError(f"budget: no {kind} of {in_features} -> {out_features} has as few {NAMES[of]} as dense")
    return iter(found)


def _candidates(family: Family, width: int) -> list[Family]:
    """`family` at every rank, or with every number of blocks up to `width`; rising in cost."""
    if isinstance(family, Split):
        return [replace(family, of=candidate) for candidate in _candidates(family.of, width)]
    options = {option.name for option in fields(family)}
    if "rank" in options:
        grid = sorted({base << k for base in (1, 2, 3) for k in range(16)})
        return [replace(family, rank=rank) for rank in grid]  # type: ignore[call-arg]
    if "blocks" in options:
        return [replace(family, blocks=n) for n in range(width, 0, -1)]  # type: ignore[call-arg]
    raise ValueError(f"budget: {type(family).__name__} has neither rank nor blocks to choose")
