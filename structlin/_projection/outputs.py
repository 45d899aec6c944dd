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
    given: list[str]  #: the output axes that S does not mix
    own: list[str]  #: those that it mixes
    absorbed: Tensor  #: S, `(given, own, own)`
    left: Tensor | None  #: a root of R, `(outputs, outputs)` or their scales; None if R is I

    def whiten(self, w: Tensor) -> Tensor:
        """S^T W, `(out_features, in_features)`."""
        return w if self.core is None else self._map(self.absorbed.mT, w)

    def restore(self, cores: list[Tensor]) -> list[Tensor]:
        """The cores of S^-T B."""
        if self.core is None:
            return cores
        axes, given = self.structure.cores[self.core].axes, self.given
        rest = [axis for axis in axes if axis not in (*given, *self.own)]
        groups = given, self.own, rest
        columns = group_axes(cores[self.core], axes, groups, self.structure.sizes)  # as groups
        solved = torch.linalg.solve_triangular(self.absorbed.mT, columns, upper=True)  # S^-T B
        core = store(self.structure, self.core, solved, [*given, *self.own, *rest])
        return [*cores[: self.core], core, *cores[self.core + 1 :]]

    def _map(self, blocks: Tensor, rows: Tensor) -> Tensor:
        """A block-diagonal matrix times rows, `(out_features, columns)`."""
        outputs, given, own = self.structure.outputs, self.given, self.own
        size = {**self.structure.sizes, COLUMNS: rows.shape[1]}
        # (given, own, own') times (given, own', columns), in the outputs' own order
        square, lying = [*given, *own, *prime(own)], [*outputs, COLUMNS]
        factors = split_axes(blocks, square, size), split_axes(rows, lying, size)
        mapped = contract(lying, (factors[0], square), (factors[1], prime(lying, own)))
        return mapped.reshape(rows.shape)


def take_metric(structure: Structure, g: Tensor, rows: int) -> OutputMetric:
    """The metric that G, definite, is for a structure with perhaps more outputs than `rows`.

    Args:
        g: `(rows, rows)`, or its diagonal `(rows,)`.
    """
    core, outputs = _find_absorbing(structure), [*structure.outputs]
    diagonal, padding = g.ndim == 1, structure.out_features - rows
    if core is None:
        root = g.sqrt() if diagonal else torch.linalg.cholesky(g)
        return OutputMetric(structure, None, outputs, [], g, root)
    if diagonal:
        scales = F.pad(g.sqrt(), (0, padding), value=1.0)
        return OutputMetric(structure, core, outputs, [], scales[:, None, None], None)
    others = {axis for n, each in enumerate(structure.cores) if n != core for axis in each.axes}
    own = [axis for axis in outputs if axis not in others and axis not in structure.inputs]
    given = [axis for axis in outputs if axis not in own]
    padded = F.pad(g, (0, padding, 0, padding))
    padded.diagonal()[rows:] = 1.0
    # S S^T = the blocks of G: what one value of `given` has to do with itself
    blocks = take_blocks(padded, outputs, given, own, structure.sizes)  # (given, own, own)
    metric = OutputMetric(structure, core, given, own, torch.linalg.cholesky(blocks), None)
    if not given:
        return metric
    half = _unmap(metric, padded)  # S^-1 G, (outputs, outputs)
    rest = _unmap(metric, half.mT)[:rows, :rows]  # R = S^-1 G S^-T
    if (rest - identity_like(rest)).abs().max() <= NEGLIGIBLE:
        return metric
    definite = make_definite(rest, "output")  # rounding is large where G is singular
    return replace(metric, left=torch.linalg.cholesky(definite))


def weigh(rows: Tensor, root: Tensor | None) -> Tensor:
    """Rows `(tokens, outputs)` times a root of the metric."""
    if root is None:
        return rows
    return rows * root if root.ndim == 1 else rows @ root


def _find_absorbing(structure: Structure) -> int | None:
    """The last core that has every output axis."""
    found = [n for n, core in enumerate(structure.cores) if {*structure.outputs} <= {*core.axes}]
    return found[-1] if found else None


def _unmap(metric: OutputMetric, matrix: Tensor) -> Tensor:
    """S^-1 times a matrix of as many rows as outputs."""
    eye = identity_like(metric.absorbed)
    inverse = torch.linalg.solve_triangular(metric.absorbed, eye, upper=False)
    return metric._map(inverse, matrix)
