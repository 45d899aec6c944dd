"""Ratios between the rates of groups: a way to keep them, and Muon's warning where a loop erases
them.

A loop that sets `group["lr"] = lr` for every group, as nanoGPT's, makes of `param_groups` the naive
rule. `keep_ratios` moves the ratios into the optimizer's step, out of reach of loops.
"""

from collections import defaultdict
from collections.abc import Callable
from math import isclose
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .._arguments import checked
from .._model.parameters import parameters_of
from .._warnings import warn
from ._normed import Normed
from ._transfer import Transfer
from ._wrapper import Wrapper

KEPT = "keeps_ratios"  # of a group: its "lr" is the dense model's, its step's is lr * lr_mult

_warned = WeakSet[Optimizer]()


@checked
def keep_ratios(optimizer: Optimizer, model: nn.Module | None = None) -> Optimizer:
    """An optimizer around `optimizer`, which keeps the ratios between the groups' rates.

    Every group's "lr" is the dense model's rate, and `step` multiplies it by the group's `lr_mult`.
    A loop may set one rate for all groups, any scheduler may (OneCycleLR, CosineAnnealingLR with
    `eta_min`, SWALR, timm's), and what is logged is the dense rate. Copies, files and `state_dict`
    keep the ratios.

    From now on step and save what this returns: `optimizer` by itself refuses to step. Call it
    before a scheduler is made, and before `load_state_dict`. Register hooks on what it returns;
    torch's global hooks see its step and the step inside.
    Where rates are tensors, each group has its own. For `Muon` "lr" is the rate of the matrices,
    and the other parameters keep the ratio of `other_lr` to it.

    Args:
        optimizer: of the groups of `param_groups`, or a `Muon`, or any that a framework made.
        model: for an optimizer that a framework made: each of its groups is divided by the
            `lr_mult` that `param_groups(model, lr)` has for its parameters, and the options of the
            group stay. The rule is SGD's where the name of the optimizer's class has "SGD" in it,
            else Adam's. Where groups have an `lr_mult` already, it is not read.

    Returns:
        A torch optimizer; `optimizer` itself where it keeps its ratios already.

    Raises:
        ValueError: no group has an `lr_mult`, and there is no `model`; a parameter that is not the
            model's; groups to divide of an optimizer that has made a step; a scheduler or a hook
            of the step was made before; a rate that is None. `load_state_dict` raises it for a
            state of before `keep_ratios`.
        TypeError: `optimizer` is no torch optimizer, or a `Normed`, whose groups have one rate.

    >>> import torch
    >>> from structlin import BTT, convert, param_groups
    >>> model = convert(nn.Sequential(nn.Linear(1024, 1024)), BTT(rank=2))
    >>> optimizer = keep_ratios(torch.optim.AdamW(param_groups(model, lr=1e-3)))
    >>> for group in optimizer.param_groups:
    ...     group["lr"] = 5e-4  # as any loop does
    >>> [group["lr_mult"] for group in optimizer.param_groups]  # what a step multiplies by
    [16.0, 8.0, 1.0]
    >>> optimizer = keep_ratios(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    >>> [(group["lr"], group["lr_mult"]) for group in optimizer.param_groups]
    [(0.001, 1.0), (0.001, 16.0), (0.001, 8.0)]
    """
    if isinstance(optimizer, KeptRatios):
        return optimizer
    _require_usable(optimizer)
    if any("lr_mult" not in group for group in optimizer.param_groups):
        optimizer.param_groups[:] = _divide_groups(optimizer, model)
    _take_ratios_out(optimizer.param_groups)
    # which some schedulers read
    optimizer.defaults["lr"] = _copy(optimizer.param_groups[0]["lr"])
    return KeptRatios(optimizer)


