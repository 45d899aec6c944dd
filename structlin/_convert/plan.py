"""A plan: what will happen to a model, all of it decided and found before anything is changed.

`plan` and `plan_compression` make one. Printing it shows every linear layer. `Plan.apply` builds
the new layers and swaps them in.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._hosts import registry
from .._hosts.transformers import is_conv1d
from .._layer.experts import StructuredExperts
from .._layer.linear import StructuredLinear, uninitialised
from .._model.decide import Decision, list_targets
from .._model.linears import (
    Layer,
    Replacement,
    find_loose_matrices,
    replace_layers,
    require_unchanged,
)
from .._model.obstacles import carry_attributes, require_replaceable
from .._model.stacks import ExpertsLayer
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

    def count_fewest(self, layer: Layer) -> int:
        """The tokens that calibrated the layer; its features if none did."""
        return self.tokens or layer.in_features

    def tell_few(self, layer: Layer) -> str:
        """The end of a cell about the layer's error where these tokens are few."""
        tokens = self.count_fewest(layer)
        return f" of {tokens} tokens: few" if tokens < layer.in_features else ""


@dataclass(frozen=True, kw_only=True)
class ExpertsProjection(Projection):
    """What is left of the matrices of all experts in one parameter. The error is the root mean
    square of those of the matrices."""

    #: that calibrated each; 0: it is projected by weight alone; none at all without data
    tokens_of_experts: Sequence[int] = ()

    def count_fewest(self, layer: Layer) -> int:
        return min(self.tokens_of_experts, default=layer.in_features)

    def tell_few(self, layer: Layer) -> str:
        few = [n for n, tokens in enumerate(self.tokens_of_experts) if tokens < layer.in_features]
        if not few:
            return ""
        rarest = min(few, key=self.tokens_of_experts.__getitem__)
        count = f" and {len(few) - 1} more" if len(few) > 1 else ""
        return f" of {self.tokens_of_experts[rarest]} tokens in expert {rarest}{count}: few"


class NewVector(NamedTuple):
    """A parameter of one dimension, and the values that it gets."""

    module: nn.Module
    name: str
    values: Tensor


@dataclass(frozen=True)
class Refined:
    """What refinement makes of a block, beside the projections of its layers."""

    before: float  #: error of the block's output, relative to that of the dense block
    after: float
    #: new values of parameters of one dimension, of modules that stay
    vectors: Sequence[NewVector] = field(default=(), repr=False)


