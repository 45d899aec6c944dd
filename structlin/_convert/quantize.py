"""`quantize`: structured layers in a quarter of their bytes, for inference."""

import torch
from torch import nn

from .._layer.linear import StructuredLinear, uninitialised
from .._layer.quantized import QuantizedLinear
from .._model.linears import Replacement, replace_layers, structured_layers
from .._model.obstacles import carry_attributes, find_reason_to_keep, require_replaceable
from .._model.select import Patterns, find_first, find_rules
from .._structure.arguments import checked


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
    candidates = [
        structured
        for structured in structured_layers(model)
        if not isinstance(structured.module, QuantizedLinear)
    ]
    if not candidates:
        raise ValueError(
            f"model={type(model).__name__} has no structured layer with floating-point cores: "
            "convert or compress it"
        )
    layers = [structured.layer for structured in candidates]
    included = None if include is None else find_rules("include", include, layers, model)
    excluded = find_rules("exclude", exclude, layers, model)
    chosen = []
    for n, (layer, module) in enumerate(candidates):
        is_included = included is None or find_first(included, n) is not None
        if not is_included or find_first(excluded, n) is not None:
            continue
        reason = _find_obstacle(module)
        if reason:
            raise ValueError(f"layer {layer.name!r} {reason}; exclude= leaves it as it is")
        chosen.append((layer, module))
    if not chosen:
        raise ValueError(f"include={include!r}, exclude={exclude!r} leave no layer to quantize")
    replacements = [Replacement(layer.names, _round_layer(module)) for layer, module in chosen]
    return replace_layers(model, replacements)


def _find_obstacle(layer: StructuredLinear) -> str:
    """Why the layer's cores cannot be rounded; empty if they can."""
    reason = find_reason_to_keep(layer)
    if reason:
        return reason
    if layer.cores[0].is_meta:
        return "has no values (meta)"
    if not all(core.isfinite().all() for core in layer.cores):
        return "has cores that are not finite"
    return ""


@torch.no_grad()
def _round_layer(layer: StructuredLinear) -> StructuredLinear:
    new = uninitialised(
        layer.in_features,
        layer.out_features,
        layer.structure,
        kind=QuantizedLinear,
        bias=False,
        init=layer.init,
        zero_init=layer.zero_init,
        device=layer.cores[0].device,
        dtype=layer.cores[0].dtype,
    )
    new.set_cores_(layer.effective_cores())
    new.label = layer.label
    new.conv1d = layer.conv1d
    new.bias = layer.bias
    carry_attributes(layer, new)
    return new.train(layer.training)
