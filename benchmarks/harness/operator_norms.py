"""The linear map of a layer, and its norm without its matrix.

Source: Musco & Musco 2015 (arXiv:1504.05477), randomised block Krylov iteration.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from structlin._engine.product import apply
from structlin._layer.experts import StructuredExperts
from structlin._layer.linear import StructuredLinear
from structlin._model.parameters import Weight, weights_of
from structlin.duality import promote
from structlin.optim._stacks import to_matrices
from structlin.stability._outputs import modules_by_name

VECTORS = 8  # of a block
POWERS = 2  # of W^T W in a sweep
SWEEPS = 32  # at most
TOLERANCE = 1e-2  # a sweep that raises the estimate by less is the last


class Norm(NamedTuple):
    """The norm of an operator."""

    value: float
    vectors: Tensor | None  #: its leading right singular vectors, where the next search starts


@dataclass(frozen=True)
class Operator:
    """The linear map of a layer, on inputs of one shape, which is `()` for an embedding."""

    module: nn.Module
    attribute: str  #: of the module: what it multiplies by
    weight: Weight
    shape: tuple[int, ...]

    def weights(self) -> list[Tensor]:
        """What it multiplies by, now."""
        if isinstance(self.module, StructuredLinear):
            return self.module.effective_cores()
        weight = getattr(self.module, self.attribute)
        assert isinstance(weight, Tensor)
        return [weight]

    def multiply(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """`(vectors, *shape)` -> `(vectors, *shape of the output)`. Nothing dense is formed."""
        module = self.module
        if isinstance(module, StructuredLinear):
            padded = F.pad(x, (0, module.padding[0]))  # (vectors, structure.in_features)
            return apply(module.structure, weights, padded)[..., : module.out_features]
        if isinstance(module, _ConvNd):
            return module._conv_forward(x, weights[0], None)
        if len(self.shape) > 1:  # experts side by side, the norm of which is the largest of theirs
            matrices = to_matrices(self.weight, weights[0])  # (batch, m, n)
            return torch.einsum("bmn,vbn->vbm", matrices, x)
        return x @ weights[0] if self.weight.stored == "n m" else F.linear(x, weights[0])

    @torch.no_grad()
    def norm(self, before: Sequence[Tensor] | None = None, start: Tensor | None = None) -> Norm:
        """The RMS->RMS norm of W, or of its change since `before`.

        The norm of an embedding is l1->RMS: the largest RMS of a vector.

        Args:
            start: the vectors of an earlier `Norm`.
        """
        now = [promote(weight.detach()) for weight in self.weights()]
        then = None if before is None else [promote(weight.detach()) for weight in before]
        if not self.shape:
            vectors = now[0] if then is None else now[0] - then[0]
            return Norm(vectors.square().mean(dim=-1).amax().sqrt().item(), None)

        def linear(x: Tensor) -> Tensor:
            y = self.multiply(now, x)
            return y if then is None else y - self.multiply(then, x)

        with torch.autocast(now[0].device.type, enabled=False):
            return rms_norm(linear, self.shape, start, like=now[0])


def operators(model: nn.Module, inputs: Mapping[str, torch.Size]) -> dict[str, Operator]:
    """The linear maps of the layers of `model`, by name; `inputs` are the shapes that they saw."""
    by_name = {}
    for layer, module in modules_by_name(model):
        for attribute, weight in weights_of(module).items():
            shape = _input_shape(module, attribute, weight, inputs.get(layer))
            if shape is None or weight.core:  # the first core stands for all of them
                continue
            name = layer
            if attribute.endswith("_weight"):  # one of several in its layer
                name = f"{layer}.{attribute.removesuffix('_weight')}"
            elif len(shape) > 1 and not isinstance(module, _ConvNd):
                name = f"{layer}.{attribute}"
            operator = Operator(module, attribute, weight, shape)
            if all(tensor.is_floating_point() for tensor in operator.weights()):
                by_name[name] = operator
    return by_name


def _input_shape(
    module: nn.Module, attribute: str, weight: Weight, seen: torch.Size | None
) -> tuple[int, ...] | None:
    """Shape of one input of a layer; None where it is not known or there is no linear map."""
    if isinstance(module, StructuredExperts):
        return None  # each expert has its own tokens
    if isinstance(module, StructuredLinear):
        if module.structure.between is not None:
            return None
        return (module.in_features,) if weight.kind == "matrix" else None
    if isinstance(module, _ConvNd):
        if seen is None or isinstance(module, _ConvTransposeNd):
            return None
        return tuple(seen[-1 - len(module.kernel_size) :])  # (channels, *image)
    if weight.kind == "embedding":
        return ()
    if weight.is_in_blocks or weight.fused > 1:
        matrices = getattr(module, attribute).numel() // (weight.fan_out * weight.fan_in)
        return (matrices, weight.fan_in)
    return (weight.fan_in,)


def rms_norm(
    linear: Callable[[Tensor], Tensor], shape: tuple[int, ...], start: Tensor | None, like: Tensor
) -> Norm:
    """`sqrt(d_in / d_out) |W|_2` of `x -> W x`, from below."""
    random = torch.Generator().manual_seed(0)  # training draws the same numbers with and without

    def draw(vectors: int) -> Tensor:
        return torch.randn(vectors, math.prod(shape), generator=random).to(like)

    # Vectors are rows, (vectors, d_in). A sweep spans the Krylov space of X, W^T W X and
    # (W^T W)^2 X, and takes the best singular values of W within it, by an SVD of W on a basis of
    # it. The next sweep starts from the singular vectors of this one and a random one.
    start = draw(VECTORS) if start is None else torch.cat([start, draw(1)])
    for _ in range(SWEEPS):
        blocks = [_orthonormalise(start)]
        estimate = 0.0
        for power in range(POWERS):
            image, normal = _apply_normal(linear, blocks[-1].reshape(-1, *shape))
            if power == 0:
                estimate = image.flatten(1).norm(dim=1).amax().item()
            blocks.append(_orthonormalise(normal.flatten(1)))
        basis = _orthonormalise(torch.cat(blocks))
        image = linear(basis.reshape(-1, *shape)).flatten(1)
        if not image.isfinite().all():
            return Norm(math.nan, None)
        u, s, _ = torch.linalg.svd(image, full_matrices=False)
        vectors = u.mT[: VECTORS - 1] @ basis
        if s[0] <= (1 + TOLERANCE) * estimate:
            break
        start = torch.cat([vectors, draw(1)])
    return Norm(math.sqrt(basis.shape[1] / image.shape[1]) * s[0].item(), vectors)


class _Images(NamedTuple):
    image: Tensor  #: W x
    normal: Tensor  #: W^T W x


def _apply_normal(linear: Callable[[Tensor], Tensor], x: Tensor) -> _Images:
    """`W^T W x` is the gradient of |W x|^2 / 2."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = linear(x)
        (gradient,) = torch.autograd.grad(y, x, y.detach())
    return _Images(y.detach(), gradient)


def _orthonormalise(rows: Tensor) -> Tensor:
    columns: Tensor = torch.linalg.qr(rows.mT).Q
    return columns.mT
