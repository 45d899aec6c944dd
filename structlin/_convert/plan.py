"""A plan: what will happen to a model, all of it decided and found before anything is changed.

`plan` and `plan_compression` make one. Printing it shows every linear layer. `Plan.apply` builds
the new layers and swaps them in.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn

from .._hosts import registry
from .._hosts.transformers import is_conv1d
from .._layer.linear import StructuredLinear, uninitialised
from .._model.decide import Decision
from .._model.linears import (
    Layer,
    Replacement,
    find_loose_matrices,
    replace_layers,
    require_unchanged,
)
from .._model.obstacles import carry_attributes, require_replaceable
from .._model.transaction import Step
from .._projection.solve import project, relative_error
from .._structure.arguments import warn
from .._structure.families import explain_padding, label
from .._structure.structure import Structure
from .._tables import Table, hide_numbers, name_group, percent
from .summary import group_loose_matrices

_AGAIN = "make a new one"


@dataclass(frozen=True)
class Projection:
    """What is left of a dense layer in its structure."""

    cores: Sequence[Tensor] = field(repr=False)  #: after `Plan.apply` they are the new layer's own
    error: float  #: relative, see `Plan.errors`
    bias: Tensor | None = field(default=None, repr=False)  #: None: it stays as it is
    tokens: int | None = None  #: that calibrated the layer


@dataclass(frozen=True)
class Refined:
    """What refinement makes of a block, beside the projections of its layers."""

    before: float  #: error of the block's output, relative to that of the dense block
    after: float
    #: parameters of one dimension of modules that stay: module, name and new values
    vectors: Sequence[tuple[nn.Module, str, Tensor]] = field(default=(), repr=False)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A parameter that a plan was made of, as it was then."""

    owner: str  #: the layer or block that has it, for messages
    module: nn.Module
    name: str
    dtype: torch.dtype
    device: torch.device
    checksum: float  #: see `_sum_up`
    values: Tensor | None  #: that it gets when the plan is applied; None: its layer is replaced

    @property
    def parameter(self) -> nn.Parameter | None:
        """The module's parameter of that name as it is now."""
        return self.module._parameters.get(self.name)


