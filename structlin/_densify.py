"""The way back: structured layers of a model -> the dense layers that they stand for."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from ._arguments import checked, require_choice
from ._linear import StructuredLinear
from ._model.survey import (
    build_dense_layer,
    find_reason_to_keep,
    find_sharding,
    require_replaceable,
    swap,
)
from ._plan import find_declare
from ._quantize import QuantizedLinear
from ._report import has_matrix, kind_of
from ._timing import time_in_turn

WHERE = ("everywhere", "slower")


@checked
def densify(model: nn.Module, *, where: str = "everywhere", tokens: int | None = None) -> nn.Module:
    """Replace structured layers of `model` by the dense ones that they stand for, in place.

    What was an nn.Linear or a Conv1D is one again, under the same names in `state_dict`. Dtype,
    device, `requires_grad`, training mode and biases stay. So do attributes that somebody has set
    on a layer. Layers that were shared are shared.

    Args:
        model: any module with structured layers; it is changed.
        where: "everywhere" replaces every structured layer. "slower" is for inference: it times
            each layer against its dense one on random input, and replaces the layers that lose.
            Layers that are alike are timed once. Each process measures for itself. A layer
            with an activation between its cores stays.
        tokens: of one call, for `where="slower"`, over all leading dimensions: batch size times
            sequence length, or the batch size alone when text is generated with a cache.

    Returns:
        `model`; the new layer if `model` is itself a structured layer that is replaced.

    Raises:
        ValueError: no structured layer; one to replace has an activation between its cores, is of
            a class of its own, has hooks, or has cores that are no ordinary parameters (sharded,
            parametrised, pruned); one to time has no values (meta) or is sharded; the model is
            wrapped, as for `convert`; inference mode; `where` is unknown; `tokens` is not positive.
            The model is then as it was.

    >>> from structlin import BTT, TT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), BTT())
    >>> densify(model)
    Sequential(
      (0): Linear(in_features=64, out_features=64, bias=True)
      (1): ReLU()
    )
    >>> model = nn.Sequential(StructuredLinear(64, 64, TT(rank=16)))
    >>> x = torch.randn(4096, 64)
    >>> y = model(x)
    >>> torch.allclose(densify(model, where="slower", tokens=4096)(x), y, atol=1e-4)
    True
    """
    layers, declare = _find_structured(model), find_declare(model)
    require_choice("where", where, WHERE)
    if where == "slower":
        layers = _find_slower(layers, tokens)
    elif tokens is not None:
        raise ValueError(f"tokens={tokens!r} goes with where='slower', which times a call")
    for layer, names in layers.items():
        layer.structure.require_matrix(f"layer {names[0]!r}: densify")
        if reason := find_reason_to_keep(layer, QuantizedLinear):
            raise ValueError(f"layer {names[0]!r} {reason}")
    model = swap(model, [(names, build_dense_layer(layer)) for layer, names in layers.items()])
    declare(model)
    return model


Layers = Mapping[StructuredLinear, list[str]]  # with all their names


def _find_structured(model: nn.Module) -> Layers:
    """The structured layers of a model whose layers can be replaced."""
    require_replaceable(model)
    names: dict[StructuredLinear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, StructuredLinear):
            names.setdefault(module, []).append(name)
    if not names:
        raise ValueError(f"model={type(model).__name__} has no structured layer")
    return names


def _find_slower(layers: Layers, tokens: int | None) -> Layers:
    """The layers that take longer than the dense ones that they would become."""
    if not tokens:
        raise ValueError(f"tokens={tokens!r} must be a positive integer: the tokens of one call")
    found: dict[StructuredLinear, list[str]] = {}
    slower: dict[tuple[object, ...], bool] = {}
    for layer, names in layers.items():
        if not has_matrix(layer):
            continue
        meta = "has no values (meta)" if layer.cores[0].is_meta else ""
        if reason := find_sharding(layer) or meta:
            raise ValueError(f"layer {names[0]!r} {reason}")
        kind = kind_of(layer)
        if kind not in slower:
            slower[kind] = _is_slower(layer, tokens)
        if slower[kind]:
            found[layer] = names
    return found


@torch.no_grad()
def _is_slower(layer: StructuredLinear, tokens: int) -> bool:
    """Whether the layer takes longer than the dense one it would become: medians of rounds."""
    device, dtype = layer.cores[0].device, layer.compute_dtype
    random = torch.Generator(device).manual_seed(0)  # the user's random numbers stay
    shape = tokens, layer.in_features
    x = torch.randn(shape, generator=random, device=device, dtype=dtype)
    calls = [partial(each.forward, x) for each in (layer, build_dense_layer(layer))]
    own, dense = time_in_turn(calls, device)
    return own > dense
