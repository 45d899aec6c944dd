"""Any model of linear layers -> structured, in place. Nothing here has to do with data."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .._model.decide import Spec, decide, list_targets, require_matrices
from .._model.linears import Layer
from .._model.select import Patterns
from .._structure.arguments import checked, require_choice
from .._structure.families import DEFAULT
from ..scaling import INITS
from .plan import Plan, Projection, check_values, project_by_weight, warn_of

STARTS = ("match", *INITS, "project")  # how a converted layer may start


def convert(
    model: nn.Module,
    structure: Spec = DEFAULT,
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[Any, Spec | None] | None = None,
    init: str = "match",
    weight_norm: bool = False,
    zero_init: Patterns = (),
    untie: bool = False,
) -> nn.Module:
    """Replace linear layers of `model` by structured ones, in place.

    These are nn.Linear and transformers' Conv1D. Everything is decided and built before the first
    layer is replaced. Device, dtype, `requires_grad`, training mode, biases and attributes that
    somebody has set on a layer stay. Make the optimizer afterwards: an older one holds the old
    parameters. `compress` is for a trained model whose function should stay.

    A pattern is a role ("ffn", "attention", "other", "head", "embedding", "router"), "branch-end"
    (the last layer of a residual branch, as names tell: c_proj, o_proj, fc2 and the like), a glob
    over the whole dotted name ("*mlp*"; `*` crosses dots), "re:" and a regular expression that must
    match the whole name, or a function `(module, name) -> bool`.

    Args:
        model: any module; it is changed.
        structure: a family or a `Structure`. For a fused qkv `Split(split=3, of=...)` makes three.
        include: patterns of the layers to convert; None: every linear layer that is not a head, an
            embedding or a router, as names tell: the numbered layers of an nn.Sequential are none
            of these. A pattern that matches both such layers and others converts only
            the others.
        exclude: patterns of layers to leave; it wins over everything.
        overrides: pattern -> another structure for these layers, or None to leave them; the first
            that matches holds, also for layers that `include` does not match. One whose layers
            are all matched by those before it is an error.
        init: "match": each new layer starts afresh, at the scale of the layer that it replaces: its
            matrix has the Frobenius norm of the old one, zero included, see
            `StructuredLinear.match_norm_`. So a model's own initialisation carries over.
            "mup", "spectral" or "orthogonal": it starts afresh at the scale of that rule, see
            `init_std`. "project": it takes the matrix of its structure that is nearest to the old
            one, see `project`; `plan(...).errors` tells how near.
        weight_norm: see `StructuredLinear`.
        zero_init: patterns of layers that start as zero, by their last core alone. "branch-end" is
            for Transformers from scratch, see docs/convert.md.
        untie: convert also layers whose weight is tied to another module's, which keeps it; the
            model's config says so.

    Returns:
        `model`; the new layer if `model` is itself a linear layer.

    Raises:
        ValueError: a pattern that converts nothing, nothing to convert at all, a structure that
            does not fit a layer, an activation with init="project", a model that is wrapped
            (torch.compile, DataParallel, DistributedDataParallel, FullyShardedDataParallel),
            inference mode. The model is then as it was.
        TypeError: not a module, not a structure, or not a pattern.

    Warns:
        UserWarning: layers that grow, are padded by more than 15 %, or stay dense for their hooks
            or because a plain list, tuple, dict or method holds them too; a model that says that
            its weights were loaded from a checkpoint; init="match" for weights without values
            (meta).

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
        init=init,
        weight_norm=weight_norm,
        zero_init=zero_init,
        untie=untie,
    )
    warn_of(planned)
    return planned.apply()


@checked
def plan(
    model: nn.Module,
    structure: Spec = DEFAULT,
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[Any, Spec | None] | None = None,
    init: str = "match",
    weight_norm: bool = False,
    zero_init: Patterns = (),
    untie: bool = False,
) -> Plan:
    """What `convert` with the same arguments would do, without doing it.

    With init="project" the cores are found now: `apply` refuses if the weights have changed by
    then, or their dtype or device. The plan of `compress` is `plan_compression`.

    Raises:
        ValueError, TypeError: what `convert` raises.

    >>> from structlin import LowRank
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> print(plan(model, LowRank(rank=8), exclude="0"))
    layer   x   role    in -> out   structure         params   /dense   FLOPs/token   /dense   error
    ────────────────────────────────────────────────────────────────────────────────────────────────
        0   1   other   64 -> 256   - (excluded)
        2   1   other   256 -> 64   LowRank(rank=8)    2,560    15.6%         5,120    15.6%
    """
    require_choice("init", init, STARTS)
    decisions = decide(
        model,
        structure,
        include=include,
        exclude=exclude,
        overrides=overrides,
        zero_init=zero_init,
        untie=untie,
    )
    targets = list_targets(decisions)
    projections: dict[str, Projection] = {}
    if init == "match":
        _check_norms(layer for layer, _ in targets)
    if init == "project":
        if any(decision.zero_init for decision in decisions):
            raise ValueError(
                f"zero_init={zero_init!r}: with init='project' layers start as what they were"
            )
        require_matrices(decisions, "init='project'")
        check_values([layer for layer, _ in targets])
        for layer, new_structure in targets:
            projections[layer.name] = project_by_weight(layer, new_structure)
    return Plan(model, decisions, projections, init=init, weight_norm=weight_norm, untie=untie)


def _check_norms(layers: Iterable[Layer]) -> None:
    """Raises ValueError for a weight whose scale a new layer could not match."""
    for layer in layers:
        if not layer.matrix.is_meta and not layer.matrix.float().norm().isfinite():
            raise ValueError(
                f"init='match': the weight of layer {layer.name!r} is not finite; take init='mup'"
            )
