"""Any model of linear layers -> structured, in place: choose by name or role, plan wholly, then change."""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn

from .families import DEFAULT, Family, label, structure_of
from .layers import PROTECTED, ROLES, Layer, linear_layers
from .linear import StructuredLinear
from .report import Table, percent
from .scaling import INITS
from .structure import Structure

Spec = Family | Structure
Patterns = str | Iterable[str]


@dataclass
class Decision:
    """What happens to one layer: its structure, or the reason why it stays."""

    layer: Layer
    structure: Spec | None = None
    resolved: Structure | None = None
    reason: str = ""
    zero_init: bool = False


@dataclass
class Plan:
    """What `convert` will do. Printing it shows every linear layer; `apply` does it."""

    model: nn.Module
    decisions: list[Decision]
    init: str = "mup"
    weight_norm: bool = False
    _done: bool = field(default=False, repr=False)

    def apply(self) -> nn.Module:
        """Swap the layers in place and return the model (for a model that is one linear layer: the new layer).

        New layers are all built before the first one is swapped in.
        """
        if self._done:
            raise ValueError("this plan has been applied already; make a new one with plan(model, ...)")
        chosen = [(decision, self._build(decision)) for decision in self.decisions if decision.structure is not None]
        model = self.model
        for decision, new in chosen:
            for name in decision.layer.names:
                if not name:
                    model = new
                    continue
                parent, _, child = name.rpartition(".")
                setattr(self.model.get_submodule(parent), child, new)
        self._done = True
        return model

    def _build(self, decision: Decision) -> StructuredLinear:
        old, layer = decision.layer.module, decision.layer
        assert decision.structure is not None
        assert isinstance(old.weight, torch.Tensor)
        new = StructuredLinear(
            layer.in_features,
            layer.out_features,
            decision.structure,
            bias=False,
            weight_norm=self.weight_norm,
            init=self.init,
            zero_init=decision.zero_init,
            device=old.weight.device,
            dtype=old.weight.dtype,
        )
        for parameter in new.parameters():
            parameter.requires_grad_(old.weight.requires_grad)
        new.bias = old._parameters["bias"]  # the same parameter: its values, its requires_grad, its ties
        return new.train(old.training)

    def __str__(self) -> str:
        table = Table("layer", "role", "in -> out", "structure", "params", "/dense", "FLOPs/token", "/dense")
        for decision in self.decisions:
            layer, new = decision.layer, decision.resolved
            shape = f"{layer.in_features} -> {layer.out_features}"
            if new is None or decision.structure is None:
                table.row(layer.name, layer.role, shape, f"- ({decision.reason})")
                continue
            dense = layer.in_features * layer.out_features
            shares = (f"{new.params:,}", percent(new.params, dense), f"{new.flops:,}", percent(new.flops, 2 * dense))
            table.row(layer.name, layer.role, shape, label(decision.structure), *shares)
        return str(table)