@dataclass(eq=False)
class Plan:
    """What `convert` or `compress` will do. Printing it shows every linear layer; `apply` does it.

    A plan is for one model and applied once, so it equals itself alone.

    Attributes:
        model: the model that will be changed.
        decisions: of each linear layer: its structure, or the reason why it stays.
        projections: by the names of the layers, what is left of their weights.
        refined: by the names of the blocks, what refinement makes of them.
    """

    model: nn.Module
    decisions: Sequence[Decision]
    projections: Mapping[str, Projection] = field(default_factory=dict)
    refined: Mapping[str, Refined] = field(default_factory=dict)
    init: str = "project"
    weight_norm: bool = False
    untie: bool = False

    def __post_init__(self) -> None:
        self._used = False
        self._snapshots = [*self._take_snapshots()]

    @property
    def errors(self) -> dict[str, float]:
        """The relative error `||W - B|| / ||W||` of each layer that is projected.

        With batches it is that of the layer's outputs on them, `||W x - B z|| / ||W x||`: x is the
        layer's input in the dense model, z in the model whose earlier layers are compressed, both
        with their means taken off where a bias carries them.
        """
        names = (decision.layer.name for decision in self.decisions)
        return {name: self.projections[name].error for name in names if name in self.projections}

    @property
    def blocks(self) -> dict[str, tuple[float, float]]:
        """The relative error of each refined block's output, before and after refinement."""
        return {name: (block.before, block.after) for name, block in self.refined.items()}

    def apply(self) -> nn.Module:
        """Swap the layers in place; all new layers are built before the first one is swapped in.

        Returns:
            The model; for a model that is one linear layer, the new layer.

        Raises:
            ValueError: the plan was applied already, or made without values (meta); the model was
                wrapped, or a layer replaced, hooked or given other weights, another dtype or
                another device after the plan was made.

        After this error, as after any other and after Ctrl-C, the model is as it was, and the plan
        can be applied again.
        """
        if self._used:
            raise ValueError("a plan is applied once; make a new one")
        targets = [d.layer for d in self.decisions if d.resolved is not None]
        for layer in targets if self.init == "project" else ():
            if layer.name not in self.projections:
                raise ValueError(
                    f"layer {layer.name!r} was on the meta device, so that this plan has its size "
                    "alone; load the weights, and make a new one"
                )
        require_replaceable(self.model)
        declare = registry.find_declare(self.model)
        require_unchanged(self.model, targets)
        self._require_same_values()
        replacements = []
        for decision in self.decisions:
            if decision.resolved is not None:
                new = self._build_layer(decision, decision.resolved)
                replacements.append(Replacement(decision.layer.names, new))

        def finish(model: nn.Module, undo: list[Step]) -> None:
            self._write_values(undo)
            if self.untie:
                registry.declare_untied(model)
            declare(model)

        model = replace_layers(self.model, replacements, finish)
        self._used = True
        return model

    @torch.no_grad()
    def _write_values(self, undo: list[Step]) -> None:
        """Fill the biases and norms that stay in the model."""
        for snapshot in self._snapshots:
            parameter = snapshot.parameter
            if snapshot.values is not None and parameter is not None:
                undo.append(partial(parameter.data.copy_, parameter.detach().clone()))
                parameter.copy_(snapshot.values)

    def _build_layer(self, decision: Decision, structure: Structure) -> StructuredLinear:
        layer, old = decision.layer, decision.layer.module
        norm = {"weight_norm": self.weight_norm}
        if self.init == "project":
            new = build_layer(layer, structure, self.projections[layer.name].cores, **norm)
        else:
            rule = "mup" if self.init == "match" else self.init
            options: dict[str, Any] = {"init": rule, "zero_init": decision.zero_init, **norm}
            options |= {"device": layer.matrix.device, "dtype": layer.matrix.dtype, "bias": False}
            new = uninitialised(layer.in_features, layer.out_features, structure, **options)
            if self.init == "match" and not layer.matrix.is_meta:
                new.match_norm_(0.0 if decision.zero_init else float(layer.matrix.float().norm()))
            else:
                new.reset_parameters()
        new.label, new.conv1d = label(decision.structure or structure), is_conv1d(old)
        for parameter in new.parameters():
            parameter.requires_grad_(old.get_parameter("weight").requires_grad)
        new.bias = old._parameters.get("bias")  # the same: its values, hooks, ties, requires_grad
        carry_attributes(old, new)
        return new.train(old.training)

    def _take_snapshots(self) -> Iterator[Snapshot]:
        """The parameters whose values this plan was made of."""
        for decision in self.decisions:
            layer, projection = decision.layer, self.projections.get(decision.layer.name)
            if projection is None:
                continue
            owner = f"layer {layer.name!r}"
            yield _take_snapshot(owner, layer.module, "weight", None)
            if projection.bias is not None:
                yield _take_snapshot(owner, layer.module, "bias", projection.bias)
        for block_name, block in self.refined.items():
            for module, name, values in block.vectors:
                yield _take_snapshot(f"block {block_name!r}", module, name, values)

    def _require_same_values(self) -> None:
        present = set(self.model.modules())
        for snapshot in self._snapshots:
            parameter = snapshot.parameter if snapshot.module in present else None
            if parameter is None:
                raise ValueError(f"{snapshot.owner} got other weights after this plan; {_AGAIN}")
            for what in ("dtype", "device"):
                now, then = getattr(parameter, what), getattr(snapshot, what)
                if now != then:
                    raise ValueError(
                        f"{snapshot.owner} has {what} {now}, and had {then} when this plan was "
                        f"made; {_AGAIN}, or take the model back to {then}"
                    )
            if not isclose(_sum_up(parameter), snapshot.checksum, rel_tol=1e-9):
                raise ValueError(f"{snapshot.owner} got other weights after this plan; {_AGAIN}")

    def __str__(self) -> str:
        counts = "params", "/dense", "FLOPs/token", "/dense"
        table = Table("layer", "x", "role", "in -> out", "structure", *counts, "error")
        alike = defaultdict[str, list[str]](list)
        groups = defaultdict[tuple[object, ...], list[Decision]](list)
        for decision in self.decisions:
            layer = decision.layer
            pattern = hide_numbers(layer.name)
            what = label(decision.structure) if decision.structure else decision.reason
            alike[pattern].append(layer.name)
            groups[pattern, layer.role, layer.in_features, layer.out_features, what].append(
                decision
            )
        for group in groups.values():
            names = [decision.layer.name for decision in group]
            table.row(name_group(names, alike[hide_numbers(names[0])]), *self._show(group))
        for loose in group_loose_matrices(self.model):
            reason = f"- (a parameter, no linear layer: {loose.stepped_by})"
            table.row(loose.name, loose.count, loose.role, loose.size, reason)
        return str(table)

    def _show(self, group: Sequence[Decision]) -> list[str]:
        """The cells from "x" to "error" of layers that are equal but for their errors."""
        layer, structure, new = group[0].layer, group[0].structure, group[0].resolved
        cells = [f"{len(group)}", layer.role, f"{layer.in_features} -> {layer.out_features}"]
        if new is None or structure is None:
            return [*cells, f"- ({group[0].reason})"]
        params = len(group) * new.params
        flops = len(group) * new.flops
        dense = len(group) * layer.in_features * layer.out_features
        cells += [label(structure), f"{params:,}", percent(params, dense)]
        cells += [f"{flops:,}", percent(flops, 2 * dense)]
        names = [decision.layer.name for decision in group]
        projections = [self.projections[name] for name in names if name in self.projections]
        if not projections:
            return cells
        errors = sorted(projection.error for projection in projections)
        least, most = f"{errors[0]:.4f}", f"{errors[-1]:.4f}"
        error = least if least == most else f"{least} to {most}"
        tokens = min(projection.tokens or layer.in_features for projection in projections)
        if tokens < layer.in_features:
            error += f" of {tokens} tokens: few"
        return [*cells, error]


