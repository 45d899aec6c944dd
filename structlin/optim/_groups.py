"""Parameter groups: the dense model's learning rate, unchanged, for a converted one's cores."""

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .._model.parameters import ParameterInfo, parameters_of
from .._structure.arguments import checked, require_choice
from .._tensors import Rate
from ..scaling import OPTIMIZERS
from ._depth import Depth
from ._rates import KEPT
from ._roster import Masses, share_masses, warn_of_int8
from ._transfer import Base, Transfer


@checked
def param_groups(
    model: nn.Module,
    lr: Rate,
    *,
    optimizer: str = "adam",
    weight_decay: float | None = None,
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

    Without `weight_decay` the optimizer's own holds for matrices: their groups carry none. A number
    here is carried by the groups, and the optimizer's own has no effect. In decoupled form (AdamW)
    a step decays a matrix by its rate times its decay, and `weight_decay_scaling` says what this
    product does when the matrix's rate is f times `lr`, by width and structure (f = d0 / width of a
    dense layer, d0 / (k fan_in) of a core):

        "1/width"    lr * weight_decay * f: the decay is one number for every matrix, which keeps
                     the balance between update and decay, and so the size at which weights settle
        "constant"   lr * weight_decay: every matrix forgets over the same number of steps, as in
                     CompleteP, whose decay is weight_decay * width / d0

    Biases, norms, gains and vectors carry a decay of 0, and so does a parameter that
    `no_weight_decay()` of the model, or of a module in it, names ("proj.weight" for the cores of a
    converted `proj`). With `eps` the groups carry Adam's eps too, as small against the gradients as
    at the base. A loop or a scheduler that sets one rate erases these ratios: `optim.AdamW` keeps
    them, and `keep_ratios` does so for other optimizers.

    Args:
        model: any module, converted or not; each trainable parameter is in exactly one group.
        lr: the dense model's learning rate.
        optimizer: "adam", "adamw", "sign" or "sgd": whose rule.
        weight_decay: of matrices; None: the optimizer's own.
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
        A dict for each combination of rate, decay and eps, with `params`, `lr`, `weight_decay` and
        `eps` if the group has them, and for reading `name`, `param_names` and `lr_mult`.

    Raises:
        ValueError: no trainable parameter; an option out of range or unknown; eps of an optimizer
            that has none; no weight_decay, where matrices have different ones; a layer that `base`
            lacks; a width of `base` that no parameter has; masses that match no layer or do not fit
            its cores; what `Depth` raises.
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
    warn_of_int8(model)
    infos = list(parameters_of(model))
    trainable = {info.parameter for info in infos if info.parameter.requires_grad}
    if not trainable:
        name = type(model).__name__
        raise ValueError(f"model={name} has no trainable parameter: all of them are frozen")
    groups = []
    for alike in group_alike(infos, trainable, transfer, masses, scale_eps=eps is not None):
        group: dict[str, Any] = {"params": alike.parameters, "lr": lr * alike.lr_mult}
        if weight_decay is not None:
            group["weight_decay"] = weight_decay * alike.decay
        elif alike.decay == 0:
            group["weight_decay"] = 0.0
        elif alike.decay != 1:
            raise ValueError(
                f"weight_decay=None: {alike.names[0]} decays by {alike.decay:.6g} times the number "
                "for other matrices, as weight_decay_scaling or depth.ends asks: give the number, "
                "such as weight_decay=0.01"
            )
        if eps is not None:
            group["eps"] = eps * alike.eps_mult
        group["name"] = alike.label
        group["param_names"] = alike.names
        group["lr_mult"] = alike.lr_mult
        groups.append(group)
    return groups


@dataclass(frozen=True)
class Alike:
    """Parameters with the same factors."""

    lr_mult: float  #: of the rate
    decay: float  #: of the weight decay; 0: none
    eps_mult: float  #: of Adam's eps
    parameters: list[Tensor]
    names: list[str]

    @property
    def label(self) -> str:
        """What a group of them is called."""
        parts = [f"lr x{self.lr_mult:.6g}"]
        if self.decay != 1:
            parts.append(f"decay x{self.decay:.6g}" if self.decay else "no decay")
        if self.eps_mult != 1:
            parts.append(f"eps x{self.eps_mult:.6g}")
        return ", ".join(parts)


def group_alike(
    infos: list[ParameterInfo],
    chosen: Container[Tensor],
    transfer: Transfer,
    masses: Masses | None,
    *,
    scale_eps: bool,
) -> list[Alike]:
    """The chosen parameters by their factors, in the order in which each combination is met first.

    `infos` are all parameters of the model, since every pattern of `masses` must match a layer."""
    shares = share_masses(infos, masses or {})
    usual_shares = share_masses(infos, {})
    groups: dict[tuple[float, float, float], Alike] = {}
    for info in infos:
        if info.parameter not in chosen:
            continue
        factors = transfer.of(info)
        lr_mult = factors.lr * shares[info.parameter] / usual_shares[info.parameter]
        decay = factors.decay if info.decays else 0.0
        eps_mult = transfer.eps_mult(info) if scale_eps else 1.0
        key = (lr_mult, decay, eps_mult)
        alike = groups.setdefault(key, Alike(*key, parameters=[], names=[]))
        alike.parameters.append(info.parameter)
        alike.names.append(info.name)
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
                raise ValueError(
                    f"model={type(model).__name__}: a parameter of shape {tuple(parameter.shape)} "
                    "is not this model's"
                )
            members[mults[parameter]].append(n)
        lists = [key for key in ("params", "param_names") if key in group]
        for mult, chosen in members.items():
            members_of_mult: dict[str, Any] = {}
            for key in lists:
                members_of_mult[key] = [group[key][n] for n in chosen]
            divided.append({**group, **members_of_mult, "lr_mult": mult, KEPT: True})
    return divided
