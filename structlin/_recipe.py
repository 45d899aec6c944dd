"""`recipe`: a model set up for training as the Transformers of "Compute Better Spent" are."""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._convert import Plan, plan, warn_of
from ._families import BTT, DEFAULT, Split
from ._linear import StructuredLinear
from ._model.anatomy import find_ends, find_fused, find_qk_norms, find_queries
from ._model.decide import Decision, Spec
from ._model.select import Patterns, find_rules
from ._model.survey import Layer, linear_layers
from ._report import Table

UNSTABLE = (
    "weight_norm=False: a Transformer with BTT layers and without weight normalisation diverges "
    "slowly, as its activations grow without bound (CBS 5.1)"
)
FUSED = "W_Q is a part of one weight; converted with split={...: 3} it has cores of its own"
TURNS = "query_key_value"  # in BLOOM and GPT-NeoX q, k and v of a head, then those of the next
MIXED = "queries, keys and values take turns for each head"


@dataclass(frozen=True)
class Step:
    """One thing that a recipe does, or leaves to you."""

    what: str
    names: tuple[str, ...]  #: of the layers, parameters or modules
    why: str
    source: str  #: section of "Compute Better Spent"


@dataclass
class Recipe:
    """What `recipe` will do. Printing it shows the plan of the layers, then the steps; `apply` does
    it."""

    plan: Plan
    steps: list[Step]
    zeros: list[Layer]  #: that start at zero, converted or not
    first_thirds: list[Layer]  #: fused projections whose first part, W_Q, starts at zero

    def apply(self) -> nn.Module:
        """Convert the model in place, and set to zero what starts there, biases included.

        Returns:
            The model; for a model that is one linear layer, the new layer.

        Raises:
            ValueError: what `Plan.apply` raises.

        Warns:
            UserWarning: what `convert` warns of.
        """
        modules = dict(self.plan.model.named_modules(remove_duplicate=False))
        for layer in (*self.zeros, *self.first_thirds):
            if modules.get(layer.name) is not layer.module:
                raise ValueError(
                    f"layer {layer.name!r} was replaced after this plan; make a new one"
                )
        warn_of(self.plan)
        model = self.plan.apply()
        for layer in self.zeros:
            _set_zero(model.get_submodule(layer.name) if layer.name else model)
        for layer in self.first_thirds:
            _set_first_third_zero(model.get_submodule(layer.name))
        return model

    def __str__(self) -> str:
        table = Table("step", "layers", "CBS", "why")
        for step in self.steps:
            for name in _shorten(step.names) or ["-"]:
                table.row(step.what, name, step.source, step.why)
        return f"{self.plan}\n\n{table}"


