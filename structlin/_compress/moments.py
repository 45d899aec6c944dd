"""Means and covariances of a layer's inputs: x in the dense model, z in the compressed one."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .._model.linears import Layer
from ..duality import promote
from .padding import select_rows
from .replay import Call, Replay

ROWS = 8192  # rows whose products are added up in float32
# lam at as many rows as features, in mean variances; it grows as rows get few. By trial:
# all-MiniLM-L6-v2, low-rank of half the parameters, from 0.0001 to 1. The mean cosine of held-out
# sentence vectors is best at 0.1 to 0.3, with 8, 32 and 256 sentences.
RIDGE = 0.3
ROUNDING = 1e-12  # of a variance, relative to the squared mean
WIDTH = 384  # columns of a symmetric product that are formed at a time: nothing above them is


class Moments:
    """Sums over pairs of rows: `count`, means of x and z, covariances of x with z, and of z.

    Each row is `(features,)`. The products are formed in float32 (float64 if the rows are), of rows
    that are shifted by the mean of the first ones, and added up in float64.

    Args:
        centred: covariances around the means; otherwise E[x z^T] and E[z z^T].
        weight: if given, W x is kept in place of x where z is another: `(out_features, features)`.
            It is less work where W makes rows shorter.
    """

    def __init__(self, *, centred: bool, weight: Tensor | None = None) -> None:
        self.count, self.centred, self.paired, self.weight = 0, centred, False, weight
        self._xz, self._zz = _Products(), _Products()
        self._x, self._z = _Mean(centred), _Mean(centred)

    @torch.no_grad()
    def add(self, x: Tensor, z: Tensor | None = None) -> None:
        """Add `(rows, features)` of each; without z it is x, for all rows ever added."""
        z = x if z is None else z
        self.paired = self.paired or z is not x
        with torch.autocast(x.device.type, enabled=False):
            for part_x, part_z in zip(*(torch.split(rows, ROWS) for rows in (x, z)), strict=True):
                if len(part_x):
                    self._add(part_x, part_z)

    def _add(self, x: Tensor, z: Tensor) -> None:
        z = self._z.add(promote(z))
        self._zz.add(z, z)
        self.count += len(z)
        if self.paired:
            x = promote(x)
            x = self._x.add(x if self.weight is None else x @ self.weight.to(x).mT)
            self._xz.add(x, z)

    def require_finite(self, name: str) -> None:
        """Raises: ValueError: an input of the layer of that name is not finite."""
        totals = [self._zz.total, self._xz.total] if self.paired else [self._zz.total]
        if self.count and not all(bool(total.sum().isfinite()) for total in totals):
            raise ValueError(f"batches: the inputs of layer {name!r} are not finite")

    @property
    def mean_z(self) -> Tensor:
        return self._z.value(self.count)

    @property
    def zz(self) -> Tensor:
        """C_zz."""
        total = self._zz.total
        return self._covariance(total.tril() + total.tril(-1).mT, self._z)

    @property
    def ridge(self) -> float:
        """lam, the variance of each feature that the rows are too few to tell of; 0 if z never
        varies."""
        squares = self._zz.total.diagonal() / self.count
        centre = self._z.total / self.count  # as the rows are shifted
        variance = (squares - centre.square() if self.centred else squares).mean().item()
        if variance <= ROUNDING * self.mean_z.square().mean().item():
            return 0.0
        return variance * (RIDGE * len(squares) / self.count)

    def mean_output(self, weight: Tensor) -> Tensor:
        """W E[x], in float64."""
        if self.paired and self.weight is not None:
            return self._x.value(self.count)
        return weight.double() @ (self._x if self.paired else self._z).value(self.count)

    def cross(self, weight: Tensor) -> Tensor:
        """W C_xz, in float64: `(out_features, features)`."""
        if not self.paired:
            return weight.double() @ self.zz
        xz = self._covariance(self._xz.total, self._x)
        return xz if self.weight is not None else weight.double() @ xz

    def _covariance(self, total: Tensor, left: "_Mean") -> Tensor:
        product = total / self.count
        if not self.centred:
            return product
        return product - torch.outer(left.total / self.count, self._z.total / self.count)


def measure_inputs(
    replay: Replay, layers: Sequence[Layer], calls: Iterable[Call]
) -> dict[nn.Module, Moments]:
    """The moments of all inputs that these layers have in these calls; not if they have no row.

    Raises:
        ValueError: an input is not finite; the message names the layer.
    """
    found = {layer.module: Moments(centred=layer.module in replay.biases) for layer in layers}
    for call in calls if layers else ():

        def add(module: nn.Module, x: Tensor, _: Tensor, call: Call = call) -> None:
            found[module].add(select_rows(x, call.masks))

        replay.run(call, found, add)
    for layer in layers:
        found[layer.module].require_finite(layer.name)
    return {module: moments for module, moments in found.items() if moments.count}


class _Mean:
    """The sum of rows, after a shift by the mean of the first ones if that is asked for."""

    def __init__(self, centred: bool) -> None:
        self.total, self._shift, self._centred = torch.zeros(()), torch.zeros(()), centred

    def add(self, rows: Tensor) -> Tensor:
        """Count these, and return them shifted."""
        if not self.total.ndim:
            self.total = torch.zeros_like(rows[0], dtype=torch.float64)
            self._shift = rows.mean(0) if self._centred else torch.zeros_like(rows[0])
        rows = rows - self._shift if self._centred else rows
        self.total += rows.sum(0)
        return rows

    def value(self, count: int) -> Tensor:
        return self.total / count + self._shift


class _Products:
    """The sum of a^T b over rows; of a with itself, its lower triangle and what is beside it."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._recent: Tensor | None = None  # of rows that are not in the total yet
        self._rows = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        if self._rows >= ROWS or (self._recent is not None and self._recent.dtype != a.dtype):
            self._flush()
        if self._recent is None:
            self._recent = a.new_zeros(a.shape[1], b.shape[1])
        width = WIDTH if a is b else b.shape[1]
        for start in range(0, b.shape[1], width):
            top, columns = start if a is b else 0, slice(start, start + width)
            self._recent[top:, columns].addmm_(a[:, top:].mT, b[:, columns])
        self._rows += len(a)

    @property
    def total(self) -> Tensor:
        self._flush()
        return torch.zeros(()) if self._total is None else self._total

    def _flush(self) -> None:
        if self._recent is not None:
            old, new = self._total, self._recent.double()
            self._total, self._recent, self._rows = new if old is None else old + new, None, 0
