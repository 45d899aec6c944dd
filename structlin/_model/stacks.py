"""The experts of a user's model that lie in one parameter, as layers: found, and made dense."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .._layer.experts import DenseExperts, Lay, StructuredExperts
from .experts import find_lay, layouts_of
from .kinds import PROTECTED, role_of
from .linears import Holder, Layer
from .obstacles import is_bookkeeping


@dataclass
class ExpertsLayer(Layer):
    """The matrices of all experts in one parameter: they get one structure.

    Its name is the parameter's. `in_features` and `out_features` are those of each matrix, and
    `module` has a linear layer for each, which shares the parameter's memory.
    """

    owner: nn.Module = field(kw_only=True)  #: that has the parameter
    attribute: str = field(kw_only=True)  #: the parameter's name there
    lay: Lay = field(kw_only=True)

    @property
    def holder(self) -> Holder:
        return Holder(self.owner, self.attribute)

    @property
    def count(self) -> int:
        return self.lay.count

    @property
    def matrix(self) -> Tensor:
        """All matrices, one below the other: `(experts * fused * out_features, in_features)`."""
        parameter = self.holder.parameter
        assert parameter is not None
        return self.lay.split(parameter.detach()).flatten(0, 2)

    def find_change(self, modules: Mapping[str, nn.Module]) -> str:
        owners = [modules.get(name.rpartition(".")[0]) for name in self.names]
        parameter = self.holder.parameter
        if parameter is None or any(owner is not self.owner for owner in owners):
            return "was replaced"
        return find_what_experts_lose(parameter)

    @property
    def trains(self) -> bool:
        """Whether its parameter has a gradient."""
        parameter = self.holder.parameter
        return parameter is not None and parameter.requires_grad

    @property
    def members(self) -> list["ExpertMatrix"]:
        """A layer for each matrix, in the order of the cores: the experts outermost."""
        stack = self.module
        assert isinstance(stack, DenseExperts)
        members = []
        for number, layer in enumerate(stack.layers):
            expert, part = divmod(number, self.lay.fused)
            name = f"{self.name}.{expert}" + (f".{part}" if self.lay.fused > 1 else "")
            widths = (self.in_features, self.out_features)
            members.append(ExpertMatrix((name,), layer, *widths, self.role))
        return members


@dataclass
class ExpertMatrix(Layer):
    """One matrix of an `ExpertsLayer`, as a linear layer of a model in which each has its own."""


def expert_layers(model: nn.Module) -> list[ExpertsLayer]:
    """Every parameter of `model` that holds the matrices of experts, where it is known how they
    lie; each once, in the order of `named_modules`."""
    names: dict[tuple[nn.Module, str], list[str]] = defaultdict(list)
    owners: dict[int, list[str]] = defaultdict(list)
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            full = f"{module_name}.{attribute}" if module_name else attribute
            owners[id(parameter)].append(full)
        for attribute in layouts_of(module):
            if isinstance(module._parameters.get(attribute), nn.Parameter):
                full = f"{module_name}.{attribute}" if module_name else attribute
                names[module, attribute].append(full)
    layers = []
    for (owner, attribute), names_of_layer in names.items():
        parameter = owner._parameters[attribute]
        assert parameter is not None
        layout = layouts_of(owner)[attribute]
        lay = find_lay(layout, tuple(parameter.shape))
        if lay is None:
            continue
        role = role_of(names_of_layer[0])
        tied = set(owners[id(parameter)]) - set(names_of_layer)
        layers.append(
            ExpertsLayer(
                tuple(names_of_layer),
                DenseExperts(lay, parameter),
                lay.fan_in,
                lay.fan_out,
                "ffn" if role in PROTECTED else role,
                _find_obstacle(owner, attribute, parameter),
                tuple(sorted(tied)),
                owner=owner,
                attribute=attribute,
                lay=lay,
            )
        )
    return layers


def _find_obstacle(owner: nn.Module, attribute: str, parameter: nn.Parameter) -> str:
    """Why the experts in a parameter cannot get a structure; empty if they can."""
    if hasattr(parameter, "full_tensor"):
        return "has a sharded weight (DTensor): compress before fully_shard"
    if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
        return f"has a weight of type {type(parameter).__name__} and dtype {parameter.dtype}"
    if attribute in vars(owner):
        return "has an attribute of its name, which hides it"
    return find_what_experts_lose(parameter)


def find_what_experts_lose(parameter: nn.Parameter) -> str:
    """What would be lost if structured experts took the parameter's place; empty if nothing."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "has hooks on its parameter, which would be lost"
    attributes = [key for key in vars(parameter) if not is_bookkeeping(key)]
    if attributes:
        return f"has attributes on its parameter, which would be lost: {', '.join(attributes)}"
    return ""


def structured_experts(model: nn.Module) -> dict[StructuredExperts, tuple[str, ...]]:
    """The structured experts of `model`, each with all its names there."""
    names: dict[StructuredExperts, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, StructuredExperts):
            names[module].append(name)
    return {stack: tuple(names_of_stack) for stack, names_of_stack in names.items()}


def find_reason_to_keep_experts(stack: StructuredExperts) -> str:
    """Why a dense parameter cannot take the place of these experts; empty if it can."""
    if any(hasattr(core, "full_tensor") for core in stack.parameters()):
        return "they are sharded: gather them first"
    if any(name not in stack.core_names for name in stack.cores._parameters):
        return "they have more parameters than cores, which would be lost"
    if len(stack.cores._parameters) < len(stack.core_names):
        return "their cores are parametrised or pruned"
    if any(vars(stack)[name] for name in ("_forward_hooks", "_forward_pre_hooks")):
        return "they have hooks, which would be lost"
    return ""


@torch.no_grad()
def build_dense_experts(stack: StructuredExperts) -> nn.Parameter:
    """The parameter that structured experts stand for."""
    trains = any(core.requires_grad for core in stack.cores)
    return nn.Parameter(stack.to_dense(), requires_grad=trains)
