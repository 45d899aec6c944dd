"""A structured layer with int8 cores, for inference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._engine import operators, product
from .._engine.operands import check_cores, check_input
from .._hosts.transformers import is_guarded
from .linear import StructuredLinear

LEAST = -128
LARGEST = 127


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
        program = self._program
        trains = x.requires_grad or (bias is not None and bias.requires_grad)
        takes_real_cores = (
            product.forms_matrix(self.structure, x.numel() // self.in_features)
            or (trains and torch.is_grad_enabled())
            or torch.is_autocast_enabled(x.device.type)
        )
        if takes_real_cores or x.is_cuda or not operators.pays(program, x, False):
            affine = operators.Affine(program, self.effective_cores(), bias)
            return product.compute(self.structure, affine, x)
        return operators.multiply_int8(program, self.stored_cores(), scales, x, bias)

    def effective_cores(self) -> list[Tensor]:
        """`core * scale` of every core."""
        pairs = zip(self.stored_cores(), self.scales, strict=True)
        dtype = self.compute_dtype
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
        for parameter, scale, core in zip(self.cores, self.scales, cores, strict=True):
            new_core, new_scale = round_rows(core.to(scale))
            parameter.copy_(new_core)
            scale.copy_(new_scale)
        return self

    def reset_parameters(self) -> None:
        """Only while the layer is made. transformers may ask later, before it has read the file, or
        with what it has read guarded."""
        is_being_made = "scales" not in self._modules
        if is_being_made:
            super().reset_parameters()
            return
        has_values = not self.cores[0].is_meta
        if has_values and not all(map(is_guarded, [*self.cores, *self.scales])):
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
