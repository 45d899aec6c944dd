"""Parameter groups: the dense model's learning rate, unchanged, for a converted one's cores."""

from collections.abc import Mapping
from math import inf
from typing import Any

from torch import nn

from .._linear import StructuredLinear
from .._model.parameters import (
    ParameterInfo,
    Weight,
    join,
    named_modules,
    parameters_of,
    weights_of,
)
from ..scaling import OPTIMIZERS, lr_mult


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    optimizer: str = "adam",
    weight_decay: float = 0.0,
    base: nn.Module | Mapping[int, int] | None = None,
    structure_aware: bool = True,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, by which a structured model trains at the dense model's rate.

    Each core gets `lr * lr_mult(core)`, everything else `lr`. With `base`, a model tuned at a small
    width transfers to a large one by muP: Adam's rate of a linear layer goes as 1 / in_features,
    relative to the base's; what has no width-dependent fan-in (embeddings, biases, norms, input
    layers) keeps `lr`. SGD's rate goes as out_features / in_features, and as the width for vectors
    and embeddings. Each layer is compared with itself at the base width, as the paper's code does.
    The paper's text (section 3.3) has one base width d0 for all layers, so that the rate of a core
    depends on its fan_in alone, `lr * d0 / (k * fan_in)`: that is a mapping of every width to d0,
    such as {1024: 64, 4096: 64}.

    Weight decay is an argument here: the groups carry it, so the optimizer's own argument has no
    effect. It is the same number for every matrix: in decoupled form a step decays by
    lr * lr_mult * weight_decay, which keeps the balance between update and decay, and so the size
    at which weights settle, that a dense layer has. Biases, norms, gains and vectors are not
    decayed, nor is a parameter that `no_weight_decay()` of the model, or of a module in it, names;
    the name "proj.weight" stands for all cores of a converted `proj`.

    A scheduler that multiplies every group's rate keeps the ratios. One that sets rates of its own
    needs one for each group, as torch has it: `OneCycleLR(max_lr=[g["lr"] for g in groups])`.

    Args:
        model: any module, converted or not; each trainable parameter is in exactly one group.
        lr: the dense model's learning rate.
        optimizer: "adam", "adamw", "sign" or "sgd": whose rule.
        base: the same model at the width where `lr` was tuned (layers are matched by name), or a
            mapping of widths to base widths such as {1024: 128, 4096: 512}, for all the widths that
            scale.
        structure_aware: False gives cores the rate of a dense layer, the naive rule that CBS
            compares with.

    Returns:
        A dict for each combination of rate and decay: `params`, `lr`, `weight_decay`, and for
            reading
        `name`, `param_names` and `lr_mult`.

    Raises:
        ValueError: no trainable parameter; lr or weight decay out of range; unknown `optimizer`; a
            layer that `base` lacks; a width of `base` that is not positive, or that no parameter
            has.
        TypeError: `model` is no module; `base` neither a module nor a mapping of integers.
    Source: Qiu et al. 2024 (arXiv:2406.06248), section 3.2; Yang et al. 2022 (arXiv:2203.03466),
        table 8.

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
    if not 0 <= weight_decay < inf:
        raise ValueError(f"weight_decay={weight_decay!r} must be finite and not negative")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is unknown; there are {', '.join(OPTIMIZERS)}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} must be a torch.nn.Module")
    infos = list(parameters_of(model))
    _check_base(base, infos)
    transfer = _Transfer(base, sgd=optimizer == "sgd")
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for info in infos:
        if not info.parameter.requires_grad:
            continue
        factor = transfer.lr_mult(info)
        if structure_aware and info.weight.core is not None:
            factor *= _core_lr_mult(info, optimizer)
        group = groups.setdefault(
            (factor, info.decays),
            {
                "params": [],
                "lr": lr * factor,
                "weight_decay": weight_decay if info.decays else 0.0,
                "name": f"lr x{factor:.6g}" + ("" if info.decays else ", no decay"),
                "param_names": [],
                "lr_mult": factor,
            },
        )
        group["params"].append(info.parameter)
        group["param_names"].append(info.name)
    if not groups:
        name = type(model).__name__
        raise ValueError(f"model={name} has no trainable parameter: all of them are frozen")
    return list(groups.values())


