"""What a new layer takes over from a linear layer in whose place it is put, what would be lost, and
what forbids to replace it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from .._hosts import registry
from .._hosts.transformers import is_conv1d
from .._layer.linear import StructuredLinear

# Modules of torch that hold on to the parameters of the model inside, and do not see them replaced.
_WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
}
_STORES = ("_parameters", "_buffers", "_modules")
_DEEPEST = 3  # so many lists inside each other are searched for modules
_SMALLEST: dict[type[nn.Module], nn.Module] = {}
_ADAPTER = re.compile(r"(^|\.)(base_layer|lora_[A-Za-z_]+|original_module|modules_to_save)(\.|$)")


def require_replaceable(model: nn.Module) -> None:
    """Refuse a model none of whose layers can be replaced now.

    Raises:
        ValueError: inference mode is on; the model, or a part of it, is wrapped by torch.compile,
            DataParallel, DistributedDataParallel or FullyShardedDataParallel.
    """
    kind = type(model).__name__
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"model={kind}: parameters made under torch.inference_mode can never be trained; "
            "leave that mode first (torch.no_grad is fine)"
        )
    for name, module in model.named_modules():
        wrapper = _find_wrapper(module)
        if wrapper:
            raise ValueError(
                f"model={kind}: {name or 'the model itself'} is wrapped by {wrapper}, which would "
                "go on with the old parameters: unwrap the model, change its layers, wrap it anew"
            )


def _find_wrapper(module: nn.Module) -> str:
    for base in type(module).__mro__:
        if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
            return _WRAPPERS[base.__name__]
    return ""


def find_references(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that a module of `model` also holds outside of its submodules, each with the name
    of that attribute: in a list, tuple or dict, or by a bound method. There nobody replaces them.
    """
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _STORES or attribute.endswith("_hooks"):
                continue
            place = f"{name}.{attribute}" if name else attribute
            for held in _list_modules(value, _DEEPEST):
                if held is not module:  # a method of its own is told as such
                    found.setdefault(held, place)
    return found


def _list_modules(value: Any, depth: int) -> Iterator[nn.Module]:
    owner: Any = value.__self__ if isinstance(value, MethodType) else value
    if issubclass(type(owner), nn.Module):  # a weak proxy says that it is an instance
        yield owner
    elif isinstance(value, list | tuple | dict) and depth:
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _list_modules(entry, depth - 1)


def find_obstacle(
    module: nn.Module,
    names: Sequence[str],
    shape: tuple[int, int],
    parents: list[nn.Module],
    reference: str = "",
) -> str:
    """Why a linear layer cannot be converted; empty if it can.

    Args:
        names: of the layer in its model.
        shape: `(out_features, in_features)`.
        parents: the modules that hold it.
        reference: the attribute that holds it outside of the submodules, if one does.
    """
    kind = type(module)
    if isinstance(module, StructuredLinear):
        return "is structured already"
    if reference:
        return (
            f"is held by the attribute {reference!r} too, which would go on with the old layer: "
            "use nn.ModuleList or nn.ModuleDict there"
        )
    if any(isinstance(parent, nn.MultiheadAttention) for parent in parents):
        return "belongs to nn.MultiheadAttention, which reads its weight without calling it"
    weight = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    if hasattr(weight, "full_tensor"):
        return "has a sharded weight (DTensor): convert before fully_shard"
    if kind is not nn.Linear and not is_conv1d(module) and not registry.is_plain_linear(kind):
        return f"is a {kind.__name__}, not a plain nn.Linear: its own behaviour would be lost"
    if any(_ADAPTER.search(name) for name in names):
        return "belongs to an adapter: merge it first, or convert before it is added"
    if weight is None:
        return (
            "has no weight parameter of its own (pruned, weight-normalised or quantised by a hook)"
        )
    is_real = weight.is_floating_point() and weight.dtype.itemsize > 1  # float8 cannot be drawn
    if type(weight) is not nn.Parameter or not is_real:
        return f"has a weight of type {type(weight).__name__} and dtype {weight.dtype}"
    if hasattr(weight, "infshape"):
        return "carries a width of the mup package (infshape): train it with param_groups(base=)"
    if 0 in weight.shape:
        return f"has a weight of shape {tuple(weight.shape)}"
    if tuple(weight.shape) != (shape[::-1] if is_conv1d(module) else shape):
        return f"has a weight of shape {tuple(weight.shape)}, no longer that of the layer: {shape}"
    if bias is not None and tuple(bias.shape) != shape[:1]:
        return f"has a bias of shape {tuple(bias.shape)}, not (out_features,) = {shape[:1]}"
    needed = dir(_build_smallest(StructuredLinear))
    for attribute in _find_attributes(module):
        if attribute in needed and not is_bookkeeping(attribute):
            return f"has an attribute {attribute!r}, a name that StructuredLinear needs for itself"
    return find_what_is_lost(module)


