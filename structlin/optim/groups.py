"""Parameter groups: the dense model's learning rate, unchanged, for every core of a converted model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from .._linear import StructuredLinear
from .._model.survey import widths
from ..scaling import OPTIMIZERS, lr_mult

_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _BatchNorm)


@dataclass
class _Use:
    """One trainable parameter: what its learning rate is multiplied by, and whether weight decay applies."""

    name: str
    parameter: nn.Parameter
    lr_mult: float
    decays: bool


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    optimizer: str = "adam",
    weight_decay: float = 0.0,
    base: nn.Module | Mapping[int, int] | None = None,
    structure_aware: bool = True,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, so that a structured model trains at the dense model's learning rate.

    Each core gets `lr * lr_mult(core)`, everything else `lr`. With `base`, a model tuned at a small width transfers to
    a large one by muP: Adam's rate of a linear layer goes as 1 / in_features, relative to the base's; what has no
    width-dependent fan-in (embeddings, biases, norms, input layers) keeps `lr`. SGD's rate goes as
    out_features / in_features, and as the width for vectors and embeddings.

    Weight decay is an argument here: the groups carry it, so the optimizer's own argument has no effect. It is the same
    number for every matrix: in decoupled form a step decays by lr * lr_mult * weight_decay,
    which keeps the balance between update and decay, and so the size at which weights settle, that a dense layer
    has. Biases, norms, gains, vectors, and what `model.no_weight_decay()` names are not decayed.

    Args:
        model: any module, converted or not; each trainable parameter is in exactly one group.
        lr: the dense model's learning rate.
        optimizer: "adam", "adamw", "sign" or "sgd": whose rule.
        base: the same model at the width where `lr` was tuned (layers are matched by name), or a mapping of widths
            to base widths such as {1024: 128, 4096: 512}, for all the widths that scale.
        structure_aware: False gives cores the rate of a dense layer, the naive rule that CBS compares with.

    Returns:
        A dict for each combination of rate and decay: `params`, `lr`, `weight_decay`, and for reading `name`,
        `param_names` and `lr_mult`. A scheduler that multiplies every group's rate keeps the ratios.

    Raises:
        ValueError: no trainable parameter; lr or weight decay out of range; unknown `optimizer`; a layer that `base`
            lacks; a width of `base` that is not positive, or that no parameter has.
        TypeError: `model` is no module; `base` neither a module nor a mapping of integers.
    Source: Qiu et al. 2024 (arXiv:2406.06248), section 3.2; Yang et al. 2022 (arXiv:2203.03466), table 8.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(1024, 1024)), BTT(rank=2))
    >>> for group in param_groups(model, lr=1e-3, weight_decay=0.1):
    ...     print(group["name"], group["lr"], group["weight_decay"], group["param_names"])
    lr x16 0.016 0.1 ['0.cores.0']
    lr x8 0.008 0.1 ['0.cores.1']
    lr x1, no decay 0.001 0.0 ['0.bias']
    """
    if not 0 < lr < inf:
        raise ValueError(f"lr={lr!r} must be positive and finite")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay={weight_decay!r} must not be negative")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is unknown; there are {', '.join(OPTIMIZERS)}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} must be a torch.nn.Module")
    _check_base(base, model)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for use in _uses(model, optimizer, base, structure_aware):
        name = f"lr x{use.lr_mult:.6g}" + ("" if use.decays else ", no decay")
        group = groups.setdefault(
            (use.lr_mult, use.decays),
            {
                "params": [],
                "lr": lr * use.lr_mult,
                "weight_decay": weight_decay if use.decays else 0.0,
                "name": name,
                "param_names": [],
                "lr_mult": use.lr_mult,
            },
        )
        group["params"].append(use.parameter)
        group["param_names"].append(use.name)
    if not groups:
        raise ValueError(f"model={type(model).__name__} has no trainable parameter: all of them are frozen")
    return list(groups.values())


def _uses(
    model: nn.Module, optimizer: str, base: nn.Module | Mapping[int, int] | None, structure_aware: bool
) -> Iterator[_Use]:
    """Each trainable parameter once; a tied one as what it is first."""
    declared = getattr(model, "no_weight_decay", None)
    undecayed = set(declared()) if callable(declared) else set()
    transfer = _Transfer(base, optimizer)
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, StructuredLinear):
            uses = _of_structured(name, module, transfer, optimizer, structure_aware)
        else:
            uses = _of_module(name, module, transfer)
        for use in uses:
            if id(use.parameter) not in seen and use.parameter.requires_grad:
                use.decays = use.decays and use.name not in undecayed
                yield use
            seen.add(id(use.parameter))


