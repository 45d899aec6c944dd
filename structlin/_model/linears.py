"""The linear layers of a user's model: found, swapped, and made dense again."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._hosts.registry import head_methods
from .._hosts.transformers import build_conv1d, is_conv1d
from .._layer.linear import StructuredLinear
from .experts import layouts_of
from .kinds import Widths, role_of, widths
from .obstacles import carry_attributes, find_obstacle, find_references, find_what_is_lost
from .parameters import is_undeclared, parameters_of
from .transaction import Step, as_it_was_on_error


class Holder(NamedTuple):
    """The module that has a parameter, and the parameter's name there."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter as it is now."""
        return self.module._parameters.get(self.name)


@dataclass
class Layer:
    """One linear layer of a model, under all the names that it has there."""

    names: tuple[str, ...]
    module: nn.Module
    in_features: int
    out_features: int
    role: str
    obstacle: str = ""  #: why it cannot be converted; empty if it can
    tied: tuple[str, ...] = ()  #: other modules that hold the same weight

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def matrix(self) -> Tensor:
        """The dense weight, without its gradient: `(out_features, in_features)`."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight.detach().mT if is_conv1d(self.module) else weight.detach()

    @property
    def count(self) -> int:
        """Matrices of these widths that it has."""
        return 1

    @property
    def holder(self) -> Holder:
        """What has its weight."""
        return Holder(self.module, "weight")

    def find_change(self, modules: Mapping[str, nn.Module]) -> str:
        """Why it cannot be replaced in the model of these modules, which has changed since it was
        found; empty if it can."""
        replaced = any(modules.get(name) is not self.module for name in self.names)
        return "was replaced" if replaced else find_what_is_lost(self.module)


@dataclass(frozen=True)
class LooseMatrices:
    """Matrices in one parameter that no linear layer holds, so that they stay dense."""

    name: str  #: of the parameter
    role: str  #: "experts" or "attention"
    shape: tuple[int, ...]  #: of the parameter
    count: int = 0  #: of matrices; 0: nobody knows how they lie in the parameter
    in_features: int = 0  #: of each matrix
    out_features: int = 0

    def __str__(self) -> str:
        text = f"{self.name} {self.shape}"
        if not self.count or self.role == "attention":
            return text
        return f"{text} of {self.count} matrices {self.in_features} -> {self.out_features}"

    @property
    def size(self) -> str:
        """Inputs and outputs of each matrix; the parameter's shape where nobody knows these."""
        return f"{self.in_features} -> {self.out_features}" if self.count else f"{self.shape}"

    @property
    def stepped_by(self) -> str:
        """Which optimizers of this package step these matrices, and how."""
        if self.count:
            return "Muon and SOAP step each matrix"
        return "AdamW steps it, until declare_weights says how it lies"


