"""Muon for batched cores: steepest descent under each parameter's own norm, block by block.

Sources: Bernstein & Newhouse 2024, "Modular Duality in Deep Learning" (arXiv:2410.21265); Jordan et al. 2024, "Muon";
Large et al. 2024, "Scalable Optimization in the Modular Norm" (arXiv:2405.14813) for masses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import inf, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from .._model.parameters import Geometry, Masses, geometries, in_stacks
from ..duality import METHODS, dual_embedding, dualize
from .distributed import agree, divided, here, is_sharded, polars

SCALES = ("rms", "original", "match_rms_adamw")
NONFINITE = ("raise", "skip", "ignore")


class Muon(Optimizer):
    """One optimizer for a whole model, converted or not.

    What a parameter is, is read from its module:

    - cores of a `StructuredLinear`, block by block; weights of nn.Linear, transformers' Conv1D, convolutions (each
      slice of the kernel), nn.MultiheadAttention (q, k and v apart): W <- W - lr * mass * sqrt(fan_out / fan_in) *
      polar(momentum), a step of norm lr * mass in the RMS->RMS operator norm. A layer's mass is split over its cores;
    - nn.Embedding: each vector's step has RMS lr * mass, or is zero where it has no gradient;
    - everything else (biases, norms, gains): AdamW, or signs, with a rate of its own, `other_lr`.

    Across processes, see `distributed`: under FSDP2 cores need no communication, other matrices little; under DDP
    `process_group` divides the work. Make the optimizer after `convert`, `fully_shard` and moving to a device.

    Args:
        params: a module, or what torch optimizers take (parameters, or dicts with options of their own) and `model=`.
        lr: of matrices and embeddings, in units of operator norm per step; transfers across widths and structures. A
            number or a 0-D tensor (which torch.compile and CUDA graphs see change).
        model: the module that owns the parameters, where `params` is not it.
        momentum, nesterov: B <- momentum B + (1 - momentum) G; the step is that of (1 - momentum) G + momentum B.
        weight_decay: decoupled: W <- (1 - lr * weight_decay) W first; matrices and embeddings only.
        method, steps, dtype: of `dualize`.
        scale: "rms"; "original" (sqrt(max(1, fan_out / fan_in))) and "match_rms_adamw" (0.2 sqrt(max(fan_out, fan_in)))
            are those of torch.optim.Muon. With method="jordan", dtype=torch.bfloat16 and scale="original" the step of
            an nn.Linear equals torch.optim.Muon's bit for bit.
        masses: glob over layer names -> step length relative to the others; a tuple: of a layer's cores, one each.
        other: "adamw" or "sign".
        other_lr, betas, eps: of that.
        nonfinite: gradients with inf or NaN: "raise" (before anything has changed), "skip" the whole step, or "ignore"
            (no check, and no wait for the device). With sharded parameters each process checks and raises for its own
            part, without communication, and "skip" asks the others first: one all-reduce of a number.
        capturable: the step can be captured in a CUDA graph: needs nonfinite="ignore", and `lr` as a tensor to change.
        process_group: of DDP: the matrices are dualized by its processes in turns and gathered once per group of
            parameters; all processes hold the same result, bit for bit. Without, each one dualizes all.

    Raises:
        ValueError: an option out of range; a parameter that no module of the model owns, is in two groups or on meta; a
            `process_group` with sharded parameters.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), BTT())
    >>> optimizer = Muon(model, lr=0.02, other_lr=1e-3)
    >>> [(group["kind"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [('matrix', 0.02, 4), ('other', 0.001, 2)]
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.02,
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
        other_lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        nonfinite: str = "raise",
        capturable: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={nonfinite!r} must be 'raise', 'skip' or 'ignore'")
        if capturable and nonfinite != "ignore":
            raise ValueError(f"capturable=True: nonfinite={nonfinite!r} waits for the device, 'ignore' does not")
        if model is None:
            if not isinstance(params, nn.Module):
                raise ValueError("model=None: with parameters or groups, pass the module that owns them as model=")
            model = params
        self.model, self.masses, self.nonfinite, self.process_group = model, masses, nonfinite, process_group
        self._geometry = geometries(model, masses)
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "method": method,
            "steps": steps, "dtype": dtype, "scale": scale, "other": other, "other_lr": other_lr, "betas": betas,
            "eps": eps, "capturable": capturable,
        }  # fmt: skip
        if isinstance(params, nn.Module):
            params = [parameter for parameter in params.parameters() if parameter.requires_grad]
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = {"model": self.model, "masses": self.masses, "nonfinite": self.nonfinite}
        return {**super().__getstate__(), **own}  # a process group can not be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:  # unpickled or copied
            self.process_group = None
            self._geometry = geometries(self.model, self.masses)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameters of a dict (or module) `params`, as one group per kind of parameter."""
        group = {**self.defaults, **param_group}
        _check(group)
        if "lr_mult" in group:
            raise ValueError("a group of param_groups() has the rates of Adam or SGD: Muon takes the model itself")
        params = group["params"]
        if isinstance(params, set):
            raise TypeError("params is a set, whose order changes from run to run: pass a list")
        params = params.parameters() if isinstance(params, nn.Module) else params
        params = [params] if isinstance(params, Tensor) else list(params)
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]  # of named_parameters()
        if not all(isinstance(parameter, Tensor) for parameter in params):
            raise TypeError("params must be parameters, (name, parameter) pairs or dicts with a list of them as params")
        if any(parameter not in self._geometry for parameter in params):
            self._geometry = geometries(self.model, self.masses)  # the model may have grown
        kinds: dict[str, list[Tensor]] = defaultdict(list)
        for parameter in params:
            if parameter not in self._geometry:
                shape = tuple(parameter.shape)
                raise ValueError(f"a parameter of shape {shape} belongs to no module of {type(self.model).__name__}")
            name = self._geometry[parameter].name
            if parameter.is_meta:
                raise ValueError(f"{name} is on meta: materialise the model first (to_empty)")
            if self.process_group is not None and is_sharded(parameter):
                raise ValueError(
                    f"process_group={self.process_group}: {name} is sharded, which divides the work itself"
                )
            kinds[self._geometry[parameter].kind].append(parameter)
        if "kind" in param_group:  # a group of another Muon
            super().add_param_group({**param_group, "params": params})
            return
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
            RuntimeError: a parameter is no longer the model's: it was converted, or sharded, after this optimizer was
                made. Or it was moved to another device than its state.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if not torch.compiler.is_compiling():
            check_ownership(self, self.model, self._name)
        if not finite(self.nonfinite, [p for params in used for p in params], self._name):
            return loss
        for group, params in zip(self.param_groups, used, strict=True):
            self._prepare(group, params)
        for group, params in zip(self.param_groups, used, strict=True):
            if params:
                self._update(group, params)
        return loss

    def _name(self, parameter: Tensor) -> str:
        return self._geometry[parameter].name

    def _prepare(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """State of parameters that step for the first time; nothing moves yet."""
        adamw = group["kind"] == "other" and group["other"] == "adamw"
        for p in params:
            state = self.state[p]
            if not state and adamw:
                device = p.device if group["capturable"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            elif not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            held = state["exp_avg" if adamw else "momentum_buffer"]
            if held.device != p.device:
                raise RuntimeError(
                    f"{self._name(p)} is on {p.device} and its state on {held.device}: the model was moved after the "
                    "first step; load this optimizer's state_dict() into it to move that too"
                )

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """One step of a group. All arithmetic is on the part of each tensor that is on this process."""
        gradients = [_gradient(p).to_dense() if _gradient(p).is_sparse else here(_gradient(p)) for p in params]
        local = [here(p) for p in params]
        if group["kind"] == "other" and group["other"] == "adamw":
            states = [[here(self.state[p][name]) for p in params] for name in ("exp_avg", "exp_avg_sq", "step")]
            _adamw(group, local, gradients, *states)
            return
        buffers = [here(self.state[p]["momentum_buffer"]) for p in params]
        gradients = [gradient.to(buffer.dtype) for gradient, buffer in zip(gradients, buffers, strict=True)]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        nesterov = group["nesterov"]
        updates = list(torch._foreach_lerp(gradients, buffers, group["momentum"])) if nesterov else buffers
        if group["weight_decay"]:
            _scale(local, 1 - group["lr"] * group["weight_decay"])
        geometries = [self._geometry[p] for p in params]
        if group["kind"] == "other":
            steps = [update.sign() for update in updates]
        else:
            steps = polars(params, geometries, updates, self._polar(group), group["method"], group["steps"])
        by_length: dict[float, list[int]] = defaultdict(list)
        for n, geometry in enumerate(geometries):
            by_length[step_length(geometry, group["scale"])].append(n)
        for length, members in by_length.items():
            _descend([local[n] for n in members], [steps[n] for n in members], group["lr"], length)

    def _polar(self, group: dict[str, Any]) -> Callable[[list[Geometry], list[Tensor]], list[Tensor]]:
        """The direction of steepest descent, without its length, of whole updates."""
        if group["kind"] == "embedding":
            return lambda geometries, updates: [dual_embedding(update) for update in updates]
        options = {name: group[name] for name in ("method", "steps", "dtype")}
        return lambda geometries, updates: self._dualized(geometries, updates, options)

    def _dualized(self, geometries: list[Geometry], updates: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        """The polar factors, equal shapes of all layers in one batch, tall matrices transposed."""
        matrices = [geometry.matrices(update) for geometry, update in zip(geometries, updates, strict=True)]
        tall = [matrix.shape[-2] > matrix.shape[-1] for matrix in matrices]
        matrices = [matrix.mT if turned else matrix for matrix, turned in zip(matrices, tall, strict=True)]
        duals = in_stacks(matrices, lambda stacks: self._of_stacks(stacks, options))
        return [
            geometry.restored(dual.mT if turned else dual, like=update)
            for geometry, update, dual, turned in zip(geometries, updates, duals, tall, strict=True)
        ]

    def _of_stacks(self, stacks: Iterable[Tensor], options: dict[str, Any]) -> Iterable[Tensor]:
        if self.process_group is None:
            return (dualize(stack, **options) for stack in stacks)
        return divided(list(stacks), lambda stack: dualize(stack, **options), self.process_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit where another optimizer of the same model stopped.

        Raises:
            ValueError: the state is of another model; the message names what differs. Nothing has changed.
        """
        saved = [name for group in state_dict["param_groups"] for name in group.get("param_names", [])]
        own = [name for group in self.param_groups for name in group["param_names"]]
        if saved != own:
            missing, unknown = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
            difference = f"it lacks {missing[:5]} and has {unknown[:5]} besides"
            if not missing and not unknown:
                difference = "its parameters are in another order or in other groups"
            raise ValueError(f"state_dict is of another model: {difference}")
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [n for group in state_dict["param_groups"] for n in group["params"]]
        for p, n in zip(params, ids, strict=True):
            for key, value in state_dict["state"].get(n, {}).items():
                if key != "step" and value.shape != p.shape:
                    found, shape = tuple(value.shape), tuple(p.shape)
                    raise ValueError(
                        f"state_dict is of another model: {self._name(p)} is {shape} here and {found} there"
                    )
        super().load_state_dict(state_dict)


def check_ownership(optimizer: Optimizer, model: nn.Module, name: Callable[[Tensor], str]) -> None:
    """A parameter without a gradient may be one that `convert` has replaced.

    Raises:
        RuntimeError: one is.
    """
    idle = {p for group in optimizer.param_groups for p in group["params"] if p.grad is None}
    gone = idle - set(model.parameters()) if idle else idle
    if gone:
        raise RuntimeError(
            f"{', '.join(sorted(map(name, gone))[:5])} no longer belong to the model, which was converted (or sharded) "
            "after this optimizer was made: convert first, then make the optimizer"
        )


def finite(nonfinite: str, params: list[Tensor], name: Callable[[Tensor], str]) -> bool:
    """Whether to make the step: all gradients of `params` are finite, or nobody asked.

    Raises:
        FloatingPointError: they are not, and `nonfinite` is "raise".
    """
    if nonfinite == "ignore" or not params:
        return True
    gradients = [_values(p) for p in params]
    norms = torch._foreach_norm(gradients)
    # One number for all, and one wait for the device. A norm may overflow where no entry does.
    good = bool(torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).sum().isfinite())
    bad = [] if good else [n for n, gradient in enumerate(gradients) if not bool(gradient.isfinite().all())]
    if nonfinite == "skip":
        return agree(not bad, params)
    if bad:
        names = [name(params[n]) for n in bad]
        raise FloatingPointError(f"gradients of {', '.join(names[:5])} are not finite; nothing was changed")
    return True


def step_length(geometry: Geometry, scale: str = "rms") -> float:
    """Of a step at lr = 1, as the factor of the polar factor."""
    m, n = geometry.fan_out, max(geometry.fan_in, 1)
    if geometry.kind != "matrix":
        return geometry.mass
    if scale == "original":
        return geometry.mass * sqrt(max(1, m / n))
    if scale == "match_rms_adamw":
        return geometry.mass * 0.2 * sqrt(max(m, n))
    return geometry.mass * sqrt(m / n)


def _descend(params: list[Tensor], steps: list[Tensor], lr: float | Tensor, length: float) -> None:
    if isinstance(lr, Tensor):
        torch._foreach_sub_(params, [step * (lr * length).to(step.device, step.dtype) for step in steps])
    else:
        torch._foreach_add_(params, steps, alpha=-lr * length)


def _scale(params: list[Tensor], factor: float | Tensor) -> None:
    if isinstance(factor, Tensor):
        for p in params:
            p.mul_(factor.to(p.device))
    else:
        torch._foreach_mul_(params, factor)


def _adamw(
    group: dict[str, Any],
    params: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        params, gradients, averages, squares, [], steps, lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
        weight_decay=group["weight_decay"], capturable=group["capturable"], amsgrad=False, maximize=False,
    )  # fmt: skip


def _check(group: dict[str, Any]) -> None:
    for option in ("lr", "other_lr", "weight_decay", "eps"):
        if not 0 <= group[option] < inf:
            raise ValueError(f"{option}={group[option]!r} is out of range: it must be at least 0 and finite")
    for option, values in (("momentum", [group["momentum"]]), ("betas", group["betas"])):
        if not all(0 <= value < 1 for value in values):
            raise ValueError(f"{option}={group[option]!r} is out of range: at least 0 and below 1")
    if group["steps"] is not None and group["method"] in METHODS:
        dualize(torch.zeros(1, 1), method=group["method"], steps=group["steps"])  # refuses what it can not do
    for option, choices in (("method", METHODS), ("scale", SCALES), ("other", ("adamw", "sign"))):
        if group[option] not in choices:
            raise ValueError(f"{option}={group[option]!r} is unknown; there are {', '.join(choices)}")


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _values(parameter: Tensor) -> Tensor:
    gradient = _gradient(parameter)
    return gradient._values() if gradient.is_sparse else here(gradient)