def build_layer(
    layer: Layer, structure: Structure, cores: Sequence[Tensor], *, weight_norm: bool = False
) -> StructuredLinear:
    """The layer, without bias, that multiplies by these cores. It holds them, and no copies."""
    widths = layer.in_features, layer.out_features
    options: dict[str, Any] = {"bias": False, "dtype": cores[0].dtype}
    if weight_norm:
        options |= {"weight_norm": True, "device": cores[0].device}
        return uninitialised(*widths, structure, **options).set_cores_(cores)
    new = uninitialised(*widths, structure, device="meta", **options)
    new.cores = nn.ParameterList(cores)
    return new


def project_by_weight(layer: Layer, structure: Structure) -> Projection:
    """The structure's matrix that is nearest to the layer's weight, without data."""
    cores = project(layer.matrix, structure)
    return Projection(cores, relative_error(layer.matrix, structure, cores))


def check_values(layers: Sequence[Layer]) -> None:
    """Raises: ValueError: a weight that is to be projected has no values, or some not finite."""
    for layer in layers:
        if layer.matrix.is_meta:
            raise ValueError(
                f"layer {layer.name!r} is on the meta device and has no values to keep; load the "
                "weights first, or start afresh with convert(model, structure, init='mup')"
            )
        if not layer.matrix.isfinite().all():
            raise ValueError(f"the weight of layer {layer.name!r} is not finite")


def _take_snapshot(owner: str, module: nn.Module, name: str, values: Tensor | None) -> Snapshot:
    parameter = module.get_parameter(name)
    state = parameter.dtype, parameter.device, _sum_up(parameter)
    return Snapshot(owner, module, name, *state, values)


@torch.no_grad()
def _sum_up(parameter: nn.Parameter) -> float:
    """A sum over a parameter's numbers, each with a factor of its own, by which a change is told.

    A version counter would not do: fused optimizers, `module.half()` and edits of `.data` leave it.
    """
    numbers = parameter.double().flatten()
    places = torch.arange(len(numbers), dtype=numbers.dtype, device=numbers.device)
    return torch.dot(numbers, places.cos_()).item()


# ---- warnings ------------------------------------------------------------------------------------


def warn_of(planned: Plan) -> None:
    """Warn of what the plan does that the caller of `convert` or `compress` may not expect."""
    texts = [*_list_growth(planned), *_list_padding(planned)]
    hooked = [d.layer.name for d in planned.decisions if d.reason.startswith("has hooks")]
    if hooked:
        texts.append(f"left dense, for they have hooks, which would be lost: {', '.join(hooked)}")
    if loose := find_loose_matrices(planned.model):
        names = ", ".join(map(str, loose))
        texts.append(f"left dense, for they are parameters and no linear layers: {names}")
    fresh = [d.layer for d in planned.decisions if d.structure is not None and not d.zero_init]
    if planned.init == "match" and (unknown := [x.name for x in fresh if x.matrix.is_meta]):
        texts.append(
            "init='match' takes the scale of the dense weights, and these have no values (meta): "
            f"{', '.join(unknown[:5])}; they start by init='mup'"
        )
    source = registry.source_of(planned.model)
    if source and planned.init != "project":
        afresh = f"init={planned.init!r} starts its converted layers afresh"
        texts.append(f"the model was loaded from {source!r}: {afresh}")
    texts += registry.warnings_of_parts(planned.model)
    for text in texts:
        warn(text)


def _list_growth(planned: Plan) -> list[str]:
    grown: dict[str, list[str]] = {"parameters": [], "FLOPs per token": []}
    for decision in planned.decisions:
        layer, new = decision.layer, decision.resolved
        dense = layer.in_features * layer.out_features
        if new is not None and new.params > dense:
            grown["parameters"].append(f"{layer.name} ({dense:,} -> {new.params:,})")
        elif new is not None and new.flops > 2 * dense:
            grown["FLOPs per token"].append(f"{layer.name} ({2 * dense:,} -> {new.flops:,})")
    return [
        f"these layers grow, in {of}: {', '.join(names)}" for of, names in grown.items() if names
    ]


def _list_padding(planned: Plan) -> list[str]:
    padded: dict[str, list[str]] = {}
    for decision in planned.decisions:
        layer, given, new = decision.layer, decision.structure, decision.resolved
        if new is None or given is None:
            continue
        if text := explain_padding(given, new, layer.in_features, layer.out_features):
            padded.setdefault(f"{label(given)}: {text}", []).append(repr(layer.name))
    return [f"layer {', '.join(names)}: {text}" for text, names in padded.items()]
