"""int8 cores: structured layers in a quarter of their bytes, for inference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _product
from ._arguments import check_cores, check_input, checked
from ._kernels import op
from ._linear import StructuredLinear, uninitialised
from ._model.kinds import carry_attributes
from ._model.linears import linear_layers, swap
from ._model.obstacles import find_reason_to_keep, require_replaceable
from ._model.select import Patterns, find_first, find_rules
from ._state import is_guarded

LEAST, LARGEST = -128, 127


class QuantizedLinear(StructuredLinear):
    """A `StructuredLinear` with int8 cores and a scale for each of their rows; see `quantize`.

    Attributes:
        cores: one frozen int8 parameter `(batch, fan_out, fan_in)` per core.
        scales: one frozen parameter `(batch, fan_out, 1)` per core, in float32 at least: in float16
            the scale of a small row would lose its digits. The layer multiplies by `core * scale`.
        dtype: that of x where the scales are float32. It follows `layer.to(dtype)`, as they do not.

    Raises:
        ValueError: what `StructuredLinear` raises; asked to start afresh (`reset_parameters`).
    """

    def __init__(
        self, *args: Any, device: torch.device | str | None = None, **options: Any
    ) -> None:
        super().__init__(*args, device=device, **options)
        self.dtype = super().compute_dtype
        rounded = [round_rows(core.detach()) for core in super().effective_cores()]
        self.gains = None
        self.cores = nn.ParameterList(nn.Parameter(core, False) for core, _ in rounded)
        self.scales = nn.ParameterList(nn.Parameter(scale, False) for _, scale in rounded)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x W^T + bias`; the engine reads the integers themselves where nothing asks for a
        gradient."""
        scales: Any = self._modules["scales"]
        scales = list(scales._parameters.values())
        check_input(x, self.in_features, scales[0], self.compute_dtype)
        program, tokens = self._program, x.numel() // self.in_features
        trains = x.requires_grad or (bias is not None and bias.requires_grad)
        plain = _product.forms_matrix(self.structure, tokens)
        plain = plain or (trains and torch.is_grad_enabled())
        if plain or torch.is_autocast_enabled(x.device.type) or not op.pays(program, x, False):
            affine = op.Affine(program, self.effective_cores(), bias)
            return _product.run(self.structure, affine, x)
        return op.multiply_int8(program, self._stored_cores(), scales, x, bias)

    def effective_cores(self) -> list[Tensor]:
        """`core * scale` of every core."""
        pairs, dtype = zip(self._stored_cores(), self.scales, strict=True), self.compute_dtype
        return [core.to(dtype).mul_(scale) for core, scale in pairs]  # * takes a copy more

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that x must have."""
        return self.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        self.dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        scales = set(map(id, self.scales))

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            wide = torch.promote_types(moved.dtype, torch.float32)
            narrow = id(tensor) in scales and moved.dtype != wide
            return tensor.to(moved.device, wide) if narrow else moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    @torch.no_grad()
    def set_cores_(self, cores: Sequence[Tensor]) -> "QuantizedLinear":
        """Round `cores` into the layer.

        Raises:
            ValueError: wrong number or shape of cores. Nothing is changed then.
        """
        check_cores(self.structure, cores)
        for own, scale, core in zip(self.cores, self.scales, cores, strict=True):
            for kept, new in zip((own, scale), round_rows(core.to(scale)), strict=True):
                kept.copy_(new)
        return self

    def reset_parameters(self) -> None:
        """Only while the layer is made. transformers may ask later, before it has read the file, or
        with what it has read guarded."""
        if "scales" not in self._modules:
            super().reset_parameters()
        elif not self.cores[0].is_meta and not all(map(is_guarded, (*self.cores, *self.scales))):
            raise ValueError("int8 cores do not start afresh: quantize a layer that has started")

    def computes_with(self) -> dict[str, Any]:
        """Also that the cores are int8."""
        return super().computes_with() | {"quantized": "int8"}


def round_rows(core: Tensor) -> tuple[Tensor, Tensor]:
    """`core` over its scales, to the nearest integers, and the scales `(batch, fan_out, 1)`.

    Source: torchao (github.com/pytorch/ao), `Int8WeightOnlyConfig`, which does so with nn.Linear.
    """
    core = core.to(torch.promote_types(core.dtype, torch.float32))
    steps = (LARGEST - LEAST) / 2  # that the largest number of a row is
    scale = core.abs().amax(-1, keepdim=True) / steps
    scale = scale + (scale == 0)  # of a row of zeros it is 1
    return (core / scale).round().clamp(LEAST, LARGEST).to(torch.int8), scale


@checked
def quantize(
    model: nn.Module, *, include: Patterns | None = None, exclude: Patterns = ()
) -> nn.Module:
    """Round the cores of structured layers to int8, in place: a quarter of float32's bytes.

    Each row of a core has a scale of its own. Activations stay in the layer's dtype. For up to 16
    tokens or so, as when text is generated, the compiled CPU engine reads the integers, which takes
    less time than reading floats; for more tokens, on other devices, under autocast or without the
    engine, a call first forms `core * scale`. The cores learn nothing more; gradients for what lies
    before the layer are right. `save`, `load`, transformers' `save_pretrained` and `densify` work.

    A plain nn.Linear stays. `convert(model, Dense(), include=..., init="project")` first makes a
    structured layer with one core of it.

    Args:
        model: any module with structured layers; it is changed.
        include: patterns, see `convert`; None means every structured layer.
        exclude: patterns of layers that keep their cores.

    Returns:
        `model`; the new layer if `model` is itself a structured layer.

    Raises:
        ValueError: no structured layer with floating-point cores, or none is meant; one that is
            meant is of a class of its own, has hooks, has cores that are no
            ordinary parameters (sharded, parametrised, pruned), without values (meta) or not
            finite; the model is wrapped, as for `convert`. The model is then as it was.

    >>> from structlin import BTT, convert, summary
    >>> model = convert(nn.Sequential(nn.Linear(1024, 1024)), BTT(rank=1))
    >>> before = summary(model).rows[0].bytes
    >>> row = summary(quantize(model)).rows[0]
    >>> row.structure, before, row.bytes
    ('BTT(rank=1), int8', 262144, 73728)
    """
    require_replaceable(model)
    layers = [
        layer
        for layer in linear_layers(model)
        if isinstance(layer.module, StructuredLinear)
        and not isinstance(layer.module, QuantizedLinear)
    ]
    kind = f"model={type(model).__name__}"
    if not layers:
        raise ValueError(
            f"{kind} has no structured layer with floating-point cores: convert or compress it"
        )
    included = None if include is None else find_rules("include", include, layers, model)
    excluded = find_rules("exclude", exclude, layers, model)
    chosen: dict[tuple[str, ...], StructuredLinear] = {}
    for n, layer in enumerate(layers):
        meant = included is None or find_first(included, n) is not None
        if meant and find_first(excluded, n) is None:
            assert isinstance(layer.module, StructuredLinear)
            chosen[layer.names] = layer.module
            if reason := _find_obstacle(layer.module):
                raise ValueError(f"layer {layer.name!r} {reason}; exclude= leaves it as it is")
    if not chosen:
        raise ValueError(f"include={include!r}, exclude={exclude!r} leave no layer to quantize")
    return swap(model, [(names, _round_layer(layer)) for names, layer in chosen.items()])


def _find_obstacle(layer: StructuredLinear) -> str:
    """Why the layer's cores cannot be rounded; empty if they can."""
    if reason := find_reason_to_keep(layer):
        return reason
    if layer.cores[0].is_meta:
        return "has no values (meta)"
    finite = all(core.isfinite().all() for core in layer.cores)
    return "" if finite else "has cores that are not finite"


@torch.no_grad()
def _round_layer(layer: StructuredLinear) -> StructuredLinear:
    core = layer.cores[0]
    new = uninitialised(
        layer.in_features,
        layer.out_features,
        layer.structure,
        kind=QuantizedLinear,
        bias=False,
        init=layer.init,
        zero_init=layer.zero_init,
        device=core.device,
        dtype=core.dtype,
    )
    new.set_cores_(layer.effective_cores())
    new.label, new.conv1d = layer.label, layer.conv1d
    new.bias = layer.bias
    carry_attributes(layer, new)
    return new.train(layer.training)