def require_unchanged(model: nn.Module, layers: Iterable[Layer]) -> None:
    """Refuse layers that are no longer in `model`, or would by now lose something."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for layer in layers:
        reason = layer.find_change(modules)
        if reason:
            raise ValueError(f"layer {layer.name!r} {reason} after this plan; make a new one")


def linear_layers(model: nn.Module) -> list[Layer]:
    """Every linear layer of `model`, each once, in the order of `named_modules`."""
    names: dict[nn.Module, list[str]] = defaultdict(list)
    widths_of_module: dict[nn.Module, Widths] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        widths_of_layer = widths(module)
        if widths_of_layer is not None:
            names[module].append(name)
            widths_of_module[module] = widths_of_layer
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)].append(name)
    heads = find_declared_heads(model)
    references = find_references(model)
    layers = []
    for module, names_of_layer in names.items():
        in_features, out_features = widths_of_module[module]
        role = "head" if module in heads else role_of(names_of_layer[0])
        sharing = owners[id(module._parameters.get("weight"))]
        tied = {name.rpartition(".")[0] for name in sharing} - set(names_of_layer)
        parents = [model.get_submodule(name.rpartition(".")[0]) for name in names_of_layer if name]
        shape = (out_features, in_features)
        reference = references.get(module, "")
        obstacle = find_obstacle(module, names_of_layer, shape, parents, reference)
        layers.append(
            Layer(
                tuple(names_of_layer),
                module,
                in_features,
                out_features,
                role,
                obstacle,
                tuple(sorted(tied)),
            )
        )
    return layers


class StructuredLayer(NamedTuple):
    """A layer of a model that is structured, and its module by the type that it then has."""

    layer: Layer
    module: StructuredLinear


def structured_layers(model: nn.Module) -> list[StructuredLayer]:
    """The linear layers of `model` that are structured, in the same order."""
    structured = []
    for layer in linear_layers(model):
        if isinstance(layer.module, StructuredLinear):
            structured.append(StructuredLayer(layer, layer.module))
    return structured


def find_loose_matrices(model: nn.Module) -> list[LooseMatrices]:
    """The large matrices that no linear layer holds, parameter by parameter.

    They are the experts of a mixture as one parameter, and the input projection of
    nn.MultiheadAttention.
    """
    loose = []
    for info in parameters_of(model):
        weight = info.weight
        attribute = info.name.rpartition(".")[2]
        is_expert = weight.kind == "matrix" and attribute in layouts_of(info.owner)
        is_attention = attribute == "in_proj_weight" and isinstance(
            info.owner, nn.MultiheadAttention
        )
        if not (is_expert or is_attention or is_undeclared(info)):
            continue  # its shape may not be known yet: it may be a lazy layer's
        shape = tuple(info.parameter.shape)
        if is_expert or is_attention:
            count = info.parameter.numel() // (weight.fan_out * weight.fan_in)
            role = "experts" if is_expert else "attention"
            loose.append(
                LooseMatrices(info.name, role, shape, count, weight.fan_in, weight.fan_out)
            )
        else:
            loose.append(LooseMatrices(info.name, "experts", shape))
    return loose


def find_declared_heads(model: nn.Module) -> set[nn.Module]:
    """Modules below what the model itself calls its head."""
    heads = set[nn.Module]()
    for method in head_methods():
        declared = getattr(model, method, None)
        try:
            answer = declared() if callable(declared) else None
        except (AttributeError, NotImplementedError):
            continue
        candidates = list(answer) if isinstance(answer, tuple | list | nn.ModuleList) else [answer]
        for head in candidates:
            if isinstance(head, nn.Module):
                heads.update(head.modules())
    return heads


class Replacement(NamedTuple):
    """A new module, or the parameter of experts, and all names of the place in the model that it
    takes."""

    names: tuple[str, ...]
    module: nn.Module | nn.Parameter


def replace_layers(
    model: nn.Module,
    replacements: Iterable[Replacement],
    finish: Callable[[nn.Module, list[Step]], None] = lambda model, undo: None,
) -> nn.Module:
    """Put each module, or parameter, under its names into `model`: all of them, or none if anything
    is raised.

    Args:
        replacements: all of them are built already.
        finish: what else belongs to the change, given the model that is returned. Before each thing
            that it does outside of the modules' attributes, it adds a step to the list that undoes
            it; see `as_it_was_on_error`.

    Returns:
        The model, or what took its place.
    """
    root = model
    with as_it_was_on_error(model) as undo:
        for names, module in replacements:
            for name in names:
                if not name:
                    assert isinstance(module, nn.Module)
                    root = module
                    continue
                parent, _, child = name.rpartition(".")
                holder = model.get_submodule(parent)
                if isinstance(module, nn.Module):  # experts take the place of a parameter
                    holder._parameters.pop(child, None)
                setattr(holder, child, module)
        finish(root, undo)
    return root


@torch.no_grad()
def build_dense_layer(layer: StructuredLinear) -> nn.Module:
    """The layer of the user's kind (nn.Linear or Conv1D) that `layer` stands for, with its bias."""
    weight = layer.to_dense()  # (out_features, in_features)
    dense: Any
    with torch.device("meta"):
        if layer.conv1d:
            dense = build_conv1d(layer.in_features, layer.out_features)
        else:
            dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    trains = any(core.requires_grad for core in layer.cores)
    values = (weight.mT if layer.conv1d else weight).contiguous()
    dense.weight = nn.Parameter(values, requires_grad=trains)
    dense.bias = layer.bias
    carry_attributes(layer, dense)
    dense.train(layer.training)
    return dense  # type: ignore[no-any-return]
