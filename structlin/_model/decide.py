"""What happens to each linear layer of a model: its structure, or the reason why it stays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from .._hosts.registry import require_whole
from .._structure.families import Family, label, structure_of
from .._structure.structure import Structure
from .kinds import PROTECTED
from .linears import Layer, linear_layers
from .obstacles import require_replaceable
from .select import Patterns, Rule, find_first, find_rules
from .stacks import expert_layers

Spec = Family | Structure


@dataclass(frozen=True)
class Decision:
    """What happens to one layer: its structure, or the reason why it stays."""

    layer: Layer
    structure: Spec | None = None  #: as it was asked for, or as `compress` chose it
    resolved: Structure | None = None  #: the same for the layer's widths; None: not chosen yet
    reason: str = ""
    zero_init: bool = False

    @property
    def outcome(self) -> str:
        """Its structure, or the reason why it stays, as tables say it."""
        if self.structure is None:
            return self.reason
        return label(self.structure) + (", starts at zero" if self.zero_init else "")


class Target(NamedTuple):
    """A layer that is converted, and its structure for the layer's widths."""

    layer: Layer
    structure: Structure


def list_targets(decisions: Iterable[Decision]) -> list[Target]:
    """The layers that are converted, in their order."""
    return [Target(d.layer, d.resolved) for d in decisions if d.resolved is not None]


def require_matrices(decisions: Iterable[Decision], what: str) -> None:
    """Raises: ValueError: a layer would get a structure that is no matrix, which `what` needs."""
    for layer, structure in list_targets(decisions):
        structure.require_matrix(f"layer {layer.name!r}: {what}")


def decide(
    model: nn.Module,
    structure: Spec,
    *,
    include: Patterns | None,
    exclude: Patterns,
    overrides: Mapping[Any, Spec | None] | None,
    untie: bool,
    zero_init: Patterns = (),
    sizes_open: bool = False,
    experts: bool = False,
) -> list[Decision]:
    """A decision for each linear layer of `model`; the arguments are those of `convert`.

    Args:
        sizes_open: leave `resolved` to be chosen, where there is no override.
        experts: also for each parameter that holds the matrices of experts.

    Raises:
        ValueError, TypeError: what `convert` raises, also for `untie` where nothing is tied.
    """
    require_replaceable(model)
    require_whole(model)
    overrides = overrides or {}
    layers: list[Layer] = linear_layers(model)
    if experts:
        layers += expert_layers(model)
    if not layers:
        kinds = "nn.Linear, or transformers' Conv1D"
        raise ValueError(f"model={type(model).__name__} has no linear layer ({kinds})")
    included = None if include is None else find_rules("include", include, layers, model)
    excluded = find_rules("exclude", exclude, layers, model)
    overriding = find_rules("overrides", overrides, layers, model)
    zeroed = find_rules("zero_init", zero_init, layers, model)
    if included == []:
        raise ValueError(
            f"include={include!r} has no pattern; leave it out to convert every layer but heads"
        )

    decisions = []
    for n, layer in enumerate(layers):
        override = find_first(overriding, n)
        chosen = structure if override is None else overrides[override.pattern]
        reason = _find_reason(n, layer, included, excluded, override, chosen, untie)
        if reason or chosen is None:
            decisions.append(Decision(layer, reason=reason))
            continue
        resolved = None if sizes_open and override is None else _resolve(layer, chosen)
        zero = find_first(zeroed, n) is not None
        decisions.append(Decision(layer, chosen, resolved, zero_init=zero))

    meant = [rule for rule in overriding if overrides[rule.pattern] is not None]
    _check_rules([*(included or []), *zeroed, *meant], decisions)
    _check_order(overriding, layers)
    if all(decision.structure is None for decision in decisions):
        reasons = "; ".join(f"{d.layer.name or 'the model itself'}: {d.reason}" for d in decisions)
        raise ValueError(f"nothing to convert in {type(model).__name__}: {reasons}")
    if untie and not any(d.layer.tied for d in decisions if d.structure is not None):
        raise ValueError(
            "untie=True: no layer that is converted shares its weight; include one, say 'head'"
        )
    return decisions


def _find_reason(
    n: int,
    layer: Layer,
    included: list[Rule] | None,
    excluded: list[Rule],
    override: Rule | None,
    chosen: Spec | None,
    untie: bool,
) -> str:
    """Why the n-th layer stays as it is; empty if it is converted."""
    if find_first(excluded, n) is not None:
        return "excluded"
    if override is not None and chosen is None:
        return f"{override} is None"
    if override is None and included is None and layer.role in PROTECTED:
        return f"{layer.role}: only converted when named"
    if override is None and included is not None and find_first(included, n) is None:
        matched = any(n in rule.matches for rule in included)
        return f"{layer.role}: only converted when named" if matched else "not included"
    if layer.obstacle:
        return layer.obstacle
    if layer.tied and not untie:
        sharing = ", ".join(layer.tied)
        return f"shares its weight with {sharing}; untie=True converts it all the same"
    return ""


def _resolve(layer: Layer, structure: Spec) -> Structure:
    try:
        return structure_of(structure, layer.in_features, layer.out_features)
    except ValueError as error:
        where = f"layer {layer.name!r} ({layer.in_features} -> {layer.out_features})"
        raise ValueError(f"{where}, structure {label(structure)}: {error}") from None


def _check_rules(rules: Iterable[Rule], decisions: Sequence[Decision]) -> None:
    for rule in rules:
        if all(decisions[n].structure is None for n in rule.means):
            examples = [decisions[n] for n in sorted(rule.means)[:3]]
            reasons = "; ".join(f"{d.layer.name!r} {d.reason}" for d in examples)
            raise ValueError(f"{rule} converts nothing: {reasons}")


def _check_order(overriding: Sequence[Rule], layers: Sequence[Layer]) -> None:
    """Raises: ValueError: an override means only layers that those before it mean."""
    for rule in overriding:
        earlier = {n: find_first(overriding, n) for n in sorted(rule.means)}
        if rule in earlier.values():
            continue
        example, first = next(iter(earlier.items()))
        raise ValueError(
            f"{rule} is for no layer: {layers[example].name!r} is for {first}, which stands before "
            "it; the first that matches holds"
        )
