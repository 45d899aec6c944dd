"""Muon for batched cores: steepest descent under each parameter's own norm, block by block.

Sources: Bernstein & Newhouse 2024, "Modular Duality in Deep Learning" (arXiv:2410.21265); Jordan et al. 2024, "Muon";
Large et al. 2024, "Scalable Optimization in the Modular Norm" (arXiv:2405.14813) for masses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from ..duality import METHODS, dual_embedding, dualize
from .geometry import Geometry, Masses, geometries

SCALES = ("rms", "original", "match_rms_adamw")
_LARGEST_STACK = 2**26  # elements that are dualized in one call: bounds the memory of a step


class Muon(Optimizer):
    """One optimizer for a whole model, converted or not.

    What a parameter is, is read from its module:

    - cores of a `StructuredLinear`, block by block; weights of nn.Linear, transformers' Conv1D, convolutions (each
      slice of the kernel), nn.MultiheadAttention (q, k and v apart): W <- W - lr * mass * sqrt(fan_out / fan_in) *
      polar(momentum), a step of norm lr * mass in the RMS->RMS operator norm. A layer's mass is split over its cores;
    - nn.Embedding: each vector's step has RMS lr * mass, or is zero where it has no gradient;
    - everything else (biases, norms, gains): AdamW, or signs, with a rate of its own, `other_lr`.

    Args:
        params: a module, or what torch optimizers take (parameters, or dicts with options of their own) and `model=`.
        lr: of matrices and embeddings, in units of operator norm per step; transfers across widths and structures.
        model: the module that owns the parameters, where `params` is not it.
        momentum, nesterov: B <- momentum B + (1 - momentum) G; the step is that of (1 - momentum) G + momentum B.
        weight_decay: decoupled: W <- (1 - lr * weight_decay) W first; matrices and embeddings only.
        method, steps, dtype: of `dualize`.
        scale: "rms"; "original" (sqrt(max(1, fan_out / fan_in))) and "match_rms_adamw" (0.2 sqrt(max(fan_out, fan_in)))
            are those of torch.optim.Muon. With method="jordan", dtype=torch.bfloat16 and scale="original" the step of
            an nn.Linear equals torch.optim.Muon's bit for bit.
        masses: glob over layer names -> step length relative to the others; a tuple splits a layer over its cores.
        other: "adamw" or "sign".
        other_lr, betas, eps: of that.
        nonfinite: gradients with inf or NaN: "raise" (before anything has changed), "skip" the whole step, or "ignore"
            (no check, and no wait for the device).

    Raises:
        ValueError: an option out of range; a parameter that no module of the model owns, is in two groups or on meta.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), BTT())
    >>> optimizer = Muon(model, lr=0.02, other_lr=1e-3)
    >>> [(group["kind"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [('matrix', 0.02, 4), ('other', 0.001, 2)]
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 0.02,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        method: str = "ns",
        steps: int | None = None,
        dtype: torch.dtype | None = None,
        scale: str = "rms",
        masses: Masses | None = None,
        other: str = "adamw",
        other_lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        nonfinite: str = "raise",
    ) -> None:
        if nonfinite not in ("raise", "skip", "ignore"):
            raise ValueError(f"nonfinite={nonfinite!r} must be 'raise', 'skip' or 'ignore'")
        if model is None:
            if not isinstance(params, nn.Module):
                raise ValueError("model=None: with parameters or groups, pass the module that owns them as model=")
            model = params
        self.model, self.masses, self.nonfinite = model, masses, nonfinite
        self._geometry = geometries(model, masses)
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "method": method,
            "steps": steps, "dtype": dtype, "scale": scale, "other": other, "other_lr": other_lr, "betas": betas,
            "eps": eps,
        }  # fmt: skip
        if isinstance(params, nn.Module):
            params = [parameter for parameter in params.parameters() if parameter.requires_grad]
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameters of a dict (or module) `params`, as one group per kind of parameter."""
        group = {**self.defaults, **param_group}
        _check(group)
        params = group["params"]
        params = list(params.parameters()) if isinstance(params, nn.Module) else params
        params = [params] if isinstance(params, Tensor) else list(params)
        if "kind" in param_group:  # as copied or unpickled
            super().add_param_group(param_group)
            return
        kinds: dict[str, list[Tensor]] = defaultdict(list)
        for parameter in params:
            if parameter not in self._geometry:
                self._geometry = geometries(self.model, self.masses)
            if parameter not in self._geometry:
                shape = tuple(getattr(parameter, "shape", ()))
                raise ValueError(f"a parameter of shape {shape} belongs to no module of {type(self.model).__name__}")
            if parameter.is_meta:
                raise ValueError(f"{self._geometry[parameter].name} is on meta: materialise the model first (to_empty)")
            kinds[self._geometry[parameter].kind].append(parameter)
        for kind in ("matrix", "embedding", "other"):
            if kinds[kind]:
                names = [self._geometry[parameter].name for parameter in kinds[kind]]
                rate = {"lr": group["other_lr"], "weight_decay": 0.0} if kind == "other" else {}
                own = {**group, **rate, "params": kinds[kind], "kind": kind, "param_names": names}
                super().add_param_group(own)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns the closure's loss, if there is a closure.

        Raises:
            FloatingPointError: a gradient is not finite (with nonfinite="raise"); nothing has changed.
            RuntimeError: a parameter is no longer the model's: it was converted after this optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        self._check_ownership()
        if not self._finite([p for params in used for p in params]):
            return loss
        for group, params in zip(self.param_groups, used, strict=True):
            if not params:
                continue
            gradients = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in params]
            if group["kind"] == "other" and group["other"] == "adamw":
                self._adamw(group, params, gradients)
                continue
            updates = self._momentum(group, params, gradients)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            if group["kind"] == "matrix":
                self._descend(group, params, self._dualized(group, params, updates))
            elif group["kind"] == "embedding":
                self._descend(group, params, [dual_embedding(update) for update in updates])
            else:
                self._descend(group, params, [update.sign() for update in updates])
        return loss

    def _momentum(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        for p, gradient in zip(params, gradients, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(gradient)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        if not group["nesterov"]:
            return buffers
        return list(torch._foreach_lerp(gradients, buffers, group["momentum"]))

    def _dualized(self, group: dict[str, Any], params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """The polar factors, equal shapes of all layers in one batch, tall matrices transposed."""
        shapes: dict[tuple[object, ...], list[int]] = defaultdict(list)
        matrices = [self._geometry[p].matrices(update) for p, update in zip(params, updates, strict=True)]
        for n, matrix in enumerate(matrices):
            if matrix.shape[-2] > matrix.shape[-1]:
                matrix = matrices[n] = matrix.mT
            shapes[(*matrix.shape[-2:], matrix.dtype, matrix.device)].append(n)
        for members in shapes.values():
            for chunk in _chunks(members, [matrices[n].numel() for n in members]):
                stack = matrices[chunk[0]] if len(chunk) == 1 else torch.cat([matrices[n] for n in chunk])
                dual = dualize(stack, method=group["method"], steps=group["steps"], dtype=group["dtype"])
                for n, part in zip(chunk, torch.split(dual, [matrices[n].shape[0] for n in chunk]), strict=True):
                    matrices[n] = part
        duals = []
        for p, update, matrix in zip(params, updates, matrices, strict=True):
            geometry = self._geometry[p]
            tall = geometry.matrices(update).shape[-2:] != matrix.shape[-2:]
            duals.append(geometry.restored(matrix.mT if tall else matrix, like=p))
        return duals

    def _descend(self, group: dict[str, Any], params: list[Tensor], steps: list[Tensor]) -> None:
        for p, step in zip(params, steps, strict=True):
            p.add_(step, alpha=-group["lr"] * self._length(self._geometry[p], group["scale"]))

    @staticmethod
    def _length(geometry: Geometry, scale: str) -> float:
        """Of a step at lr = 1, as the factor of the polar factor."""
        m, n = geometry.fan_out, geometry.fan_in
        if geometry.kind != "matrix":
            return geometry.mass
        if scale == "original":
            return geometry.mass * sqrt(max(1, m / n))
        if scale == "match_rms_adamw":
            return geometry.mass * 0.2 * sqrt(max(m, n))
        return geometry.mass * sqrt(m / n)

    def _adamw(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.state[p].update(step=torch.zeros((), dtype=torch.float32), **zeros)
        states = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step")]
        exp_avgs, exp_avg_sqs, steps = states
        beta1, beta2 = group["betas"]
        options = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]}
        averages = params, gradients, exp_avgs, exp_avg_sqs, list[Tensor](), steps
        adamw(*averages, **options, eps=group["eps"], amsgrad=False, maximize=False)

    def _finite(self, params: list[Tensor]) -> bool:
        if self.nonfinite == "ignore" or not params:
            return True
        norms = torch.stack([norm.float().cpu() for norm in torch._foreach_norm([_values(p) for p in params])])
        finite = norms.isfinite()
        if bool(finite.all()):
            return True
        if self.nonfinite == "raise":
            names = [self._geometry[p].name for p, good in zip(params, finite.tolist(), strict=True) if not good]
            raise FloatingPointError(f"gradients of {', '.join(names[:5])} are not finite; nothing was changed")
        return False

    def _check_ownership(self) -> None:
        """A parameter without a gradient may be one that `convert` has replaced."""
        idle = {p for group in self.param_groups for p in group["params"] if p.grad is None}
        gone = idle - set(self.model.parameters()) if idle else idle
        if gone:
            names = sorted(self._geometry[p].name for p in gone if p in self._geometry)
            raise RuntimeError(
                f"{', '.join(names[:5])} no longer belong to the model, which was converted after this optimizer was "
                "made: convert first, then make the optimizer"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit where another optimizer of the same model stopped.

        Raises:
            ValueError: the state is of another model; the message names what differs.
        """
        saved = [name for group in state_dict["param_groups"] for name in group.get("param_names", [])]
        own = [name for group in self.param_groups for name in group["param_names"]]
        if saved != own:
            missing, unknown = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
            raise ValueError(f"state_dict is of another model: it lacks {missing[:5]} and has {unknown[:5]} besides")
        super().load_state_dict(state_dict)


def _check(group: dict[str, Any]) -> None:
    in_range = {
        "lr": group["lr"] >= 0,
        "other_lr": group["other_lr"] >= 0,
        "weight_decay": group["weight_decay"] >= 0,
        "momentum": 0 <= group["momentum"] < 1,
        "eps": group["eps"] >= 0,
        "betas": all(0 <= beta < 1 for beta in group["betas"]),
    }
    for option, good in in_range.items():
        if not good:
            raise ValueError(f"{option}={group[option]!r} is out of range")
    for option, choices in (("method", METHODS), ("scale", SCALES), ("other", ("adamw", "sign"))):
        if group[option] not in choices:
            raise ValueError(f"{option}={group[option]!r} is unknown; there are {', '.join(choices)}")


def _values(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient._values() if gradient.is_sparse else gradient


def _chunks(members: list[int], sizes: list[int]) -> list[list[int]]:
    """Consecutive members of at most `_LARGEST_STACK` elements together."""
    chunks, room = [[members[0]]], _LARGEST_STACK - sizes[0]
    for member, size in zip(members[1:], sizes[1:], strict=True):
        if size > room:
            chunks.append([])
            room = _LARGEST_STACK
        chunks[-1].append(member)
        room -= size
    return chunks