def plan(
    model: nn.Module,
    structure: Spec = DEFAULT,
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[str, Spec | None] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: str = "mup",
    weight_norm: bool = False,
    zero_init: Patterns = (),
) -> Plan:
    """What `convert` with the same arguments would do, without doing it. Raises what `convert` raises."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} must be a torch.nn.Module")
    for option in (structure, *(overrides or {}).values()):
        if option is not None and not isinstance(option, Family | Structure):
            raise TypeError(f"structure={option!r} must be a family such as BTT(rank=1), or a Structure")
    if init not in INITS:
        raise ValueError(f"init={init!r} is unknown; there are {', '.join(INITS)}")
    layers = linear_layers(model)
    if not layers:
        raise ValueError(f"model={type(model).__name__} has no linear layer (nn.Linear, or transformers' Conv1D)")

    includes = None if include is None else {rule: _hits("include", rule, layers, model) for rule in _rules(include)}
    excluded = {rule: _hits("exclude", rule, layers, model) for rule in _rules(exclude)}
    override = {rule: _hits("overrides", rule, layers, model) for rule in (overrides or {})}
    zeroed = {rule: _hits("zero_init", rule, layers, model) for rule in _rules(zero_init)}
    if includes == {}:
        raise ValueError(f"include={include!r} has no rule; leave it out to convert every layer but heads")

    decisions = [Decision(layer) for layer in layers]
    for n, (layer, decision) in enumerate(zip(layers, decisions, strict=True)):
        rule = next((rule for rule, hits in override.items() if n in hits), None)
        selected = layer.role not in PROTECTED if includes is None else any(n in hits for hits in includes.values())
        if any(n in hits for hits in excluded.values()):
            decision.reason = "excluded"
        elif rule is not None and (overrides or {})[rule] is None:
            decision.reason = f"overrides: {rule} is None"
        elif rule is None and not selected:
            protected = layer.role in PROTECTED and (includes is None or _matched(includes, layer))
            decision.reason = f"{layer.role}: only converted when named" if protected else "not included"
        elif layer.obstacle:
            decision.reason = layer.obstacle
        elif filter_fn is not None and not any(filter_fn(layer.module, name) for name in layer.names):
            decision.reason = "refused by filter_fn"
        else:
            chosen = structure if rule is None else (overrides or {})[rule]
            assert chosen is not None
            decision.resolved = _resolve(layer, chosen)
            decision.structure = chosen
        decision.zero_init = any(n in hits for hits in zeroed.values())

    _check_rules("include", includes or {}, decisions)
    _check_rules("zero_init", zeroed, decisions)
    _check_rules("overrides", {rule: override[rule] for rule, spec in (overrides or {}).items() if spec}, decisions)
    if not any(decision.structure is not None for decision in decisions):
        reasons = "; ".join(f"{decision.layer.name or 'the model itself'}: {decision.reason}" for decision in decisions)
        raise ValueError(f"nothing to convert in {type(model).__name__}: {reasons}")
    return Plan(model, decisions, init=init, weight_norm=weight_norm)


def convert(
    model: nn.Module,
    structure: Spec = DEFAULT,
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[str, Spec | None] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: str = "mup",
    weight_norm: bool = False,
    zero_init: Patterns = (),
) -> nn.Module:
    """Replace linear layers (nn.Linear, transformers' Conv1D) of `model` by structured ones, in place.

    Everything is decided and built before the first layer is replaced. Device, dtype, `requires_grad`, training mode
    and biases stay. Make the optimizer afterwards: an older one holds the old parameters.

    A pattern is a role ("ffn", "attention", "other", "head", "embedding", "router"), a glob over the whole dotted name
    ("*mlp*"; `*` crosses dots), or "re:" and a regular expression that must match the whole name.

    Args:
        model: any module; it is changed.
        structure: a family or a `Structure`.
        include: patterns of the layers to convert; None: every linear layer that is not a head, an embedding or a
            router. Those three are converted only by a pattern that matches nothing else.
        exclude: patterns of layers to leave; it wins over everything.
        overrides: pattern -> another structure for these layers, or None to leave them; the first that matches holds,
            also for layers that `include` does not match.
        filter_fn: `filter_fn(module, name)` must be true as well.
        init: "mup", "spectral" or "orthogonal", see `init_std`: the new layers start afresh.
        weight_norm: see `StructuredLinear`.
        zero_init: patterns of layers that start as zero: the last linear layer of each residual branch.

    Returns:
        `model`; the new layer if `model` is itself a linear layer.

    Raises:
        ValueError: a rule that converts nothing, nothing to convert at all, or a structure that does not fit a layer.
            The model is then as it was.
        TypeError: not a module, or not a structure.

    Warns:
        UserWarning: layers that grow; a model that says that its weights were loaded from a checkpoint.

    >>> from structlin import BTT
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> sum(p.numel() for p in convert(model, BTT(rank=1)).parameters())  # dense: 33,088
    6464
    """
    planned = plan(
        model,
        structure,
        include=include,
        exclude=exclude,
        overrides=overrides,
        filter_fn=filter_fn,
        init=init,
        weight_norm=weight_norm,
        zero_init=zero_init,
    )
    _warn(planned)
    return planned.apply()


def _rules(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _hits(argument: str, rule: str, layers: list[Layer], model: nn.Module) -> set[int]:
    """Indices of the layers that `rule` matches; a rule that matches protected layers and others means the others."""
    if rule.startswith("re:"):
        try:
            re.compile(rule[3:])
        except re.error as error:
            raise ValueError(f"{argument}: {rule!r} is not a regular expression: {error}") from None
    hits = {n for n, layer in enumerate(layers) if _matches(rule, layer)}
    if not hits:
        raise ValueError(f"{argument}: {rule!r} matches no linear layer{_hint(rule, layers, model)}")
    if argument in ("include", "overrides"):
        hits = {n for n in hits if layers[n].role not in PROTECTED} or hits
    return hits


def _matches(rule: str, layer: Layer) -> bool:
    if rule in ROLES:
        return layer.role == rule
    if rule.startswith("re:"):
        return any(re.fullmatch(rule[3:], name) for name in layer.names)
    return any(fnmatchcase(name, rule) for name in layer.names)


def _matched(includes: Mapping[str, set[int]], layer: Layer) -> bool:
    return any(_matches(rule, layer) for rule in includes)


def _hint(rule: str, layers: list[Layer], model: nn.Module) -> str:
    names = [name for layer in layers for name in layer.names]
    if rule in ROLES:
        found = sorted({layer.role for layer in layers})
        return f"; the roles in this model are {', '.join(found)}"
    if any(rule == name for name, _ in model.named_modules(remove_duplicate=False)):
        return f": it is a container; its layers are {rule + '.*'!r}"
    close = get_close_matches(rule.strip("*"), names, n=3, cutoff=0.3) or names[:3]
    return f"; the model has, for example, {', '.join(map(repr, close))}"


def _resolve(layer: Layer, structure: Spec) -> Structure:
    try:
        return structure_of(structure, layer.in_features, layer.out_features)
    except ValueError as error:
        where = f"layer {layer.name!r} ({layer.in_features} -> {layer.out_features})"
        raise ValueError(f"{where}, structure {label(structure)}: {error}") from None


def _check_rules(argument: str, rules: Mapping[str, set[int]], decisions: list[Decision]) -> None:
    for rule, hits in rules.items():
        if all(decisions[n].structure is None for n in hits):
            reasons = "; ".join(f"{decisions[n].layer.name!r} {decisions[n].reason}" for n in sorted(hits)[:3])
            raise ValueError(f"{argument}: {rule!r} converts nothing: {reasons}")


def _warn(planned: Plan) -> None:
    grown = [
        f"{decision.layer.name} ({decision.layer.in_features * decision.layer.out_features:,} -> {new.params:,})"
        for decision in planned.decisions
        if (new := decision.resolved) and new.params > decision.layer.in_features * decision.layer.out_features
    ]
    if grown:
        warnings.warn(f"these layers grow, in parameters: {', '.join(grown)}", UserWarning, stacklevel=3)
    source = getattr(getattr(planned.model, "config", None), "_name_or_path", "")
    if source:
        warnings.warn(
            f"the model was loaded from {source!r}: init={planned.init!r} starts its converted layers afresh",
            UserWarning,
            stacklevel=3,
        )
