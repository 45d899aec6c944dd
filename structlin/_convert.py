"""Any model of linear layers -> structured, in place: choose by name or role, plan wholly, then change."""

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ._families import DEFAULT, Family, Split, label, structure_of
from ._linear import StructuredLinear, uninitialised
from ._model.survey import PROTECTED, ROLES, Layer, has_hooks, is_conv1d, linear_layers, no_layers, swap
from ._product import check_mode
from ._projection.budget import NAMES, allocate
from ._projection.calibration import Calibration, covariances
from ._projection.solve import project, relative_error
from ._report import Table, percent
from ._structure import Structure
from .scaling import INITS

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
    covariance: Tensor | None = field(default=None, repr=False)
    cores: list[Tensor] | None = field(default=None, repr=False)  #: the projection, if it is known before `apply`
    error: float | None = None


@dataclass
class Plan:
    """What `convert` will do. Printing it shows every linear layer; `apply` does it."""

    model: nn.Module
    decisions: list[Decision]
    init: str = "mup"
    weight_norm: bool = False
    untie: bool = False
    mode: str = "auto"
    recompute: bool = False
    _done: bool = field(default=False, repr=False)

    def apply(self) -> nn.Module:
        """Swap the layers in place and return the model (for a model that is one linear layer: the new layer).

        New layers are all built before the first one is swapped in.
        """
        if self._done:
            raise ValueError("this plan has been applied already; make a new one with plan(model, ...)")
        for layer in (decision.layer for decision in self.decisions if decision.structure is not None):
            if any(self.model.get_submodule(name) is not layer.module for name in layer.names):
                raise ValueError(f"layer {layer.name!r} was replaced after this plan was made; make a new one")
        chosen = [(decision, self._build(decision)) for decision in self.decisions if decision.structure is not None]
        model = swap(self.model, [(decision.layer.names, new) for decision, new in chosen])
        if self.untie:
            untie(model)
        _declare(model)
        self._done = True
        return model

    @property
    def errors(self) -> dict[str, float]:
        """After `apply` with init="project": each converted layer's relative error, `||W - B|| / ||W||`, with
        calibration that of its outputs, `||(W - B) X|| / ||W X||`."""
        return {d.layer.name: d.error for d in self.decisions if d.error is not None}

    def _build(self, decision: Decision) -> StructuredLinear:
        old, layer = decision.layer.module, decision.layer
        assert decision.structure is not None
        assert isinstance(old.weight, Tensor)
        options: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
        options |= {"bias": False, "weight_norm": self.weight_norm, "zero_init": decision.zero_init}
        widths = (layer.in_features, layer.out_features, decision.structure)
        if self.init != "project":
            new = StructuredLinear(*widths, init=self.init, **options)
        else:
            new = uninitialised(*widths, **options)
            if decision.cores is None:
                weight, given = _matrix(layer), decision.covariance
                decision.cores = project(weight, decision.structure, covariance=given)
                decision.error = relative_error(weight, decision.structure, decision.cores, covariance=given)
            new.set_cores_(decision.cores)
            decision.cores = decision.covariance = None
        new.conv1d = is_conv1d(old)
        for parameter in new.parameters():
            parameter.requires_grad_(old.weight.requires_grad)
        new.bias = old._parameters["bias"]  # the same parameter: its values, its requires_grad, its ties
        return new.train(old.training)

    def __str__(self) -> str:
        table = Table("layer", "role", "in -> out", "structure", "params", "/dense", "FLOPs/token", "/dense", "error")
        for decision in self.decisions:
            layer, new = decision.layer, decision.resolved
            shape = f"{layer.in_features} -> {layer.out_features}"
            if new is None or decision.structure is None:
                table.row(layer.name, layer.role, shape, f"- ({decision.reason})")
                continue
            dense = layer.in_features * layer.out_features
            shares = (f"{new.params:,}", percent(new.params, dense), f"{new.flops:,}", percent(new.flops, 2 * dense))
            error = "" if decision.error is None else f"{decision.error:.4f}"
            table.row(layer.name, layer.role, shape, label(decision.structure), *shares, error)
        for stacked in no_layers(self.model):
            table.row(stacked, "", "", "- (a parameter, no linear layer)")
        return str(table)