def recipe(
    model: nn.Module,
    structure: Spec = DEFAULT,
    *,
    head: Patterns | None = None,
    queries: Patterns | None = None,
    branches: Patterns | None = None,
    weight_norm: bool = True,
    **options: Any,
) -> Recipe:
    """Set a Transformer up for training from scratch as appendices E and G of CBS do; a plan first.

    - The classification layer, the query projections W_Q and the last linear layer of every
      residual branch start at zero, of a structured one the last core alone (E.2).
    - Every structured layer is weight-normalised (5.1).
    - All linear layers but heads, embeddings and routers are converted, as `convert` does it; for a
      language model with a large vocabulary the paper converts the head too (G.2):
      `overrides={"head": BTT(rank=4)}`.

    Nothing else is changed: dense layers keep the initialisation that the model gave them. What
    else the paper does is said where you do it: `param_groups` has the learning rates, which decay
    by a cosine to zero; your model's own code has QK-norm and attention scaled by 1 / d (E.1), and
    the number of heads, which `widen` helps to keep fixed (G.2).

    Args:
        head, queries, branches: patterns of the layers that start at zero, see `convert`; None:
            they are found by their names, of several layers with the role "head" the last; (): none
            is set. Of a fused projection of queries, keys and values the queries' part starts at
            zero where it has cores of its own, as `split={"c_attn": 3}` makes them; other fused
            ones stay as they are, and so does a head that shares its weight with an embedding.
        options: of `convert`, such as include, split and overrides.

    Raises:
        ValueError: the model has no such layer; one that cannot be set to zero; what `convert`
            raises.
        TypeError: what `convert` raises.

    Warns:
        UserWarning: `weight_norm=False` in a Transformer with BTT.
    Source: Qiu et al. 2024 (arXiv:2406.06248), section 5.1, appendices E.1, E.2 and G.

    >>> from structlin import BTT
    >>> attention = {f"{name}_proj": nn.Linear(64, 64) for name in "qkvo"}
    >>> mlp = {"up_proj": nn.Linear(64, 256), "down_proj": nn.Linear(256, 64)}
    >>> parts = {"attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)}
    >>> model = nn.ModuleDict({**parts, "lm_head": nn.Linear(64, 50)})
    >>> planned = recipe(model, BTT(rank=1))
    >>> print(str(planned).split("\\n\\n")[1])
    step                   layers                CBS   why
    ─────────────────────────────────────────────────────────────────────────────────────────────
    starts at zero         lm_head               E.2   the classification layer
    starts at zero         attn.q_proj           E.2   W_Q, the query projections
    starts at zero         attn.o_proj           E.2   the last linear layer of a residual branch
    starts at zero         mlp.down_proj         E.2   the last linear layer of a residual branch
    weight normalisation   all structured ones   5.1   or activations grow without bound, slowly
    QK-norm                -                     E.1   the model has none; the paper's ViTs do
    >>> _ = planned.apply()
    """
    planned = plan(model, structure, weight_norm=weight_norm, **options)
    if planned.init == "project":
        raise ValueError("a recipe is for training from scratch; init='project' keeps old weights")
    layers = linear_layers(model)
    converted = [decision for decision in planned.decisions if decision.structure is not None]
    steps, zeros = [], list[Layer]()

    found = _choose("head", head, layers, model, [x for x in layers if x.role == "head"][-1:])
    untied = {id(decision.layer.module) for decision in converted}  # they get cores of their own
    free = [x for x in found if not x.tied or id(x.module) in untied]
    kept = [x for x in found if x not in free]
    zeros += free
    steps.append(Step("starts at zero", _names(free), "the classification layer", "E.2"))
    if kept:
        why = f"the head shares its weight with {', '.join(kept[0].tied)}"
        steps.append(Step("left as it is", _names(kept), why, "E.2"))

    fused = find_fused(model, layers) if queries is None else []
    stacked = {x.layer.name: x.layer for x in converted if _has_queries_first(x)}
    thirds = [stacked[name] for name in fused if name in stacked]
    fused = [name for name in fused if name not in stacked]
    optional = bool(fused or thirds)
    found = _choose("queries", queries, layers, model, find_queries(layers), optional)
    zeros += found
    if found or not optional:
        steps.append(Step("starts at zero", _names(found), "W_Q, the query projections", "E.2"))
    if thirds:
        why = "W_Q, the first of its three parts"
        steps.append(Step("a third starts at zero", _names(thirds), why, "E.2"))
    for why, mixed in ((FUSED, False), (MIXED, True)):
        if left := tuple(name for name in fused if name.endswith(TURNS) == mixed):
            steps.append(Step("left as it is", left, why, "E.2"))

    found = _choose("branches", branches, layers, model, find_ends(layers))
    zeros += found
    why = "the last linear layer of a residual branch"
    steps.append(Step("starts at zero", _names(found), why, "E.2"))

    normalised = ("all structured ones",) if weight_norm else ()
    why = "or activations grow without bound, slowly" if weight_norm else "weight_norm=False"
    steps.append(Step("weight normalisation", normalised, why, "5.1"))
    qk_norms = tuple(find_qk_norms(model))
    why = "the model has it" if qk_norms else "the model has none; the paper's ViTs do"
    steps.append(Step("QK-norm", qk_norms, why, "E.1"))

    _check_settable(zeros, untied)
    chosen = {id(layer.module) for layer in zeros}
    for decision in converted:
        decision.zero_init = decision.zero_init or id(decision.layer.module) in chosen
    attends = any(layer.role == "attention" for layer in layers)
    if not weight_norm and attends and any(_is_btt(x.structure) for x in converted):
        warnings.warn(UNSTABLE, UserWarning, stacklevel=2)
    return Recipe(planned, steps, zeros, thirds)


