"""SOAP for structured models: Adam in the eigenbasis of Shampoo's factors, block by block.

Sources: Vyas et al. 2024, "SOAP" (arXiv:2409.11321); Gupta et al. 2018, "Shampoo"
(arXiv:1802.09568). A core is a batch of small blocks, so that its factors, one per block and side,
take little memory and time; those of a dense layer of width d take d^3.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log2, sqrt
from typing import Any

import torch
from torch import Tensor, geqrf, nn
from torch.linalg import householder_product  # the Q of a QR, without R

from .._model.parameters import Weight
from .._structure.arguments import checked
from ..duality import Schedule, promote
from ._depth import Depth
from ._muon import Muon
from ._roster import Masses
from ._sharding import cut_as, join_parts, local_part, take_part
from ._stacks import Member, Stack, fill_one_storage, from_matrices, to_matrices
from ._transfer import Base

FLOOR = 1e-4  # of the root of V, relative to the largest of its block
ADAM_RMS = 0.2  # of the entries of a step of Adam, about (Liu et al. 2025, arXiv:2502.16982)
SLACK = 1.01  # of a direction's norm over its bound: the rounding to 16 bits
# Squares are kept in units of 4^exponent of each block, and the exponent stays while numbers are
# within 2^WINDOW of 2^exponent: float32 holds their squares, and ordinary training never leaves 0.
WINDOW = 50
SMALL = 40  # a root of V counts as at least 2^-SMALL of the momentum, whose quotient is then finite
FORGOTTEN = 10  # the old V counts as at least 4^-FORGOTTEN of itself, so that no unit loses it
_SIDES = ("left", "right")
_NONE = torch.empty(0, 0)


@dataclass(eq=False)
class _Pending:
    """What a step will keep of alike parameters, if it is made. Each tensor is of all their blocks,
    `(blocks, ...)`, one parameter after the other: this process's part."""

    members: list[Member]
    sizes: list[int]  #: blocks of each
    state: dict[str, Tensor]  #: without the momenta and the counts of steps
    gradient: Tensor  #: (blocks, m, n), in units of 2^exponent
    squares: Tensor  #: V, (blocks, m, n), in units of 4^exponent
    is_first: bool  #: of their steps, which makes the state
    count: int  #: of steps, with this one
    exponent: Tensor | None = None  #: (blocks, 1, 1); None: the old one
    rescale: Tensor | None = None  #: 2^(old exponent - exponent), (blocks, 1, 1)


