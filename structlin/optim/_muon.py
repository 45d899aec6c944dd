"""Muon for batched cores: steepest descent under each parameter's own norm, block by block.

Sources: Bernstein & Newhouse 2024, "Modular Duality in Deep Learning" (arXiv:2410.21265); Jordan et
al. 2024, "Muon"; Large et al. 2024, "Scalable Optimization in the Modular Norm" (arXiv:2405.14813)
for masses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from .._arguments import checked, fit, require_choice, require_keys
from .._model.parameters import Weight
from ..duality import Schedule, dual_embedding, spectral_bound
from ._depth import Depth
from ._matrices import (
    LARGEST_ON_CPU,
    LARGEST_STACK,
    chunk_alike,
    from_matrices,
    map_stacks,
    to_matrices,
)
from ._polar import check_polar, dualize_by, dualize_small_by, is_batched, is_small_for
from ._ratios import warn_of_one_rate
from ._sharding import divide_stacks, is_sharded, local_part, polar_parts, require_same_gradients
from ._steps import NONFINITE, SCALES, Masses, Roster
from ._transfer import Base, Lengths, lengths_of

_KINDS = (  # the groups of a Muon: what a parameter is, and whether it decays
    ("matrix", True),
    ("matrix", False),
    ("embedding", True),
    ("embedding", False),
    ("other", False),
)
# a group, its parameters, their directions
_Move = tuple[dict[str, Any], list[Tensor], list[Tensor]]
LARGEST_VALUE = 1.5  # root mean square of the singular values of a polar factor, which are near 1
SMALLEST_PART = 2**17  # numbers that step together at least: fewer do not keep a device busy


class Muon(Optimizer):
    """One optimizer for a whole model, converted or not.

    What a parameter is, is read from its module:

    - cores of a `StructuredLinear`, block by block; weights of nn.Linear, transformers' Conv1D,
      convolutions (each slice of the kernel), nn.MultiheadAttention (q, k and v apart):
      W <- W - lr * mass * sqrt(fan_out / fan_in) * polar(momentum), a step of norm lr * mass in the
      RMS->RMS operator norm. A layer's mass is split over its cores;
    - nn.Embedding: each vector's step has RMS lr * mass, or is zero where it has no gradient;
    - everything else (biases, norms, gains): AdamW, or signs, with a rate of its own, `other_lr`.

    Across processes (see `shard_placement_fn`): under FSDP2 cores need no communication, other
    matrices little; under DDP `process_group` divides the work. Make the optimizer after `convert`,
    `fully_shard` and moving to a device.

    Args:
        params: a module, or what torch optimizers take (parameters, or dicts with options of their
            own) and `model=`.
        lr: of matrices and embeddings, in units of operator norm per step; transfers across widths
            and structures. A number or a 0-D tensor (which torch.compile and CUDA graphs see
            change).
        model: the module that owns the parameters, where `params` is not it.
        momentum, nesterov: B <- momentum B + (1 - momentum) G; the step is that of
            (1 - momentum) G + momentum B.
        weight_decay: decoupled: W <- (1 - lr * weight_decay) W first; matrices and embeddings
            only, without those that `no_weight_decay()` names, see `param_groups`.
        max_spectral_norm: the largest RMS->RMS operator norm that a step leaves a matrix (each
            block of a core); None: any. W <- W min(1, max_spectral_norm / |W|) after it, |W| by
            `spectral_bound`, which is at most a few percent too large: weights stay well-normed.
            Sharded parameters have no such limit.
        method, ns_steps, dtype: of `dualize`. None: 5 steps of "fast", singular values above 3e-3
            of the norm within 1 % of 1; in bfloat16 where the short side has 64 or more and the CPU
            or GPU has instructions for such products, but for float64 and what the compiled engine
            takes (below 2^14 numbers). "svd" is exact. `method` may also be a function of your
            own, from matrices `(batch, m, n)` to their polar factors; a state with a function in it
            is loaded by torch.load(weights_only=False).
        adjust_lr_fn: "rms"; "original" (sqrt(max(1, fan_out / fan_in))) and "match_rms_adamw"
            (0.2 sqrt(max(fan_out, fan_in))) are those of torch.optim.Muon. With its schedule,
            method=5 * [(3.4445, -4.7750, 2.0315)], dtype=torch.bfloat16 and
            adjust_lr_fn="original" the step of an nn.Linear equals torch.optim.Muon's bit for bit.
        masses: glob over layer names -> step length relative to the others; a tuple: of a layer's
            cores, one each.
        split: glob over layer names -> into how many equal parts the outputs of a dense layer
            divide, each of which moves as a layer of its own: 3 where queries, keys and values are
            one weight, 3 * heads for every head by itself.
        base, weight_decay_scaling: as of `param_groups`: lr * weight_decay of a matrix has the
            factor 1 ("constant"), f ("1/width") or sqrt(f) ("sqrt"), where f is base width / width
            of a dense layer and base width / (k fan_in) of a core. With `base` the eps of biases
            and norms falls as 1 / width. No rate depends on it.
        depth: of a residual network, relative to that where `lr` was tuned, see `Depth`.
        other: "adamw" or "sign".
        other_lr, betas, eps: of that. A loop that sets one rate for all groups erases `other_lr`,
            see `keep_ratios`.
        nonfinite: gradients with inf or NaN: "raise" (before anything has changed), "skip" the
            whole step, or "ignore" (no check, and no wait for the device). The first two also check
            the norm of every polar factor, and hold all of them for it: about as many numbers as
            the matrices have. With sharded parameters
            each process checks and raises for its own part, without communication, and "skip" asks
            the others first: one all-reduce of a number.
        capturable: the step can be captured in a CUDA graph: needs nonfinite="ignore", and `lr` as
            a tensor to change.
        process_group: of DDP: its processes dualize the matrices in turns and gather them once for
            each group of parameters; all processes hold the same result, bit for bit. Without, each
            one dualizes all. A small all-reduce first compares which parameters have a gradient,
            unless nonfinite="ignore".

    Raises:
        TypeError: `masses` or `split` is no mapping, a number none, `dtype` no torch.dtype,
            `process_group` none.
        ValueError: an option out of range; a parameter that no module of the model owns, is in two
            groups or on meta; a `process_group` or `max_spectral_norm` with sharded parameters;
            what `param_groups` raises of `base`, `weight_decay_scaling` and `depth`.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), BTT())
    >>> optimizer = Muon(model, lr=0.02, other_lr=1e-3)
    >>> [(group["kind"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [('matrix', 0.02, 4), ('other', 0.001, 2)]
    """

    @checked
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.02,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        max_spectral_norm: float | None = None,
        method: str | Schedule | Callable[[Tensor], Tensor] | None = None,
        ns_steps: int | None = None,
        dtype: torch.dtype | None = None,
        adjust_lr_fn: str = "rms",
        masses: Masses | None = None,
        split: Mapping[str, int] | None = None,
        base: Base = None,
        weight_decay_scaling: str = "constant",
        depth: Depth | None = None,
        other: str = "adamw",
        other_lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        nonfinite: str = "raise",
        capturable: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        require_choice("nonfinite", nonfinite, NONFINITE)
        if capturable and nonfinite != "ignore":
            raise ValueError(
                f"capturable=True: nonfinite={nonfinite!r} waits for the device, 'ignore' does not"
            )
        if model is None:
            if not isinstance(params, nn.Module):
                raise ValueError("model=None: pass the module that owns the parameters as model=")
            model = params
        self.model, self.masses, self.nonfinite, self.process_group = (
            model,
            masses,
            nonfinite,
            process_group,
        )
        self.base, self.weight_decay_scaling, self.depth, self.split = (
            base,
            weight_decay_scaling,
            depth,
            split,
        )
        self._roster = Roster(model, masses, split)
        self._read_lengths()
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "max_spectral_norm": max_spectral_norm, "method": method, "ns_steps": ns_steps,
            "dtype": dtype, "adjust_lr_fn": adjust_lr_fn,
            "other": other, "other_lr": other_lr, "betas": betas, "eps": eps,
            "capturable": capturable,
        }  # fmt: skip
        if isinstance(params, nn.Module):
            params = [parameter for parameter in params.parameters() if parameter.requires_grad]
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "masses", "nonfinite", "base", "weight_decay_scaling", "depth", "split")
        own = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **own}  # a process group can not be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:  # unpickled or copied
            self.process_group = None
            self._roster = Roster(self.model, self.masses, self.split)
            self._read_lengths()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameters of a dict (or module) `params`, as one group per kind of parameter;
        those of a kind that do not decay are a group of their own."""
        require_keys("param_group", param_group, "params")
        group = {**self.defaults, **param_group}
        _check(group)
        if "lr_mult" in group and "kind" not in group:
            raise ValueError(
                "a group of param_groups() has the rates of Adam or SGD: pass Muon the model"
            )
        params = group["params"]
        if isinstance(params, set):
            raise TypeError("params is a set, whose order changes from run to run: pass a list")
        params = params.parameters() if isinstance(params, nn.Module) else params
        params = [params] if isinstance(params, Tensor) else list(params)
        # of named_parameters()
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        if not all(isinstance(parameter, Tensor) for parameter in params):
            raise TypeError(
                "params must be parameters, (name, parameter) pairs, or dicts with them as params"
            )
        if any(parameter not in self._roster.weights for parameter in params):
            self._roster.read()
            self._read_lengths()
        self._roster.require_owned(params)
        kinds: dict[tuple[str, bool], list[Tensor]] = defaultdict(list)
        for parameter in params:
            self._require_usable(parameter, group["max_spectral_norm"])
            kind = self._roster.weights[parameter].kind
            dualized = kind in ("matrix", "embedding")
            decays = dualized and parameter not in self._roster.undecayed
            kinds[kind if dualized else "other", decays].append(parameter)
        if "kind" in param_group:  # a group of another Muon
            super().add_param_group({**param_group, "params": params})
            return
        for kind, decays in _KINDS:
            for by, members in self._divide_by_lengths(kinds[kind, decays]).items():
                own = {**group, "params": members, "kind": kind}
                own["param_names"] = [self._roster.names[parameter] for parameter in members]
                own["lr"] = group["other_lr" if kind == "other" else "lr"]
                own["lr"] = own["lr"] if by.lr == 1 else own["lr"] * by.lr
                if self.defaults["lr"]:
                    own["lr_mult"] = float(own["lr"] / self.defaults["lr"])
                own["weight_decay"] = group["weight_decay"] * by.decay if decays else 0.0
                own["eps"] = group["eps"] * by.eps
                super().add_param_group(own)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns the closure's loss, if there is a closure.

        Raises:
            FloatingPointError: a gradient is not finite (with nonfinite="raise"), or a polar factor
                has a norm that none can have (unless nonfinite="ignore"); nothing has changed.
            ValueError: a function as `method` returned another shape.
            RuntimeError: a parameter is no longer the model's: it was converted, or sharded, after
                this optimizer was made. Or it was moved to another device than its state. Or a
                process of `process_group` has no gradient where another has one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            warn_of_one_rate(self)
            self._roster.require_current(self.param_groups)
            if self.process_group is not None and self.nonfinite != "ignore":
                require_same_gradients(self._roster.names, self.param_groups, self.process_group)
        used = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if not self._roster.may_step([p for params in used for p in params], self.nonfinite):
            return loss
        for group, params in zip(self.param_groups, used, strict=True):
            self._prepare(group, params)
        moves: Iterable[_Move] = (
            (group, part, self._directions(group, part))
            for group, params in zip(self.param_groups, used, strict=True)
            for part in self._divide(group, params)
        )
        if self.nonfinite != "ignore":  # every direction is known before anything moves
            moves = list(moves)
            self._require_possible(moves)
        for group, part, directions in moves:
            self._move(group, part, directions)
        return loss

    def _read_lengths(self) -> None:
        self._lengths = lengths_of(self.model, self.base, self.weight_decay_scaling, self.depth)
        for parameter, by in self._lengths.items():
            self._roster.shares[parameter] *= by.length

    def _divide_by_lengths(self, params: list[Tensor]) -> dict[Lengths, list[Tensor]]:
        """Those of equal decay, rate and eps; how long a step is the roster knows."""
        found: dict[Lengths, list[Tensor]] = defaultdict(list)
        for parameter in params:
            found[replace(self._lengths[parameter], length=1.0)].append(parameter)
        return found

    def _require_usable(self, parameter: Tensor, max_spectral_norm: float | None) -> None:
        name = self._roster.names[parameter]
        if parameter.is_meta:
            raise ValueError(f"{name} is on meta: materialise the model first (to_empty)")
        if max_spectral_norm is not None and is_sharded(parameter):
            raise ValueError(
                f"max_spectral_norm={max_spectral_norm!r}: {name} is sharded; "
                "max_spectral_norm=None is for sharded parameters"
            )
        if self.process_group is not None and is_sharded(parameter):
            group = self.process_group
            raise ValueError(
                f"process_group={group}: {name} is sharded, which divides the work itself"
            )

    def _prepare(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """State of parameters that step for the first time; nothing moves yet."""
        adamw = _is_adamw(group)
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
                    f"{self._roster.names[p]} is on {p.device} and its state on {held.device}: the "
                    "model was moved after the first step; load this optimizer's state_dict() into "
                    "it to move that too"
                )

    def _divide(self, group: dict[str, Any], params: list[Tensor]) -> list[list[Tensor]]:
        """The parts of a group that step one after the other, so that the memory of a step is that
        of a part: small matrices or those of one shape, an eighth of the numbers. Processes that
        share the work communicate once, for all."""
        shared = self.process_group is not None or any(map(is_sharded, params))
        if group["kind"] != "matrix" or shared:
            return [params] if params else []
        weights = [self._roster.weights[p] for p in params]
        kinds = [
            (None if is_small_for(group, p) else (weight.fan_out, weight.fan_in), p.dtype, p.device)
            for p, weight in zip(params, weights, strict=True)
        ]
        sizes = [p.numel() for p in params]
        most = max(SMALLEST_PART, min(sum(sizes) // 8, LARGEST_STACK))
        parts = chunk_alike(kinds, sizes, most)
        return [[params[n] for n in part] for part in parts]

    def _read(
        self, group: dict[str, Any], params: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What this process holds of the gradients and of the momenta, in the momenta's dtype."""
        buffers = [local_part(self.state[p]["momentum_buffer"]) for p in params]
        gradients = [_local_gradient(p) for p in params]
        return [g.to(b.dtype) for g, b in zip(gradients, buffers, strict=True)], buffers

    def _directions(self, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """The steps of a part of a group, without their lengths; none of AdamW. Nothing moves."""
        if _is_adamw(group):
            return []
        gradients, buffers = self._read(group, params)
        updates = list(torch._foreach_lerp(buffers, gradients, 1 - group["momentum"]))
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(gradients, updates, group["momentum"]))
        if group["kind"] == "other":
            return [update.sign() for update in updates]
        weights = [self._roster.weights[p] for p in params]
        return polar_parts(params, weights, updates, self._polar_factors(group))

    def _require_possible(self, moves: list["_Move"]) -> None:
        """Raises FloatingPointError where a polar factor has a norm that none has: one norm for
        each parameter, and one wait for the device."""
        found = [
            (p, direction, self._largest_norm(group, p), group["method"])
            for group, params, directions in moves
            if group["kind"] == "matrix"
            for p, direction in zip(params, directions, strict=True)
        ]
        if not found:
            return
        norms = torch._foreach_norm([direction for _, direction, _, _ in found])
        device = norms[0].device
        known = torch.stack([norm.to(device, torch.float32) for norm in norms]).tolist()
        for (p, _, largest, method), norm in zip(found, known, strict=True):
            if not norm <= largest:
                raise FloatingPointError(
                    f"the polar factor of {self._roster.names[p]} has norm {norm:.3g} by "
                    f"method={method!r}, and none has more than {largest:.3g}; nothing was "
                    "changed. Take method='svd' or dtype=torch.float32; of zeros it must be zero"
                )

    def _largest_norm(self, group: dict[str, Any], parameter: Tensor) -> float:
        """The largest norm that its polar factors can have: the root of their rank, with some
        slack. What a function as method gives need only be finite."""
        if callable(group["method"]):
            return torch.finfo(torch.float32).max
        weight = self._roster.weights[parameter]
        return LARGEST_VALUE * sqrt(parameter.numel() / max(weight.fan_out, weight.fan_in, 1))

    def _move(self, group: dict[str, Any], params: list[Tensor], directions: list[Tensor]) -> None:
        """One step of a part of a group; all arithmetic is on what this process holds."""
        local = [local_part(p) for p in params]
        if _is_adamw(group):
            kept = ("exp_avg", "exp_avg_sq", "step")
            states = [[local_part(self.state[p][name]) for p in params] for name in kept]
            _adamw(group, local, [_local_gradient(p) for p in params], *states)
            return
        gradients, buffers = self._read(group, params)
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        if group["weight_decay"]:
            _scale(local, 1 - group["lr"] * group["weight_decay"])
        by_length: dict[float, list[int]] = defaultdict(list)
        for n, p in enumerate(params):
            by_length[self._roster.step_length(p, group["adjust_lr_fn"])].append(n)
        for length, members in by_length.items():
            moving, moves = [local[n] for n in members], [directions[n] for n in members]
            _descend(moving, moves, group["lr"], length)
        largest = group["max_spectral_norm"]
        if group["kind"] == "matrix" and largest is not None:
            for p in params:
                _limit_norm(self._roster.weights[p], p, largest)

    def _polar_factors(
        self, group: dict[str, Any]
    ) -> Callable[[list[Weight], list[Tensor]], list[Tensor]]:
        """The direction of steepest descent, without its length, of whole updates."""
        if group["kind"] == "embedding":
            return lambda weights, updates: [dual_embedding(update) for update in updates]
        return lambda weights, updates: self._dualize_all(weights, updates, group)

    def _dualize_all(
        self, weights: list[Weight], updates: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        """The polar factors: small matrices in one call, others of equal shapes in one batch."""
        matrices = [to_matrices(*pair) for pair in zip(weights, updates, strict=True)]  # (b, m, n)
        if self.process_group is None and all(is_small_for(group, matrix) for matrix in matrices):
            duals = dualize_small_by(group, matrices)
        else:
            polar = partial(dualize_by, group)
            alone = self.process_group is None and all(matrix.is_cpu for matrix in matrices)
            most = LARGEST_ON_CPU if alone and not is_batched(group, matrices) else LARGEST_STACK
            duals = map_stacks(lambda stacks: self._dualize_stacks(stacks, polar), matrices, most)
        return [from_matrices(*each) for each in zip(weights, duals, updates, strict=True)]

    def _dualize_stacks(
        self, stacks: Iterable[Tensor], polar: Callable[[Tensor], Tensor]
    ) -> Iterable[Tensor]:
        if self.process_group is None:
            return map(polar, stacks)
        return divide_stacks(list(stacks), polar, self.process_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit where another optimizer of the same model stopped.

        Raises:
            ValueError: the state is of another model; the message names what differs. Nothing has
                changed.
        """
        require_keys("state_dict", state_dict, "state", "param_groups")
        saved = [
            name for group in state_dict["param_groups"] for name in group.get("param_names", [])
        ]
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
                    name = self._roster.names[p]
                    raise ValueError(
                        f"state_dict is of another model: {name} is {shape} here and {found} there"
                    )
        super().load_state_dict(state_dict)


def _descend(params: list[Tensor], steps: list[Tensor], lr: float | Tensor, length: float) -> None:
    if isinstance(lr, Tensor):
        torch._foreach_sub_(
            params, [step * (lr * length).to(step.device, step.dtype) for step in steps]
        )
    else:
        torch._foreach_add_(params, steps, alpha=-lr * length)


def _limit_norm(weight: Weight, parameter: Tensor, max_spectral_norm: float) -> None:
    """Shrink the matrices whose operator norm is above `max_spectral_norm`, in place."""
    matrices = to_matrices(weight, parameter)  # (batch, fan_out, fan_in)
    largest = max_spectral_norm * sqrt(weight.fan_out / max(weight.fan_in, 1))
    norms = spectral_bound(matrices)[:, None, None].clamp(min=largest)  # (batch, 1, 1)
    parameter.copy_(from_matrices(weight, matrices * (largest / norms), parameter))


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
    # one call in place of a dozen for each parameter; a compiler fuses by itself
    alike = all(p.is_cpu and p.is_floating_point() for p in params)  # it takes no complex numbers
    fused = alike and not torch.compiler.is_compiling()
    adamw(
        params, gradients, averages, squares, [], steps, lr=group["lr"], beta1=beta1, beta2=beta2,
        eps=group["eps"], weight_decay=group["weight_decay"], capturable=group["capturable"],
        amsgrad=False, maximize=False, fused=fused,
    )  # fmt: skip


def _is_adamw(group: dict[str, Any]) -> bool:
    return bool(group["kind"] == "other" and group["other"] == "adamw")


def _check(group: dict[str, Any]) -> None:
    options = {name: value for name, value in group.items() if name != "params"}
    group.update(fit(Muon.__init__, options))
    for option, values in (("momentum", [group["momentum"]]), ("betas", group["betas"])):
        if not all(0 <= value < 1 for value in values):
            raise ValueError(f"{option}={group[option]!r} is out of range: at least 0 and below 1")
    check_polar(group)
    for option, choices in (("adjust_lr_fn", SCALES), ("other", ("adamw", "sign"))):
        require_choice(option, group[option], choices)


def _local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else local_part(gradient)
