"""The linear map of a layer, and its norm without its matrix.

Source: Musco & Musco 2015 (arXiv:1504.05477), randomised block Krylov iteration.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .. import _product as contract
from .._linear import StructuredLinear
from .._model.survey import is_conv1d
from .._model.survey import widths as widths_of
from .hooks import named_modules, wide

VECTORS, POWERS, SWEEPS = 8, 2, 32  # of a block; of W^T W in a sweep; at most
TOLERANCE = 1e-2  # a sweep that raises the estimate by less is the last


@dataclass(frozen=True)
class Operator:
    """The linear map of a module, on inputs of one shape; `()` for an embedding, whose inputs are indices."""

    module: nn.Module
    shape: tuple[int, ...]

    def weights(self) -> list[Tensor]:
        """What it multiplies by, now."""
        module = self.module
        if isinstance(module, StructuredLinear):
            return module.effective_cores()
        weight = module.in_proj_weight if isinstance(module, nn.MultiheadAttention) else module.weight
        assert isinstance(weight, Tensor)
        return [weight]

    def multiply(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """`(vectors, *shape)` -> `(vectors, *shape of the output)`. Nothing dense is formed."""
        module = self.module
        if isinstance(module, StructuredLinear):
            padded = F.pad(x, (0, module.padding[0]))
            return contract.apply(module.structure, weights, padded)[..., : module.out_features]
        if isinstance(module, _ConvNd):
            return module._conv_forward(x, weights[0], None)
        return x @ weights[0] if is_conv1d(module) else F.linear(x, weights[0])

    def snapshot(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights()]

    @torch.no_grad()
    def norm(self, before: Sequence[Tensor] | None = None, start: Tensor | None = None) -> tuple[float, Tensor | None]:
        """The RMS->RMS norm of W, or of its change since the snapshot `before`; and what to `start` from next time.

        Of an embedding the l1->RMS norm: the largest RMS of a vector.
        """
        now = [wide(weight) for weight in self.weights()]
        then = None if before is None else [wide(weight) for weight in before]
        if not self.shape:
            vectors = now[0] if then is None else now[0] - then[0]
            return vectors.square().mean(dim=-1).amax().sqrt().item(), None

        def linear(x: Tensor) -> Tensor:
            y = self.multiply(now, x)
            return y if then is None else y - self.multiply(then, x)

        with torch.autocast(now[0].device.type, enabled=False):
            return rms_norm(linear, self.shape, start, like=now[0])


def operators(model: nn.Module, inputs: Mapping[str, torch.Size]) -> dict[str, Operator]:
    """Of the linear layers, convolutions and embeddings of `model`, by name; `inputs` are the shapes that they saw."""
    found = {}
    for name, module in named_modules(model):
        width = widths_of(module)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            found[name] = Operator(module, ())
        elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            found[f"{name}.in_proj"] = Operator(module, (module.embed_dim,))
        elif isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd) and name in inputs:
            found[name] = Operator(module, tuple(inputs[name][-1 - len(module.kernel_size) :]))
        elif width is not None:
            found[name] = Operator(module, width[:1])
    return {name: each for name, each in found.items() if all(w.is_floating_point() for w in each.weights())}


def rms_norm(
    linear: Callable[[Tensor], Tensor], shape: tuple[int, ...], start: Tensor | None, like: Tensor
) -> tuple[float, Tensor | None]:
    """`sqrt(d_in / d_out) |W|_2` of `x -> W x`, from below, and its leading right singular vectors `(vectors, d_in)`.

    Each sweep takes the best singular values within the span of X, W^T W X and (W^T W)^2 X; the next one starts from
    the vectors that it found and a random one.
    """
    random = torch.Generator().manual_seed(0)  # training draws the same numbers with and without

    def drawn(vectors: int) -> Tensor:
        return torch.randn(vectors, math.prod(shape), generator=random).to(like)

    start = drawn(VECTORS) if start is None else torch.cat([start, drawn(1)])
    for _ in range(SWEEPS):
        blocks, known = [_orthonormal(start)], 0.0
        for power in range(POWERS):
            image, normal = _normal(linear, blocks[-1].reshape(-1, *shape))
            known = image.flatten(1).norm(dim=1).amax().item() if power == 0 else known
            blocks.append(_orthonormal(normal.flatten(1)))
        basis = _orthonormal(torch.cat(blocks))
        image = linear(basis.reshape(-1, *shape)).flatten(1)
        if not image.isfinite().all():
            return math.nan, None
        u, s, _ = torch.linalg.svd(image, full_matrices=False)
        vectors = u.mT[: VECTORS - 1] @ basis
        if s[0] <= (1 + TOLERANCE) * known:
            break
        start = torch.cat([vectors, drawn(1)])
    return math.sqrt(basis.shape[1] / image.shape[1]) * s[0].item(), vectors


def _normal(linear: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """`W x` and `W^T W x`, the gradient of |W x|^2 / 2."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = linear(x)
        (gradient,) = torch.autograd.grad(y, x, y.detach())
    return y.detach(), gradient


def _orthonormal(rows: Tensor) -> Tensor:
    columns: Tensor = torch.linalg.qr(rows.mT).Q
    return columns.mT
