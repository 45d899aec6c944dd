"""`BlockOptimizer`: what all optimizers of blocks share; a `Direction` says how blocks step.

Muon and SOAP are directions. This holds the roster of parameters, groups and the check of their
options, stacks of alike blocks, the step in its order (all directions, the check of their norms,
the moves), AdamW for what is no hidden matrix, state and files, and parts on several processes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from math import isfinite, sqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from .._model.parameters import Weight, parameters_of
from .._structure.arguments import checked, fit, require_choice, require_keys, show, warn
from .._tables import Table, hide_numbers
from .._tensors import Dtype, Rate
from .._torch import foreach_add_, foreach_lerp_, foreach_mul_, foreach_norm, foreach_sub_
from ..duality import Method, choose_polar
from ._depth import Depth
from ._rates import (
    KEPT,
    list_parameters,
    require_kept,
    require_names,
    require_new,
    require_shapes,
)
from ._roster import (
    NONFINITE,
    SCALES,
    Masses,
    Roster,
    find_hidden,
    find_misnamed,
    find_undeclared,
    share_masses,
    warn_of_int8,
)
from ._sharding import cut_as, local_part
from ._stacks import Blocks, Direction, PolarFactor, Stack, fill_one_storage, stack_alike
from ._transfer import Base, Transfer

_KINDS = ("matrix", "embedding", "other")  # the groups: what a parameter is
_OTHER = 2  # AdamW's
LEAST_SHARE = 1 / 8  # of the hidden matrices, from which on it matters that AdamW steps them
# what a group may have beside options: what others write there for themselves, as schedulers do
_NOTES = {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "lr_scale"}


class _Kind(NamedTuple):
    """What decides the group of a parameter."""

    number: int  #: in `_KINDS`
    is_idle: bool  #: does not decay
    rate: float  #: factor of the rate, as all that follow
    decay: float
    eps: float


class _Move(NamedTuple):
    """A stack with the directions of its step."""

    group: dict[str, Any]
    stack: Stack
    directions: list[Tensor]  #: of the members; none of AdamW
    rules: list[Direction]  #: one for the blocks of each set of alike members
    kind: type[Direction]


class BlockOptimizer(Optimizer):
    """Steps hidden matrices, and blocks of cores, by a `Direction`; everything else by AdamW.

    A subclass names its `Direction`, and passes its own options to `__init__` as `options`. The
    arguments are those of `Muon`.
    """

    direction: ClassVar[type[Direction]]
    #: options that are at least 0 and below 1, beside betas
    fractions: ClassVar[tuple[str, ...]] = ("momentum",)

    @checked
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: Rate = 0.02,
        *,
        model: nn.Module | None = None,
        options: Mapping[str, Any] | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        matrices: str = "hidden",
        method: Method = None,
        dtype: Dtype = None,
        adjust_lr_fn: str = "rms",
        masses: Masses | None = None,
        base: Base = None,
        depth: Depth | None = None,
        other_lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        nonfinite: str = "raise",
    ) -> None:
        require_choice("nonfinite", nonfinite, NONFINITE)
        require_choice("matrices", matrices, ("hidden", "all"))
        name = type(self).__name__
        if model is None:
            if not isinstance(params, nn.Module):
                raise ValueError(
                    f"model=None: pass the model itself, {name}(model), or the "
                    "module that owns the parameters as model="
                )
            model = params
        self.model = model
        self.masses = masses
        self.matrices = matrices
        self.base = base
        self.depth = depth
        self.nonfinite = nonfinite
        self._roster = Roster(model, masses)
        self._read_model()
        warn_of_int8(model)
        if isinstance(params, nn.Module):
            params = list(params.parameters())  # also frozen ones, which may train later
        # the options that a group may have of its own
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "method": method,
            "dtype": dtype, "adjust_lr_fn": adjust_lr_fn,
            "other_lr": other_lr, "betas": betas, "eps": eps, **(options or {}),
        }  # fmt: skip
        self._option_names = tuple(defaults)  # torch adds one of its own to `defaults`
        super().__init__(params, defaults)
        if matrices == "hidden":
            self._warn_of_names()
        stepping = {p for group in self.param_groups for p in group["params"]}
        infos = parameters_of(model)
        undeclared = find_undeclared(info for info in infos if info.parameter in stepping)
        if undeclared:
            warn(f"{name} steps {undeclared}")

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
        if group["kind"] == "other":
            return "AdamW"
        if group["kind"] == "embedding":
            return "unit RMS"
        weight = self._roster.weights[p]
        return self._choose_direction(group, weight).describe(weight, group)

    def _choose_direction(self, group: dict[str, Any], weight: Weight) -> type[Direction]:
        if group["kind"] == "matrix" and self.direction.serves(weight, group):
            return self.direction
        return PolarFactor

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
        remainder = f" and {len(names) - 5} more" if len(names) > 5 else ""
        warn(
            f"{type(self).__name__} steps {', '.join(names[:5])}{remainder} by AdamW, because of "
            "names that heads, embeddings and routers have. If they are hidden layers, give them "
            'other names, or pass matrices="all", with which heads and routers step as hidden '
            "matrices; print(optimizer) shows what steps how"
        )

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "masses", "matrices", "base", "depth", "nonfinite", "_option_names")
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
        hidden = find_hidden(self.model, infos)
        equal_shares = share_masses(infos, {})
        for info in infos:
            p = info.parameter
            kind = info.weight.kind
            factors = transfer.of(info)
            is_idle = not info.decays
            has_direction = self.matrices == "all" and kind in ("matrix", "embedding")
            if (p in hidden or has_direction) and not p.is_complex():
                decay = 0.0 if is_idle else factors.lr * factors.decay
                self._kinds[p] = _Kind(_KINDS.index(kind), is_idle, 1.0, decay, 1.0)
                self._roster.shares[p] *= factors.depth
            else:
                rate = factors.lr * self._roster.shares[p] / equal_shares[p]
                decay = 0.0 if is_idle else factors.decay
                self._kinds[p] = _Kind(_OTHER, is_idle, rate, decay, transfer.eps_mult(info))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `params` (also a module), as one group for each kind of parameter, and for those of a
        kind that do not decay."""
        require_keys("param_group", param_group, "params")
        if "lr_mult" in param_group:
            raise ValueError("a group has the rates of another optimizer: pass the model itself")
        group = {**self.defaults, **param_group}
        group.update(self._check_options(group))
        params = list_parameters(group["params"])
        if any(parameter not in self._kinds for parameter in params):  # the model has grown
            self._roster.read()
            self._read_model()
        self._roster.require_owned(params)
        require_new(self.param_groups, params)
        for kind_group in self._divide(group, params):
            super().add_param_group(kind_group)

    def _divide(self, group: dict[str, Any], params: list[Tensor]) -> list[dict[str, Any]]:
        """A group for each kind of parameter."""
        alike: dict[_Kind, list[Tensor]] = defaultdict(list)
        for p in params:
            if p.is_meta and p.requires_grad:
                name = self._roster.names[p]
                raise ValueError(f"{name} is on meta: materialise the model first (to_empty)")
            alike[self._kinds[p]].append(p)
        divided = []
        for kind in sorted(alike, key=lambda kind: kind[:2]):
            kind_group = {**group, "params": alike[kind], "kind": _KINDS[kind.number]}
            kind_group["param_names"] = [self._roster.names[p] for p in alike[kind]]
            kind_group["lr_mult"] = kind.rate
            if kind_group["kind"] == "other":
                if not group["lr"]:
                    raise ValueError(
                        f"lr={group['lr']!r} must be positive: the rate of everything else is kept "
                        "as other_lr / lr times it. A scheduler may set 0 later, and "
                        "requires_grad_(False) freezes matrices"
                    )
                kind_group["lr_mult"] = float(group["other_lr"] * kind.rate) / float(group["lr"])
            kind_group[KEPT] = True
            kind_group["weight_decay"] = group["weight_decay"] * kind.decay
            kind_group["eps"] = group["eps"] * kind.eps
            divided.append(kind_group)
        return divided

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns the closure's loss, if there is a closure.

        Raises:
            FloatingPointError: a gradient is not finite (with nonfinite="raise"), or a direction
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
        moves: Iterable[_Move] = (self._find_move(group, stack) for group, stack in stepping)
        if self.nonfinite != "ignore":  # every direction is known before anything moves
            moves = list(moves)
            self._require_possible(moves)
        for move in moves:
            self._make(move)
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
        """The options of a group, checked against the signatures of this class and its base."""
        values = {name: group[name] for name in self.defaults if name in group}
        options = fit(BlockOptimizer.__init__, values) | fit(type(self).__init__, values)
        unknown = sorted(group.keys() - self.defaults.keys() - _NOTES)
        if unknown:
            name = unknown[0]
            close = get_close_matches(name, self.defaults, 1)
            hint = repr(close[0]) if close else ", ".join(self.defaults)
            raise ValueError(
                f"{name}={show(group[name])} is no option that a group of {type(self).__name__} "
                f"can have: take {hint}, or leave it out"
            )
        fractions = {name: options[name] for name in self.fractions if name in options}
        for n, beta in enumerate(options.get("betas", ())):
            fractions[f"betas[{n}]"] = beta
        for name, value in fractions.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value!r} must be at least 0 and below 1")
        if "adjust_lr_fn" in options:
            require_choice("adjust_lr_fn", options["adjust_lr_fn"], SCALES)
        return options

    def _prepare(self, stack: Stack) -> None:
        """State of parameters that step for the first time; nothing moves yet."""
        for p in stack.params:
            state = self.state[p]
            if not state and stack.polar is None:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
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

    def _find_move(self, group: dict[str, Any], stack: Stack) -> _Move:
        """The directions of a stack's step. Nothing moves."""
        kind = self._choose_direction(group, stack.members[0].weight)
        if stack.polar is None:  # AdamW's
            return _Move(group, stack, [], [], kind)
        directions = list(stack.gradients)
        rules = []
        for numbers in self._list_alike(stack, kind.state_names):
            members = []
            momenta = []
            gradients = []
            for n in numbers:
                member = stack.members[n]
                momentum = local_part(self.state[member.parameter]["momentum_buffer"])
                members.append(member)
                momenta.append(momentum)
                gradients.append(stack.gradients[n].to(momentum.dtype))
            alike = Stack(members, stack.polar, gradients)
            rule = kind(self._collect(group, alike, momenta, kind.state_names))
            if not rule.state:
                rule.state.update(rule.start())
            directions_of_alike = rule.blocks.unstack(rule.find())
            for n, direction in zip(numbers, directions_of_alike, strict=True):
                directions[n] = direction
            rules.append(rule)
        return _Move(group, stack, directions, rules, kind)

    def _list_alike(self, stack: Stack, state_names: tuple[str, ...]) -> Iterable[list[int]]:
        """The numbers of members that have made as many steps and have the same state: one without
        a gradient has missed a step."""
        if not state_names:
            return [list(range(len(stack.members)))]
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for n, p in enumerate(stack.params):
            state = self.state[p]
            names = [name for name in state_names if name in state]
            alike[(int(state.get("step", 0)), *names)].append(n)
        return alike.values()

    def _collect(
        self,
        group: dict[str, Any],
        stack: Stack,
        momenta: list[Tensor],
        state_names: tuple[str, ...],
    ) -> Blocks:
        """The blocks of alike members, and their state: each parameter's own is a part of it, so
        that what is written here is written there."""
        first_state = self.state[stack.members[0].parameter]
        joined: dict[str, Tensor] = {}
        for name in state_names:
            if name not in first_state:
                continue
            states = [local_part(self.state[p][name]) for p in stack.params]
            sizes = [len(state) for state in states]
            if fill_one_storage(states):
                m, n = states[0].shape[-2:]
                joined[name] = states[0].as_strided((sum(sizes), m, n), (m * n, n, 1), 0)
            else:
                joined[name] = torch.cat(states)
                self._share_out(name, joined[name], stack, sizes)
        count = int(first_state.get("step", 0)) + 1
        return Blocks(stack, group, momenta, joined, count)

    def _share_out(self, name: str, joined: Tensor, stack: Stack, sizes: list[int]) -> None:
        """Each parameter's part of `joined` is its state from now on."""
        for member, blocks in zip(stack.members, torch.split(joined, sizes), strict=True):
            state = self.state[member.parameter]
            state[name] = cut_as(member.parameter, member.weight, blocks)

    def _require_possible(self, moves: list[_Move]) -> None:
        """Raises FloatingPointError where a direction has a norm that none can have."""
        checked_moves = [move for move in moves if move.group["kind"] == "matrix"]
        directions = [direction for move in checked_moves for direction in move.directions]
        if not directions:
            return
        tensors = foreach_norm(directions)
        device = tensors[0].device
        # one wait for the device
        norms = torch.stack([norm.to(device, torch.float32) for norm in tensors]).tolist()
        remaining = iter(norms)
        for move in checked_moves:
            for (p, weight, _), norm in zip(move.stack.members, remaining, strict=False):
                # that of a semi-orthogonal block is the root of its rank
                rank = p.numel() / max(weight.fan_out, weight.fan_in, 1)
                largest = move.kind.largest_value * sqrt(rank)
                if isfinite(norm) and norm <= largest:
                    continue
                raise FloatingPointError(
                    f"the direction of {self._roster.names[p]} has norm {norm:.3g} by "
                    f"{move.kind.explain(move.group, f'{largest:.3g}')}"
                )

    def _make(self, move: _Move) -> None:
        """One step of a stack; all arithmetic is on what this process holds."""
        group = move.group
        local = [local_part(p) for p in move.stack.params]
        if move.stack.polar is None:
            self._step_adamw(group, move.stack, local)
            return
        for rule in move.rules:
            momenta = rule.blocks.momenta
            foreach_lerp_(momenta, list(rule.blocks.gradients), 1 - group["momentum"])
        lr = group["lr"] * group["lr_mult"]
        if group["weight_decay"]:
            foreach_mul_(local, 1 - lr * group["weight_decay"])
        by_length: dict[float, list[int]] = defaultdict(list)
        for n, member in enumerate(move.stack.members):
            by_length[member.length].append(n)
        for length, numbers in by_length.items():
            moving = [local[n] for n in numbers]
            _descend(moving, [move.directions[n] for n in numbers], lr, length)
        for rule in move.rules:
            rule.keep()
            self._keep(rule)

    def _keep(self, rule: Direction) -> None:
        """The state that was made in this step, and the count of steps."""
        if not rule.state_names:
            return
        blocks = rule.blocks
        states = [self.state[member.parameter] for member in blocks.members]
        stack = Stack(blocks.members, blocks.polar)
        for name in rule.state.keys() - states[0].keys():
            self._share_out(name, rule.state[name], stack, blocks.sizes)
        for state in states:
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            state["step"] += 1

    def _step_adamw(self, group: dict[str, Any], stack: Stack, local: list[Tensor]) -> None:
        states = [self.state[p] for p in stack.params]
        averages = [local_part(state["exp_avg"]) for state in states]
        squares = [local_part(state["exp_avg_sq"]) for state in states]
        steps = [local_part(state["step"]) for state in states]
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
        require_shapes(self.param_groups, state_dict)
        for group in state_dict["param_groups"]:
            self._check_options({key: group[key] for key in self.defaults if key in group})
        ids = [n for group in state_dict["param_groups"] for n in group["params"]]
        states = [state_dict["state"].get(n, {}) for n in ids]
        super().load_state_dict(state_dict)
        # the state of another block optimizer lacks the options of this one
        options = {name: self.defaults[name] for name in self._option_names}
        self.param_groups[:] = [options | group for group in self.param_groups]
        params = [p for group in self.param_groups for p in group["params"]]
        for p, state in zip(params, states, strict=True):
            if "momentum_buffer" in state:
                self._load_blocks(p, state)

    def _load_blocks(self, p: Tensor, saved: Mapping[str, Tensor]) -> None:
        """The state of a direction: torch has given what is in self.state the parameter's dtype."""
        for name in saved.keys() - {"momentum_buffer"}:
            value = saved[name]
            # the count of steps stays on the CPU, where nobody waits to read it
            device = torch.device("cpu") if name == "step" else p.device
            is_number = value.is_floating_point() and name != "step"
            dtype = torch.promote_types(p.dtype, torch.float32) if is_number else value.dtype
            self.state[p][name] = value.to(device, dtype, copy=True)


def _descend(params: list[Tensor], steps: list[Tensor], lr: float | Tensor, length: float) -> None:
    if isinstance(lr, Tensor):
        foreach_sub_(params, [step * (lr * length).to(step.device, step.dtype) for step in steps])
    else:
        foreach_add_(params, steps, alpha=-lr * length)
