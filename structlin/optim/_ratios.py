"""`keep_ratios`: ratios between the rates of groups, out of reach of loops that set one rate."""

from collections.abc import Callable
from copy import deepcopy
from math import isclose
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Adamax, NAdam, Optimizer, RAdam, SparseAdam

from .._structure.arguments import checked, require_choice
from ..scaling import OPTIMIZERS
from ._adamw import AdamW
from ._block import BlockOptimizer
from ._groups import divide_groups
from ._normed import Normed, Wrapper
from ._rates import KEPT, add_guard, remove_guard, require_kept, scale_rates, set_rates

_ADAMS = (Adam, Adamax, NAdam, RAdam, SparseAdam)  # AdamW is an Adam


@checked
def keep_ratios(
    optimizer: Optimizer, model: nn.Module | None = None, *, rule: str | None = None
) -> Optimizer:
    """An optimizer around `optimizer`, which keeps the ratios between the groups' rates.

    `optim.AdamW`, `optim.Muon` and `optim.SOAP` keep them by themselves; this is for all others.

    Every group's "lr" is the dense model's rate, and `step` multiplies it by the group's `lr_mult`.
    A loop or a scheduler may set one rate for all groups, and what is logged is the dense rate.
    Copies, files and `state_dict` keep the ratios. The given optimizer, without `keep_ratios`,
    refuses such a state, which has one more group, without parameters.

    From now on step, save and hook what this returns (`optimizer` itself where it keeps its ratios
    already): the given one refuses to step. Call it before a scheduler is made, and before
    `load_state_dict`.

    Args:
        optimizer: of the groups of `param_groups`, or one that a framework made.
        model: for an optimizer that a framework made: each of its groups is divided by the
            `lr_mult` that `param_groups(model, lr)` has for its parameters, and the options of the
            group stay. A group that has an `lr_mult` stays.
        rule: the `optimizer=` of `param_groups` whose rule divides those groups; None: Adam's for
            torch's family of Adam, SGD's for SGD, and of other classes by "Adam" or "SGD" in their
            names. LAMB, Adafactor, Muon and others need it.

    Raises:
        ValueError: groups have no `lr_mult`, and there is no `model`, it has other parameters, the
            optimizer has made a step, or nobody says the rule; a scheduler or a hook of the step
            was made before; a rate that is None. `load_state_dict` raises it for a state of before
            `keep_ratios`.
        TypeError: `optimizer` is no torch optimizer, or a `Normed`, whose groups have one rate.

    >>> from structlin import BTT, convert, param_groups
    >>> model = convert(nn.Sequential(nn.Linear(1024, 1024)), BTT(rank=2))
    >>> optimizer = keep_ratios(torch.optim.AdamW(param_groups(model, lr=1e-3)))
    >>> [(group["lr"], group["lr_mult"]) for group in optimizer.param_groups]
    [(0.001, 16.0), (0.001, 8.0), (0.001, 1.0)]
    """
    if isinstance(optimizer, KeptRatios | AdamW | BlockOptimizer):
        return optimizer
    if rule is not None:
        require_choice("rule", rule, OPTIMIZERS)
    _require_usable(optimizer)
    if any("lr_mult" not in group for group in optimizer.param_groups):
        if model is None or optimizer.state:
            why = "model=None" if model is None else "it has made a step"
            raise ValueError(
                f"{why}: the groups of {type(optimizer).__name__} have no lr_mult; make it of "
                "param_groups(model, lr), or call keep_ratios(optimizer, model) before a step"
            )
        rule = rule or _read_rule(optimizer)
        optimizer.param_groups[:] = divide_groups(optimizer.param_groups, model, rule)
    _take_ratios_out(optimizer.param_groups)
    # which some schedulers read
    optimizer.defaults["lr"] = deepcopy(optimizer.param_groups[0]["lr"])
    return KeptRatios(optimizer)


