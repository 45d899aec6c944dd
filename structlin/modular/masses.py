"""Masses for `optim.Muon` and `optim.Normed`: of a module of the algebra, or of any model by name
or role.

Source: Large et al. 2024 (arXiv:2405.14813), section 3. What is not written in the algebra is taken
for a tuple of layers.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .._arguments import checked
from .._model.parameters import parameters_of
from .._model.select import suggest_names
from .._model.survey import ROLES, linear_layers, role_of
from .module import Module


@checked
def masses(model: nn.Module, rules: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The `masses` of an optimizer: layer name -> length of its step at lr = 1; a tuple, of each of
    its cores.

    Of a module of the algebra, without `rules`: mass / (M * later sensitivities). Without momentum
    `Muon(net, masses=masses(net))` then makes the steps of `net.dualize()`.

    Of any other model by the rule of a tuple, mass / M. Each rule gives its mass to all the layers
    that it matches together. The blocks among them, layers that have a name up to its first number
    in common, get equal parts of it, and so do the layers of a block. What is frozen counts
    nothing.

    Args:
        rules: role ("ffn", "attention", "other", "head", "embedding", "router") or glob over names
            -> mass; the first that matches a layer holds.

    Raises:
        ValueError: a mass that is not positive and finite; a rule that matches no layer but those
            of rules before it; a layer that no rule matches; a trainable weight of the algebra with
            mass zero.
        TypeError: `rules` for a module of the algebra, or none for another.

    >>> from structlin.optim import Muon
    >>> hidden = nn.Linear(64, 64), nn.Linear(64, 64)
    >>> model = nn.Sequential(nn.Embedding(50, 64), *hidden, nn.Linear(64, 50))
    >>> masses(model, {"embedding": 1, "3": 1, "*": 2})
    {'0': 0.25, '1': 0.25, '2': 0.25, '3': 0.25}
    >>> optimizer = Muon(model, lr=0.1, masses=masses(model, {"embedding": 1, "3": 1, "*": 2}))
    """
    if isinstance(model, Module):
        if rules is not None:
            raise TypeError(
                "rules are given, but a module of the algebra has masses of its own: "
                "change them by tare()"
            )
        return _of_algebra(model)
    if rules is None:
        name = type(model).__name__
        raise TypeError(
            f"rules=None: {name} is not written in the algebra; "
            "give rules such as {'head': 1, '*': 5}"
        )
    return _of_rules(model, rules)


def _of_algebra(model: Module) -> dict[str, Any]:
    layers = {info.name: info.layer for info in parameters_of(model)}
    lengths = defaultdict[str, list[float]](list)
    for name, length in model.lengths().items():
        if length:
            lengths[layers[name]].append(length)
        elif model.get_parameter(name).requires_grad:
            raise ValueError(
                f"{name!r} has mass 0: optimizers take no such; "
                "freeze it with requires_grad_(False)"
            )
    return {
        layer: cores[0] if len(cores) == 1 else tuple(cores) for layer, cores in lengths.items()
    }


def _of_rules(model: nn.Module, rules: Mapping[str, float]) -> dict[str, float]:
    for rule, mass in rules.items():
        if not mass:
            raise ValueError(
                f"rules: {rule!r} has mass {mass!r}; masses are positive and finite "
                "(requires_grad_(False) freezes)"
            )
    roles = {name: layer.role for layer in linear_layers(model) for name in layer.names}
    chosen = dict[str, tuple[str, str]]()  # layer -> rule, block
    for info in parameters_of(model):
        kind, layer = info.weight.kind, info.layer
        if kind not in ("matrix", "embedding") or not info.parameter.requires_grad:
            continue
        role = "embedding" if kind == "embedding" else roles.get(layer, role_of(layer))
        matching = [
            rule for rule in rules if (rule == role if rule in ROLES else fnmatchcase(layer, rule))
        ]
        if not matching:
            raise ValueError(
                f"rules: none matches layer {layer!r} (role {role!r}); "
                "a last rule '*' takes all the rest"
            )
        chosen[layer] = matching[0], _block(layer)
    layers = Counter(chosen.values())
    blocks = Counter(rule for rule, _ in layers)
    if idle := [rule for rule in rules if not blocks[rule]]:
        raise ValueError(
            f"rules: {idle[0]!r} matches no trainable layer that no rule before it matches"
            f"{suggest_names(idle[0], [*chosen])}"
        )
    total = sum(rules.values())
    return {
        layer: rules[rule] / total / blocks[rule] / layers[rule, block]
        for layer, (rule, block) in chosen.items()
    }


def _block(layer: str) -> str:
    """The name up to its first number, all of it if there is none.

    >>> _block("h.3.attn.c_attn"), _block("lm_head")
    ('h.3', 'lm_head')
    """
    found = re.match(r"([^.]+\.)*?\d+(?=\.|$)", layer)
    return found[0] if found else layer
