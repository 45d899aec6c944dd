"""Parameter groups: the dense model's learning rate, unchanged, for a converted one's cores."""

from collections import defaultdict
from typing import Any

from torch import Tensor, nn

from .._model.parameters import parameters_of
from .._structure.arguments import checked, require_choice
from ..scaling import OPTIMIZERS
from ._depth import Depth
from ._roster import Masses, share_masses
from ._transfer import Base, Transfer

KEPT = "keeps_ratios"  # of a group: its "lr" is the dense model's, its step's is lr * lr_mult


@checked
def param_groups(
    model: nn.Module,
    lr: float | Tensor,
    *,
    optimizer: str = "adam",
    weight_decay: float = 0.0,
    base: Base = None,
    structure_aware: bool = True,
    weight_decay_scaling: str = "1/width",
    eps: float | None = None,
    depth: Depth | None = None,
    masses: Masses | None = None,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, by which a structured model trains at the dense model's rate.

    Each core gets `lr * lr_mult(core)`, everything else `lr`. With `base`, a model tuned at a small
    width transfers to a large one by muP: Adam's rate of a linear layer goes as 1 / in_features,
    relative to the base's; what has no width-dependent fan-in (embeddings, biases, norms, input
    layers) keeps `lr`. SGD's rate goes as out_features / in_features, and as the width for vectors
    and embeddings. Each layer is compared with itself at the base width, as the paper's code does;
    the one base width d0 of the paper's text (section 3.3) is {1024: d0, 4096: d0}.

    Weight decay is an argument here: the groups carry it, so the optimizer's own argument has no
    effect. In decoupled form (AdamW) a step decays a matrix by its rate times its decay, and
    `weight_decay_scaling` says what this product does when the matrix's rate is f times `lr`, by
    width and structure (f = d0 / width of a dense layer, d0 / (k fan_in) of a core):

        "1/width"    lr * weight_decay * f: the decay is one number for every matrix, which keeps
                     the balance between update and decay, and so the size at which weights settle
        "constant"   lr * weight_decay: every matrix forgets over the same number of steps, as in
                     CompleteP, whose decay is weight_decay * width / d0

    Biases, norms, gains and vectors are not decayed, nor is a parameter that `no_weight_decay()` of
    the model, or of a module in it, names ("proj.weight" for the cores of a converted `proj`). With
    `eps` the groups carry Adam's eps too, as small against the gradients as at the base. A loop or
    a scheduler that sets one rate erases these ratios, see `keep_ratios`.

    Args:
        model: any module, converted or not; each trainable parameter is in exactly one group.
        lr: the dense model's learning rate.
        optimizer: "adam", "adamw", "sign" or "sgd": whose rule.
        base: the same model at the width where `lr` was tuned (layers are matched by name), or a
            mapping of widths to base widths such as {1024: 128, 4096: 512}, for all the widths that
            scale.
        structure_aware: False gives cores the rate of a dense layer, CBS's naive rule.
        weight_decay_scaling: "1/width" or "constant".
        eps: Adam's, at the base; None: the optimizer's own, the same everywhere.
        depth: of a residual network, relative to that where `lr` was tuned; None: as deep.
        masses: glob over layer names -> rate of the layer's matrix relative to the others', such as
            {"lm_head": 4}; a tuple: of a layer's cores, one each, 1 / k by default.

    Returns:
        A dict for each combination of rate, decay and eps, with `params`, `lr`, `weight_decay`,
        `eps` if it was given, and for reading `name`, `param_names` and `lr_mult`.

    Raises:
        ValueError: no trainable parameter; an option out of range or unknown; eps of an optimizer
            that has none; a layer that `base` lacks; a width of `base` that no parameter has;
            masses that match no layer or do not fit its cores; what `Depth` raises.
    Source: Qiu et al. 2024 (arXiv:2406.06248), section 3.2; Yang et al. 2022 (arXiv:2203.03466),
        table 8; Dey et al. 2025 (arXiv:2505.01618), table 1.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(1024, 1024)), BTT(rank=2))
    >>> for group in param_groups(model, lr=1e-3, weight_decay=0.1):
    ...     print(group["name"], group["lr"], group["weight_decay"], group["param_names"])
    lr x16 0.016 0.1 ['0.cores.0']
    lr x8 0.008 0.1 ['0.cores.1']
    lr x1, no decay 0.001 0.0 ['0.bias']
    """
    if not lr:
        raise ValueError(f"lr={lr!r} must be positive and finite")
    require_choice("optimizer", optimizer, OPTIMIZERS)
    if eps is not None and optimizer not in ("adam", "adamw"):
        raise ValueError(f"eps={eps!r}: optimizer={optimizer!r} has none, leave it out")
    transfer = Transfer(
        model,
        base,
        optimizer=optimizer,
        structure_aware=structure_aware,
        weight_decay_scaling=weight_decay_scaling,
        depth=depth,
    )
    groups: dict[tuple[float, float, float], dict[str, Any]] = {}
    infos = list(parameters_of(model))
    shares, equal = share_masses(infos, masses or {}), share_masses(infos, {})
    for info in infos:
        if not info.parameter.requires_grad:
            continue
        factors = transfer.of(info)
        lr_mult = factors.lr * shares[info.parameter] / equal[info.parameter]
        decays = factors.decay if info.decays else 0.0
        by_eps = 1.0 if eps is None else transfer.eps_mult(info)
        group = groups.setdefault(
            (lr_mult, decays, by_eps),
            {
                "params": [],
                "lr": lr * lr_mult,
                "weight_decay": weight_decay * decays,
                **({} if eps is None else {"eps": eps * by_eps}),
                "name": _name_group(lr_mult, decays, by_eps),
                "param_names": [],
                "lr_mult": lr_mult,
            },
        )
        group["params"].append(info.parameter)
        group["param_names"].append(info.name)
    if not groups:
        name = type(model).__name__
        raise ValueError(f"model={name} has no trainable parameter: all of them are frozen")
    return list(groups.values())


def divide_groups(
    groups: list[dict[str, Any]], model: nn.Module, optimizer: str
) -> list[dict[str, Any]]:
    """The groups that a framework made, each divided by the `lr_mult` that `param_groups` has for
    its parameters; one that has an `lr_mult` stays. Raises ValueError for a parameter that is not
    the model's."""
    transfer = Transfer(model, None, optimizer=optimizer)
    mults = {info.parameter: transfer.of(info).lr for info in parameters_of(model)}
    divided = []
    for group in groups:
        if "lr_mult" in group:
            divided.append(group)
            continue
        members: dict[float, list[int]] = defaultdict(list)
        for n, parameter in enumerate(group["params"]):
            if parameter not in mults:
                shape, kind = tuple(parameter.shape), type(model).__name__
                raise ValueError(f"model={kind}: a parameter of shape {shape} is not this model's")
            members[mults[parameter]].append(n)
        lists = [key for key in ("params", "param_names") if key in group]
        for mult, chosen in members.items():
            own: dict[str, Any] = {key: [group[key][n] for n in chosen] for key in lists}
            divided.append({**group, **own, "lr_mult": mult, KEPT: True})
    return divided


def _name_group(lr: float, decay: float, eps: float) -> str:
    parts = [f"lr x{lr:.6g}"]
    if decay != 1:
        parts.append(f"decay x{decay:.6g}" if decay else "no decay")
    if eps != 1:
        parts.append(f"eps x{eps:.6g}")
    return ", ".join(parts)
