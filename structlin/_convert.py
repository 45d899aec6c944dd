"""Any model of linear layers -> structured, in place: first all is decided and built, then swapped.

`plan` decides for each linear layer of the model (`_model`: survey, select, decide) and projects
where a budget asks for it. `Plan.apply` builds the new layers and swaps them in. `convert` is both.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, isfinite
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ._arguments import require_flags
from ._compress.budget import allocate, check_budget, share_evenly
from ._compress.calibration import Calibration, Call, Observed, observe
from ._compress.refine import Refined
from ._compress.sensitivity import Harms, walk
from ._compress.sequential import project_in_order
from ._families import DEFAULT, Family, explain_padding, label
from ._linear import StructuredLinear, uninitialised
from ._model.decide import Decision, Spec, decide
from ._model.select import Patterns
from ._model.survey import (
    Layer,
    carry_attributes,
    find_loose_matrices,
    is_conv1d,
    require_replaceable,
    require_unchanged,
    swap,
)
from ._projection.curve import Curve, Size, list_sizes, measure_curve
from ._projection.solve import project, relative_error
from ._report import Table, percent
from ._structure import Structure
from .scaling import INITS

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Plan:
    """What `convert` will do. Printing it shows every linear layer; `apply` does it."""

    model: nn.Module
    decisions: list[Decision]
    init: str = "match"
    weight_norm: bool = False
    untie: bool = False
    _refined: dict[str, Refined] = field(default_factory=dict, repr=False)
    _used: bool = field(default=False, repr=False)

    @property
    def errors(self) -> dict[str, float]:
        """Of each converted layer, once it is projected: the relative error `||W - B|| / ||W||`.

        With calibration it is that of the layer's outputs on the calibration data,
        `||W x - B z|| / ||W x||`: x is the layer's input in the dense model, z in the model whose
        earlier layers are compressed, both with their means taken off where a bias carries them.
        """
        return {d.layer.name: d.error for d in self.decisions if d.error is not None}

    @property
    def blocks(self) -> dict[str, tuple[float, float]]:
        """Of each refined block: the relative error of its output before and after refinement."""
        return {name: (block.before, block.after) for name, block in self._refined.items()}

    def apply(self) -> nn.Module:
        """Swap the layers in place; all new layers are built before the first one is swapped in.

        Returns:
            The model; for a model that is one linear layer, the new layer.

        Raises:
            ValueError: the plan was applied already; the model was wrapped, or a layer replaced,
                hooked or given other weights after the plan was made.
        """
        if self._used:
            raise ValueError("a plan is applied once; make a new one with plan(model, ...)")
        chosen = [decision for decision in self.decisions if decision.structure is not None]
        require_replaceable(self.model)
        require_unchanged(self.model, [decision.layer for decision in chosen])
        _check_weights(chosen)
        _check_vectors(self.model, self._refined)
        self._used = True
        new = [(decision.layer.names, self._build_layer(decision)) for decision in chosen]
        for decision in chosen:
            _set_bias(decision)
        _set_vectors(self._refined.values())
        model = swap(self.model, new)
        if self.untie:
            untie(model)
        declare(model)
        return model

    def _build_layer(self, decision: Decision) -> StructuredLinear:
        layer, structure, old = decision.layer, decision.resolved, decision.layer.module
        assert structure is not None
        assert decision.structure is not None
        assert isinstance(old.weight, Tensor)
        widths = layer.in_features, layer.out_features
        options: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
        options |= {"bias": False, "weight_norm": self.weight_norm}
        if self.init == "project":
            new = uninitialised(*widths, structure, **options).set_cores_(_take_cores(decision))
        else:
            options |= {"zero_init": decision.zero_init}
            options["init"] = "mup" if self.init == "match" else self.init
            new = uninitialised(*widths, structure, **options)
            if self.init == "match" and not old.weight.is_meta:
                new.match_norm_(0.0 if decision.zero_init else _measure_norm(layer))
            else:
                new.reset_parameters()
        new.label, new.conv1d = label(decision.structure), is_conv1d(old)
        for parameter in new.parameters():
            parameter.requires_grad_(old.weight.requires_grad)
        new.bias = old._parameters.get("bias")  # the same: its values, hooks, ties, requires_grad
        carry_attributes(old, new)
        return new.train(old.training)

    def __str__(self) -> str:
        counts = "params", "/dense", "FLOPs/token", "/dense"
        table = Table("layer", "role", "in -> out", "structure", *counts, "error")
        for decision in self.decisions:
            layer, new = decision.layer, decision.resolved
            shape = f"{layer.in_features} -> {layer.out_features}"
            if new is None or decision.structure is None:
                table.row(layer.name, layer.role, shape, f"- ({decision.reason})")
                continue
            dense = layer.in_features * layer.out_features
            params = f"{new.params:,}", percent(new.params, dense)
            flops = f"{new.flops:,}", percent(new.flops, 2 * dense)
            error = "" if decision.error is None else f"{decision.error:.4f}"
            if decision.tokens is not None and decision.tokens < layer.in_features:
                error += f" of {decision.tokens} tokens: few"
            text = label(decision.structure)
            table.row(layer.name, layer.role, shape, text, *params, *flops, error)
        for matrix in find_loose_matrices(self.model):
            table.row(matrix, "", "", "- (a parameter, no linear layer)")
        return str(table)


def plan(
    model: nn.Module,
    structure: Spec = DEFAULT,
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[Any, Spec | None] | None = None,
    init: str | None = None,
    weight_norm: bool = False,
    zero_init: Patterns = (),
    calibration: Calibration | None = None,
    budget: float | None = None,
    budget_of: str = "params",
    budget_by: str | None = None,
    refine: int = 0,
    untie: bool = False,
    split: Mapping[Any, int] | None = None,
    progress: bool | None = None,
) -> Plan:
    """What `convert` with the same arguments would do, without doing it.

    With a budget or calibration, the cores are found now: `apply` refuses if the weights have
    changed by then.

    Raises:
        ValueError, TypeError: what `convert` raises.

    >>> from structlin import LowRank
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> print(plan(model, LowRank(rank=8), exclude="0"))
    layer   role    in -> out   structure         params   /dense   FLOPs/token   /dense   error
    ────────────────────────────────────────────────────────────────────────────────────────────
        0   other   64 -> 256   - (excluded)
        2   other   256 -> 64   LowRank(rank=8)    2,560    15.6%         5,120    15.6%
    """
    require_replaceable(model)
    require_flags(untie=untie, weight_norm=weight_norm)
    overrides, split = overrides or {}, split or {}
    _check_types(structure, overrides, split)
    check_budget(budget, budget_of, budget_by)
    _check_calibrated(calibration, budget_by, refine)
    init = _choose_init(init, calibration, budget)
    decisions = decide(
        model,
        structure,
        include=include,
        exclude=exclude,
        overrides=overrides,
        zero_init=zero_init,
        split=split,
        untie=untie,
        sizes_open=budget is not None,
    )
    found = [decision for decision in decisions if decision.structure is not None]
    if init == "project" and any(decision.zero_init for decision in found):
        raise ValueError(
            f"zero_init={zero_init!r}: with init='project' layers start as what they were"
        )
    if untie and not any(decision.layer.tied for decision in found):
        raise ValueError(
            "untie=True: no layer that is converted shares its weight; include one, say 'head'"
        )
    if init == "match":
        for layer in (decision.layer for decision in found):
            if not layer.matrix.is_meta and not isfinite(_measure_norm(layer)):
                raise ValueError(
                    f"init='match': the weight of layer {layer.name!r} is not finite; "
                    "take init='mup'"
                )
    if init == "project":
        _check_values(found)
        spend = _Spending(budget, budget_of, budget_by)
        refined = _project_all(model, found, calibration, spend, refine, progress)
    else:
        refined = {}
    new = Plan(model, decisions, init=init, weight_norm=weight_norm, untie=untie)
    new._refined = refined
    return new


def take_arguments_of(source: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function that hands its arguments on to `source` the signature of `source`."""

    def declare(function: Callable[..., R]) -> Callable[P, R]:
        own = inspect.signature(function).return_annotation
        signature = inspect.signature(source).replace(return_annotation=own)
        function.__dict__["__signature__"] = signature
        return function

    return declare


