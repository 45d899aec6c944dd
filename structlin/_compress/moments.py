"""Means and covariances of a layer's inputs: x in the dense model, z in the compressed one."""

from collections.abc import Iterable, Mapping, Sequence

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
        self.count = 0
        self.centred = centred
        self.paired = False  # whether a z that was added is another tensor than its x
        self.weight = weight
        self._xz = _Products()
        self._zz = _Products()
        self._x = _Mean(centred)
        self._z = _Mean(centred)

    @torch.no_grad()
    def add(self, x: Tensor, z: Tensor | None = None) -> None:
        """Add `(rows, features)` of each; without z it is x, for all rows ever added."""
        z = x if z is None else z
        self.paired = self.paired or z is not x
        with torch.autocast(x.device.type, enabled=False):
            for x_rows, z_rows in zip(torch.split(x, ROWS), torch.split(z, ROWS), strict=True):
                if len(x_rows):
                    self._add(x_rows, z_rows)

    def _add(self, x: Tensor, z: Tensor) -> None:
        shifted_z = self._z.add(promote(z))  # (rows, features)
        self._zz.add(shifted_z, shifted_z)
        self.count += len(z)
        if self.paired:
            x = promote(x)
            if self.weight is not None:
                x = x @ self.weight.to(x).mT  # (rows, out_features)
            shifted_x = self._x.add(x)
            self._xz.add(shifted_x, shifted_z)

    def require_finite(self, name: str) -> None:
        """Raises: ValueError: an input of the layer of that name is not finite."""
        totals = [self._zz.total]
        if self.paired:
            totals.append(self._xz.total)
        are_finite = all(bool(total.sum().isfinite()) for total in totals)
        if self.count and not are_finite:
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
        # Var z = E[(z - shift)^2] - (E[z - shift])^2, of each feature: (features,)
        variances = self._zz.total.diagonal() / self.count
        if self.centred:
            mean_of_shifted = self._z.total / self.count
            variances = variances - mean_of_shifted.square()
        mean_variance = variances.mean().item()
        if mean_variance <= ROUNDING * self.mean_z.square().mean().item():
            return 0.0
        return mean_variance * (RIDGE * len(variances) / self.count)

    def mean_output(self, weight: Tensor) -> Tensor:
        """W E[x], in float64."""
        if self.paired and self.weight is not None:
            return self._x.value(self.count)
        mean = self._x if self.paired else self._z
        return weight.double() @ mean.value(self.count)

    def cross(self, weight: Tensor) -> Tensor:
        """W C_xz, in float64: `(out_features, features)`."""
        if not self.paired:
            return weight.double() @ self.zz
        xz = self._covariance(self._xz.total, self._x)
        if self.weight is not None:  # the rows added were W x
            return xz
        return weight.double() @ xz

    def _covariance(self, products: Tensor, left: "_Mean") -> Tensor:
        """E[a z^T] - E[a] E[z]^T, of rows that are shifted, where a is what `left` is the mean of;
        the first term alone unless centred."""
        mean_product = products / self.count
        if not self.centred:
            return mean_product
        return mean_product - torch.outer(left.total / self.count, self._z.total / self.count)


def measure_inputs(
    replay: Replay, layers: Sequence[Layer], calls: Iterable[Call]
) -> dict[nn.Module, Moments]:
    """The moments of all inputs that these layers have in these calls; not if they have no row.

    Raises:
        ValueError: an input is not finite; the message names the layer.
    """
    if not layers:
        return {}
    moments_of = {layer.module: Moments(centred=layer.module in replay.biases) for layer in layers}
    for call in calls:
        _add_inputs(replay, call, moments_of)
    for layer in layers:
        moments_of[layer.module].require_finite(layer.name)
    return {module: moments for module, moments in moments_of.items() if moments.count}


def _add_inputs(replay: Replay, call: Call, moments_of: Mapping[nn.Module, Moments]) -> None:
    """Run the model, and add the inputs of these layers to their moments."""

    def add(module: nn.Module, x: Tensor, _: Tensor) -> None:
        moments_of[module].add(select_rows(x, call.masks))

    replay.run(call, moments_of, add)


class _Mean:
    """The sum of rows, after a shift by the mean of the first ones if that is asked for."""

    def __init__(self, centred: bool) -> None:
        self.total = torch.zeros(())  # (features,), once there are rows
        self._shift = torch.zeros(())
        self._centred = centred

    def add(self, rows: Tensor) -> Tensor:
        """Count these, and return them shifted."""
        if not self.total.ndim:
            self.total = torch.zeros_like(rows[0], dtype=torch.float64)
            self._shift = rows.mean(0) if self._centred else torch.zeros_like(rows[0])
        if self._centred:
            rows = rows - self._shift
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
        has_other_dtype = self._recent is not None and self._recent.dtype != a.dtype
        if self._rows >= ROWS or has_other_dtype:
            self._flush()
        if self._recent is None:
            self._recent = a.new_zeros(a.shape[1], b.shape[1])

        # recent += a^T b: (features of a, rows) by (rows, features of b). With b = a it is
        # symmetric: for each run of columns only the rows from its diagonal block down are formed.
        is_symmetric = a is b
        width = WIDTH if is_symmetric else b.shape[1]
        for start in range(0, b.shape[1], width):
            top = start if is_symmetric else 0
            columns = slice(start, start + width)
            self._recent[top:, columns].addmm_(a[:, top:].mT, b[:, columns])
        self._rows += len(a)

    @property
    def total(self) -> Tensor:
        self._flush()
        return torch.zeros(()) if self._total is None else self._total

    def _flush(self) -> None:
        if self._recent is None:
            return
        recent = self._recent.double()
        self._total = recent if self._total is None else self._total + recent
        self._recent = None
        self._rows = 0