def _core_lr_mult(info: ParameterInfo, optimizer: str) -> float:
    """The rate of a core, relative to that of its layer if it were dense."""
    layer, n = info.owner, info.weight.core
    assert isinstance(layer, StructuredLinear)
    assert n is not None
    cores, out_features = layer.structure.cores, layer.out_features
    return lr_mult(
        cores[n], layer.in_features, len(cores), optimizer=optimizer, out_features=out_features
    )


class _Transfer:
    """muP across widths: the rate of a parameter relative to the same one's in the base model."""

    def __init__(self, base: nn.Module | Mapping[int, int] | None, *, sgd: bool) -> None:
        self.sgd = sgd
        self.base_widths = base if isinstance(base, Mapping) else {}
        self.base_layers: dict[str, tuple[int, int]] | None = None  # (in_features, out_features)
        self.base_sizes: dict[str, int] = {}  # of the last dimension of vectors and embeddings
        if isinstance(base, nn.Module):
            self.base_layers = {}
            for name, module in named_modules(base):
                for own, weight in weights_of(module).items():
                    if weight.kind == "matrix":
                        dense = join(name, "weight" if weight.core is not None else own)
                        self.base_layers[dense] = _widths(module, weight)
                for own, parameter in module.named_parameters(recurse=False):
                    self.base_sizes[join(name, own)] = parameter.shape[-1] if parameter.ndim else 1

    def lr_mult(self, info: ParameterInfo) -> float:
        if info.weight.kind == "matrix":
            return self._of_matrix(info)
        if not self.sgd or info.weight.kind == "gain" or info.parameter.ndim == 0:
            return 1.0
        width = info.parameter.shape[-1]
        if self.base_layers is None:
            return width / self.base_widths.get(width, width)
        if info.dense_name not in self.base_sizes:
            raise ValueError(_lacks("parameter", info.dense_name))
        return width / self.base_sizes[info.dense_name]

    def _of_matrix(self, info: ParameterInfo) -> float:
        in_features, out_features = _widths(info.owner, info.weight)
        base_in = self.base_widths.get(in_features, in_features)
        base_out = self.base_widths.get(out_features, out_features)
        if self.base_layers is not None:
            if info.dense_name not in self.base_layers:
                raise ValueError(_lacks("linear layer", info.layer))
            base_in, base_out = self.base_layers[info.dense_name]
        if self.sgd:
            return (out_features / base_out) / (in_features / base_in)
        return base_in / in_features


def _widths(owner: nn.Module, weight: Weight) -> tuple[int, int]:
    """The features that a layer reads for one that it makes, and those that it makes."""
    if isinstance(owner, StructuredLinear):
        return owner.in_features, owner.out_features
    return weight.fan_in * weight.kernel, weight.fan_out * weight.groups


def _lacks(what: str, name: str) -> str:
    return f"base has no {what} {name!r}: it must be the same model at another width"


def _check_base(base: nn.Module | Mapping[int, int] | None, infos: list[ParameterInfo]) -> None:
    if base is None or isinstance(base, nn.Module):
        return
    if not isinstance(base, Mapping) or not all(
        isinstance(width, int) for pair in base.items() for width in pair
    ):
        raise TypeError(
            f"base={base!r} must be a model, or a mapping of widths such as {{1024: 128}}"
        )
    present = {width for info in infos for width in info.parameter.shape}
    for info in infos:
        if info.weight.kind == "matrix":
            present.update(_widths(info.owner, info.weight))
    for width, small in base.items():
        if width < 1 or small < 1:
            raise ValueError(f"base={base!r}: {width}: {small} is not a pair of positive widths")
        if width not in present:
            raise ValueError(f"base={base!r}: no parameter of the model has the width {width}")