_MISSING = {
    "head": "no layer with the role 'head'",
    "queries": "no layer of attention that is named like a query projection (q_proj, query, wq)",
    "branches": "no layer of attention or of an MLP that is named like the last one of a residual "
    "branch (o_proj, c_proj, out_proj, down_proj, fc2)",
}


def _choose(
    argument: str,
    patterns: Patterns | None,
    layers: Sequence[Layer],
    model: nn.Module,
    found: list[Layer],
    optional: bool = False,
) -> list[Layer]:
    """The layers that `patterns` match; those found by name if it is None.

    Raises:
        ValueError: a pattern matches nothing, or nothing was found and that is not optional.
    """
    if patterns is not None:
        rules = find_rules(argument, patterns, layers, model)
        return [layer for n, layer in enumerate(layers) if any(n in rule.matches for rule in rules)]
    if not found and not optional:
        raise ValueError(
            f"{type(model).__name__} has {_MISSING[argument]}: "
            f"name it by {argument}='...', or pass {argument}=() to do without"
        )
    return found


def _check_settable(zeros: Iterable[Layer], converted: set[int]) -> None:
    for layer in zeros:
        if id(layer.module) in converted or isinstance(layer.module, StructuredLinear):
            continue
        weight = layer.module._parameters.get("weight")
        if weight is None or not weight.is_floating_point() or hasattr(weight, "full_tensor"):
            raise ValueError(f"layer {layer.name!r} cannot start at zero: it {layer.obstacle}")
        if weight.is_meta:
            raise ValueError(
                f"layer {layer.name!r} cannot start at zero: it is on the meta device and has no "
                "values; make the model with values first"
            )
        if layer.tied:
            raise ValueError(
                f"layer {layer.name!r} cannot start at zero: it shares its weight with "
                f"{', '.join(layer.tied)}"
            )


@torch.no_grad()
def _set_zero(layer: nn.Module) -> None:
    if isinstance(layer, StructuredLinear):
        layer.cores[-1].zero_()
    else:
        assert isinstance(layer.weight, Tensor)
        layer.weight.zero_()
    if isinstance(layer.bias, Tensor):
        layer.bias.zero_()


@torch.no_grad()
def _set_first_third_zero(layer: nn.Module) -> None:
    """Of a layer of three stacked matrices, see `Split`: the last core of the first one."""
    assert isinstance(layer, StructuredLinear)
    axes, sizes = layer.structure.cores[-1].axes, layer.structure.sizes
    stacked = layer.cores[-1].view([sizes[axis] for axis in axes])
    stacked.select(axes.index("part"), 0).zero_()
    if isinstance(layer.bias, Tensor):
        layer.bias.chunk(3)[0].zero_()


def _has_queries_first(decision: Decision) -> bool:
    """Whether three parts have cores of their own, and the first one makes the queries."""
    split = isinstance(decision.structure, Split) and decision.structure.parts == 3
    return split and not decision.layer.name.endswith(TURNS)


def _is_btt(structure: Spec | None) -> bool:
    return isinstance(structure.of if isinstance(structure, Split) else structure, BTT)


def _names(layers: Iterable[Layer]) -> tuple[str, ...]:
    return tuple(layer.name for layer in layers)


def _shorten(names: Iterable[str]) -> list[str]:
    """Names that differ by numbers alone once, with `*` for the numbers; in their order."""
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