class KeptRatios(Wrapper):
    """`base`, with steps at lr * lr_mult. `base` makes no other steps: its groups have dense rates,
    and nothing would multiply them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stepping = False
        self.base.register_step_pre_hook(self._refuse_bare_step)

    def _refuse_bare_step(self, base: Optimizer, *_: Any) -> None:
        if not self._stepping and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{type(base).__name__}.step would step every group at the dense rate: step what "
                "keep_ratios returned, optimizer = structlin.keep_ratios(optimizer)"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """An option of the optimizer, such as Muon's `nonfinite`, is its own."""
        is_of_wrapper = name.startswith("_") or name == "base" or hasattr(type(self), name)
        if is_of_wrapper:
            super().__setattr__(name, value)
        else:
            setattr(self.base, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "base":  # GradScaler asks for abilities that are private
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.base, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the rate of the dense model, or one of `param_groups`."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        _take_ratios_out(self.param_groups[before:])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where the state was saved without `keep_ratios`."""
        require_kept(state_dict, "an optimizer without keep_ratios")
        super().load_state_dict(remove_guard(state_dict))

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with a last group without parameters."""
        return add_guard(super().state_dict())

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """A step of `base`, with the dense rates put back after it."""
        if closure is not None:
            with torch.enable_grad():
                loss = closure()  # which may read the rates, and set them
        rates = scale_rates(self.param_groups)
        watched = not torch.compiler.is_compiling()
        try:
            if watched:
                self._stepping = True
            result = self.base.step(**options)
        finally:
            if watched:
                self._stepping = False
            set_rates(self.param_groups, rates)
        return result if closure is None else loss


def _require_usable(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS | Normed):
        raise TypeError(f"optimizer={name} must be a torch optimizer with a rate for each group")
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(f"lr=None: {name} chooses its rates itself; give it one")
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if scheduled or hooked or "step" in vars(optimizer):
        raise ValueError(
            f"optimizer={name} has a scheduler or hooks of its step, which would see rates times "
            "lr_mult: call keep_ratios first, and make them of what it returns"
        )


def _read_rule(optimizer: Optimizer) -> str:
    """Adam's or SGD's, by the optimizer's class, or else by the name of its class."""
    name = type(optimizer).__name__
    if isinstance(optimizer, _ADAMS):
        return "adam"
    if isinstance(optimizer, SGD):
        return "sgd"
    # AdaMuon, MuonWithAuxAdam and SignSGD have other rules than their names' parts
    if "Adam" in name and "muon" not in name.lower():
        return "adam"
    if "SGD" in name and "sign" not in name.lower():
        return "sgd"
    raise ValueError(
        f"rule=None: nobody knows which rule {name} follows; there are {', '.join(OPTIMIZERS)}. "
        "Pass the rule of the optimizer whose step has the same size, such as rule='sign' for "
        "Lion. LAMB, Adafactor and Muon scale their steps by themselves: step without keep_ratios, "
        "or by structlin.optim.AdamW(model), optim.Muon(model) or optim.SOAP(model)"
    )


def _take_ratios_out(groups: list[dict[str, Any]]) -> None:
    """Give every group the dense model's rate as its "lr"."""
    rates = []
    for group in groups:
        is_dense_rate = KEPT in group
        if not is_dense_rate:
            lr_mult = group.setdefault("lr_mult", 1.0)
            is_dense_rate = lr_mult in (0, 1)
        rates.append(group["lr"] if is_dense_rate else group["lr"] / group["lr_mult"])
    if not groups:
        return
    # a group that was never scaled has the dense rate exactly; others only up to rounding
    pairs = zip(rates, groups, strict=True)
    unscaled_rates = (rate for rate, group in pairs if group["lr_mult"] == 1)
    dense_rate = next(unscaled_rates, rates[0])
    for rate, group in zip(rates, groups, strict=True):
        is_same = isclose(float(rate), float(dense_rate), rel_tol=1e-12)
        # schedulers change a tensor in place, once for each group
        group["lr"] = deepcopy(dense_rate if is_same else rate)
        group[KEPT] = True