class KeptRatios(Wrapper):
    """What `keep_ratios` returns: `base`, with steps at lr * lr_mult. `base` makes no other steps:
    its groups have dense rates, and nothing would multiply them."""

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
        own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        own = own or not hasattr(self.base, name)
        super().__setattr__(name, value) if own else setattr(self.base, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "base":  # GradScaler asks for abilities that are private
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.base, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the rate of the dense model, or one of `param_groups`."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        for group in self.param_groups[before:]:
            group.setdefault("lr_mult", 1.0)
            group.update({"lr": _copy(_dense_rate(group)), KEPT: True})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where the state was saved without `keep_ratios`."""
        if not all(group.get(KEPT) for group in state_dict["param_groups"]):
            raise ValueError(
                "state_dict was saved without keep_ratios, its rates have the ratios in them: "
                "load it into an optimizer without keep_ratios"
            )
        super().load_state_dict(state_dict)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """A step of `base`, with the dense rates put back after it."""
        rates = self._multiply()

        def call() -> Any:  # which may read the rates, and set them
            assert closure is not None
            self._restore(rates)
            loss = closure()
            rates[:] = self._multiply()
            return loss

        if closure is not None:
            options["closure"] = call
        self._allow_step(True)
        try:
            return self.base.step(**options)
        finally:
            self._allow_step(False)
            self._restore(rates)

    def _allow_step(self, allowed: bool) -> None:
        if not torch.compiler.is_compiling():  # where nobody asks
            self._stepping = allowed

    def _multiply(self) -> list[Any]:
        """Give each group the rate of its step; returns the dense rates."""
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            if group["lr_mult"] != 1:
                group["lr"] = group["lr"] * group["lr_mult"]
        return rates

    def _restore(self, rates: list[Any]) -> None:
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def warn_of_one_rate(optimizer: Optimizer) -> None:
    """Warn, once, where one rate has replaced several."""
    if optimizer in _warned:
        return
    groups = [group for group in optimizer.param_groups if "lr_mult" in group]
    mults = {group["lr_mult"] for group in groups}
    if len(mults) < 2:
        return
    lr = groups[0]["lr"]
    if all(_are_same(group["lr"], lr) for group in groups) and lr > 0:
        _warned.add(optimizer)
        warn(
            f"every group of {type(optimizer).__name__} has lr={float(lr):.6g}, though their "
            f"lr_mult go from {min(mults):.6g} to {max(mults):.6g}: a loop or a scheduler has set "
            "one rate for all. Call optimizer = structlin.keep_ratios(optimizer) once, before a "
            'scheduler is made; or set group["lr"] = lr * group["lr_mult"]'
        )


def _are_same(lr: float | Tensor, other: float | Tensor) -> bool:
    """Without waiting for a device."""
    if lr is other:
        return True
    on_device = any(isinstance(each, Tensor) and not each.is_cpu for each in (lr, other))
    return not on_device and float(lr) == float(other)


def _require_usable(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS | Normed):
        raise TypeError(f"optimizer={name} must be a torch optimizer with a rate for each group")
    for group in optimizer.param_groups:
        if group.get("lr") is None:
            raise ValueError(f"lr=None: {name} chooses its rates itself; give it one")
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if scheduled or "step" in vars(optimizer):
        raise ValueError(
            f"optimizer={name}: a scheduler has its rates already; call keep_ratios first, then "
            "make the scheduler"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(
            f"optimizer={name} has hooks of its step, which would see rates times lr_mult: call "
            "keep_ratios first, then register them on what it returns"
        )


def _divide_groups(optimizer: Optimizer, model: nn.Module | None) -> list[dict[str, Any]]:
    """The groups of an optimizer, each divided by the `lr_mult` of its parameters."""
    name = type(optimizer).__name__
    if model is None:
        raise ValueError(
            f"model=None: the groups of {name} have no lr_mult; make it of param_groups(model, lr),"
            " or call keep_ratios(optimizer, model)"
        )
    if optimizer.state:
        raise ValueError(
            f"optimizer={name} has made a step: call keep_ratios(optimizer, model) before"
        )
    transfer = Transfer(model, None, optimizer="sgd" if "sgd" in name.lower() else "adam")
    mults = {info.parameter: transfer.of(info).lr for info in parameters_of(model)}
    divided = []
    for group in optimizer.param_groups:
        if "lr_mult" in group:
            divided.append(group)
            continue
        members: dict[float, list[int]] = defaultdict(list)
        for n, parameter in enumerate(group["params"]):
            if parameter not in mults:
                shape, kind = tuple(parameter.shape), type(model).__name__
                raise ValueError(
                    f"model={kind}: a parameter of shape {shape} in {name} is not this model's"
                )
            members[mults[parameter]].append(n)
        for mult, chosen in members.items():
            lists: dict[str, Any] = {
                key: [group[key][n] for n in chosen]
                for key in ("params", "param_names")
                if key in group
            }
            divided.append({**group, **lists, "lr_mult": mult, KEPT: True})
    return divided


def _take_ratios_out(groups: list[dict[str, Any]]) -> None:
    """Give every group the dense model's rate as its "lr"."""
    rates = [_dense_rate(group) for group in groups]
    plain = (rate for rate, group in zip(rates, groups, strict=True) if group["lr_mult"] == 1)
    one = next(plain, rates[0])
    for rate, group in zip(rates, groups, strict=True):
        same = isclose(float(rate), float(one), rel_tol=1e-12)  # but for the rounding of a product
        group.update({"lr": _copy(one if same else rate), KEPT: True})


def _dense_rate(group: dict[str, Any]) -> Any:
    if KEPT in group or group["lr_mult"] in (0, 1):
        return group["lr"]
    return group["lr"] / group["lr_mult"]


def _copy(rate: Any) -> Any:
    """Schedulers change a tensor in place, once for each group."""
    return rate.clone() if isinstance(rate, Tensor) else rate
