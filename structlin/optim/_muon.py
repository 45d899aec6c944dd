"""Muon for batched cores: steepest descent under each parameter's own norm, block by block.

Sources: Bernstein & Newhouse 2024, "Modular Duality in Deep Learning" (arXiv:2410.21265); Jordan et
al. 2024, "Muon"; Large et al. 2024, "Scalable Optimization in the Modular Norm" (arXiv:2405.14813)
for masses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from .._convert.summary import Table, hide_numbers
from .._model.parameters import Weight, parameters_of
from .._structure.arguments import checked, fit, require_choice, require_keys, show, warn
from ..duality import Schedule, check_method, choose_polar
from ._depth import Depth
from ._rates import KEPT, list_parameters, require_kept, require_names
from ._roster import (
    NONFINITE,
    SCALES,
    Masses,
    Roster,
    find_hidden,
    find_misnamed,
    find_undeclared,
    share_masses,
)
from ._sharding import local_part
from ._stacks import Stack, stack_alike
from ._transfer import Base, Transfer

LARGEST_VALUE = 1.5  # root mean square of the singular values of a polar factor, which are near 1
_KINDS = ("matrix", "embedding", "other")  # the groups of a Muon: what a parameter is
_OTHER = 2  # AdamW's
LEAST_SHARE = 1 / 8  # of the hidden matrices, from which on it matters that AdamW steps them
_FRACTIONS = ("momentum", "shampoo_beta")  # options that are at least 0 and below 1, beside betas
# what a group may have beside options: what others write there for themselves, as schedulers do
_NOTES = {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "lr_scale"}
_Kind = tuple[int, bool, float, float, float]  # in _KINDS, idle, factors of rate, decay and eps
_Move = tuple[dict[str, Any], Stack, list[Tensor]]  # a group, a stack of it, its directions


class Muon(Optimizer):
    """One optimizer for a whole model, converted or not.

    What a parameter is, is read from its module and from the layer's name:

    - hidden matrices, which are cores of a `StructuredLinear`, block by block; weights of
      nn.Linear, transformers' Conv1D, convolutions (each slice of the kernel),
      nn.MultiheadAttention (q, k and v apart), and each expert in the experts of transformers,
      torchtitan and what `declare_weights` declares (gate and up apart):
      W <- W - lr * mass * sqrt(fan_out / fan_in) * polar(momentum), a step of norm lr * mass in the
      RMS->RMS operator norm. A layer's mass is split over its cores;
    - everything else (embeddings, heads, routers, biases, norms, gains, complex weights): AdamW at
      the rates of `param_groups(model, other_lr, base=base, depth=depth, masses=masses)`. AdamW
      also steps the weights of nn.LSTM, nn.GRU and nn.RNN.

    `print(optimizer)` shows what steps how. Parameters that are frozen when the optimizer is made
    train once `requires_grad` is set. A warning lists wide layers, if they are a good part of the
    model, that get AdamW by their name though other layers take in what they give out. Another
    lists parameters of three or more dimensions whose name or class says experts, and of which
    nobody has said how the experts lie.

    With `dualize="all"` heads and routers step as hidden matrices, and each vector of an
    nn.Embedding by RMS lr * mass, or not at all where it has no gradient, as in MD.

    Every group's "lr" is the rate of hidden matrices, and a step multiplies it by the group's
    `lr_mult`: a scheduler, or a loop that sets one rate for every group, scales everything else's
    rate with it.

    The momentum is Nesterov's: B <- momentum B + (1 - momentum) G, and the step is that of
    (1 - momentum) G + momentum B. Under FSDP2 cores need no communication and other matrices are
    gathered, see `shard_placement_fn`. Make the optimizer after `convert`, `fully_shard` and moving
    to a device.

    Args:
        params: a module, or what torch optimizers take (parameters, or dicts with options of their
            own) and `model=`.
        lr: of hidden matrices, in units of operator norm per step; a number or a 0-D tensor, which
            torch.compile sees change.
        model: the module that owns the parameters, where `params` is not it.
        momentum: of the average of gradients.
        weight_decay: decoupled: W <- (1 - rate * weight_decay) W first; matrices and embeddings
            only, without those that `no_weight_decay()` names, see `param_groups`.
        dualize: "hidden" or "all".
        method, dtype: of `polar_factor`. None: 5 steps of "fast", singular values above 3e-3 of
            the norm within 1 % of 1; in bfloat16 where `choose_polar` finds it faster.
            "svd" is exact.
        adjust_lr_fn: "rms"; "original" (sqrt(max(1, fan_out / fan_in))) and "match_rms_adamw"
            (0.2 sqrt(max(fan_out, fan_in))) are those of torch.optim.Muon. With its schedule,
            method=5 * [(3.4445, -4.7750, 2.0315)], dtype=torch.bfloat16 and
            adjust_lr_fn="original" the step of an nn.Linear equals torch.optim.Muon's bit for bit.
        masses: glob over layer names -> step length relative to the others; a tuple: of a layer's
            cores, one each.
        base: as of `param_groups` with weight_decay_scaling="constant"; AdamW's eps follows the
            width. The rate of hidden matrices does not depend on it.
        depth: of a residual network, relative to that where `lr` was tuned, see `Depth`.
        other_lr: of everything else, where the matrices have the rate `lr`.
        betas, eps: AdamW's.
        nonfinite: gradients with inf or NaN: "raise" (before anything has changed) or "ignore" (no
            check, and no wait for the device). "raise" also checks the norm of every polar factor,
            and holds all of them for it. Each process checks its own part of sharded parameters.

    Raises:
        TypeError: `masses` is no mapping, a number none, `dtype` no torch.dtype.
        ValueError: an option out of range, also in a group; a name in a group that is no option; a
            parameter that no module of the model owns, is in two groups or on meta; what
            `param_groups` raises of `base` and `depth`.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), BTT())
    >>> optimizer = Muon(model, lr=0.02, other_lr=1e-3)
    >>> [(group["kind"], group["lr"], group["lr_mult"]) for group in optimizer.param_groups]
    [('matrix', 0.02, 1.0), ('other', 0.02, 0.05)]
    >>> print(optimizer)
    Muon
    kind     layer                               x   params   step              lr
    ──────────────────────────────────────────────────────────────────────────────
    matrix   *                                   2    2,048   polar factor    0.02
    other    (biases, norms and other vectors)   2      128   AdamW          0.001
    """

    @checked
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.02,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dualize: str = "hidden",
        method: str | Schedule | None = None,
        dtype: torch.dtype | None = None,
        adjust_lr_fn: str = "rms",
        masses: Masses | None = None,
        base: Base = None,
        depth: Depth | None = None,
        other_lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "method": method,
            "dtype": dtype, "adjust_lr_fn": adjust_lr_fn,
            "other_lr": other_lr, "betas": betas, "eps": eps,
        }  # fmt: skip
        self._start(params, model, defaults, dualize, masses, base, depth, nonfinite)

    def _start(
        self,
        params: nn.Module | Iterable[Any],
        model: nn.Module | None,
        defaults: dict[str, Any],
        dualize: str,
        masses: Masses | None,
        base: Base,
        depth: Depth | None,
        nonfinite: str,
    ) -> None:
        """What `__init__` does; `defaults` are the options that a group may have of its own."""
        require_choice("nonfinite", nonfinite, NONFINITE)
        require_choice("dualize", dualize, ("hidden", "all"))
        if model is None:
            if not isinstance(params, nn.Module):
                raise ValueError(
                    f"model=None: pass the model itself, {type(self).__name__}(model), or the "
                    "module that owns the parameters as model="
                )
            model = params
        self.model, self.masses, self.dualize = model, masses, dualize
        self.base, self.depth, self.nonfinite = base, depth, nonfinite
        self._roster = Roster(model, masses)
        self._read_model()
        if isinstance(params, nn.Module):
            params = list(params.parameters())  # also frozen ones, which may train later
        super().__init__(params, defaults)
        if dualize == "hidden":
            self._warn_of_names()
        own = {p for group in self.param_groups for p in group["params"]}
        undeclared = find_undeclared(i for i in parameters_of(model) if i.parameter in own)
        if undeclared:
            warn(f"{type(self).__name__} steps {undeclared}")

    def __repr__(self) -> str:
        """A table of what steps how: equal layers in one row, all vectors of a rate in one."""
        layers: dict[tuple[str, str, str, str], set[str]] = defaultdict(set)
        numbers: dict[tuple[str, str, str, str], int] = defaultdict(int)
        for group in self.param_groups:
            rate = group["lr"] * group["lr_mult"] if group.get(KEPT) else group["lr"]
            for p in group["params"]:
                name = "(biases, norms and other vectors)"
                if self._roster.weights[p].kind in ("matrix", "embedding"):
                    name = self._roster.layers[p] or type(self.model).__name__
                elif p.ndim > 1:
                    name = self._roster.names[p]
                step = self._describe_step(group, p) + (", frozen" if not p.requires_grad else "")
                key = (group["kind"], hide_numbers(name), step, f"{float(rate):.4g}")
                layers[key].add(self._roster.layers[p])
                numbers[key] += p.numel()
        table = Table("kind", "layer", "x", "params", "step", "lr")
        for key, names in layers.items():
            kind, pattern, step, lr = key
            table.row(kind, pattern, f"{len(names)}", f"{numbers[key]:,}", step, lr)
        return f"{type(self).__name__}\n{table}"

    def _describe_step(self, group: dict[str, Any], p: Tensor) -> str:
        steps = {"matrix": "polar factor", "embedding": "unit RMS", "other": "AdamW"}
        return steps[group["kind"]]

    def _warn_of_names(self) -> None:
        """Warn where a good part of the hidden matrices gets AdamW for a name's sake. A small part
        is an output head or an input of several layers, which AdamW is for."""
        misnamed = set(find_misnamed(self.model))
        hidden = 0
        by_name: dict[str, int] = defaultdict(int)
        for group in self.param_groups:
            for p in group["params"]:
                if not p.requires_grad or self._roster.weights[p].kind != "matrix":
                    continue
                if group["kind"] == "matrix":
                    hidden += p.numel()
                elif self._roster.layers[p] in misnamed:
                    by_name[hide_numbers(self._roster.layers[p])] += p.numel()
        numbers = sum(by_name.values())
        if not numbers or numbers < LEAST_SHARE * (numbers + hidden):
            return
        names = [*by_name]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        warn(
            f"{type(self).__name__} steps {', '.join(names[:5])}{more} by AdamW, because of names "
            "that heads, embeddings and routers have. If they are hidden layers, give them other "
            'names, or pass dualize="all", with which heads and routers step as hidden matrices; '
            "print(optimizer) shows what steps how"
        )

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "masses", "dualize", "base", "depth", "nonfinite")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:  # unpickled or copied
            self._roster = Roster(self.model, self.masses)
            self._read_model()

    def _read_model(self) -> None:
        self._stacks: dict[int, tuple[object, list[Stack]]] = {}  # of a group, and what decided
        transfer = Transfer(
            self.model, self.base, weight_decay_scaling="constant", depth=self.depth
        )
        self._kinds: dict[Tensor, _Kind] = {}
        infos = list(parameters_of(self.model))
        hidden, equal = find_hidden(self.model, infos), share_masses(infos, {})
        for info in infos:
            p, by, kind = info.parameter, transfer.of(info), info.weight.kind
            dualized = p in hidden or (self.dualize == "all" and kind in ("matrix", "embedding"))
            if dualized and not p.is_complex():
                decay = by.lr * by.decay if info.decays else 0.0
                self._kinds[p] = _KINDS.index(kind), not info.decays, 1.0, decay, 1.0
                self._roster.shares[p] *= by.depth
            else:
                rate = by.lr * self._roster.shares[p] / equal[p]
                decay = by.decay if info.decays else 0.0
                self._kinds[p] = _OTHER, not info.decays, rate, decay, transfer.eps_mult(info)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `params` (also a module), as one group for each kind of parameter, and for those of a
        kind that do not decay."""
        require_keys("param_group", param_group, "params")
        if "lr_mult" in param_group:
            raise ValueError("a group has the rates of another optimizer: pass Muon the model")
        group = {**self.defaults, **param_group}
        group.update(self._check_options(group))
        params = list_parameters(group["params"])
        if any(parameter not in self._kinds for parameter in params):  # the model has grown
            self._roster.read()
            self._read_model()
        self._roster.require_owned(params)
        alike: dict[_Kind, list[Tensor]] = defaultdict(list)
        for p in params:
            if p.is_meta and p.requires_grad:
                name = self._roster.names[p]
                raise ValueError(f"{name} is on meta: materialise the model first (to_empty)")
            alike[self._kinds[p]].append(p)
        for kind in sorted(alike, key=lambda kind: kind[:2]):
            number, _, rate, decay, eps = kind
            own = {**group, "params": alike[kind], "kind": _KINDS[number]}
            own["param_names"] = [self._roster.names[p] for p in alike[kind]]
            own["lr_mult"] = rate
            if own["kind"] == "other":
                if not group["lr"]:
                    raise ValueError(
                        f"lr={group['lr']!r} must be positive: the rate of everything else is kept "
                        "as other_lr / lr times it. A scheduler may set 0 later, and "
                        "requires_grad_(False) freezes matrices"
                    )
                own["lr_mult"] = float(group["other_lr"] * rate) / float(group["lr"])
            own[KEPT] = True
            own["weight_decay"] = group["weight_decay"] * decay
            own["eps"] = group["eps"] * eps
            super().add_param_group(own)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns the closure's loss, if there is a closure.

        Raises:
            FloatingPointError: a gradient is not finite (with nonfinite="raise"), or a polar factor
                has a norm that none can have (unless nonfinite="ignore"); nothing has changed.
            RuntimeError: a parameter is no longer the model's, on another device than its state, or
                on another device mesh than its gradient; every process raises it.
        """
        loss = torch.enable_grad()(closure)() if closure is not None else None
        if not torch.compiler.is_compiling():
            self._roster.require_current(self.param_groups)
            self._roster.require_placed(p for group in self.param_groups for p in group["params"])
        stepping = [
            (group, stack)
            for n, group in enumerate(self.param_groups)
            for stack in map(Stack.with_gradients, self._stacks_of(n, group))
            if stack.members
        ]
        if self.nonfinite != "ignore":
            params = [p for _, stack in stepping for p in stack.params]
            gradients = [gradient for _, stack in stepping for gradient in stack.gradients]
            self._roster.require_finite(params, gradients)
        for _, stack in stepping:
            self._prepare(stack)
        moves: Iterable[_Move] = (
            (group, stack, self._directions(group, stack)) for group, stack in stepping
        )
        if self.nonfinite != "ignore":  # every direction is known before anything moves
            moves = list(moves)
            self._require_possible(moves)
        for group, stack, directions in moves:
            self._move(group, stack, directions)
        return loss

    def _stacks_of(self, n: int, group: dict[str, Any]) -> list[Stack]:
        """Those of group `n`: decided at its first step, since a model may move before it, and
        again where an option or a parameter is not what it was."""
        if torch.compiler.is_compiling():  # which keeps what it traced
            return self._decide(group)
        options = [group[name] for name in ("method", "dtype", "adjust_lr_fn")]
        decided_by = (options, [(id(p), p.dtype, p.device) for p in group["params"]])
        if n not in self._stacks or self._stacks[n][0] != decided_by:
            self._stacks[n] = decided_by, self._decide(group)
        return self._stacks[n][1]

    def _decide(self, group: dict[str, Any]) -> list[Stack]:
        lengths = partial(self._roster.step_length, adjust_lr_fn=group["adjust_lr_fn"])
        choose = partial(choose_polar, method=group["method"], iterate_in=group["dtype"])
        dual = choose if group["kind"] != "other" else None
        return stack_alike(group["params"], self._roster.weights, lengths, dual)

    def _check_options(self, group: dict[str, Any]) -> dict[str, Any]:
        """The options of a group, checked against the signatures of this class and its bases."""
        options: dict[str, Any] = {}
        for kind in type(self).__mro__:
            if "__init__" in vars(kind) and issubclass(kind, Muon):
                options |= fit(kind.__init__, {k: group[k] for k in self.defaults if k in group})
        for name in sorted(group.keys() - self.defaults.keys() - _NOTES):
            close = get_close_matches(name, self.defaults, 1)
            hint = f"{close[0]!r}" if close else f"{', '.join(self.defaults)}"
            raise ValueError(
                f"{name}={show(group[name])} is no option that a group of {type(self).__name__} "
                f"can have: take {hint}, or leave it out"
            )
        fractions = {name: options[name] for name in _FRACTIONS if name in options}
        for n, beta in enumerate(options.get("betas", ())):
            fractions[f"betas[{n}]"] = beta
        for name, value in fractions.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value!r} must be at least 0 and below 1")
        if options.get("method") is not None:
            check_method(options["method"])
        if "adjust_lr_fn" in options:
            require_choice("adjust_lr_fn", options["adjust_lr_fn"], SCALES)
        return options

    def _prepare(self, stack: Stack) -> None:
        """State of parameters that step for the first time; nothing moves yet."""
        for p in stack.params:
            state = self.state[p]
            if not state and stack.polar is None:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            elif not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            held = state["exp_avg" if stack.polar is None else "momentum_buffer"]
            if held.device != p.device:
                raise RuntimeError(
                    f"{self._roster.names[p]} is on {p.device} and its state on {held.device}: "
                    "load this optimizer's state_dict() into it to move that too"
                )
            if stack.polar is None and held.dtype != p.dtype:
                raise RuntimeError(
                    f"{self._roster.names[p]} is {p.dtype} and its state {held.dtype}: "
                    "load this optimizer's state_dict() into it to convert that too"
                )

    def _read(self, stack: Stack) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients and the momenta, in the momenta's dtype: what this process holds."""
        momenta = [local_part(self.state[p]["momentum_buffer"]) for p in stack.params]
        pairs = zip(stack.gradients, momenta, strict=True)
        return [g.to(b.dtype) for g, b in pairs], momenta

    def _directions(self, group: dict[str, Any], stack: Stack) -> list[Tensor]:
        """The steps of a stack, without their lengths; none of AdamW. Nothing moves."""
        if stack.polar is None:
            return []
        gradients, momenta = self._read(stack)
        updates = torch._foreach_lerp(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, updates, group["momentum"])
        return stack.dualize(updates)

    def _require_possible(self, moves: list[_Move]) -> None:
        """Raises FloatingPointError where a direction has a norm that none can have."""
        found = [
            (member, direction, group["method"])
            for group, stack, directions in moves
            if group["kind"] == "matrix"
            for member, direction in zip(stack.members, directions, strict=True)
        ]
        if not found:
            return
        norms = torch._foreach_norm([direction for _, direction, _ in found])
        device = norms[0].device
        known = torch.stack([norm.to(device, torch.float32) for norm in norms]).tolist()
        for ((p, weight, _), _, method), norm in zip(found, known, strict=True):
            largest = self._find_largest(p, weight)
            if not norm <= largest:
                raise FloatingPointError(
                    f"the direction of {self._roster.names[p]} has norm {norm:.3g} by "
                    f"{self._describe_direction(p, method)}"
                )

    def _find_largest(self, p: Tensor, weight: Weight) -> float:
        """The largest norm that a direction can have: the root of the rank, with some slack."""
        return LARGEST_VALUE * sqrt(p.numel() / max(weight.fan_out, weight.fan_in, 1))

    def _describe_direction(self, p: Tensor, method: object) -> str:
        """The end of the error of a direction that is too large."""
        largest = self._find_largest(p, self._roster.weights[p])
        return (
            f"method={method!r}, and none has more than {largest:.3g}; nothing was changed. "
            "Take method='svd' or dtype=torch.float32"
        )

    def _move(self, group: dict[str, Any], stack: Stack, directions: list[Tensor]) -> None:
        """One step of a stack; all arithmetic is on what this process holds."""
        local = [local_part(p) for p in stack.params]
        if stack.polar is None:
            self._step_adamw(group, stack, local)
            return
        lr = group["lr"] * group["lr_mult"]
        gradients, momenta = self._read(stack)
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_(local, 1 - lr * group["weight_decay"])
        by_length: dict[float, list[int]] = defaultdict(list)
        for n, member in enumerate(stack.members):
            by_length[member.length].append(n)
        for length, members in by_length.items():
            moving, steps = [local[n] for n in members], [directions[n] for n in members]
            _descend(moving, steps, lr, length)

    def _step_adamw(self, group: dict[str, Any], stack: Stack, local: list[Tensor]) -> None:
        averages, squares, steps = (
            [local_part(self.state[p][name]) for p in stack.params]
            for name in ("exp_avg", "exp_avg_sq", "step")
        )
        beta1, beta2 = group["betas"]
        # one call in place of a dozen for each parameter; a compiler fuses by itself
        real = all(p.is_cpu and p.is_floating_point() for p in local)  # no complex numbers
        fused = real and not torch.compiler.is_compiling()
        adamw(
            local, list(stack.gradients), averages, squares, [], steps,
            lr=group["lr"] * group["lr_mult"], beta1=beta1, beta2=beta2, eps=group["eps"],
            weight_decay=group["weight_decay"], amsgrad=False, maximize=False, fused=fused,
        )  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit where another optimizer of the same model stopped.

        Raises:
            ValueError: the state is of another model. Nothing has changed.
        """
        require_kept(state_dict, f"{type(self).__name__} of structlin 0.2")
        require_names(self.param_groups, state_dict["param_groups"])
        for group in state_dict["param_groups"]:
            self._check_options({key: group[key] for key in self.defaults if key in group})
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [n for group in state_dict["param_groups"] for n in group["params"]]
        for p, n in zip(params, ids, strict=True):
            name = self._roster.names[p]
            for key, value in state_dict["state"].get(n, {}).items():
                if key in ("momentum_buffer", "exp_avg") and value.shape != p.shape:
                    found, shape = tuple(value.shape), tuple(p.shape)
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