class BlockErrors(NamedTuple):
    """The relative errors of a block's output, before and after refinement."""

    before: float
    after: float


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
        self._snapshots = list(self._take_snapshots())

    @property
    def errors(self) -> dict[str, float]:
        """The relative error `||W - B|| / ||W||` of each layer that is projected.

        With batches it is that of the layer's outputs on them, `||W x - B z|| / ||W x||`: x is the
        layer's input in the dense model, z in the model whose earlier layers are compressed, both
        with their means taken off where a bias carries them.
        """
        names = [decision.layer.name for decision in self.decisions]
        return {name: self.projections[name].error for name in names if name in self.projections}

    @property
    def blocks(self) -> dict[str, BlockErrors]:
        """The relative error of each refined block's output, before and after refinement."""
        return {name: BlockErrors(b.before, b.after) for name, b in self.refined.items()}

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
        targets = list_targets(self.decisions)
        for layer, _ in targets:
            if self.init == "project" and layer.name not in self.projections:
                raise ValueError(
                    f"layer {layer.name!r} was on the meta device, so that this plan has its size "
                    "alone; load the weights, and make a new one"
                )
        require_replaceable(self.model)
        declare = registry.find_declare(self.model, import_module)
        require_unchanged(self.model, [layer for layer, _ in targets])
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
        """Write new values into the biases and norms that stay in the model."""
        for snapshot in self._snapshots:
            parameter = snapshot.parameter
            if snapshot.values is not None and parameter is not None:
                undo.append(partial(parameter.data.copy_, parameter.detach().clone()))
                parameter.copy_(snapshot.values)

    def _build_layer(self, decision: Decision, structure: Structure) -> nn.Module:
        layer = decision.layer
        if isinstance(layer, ExpertsLayer):
            return self._build_experts(layer, decision, structure)
        if self.init == "project":
            cores = self.projections[layer.name].cores
            new = build_layer(layer, structure, cores, weight_norm=self.weight_norm)
        else:
            new = self._draw_layer(layer, structure, decision.zero_init)
        old = layer.module
        new.label = label(decision.structure or structure)
        new.conv1d = is_conv1d(old)
        for parameter in new.parameters():
            parameter.requires_grad_(old.get_parameter("weight").requires_grad)
        new.bias = old._parameters.get("bias")  # the same: its values, hooks, ties, requires_grad
        carry_attributes(old, new)
        return new.train(old.training)

    def _build_experts(
        self, layer: ExpertsLayer, decision: Decision, structure: Structure
    ) -> StructuredExperts:
        cores = self.projections[layer.name].cores
        new = StructuredExperts(layer.lay, structure, device="meta", dtype=cores[0].dtype)
        new.cores = nn.ParameterList(cores)
        new.label = label(decision.structure or structure)
        new._undrawn = False
        return new.requires_grad_(layer.trains).train(layer.owner.training)

    def _draw_layer(self, layer: Layer, structure: Structure, zero_init: bool) -> StructuredLinear:
        """A layer, without bias, that starts afresh."""
        new = uninitialised(
            layer.in_features,
            layer.out_features,
            structure,
            bias=False,
            weight_norm=self.weight_norm,
            init="mup" if self.init == "match" else self.init,
            zero_init=zero_init,
            device=layer.matrix.device,
            dtype=layer.matrix.dtype,
        )
        if self.init != "match" or layer.matrix.is_meta:
            new.reset_parameters()
            return new
        norm = layer.matrix.float().norm().item()
        return new.match_norm_(0.0 if zero_init else norm)

    def _take_snapshots(self) -> Iterator[Snapshot]:
        """The parameters whose values this plan was made of."""
        for decision in self.decisions:
            layer = decision.layer
            projection = self.projections.get(layer.name)
            if projection is None:
                continue
            owner = f"layer {layer.name!r}"
            yield _take_snapshot(owner, *layer.holder, None)
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
            for attribute in ("dtype", "device"):
                now = getattr(parameter, attribute)
                before = getattr(snapshot, attribute)
                if now != before:
                    raise ValueError(
                        f"{snapshot.owner} has {attribute} {now}, and had {before} when this plan "
                        f"was made; {_AGAIN}, or take the model back to {before}"
                    )
            if not isclose(_sum_up(parameter), snapshot.checksum, rel_tol=1e-9):
                raise ValueError(f"{snapshot.owner} got other weights after this plan; {_AGAIN}")

    def __str__(self) -> str:
        columns = ["layer", "x", "role", "in -> out", "structure"]
        table = Table(*columns, "params", "/dense", "FLOPs/token", "/dense", "error")
        names_of_pattern = defaultdict[str, list[str]](list)
        groups = defaultdict[tuple[object, ...], list[Decision]](list)
        for decision in self.decisions:
            layer = decision.layer
            pattern = hide_numbers(layer.name)
            names_of_pattern[pattern].append(layer.name)
            widths = (layer.in_features, layer.out_features)
            key = (pattern, layer.role, *widths, decision.outcome)
            groups[key].append(decision)
        for group in groups.values():
            names = [decision.layer.name for decision in group]
            name = name_group(names, names_of_pattern[hide_numbers(names[0])])
            table.row(name, *self._show(group))
        decided = [decision.layer.name for decision in self.decisions]
        for loose in group_loose_matrices(self.model, without=decided):
            reason = f"- (a parameter, no linear layer: {loose.stepped_by})"
            table.row(loose.name, loose.count, loose.role, loose.size, reason)
        return str(table)

    def _show(self, group: Sequence[Decision]) -> list[str]:
        """The cells from "x" to "error" of layers that are equal but for their errors."""
        decision = group[0]
        layer = decision.layer
        count = sum(decision.layer.count for decision in group)  # of matrices
        cells = [f"{count}", layer.role, f"{layer.in_features} -> {layer.out_features}"]
        if decision.resolved is None:
            return [*cells, f"- ({decision.reason})"]
        params = count * decision.resolved.params
        flops = count * decision.resolved.flops
        dense_params = count * layer.in_features * layer.out_features
        cells += [decision.outcome, f"{params:,}", percent(params, dense_params)]
        # a token takes some of the experts, as it did before
        flops_per_token = "of its experts" if layer.count > 1 else f"{flops:,}"
        cells += [flops_per_token, percent(flops, 2 * dense_params)]
        names = [decision.layer.name for decision in group]
        projections = [self.projections[name] for name in names if name in self.projections]
        if not projections:
            return cells
        errors = [projection.error for projection in projections]
        least = f"{min(errors):.4f}"
        most = f"{max(errors):.4f}"
        error = least if least == most else f"{least} to {most}"
        rarest = min(projections, key=lambda projection: projection.count_fewest(layer))
        return [*cells, error + rarest.tell_few(layer)]