class SOAP(Muon):
    """`Muon`, whose hidden matrices step by a second-order direction in place of the polar factor.

    For each block G `(m, n)` of a core, or a matrix, averages of G G^T / n and G^T G / m are kept.
    Orthogonal iteration finds their eigenvectors Q_L and Q_R by a QR every `precondition_frequency`
    steps; it cannot fail. The direction is Q_L (N / sqrt(V)) Q_R^T, with N the momentum and V the
    average of squared gradients in these bases, over ADAM_RMS sqrt(max(m, n)): about the norm of a
    polar factor. So `lr` and masses are as in Muon, and what is not hidden steps as there. A side
    of more than `max_precond_dim` has no factor; a matrix with two such sides steps by its polar
    factor. The state of a block takes 2 (m^2 + n^2) + 2 m n numbers.

    Whatever the gradients, a block's direction has at most the Frobenius norm of N / sqrt(V) = 1 in
    every entry, sqrt(min(m, n)) / ADAM_RMS; a longer one is shortened to it. Squares are kept in
    units of a power of two for each block, which changes as gradients leave 1e-15 to 1e15 times it,
    so that none under- or overflows. After a gradient that is far larger than all others steps are
    short until V has forgotten it, as Adam's are.

    Args:
        params, lr, model, weight_decay, dualize, method, dtype, adjust_lr_fn, masses, base, depth,
            other_lr, betas, eps, nonfinite: as of `Muon`.
        momentum: of the average of gradients.
        shampoo_beta: of all averages but the momentum.
        precondition_frequency: steps from one basis to the next.
        max_precond_dim: the largest side that has a basis.

    Raises:
        TypeError, ValueError: what `Muon` raises.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), BTT())
    >>> optimizer = SOAP(model, lr=0.02)
    >>> model(torch.randn(8, 64)).square().mean().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model[0].cores[0]])  # doctest: +NORMALIZE_WHITESPACE
    ['exp_avg_sq', 'exponent', 'left', 'left_basis', 'momentum_buffer', 'right', 'right_basis',
     'step']
    """

    @checked
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.02,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.9,
        shampoo_beta: float = 0.95,
        precondition_frequency: int = 5,
        max_precond_dim: int = 1024,
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
            "other_lr": other_lr, "betas": betas, "eps": eps, "shampoo_beta": shampoo_beta,
            "precondition_frequency": precondition_frequency, "max_precond_dim": max_precond_dim,
        }  # fmt: skip
        self._start(params, model, defaults, dualize, masses, base, depth, nonfinite)

    def _describe_step(self, group: dict[str, Any], p: Tensor) -> str:
        weight, most = self._roster.weights[p], group["max_precond_dim"]
        smaller, larger = sorted((weight.fan_out, weight.fan_in))
        if group["kind"] != "matrix" or smaller > most:
            return super()._describe_step(group, p)
        return "SOAP" if larger <= most else "SOAP, short side"

    def _read_model(self) -> None:
        super()._read_model()
        self._pending: dict[Tensor, _Pending] = {}  # of a step; alike parameters share one

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.param_groups[:] = [self.defaults | group for group in self.param_groups]  # of a Muon
        ids = [n for group in state_dict["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for p, n in zip(params, ids, strict=True):
            saved = state_dict["state"].get(n, {})
            if "momentum_buffer" not in saved:
                continue
            for key in saved.keys() - {"momentum_buffer"}:
                value = saved[key]  # torch has given the one in self.state the parameter's dtype
                # the count of steps stays on the CPU, where nobody waits to read it
                device = torch.device("cpu") if key == "step" else p.device
                is_number = value.is_floating_point() and key != "step"
                dtype = torch.promote_types(p.dtype, torch.float32) if is_number else value.dtype
                self.state[p][key] = value.to(device, dtype, copy=True)

    def _directions(self, group: dict[str, Any], stack: Stack) -> list[Tensor]:
        """As Muon's; gradients and V wait in `_pending` until the step is made."""
        weight = stack.members[0].weight
        smaller = min(weight.fan_out, weight.fan_in)
        if group["kind"] != "matrix" or not 0 < smaller <= group["max_precond_dim"]:
            for p in stack.params:
                self._pending.pop(p, None)  # of a step that was refused, by another option
            return super()._directions(group, stack)
        gradients, momenta = self._read(stack)
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for n, p in enumerate(stack.params):  # a parameter without a gradient has missed a step
            state = self.state[p]
            alike[(int(state.get("step", 0)), *sorted(state))].append(n)
        directions = list(gradients)
        for numbers in alike.values():
            found = self._find_directions(
                group,
                [stack.members[n] for n in numbers],
                [gradients[n] for n in numbers],
                [momenta[n] for n in numbers],
            )
            for n, direction in zip(numbers, found, strict=True):
                directions[n] = direction
        return directions

    def _find_directions(
        self,
        group: dict[str, Any],
        members: list[Member],
        gradients: list[Tensor],
        momenta: list[Tensor],
    ) -> list[Tensor]:
        """Q_L (N / sqrt(V)) Q_R^T for each block of alike parameters, which have made as many
        steps; on several processes, from their part of each gradient to that of its direction."""
        momentum, beta = group["momentum"], group["shampoo_beta"]
        wholes = _join_all(members, gradients)
        blocks = _all_matrices(members, wholes)
        gradient = _stack(blocks)  # (blocks, m, n), as all that follows
        average = _stack(_all_matrices(members, _join_all(members, momenta)))
        g = promote(gradient)
        u = promote(average.lerp(gradient, 1 - momentum**2))  # Nesterov's
        sizes = [len(each) for each in blocks]
        pending = self._pend(group, members, sizes, g, u)
        for p, _, _ in members:
            self._pending[p] = pending
        if pending.exponent is not None:
            u = u * _power_of_two(-pending.exponent, u)
        left, right = (pending.state.get(f"{side}_basis", _NONE) for side in _SIDES)
        d = _precondition(u, pending.squares, left, right, 1 - beta**pending.count)
        parts = torch.split(d.to(gradient.dtype), sizes)
        return [
            take_part(p, weight, from_matrices(weight, part))
            for (p, weight, _), part in zip(members, parts, strict=True)
        ]

    def _pend(
        self, group: dict[str, Any], members: list[Member], sizes: list[int], g: Tensor, u: Tensor
    ) -> _Pending:
        """The state of alike parameters, made at their first step, and what follows of V from the
        gradient g and the update u, (blocks, m, n)."""
        beta, count = group["shampoo_beta"], 1
        state = self._join_state(members)
        is_first = "exp_avg_sq" not in state
        if is_first:
            state["exp_avg_sq"] = torch.zeros_like(g, memory_format=torch.contiguous_format)
        else:
            count = int(self.state[members[0].parameter]["step"]) + 1
        if "exponent" not in state:  # also where an older version saved the state
            state["exponent"] = torch.zeros(len(g), 1, 1, dtype=torch.int32, device=g.device)
        squares, old_exponent = state["exp_avg_sq"], state["exponent"]
        exponent: Tensor | None = None
        rescale: Tensor | None = None
        if not _have_unit_1(g, u, squares, old_exponent):
            exponent = _choose_exponent(g, u, squares, old_exponent, beta)
            rescale = _power_of_two(old_exponent - exponent, g)
            g = g * _power_of_two(-exponent, g)
            squares = squares * rescale * rescale
        # from here on g is in units of 2^exponent, V and new factors of 4^exponent
        for side, size in zip(_SIDES, g.shape[-2:], strict=True):
            if is_first and size <= group["max_precond_dim"]:
                factor = _average(g.new_zeros(len(g), size, size), g, side, 0)
                state[side] = factor
                state[f"{side}_basis"] = householder_product(*geqrf(factor)).contiguous()
        left, right = (state.get(f"{side}_basis", _NONE) for side in _SIDES)
        squares = squares.lerp(_rotate(g, left, right).square_(), 1 - beta)
        return _Pending(members, sizes, state, g, squares, is_first, count, exponent, rescale)

    def _join_state(self, members: list[Member]) -> dict[str, Tensor]:
        """The state of alike parameters, of all their blocks. Each parameter's own is a part of it,
        so that what is written here is written there."""
        joined: dict[str, Tensor] = {}
        for key in self.state[members[0].parameter].keys() - {"momentum_buffer", "step"}:
            parts = [local_part(self.state[p][key]) for p, _, _ in members]
            if fill_one_storage(parts):
                blocks = sum(len(part) for part in parts)
                m, n = parts[0].shape[-2:]
                joined[key] = parts[0].as_strided((blocks, m, n), (m * n, n, 1), 0)
            else:
                joined[key] = torch.cat(parts)
                self._keep(key, joined[key], members, [len(part) for part in parts])
        return joined

    def _keep(self, key: str, joined: Tensor, members: list[Member], sizes: list[int]) -> None:
        """Each parameter's part of `joined` is its state from now on."""
        for (p, weight, _), part in zip(members, torch.split(joined, sizes), strict=True):
            self.state[p][key] = cut_as(p, weight, part)

    def _find_largest(self, p: Tensor, weight: Weight) -> float:
        if p not in self._pending:
            return super()._find_largest(p, weight)
        return SLACK * sqrt(p.numel() / max(weight.fan_out, weight.fan_in)) / ADAM_RMS

    def _describe_direction(self, p: Tensor, method: object) -> str:
        if p not in self._pending:
            return super()._describe_direction(p, method)
        largest = self._find_largest(p, self._roster.weights[p])
        return (
            f"SOAP, and none has more than {largest:.3g}; nothing was changed. Its state is not "
            "finite: load one that is, or drop it by optimizer.state.pop(parameter)"
        )

    def _move(self, group: dict[str, Any], stack: Stack, directions: list[Tensor]) -> None:
        super()._move(group, stack, directions)
        found = [self._pending.pop(p, None) for p in stack.params]
        for pending in dict.fromkeys(found):  # each once
            if pending is not None:
                self._keep_averages(group, pending)

    def _keep_averages(self, group: dict[str, Any], pending: _Pending) -> None:
        state = pending.state
        state["exp_avg_sq"].copy_(pending.squares)
        if pending.exponent is not None:
            state["exponent"].copy_(pending.exponent)
        for side in _SIDES:
            if side in state:
                if pending.rescale is not None and not pending.is_first:  # new ones have the unit
                    state[side].mul_(pending.rescale).mul_(pending.rescale)
                _average(state[side], pending.gradient, side, group["shampoo_beta"])
                if pending.count % group["precondition_frequency"] == 0:
                    _turn(state, side)
        first = self.state[pending.members[0].parameter]
        for key in state.keys() - first.keys():  # made in this step
            self._keep(key, state[key], pending.members, pending.sizes)
        for p, _, _ in pending.members:
            own = self.state[p]
            if pending.is_first:
                own["step"] = torch.zeros((), dtype=torch.float32)
            own["step"] += 1


def _join_all(members: list[Member], parts: list[Tensor]) -> list[Tensor]:
    """What is cut as the members are: whole, or in whole blocks."""
    return [join_parts(p, weight, x) for (p, weight, _), x in zip(members, parts, strict=True)]


def _all_matrices(members: list[Member], wholes: list[Tensor]) -> list[Tensor]:
    return [to_matrices(m.weight, x) for m, x in zip(members, wholes, strict=True)]


def _stack(blocks: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(blocks)) if len(blocks) > 1 else blocks[0]


def _precondition(u: Tensor, squares: Tensor, left: Tensor, right: Tensor, seen: float) -> Tensor:
    """The directions Q_L (N / sqrt(V)) Q_R^T, scaled and bounded, (blocks, m, n).

    u, squares: the update and V, in units of 2^exponent and 4^exponent; seen: the sum of the
    weights of V.
    """
    length = ADAM_RMS * sqrt(max(u.shape[-2:])) / sqrt(seen)
    u = _rotate(u, left, right)
    root = squares.sqrt().mul_(length)
    # or rounding, where the gradient has no part, would make steps as large as the gradient
    floor = FLOOR * root.amax((-2, -1), keepdim=True)
    floor = floor.maximum(2.0**-SMALL * u.abs().amax((-2, -1), keepdim=True))
    root.clamp_min_(floor.clamp_(min=torch.finfo(root.dtype).tiny))
    d = _rotate(u.div_(root), left.mT, right.mT)
    longest = sqrt(min(u.shape[-2:])) / ADAM_RMS
    norm = torch.linalg.matrix_norm(d, keepdim=True)  # Frobenius, (blocks, 1, 1)
    return d.mul_((longest / norm).clamp_(max=1))


def _have_unit_1(g: Tensor, u: Tensor, squares: Tensor, old: Tensor) -> bool:
    """Whether every block's exponent is 0 and stays, as in ordinary training; asked on a CPU alone,
    where nobody waits for the answer. The arguments are those of `_choose_exponent`."""
    if torch.compiler.is_compiling() or not g.is_cpu or bool(old.any()):
        return False
    if not g.numel():
        return True
    sizes = torch.linalg.vector_norm(g, torch.inf, (-2, -1)).aminmax()
    largest_update = torch.linalg.vector_norm(u, torch.inf)
    return (
        sizes.min.item() > 2.0**-WINDOW
        and sizes.max.item() < 2.0**WINDOW
        and squares.max().item() < 4.0**WINDOW
        and largest_update.item() < 2.0**WINDOW
    )


def _choose_exponent(g: Tensor, u: Tensor, squares: Tensor, old: Tensor, beta: float) -> Tensor:
    """Each block's exponent of the unit in which its squares are kept, `(batch, 1, 1)`: the old one
    while the largest number that matters is within 2^WINDOW of it, else that number's own.

    g, u: the gradient and the update, (batch, m, n); squares: V, in units of 4^old.
    """
    unset = torch.iinfo(old.dtype).min // 2

    def largest(x: Tensor) -> Tensor:
        """The exponent of a block's largest entry, (batch, 1, 1); `unset` of zeros alone."""
        size = x.abs().amax((-2, -1), keepdim=True)
        return torch.where(size > 0, torch.frexp(size).exponent, unset)

    of_gradient = largest(g)
    remembered = max(ceil(log2(beta) / 2), -FORGOTTEN) if beta else -FORGOTTEN
    of_root = largest(squares).div(2, rounding_mode="floor") + old + remembered
    needed = of_gradient.maximum(of_root).maximum(largest(u) - SMALL)
    limit = -round(log2(torch.finfo(g.dtype).tiny))  # 2^limit and 2^-limit are normal numbers
    outside = ((needed - old).abs() > WINDOW) & (needed > unset // 2)
    return torch.where(outside, needed.clamp(-limit, limit), old)


def _power_of_two(exponent: Tensor, like: Tensor) -> Tensor:
    """2^exponent, exactly, in the dtype of `like`, where it is a normal number."""
    limit = -round(log2(torch.finfo(like.dtype).tiny))
    return torch.pow(2.0, exponent.clamp(-limit, limit).double()).to(like.dtype)


def _average(factor: Tensor, g: Tensor, side: str, beta: float) -> Tensor:
    """Takes G G^T / n, or G^T G / m, into the average, in place."""
    g = g if side == "left" else g.mT
    return factor.baddbmm_(g, g.mT, beta=beta, alpha=(1 - beta) / g.shape[-1])


def _rotate(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Q_L^T X Q_R; a side without a basis stays."""
    x = left.mT @ x if left.numel() else x
    return x @ right if right.numel() else x


def _turn(state: dict[str, Tensor], side: str) -> None:
    """The next basis of a side, by a step of orthogonal iteration, those of the largest values
    first, and V in the same order."""
    factor, basis, squares = state[side], state[f"{side}_basis"], state["exp_avg_sq"]
    product = factor @ basis
    order = (basis * product).sum(-2).argsort(-1, descending=True)  # of the diagonal of Q^T L Q
    chosen = torch.arange(len(order), device=order.device)[:, None], order
    basis.copy_(householder_product(*geqrf(product.mT[chosen].mT)))
    squares.copy_(squares[chosen] if side == "left" else squares.mT[chosen].mT)
