"""`Normed`: the updates of any torch optimizer, normalised in the modular norm.

Source: Large et al. 2024, "Scalable Optimization in the Modular Norm" (arXiv:2405.14813), algorithm
    1 and appendix A.3.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .._arguments import checked, require_choice, require_keys
from .._model.parameters import Weight
from ..duality import promote, spectral_bound
from ._matrices import from_matrices, map_stacks, to_matrices
from ._sharding import gather_whole, is_sharded, local_part
from ._steps import NONFINITE, Masses, Roster
from ._wrapper import Wrapper

NORMS = ("bound", "power")


class Normed(Wrapper):
    """`base`, with each update scaled to norm lr * mass, so that its rate transfers across widths.

    W <- (1 - lr * weight_decay) W + lr * mass * u / |u|, with u the update that `base` makes at
    rate 1 without weight decay. |u| is the RMS->RMS operator norm of a linear layer, the largest of
    the blocks' for a core (whose mass is its share of the layer's) and of the slices' for a
    convolution; the largest RMS of the vectors of an embedding (equation 2.4); the RMS of
    everything else. A zero update stays zero. The authors' code divides every vector and every
    slice by its own norm (`per_vector=True`), so that a rare token moves as far as a frequent one.

    It is a torch optimizer whose `param_groups`, `state` and `state_dict` are those of `base`:
    schedulers change `lr`, checkpoints hold all there is. u is found by letting `base` step from
    zero parameters, so that it has no rounding error of theirs; an optimizer whose update depends
    on their size (LAMB, Adafactor with relative steps) sees zero. `weight_decay` is decoupled
    whatever `base` does with it, and outside of the normalisation. What decays is what the groups
    of `base` say, as in torch; those of `param_groups(model, lr, weight_decay=0.1,
    structure_aware=False)` leave out biases, norms and what `no_weight_decay()` names.

    Args:
        base: an optimizer of parameters of `model`; from now on step this one instead.
        model: the module that owns them.
        masses: glob over layer names -> step length relative to the others; a tuple: of a layer's
            cores, one each.
        norm: of matrices: "bound", `duality.spectral_bound`; or "power", two power iterations that
            start where the last step's ended (one vector per block in the state). On AdamW's
            updates for a GPT of width 256 over 30 steps, relative to the true norm: bound 1.000 to
            1.026 (mean 1.003), power 0.73 to 1.00 (mean 0.98), which makes steps up to 37 % too
            long; at 1.8 (BTT) and 21.5 ms (dense) against 1.0 and 2.0 ms, one thread.
        per_vector: divide every vector of an embedding and every slice of a convolution by its own
            norm, not by the largest of them. Blocks of a core share one norm either way.
        nonfinite: gradients with inf or NaN: "raise" (before anything has changed), "skip" the
            whole step, or "ignore".

    Raises:
        TypeError: `base` is no torch optimizer; or LBFGS, which makes several steps in one; or a
            `Normed` or `Muon`, whose steps have norm lr already.
        ValueError: an option is unknown; a parameter belongs to no module of `model`; a group of
            `param_groups` has an lr_mult, which the norm replaces; `per_vector` with an embedding
            or a convolution that is sharded.

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
    norm: str
    nonfinite: str
    per_vector: bool = False

    @checked
    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        *,
        masses: Masses | None = None,
        norm: str = "bound",
        per_vector: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        if isinstance(base, LBFGS):
            name = type(base).__name__
            raise TypeError(f"base={name} must be a torch optimizer that makes one step at a time")
        if isinstance(base, Normed) or any("kind" in group for group in base.param_groups):
            name = type(base).__name__
            raise TypeError(f"base={name} makes steps of norm lr by itself: step it without Normed")
        require_choice("norm", norm, NORMS)
        require_choice("nonfinite", nonfinite, NONFINITE)
        options = {"base": base, "model": model, "masses": masses, "norm": norm}
        self.__setstate__({**options, "per_vector": per_vector, "nonfinite": nonfinite})
        for group in base.param_groups:
            self._require_usable(group)

    def __getstate__(self) -> dict[str, Any]:
        options = ("model", "masses", "norm", "per_vector", "nonfinite")
        return super().__getstate__() | {name: getattr(self, name) for name in options}

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
            FloatingPointError: a gradient is not finite (with nonfinite="raise"); nothing has
                changed.
            RuntimeError: a parameter is no longer the model's, which was converted after this
                optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._roster.require_current(self.param_groups)
        used = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        params = [p for members in used for p in members]
        if not params or not self._roster.may_step(params, self.nonfinite):
            return loss
        updates = dict(zip(params, self._updates(params), strict=True))
        norms = dict(zip(params, self._norms(params, list(updates.values())), strict=True))
        for group, members in zip(self.param_groups, used, strict=True):
            for p in members:
                norm, length = norms[p], self._roster.step_length(p)
                factor = torch.where(norm == 0, norm, length / norm) * group["lr"]
                if group.get("weight_decay"):
                    local_part(p).mul_(1 - group["lr"] * group["weight_decay"])
                local_part(p).add_(updates[p] * factor.to(updates[p].dtype))
        return loss

    def _require_usable(self, group: dict[str, Any]) -> None:
        self._roster.require_owned(group["params"])
        if self.per_vector and any(is_sharded(p) and self._has_parts(p) for p in group["params"]):
            raise ValueError(
                "per_vector=True: the vectors of an embedding, or the slices of a convolution, are "
                "on several processes; take per_vector=False"
            )
        if group.get("lr_mult", 1.0) != 1.0:
            raise ValueError(
                f"a group of param_groups() has lr_mult={group['lr_mult']:.6g} for the updates of "
                "Adam or SGD; the norm replaces it: pass model.parameters(), or the groups of "
                "param_groups(model, lr, structure_aware=False)"
            )

    def _updates(self, params: list[Tensor]) -> list[Tensor]:
        """What `base` adds at rate 1, without decay, to parameters of zero, which are put back."""
        local = [local_part(p) for p in params]
        kept = [p.clone() for p in local]
        changed: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
        options = [
            {name: group[name] for name in changed if name in group} for group in self.param_groups
        ]
        try:
            torch._foreach_zero_(local)
            for group in self.param_groups:
                group.update({name: value for name, value in changed.items() if name in group})
            self.base.step()
            return [p.clone() for p in local]
        finally:
            torch._foreach_copy_(local, kept)
            for group, values in zip(self.param_groups, options, strict=True):
                group.update(values)

    def _norms(self, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """The norm of each update, the largest of its matrices', in the units of `step_length`."""
        pairs = zip(params, updates, strict=True)
        updates = [gather_whole(p, u) if is_sharded(p) else u for p, u in pairs]
        weights = [self._roster.weights[p] for p in params]
        matrices = [n for n, weight in enumerate(weights) if weight.kind == "matrix"]
        batches = [to_matrices(weights[n], updates[n]) for n in matrices]  # (batch, m, n)
        if self.norm == "power":
            spectral = [
                self._power(params[n], batch) for n, batch in zip(matrices, batches, strict=True)
            ]
        else:
            spectral = map_stacks(lambda stacks: map(spectral_bound, stacks), batches)  # (batch,)
        found = dict(zip(matrices, spectral, strict=True))
        norms = [
            found[n] if n in found else _rms(update, vectors=weights[n].kind == "embedding")
            for n, update in enumerate(updates)
        ]
        return [
            _spread(weights[n], norms[n], update)
            if self.per_vector and self._has_parts(params[n])
            else _largest(norms[n])
            for n, update in enumerate(updates)
        ]

    def _has_parts(self, parameter: Tensor) -> bool:
        """Whether it is vectors, or several matrices that are no blocks of a core."""
        weight = self._roster.weights[parameter]
        several = weight.groups * weight.kernel > 1
        return weight.kind == "embedding" or (weight.core is None and several)

    def _power(self, parameter: Tensor, batch: Tensor) -> Tensor:
        """Two power iterations on `(batch, m, n)`, from the last step's vectors: `(batch,)`."""
        x = promote(batch)
        state = self.state[parameter]
        if "singular_vector" not in state:
            seeded = torch.Generator().manual_seed(0)
            start = torch.randn(x.shape[0], x.shape[2], 1, generator=seeded, dtype=torch.float64)
            state["singular_vector"] = start.to(x.device, parameter.dtype)
        right, norm = state["singular_vector"].to(x.dtype), x.new_zeros(len(x))
        for _ in range(2):
            left = nn.functional.normalize(x @ right, dim=1)  # (batch, m, 1)
            right = x.mT @ left  # (batch, n, 1)
            norm = right.norm(dim=1)[:, 0]  # (batch,)
            right = right / torch.where(norm == 0, torch.ones_like(norm), norm)[:, None, None]
        moved = norm > 0
        state["singular_vector"][moved] = right[moved].to(parameter.dtype)
        return norm


def _rms(update: Tensor, vectors: bool) -> Tensor:
    """RMS of each vector, or of all of it."""
    squares = promote(update).square()
    return squares.mean(dim=-1).sqrt() if vectors else squares.mean().sqrt()


def _spread(weight: Weight, norms: Tensor, update: Tensor) -> Tensor:
    """The norm of each vector or matrix of `update`, at all of its numbers."""
    if weight.kind == "embedding":
        return norms[:, None]  # (vectors, 1)
    matrices = norms[:, None, None].expand_as(to_matrices(weight, update))  # (batch, m, n)
    return from_matrices(weight, matrices, update)


def _largest(norms: Tensor) -> Tensor:
    return norms.amax() if norms.numel() else norms.new_zeros(())
