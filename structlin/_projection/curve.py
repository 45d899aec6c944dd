"""The sizes that a family offers for a matrix, and what each of them loses of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._engine.product import to_dense
from .._structure.families import Dense, Family
from .._structure.structure import Structure
from .axes import split_axes
from .closed import is_optimal
from .matrices import make_definite
from .solve import project

COUNTS = {"params": "parameters", "flops": "FLOPs per token"}  # what the cost of a size is
POINTS = 8  # sizes of a layer that are projected to; the errors of those between are interpolated
FEW_SWEEPS = 3  # of alternating least squares: by trial errors 5 to 20 % above where it ends
LEAST_FACTOR = 1e-9  # what it leaves of an error, at least: 0 has no logarithm
ALIGNMENT = 8  # numbers that the engines multiply at a time
MIN_ALIGNED_SIZES = 8  # with so many to choose from, larger sizes that are not aligned are left out


class Size(NamedTuple):
    """One size that a layer could have; of the family `Dense`, it stays as it is."""

    family: Family
    structure: Structure  #: the family's, for the layer's widths
    cost: int  #: parameters, or FLOPs per token


@dataclass(frozen=True)
class Curve:
    """The sizes that a layer could have, ascending, the last one dense, and what each would lose.

    `errors` are squares, E |(W - B) x|^2 per token or ||W - B||^2 without covariance, the outputs
    weighed if they were; `whole` is that of nothing at all, E |W x|^2 or ||W||^2.
    """

    sizes: Sequence[Size]
    errors: Sequence[float]
    whole: float


@torch.no_grad()
def measure_curve(
    weight: Tensor,
    sizes: Sequence[Size],
    covariance: Tensor | None = None,
    output: Tensor | None = None,
) -> Curve:
    """The squared error that each of these sizes leaves of a weight.

    The errors are those of the closed form. It is computed at the largest size, and the smaller
    ones are cut from it where their cores are parts of the larger one's (ranks), otherwise each by
    itself. What alternating least squares leaves of them is measured at the smallest size and at
    half of dense's cost.

    Args:
        weight: `(out_features, in_features)`.
        sizes: for its widths, see `list_sizes`.
        covariance: of the layer's inputs.
        output: what a squared error of each output weighs, `(out_features,)`; None: 1.
    """
    matrix = _WeighedMatrix(weight, covariance, output)
    # the errors of the closed form, from the largest size down; the last size is dense
    largest = len(sizes) - 2
    points = {round(largest * k / (POINTS - 1)) for k in range(POINTS)}
    measured = {len(sizes) - 1: 0.0}
    larger: tuple[Structure, list[Tensor]] | None = None  # whose leading parts smaller ones are
    for n in sorted(points, reverse=True):
        structure = sizes[n].structure
        cores = None if larger is None else _shrink(*larger, structure)
        if cores is None:
            cores = matrix.project(structure, sweeps=0)
            larger = structure, cores
        measured[n] = matrix.error(structure, cores)

    # what sweeps leave of these errors, at the smallest size and at half of dense's cost
    half_cost = sizes[-1].cost / 2

    def distance_to_half(n: int) -> float:
        return abs(sizes[n].cost - half_cost)

    half = min(sorted(points, reverse=True), key=distance_to_half)
    factors = {}
    for n in {0, half}:
        structure = sizes[n].structure
        if measured[n] and not matrix.is_optimal(structure):
            cores = matrix.project(structure, sweeps=FEW_SWEEPS)
            factor = matrix.error(structure, cores) / measured[n]
            factors[sizes[n].cost] = max(factor, LEAST_FACTOR)

    errors = []
    for n, size in enumerate(sizes):
        error = _interpolate(sizes, measured, n)
        errors.append(error * _power_law(factors, size.cost))
    return Curve(sizes, errors, matrix.whole)


class _WeighedMatrix:
    """A weight W, and what its errors weigh: ||diag(scales) E L||^2, with L L^T the covariance."""

    def __init__(self, weight: Tensor, covariance: Tensor | None, output: Tensor | None) -> None:
        self.weight = weight.detach().double()
        self.covariance = covariance
        self.output = output
        self.scales = None  # (out_features, 1)
        if output is not None:
            self.scales = output.to(self.weight).sqrt()[:, None]
        self.root = None if covariance is None else _take_root(covariance.to(self.weight))
        self.whole = self._square(self.weight)

    def project(self, structure: Structure, sweeps: int) -> list[Tensor]:
        return project(
            self.weight,
            structure,
            covariance=self.covariance,
            output=self.output,
            sweeps=sweeps,
        )

    def is_optimal(self, structure: Structure) -> bool:
        """Whether no sweep would change the closed form."""
        is_padded = self.weight.shape != (structure.out_features, structure.in_features)
        return is_optimal(structure, self.covariance is not None, is_padded)

    def error(self, structure: Structure, cores: Sequence[Tensor]) -> float:
        """The squared error of these cores."""
        rows, columns = self.weight.shape
        return self._square(self.weight - to_dense(structure, cores)[:rows, :columns])

    def _square(self, error: Tensor) -> float:
        if self.scales is not None:
            error = self.scales * error
        if self.root is not None:
            error = error.float() @ self.root
        return error.square().sum(dtype=torch.float64).item()


def _take_root(c: Tensor) -> Tensor:
    """L in float32, L L^T = C."""
    root: Tensor = torch.linalg.cholesky(make_definite(c))
    return root.mul(c.diagonal().mean().abs().sqrt()).float()


def _shrink(large: Structure, cores: Sequence[Tensor], small: Structure) -> list[Tensor] | None:
    """The first entries of `cores` along the axes that are shorter in `small`; None if the two
    structures differ in more than the lengths of axes between cores."""
    ends = {*large.inputs, *large.outputs}
    alike = (large.signature, large.subscripts) == (small.signature, small.subscripts)
    if not alike or any(large.sizes[axis] != small.sizes[axis] for axis in ends):
        return None
    leading_parts = []
    for n, core in enumerate(small.cores):
        axes = large.cores[n].axes
        tensor = split_axes(cores[n], axes, large.sizes)
        for dim, axis in enumerate(axes):
            tensor = tensor.narrow(dim, 0, small.sizes[axis])
        leading_parts.append(tensor.reshape(core.shape))
    return leading_parts


def _interpolate(sizes: Sequence[Size], measured: dict[int, float], n: int) -> float:
    """The squared error at a size: between those that are measured it falls by the same factor for
    the same cost; to zero it falls linearly."""
    if n in measured:
        return measured[n]
    below = max(m for m in measured if m < n)
    above = min(m for m in measured if m > n)
    cost_below = sizes[below].cost
    share = (sizes[n].cost - cost_below) / (sizes[above].cost - cost_below)
    first = measured[below]
    last = measured[above]
    if first > 0 and last > 0:  # the geometric mean of both, weighed by their distances
        return math.exp((1 - share) * math.log(first) + share * math.log(last))
    return (1 - share) * first + share * last


def _power_law(factors: dict[int, float], cost: int) -> float:
    """Interpolate a factor at `cost` by the power law through two known ones, capped at 1."""
    if len(factors) < 2:
        return next(iter(factors.values()), 1.0)
    low, high = sorted(factors)
    share = math.log(cost / low) / math.log(high / low)
    logarithm = (1 - share) * math.log(factors[low]) + share * math.log(factors[high])
    return min(1.0, math.exp(logarithm))


# ---- sizes ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def list_sizes(family: Family, in_features: int, out_features: int, of: str) -> tuple[Size, ...]:
    """The sizes of `family` that cost less than dense, ascending, and dense; perhaps dense alone.

    Where there are eight or more whose cores have fan-ins and fan-outs in multiples of 8, only
    smaller ones are offered beside them.

    Args:
        of: what the cost is: "params", or "flops" per token. They differ where a structure shares
            its blocks (TT).

    Raises:
        ValueError: the family has nothing to choose.
        TypeError: its method `sizes` gives something else than families.

    >>> from structlin import LowRank
    >>> sizes = list_sizes(LowRank(rank=1), 256, 256, "params")
    >>> [size.family.rank for size in sizes[5:12]]
    [6, 7, 8, 16, 24, 32, 40]
    """
    candidates = family.sizes(in_features, out_features)
    if not candidates:
        raise ValueError(
            f"keep: {family.label} has no sizes to choose from; keep=None keeps it as it is (a "
            f"method `sizes` of the class {type(family).__name__} would name some)"
        )
    sizes: list[Size] = []
    dense = Dense().structure(in_features, out_features)
    limit: int = getattr(dense, of)
    for candidate in candidates:
        if not isinstance(candidate, Family):
            raise TypeError(
                f"{type(family).__name__}.sizes gives {candidate!r}; it must give families, such "
                f"as {family.label}"
            )
        try:
            structure = candidate.structure(in_features, out_features)
        except ValueError:
            continue
        structure.require_matrix("compress")
        cost: int = getattr(structure, of)
        is_larger = not sizes or cost > sizes[-1].cost
        if cost < limit and is_larger:
            sizes.append(Size(candidate, structure, cost))
    aligned = [size for size in sizes if _is_aligned(size.structure)]
    if len(aligned) >= MIN_ALIGNED_SIZES:
        smaller = [size for size in sizes if size.cost < aligned[0].cost]
        sizes = smaller + aligned
    return *sizes, Size(Dense(), dense, limit)


def _is_aligned(structure: Structure) -> bool:
    return not any(core.fan_in % ALIGNMENT or core.fan_out % ALIGNMENT for core in structure.cores)