def build_layer(
    layer: Layer, structure: Structure, cores: Sequence[Tensor], *, weight_norm: bool = False
) -> StructuredLinear:
    """The layer, without bias, that multiplies by these cores. It holds the cores themselves, and
    copies where it normalises them."""
    new = uninitialised(
        layer.in_features,
        layer.out_features,
        structure,
        bias=False,
        weight_norm=weight_norm,
        device=cores[0].device if weight_norm else "meta",
        dtype=cores[0].dtype,
    )
    if weight_norm:
        return new.set_cores_(cores)
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
    checksum = _sum_up(parameter)
    return Snapshot(owner, module, name, parameter.dtype, parameter.device, checksum, values)


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
    for decision in planned.decisions:
        if decision.reason.startswith("is held by"):
            texts.append(f"left dense: {decision.layer.name} {decision.reason}")
    decided = {decision.layer.name for decision in planned.decisions}
    matrices = find_loose_matrices(planned.model)
    loose = [matrix for matrix in matrices if matrix.name not in decided]
    if loose:
        names = ", ".join(map(str, loose))
        texts.append(f"left dense, for they are parameters and no linear layers: {names}")
    if planned.init == "match":
        texts += _list_unmatched(planned)
    source = registry.source_of(planned.model)
    if source and planned.init != "project":
        texts.append(
            f"the model was loaded from {source!r}: init={planned.init!r} starts its converted "
            "layers afresh"
        )
    texts += registry.warnings_of_parts(planned.model)
    for text in texts:
        warn(text)


def _list_unmatched(planned: Plan) -> list[str]:
    """The layers without values whose scale init="match" would take."""
    names = []
    for decision in planned.decisions:
        starts_afresh = decision.structure is not None and not decision.zero_init
        if starts_afresh and decision.layer.matrix.is_meta:
            names.append(decision.layer.name)
    if not names:
        return []
    return [
        "init='match' takes the scale of the dense weights, and these have no values (meta): "
        f"{', '.join(names[:5])}; they start by init='mup'"
    ]


def _list_growth(planned: Plan) -> list[str]:
    growing = defaultdict[str, list[str]](list)
    for layer, structure in list_targets(planned.decisions):
        params = layer.in_features * layer.out_features
        flops = 2 * params
        if structure.params > params:
            growing["parameters"].append(f"{layer.name} ({params:,} -> {structure.params:,})")
        elif structure.flops > flops:
            growing["FLOPs per token"].append(f"{layer.name} ({flops:,} -> {structure.flops:,})")
    texts = []
    for unit in ("parameters", "FLOPs per token"):
        if growing[unit]:
            texts.append(f"these layers grow, in {unit}: {', '.join(growing[unit])}")
    return texts


def _list_padding(planned: Plan) -> list[str]:
    names_of_text = defaultdict[str, list[str]](list)
    for decision in planned.decisions:
        layer = decision.layer
        if decision.resolved is None or decision.structure is None:
            continue
        widths = (layer.in_features, layer.out_features)
        padding = explain_padding(decision.structure, decision.resolved, *widths)
        if padding:
            names_of_text[f"{label(decision.structure)}: {padding}"].append(repr(layer.name))
    return [f"layer {', '.join(names)}: {text}" for text, names in names_of_text.items()]
