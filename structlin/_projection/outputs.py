"""What errors of the outputs weigh: the metric G of ||G^(1/2) (W - B)||, and how much of it a
structure takes into one of its cores.

A core that has every output axis can absorb a linear map of the outputs: with G = S S^T, B is
S^-T times the matrix nearest to S^T W, and that is the problem without G. A scale of each output is
always such a map. A mixing of outputs is one along the axes that only this core has: all of G for
LowRank, a block of G for each block of rows of BTT. What is left of G goes to alternating least
squares.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .._structure.structure import Structure
from .axes import contract, group_axes, prime, split_axes, store, take_blocks
from .matrices import identity_like, make_definite

COLUMNS = "*"  # of W: an axis that no structure names
NEGLIGIBLE = 1e-12  # of a unit variance: what is left of G where the core has absorbed all of it


@dataclass(frozen=True)
class OutputMetric:
    """G as S R S^T, for outputs of mean weight 1."""

    structure: Structure
    core: int | None  #: that absorbs S
    block_axes: list[str]  #: the output axes that S does not mix
    mixed_axes: list[str]  #: those that it mixes
    absorbed: Tensor  #: S, `(blocks, mixed, mixed)`
    left: Tensor | None  #: a root of R, `(outputs, outputs)` or their scales; None if R is I

    def whiten(self, w: Tensor) -> Tensor:
        """S^T W, `(out_features, in_features)`."""
        return w if self.core is None else self._map(self.absorbed.mT, w)

    def restore(self, cores: list[Tensor]) -> list[Tensor]:
        """The cores of S^-T B."""
        if self.core is None:
            return cores
        axes = self.structure.cores[self.core].axes
        output_axes = [*self.block_axes, *self.mixed_axes]
        other_axes = [axis for axis in axes if axis not in output_axes]
        groups = self.block_axes, self.mixed_axes, other_axes
        columns = group_axes(cores[self.core], axes, groups, self.structure.sizes)
        solved = torch.linalg.solve_triangular(self.absorbed.mT, columns, upper=True)  # S^-T B
        core = store(self.structure, self.core, solved, [*output_axes, *other_axes])
        return [*cores[: self.core], core, *cores[self.core + 1 :]]

    def _map(self, blocks: Tensor, rows: Tensor) -> Tensor:
        """A block-diagonal matrix times rows, `(out_features, columns)`."""
        sizes = {**self.structure.sizes, COLUMNS: rows.shape[1]}
        # (blocks, mixed, mixed') times (blocks, mixed', columns), in the outputs' own order
        square_axes = [*self.block_axes, *self.mixed_axes, *prime(self.mixed_axes)]
        row_axes = [*self.structure.outputs, COLUMNS]
        mapped = contract(
            row_axes,
            (split_axes(blocks, square_axes, sizes), square_axes),
            (split_axes(rows, row_axes, sizes), prime(row_axes, self.mixed_axes)),
        )
        return mapped.reshape(rows.shape)


def take_metric(structure: Structure, g: Tensor, rows: int) -> OutputMetric:
    """The metric that G, definite, is for a structure with perhaps more outputs than `rows`.

    Args:
        g: `(rows, rows)`, or its diagonal `(rows,)`.
    """
    absorbing = _find_absorbing(structure)  # the number of a core
    outputs = [*structure.outputs]
    is_diagonal = g.ndim == 1
    padding = structure.out_features - rows
    if absorbing is None:
        root = g.sqrt() if is_diagonal else torch.linalg.cholesky(g)
        return OutputMetric(structure, None, outputs, [], g, root)
    if is_diagonal:
        scales = F.pad(g.sqrt(), (0, padding), value=1.0)
        return OutputMetric(structure, absorbing, outputs, [], scales[:, None, None], None)

    # the core can mix outputs along the axes that nothing else has
    axes_elsewhere = {*structure.inputs}
    for n, core in enumerate(structure.cores):
        if n != absorbing:
            axes_elsewhere.update(core.axes)
    mixed_axes = [axis for axis in outputs if axis not in axes_elsewhere]
    block_axes = [axis for axis in outputs if axis in axes_elsewhere]

    # S S^T = the diagonal blocks of G; R = S^-1 G S^-T is what S leaves
    padded = F.pad(g, (0, padding, 0, padding))
    padded.diagonal()[rows:] = 1.0
    blocks = take_blocks(padded, outputs, block_axes, mixed_axes, structure.sizes)
    root_of_blocks = torch.linalg.cholesky(blocks)  # S, (blocks, mixed, mixed)
    metric = OutputMetric(structure, absorbing, block_axes, mixed_axes, root_of_blocks, None)
    if not block_axes:
        return metric
    half = _unmap(metric, padded)  # S^-1 G, (outputs, outputs)
    remaining = _unmap(metric, half.mT)[:rows, :rows]  # R
    if (remaining - identity_like(remaining)).abs().max() <= NEGLIGIBLE:
        return metric
    definite = make_definite(remaining, "output")  # rounding is large where G is singular
    return replace(metric, left=torch.linalg.cholesky(definite))


def weigh(rows: Tensor, root: Tensor | None) -> Tensor:
    """Rows `(tokens, outputs)` times a root of the metric."""
    if root is None:
        return rows
    return rows * root if root.ndim == 1 else rows @ root


def _find_absorbing(structure: Structure) -> int | None:
    """The last core that has every output axis."""
    outputs = set(structure.outputs)
    for n in range(len(structure.cores) - 1, -1, -1):
        if outputs <= set(structure.cores[n].axes):
            return n
    return None


def _unmap(metric: OutputMetric, matrix: Tensor) -> Tensor:
    """S^-1 times a matrix of as many rows as outputs."""
    eye = identity_like(metric.absorbed)
    inverse = torch.linalg.solve_triangular(metric.absorbed, eye, upper=False)
    return metric._map(inverse, matrix)
