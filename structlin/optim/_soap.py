"""SOAP for structured models: Adam in the eigenbasis of Shampoo's factors, block by block.

Sources: Vyas et al. 2024, "SOAP" (arXiv:2409.11321); Gupta et al. 2018, "Shampoo"
(arXiv:1802.09568). A core is a batch of small blocks, so that its factors, one per block and side,
take little memory and time; those of a dense layer of width d take d^3.
"""

from collections.abc import Iterable
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, geqrf, nn
from torch.linalg import householder_product  # the Q of a QR, without R

from .._model.parameters import Weight
from .._structure.arguments import checked
from ..duality import promote
from ._muon import Muon
from ._sharding import cut_as, join_parts, local_part, take_part
from ._stacks import Member, Stack, from_matrices, to_matrices

FLOOR = 1e-4  # of the root of V, relative to the largest of its block
ADAM_RMS = 0.2  # of the entries of a step of Adam, about (Liu et al. 2025, arXiv:2502.16982)
_SIDES = ("left", "right")
_NONE = torch.empty(0, 0)


class SOAP(Muon):
    """`Muon`, whose hidden matrices step by a second-order direction in place of the polar factor.

    For each block G `(m, n)` of a core, or a matrix, averages of G G^T / n and G^T G / m are kept.
    Orthogonal iteration finds their eigenvectors Q_L and Q_R by a QR every `precondition_frequency`
    steps; it cannot fail. The direction is Q_L (N / sqrt(V)) Q_R^T, with N the momentum and V the
    average of squared gradients in these bases, over ADAM_RMS sqrt(max(m, n)): about the norm of a
    polar factor. So `lr` and masses are as in Muon, and what is not hidden steps as there. A side
    of more than `max_precond_dim` has no factor; a matrix with two such sides steps by its polar
    factor. The state of a block takes 2 (m^2 + n^2) + 2 m n numbers.

    Args:
        params, lr, momentum, options: as of `Muon`.
        shampoo_beta: of all averages but the momentum.
        precondition_frequency: steps from one basis to the next.
        max_precond_dim: the largest side that has a basis.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), BTT())
    >>> optimizer = SOAP(model, lr=0.02)
    >>> model(torch.randn(8, 64)).square().mean().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model[0].cores[0]])
    ['exp_avg_sq', 'left', 'left_basis', 'momentum_buffer', 'right', 'right_basis', 'step']
    """

    @checked
    def __init__(
        self, params: nn.Module | Iterable[Any], lr: float | Tensor = 0.02, *,
        momentum: float = 0.9, shampoo_beta: float = 0.95, precondition_frequency: int = 5,
        max_precond_dim: int = 1024, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, momentum=momentum, **options)
        own = {"shampoo_beta": shampoo_beta, "precondition_frequency": precondition_frequency}
        self.defaults |= own | {"max_precond_dim": max_precond_dim}
        self.param_groups[:] = [self.defaults | group for group in self.param_groups]
        if not shampoo_beta < 1:
            raise ValueError(f"shampoo_beta={shampoo_beta!r} must be at least 0 and below 1")

    def _read_model(self) -> None:
        super()._read_model()
        self._pending: dict[Tensor, tuple[Tensor, Tensor]] = {}  # of a step: gradients, and V

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.param_groups[:] = [self.defaults | group for group in self.param_groups]  # of a Muon
        ids = [n for group in state_dict["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for p, n in zip(params, ids, strict=True):
            saved = state_dict["state"].get(n, {})
            for key in saved.keys() - {"momentum_buffer"} if "momentum_buffer" in saved else ():
                # as it was: torch has given it the parameter's dtype
                self.state[p][key] = saved[key].to(p.device, copy=True)

    def _directions(self, group: dict[str, Any], stack: Stack) -> list[Tensor]:
        """As Muon's; gradients and V wait in `_pending` until the step is made."""
        weight, most = stack.members[0].weight, group["max_precond_dim"]
        if group["kind"] != "matrix" or min(weight.fan_out, weight.fan_in) > most:
            return super()._directions(group, stack)
        return [
            self._find_direction(group, member, gradient, average)
            for member, gradient, average in zip(stack.members, *self._read(stack), strict=True)
        ]

    def _find_direction(
        self, group: dict[str, Any], member: Member, gradient: Tensor, average: Tensor
    ) -> Tensor:
        """Q_L (N / sqrt(V)) Q_R^T for each block, scaled; on several processes, from their part of
        the gradient to their part of the direction."""
        (p, weight, _), momentum, beta = member, group["momentum"], group["shampoo_beta"]
        state = self.state[p]
        update = average.lerp(gradient, 1 - momentum**2)  # Nesterov's
        whole = join_parts(p, weight, gradient)
        g = promote(to_matrices(weight, whole))  # (batch, m, n)
        u = promote(to_matrices(weight, join_parts(p, weight, update)))
        if "exp_avg_sq" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg_sq"] = cut_as(p, weight, torch.zeros_like(g))
            for side, size in zip(_SIDES, g.shape[-2:], strict=True):
                if size <= group["max_precond_dim"]:
                    factor = _average(g.new_zeros(len(g), size, size), g, side, 0)
                    state[side] = cut_as(p, weight, factor)
                    state[f"{side}_basis"] = cut_as(p, weight, householder_product(*geqrf(factor)))
        left, right = (local_part(state.get(f"{side}_basis", _NONE)) for side in _SIDES)
        squares = local_part(state["exp_avg_sq"])
        squares = squares.lerp(_rotate(g, left, right).square_(), 1 - beta)
        self._pending[p] = g, squares
        length = ADAM_RMS * sqrt(max(g.shape[-2:])) / sqrt(1 - beta ** (int(state["step"]) + 1))
        root = squares.sqrt().mul_(length)
        # or rounding, where the gradient has no part, would make steps as large as the gradient
        floor = FLOOR * root.amax((-2, -1), keepdim=True)
        root.clamp_min_(floor.clamp_(min=torch.finfo(root.dtype).tiny))
        d = _rotate(_rotate(u, left, right).div_(root), left.mT, right.mT)
        return take_part(p, weight, from_matrices(weight, d.to(whole.dtype), whole))

    def _find_largest(self, p: Tensor, weight: Weight) -> float:
        return inf if p in self._pending else super()._find_largest(p, weight)

    def _move(self, group: dict[str, Any], stack: Stack, directions: list[Tensor]) -> None:
        super()._move(group, stack, directions)
        for p in stack.params:
            if p not in self._pending:
                continue
            g, squares = self._pending.pop(p)
            state = {key: local_part(value) for key, value in self.state[p].items()}
            state["step"] += 1
            state["exp_avg_sq"].copy_(squares)
            for side in _SIDES:
                if side in state:
                    _average(state[side], g, side, group["shampoo_beta"])
                    if int(state["step"]) % group["precondition_frequency"] == 0:
                        _turn(state, side)


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
