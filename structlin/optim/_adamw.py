"""`AdamW`: torch's, for a whole model, at the dense model's rate.

Sources: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization" (arXiv:1711.05101); the
rates of cores are those of `param_groups`.
"""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from .._model.parameters import parameters_of
from .._structure.arguments import checked, fit, require_choice, require_keys
from .._tensors import Rate
from ._depth import Depth
from ._groups import group_alike
from ._rates import (
    KEPT,
    add_guard,
    list_parameters,
    remove_guard,
    require_kept,
    require_names,
    require_new,
    require_shapes,
    scale_rates,
    set_rates,
)
from ._roster import Masses, warn_of_int8
from ._transfer import DECAYS, Base, Transfer

# without torch's wrapper, which would call the hooks of the step a second time
_step_at_scaled_rates = unwrap(torch.optim.AdamW.step)
# what the rates of a parameter follow from; `add_param_group` reads them again
_RULE = (
    "model", "base", "depth", "masses", "structure_aware", "weight_decay_scaling", "scale_eps",
)  # fmt: skip


class AdamW(torch.optim.AdamW):
    """torch's AdamW for a whole model, converted or not, at the dense model's learning rate.

    Every group's "lr" is the dense model's rate. A step multiplies it by the group's `lr_mult`, the
    factor that `param_groups` has for a core: with eta = lr * lr_mult, and m and v the averages of
    gradients and of their squares, both over 1 - beta^t,

        W <- (1 - eta * weight_decay) W - eta * m / (sqrt(v) + eps)

    So a scheduler, or a loop that sets one rate for every group, sets the dense model's rate, and
    the ratios stay. Biases, norms, gains and what `no_weight_decay()` names do not decay. Frozen
    parameters are in the groups too: they step once they are unfrozen.

    Make the optimizer after `convert`, `fully_shard` and moving to a device, and the scheduler
    after the optimizer. `state_dict` says that its rates are the dense model's. A state without
    that mark is refused here. A torch.optim.AdamW refuses a state of this class, which has one more
    group, without parameters.

    Args:
        model: any module, converted or not.
        lr: the dense model's rate; a number, or a tensor of one number, which all groups share:
            ReduceLROnPlateau changes it once for each group, so give that a number.
        betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, fused: as of
            torch.optim.AdamW.
        base, depth, masses, structure_aware, weight_decay_scaling: as of `param_groups`.
        scale_eps: whether `eps` is that of the base, and follows the gradients' size over widths,
            structure and depth; False: the same for all.

    Raises:
        TypeError, ValueError: an option has the wrong type or is out of range; the model has no
            parameter; what `param_groups` raises of `base`, `depth` and `masses`. `load_state_dict`
            raises ValueError for a state whose rates have the ratios in them, and for one of
            another model.
        RuntimeError: what torch.optim.AdamW raises of `fused` and `foreach`.
    Source: Qiu et al. 2024 (arXiv:2406.06248), section 3.2.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(1024, 1024)), BTT(rank=2))
    >>> optimizer = AdamW(model, lr=1e-3, weight_decay=0.1)
    >>> scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=100)
    >>> for group in optimizer.param_groups:
    ...     print(round(group["lr"], 6), group["lr_mult"], group["weight_decay"])
    8e-05 16.0 0.1
    8e-05 8.0 0.1
    8e-05 1.0 0.0
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        lr: Rate = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        base: Base = None,
        depth: Depth | None = None,
        masses: Masses | None = None,
        structure_aware: bool = True,
        weight_decay_scaling: str = "1/width",
        scale_eps: bool = False,
    ) -> None:
        require_choice("weight_decay_scaling", weight_decay_scaling, DECAYS)
        _check_betas(betas)
        warn_of_int8(model)
        self.model = model
        self.base = base
        self.depth = depth
        self.masses = masses
        self.structure_aware = structure_aware
        self.weight_decay_scaling = weight_decay_scaling
        self.scale_eps = scale_eps
        super().__init__(
            [{"params": model}],
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in _RULE}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `params`, as one group for each combination of rate, decay and eps.

        `params` are a module, or parameters of the model, which may have grown. A module that is
        not in the model is read by itself. A group of `param_groups` keeps its `lr_mult`."""
        require_keys("param_group", param_group, "params")
        group = {**self.defaults, **param_group}
        group.update(fit(AdamW.__init__, group))
        _check_betas(group["betas"])
        parameters = list_parameters(group["params"])
        require_new(self.param_groups, parameters)
        if "lr_mult" not in group:
            for divided_group in self._divide(group, parameters):
                super().add_param_group(divided_group)
            return
        lr = group["lr"] if KEPT in group else group["lr"] / group["lr_mult"]
        super().add_param_group({**group, "params": parameters, "lr": lr, KEPT: True})

    def _divide(self, group: dict[str, Any], parameters: list[Tensor]) -> list[dict[str, Any]]:
        """A group for each combination of factors that the parameters have."""
        model = self.model
        infos = list(parameters_of(model))
        unknown = set(parameters).difference(info.parameter for info in infos)
        if unknown and isinstance(group["params"], nn.Module):
            model = group["params"]
            infos = list(parameters_of(model))
        elif unknown:
            shape = tuple(next(p for p in parameters if p in unknown).shape)
            raise ValueError(
                f"a parameter of shape {shape} belongs to no module of {type(model).__name__}: "
                "pass the module that owns it as params"
            )
        if isinstance(group["params"], nn.Module) and not parameters:
            raise ValueError(f"model={type(group['params']).__name__} has no parameters")
        transfer = Transfer(
            model,
            self.base,
            structure_aware=self.structure_aware,
            weight_decay_scaling=self.weight_decay_scaling,
            depth=self.depth,
        )
        masses = self.masses if model is self.model else None
        divided = []
        for alike in group_alike(
            infos, set(parameters), transfer, masses, scale_eps=self.scale_eps
        ):
            alike_group = {**group, "params": alike.parameters, "param_names": alike.names}
            alike_group["lr_mult"] = alike.lr_mult
            alike_group["weight_decay"] = group["weight_decay"] * alike.decay
            alike_group["eps"] = group["eps"] * alike.eps_mult
            divided.append({**alike_group, "name": alike.label, KEPT: True})
        return divided

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, each group at lr * lr_mult. Returns the closure's loss, if there is a
        closure, which sees the dense model's rates.

        Raises:
            RuntimeError: parameters have left the model, and others that have gradients are in no
                group: `convert` came after the optimizer. Nothing has changed.
        """
        loss = torch.enable_grad()(closure)() if closure is not None else None
        if not torch.compiler.is_compiling():
            self._require_current()
        rates = scale_rates(self.param_groups)
        try:
            _step_at_scaled_rates(self)
        finally:
            set_rates(self.param_groups, rates)
        return loss

    def _require_current(self) -> None:
        """Raises RuntimeError where the model has other parameters than when its groups were made,
        and they have gradients."""
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        current = dict[int, nn.Parameter]()
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    current[id(parameter)] = parameter
        if held <= current.keys():
            return
        missed = [p for p in current.values() if p.grad is not None and id(p) not in held]
        if missed:
            names = {info.parameter: info.name for info in parameters_of(self.model)}
            raise RuntimeError(
                f"{names[missed[0]]} is in no group of this optimizer: the model was converted (or "
                "sharded) after it was made; convert first, then make the optimizer"
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with a last group without parameters: see `load_state_dict`."""
        return add_guard(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit where another optimizer of the same model stopped.

        Raises:
            ValueError: the state's rates have the ratios in them, as those of a torch.optim.AdamW
                have; or it is of another model. Nothing has changed.
        """
        require_kept(state_dict, "torch.optim.AdamW(param_groups(model, lr))")
        state_dict = remove_guard(state_dict)
        require_names(self.param_groups, state_dict["param_groups"])
        require_shapes(self.param_groups, state_dict)
        super().load_state_dict(state_dict)


def _check_betas(betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} must be at least 0 and below 1")
