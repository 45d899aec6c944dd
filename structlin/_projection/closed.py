"""The closed form: cores cut off a matrix, from left to right.

Read as a tensor over the axes of the signature, W is to be a product of cores. Cut it between the
first core and the others: the axes in both that are also in W number independent problems, the axes
in both that are not in W are summed, so each problem is a matrix (axes of the others) x (axes of
the first core) of a rank of at most the product of the summed sizes. Truncated SVDs give it (Eckart
& Young 1936), and the others are cut in the same way. For two cores this one rule is the SVD of
LowRank, one SVD per block of BTT and Monarch (Dao et al. 2022, arXiv:2204.00595), and the
rearrangement of Kronecker (Van Loan & Pitsianis 1993); for more it is the TT-SVD (Oseledets 2011).
"""

from math import prod

import torch
from torch import Tensor

from .._structure.structure import Structure
from .axes import contract, group_axes, prime, split_axes, store, take_blocks
from .matrices import truncate


def cut(structure: Structure, w: Tensor, c: Tensor | None) -> list[Tensor]:
    """Truncated SVDs, one core after the other; with the covariance `c` of the inputs each SVD is
    of the matrix times a root of the covariance of the inputs that the core sums."""
    size, inputs, outputs = structure.sizes, structure.inputs, structure.outputs
    target, axes = _blocks(structure, w, c)  # W, and later what is left of it, over named axes
    cores = []
    for n, core in enumerate(structure.cores[:-1]):
        later = {axis for rest in structure.cores[n + 1 :] for axis in rest.axes}
        batch = [axis for axis in axes if axis in core.axes and axis in later]  # of the problems
        own = [axis for axis in axes if axis in core.axes and axis not in later]  # columns
        rest = [axis for axis in axes if axis not in core.axes]  # rows: of the cores to come
        bond = [axis for axis in core.axes if axis not in axes]  # summed between: the rank
        rank, groups = prod(size[axis] for axis in bond), (batch, rest, own)
        if c is None:
            problems = group_axes(target, axes, groups, size)  # (batch, rest, own)
            left, first = truncate(problems, rank)  # (batch, rest, rank), (batch, rank, own)
            order = [*batch, *bond, *own]
        else:
            # The least |(T - left first) L| for each problem T, with L L^T = C of its inputs: the
            # SVD is of T L, and its right factor is divided by L. Inputs that only this core
            # reads are whitened; C may differ with the values of inputs that later cores read.
            summed = [x for x in own if x in inputs and x not in outputs]
            given = [x for x in axes if x in inputs and x in core.axes and x not in summed]
            blocks = take_blocks(c, inputs, given, summed, size)  # (given, summed, summed)
            root = torch.linalg.cholesky(blocks)
            factor, primed = [*given, *summed, *prime(summed)], prime(axes, summed)
            whitened = contract(primed, (target, axes), (split_axes(root, factor, size), factor))
            problems = group_axes(whitened, axes, groups, size)  # (batch, rest, own)
            left, right = truncate(problems, rank)  # (batch, rest, rank), (batch, rank, own)
            others = [x for x in (*batch, *bond, *own) if x not in (*given, *summed)]
            kept = prime([*batch, *bond, *own], summed)
            rows = group_axes(right, kept, (given, others, prime(summed)), size)
            first = torch.linalg.solve_triangular(root, rows, upper=False, left=False)
            order = [*given, *others, *summed]  # of `first`, (given, others, summed)
        cores.append(store(structure, n, first, order))
        axes = [*batch, *rest, *bond]
        target = split_axes(left, axes, size)  # what the cores to come must give
    return [*cores, store(structure, -1, target, axes)]


def _blocks(structure: Structure, w: Tensor, c: Tensor | None) -> tuple[Tensor, list[str]]:
    """W as a tensor over the axes of the signature.

    An axis on both of its sides makes the structure block diagonal: of W counts its regression on
    the inputs of each block. If no core has that axis, the same block is used again: the regression
    is one over all of its uses.
    """
    size, inputs, outputs = structure.sizes, structure.inputs, structure.outputs
    kept, whole = [axis for axis in inputs if axis in outputs], [*outputs, *inputs]
    if not kept:
        return split_axes(w, whole, size), whole
    used = {axis for core in structure.cores for axis in core.axes}
    # W, or W C, summed over the diagonals of the axes on both sides: (blocks, rows, columns)
    blocks = [axis for axis in kept if axis in used]
    rows = [axis for axis in outputs if axis not in kept]
    columns = [axis for axis in inputs if axis not in kept]
    axes = [*blocks, *rows, *columns]
    sums = contract(axes, (split_axes(w if c is None else w @ c, whole, size), whole))
    if c is None:
        return sums / prod(size[axis] for axis in kept if axis not in used), axes
    root = torch.linalg.cholesky(take_blocks(c, inputs, blocks, columns, size))
    grouped = group_axes(sums, axes, (blocks, rows, columns), size)
    solved = torch.cholesky_solve(grouped.mT, root).mT  # the normal equations: sums / covariance
    return split_axes(solved, axes, size), axes


def is_optimal(structure: Structure, weighed: bool, padded: bool) -> bool:
    """Whether `cut` gives the global optimum."""
    inputs, outputs = structure.inputs, structure.outputs
    kept = {*inputs} & {*outputs}
    unused = kept - {axis for core in structure.cores for axis in core.axes}
    if len(structure.cores) == 1:
        return not (padded and unused)
    if len(structure.cores) > 2:
        return False
    first, last = ({*core.axes} for core in structure.cores)
    one_sided = all({*side} <= first or {*side} <= last for side in (inputs, outputs))
    # the numbers that are free are not whole rows and columns of the matrices
    if padded and not one_sided:
        return False
    return not weighed or ({*inputs} - unused <= first and last.isdisjoint({*inputs} - kept))