def find_what_is_lost(module: nn.Module) -> str:
    """What would be lost if another layer took the place of this linear one; empty if nothing."""
    additions = _find_additions(module)
    if additions:
        return f"has more than a layer of its kind has, which would be lost: {', '.join(additions)}"
    for child in module.modules():  # the layer itself first
        registries = [name for name in vars(child) if name.endswith("_hooks")]
        filled = [name for name in registries if _list_hooks(vars(child)[name])]
        if filled:
            return f"has hooks, which would be lost: {', '.join(filled)}"
        for name in vars(child):
            hides_method = hasattr(type(child), name) and name != "__module__"
            if hides_method and not is_bookkeeping(name):
                return f"has methods of its own, offloaded or patched, which would be lost: {name}"
    bias = module._parameters.get("bias")  # which stays the same parameter
    for name, parameter in module.named_parameters():
        if parameter is bias:
            continue
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"has hooks on its {name}, which would be lost"
        attributes = [key for key in vars(parameter) if not is_bookkeeping(key)]
        if attributes:
            return f"has attributes on its {name}, which would be lost: {', '.join(attributes)}"
    return ""


def find_reason_to_keep(layer: StructuredLinear, *kinds: type[StructuredLinear]) -> str:
    """Why no layer of another kind can take the place of this one, which may be a subclass of
    `kinds`; empty if one can."""
    if type(layer) not in (StructuredLinear, *kinds):
        return f"is a {type(layer).__name__}: its own behaviour would be lost"
    if any(hasattr(parameter, "full_tensor") for parameter in layer.parameters()):
        return "is sharded: gather it first"
    return find_what_is_lost(layer)


def _list_hooks(hook_registry: Any) -> list[Any]:
    """The functions of a registry of hooks, without those that torch's weight_norm leaves behind.

    `remove_parametrizations` does not remove them. They read states from before torch 2.0. A
    parametrisation that is still there is found as a module.
    """
    if isinstance(hook_registry, Mapping):
        hooks = list(hook_registry.values())
    else:
        hooks = [hook_registry] if hook_registry else []
    functions = [getattr(hook, "hook", hook) for hook in hooks]  # torch wraps some
    leaving = "torch.nn.utils.parametrizations"
    return [function for function in functions if getattr(function, "__module__", "") != leaving]


def _find_additions(module: nn.Module) -> list[str]:
    """Parameters, buffers and submodules that somebody has added to a linear layer."""
    usual = _build_smallest(type(module))
    additions = []
    for store in _STORES:
        additions += [name for name in getattr(module, store) if name not in getattr(usual, store)]
    if isinstance(module, StructuredLinear):
        for store in _STORES:
            names = getattr(module.cores, store)
            additions += [f"cores.{name}" for name in names if name not in module.core_names]
    return additions


# ---- what somebody has set on a layer ------------------------------------------------------------


def carry_attributes(old: nn.Module, new: nn.Module) -> None:
    """Set on the linear layer `new` what somebody has set on `old`, whose place it takes."""
    vars(new).update({name: vars(old)[name] for name in _find_attributes(old)})


def is_bookkeeping(attribute: str) -> bool:
    """Whether torch.compile or another library left it on a layer, for itself."""
    return attribute.startswith("_dynamo") or registry.is_bookkeeping(attribute)


def _find_attributes(module: nn.Module) -> list[str]:
    """The attributes that somebody has set on a linear layer."""
    usual = dir(_build_smallest(type(module)))
    return [name for name in vars(module) if name not in usual or is_bookkeeping(name)]


def _build_smallest(kind: type[nn.Module]) -> nn.Module:
    """A new linear layer of that kind, 1 -> 1 and without values, to compare others with."""
    if kind not in _SMALLEST:
        with torch.device("meta"):
            _SMALLEST[kind] = kind(1, 1)
    return _SMALLEST[kind]
