"""A dense matrix -> the cores of a structure: the nearest one in closed form where there is one,
and alternating least squares for any structure. Everything is read from the axes, so a structure of
one's own gets what the families get.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import sqrt
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from .._engine.product import to_dense
from .._structure.arguments import MAX_STEPS, Range, checked
from .._structure.families import Family, structure_of
from .._structure.structure import Structure
from .._tensors import require_finite
from .alternating import SWEEPS, search
from .axes import contract, split_axes
from .closed import cut, is_optimal
from .matrices import OF_INPUTS, divide_norms, extend, make_definite
from .outputs import take_metric

OF_OUTPUTS = "g g^T / N of the gradients of a loss at the layer's outputs"
BALANCING = 10  # passes over all pairs of cores


@checked
@torch.no_grad()
def project(
    weight: Tensor,
    structure: Family | Structure,
    *,
    covariance: Tensor | None = None,
    output: Tensor | None = None,
    sweeps: Annotated[int, Range(0, MAX_STEPS)] = SWEEPS,
) -> list[Tensor]:
    """The cores whose matrix B is nearest to `weight`: least ||G^(1/2) (W - B) C^(1/2)||_F.

    With the covariance C = X X^T / N of the layer's inputs this is the root mean square error of
    the outputs, and with G = E[g g^T] of a loss's gradients g at the outputs it is to second order
    what the error does to that loss. Without them C and G are the identity. What is optimal:

    - one core; two cores without covariance; two cores with covariance if the first one sums all
      inputs (LowRank). G changes none of it where a core with all output axes absorbs it: a
      diagonal G for all families but TT and Kronecker, any G for LowRank;
    - otherwise the closed form is the start of alternating least squares, which ends near a local
      minimum and never above its start. Where W is a grid of blocks of a rank (BTT, Monarch) it
      solves block by block, by their SVD. If the cores are no chain (BLAST, say), random starts
      follow, from a generator of its own.

    While small matrices are decomposed, one after the other, torch's number of threads is 1: more
    gain nothing there, and lose a factor of 100 where cores are busy. It is put back, but is the
    process's, also for other threads.

    Where the structure is larger than the weight (padding), the extra inputs and outputs are free:
    they have no error.

    Args:
        weight: `(out_features, in_features)`, real floating point; computed in float32 or better.
        structure: a family such as `BTT(rank=4)`, or a `Structure` at least as large as the weight.
        covariance: `(in_features, in_features)`, symmetric positive semi-definite, possibly
            singular.
        output: G, `(out_features, out_features)`, symmetric positive semi-definite, possibly
            singular; or the diagonal of a diagonal G, `(out_features,)`.
        sweeps: of alternating least squares, at most; it ends by itself. 0: the closed form alone.

    Returns:
        One tensor `(batch, fan_out, fan_in)` per core, of the dtype and on the device of `weight`;
        balanced: whatever can be moved from one core to another by scaling is shared equally.

    Raises:
        ValueError: `weight` is not a matrix, not finite or has no values (meta); the structure does
            not fit it, or has an activation between its cores; `covariance` or `output` has another
            shape, is not finite, not symmetric or not positive semi-definite; `sweeps` is negative.
        TypeError: `weight`, `covariance` or `output` is not real floating point; `structure` is
            neither family nor `Structure`.

    Source: Eckart & Young 1936; Van Loan & Pitsianis 1993; Oseledets 2011; Dao et al. 2022
    (arXiv:2204.00595).

    >>> from structlin import BTT, to_dense
    >>> structure = BTT(rank=2).structure(16, 16)
    >>> target = to_dense(structure, [torch.randn(core.shape) for core in structure.cores])
    >>> torch.allclose(to_dense(structure, project(target, structure)), target, atol=1e-5)
    True
    """
    _check_weight(weight)
    structure = structure_of(structure, weight.shape[1], weight.shape[0])
    structure.require_matrix("project")
    _check_metric("covariance", covariance, weight.shape[1])
    _check_metric("output", output, weight.shape[0])

    # W in float64, to a root mean square of 1
    w = weight.detach().to(torch.float64)
    largest = w.abs().amax().item() or 1.0  # first, or the squares of huge numbers overflow
    w = w / largest
    rms = w.square().mean().sqrt().item() or 1.0
    w = w / rms
    scale = largest * rms

    # the structure may be larger than W: the extra rows and columns are free
    rows, columns = w.shape
    extra_rows = structure.out_features - rows
    extra_columns = structure.in_features - columns
    padded = F.pad(w, (0, extra_columns, 0, extra_rows))

    # what one core absorbs of G is taken into W; the root of what is left goes to the search
    metric = None
    root = None
    if output is not None:
        definite = make_definite(output.to(w), "output", OF_OUTPUTS)
        metric = take_metric(structure, definite, rows)
        padded = metric.whiten(padded)
        root = metric.left

    c = None if covariance is None else make_definite(covariance.to(w))
    cores = cut(structure, padded, None if c is None else extend(c, extra_columns))
    is_padded = extra_columns + extra_rows > 0
    optimal = root is None and is_optimal(structure, c is not None, is_padded)
    if sweeps and not optimal:
        starts = [cores]
        if c is not None:
            starts.append(cut(structure, padded, None))
        target = padded[:rows, :columns]
        cores = search(structure, starts, target, c, weight.dtype, sweeps, root)
    if metric is not None:
        cores = metric.restore(cores)
    scale_of_each = scale ** (1 / len(cores))
    balanced = balance(structure, cores)
    return [(scale_of_each * core).to(weight.dtype).contiguous() for core in balanced]


@torch.no_grad()
def relative_error(
    weight: Tensor,
    structure: Family | Structure,
    cores: Sequence[Tensor],
    *,
    covariance: Tensor | None = None,
    output: Tensor | None = None,
) -> float:
    """||G^1/2 (W - B) C^1/2||_F / ||G^1/2 W C^1/2||_F, with the metrics that are given.

    Computed in float64; 0 if both norms are 0.

    Args:
        weight, structure, covariance, output: as of `project`, which refuses what is none.
        cores: as `project` returns them.

    Raises:
        ValueError, TypeError: the cores do not fit the structure.

    >>> from structlin import Kronecker
    >>> weight = torch.kron(torch.ones(2, 2), torch.randn(3, 3))
    >>> relative_error(weight, Kronecker(), project(weight, Kronecker())) < 1e-5
    True
    """
    structure = structure_of(structure, weight.shape[1], weight.shape[0])
    w = weight.detach().to(torch.float64)
    dense = to_dense(structure, [core.detach().to(w) for core in cores])
    error = w - dense[: w.shape[0], : w.shape[1]]
    return divide_norms(_norm(error, covariance, output), _norm(w, covariance, output))


def _norm(e: Tensor, c: Tensor | None, g: Tensor | None) -> float:
    """||G^1/2 E C^1/2||_F, the root of the trace of (G E) (E C)^T."""
    left = e
    if g is not None and g.ndim == 1:
        left = g.to(e)[:, None] * e
    elif g is not None:
        left = g.to(e) @ e
    right = e if c is None else e @ c.to(e)
    return sqrt(max((left * right).sum().item(), 0.0))


def balance(structure: Structure, cores: list[Tensor]) -> list[Tensor]:
    """The same matrix with the scales shared equally: any two cores have, at each value of the axes
    that they share, the same norm. A part that is zero in one of them stays alive in the other."""
    cores = [*cores]
    sizes = structure.sizes
    axes = [[*core.axes] for core in structure.cores]
    pairs = [*combinations(range(len(cores)), 2)]
    passes = 1 if len(pairs) == 1 else BALANCING
    for m, n in pairs * passes:
        shared = [axis for axis in axes[m] if axis in axes[n]]
        first = _norms(cores[m], axes[m], shared, sizes)
        second = _norms(cores[n], axes[n], shared, sizes)
        alive = torch.minimum(first, second) > torch.finfo(torch.float32).tiny
        ratio = torch.where(alive, (second / first).sqrt(), torch.ones_like(first))
        cores[m] = _scale(cores[m], axes[m], ratio, shared, sizes)
        cores[n] = _scale(cores[n], axes[n], 1 / ratio, shared, sizes)
    return cores


def _norms(
    core: Tensor, axes: Sequence[str], shared: Sequence[str], sizes: Mapping[str, int]
) -> Tensor:
    """The norms of a core's parts at each value of the axes `shared`."""
    return contract(shared, (split_axes(core, axes, sizes).square(), axes)).sqrt()


