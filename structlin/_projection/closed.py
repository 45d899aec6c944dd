"""The closed form: cores cut off a matrix, from left to right.

Read as a tensor over the axes of the signature, W is to be a product of cores. Cut it between the
first core and the others: the axes in both that are also in W number independent problems, the axes
in both that are not in W are summed, so each problem is a matrix (axes of the others) x (axes of
the first core) of a rank of at most the product of the summed sizes. Truncated SVDs give it (Eckart
& Young 1936), and the others are cut in the same way. For two cores this one rule is the SVD of
LowRank, one SVD per block of BTT and Monarch (Dao et al. 2022, arXiv:2204.00595), and the
rearrangement of Kronecker (Van Loan & Pitsianis 1993); for more it is the TT-SVD (Oseledets 2011).
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .._structure.structure import Structure
from .axes import contract, group_axes, prime, split_axes, store, take_blocks
from .matrices import truncate


class Named(NamedTuple):
    """A tensor over named axes, of any grouping of them."""

    tensor: Tensor
    axes: list[str]


class CutOff(NamedTuple):
    """A core, and what the cores after it must give."""

    core: Named
    target: Named


def cut(structure: Structure, w: Tensor, c: Tensor | None) -> list[Tensor]:
    """Truncated SVDs, one core after the other; with the covariance `c` of the inputs each SVD is
    of the matrix times a root of the covariance of the inputs that the core sums."""
    target = _read_matrix(structure, w, c)  # W, and later what is left of it
    cores = []
    for n in range(len(structure.cores) - 1):
        axes = _find_axes(structure, n, target)
        if c is None:
            core, target = _cut_off(structure, axes, target)
        else:
            core, target = _cut_off_weighed(structure, axes, target, c)
        cores.append(store(structure, n, core.tensor, core.axes))
    return [*cores, store(structure, -1, target.tensor, target.axes)]


@dataclass(frozen=True)
class _Axes:
    """The axes of the cut between a core and the cores after it."""

    batch: list[str]  #: of both, and of the target: they number the problems
    rows: list[str]  #: of the target, for the cores after
    columns: list[str]  #: of the target, for the core
    bond: list[str]  #: of both, and not of the target: they are summed, to a rank

    @property
    def problem(self) -> tuple[list[str], list[str], list[str]]:
        return self.batch, self.rows, self.columns

    @property
    def core(self) -> list[str]:
        return [*self.batch, *self.bond, *self.columns]

    @property
    def later(self) -> list[str]:
        return [*self.batch, *self.rows, *self.bond]


def _find_axes(structure: Structure, n: int, target: Named) -> _Axes:
    """The axes of the cut between core n and the cores after it, which together give `target`."""
    core = structure.cores[n]
    read_later: set[str] = set()
    for later_core in structure.cores[n + 1 :]:
        read_later.update(later_core.axes)
    of_both = [axis for axis in target.axes if axis in core.axes]
    return _Axes(
        batch=[axis for axis in of_both if axis in read_later],
        rows=[axis for axis in target.axes if axis not in core.axes],
        columns=[axis for axis in of_both if axis not in read_later],
        bond=[axis for axis in core.axes if axis not in target.axes],
    )


def _cut_off(structure: Structure, axes: _Axes, target: Named) -> CutOff:
    size = structure.sizes
    rank = prod(size[axis] for axis in axes.bond)
    problems = group_axes(target.tensor, target.axes, axes.problem, size)  # (batch, rows, columns)
    left, right = truncate(problems, rank)  # (batch, rows, rank), (batch, rank, columns)
    remainder = Named(split_axes(left, axes.later, size), axes.later)
    return CutOff(Named(right, axes.core), remainder)


def _cut_off_weighed(structure: Structure, axes: _Axes, target: Named, c: Tensor) -> CutOff:
    """The least |(T - left right) L| for each problem T, with L L^T = C of its inputs: the SVD is
    of T L, and its right factor is divided by L."""
    size = structure.sizes
    # Inputs that this core alone reads (`summed`) are whitened by L. C may differ with the values
    # of inputs that later cores read too (`block_axes`).
    inputs = [axis for axis in target.axes if axis in (*axes.batch, *axes.columns)]
    inputs = [axis for axis in inputs if axis in structure.inputs]
    summed = [axis for axis in inputs if axis in axes.columns and axis not in structure.outputs]
    block_axes = [axis for axis in inputs if axis not in summed]
    blocks = take_blocks(c, structure.inputs, block_axes, summed, size)
    root = torch.linalg.cholesky(blocks)  # L, (blocks, summed, summed)
    root_axes = [*block_axes, *summed, *prime(summed)]
    whitened = contract(
        prime(target.axes, summed), target, (split_axes(root, root_axes, size), root_axes)
    )
    whitened_core, remainder = _cut_off(structure, axes, Named(whitened, target.axes))

    # the core is the right factor of T L, times L^-1
    other_axes = [axis for axis in axes.core if axis not in (*block_axes, *summed)]
    groups = (block_axes, other_axes, summed)
    right = group_axes(whitened_core.tensor, axes.core, groups, size)  # (blocks, others, summed)
    solved = torch.linalg.solve_triangular(root, right, upper=False, left=False)
    return CutOff(Named(solved, [*block_axes, *other_axes, *summed]), remainder)


def _read_matrix(structure: Structure, w: Tensor, c: Tensor | None) -> Named:
    """W as a tensor over the axes of the signature.

    An axis on both of its sides makes the structure block diagonal: of W counts its regression on
    the inputs of each block. If no core has that axis, the same block is used again: the regression
    is one over all of its uses.
    """
    size = structure.sizes
    inputs = structure.inputs
    outputs = structure.outputs
    matrix_axes = [*outputs, *inputs]
    on_both_sides = [axis for axis in inputs if axis in outputs]
    if not on_both_sides:
        return Named(split_axes(w, matrix_axes, size), matrix_axes)
    core_axes = _axes_of_cores(structure)
    # W, or W C, summed over the diagonals of the axes on both sides: (blocks, rows, columns)
    blocks = [axis for axis in on_both_sides if axis in core_axes]
    rows = [axis for axis in outputs if axis not in inputs]
    columns = [axis for axis in inputs if axis not in outputs]
    axes = [*blocks, *rows, *columns]
    product = w if c is None else w @ c
    sums = contract(axes, (split_axes(product, matrix_axes, size), matrix_axes))
    if c is None:
        uses = prod(size[axis] for axis in on_both_sides if axis not in core_axes)
        return Named(sums / uses, axes)
    root = torch.linalg.cholesky(take_blocks(c, inputs, blocks, columns, size))
    grouped = group_axes(sums, axes, (blocks, rows, columns), size)
    solved = torch.cholesky_solve(grouped.mT, root).mT  # the normal equations: sums / covariance
    return Named(split_axes(solved, axes, size), axes)


def _axes_of_cores(structure: Structure) -> set[str]:
    axes: set[str] = set()
    for core in structure.cores:
        axes.update(core.axes)
    return axes


def is_optimal(structure: Structure, weighed: bool, padded: bool) -> bool:
    """Whether `cut` gives the global optimum."""
    inputs = set(structure.inputs)
    outputs = set(structure.outputs)
    on_both_sides = inputs & outputs
    unused = on_both_sides - _axes_of_cores(structure)
    if len(structure.cores) == 1:
        return not (padded and unused)
    if len(structure.cores) > 2:
        return False
    first = set(structure.cores[0].axes)
    last = set(structure.cores[1].axes)
    inputs_in_one_core = inputs <= first or inputs <= last
    outputs_in_one_core = outputs <= first or outputs <= last
    # else the numbers that are free are not whole rows and columns of the matrices
    if padded and not (inputs_in_one_core and outputs_in_one_core):
        return False
    first_sums_all_inputs = inputs - unused <= first and last.isdisjoint(inputs - on_both_sides)
    return not weighed or first_sums_all_inputs