def plan(
    model: nn.Module,
    structure: Spec = DEFAULT,
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[str, Spec | None] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: str | None = None,
    weight_norm: bool = False,
    zero_init: Patterns = (),
    calibration: Calibration | None = None,
    budget: float | None = None,
    budget_of: str = "params",
    untie: bool = False,
    split: Mapping[str, int] | None = None,
    mode: str = "auto",
    recompute: bool = False,
) -> Plan:
    """What `convert` with the same arguments would do, without doing it. Raises what `convert` raises."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} must be a torch.nn.Module")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise TypeError(f"overrides={overrides!r} must be a mapping of patterns to structures, or to None")
    for option in (structure, *(spec for spec in (overrides or {}).values() if spec is not None)):
        if not isinstance(option, Family | Structure):
            raise TypeError(f"structure={option!r} must be a family such as BTT(rank=1), or a Structure")
    if hasattr(model, "_orig_mod"):
        raise ValueError(f"model={type(model).__name__} is compiled: convert first, then torch.compile")
    check_mode(mode)
    init = _check_init(init, calibration, budget, zero_init)
    if budget_of not in NAMES or (budget is None and budget_of != "params"):
        known = f"{' or '.join(map(repr, NAMES))}, and goes with a budget, for example budget=0.5"
        raise ValueError(f"budget_of={budget_of!r}: it is {known}")
    layers = linear_layers(model)
    if not layers:
        raise ValueError(f"model={type(model).__name__} has no linear layer (nn.Linear, or transformers' Conv1D)")

    includes = None if include is None else {rule: _hits("include", rule, layers, model) for rule in _rules(include)}
    excluded = {rule: _hits("exclude", rule, layers, model) for rule in _rules(exclude)}
    override = {rule: _hits("overrides", rule, layers, model) for rule in (overrides or {})}
    zeroed = {rule: _hits("zero_init", rule, layers, model) for rule in _rules(zero_init)}
    splits = {rule: _hits("split", rule, layers, model) for rule in (split or {})}
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
        elif layer.tied and not untie:
            decision.reason = f"shares its weight with {', '.join(layer.tied)}; untie=True converts it all the same"
        elif filter_fn is not None and not any(filter_fn(layer.module, name) for name in layer.names):
            decision.reason = "refused by filter_fn"
        else:
            chosen = structure if rule is None else (overrides or {})[rule]
            assert chosen is not None
            parts = next(((split or {})[rule] for rule, hits in splits.items() if n in hits), None)
            decision.structure = chosen
            if parts is not None:
                if not isinstance(chosen, Family):
                    raise ValueError(f"split={split!r}: structure={chosen!r} of {layer.name!r} must be a family")
                decision.structure = Split(parts=parts, of=chosen)
            if budget is None or rule is not None:
                decision.resolved = _resolve(layer, decision.structure)
        decision.zero_init = any(n in hits for hits in zeroed.values())

    _check_rules("include", includes or {}, decisions)
    _check_rules("split", splits, decisions)
    _check_rules("zero_init", zeroed, decisions)
    _check_rules("overrides", {rule: override[rule] for rule, spec in (overrides or {}).items() if spec}, decisions)
    if not any(decision.structure is not None for decision in decisions):
        reasons = "; ".join(f"{decision.layer.name or 'the model itself'}: {decision.reason}" for decision in decisions)
        raise ValueError(f"nothing to convert in {type(model).__name__}: {reasons}")
    if untie and not any(decision.layer.tied for decision in decisions if decision.structure is not None):
        raise ValueError("untie=True: no layer that is converted shares its weight; include one, for example 'head'")
    if init == "project":
        _project(
            model,
            [decision for decision in decisions if decision.structure is not None],
            calibration,
            budget,
            budget_of,
        )
    return Plan(model, decisions, init=init, weight_norm=weight_norm, untie=untie, mode=mode, recompute=recompute)


def convert(
    model: nn.Module,
    structure: Spec = DEFAULT,
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[str, Spec | None] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: str | None = None,
    weight_norm: bool = False,
    zero_init: Patterns = (),
    calibration: Calibration | None = None,
    budget: float | None = None,
    budget_of: str = "params",
    untie: bool = False,
    split: Mapping[str, int] | None = None,
    mode: str = "auto",
    recompute: bool = False,
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
        init: "mup", "spectral" or "orthogonal", see `init_std`: the new layers start afresh. "project": each starts as
            near to the old one as its structure allows, see `project`; `plan(...).errors` tells how near. None: "mup",
            or "project" if `calibration` or `budget` is given.
        weight_norm: see `StructuredLinear`.
        zero_init: patterns of layers that start as zero: the last linear layer of each residual branch.
        calibration: an iterable of batches, or a function that runs the model: the error that projection makes small
            is then that of each layer's outputs on these inputs, see `covariances`.
        budget: fraction of the parameters of the layers that `structure` is meant for (those with an override are not
            counted): the rank, or number of blocks, of each is chosen for the least total error, see `allocate`.
        budget_of: "params", or "flops": `budget` is a fraction of their FLOPs a token.
        split: pattern -> number of equal parts of the outputs that get a matrix each, see `Split`: 3 for a fused qkv.
        mode, recompute: how the new layers multiply, and what they keep for the backward pass: see `StructuredLinear`.
        untie: convert also layers whose weight is tied to another module's, which keeps it; the model's config says so.

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
        calibration=calibration,
        budget=budget,
        budget_of=budget_of,
        untie=untie,
        split=split,
        mode=mode,
        recompute=recompute,
    )
    _warn(planned)
    return planned.apply()


def to_dense_(model: nn.Module) -> nn.Module:
    """Replace every structured layer of `model` by the dense one that it stands for, in place.

    What was an nn.Linear or a Conv1D is one again, under the same names in `state_dict`; dtype, device,
    `requires_grad`, training mode and biases stay, layers that were shared are shared.

    Returns:
        `model`; the new layer if `model` is itself a structured layer.

    Raises:
        ValueError: no structured layer; one that has hooks, or whose cores are no ordinary parameters (sharded).

    >>> from structlin import BTT
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), BTT())
    >>> to_dense_(model)
    Sequential(
      (0): Linear(in_features=64, out_features=64, bias=True)
      (1): ReLU()
    )
    """
    return _make_dense(model, _structured_layers(model))


def merge(model: nn.Module, *, tokens: int) -> nn.Module:
    """For inference: replace in place the structured layers that are slower than the dense ones they stand for.

    Layers that are faster at `tokens` tokens a call stay structured; the others become what `to_dense_` makes of them,
    under the same names in `state_dict`. The cost model (`kernels.cost`) decides, for each layer's dtype and device.

    Args:
        tokens: of one call, over all leading dimensions: batch size times sequence length, or the batch size alone
            when text is generated with a cache.

    Returns:
        `model`; the new layer if `model` is itself a structured layer that is replaced.

    Raises:
        ValueError: `tokens` is not positive; no structured layer; one to replace has hooks or is sharded.

    >>> from structlin import BlockDiagonal, TT
    >>> layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    >>> layers = convert(layers, TT(rank=16), overrides={"1": BlockDiagonal(blocks=8)})
    >>> [type(layer).__name__ for layer in merge(layers, tokens=4096)]
    ['Linear', 'StructuredLinear']
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens={tokens!r} must be a positive integer: the tokens of one call")

    def slower(layer: StructuredLinear) -> bool:
        return layer.way(tokens) == "dense"

    return _make_dense(model, {layer: names for layer, names in _structured_layers(model).items() if slower(layer)})


