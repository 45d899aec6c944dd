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

from .._structure import Structure
from .axes import contract, group_axes, prime, split_axes, store
from .matrices import take_root, truncate


def cut(structure: Structure, w: Tensor, c: Tensor | None) -> list[Tensor]:
    """Truncated SVDs, one core after the other; with `c` of W L in place of W, L L^T the covariance
    of the inputs that the core sums."""
    size, subscripts, (inputs, outputs) = (
        structure.sizes,
        [core.axes for core in structure.cores],
        (structure.inputs, structure.outputs),
    )
    target, axes = _blocks(structure, w, c)
    cores = []
    for n, core in enumerate(subscripts[:-1]):
        later = {axis for rest in subscripts[n + 1 :] for axis in rest}
        batch = [axis for axis in axes if axis in core and axis in later]
        own = [axis for axis in axes if axis in core and axis not in later]
        rest = [axis for axis in axes if axis not in core]
        bond = [axis for axis in core if axis not in axes]
        rank, kept = prod(size[axis] for axis in bond), [*batch, *bond, *own]
        if c is None:
            left, right = truncate(group_axes(target, axes, (batch, rest, own), size), rank)
            first = right
        else:
            weighed = [axis for axis in own if axis in inputs and axis not in outputs]
            given = [
                axis for axis in axes if axis in inputs and axis in core and axis not in weighed
            ]
            root = take_root(_covariance(structure, c, given, weighed))
            factor, white = [*given, *weighed, *prime(weighed)], prime(axes, weighed)
            whitened = contract(white, (target, axes), (split_axes(root, factor, size), factor))
            left, right = truncate(group_axes(whitened, axes, (batch, rest, own), size), rank)
            others = [axis for axis in kept if axis not in (*given, *weighed)]
            groups = given, others, prime(weighed)
            rows = group_axes(right, prime(kept, weighed), groups, size)
            first = torch.linalg.solve_triangular(root, rows, upper=False, left=False)
            kept = [*given, *others, *weighed]
        cores.append(store(structure, n, first, kept))
        axes = [*batch, *rest, *bond]
        target = split_axes(left, axes, size)
    return [*cores, store(structure, -1, target, axes)]


def _blocks(structure: Structure, w: Tensor, c: Tensor | None) -> tuple[Tensor, list[str]]:
    """W as a tensor over the axes of the signature.

    An axis on both of its sides makes the structure block diagonal: of W counts its regression on
    the inputs of each block. If no core has that axis, the same block is used again: the regression
    is one over all of its uses.
    """
    size, (inputs, outputs) = structure.sizes, (structure.inputs, structure.outputs)
    kept = [axis for axis in inputs if axis in outputs]
    if not kept:
        return split_axes(w, [*outputs, *inputs], size), [*outputs, *inputs]
    used = {axis for core in [core.axes for core in structure.cores] for axis in core}
    blocks = [axis for axis in kept if axis in used]
    rows = [axis for axis in outputs if axis not in kept]
    columns = [axis for axis in inputs if axis not in kept]
    axes = [*blocks, *rows, *columns]
    sums = contract(
        axes,
        (split_axes(w if c is None else w @ c, [*outputs, *inputs], size), [*outputs, *inputs]),
    )
    if c is None:
        return sums / prod(size[axis] for axis in kept if axis not in used), axes
    root = take_root(_covariance(structure, c, blocks, columns))
    solved = torch.cholesky_solve(group_axes(sums, axes, (blocks, rows, columns), size).mT, root).mT
    return split_axes(solved, axes, size), axes


def _covariance(structure: Structure, c: Tensor, given: list[str], axes: list[str]) -> Tensor:
    """The covariance over `axes` for each value of `given`, summed over the other inputs: `(given,
    axes, axes)`."""
    inputs, _ = (structure.inputs, structure.outputs)
    rows = split_axes(c, [*inputs, *inputs], structure.sizes)
    marginal = contract([*given, *axes, *prime(axes)], (rows, [*inputs, *prime(inputs, axes)]))
    n = prod(structure.sizes[axis] for axis in axes)
    return marginal.reshape(-1, n, n)


def is_optimal(structure: Structure, weighed: bool, padded: bool) -> bool:
    """Whether `cut` gives the global optimum."""
    subscripts, inputs, outputs = (
        [core.axes for core in structure.cores],
        structure.inputs,
        structure.outputs,
    )
    kept = {*inputs} & {*outputs}
    unused = kept - {axis for core in subscripts for axis in core}
    if len(subscripts) == 1:
        return not (padded and unused)
    if len(subscripts) > 2:
        return False
    first, last = ({*core} for core in subscripts)
    one_sided = all({*side} <= first or {*side} <= last for side in (inputs, outputs))
    # the numbers that are free are not whole rows and columns of the matrices
    if padded and not one_sided:
        return False
    return not weighed or ({*inputs} - unused <= first and last.isdisjoint({*inputs} - kept))
