"""`Normed`: the updates of any torch optimizer, normalised in the modular norm.

Source: Large et al. 2024, "Scalable Optimization in the Modular Norm" (arXiv:2405.14813), algorithm
    1 and appendix A.3.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .._model.parameters import Weight
from .._structure.arguments import checked, require_keys
from .._torch import foreach_copy_, foreach_zero_
from ..duality import promote, spectral_bound
from ._rates import require_shapes
from ._roster import Masses, Roster
from ._sharding import gather_whole, local_gradient, local_part
from ._stacks import map_stacked, to_matrices


def _of_base(name: str) -> Any:
    return property(
        lambda self: getattr(self.base, name), lambda self, value: setattr(self.base, name, value)
    )


class Wrapper(Optimizer):
    """A torch optimizer whose groups, state and state dict are those of `base`. It has hooks of its
    own."""

    base: Optimizer
    param_groups: Any = _of_base("param_groups")
    state: Any = _of_base("state")
    defaults: Any = _of_base("defaults")

    def __init__(self, base: Optimizer) -> None:
        self.__setstate__({"base": base})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        require_shapes(self.param_groups, state_dict)
        self.base.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _refuse_a_model(make: Callable[..., None]) -> Callable[..., None]:
    """Let `Normed(model, lr=0.1)` be one clear error, where Python would say that lr is unknown."""

    @wraps(make)
    def call(self: Optimizer, *arguments: Any, **options: Any) -> None:
        if arguments and isinstance(arguments[0], nn.Module):
            raise TypeError(
                f"optimizer={type(arguments[0]).__name__} is a module: Normed is around an "
                "optimizer, Normed(torch.optim.AdamW(model.parameters(), lr=0.1), model)"
            )
        make(self, *arguments, **options)

    return call


class Normed(Wrapper):
    """`optimizer`, each of its updates scaled to norm lr * mass: its rate transfers across widths.

    W <- (1 - lr * weight_decay) W + lr * mass * u / |u|, with u the update that it makes at rate 1
    without weight decay. |u| is the RMS->RMS operator norm of a linear layer, the largest of
    the blocks' for a core (whose mass is its share of the layer's), of the slices' for a
    convolution and of the experts' where a parameter holds several; the largest RMS of the vectors
    of an embedding (equation 2.4); the RMS of everything else. A zero update stays zero. The
    operator norm is `duality.spectral_bound`.

    `param_groups`, `state` and `state_dict` are those of `optimizer`. u is found by letting it step
    from zero parameters; an optimizer whose update depends on their size (LAMB, Adafactor with
    relative steps) sees zero. `weight_decay` is decoupled whatever `optimizer` does with it, and
    outside of the normalisation. What decays is what its groups say; those of
    `param_groups(model, lr, weight_decay=0.1, structure_aware=False)` leave out biases, norms and
    what `no_weight_decay()` names.

    Args:
        optimizer: of parameters of `model`; from now on step this one instead, `base` to it.
        model: the module that owns them.
        masses: glob over layer names -> step length relative to the others; a tuple: of a layer's
            cores, one each.

    Raises:
        TypeError: `optimizer` is none of torch's; or LBFGS, which makes several steps in one; or a
            `Normed` or `Muon`, whose steps have norm lr already.
        ValueError: a parameter belongs to no module of `model`; a group of `param_groups` has an
            lr_mult, which the norm replaces.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64)), BTT())
    >>> optimizer = Normed(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01), model)
    >>> before = model[0].cores[0].detach().clone()
    >>> model(torch.randn(32, 64)).square().mean().backward()
    >>> optimizer.step()
    >>> step = model[0].cores[0].detach() - 0.999 * before
    >>> torch.linalg.matrix_norm(step, 2).max().round(decimals=2)  # half of the layer's 0.1
    tensor(0.0500)
    """

    model: nn.Module
    masses: Masses | None

    @_refuse_a_model
    @checked
    def __init__(
        self, optimizer: Optimizer, model: nn.Module, *, masses: Masses | None = None
    ) -> None:
        name = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise TypeError(f"optimizer={name} must make one step at a time")
        if isinstance(optimizer, Normed) or any("kind" in g for g in optimizer.param_groups):
            raise TypeError(f"optimizer={name} makes steps of norm lr by itself: step it alone")
        self.__setstate__({"base": optimizer, "model": model, "masses": masses})
        for group in optimizer.param_groups:
            self._require_usable(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._roster = Roster(self.model, self.masses)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        require_keys("param_group", param_group, "params")
        self._roster.read()  # the model may have grown
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        group = {**param_group, "params": params}
        self._require_usable(group)
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns the closure's loss, if there is a closure.

        Raises:
            FloatingPointError: a gradient is not finite; nothing has changed.
            RuntimeError: a parameter is no longer the model's, or its gradient is on another device
                mesh.
        """
        loss = torch.enable_grad()(closure)() if closure is not None else None
        self._roster.require_current(self.param_groups)
        stepping = []  # of each group
        for group in self.param_groups:
            stepping.append([p for p in group["params"] if p.grad is not None])
        params = [p for members in stepping for p in members]
        if not params:
            return loss
        self._roster.require_placed(params)
        self._roster.require_finite(params, [local_gradient(p) for p in params])
        updates = dict(zip(params, self._updates(params), strict=True))
        norms = dict(zip(params, self._norms(params, list(updates.values())), strict=True))
        for group, members in zip(self.param_groups, stepping, strict=True):
            for p in members:
                norm = norms[p]
                length = self._roster.step_length(p)
                factor = torch.where(norm == 0, norm, length / norm) * group["lr"]
                if group.get("weight_decay"):
                    local_part(p).mul_(1 - group["lr"] * group["weight_decay"])
                local_part(p).add_(updates[p] * factor.to(updates[p].dtype))
        return loss

    def _require_usable(self, group: dict[str, Any]) -> None:
        self._roster.require_owned(group["params"])
        if group.get("lr_mult", 1.0) != 1.0:
            raise ValueError(
                f"a group of param_groups() has lr_mult={group['lr_mult']:.6g} for the updates of "
                "Adam or SGD; the norm replaces it: pass model.parameters(), or the groups of "
                "param_groups(model, lr, structure_aware=False)"
            )

    def _updates(self, params: list[Tensor]) -> list[Tensor]:
        """What `base` adds at rate 1, without decay, to parameters of zero, which are put back."""
        local = [local_part(p) for p in params]
        values_before = [p.clone() for p in local]
        changed: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
        options = [
            {name: group[name] for name in changed if name in group} for group in self.param_groups
        ]
        try:
            foreach_zero_(local)
            for group in self.param_groups:
                group.update({name: value for name, value in changed.items() if name in group})
            self.base.step()
            return [p.clone() for p in local]
        finally:
            foreach_copy_(local, values_before)
            for group, values in zip(self.param_groups, options, strict=True):
                group.update(values)

    def _norms(self, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """The norm of each update, the largest of its matrices', in the units of `step_length`."""
        wholes = [gather_whole(p, u) for p, u in zip(params, updates, strict=True)]
        weights = [self._roster.weights[p] for p in params]
        matrices = [n for n, weight in enumerate(weights) if weight.kind == "matrix"]
        batches = [to_matrices(weights[n], wholes[n]) for n in matrices]  # (batch, m, n)
        bounds = map_stacked(spectral_bound, batches)  # (batch,)
        spectral = dict(zip(matrices, bounds, strict=True))
        norms = [
            spectral[n] if n in spectral else _rms(whole, weight)
            for n, (whole, weight) in enumerate(zip(wholes, weights, strict=True))
        ]
        return [norm.amax() if norm.numel() else norm.new_zeros(()) for norm in norms]


def _rms(update: Tensor, weight: Weight) -> Tensor:
    squares = promote(update).square()
    return squares.mean(dim=-1).sqrt() if weight.kind == "embedding" else squares.mean().sqrt()
