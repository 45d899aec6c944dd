"""The way back: structured layers of a model -> the dense layers that they stand for."""

from importlib import import_module

from torch import nn

from .._hosts.registry import find_declare
from .._layer.quantized import QuantizedLinear
from .._model.linears import Replacement, build_dense_layer, replace_layers, structured_layers
from .._model.obstacles import find_reason_to_keep, require_replaceable
from .._model.stacks import build_dense_experts, find_reason_to_keep_experts, structured_experts
from .._structure.arguments import checked


@checked
def densify(model: nn.Module) -> nn.Module:
    """Replace structured layers of `model` by the dense ones that they stand for, in place.

    What was an nn.Linear or a Conv1D is one again, under the same names in `state_dict`. Dtype,
    device, `requires_grad`, training mode and biases stay. So do attributes that somebody has set
    on a layer. Layers that were shared are shared.

    Args:
        model: any module with structured layers; it is changed.

    Returns:
        `model`; the new layer if `model` is itself a structured layer.

    Raises:
        ValueError: no structured layer; one has an activation between its cores, is of a class of
            its own, has hooks, or has cores that are no ordinary parameters (sharded, parametrised,
            pruned); the model is wrapped, as for `convert`; inference mode. The model is then as it
            was.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), BTT())
    >>> densify(model)
    Sequential(
      (0): Linear(in_features=64, out_features=64, bias=True)
      (1): ReLU()
    )
    """
    require_replaceable(model)
    layers = structured_layers(model)
    experts = structured_experts(model)
    if not layers and not experts:
        raise ValueError(f"model={type(model).__name__} has no structured layer")
    declare = find_declare(model, import_module)
    for layer, module in layers:
        module.structure.require_matrix(f"layer {layer.name!r}: densify")
        reason = find_reason_to_keep(module, QuantizedLinear)
        if reason:
            raise ValueError(f"layer {layer.name!r} {reason}")
    for stack, names in experts.items():
        stack.structure.require_matrix(f"experts {names[0]!r}: densify")
        reason = find_reason_to_keep_experts(stack)
        if reason:
            raise ValueError(f"experts {names[0]!r}: {reason}")
    replacements = [Replacement(layer.names, build_dense_layer(module)) for layer, module in layers]
    for stack, names in experts.items():
        replacements.append(Replacement(names, build_dense_experts(stack)))
    return replace_layers(model, replacements, lambda model, undo: declare(model))