def _of_structured(
    name: str, layer: StructuredLinear, transfer: "_Transfer", optimizer: str, structure_aware: bool
) -> Iterator[_Use]:
    across_widths = transfer.of_matrix(name, layer.in_features, layer.out_features)
    for n, (core, parameter) in enumerate(zip(layer.structure.cores, layer.cores, strict=True)):
        in_layer = 1.0
        if structure_aware:
            k, out_features = len(layer.cores), layer.out_features
            in_layer = lr_mult(core, layer.in_features, k, optimizer=optimizer, out_features=out_features)
        yield _Use(_join(name, f"cores.{n}"), parameter, across_widths * in_layer, decays=True)
    if layer.gains is not None:
        yield _Use(_join(name, "gains"), layer.gains, 1.0, decays=False)
    if layer.bias is not None:
        yield _Use(_join(name, "bias"), layer.bias, transfer.of_vector(_join(name, "bias"), layer.bias), decays=False)


def _of_module(name: str, module: nn.Module, transfer: "_Transfer") -> Iterator[_Use]:
    matrix = _matrix_widths(module)
    is_norm = isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")
    for own, parameter in module.named_parameters(recurse=False):
        full = _join(name, own)
        if isinstance(module, nn.MultiheadAttention) and own in _PROJECTIONS:
            yield _Use(full, parameter, transfer.of_shape(full, parameter), decays=True)
        elif matrix is not None and own == "weight":
            yield _Use(full, parameter, transfer.of_matrix(name, *matrix), decays=True)
        else:
            yield _Use(full, parameter, transfer.of_vector(full, parameter), decays=parameter.ndim > 1 and not is_norm)


class _Transfer:
    """muP across widths: the learning rate relative to that of the same parameter in the base model."""

    def __init__(self, base: nn.Module | Mapping[int, int] | None, optimizer: str) -> None:
        self.widths = base if isinstance(base, Mapping) else {}
        self.modules = dict(base.named_modules()) if isinstance(base, nn.Module) else None
        self.parameters = dict(base.named_parameters()) if isinstance(base, nn.Module) else {}
        self.sgd = optimizer == "sgd"

    def of_matrix(self, name: str, in_features: int, out_features: int) -> float:
        base_in, base_out = self.widths.get(in_features, in_features), self.widths.get(out_features, out_features)
        if self.modules is not None:
            base_in, base_out = self._base_widths(name)
        if self.sgd:
            return (out_features / base_out) / (in_features / base_in)
        return base_in / in_features

    def of_shape(self, name: str, parameter: nn.Parameter) -> float:
        """Of a matrix `(out, in)` that no linear layer owns."""
        out_features, in_features = parameter.shape
        base_out, base_in = (self.widths.get(width, width) for width in parameter.shape)
        if self.modules is not None:
            if name not in self.parameters:
                raise ValueError(f"base has no parameter {name!r}: it must be the same model at another width")
            base_out, base_in = self.parameters[name].shape
        if self.sgd:
            return (out_features / base_out) / (in_features / base_in)
        return base_in / in_features

    def of_vector(self, name: str, parameter: nn.Parameter) -> float:
        if not self.sgd or parameter.ndim == 0:
            return 1.0
        width = parameter.shape[-1]
        if name in self.parameters:
            return width / self.parameters[name].shape[-1]
        return width / self.widths.get(width, width)

    def _base_widths(self, name: str) -> tuple[int, int]:
        assert self.modules is not None
        module = self.modules.get(name)
        found = None if module is None else _matrix_widths(module)
        if found is None:
            raise ValueError(f"base has no linear layer {name!r}: it must be the same model at another width")
        return found


def _check_base(base: nn.Module | Mapping[int, int] | None, model: nn.Module) -> None:
    if base is None or isinstance(base, nn.Module):
        return
    if not isinstance(base, Mapping) or not all(isinstance(width, int) for pair in base.items() for width in pair):
        raise TypeError(f"base={base!r} must be a model, or a mapping of widths to base widths such as {{1024: 128}}")
    present = {width for parameter in model.parameters() for width in parameter.shape}
    for module in model.modules():
        present.update(_matrix_widths(module) or ())
    for width, small in base.items():
        if width < 1 or small < 1:
            raise ValueError(f"base={base!r}: {width}: {small} is not a pair of positive widths")
        if width not in present:
            raise ValueError(f"base={base!r}: no parameter of the model has the width {width}")


def _matrix_widths(module: nn.Module) -> tuple[int, int] | None:
    """Fan-in and fan-out of a linear or convolutional layer."""
    if isinstance(module, _ConvNd):
        return module.weight[0].numel(), module.out_channels
    return widths(module)


def _join(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter
