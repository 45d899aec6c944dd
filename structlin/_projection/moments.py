"""Means and covariances of a layer's inputs: x in the dense model, z in the compressed one."""

import torch
from torch import Tensor

from ..duality import promote

ROWS = 8192  # rows that are turned into float32 at a time


class Moments:
    """Of pairs of rows: `count`, the means of x and z, and the covariances of x with z, and of z.

    Each row is `(features,)`. The products are formed in float32 (float64 if the rows are), of rows
    that are shifted by the mean of the first ones, and added up in float64.

    Args:
        centred: covariances around the means; otherwise E[x z^T] and E[z z^T].
    """

    def __init__(self, features: int, device: torch.device, *, centred: bool) -> None:
        self.count, self.centred, self.paired = 0, centred, False

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self._xz, self._zz = zeros(features, features), zeros(features, features)
        self._x, self._z = zeros(features), zeros(features)
        self._shifts: tuple[Tensor, ...] | None = None

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
        x, z = promote(x), promote(z)
        if self._shifts is None:
            self._shifts = tuple(
                rows.mean(0) if self.centred else torch.zeros_like(rows[0]) for rows in (x, z)
            )
        x, z = x - self._shifts[0], z - self._shifts[1]
        self._zz += z.mT @ z  # (features, rows) x (rows, features)
        if self.paired:
            self._xz += x.mT @ z
        self._x += x.sum(0)
        self._z += z.sum(0)
        self.count += len(x)

    def is_finite(self) -> bool:
        return bool((self._zz.sum() + self._xz.sum() + self._x.sum()).isfinite())

    @property
    def mean_x(self) -> Tensor:
        return self._mean(self._x, 0)

    @property
    def mean_z(self) -> Tensor:
        return self._mean(self._z, 1)

    @property
    def xz(self) -> Tensor:
        """C_xz: `(features of x, features of z)`."""
        return self._covariance(self._xz, self._x) if self.paired else self.zz

    @property
    def zz(self) -> Tensor:
        """C_zz."""
        return self._covariance(self._zz, self._z)

    def _mean(self, total: Tensor, which: int) -> Tensor:
        assert self._shifts is not None
        return total / self.count + self._shifts[which]

    def _covariance(self, total: Tensor, left: Tensor) -> Tensor:
        product = total / self.count
        if not self.centred:
            return product
        return product - torch.outer(left / self.count, self._z / self.count)