def _scale(
    core: Tensor,
    axes: Sequence[str],
    factors: Tensor,
    shared: Sequence[str],
    sizes: Mapping[str, int],
) -> Tensor:
    """A core times a factor for each value of the axes `shared`."""
    scaled = contract(axes, (split_axes(core, axes, sizes), axes), (factors, shared))
    return scaled.reshape(core.shape)


def _check_weight(weight: Tensor) -> None:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; "
            "it must be a matrix (out_features, in_features)"
        )
    require_finite("weight", weight)


def _check_metric(name: str, values: Tensor | None, features: int) -> None:
    """Refuse a covariance, or a metric of the outputs, that is none."""
    if values is None:
        return
    may_be_diagonal = name == "output"
    hint = OF_OUTPUTS if may_be_diagonal else OF_INPUTS
    width = "out_features" if may_be_diagonal else "in_features"
    is_diagonal = may_be_diagonal and values.shape == (features,)
    if values.shape != (features, features) and not is_diagonal:
        also = f" or ({width},) = ({features},)" if may_be_diagonal else ""
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; "
            f"it must be ({width}, {width}) = {(features, features)}{also}: {hint}"
        )
    require_finite(name, values)
    if values.ndim == 1:
        if values.min() < 0:
            raise ValueError(f"{name} has {values.min().item():.3g}; a diagonal has none below 0")
        return
    skew = (values - values.mT).abs().max().item()
    if skew > 1e-3 * values.abs().max().item():
        raise ValueError(
            f"{name} differs from its transpose by {skew:.3g}; it must be symmetric: {hint}"
        )