@take_arguments_of(plan)
def convert(model: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
    """Replace linear layers of `model` by structured ones, in place.

    These are nn.Linear and transformers' Conv1D. Everything is decided and built before the first
    layer is replaced. Device, dtype, `requires_grad`, training mode, biases and attributes that
    somebody has set on a layer stay. Make the optimizer afterwards: an older one holds the old
    parameters.

    A pattern is a role ("ffn", "attention", "other", "head", "embedding", "router"), "branch-end"
    (the last layer of a residual branch, as names tell: c_proj, o_proj, fc2 and the like), a glob
    over the whole dotted name ("*mlp*"; `*` crosses dots), "re:" and a regular expression that must
    match the whole name, or a function `(module, name) -> bool`.

    Args:
        model: any module; it is changed.
        structure: a family or a `Structure`.
        include: patterns of the layers to convert; None: every linear layer that is not a head, an
            embedding or a router. A pattern that matches both such layers and others converts only
            the others.
        exclude: patterns of layers to leave; it wins over everything.
        overrides: pattern -> another structure for these layers, or None to leave them; the first
            that matches holds, also for layers that `include` does not match.
        init: "match": each new layer starts afresh, at the scale of the layer that it replaces: its
            matrix has the Frobenius norm of the old one, zero included, see
            `StructuredLinear.match_norm_`. So a model's own initialisation carries over.
            "mup", "spectral" or "orthogonal": it starts afresh at the scale of that rule, see
            `init_std`. "project": it starts as near to the old one as its structure allows, see
            `project`; `plan(...).errors` tells how near. None: "match", or "project" if
            `calibration` or `budget` is given.
        weight_norm: see `StructuredLinear`.
        zero_init: patterns of layers that start as zero, by their last core alone. "branch-end" is
            for Transformers from scratch, see docs/convert.md.
        calibration: an iterable of batches (a mapping is passed as keywords, a tuple or list as
            positions, anything else as the one argument), or a function that runs the model. The
            layers are then projected in the order in which the model runs, each for its inputs in
            the model compressed so far and towards its outputs in the dense one; biases carry the
            change of the mean. The model runs in eval mode; each batch is held at two places (two
            threads, of which one works at a time). Padding is left out: what `attention_mask` or
            `decoder_attention_mask` (transformers) or `src_key_padding_mask` (torch) hides, for
            layers whose input begins with the mask's shape, or is that flattened; a layer with
            other inputs counts all of its rows. Layers that one pass calls more than once, and
            all layers where a function calls the model with more than tensors and plain values,
            or parts of it alone, are projected for the dense model's inputs, with a warning.
        budget: fraction of the parameters of the layers that `structure` is meant for (those with
            an override are not counted): the rank, or number of blocks, of each is chosen. No layer
            gets a size that costs as much as dense: it may stay dense, which is exact, and its
            weight is counted. More budget never makes worse what is minimised, see `budget_by`.
        budget_of: "params", or "flops": `budget` is a fraction of their FLOPs a token.
        budget_by: "effect": least change of the model's outputs on the calibration data, by what a
            small error of each layer does to them (gradients of a few batches, with the memory of
            training). "error": least sum of the layers' squared relative errors. "uniform": the
            same fraction for each layer. None: "effect" if the calibration data can be run again,
            otherwise "error".
        refine: steps of Adam for each block of the model (what is repeated in it, or the model
            itself), once its layers are projected: its cores, biases and norms are fitted to the
            dense block's output on the calibration data. A block that does not get nearer stays as
            it was; `plan(...).blocks` tells how near. 0: none.
        untie: convert also layers whose weight is tied to another module's, which keeps it; the
            model's config says so.
        split: pattern -> number of equal parts of the outputs that get a matrix each, see `Split`:
            3 for a fused qkv.
        progress: whether to show a bar while layers are projected for `calibration`; None: on a
            terminal.

    Returns:
        `model`; the new layer if `model` is itself a linear layer.

    Raises:
        ValueError: a pattern that converts nothing, nothing to convert at all, a structure that
            does not fit a layer, a model that is wrapped (torch.compile, DataParallel,
            DistributedDataParallel, FullyShardedDataParallel), inference mode. The model is then
            as it was.
        TypeError: not a module, not a structure, or not a pattern.

    Warns:
        UserWarning: layers that grow, are padded by more than 15 %, or stay dense for their hooks;
            a model that says that its weights were loaded from a checkpoint; init="match" for
            weights without values (meta).

    >>> from structlin import BTT
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> sum(p.numel() for p in convert(model, BTT(rank=1)).parameters())  # dense: 33,088
    6464
    """
    planned = plan(model, *arguments, **options)
    warn_of(planned)
    return planned.apply()


# ---- arguments ---------------------------------------------------------------------------------


def _check_types(
    structure: Spec, overrides: Mapping[Any, Spec | None], split: Mapping[Any, int]
) -> None:
    if not isinstance(overrides, Mapping):
        raise TypeError(
            f"overrides={overrides!r} must be a mapping of patterns to structures, or to None"
        )
    if not isinstance(split, Mapping):
        raise TypeError(f"split={split!r} must be a mapping of patterns to numbers of parts")
    for spec in (structure, *(spec for spec in overrides.values() if spec is not None)):
        if not isinstance(spec, Family | Structure):
            raise TypeError(
                f"structure={spec!r} must be a family such as BTT(rank=1), or a Structure"
            )


def _choose_init(init: str | None, calibration: Calibration | None, budget: float | None) -> str:
    given = {"calibration": calibration is not None, "budget": budget is not None}
    if init is None:
        init = "project" if any(given.values()) else "match"
    if init not in ("match", *INITS, "project"):
        raise ValueError(
            f"init={init!r} is unknown; there are match, {', '.join(INITS)} and project"
        )
    for argument, is_given in given.items():
        if is_given and init != "project":
            raise ValueError(
                f"{argument} is given, but init={init!r} starts afresh; take init='project'"
            )
    return init


def _check_calibrated(calibration: Calibration | None, by: str | None, refine: int) -> None:
    if isinstance(refine, bool) or not isinstance(refine, int) or refine < 0:
        raise ValueError(f"refine={refine!r} must be a number of steps, for example refine=50")
    if calibration is not None:
        return
    for argument in (
        f"refine={refine}" if refine else "",
        f"budget_by={by!r}" if by == "effect" else "",
    ):
        if argument:
            raise ValueError(f"{argument} needs calibration: batches on which the model runs")


def warn_of(planned: Plan) -> None:
    """Warn of what `convert` does that its caller may not expect."""
    grown: dict[str, list[str]] = {"parameters": [], "FLOPs a token": []}
    padded: dict[str, list[str]] = {}
    for decision in planned.decisions:
        layer, new = decision.layer, decision.resolved
        if new is not None and decision.structure is not None:
            given, widths = decision.structure, (layer.in_features, layer.out_features)
            if text := explain_padding(given, new, *widths):
                padded.setdefault(f"{label(given)}: {text}", []).append(repr(layer.name))
        dense = layer.in_features * layer.out_features
        if new is not None and new.params > dense:
            grown["parameters"].append(f"{layer.name} ({dense:,} -> {new.params:,})")
        elif new is not None and new.flops > 2 * dense:
            grown["FLOPs a token"].append(f"{layer.name} ({2 * dense:,} -> {new.flops:,})")
    texts = [
        f"these layers grow, in {of}: {', '.join(names)}" for of, names in grown.items() if names
    ]
    texts += [f"layer {', '.join(names)}: {text}" for text, names in padded.items()]
    hooked = [d.layer.name for d in planned.decisions if d.reason.startswith("has hooks")]
    if hooked:
        texts.append(f"left dense, for they have hooks, which would be lost: {', '.join(hooked)}")
    if loose := find_loose_matrices(planned.model):
        names = ", ".join(loose)
        texts.append(f"left dense, for they are parameters and no linear layers: {names}")
    fresh = [d.layer for d in planned.decisions if d.structure is not None and not d.zero_init]
    if planned.init == "match" and (unknown := [x.name for x in fresh if x.matrix.is_meta]):
        texts.append(
            "init='match' takes the scale of the dense weights, and these have no values (meta): "
            f"{', '.join(unknown[:5])}; they start by init='mup'"
        )
    source = getattr(getattr(planned.model, "config", None), "_name_or_path", "")
    if source and planned.init != "project":
        afresh = f"init={planned.init!r} starts its converted layers afresh"
        texts.append(f"the model was loaded from {source!r}: {afresh}")
    for text in texts:
        warnings.warn(text, UserWarning, stacklevel=3)


def _measure_norm(layer: Layer) -> float:
    """Frobenius norm of the dense weight."""
    return float(layer.matrix.float().norm())


# ---- projection --------------------------------------------------------------------------------


def _check_values(decisions: Iterable[Decision]) -> None:
    for decision in decisions:
        name, weight = decision.layer.name, decision.layer.matrix
        if weight.is_meta:
            raise ValueError(
                f"init='project': layer {name!r} is on the meta device and has no values; "
                "load the weights first, or take init='mup'"
            )
        if not weight.isfinite().all():
            raise ValueError(f"init='project': the weight of layer {name!r} is not finite")


@dataclass
class _Spending:
    """What a budget is, see `convert`."""

    budget: float | None
    of: str
    by: str | None


def _project_all(
    model: nn.Module,
    decisions: Sequence[Decision],
    calibration: Calibration | None,
    spend: _Spending,
    refine: int,
    progress: bool | None,
) -> dict[str, Refined]:
    """Choose the sizes that a budget leaves open, then find cores where they are found in a plan.

    Without budget and calibration `Plan.apply` finds them.
    """
    open_ = [decision for decision in decisions if decision.resolved is None]
    harms, seen = Harms([decision.layer for decision in open_]), None
    if calibration is not None:
        batches = isinstance(calibration, Iterable)
        by_effect = spend.budget is not None and spend.by in (None, "effect") and batches
        layers, run_call = [d.layer for d in decisions], harms.add if by_effect else Call.run
        seen = observe(model, layers, calibration, run_call=run_call)
    if spend.budget is not None:
        _choose_sizes(model, open_, seen, harms, spend, progress)
    decisions = [decision for decision in decisions if decision.structure is not None]
    refined: dict[str, Refined] = {}
    if seen is not None:
        refined = project_in_order(model, decisions, seen, refine_steps=refine, progress=progress)
    elif spend.budget is not None:
        for decision in decisions:
            decision.cores = _take_cores(decision)
    for decision in decisions:
        if decision.cores is not None:
            decision.source = _sum_up(decision)
    return refined


def _choose_sizes(
    model: nn.Module,
    decisions: Sequence[Decision],
    seen: Observed | None,
    harms: Harms,
    spend: _Spending,
    progress: bool | None,
) -> None:
    """Give these decisions the sizes that a budget leaves open."""
    budget, of, by = spend.budget, spend.of, spend.by
    assert budget is not None
    families = {d.layer.module: d.structure for d in decisions if isinstance(d.structure, Family)}
    if not decisions or len(families) < len(decisions):
        raise ValueError(
            f"budget={budget}: structure must be a family, and be meant for some layer"
        )
    layers = [decision.layer for decision in decisions]
    if by is None:
        by = "error" if seen is None or seen.calls is None else "effect"
    if by == "uniform":
        sizes = [
            list_sizes(families[layer.module], layer.in_features, layer.out_features, of)
            for layer in layers
        ]
        _take_sizes(decisions, share_evenly(sizes, budget))
        return

    def measure(layer: Layer, covariance: Tensor | None) -> Curve:
        return measure_curve(layer.matrix, families[layer.module], covariance, of)

    if seen is None:
        curves = [measure(layer, None) for layer in layers]
    else:
        curves = walk(model, layers, seen, measure, progress=progress)
    if by == "effect":
        assert seen is not None
        if seen.calls is None:
            raise ValueError(
                "budget_by='effect' needs calls of the model that can be made again: give batches "
                "as calibration, or take budget_by='error'"
            )
        if not harms.calls:  # a function's calls are known only once it has run
            harms.measure(model, seen.calls)
        weights = harms.values()
    else:
        weights = [1 / curve.whole if curve.whole else 1.0 for curve in curves]
    _take_sizes(decisions, allocate(curves, budget, weights, of))


def _take_sizes(decisions: Iterable[Decision], sizes: Iterable[Size]) -> None:
    for decision, size in zip(decisions, sizes, strict=True):
        if size.stays_dense:
            decision.structure, decision.reason = None, "dense: within the budget"
        else:
            decision.structure, decision.resolved = size.family, size.structure


def _take_cores(decision: Decision) -> list[Tensor]:
    """The layer's projection, which the plan then no longer holds."""
    structure, cores = decision.resolved, decision.cores
    assert structure is not None
    if cores is None:
        weight = decision.layer.matrix
        cores = project(weight, structure)
        decision.error = relative_error(weight, structure, cores)
    decision.cores = None
    return cores


def _set_vectors(refined: Iterable[Refined]) -> None:
    """Write what refinement made of norms into their own parameters."""
    with torch.no_grad():
        for vector in (vector for block in refined for vector in block.vectors):
            getattr(vector.module, vector.name).copy_(vector.new)


def _check_vectors(model: nn.Module, refined: Mapping[str, Refined]) -> None:
    """What refinement has changed must still be in the model, and what it was before."""
    present = set(model.modules())
    for name, block in refined.items():
        for vector in block.vectors:
            now = vector.module._parameters.get(vector.name)
            same = now is not None and now.shape == vector.old.shape and now.equal(vector.old)
            if vector.module not in present or not same:
                raise ValueError(
                    f"block {name!r} got other weights after this plan; make a new one"
                )


def _set_bias(decision: Decision) -> None:
    """Write the bias that carries the change of the mean into the layer's own parameter."""
    bias = decision.layer.module._parameters.get("bias")
    if bias is not None and decision.bias is not None:
        with torch.no_grad():
            bias.copy_(decision.bias)
    decision.bias = None


def _sum_up(decision: Decision) -> tuple[float, ...]:
    """Sums over the numbers of the layer that its projection replaces: they tell a change."""
    replaced = [decision.layer.matrix]
    bias = decision.layer.module._parameters.get("bias")
    if bias is not None and decision.bias is not None:
        replaced.append(bias.detach())
    found = []
    for each in replaced:
        numbers = each.double().flatten()
        places = torch.arange(len(numbers), dtype=numbers.dtype, device=numbers.device).cos_()
        found += [numbers.norm().item(), numbers.norm(1).item(), (numbers * places).sum().item()]
    return tuple(found)


def _check_weights(decisions: Iterable[Decision]) -> None:
    """What was projected for a plan must still be the projection of its weight."""
    for decision in decisions:
        if decision.source is None:
            continue
        pairs = zip(_sum_up(decision), decision.source, strict=True)
        if not all(isclose(now, then, rel_tol=1e-9) for now, then in pairs):
            name = decision.layer.name
            raise ValueError(f"layer {name!r} got other weights after this plan; make a new one")


# ---- transformers ------------------------------------------------------------------------------


def untie(model: nn.Module) -> None:
    """Say in the config of a transformers model that its embeddings are not tied.

    The next load would tie them otherwise.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        parts = (getattr(config, name, None) for name in ("text_config", "decoder"))
        for part in (config, *parts):
            if getattr(part, "tie_word_embeddings", False):
                part.tie_word_embeddings = False


def declare(model: nn.Module) -> None:
    """Let transformers know which layers are structured, so that `save_pretrained` writes it
    down, also where `model` is a part of a model of transformers."""
    if "transformers.modeling_utils" in sys.modules:
        from .hf import declare

        declare(model)