def _structured_layers(model: nn.Module) -> dict[StructuredLinear, list[str]]:
    """With all their names; an error if there are none."""
    names: dict[StructuredLinear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, StructuredLinear):
            names.setdefault(module, []).append(name)
    if not names:
        raise ValueError(f"model={type(model).__name__} has no structured layer")
    return names


def _make_dense(model: nn.Module, layers: Mapping[StructuredLinear, list[str]]) -> nn.Module:
    for layer, found in layers.items():
        sharded = type(layer) is not StructuredLinear or any(hasattr(core, "full_tensor") for core in layer.cores)
        if sharded or has_hooks(layer):
            reason = "is sharded: gather it first" if sharded else "has hooks, which would be lost"
            raise ValueError(f"layer {found[0]!r} {reason}")
    model = swap(model, [(found, _dense(layer)) for layer, found in layers.items()])
    _declare(model)
    return model


def untie(model: nn.Module) -> None:
    """Say in the config of a transformers model that its embeddings are not tied, or its next load would tie them."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        for part in (config, *(getattr(config, name, None) for name in ("text_config", "decoder"))):
            if getattr(part, "tie_word_embeddings", False):
                part.tie_word_embeddings = False


@torch.no_grad()
def _dense(layer: StructuredLinear) -> nn.Module:
    trains, weight = any(core.requires_grad for core in layer.cores), layer.to_dense()
    with torch.device("meta"):
        if layer.conv1d:
            from transformers.pytorch_utils import Conv1D

            new: Any = Conv1D(layer.out_features, layer.in_features)  # type: ignore[no-untyped-call]
        else:
            new = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    new.weight = nn.Parameter((weight.mT if layer.conv1d else weight).contiguous(), requires_grad=trains)
    new.bias = layer.bias
    dense: nn.Module = new.train(layer.training)
    return dense


def _declare(model: nn.Module) -> None:
    """Let transformers know which layers are structured, so that `save_pretrained` writes it down."""
    owner = sys.modules.get("transformers.modeling_utils")
    if owner is not None and isinstance(model, owner.PreTrainedModel):
        from . import hf

        hf.declare(model)


def _matrix(layer: Layer) -> Tensor:
    """The dense weight, `(out_features, in_features)`."""
    weight = layer.module._parameters["weight"]
    assert weight is not None
    return weight.detach().mT if is_conv1d(layer.module) else weight.detach()


def _check_init(init: str | None, calibration: Calibration | None, budget: float | None, zero_init: Patterns) -> str:
    given = {"calibration": calibration is not None, "budget": budget is not None}
    if init is None:
        init = "project" if any(given.values()) else "mup"
    if init not in (*INITS, "project"):
        raise ValueError(f"init={init!r} is unknown; there are {', '.join(INITS)} and project")
    for argument, is_given in given.items():
        if is_given and init != "project":
            raise ValueError(f"{argument} is given, but init={init!r} starts afresh; take init='project'")
    if init == "project" and _rules(zero_init):
        raise ValueError(f"zero_init={zero_init!r}: with init='project' layers start as what they were")
    return init


def _project(
    model: nn.Module,
    decisions: list[Decision],
    calibration: Calibration | None,
    budget: float | None,
    budget_of: str,
) -> None:
    """Find what projection needs before anything is changed: covariances, and with a budget sizes and cores."""
    for decision in decisions:
        weight = _matrix(decision.layer)
        if weight.is_meta:
            raise ValueError(
                f"init='project': layer {decision.layer.name!r} is on the meta device and has no values; "
                "load the weights first, or take init='mup'"
            )
        if not weight.isfinite().all():
            raise ValueError(f"init='project': the weight of layer {decision.layer.name!r} is not finite")
    if calibration is not None:
        found = covariances(model, [decision.layer.module for decision in decisions], calibration)
        for decision, covariance in zip(decisions, found, strict=True):
            decision.covariance = covariance
        unseen = [decision.layer.name for decision in decisions if decision.covariance is None]
        if unseen:
            text = f"calibration: no input reached {', '.join(unseen)}: projected by weight alone"
            warnings.warn(text, UserWarning, stacklevel=4)
    if budget is None:
        return
    free = [decision for decision in decisions if decision.resolved is None]
    families = [decision.structure for decision in free if isinstance(decision.structure, Family)]
    if not free or len(families) < len(free):
        raise ValueError(f"budget={budget}: structure must be a family, and be meant for some layer")
    weights = [_matrix(decision.layer) for decision in free]
    choices = allocate(weights, families, budget, [decision.covariance for decision in free], budget_of)
    for decision, choice in zip(free, choices, strict=True):
        decision.structure, decision.cores, decision.error = choice.family, choice.cores, choice.error
        decision.resolved = _resolve(decision.layer, choice.family)


def _rules(patterns: Patterns) -> list[str]:
    rules = [patterns] if isinstance(patterns, str) or not isinstance(patterns, Iterable) else list(patterns)
    for rule in rules:
        if not isinstance(rule, str) or not rule:
            raise TypeError(f"{rule!r} is no pattern: give names, globs or roles, as text")
    return rules


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
    return any(_matches_name(rule, name) for name in layer.names)


def _matches_name(rule: str, name: str) -> bool:
    return bool(re.fullmatch(rule[3:], name)) if rule.startswith("re:") else fnmatchcase(name, rule)


def _matched(includes: Mapping[str, set[int]], layer: Layer) -> bool:
    return any(_matches(rule, layer) for rule in includes)


def _hint(rule: str, layers: list[Layer], model: nn.Module) -> str:
    names = [name for layer in layers for name in layer.names]
    stacked = no_layers(model)
    if rule in ROLES:
        found = sorted({layer.role for layer in layers})
        stays = f"; these parameters are no linear layers: {', '.join(stacked[:3])}" if stacked else ""
        return f"; the roles in this model are {', '.join(found)}{stays}"
    if any(_matches_name(rule, name.split()[0]) for name in stacked):
        return f": these are parameters, no linear layers, and stay dense: {', '.join(stacked[:3])}"
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
    if stacked := no_layers(planned.model):
        text = f"left dense, for they are parameters and no linear layers: {', '.join(stacked)}"
        warnings.warn(text, UserWarning, stacklevel=3)
    source = getattr(getattr(planned.model, "config", None), "_name_or_path", "")
    if source and planned.init != "project":
        warnings.warn(
            f"the model was loaded from {source!r}: init={planned.init!r} starts its converted layers afresh",
            UserWarning,
            stacklevel=3,
        )
