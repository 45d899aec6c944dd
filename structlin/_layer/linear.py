"""`StructuredLinear`: a structure with parameters, as a layer."""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, nn

from .._engine import product
from .._engine.operands import check_bias, check_cores, check_input
from .._engine.operators import Affine
from .._hosts.transformers import is_guarded
from .._projection.solve import project
from .._structure.arguments import Range, checked, require_choice
from .._structure.families import DEFAULT, Family, label, structure_of, warn_of_padding
from .._structure.order import warn_of_order
from .._structure.structure import Structure
from .._tensors import Device, Dtype, require_finite
from ..duality import polar_factor
from ..scaling import INITS, expected_norm, init_std
from .state import DescribedModule
from .weight import InPlaceOfLinear


class DividedProduct(Protocol):
    """The product of a layer whose parameters lie on several processes."""

    def multiply(self, layer: "StructuredLinear", x: Tensor, bias: Tensor | None) -> Tensor: ...


class StructuredLinear(InPlaceOfLinear, DescribedModule):
    """`y = x W^T + b` with a structured W, which is only formed where that is faster.

    Args:
        in_features, out_features: widths, as of nn.Linear; they never change, also where the
            structure pads inside.
        structure: a family such as `BTT(rank=1)`, or a `Structure` as large as the layer or larger.
        bias: whether to add a bias, initialised to zero; as in nn.Linear 1, 0 and None are flags.
        weight_norm: multiply by `gamma * min(1, sigma / RMS(core)) * core` in place of `core`;
            sigma is the initial standard deviation, gamma (`gains`, one per core) is learned and
            starts at 1 (CBS, section 5.1).
        init: "mup", "spectral" or "orthogonal", see `scaling.init_std`.
        zero_init: the layer starts as the zero function: its last core is zero, the others are not,
            so that every core has a gradient after one step. For the last linear layer of a
            residual branch.

    Attributes:
        cores: ParameterList, one parameter `(batch, fan_out, fan_in)` per core.
        gains: parameter `(number of cores,)`, or None.
        bias: parameter `(out_features,)`, or None.
        core_names: the names of the cores in `cores`: numbers, see `parallel.store_outermost_`.
        structure: the `Structure`, padding included.
        label: what tables call the structure.
        stds: sigma of each core.
        init_scale: factor of the last core at the start, see `match_norm_`.
        padding: columns and rows that the structure has beyond the layer's. More than 15 % of a
            width is warned of, except on the meta device. So is an order of the cores that costs
            more than a dense matrix and twice another order.
        conv1d: whether the layer took the place of transformers' Conv1D, for the way back.
        weight: the dense matrix `(out_features, in_features)`, only formed if its numbers are read;
            see `WeightView`.

    Raises:
        ValueError: the structure does not fit the widths; `init` is unknown; W is asked for
            (`to_dense`, `weight`) of a structure that has none.
        TypeError: an argument is of another type: a width that is no integer, a flag that is
            neither True nor False.

    >>> from structlin import BTT
    >>> layer = StructuredLinear(768, 3072, BTT(rank=2))
    >>> layer(torch.randn(4, 10, 768)).shape, [tuple(core.shape) for core in layer.cores]
    (torch.Size([4, 10, 3072]), [(24, 96, 32), (48, 64, 48)])
    """

    gains: nn.Parameter | None
    bias: nn.Parameter | None
    #: what multiplies in the layer's place where an axis is divided over processes, see `parallel`
    divided: DividedProduct | None = None

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Family | Structure = DEFAULT,
        # configs have 0, 1 and None too, which nn.Linear takes
        bias: bool | Annotated[int, Range(0, 1)] | None = True,
        *,
        weight_norm: bool = False,
        init: str = "mup",
        zero_init: bool = False,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        require_choice("init", init, INITS)
        self.in_features = in_features
        self.out_features = out_features
        self.structure = structure_of(structure, in_features, out_features)
        self.label = label(structure)
        self.conv1d = False
        self.init = init
        self.zero_init = zero_init
        self.init_scale = 1.0
        *inner_cores, last_core = self.structure.cores
        is_narrow = zero_init or init == "mup"
        has_activation = self.structure.between is not None
        options: dict[str, Any] = {"bottleneck_variance": is_narrow, "activated": has_activation}
        self.stds = [init_std(core, init, **options) for core in inner_cores]
        self.stds.append(init_std(last_core, init))
        self.core_names = [str(n) for n in range(len(self.structure.cores))]

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.cores = nn.ParameterList(empty(*core.shape) for core in self.structure.cores)
        self.register_parameter("gains", empty(len(self.cores)) if weight_norm else None)
        self.register_parameter("bias", empty(out_features) if bias else None)
        self.reset_parameters()
        if not self.cores[0].is_meta:  # `convert` builds on meta, and warns by the layer's name
            warn_of_padding(structure, self.structure, in_features, out_features)
            warn_of_order(structure, self.structure)

    def reset_parameters(self) -> None:
        """Draw the cores anew from their distributions; gains to 1, bias to 0."""
        self._draw(is_guarded)

    @torch.no_grad()
    def _draw(self, keeps: Callable[[Tensor], bool]) -> None:
        cores = zip(self.structure.cores, self.stds, self.cores, strict=True)
        for n, (core, std, parameter) in enumerate(cores):
            is_last = n == len(self.cores) - 1
            if keeps(parameter):
                continue
            if self.zero_init and is_last:
                parameter.zero_()
            elif self.init == "orthogonal":
                gaussian = torch.randn_like(parameter, dtype=torch.float32)
                scale = std * sqrt(max(core.fan_out, core.fan_in))  # over a block's own RMS
                parameter.copy_(scale * polar_factor(gaussian, method="svd"))
            else:
                parameter.normal_(0, std)
            if is_last:
                parameter.mul_(self.init_scale)
        if self.gains is not None and not keeps(self.gains):
            self.gains.fill_(1)
            self.gains[-1] = max(1.0, self.init_scale)
        if self.bias is not None and not keeps(self.bias):
            self.bias.zero_()
        self._undrawn = self.cores[0].is_meta

    @checked
    def match_norm_(self, norm: float) -> "StructuredLinear":
        """Draw the layer anew, now and in `reset_parameters`, at this Frobenius norm of the matrix.

        The norm is met in root mean square over draws, by the last core; zero zeroes it. For inputs
        of unit RMS it is `sqrt(out_features)` times the RMS of the outputs, see docs/theory.md;
        for a structure without a matrix that is its definition.

        Raises:
            ValueError: `norm` is negative or not finite.

        >>> from structlin import BTT
        >>> layer = StructuredLinear(256, 256, BTT(rank=1)).match_norm_(0.02 * 256)
        >>> bool(0.9 < layer.to_dense().norm() / (0.02 * 256) < 1.1)
        True
        """
        structure = self.structure
        activated = structure.between is not None
        padded_norm = expected_norm(structure.cores, self.stds, structure.in_features, activated)
        # cropping W from its padded widths leaves this share of its squared norm
        padded_size = structure.in_features * structure.out_features
        share = self.in_features * self.out_features / padded_size
        scale = norm / (sqrt(share) * padded_norm)
        self.zero_init = norm == 0
        self.init_scale = scale or 1.0  # zero is drawn as `zero_init`
        self.reset_parameters()
        return self

    def forward(self, input: Tensor) -> Tensor:  # named as nn.Linear's
        return self.multiply(input, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x W^T + bias`, for any bias `(out_features,)`."""
        if self.divided is not None:
            return self.divided.multiply(self, x, bias)
        cores = self.stored_cores()
        check_input(x, self.in_features, cores[0])
        gains = self.gains
        sigmas = () if gains is None else self.stds
        affine = Affine(self._program, cores, bias, gains, sigmas)
        return product.compute(self._structure, affine, x)

    @property
    def structure(self) -> Structure:
        return self._structure

    @structure.setter
    def structure(self, structure: Structure) -> None:
        self._structure = structure
        self._program = structure.program.fit(self.in_features, self.out_features)

    @property
    def padding(self) -> tuple[int, int]:
        return self._program.padding

    def stored_cores(self) -> list[Tensor]:
        """The cores before they are normalised.

        By name, as somebody may have parametrised or pruned one, whose hooks are run here.
        """
        cores: Any = self._modules["cores"]
        for hook in cores._forward_pre_hooks.values():
            hook(cores, ())
        held = cores._parameters
        return [held[name] if name in held else getattr(cores, name) for name in self.core_names]

    def effective_cores(self) -> list[Tensor]:
        """The cores that the layer multiplies by: normalised, if it has weight normalisation."""
        cores = self.stored_cores()
        return cores if self.gains is None else product.normalise(cores, self.gains, self.stds)

    def to_dense(self) -> Tensor:
        """The matrix W: `(out_features, in_features)`, differentiable in the cores."""
        dense = product.to_dense(self.structure, self.effective_cores())
        return dense[: self.out_features, : self.in_features]

    @checked
    def from_dense_(self, weight: Tensor, bias: Tensor | None = None) -> "StructuredLinear":
        """Take the cores whose matrix is nearest to `weight`, in place; see `project`.

        Args:
            weight: `(out_features, in_features)`, as of nn.Linear.
            bias: `(out_features,)`; None leaves the layer's own.

        Raises:
            ValueError: another shape; no values (meta) on either side; numbers that are not finite;
                a bias for a layer that has none. The layer is then as it was.
            TypeError: `weight` is not real floating point.

        >>> from structlin import LowRank
        >>> dense = torch.randn(8, 2) @ torch.randn(2, 6)
        >>> layer = StructuredLinear(6, 8, LowRank(rank=2)).from_dense_(dense)
        >>> torch.allclose(layer.to_dense(), dense, atol=1e-5)
        True
        """
        self._check_dense(weight, bias)
        self.set_cores_(project(weight, self.structure))
        if self.bias is not None and bias is not None:
            with torch.no_grad():
                self.bias.copy_(bias)
        return self

    def _check_dense(self, weight: Tensor, bias: Tensor | None) -> None:
        """Refuse a dense layer's parameters that do not fit this layer."""
        shape = self.out_features, self.in_features
        if tuple(weight.shape) != shape:
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}; "
                f"it must be (out_features, in_features) = {shape}"
            )
        if bias is not None:
            if self.bias is None:
                raise ValueError("bias is given, but the layer has none: make it with bias=True")
            check_bias(bias, self.out_features, bias.device)
            require_finite("bias", bias)

    @torch.no_grad()
    def set_cores_(self, cores: Sequence[Tensor]) -> "StructuredLinear":
        """Copy `cores` into the layer, so that it multiplies by them: gains undo what weight
        normalisation clips.

        Raises:
            ValueError: wrong number or shape of cores; the layer has no values yet (meta), or is
                sharded. Nothing is changed then.
        """
        check_cores(self.structure, cores)
        if self.cores[0].is_meta:
            raise ValueError("the layer is on the meta device: move it with to_empty(device=...)")
        if any(hasattr(core, "full_tensor") for core in self.cores):  # a DTensor takes no plain one
            raise ValueError(
                "the layer is sharded: give it values before parallelize_module or fully_shard, or "
                "load a state dict"
            )
        for parameter, core in zip(self.cores, cores, strict=True):
            parameter.copy_(core)
        if self.gains is not None:
            for n, core in enumerate(cores):
                rms = core.float().square().mean().sqrt().item()
                self.gains[n] = max(1.0, rms / self.stds[n])
        return self

    def computes_with(self) -> dict[str, Any]:
        """The widths, the structure and, with weight normalisation, sigma: what a state dict must
        agree with."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "structure": self.structure.to_dict(),
            "sigma": None if self.gains is None else self.stds,
        }

    def extra_repr(self) -> str:
        options = f"in_features={self.in_features}, out_features={self.out_features}, {self.label}"
        return f"{options}, bias={self.bias is not None}, weight_norm={self.gains is not None}"


def uninitialised(
    *args: Any, kind: type[StructuredLinear] = StructuredLinear, **options: Any
) -> StructuredLinear:
    """A layer whose parameters have no values yet, and that drew no random number."""
    layer: StructuredLinear = nn.utils.skip_init(kind, *args, **options)  # type: ignore[no-untyped-call]
    layer._undrawn = False  # its values come from elsewhere
    return layer
