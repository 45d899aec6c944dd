"""SOAP for structured models: Adam in the eigenbasis of Shampoo's factors, block by block.

Sources: Vyas et al. 2024, "SOAP" (arXiv:2409.11321); Gupta et al. 2018, "Shampoo"
(arXiv:1802.09568). A core is a batch of small blocks, so that its factors, one per block and side,
take little memory and time; those of a dense layer of width d take d^3.
"""

from collections.abc import Iterable, Mapping
from math import ceil, log2, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, geqrf, nn
from torch.linalg import householder_product  # the Q of a QR, without R

from .._engine.cpu import soap
from .._model.parameters import Weight
from .._projection.matrices import limit_threads
from .._structure.arguments import checked
from .._tensors import Dtype, Rate
from ..duality import Method, promote
from ._block import BlockOptimizer
from ._depth import Depth
from ._roster import Masses
from ._stacks import Blocks, Direction
from ._transfer import Base

FLOOR = 1e-4  # of the root of V, relative to the largest of its block
ADAM_RMS = 0.2  # of the entries of a step of Adam, about (Liu et al. 2025, arXiv:2502.16982)
SLACK = 1.01  # of a direction's norm over its bound: the rounding to 16 bits
# Squares are kept in units of 4^exponent of each block, and the exponent stays while numbers are
# within 2^WINDOW of 2^exponent: float32 holds their squares, and ordinary training never leaves 0.
WINDOW = 50
SMALL = 40  # a root of V counts as at least 2^-SMALL of the momentum, whose quotient is then finite
FORGOTTEN = 10  # the old V counts as at least 4^-FORGOTTEN of itself, so that no unit loses it
SMALL_SIDE = 256  # of a basis, up to which one thread finds it sooner than several do together
_SIDES = ("left", "right")
_NONE = torch.empty(0, 0)


class Scales(NamedTuple):
    """The lengths of a direction `(m, n)`."""

    length: float  #: by which a direction of N / sqrt(V) is divided, V without bias correction
    longest: float  #: that a direction may have, in its Frobenius norm


class Eigenbases(Direction):
    """Q_L (N / sqrt(V)) Q_R^T: Adam in the eigenbases of Shampoo's factors.

    State of each block `(m, n)`: "left" L `(m, m)` and "right" R `(n, n)`, averages of G G^T / n
    and G^T G / m; "left_basis" Q_L and "right_basis" Q_R, their eigenvectors; "exp_avg_sq" V
    `(m, n)`. G is kept in units of 2^"exponent", and L, R and V in units of its square.
    """

    name = "SOAP"
    state_names = ("exp_avg_sq", "exponent", "left", "left_basis", "right", "right_basis")
    largest_value = SLACK / ADAM_RMS

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self.beta: float = self.options["shampoo_beta"]
        self.dtype = blocks.gradient().dtype
        self.gradient = promote(blocks.gradient())  # (blocks, m, n), as all that follow
        self.by_engine = False  # whether this step is the compiled engine's
        self.rescale: Tensor | None = None  # 2^(old exponent - exponent), (blocks, 1, 1)

    @classmethod
    def serves(cls, weight: Weight, options: Mapping[str, Any]) -> bool:
        smaller = min(weight.fan_out, weight.fan_in)
        return bool(0 < smaller <= options["max_precond_dim"])

    @classmethod
    def describe(cls, weight: Weight, options: Mapping[str, Any]) -> str:
        larger = max(weight.fan_out, weight.fan_in)
        return "SOAP" if larger <= options["max_precond_dim"] else "SOAP, short side"

    def _read_update(self) -> Tensor:
        """Nesterov's (1 - momentum) G + momentum B, with this step's B, in a tensor of its own."""
        average = self.blocks.average()
        weight = 1 - self.options["momentum"] ** 2
        if self.blocks.is_copied:
            return average.lerp_(self.blocks.gradient(), weight)
        return average.lerp(self.blocks.gradient(), weight)

    def start(self) -> dict[str, Tensor]:
        """The state of the first step: V is zero, L and R are those of its gradient."""
        g = self.gradient
        squares = torch.zeros_like(g, memory_format=torch.contiguous_format)
        exponent = torch.zeros(len(g), 1, 1, dtype=torch.int32, device=g.device)
        update = promote(self._read_update())
        if not _all_fit_unit_1(g, update, squares, exponent):
            exponent = _choose_exponent(g, update, squares, exponent, self.beta)
            g = g * _power_of_two(-exponent, g)
        state = {"exp_avg_sq": squares, "exponent": exponent}
        for side, size in zip(_SIDES, g.shape[-2:], strict=True):
            if size <= self.options["max_precond_dim"]:
                zeros = g.new_zeros(len(g), size, size)
                state[side] = _average(zeros, g, side, beta=0)
                state[f"{side}_basis"] = _orthonormalize(state[side]).contiguous()
        return state

    def find(self) -> Tensor:
        state = self.state
        if "exponent" not in state:  # an older version saved the state
            zeros = torch.zeros(len(self.gradient), 1, 1, dtype=torch.int32)
            state["exponent"] = zeros.to(self.gradient.device)
        squares = state["exp_avg_sq"]
        old_exponent = state["exponent"]
        self.by_engine = soap.takes([self.blocks.gradient(), squares])
        if self.by_engine and not old_exponent.any():
            found = self._find_by_engine(squares)
            if found.fits:
                return found.directions
        update = promote(self._read_update())
        self.exponent = old_exponent
        unit: Tensor | None = None
        if not _all_fit_unit_1(self.gradient, update, squares, old_exponent):
            self.exponent = _choose_exponent(
                self.gradient, update, squares, old_exponent, self.beta
            )
            self.rescale = _power_of_two(old_exponent - self.exponent, self.gradient)
            unit = _power_of_two(-self.exponent, self.gradient)
            self.gradient = self.gradient * unit
            update = update * unit
            squares = squares * self.rescale * self.rescale
        if self.by_engine:
            return self._find_by_engine(squares, unit).directions
        left = state.get("left_basis", _NONE)
        right = state.get("right_basis", _NONE)
        # Memory that is new to the process costs more than the arithmetic: two tensors take turns.
        # V <- beta V + (1 - beta) (Q_L^T G Q_R)^2
        rotated = self.gradient.clone(memory_format=torch.contiguous_format)
        rotated, buffer = _rotate(rotated, left, right, torch.empty_like(rotated))
        self.squares = torch.lerp(squares, rotated.square_(), 1 - self.beta, out=rotated)
        weights = 1 - self.beta**self.blocks.count
        return _precondition(update, self.squares, left, right, weights, buffer).to(self.dtype)

    def _find_by_engine(self, squares: Tensor, unit: Tensor | None = None) -> soap.Found:
        """The directions of small float32 blocks on a CPU, and the next V.

        Args:
            squares: V, in the unit of this step.
            unit: 2^-exponent, by which the momentum is multiplied; None: 1.
        """
        average = self.blocks.average().contiguous()
        if unit is not None:
            average = average * unit
        length, longest = _find_scales(average, 1 - self.beta**self.blocks.count)
        found = soap.Found(
            *soap.find(
                self.gradient, average, squares,
                self.state.get("left_basis"), self.state.get("right_basis"),
                1 - self.options["momentum"] ** 2, self.beta, length, longest,
            )
        )  # fmt: skip
        self.squares = found.squares
        return found

    def keep(self) -> None:
        state = self.state
        turns = self.blocks.count % self.options["precondition_frequency"] == 0
        sides = [side for side in _SIDES if side in state]
        if self.rescale is not None:
            state["exponent"].copy_(self.exponent)
            for side in sides:
                state[side].mul_(self.rescale).mul_(self.rescale)
        if self.by_engine:
            soap.keep(
                self.gradient, self.squares, state["exp_avg_sq"],
                state.get("left"), state.get("left_basis"),
                state.get("right"), state.get("right_basis"), self.beta, turns,
            )  # fmt: skip
            return
        state["exp_avg_sq"].copy_(self.squares)
        for side in sides:
            _average(state[side], self.gradient, side, self.beta)
            if turns:
                _turn(state, side)


class SOAP(BlockOptimizer):
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
        params, lr, model, weight_decay, matrices, method, dtype, adjust_lr_fn, masses, base, depth,
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

    direction = Eigenbases
    fractions = ("momentum", "shampoo_beta")

    @checked
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: Rate = 0.02,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.9,
        shampoo_beta: float = 0.95,
        precondition_frequency: int = 5,
        max_precond_dim: int = 1024,
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
        options = {
            "shampoo_beta": shampoo_beta,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
        }
        super().__init__(
            params, lr, model=model, options=options, momentum=momentum, weight_decay=weight_decay,
            matrices=matrices, method=method, dtype=dtype, adjust_lr_fn=adjust_lr_fn, masses=masses,
            base=base, depth=depth, other_lr=other_lr, betas=betas, eps=eps, nonfinite=nonfinite,
        )  # fmt: skip


def _precondition(
    u: Tensor, squares: Tensor, left: Tensor, right: Tensor, weights: float, buffer: Tensor
) -> Tensor:
    """The directions Q_L (N / sqrt(V)) Q_R^T, scaled and bounded, `(blocks, m, n)`.

    Args:
        u: the update, in units of 2^exponent; its memory is used.
        squares: V, in units of 4^exponent.
        left, right: Q_L and Q_R.
        weights: the sum of the weights of V.
        buffer: as large as u; its memory is used.
    """
    length, longest = _find_scales(u, weights)
    # N = Q_L^T U Q_R, and the root of V with the scale of the direction, (blocks, m, n)
    n, buffer = _rotate(u, left, right, buffer)
    root = torch.sqrt(squares, out=buffer).mul_(length)
    # or rounding, where the gradient has no part, would make steps as large as the gradient
    floor = FLOOR * root.amax((-2, -1), keepdim=True)
    floor = floor.maximum(2.0**-SMALL * _largest_entries(n))
    root.clamp_min_(floor.clamp_(min=torch.finfo(root.dtype).tiny))
    d, _ = _rotate(n.div_(root), left.mT, right.mT, root)
    norm = torch.linalg.matrix_norm(d, keepdim=True)  # Frobenius, (blocks, 1, 1)
    return d.mul_((longest / norm).clamp_(max=1))


def _find_scales(blocks: Tensor, weights: float) -> Scales:
    """Those of blocks `(..., m, n)`; `weights` is the sum of the weights of V."""
    m, n = blocks.shape[-2:]
    return Scales(ADAM_RMS * sqrt(max(m, n)) / sqrt(weights), sqrt(min(m, n)) / ADAM_RMS)


def _largest_entries(x: Tensor) -> Tensor:
    """Of each block the largest absolute value, `(blocks, 1, 1)`."""
    largest = x.amax((-2, -1), keepdim=True)
    return largest.maximum(-x.amin((-2, -1), keepdim=True))


def _all_fit_unit_1(g: Tensor, u: Tensor, squares: Tensor, old: Tensor) -> bool:
    """Whether every block's exponent is 0 and stays 0, as in ordinary training.

    Asked on a CPU alone, where nobody waits for the answer. The arguments are those of
    `_choose_exponent`.
    """
    if torch.compiler.is_compiling() or not g.is_cpu or bool(old.any()):
        return False
    if not g.numel():
        return True
    gradient_sizes = _largest_entries(g).aminmax()
    update_bound = torch.linalg.vector_norm(u)  # no entry is larger than the norm of all
    return (
        gradient_sizes.min.item() > 2.0**-WINDOW
        and gradient_sizes.max.item() < 2.0**WINDOW
        and squares.max().item() < 4.0**WINDOW
        and update_bound.item() < 2.0**WINDOW
    )


def _choose_exponent(g: Tensor, u: Tensor, squares: Tensor, old: Tensor, beta: float) -> Tensor:
    """Each block's exponent of the unit in which its squares are kept, `(batch, 1, 1)`: the old one
    while the largest number that matters is within 2^WINDOW of it, else that number's own.

    g, u: the gradient and the update, (batch, m, n); squares: V, in units of 4^old.
    """
    unset = torch.iinfo(old.dtype).min // 2

    def largest(x: Tensor) -> Tensor:
        """The exponent of a block's largest entry, (batch, 1, 1); `unset` of zeros alone."""
        size = _largest_entries(x)
        return torch.where(size > 0, torch.frexp(size).exponent, unset)

    # Numbers are compared by their exponents of 2. This step keeps beta V, whose root is
    # 2^old sqrt(beta) sqrt(V): its exponent is old + log2(beta) / 2 + half of the exponent of V.
    decay = -FORGOTTEN
    if beta:
        decay = max(decay, ceil(log2(beta) / 2))
    gradient_exponent = largest(g)
    root_exponent = largest(squares).div(2, rounding_mode="floor") + old + decay
    update_exponent = largest(u) - SMALL
    needed = gradient_exponent.maximum(root_exponent).maximum(update_exponent)

    limit = -round(log2(torch.finfo(g.dtype).tiny))  # 2^limit and 2^-limit are normal numbers
    is_set = needed > unset // 2  # sums with `unset` stay below it
    is_outside = (needed - old).abs() > WINDOW
    return torch.where(is_outside & is_set, needed.clamp(-limit, limit), old)


def _power_of_two(exponent: Tensor, like: Tensor) -> Tensor:
    """2^exponent, exactly, in the dtype of `like`, where it is a normal number."""
    limit = -round(log2(torch.finfo(like.dtype).tiny))
    return torch.pow(2.0, exponent.clamp(-limit, limit).double()).to(like.dtype)


def _average(factor: Tensor, g: Tensor, side: str, beta: float) -> Tensor:
    """Takes G G^T / n, or G^T G / m, into the average, in place."""
    g = g if side == "left" else g.mT
    return factor.baddbmm_(g, g.mT, beta=beta, alpha=(1 - beta) / g.shape[-1])


def _rotate(x: Tensor, left: Tensor, right: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Q_L^T X Q_R, and the other of the tensors `x` and `buffer`, whose memory is used; a side
    without a basis stays."""
    result = x
    if left.numel():
        result = torch.bmm(left.mT, x, out=buffer)
        buffer = x
    if right.numel():
        product = torch.bmm(result, right, out=buffer)
        buffer = result
        result = product
    return result, buffer


def _orthonormalize(x: Tensor) -> Tensor:
    """The Q of a QR of each block. A Cholesky QR of nearly as good a basis needs two passes, or
    float64, where Shampoo's factors have condition numbers of 100 and more; it takes as long."""
    q: Tensor = householder_product(*geqrf(x))
    return q


def _turn(state: dict[str, Tensor], side: str) -> None:
    """The next basis of a side, and V in it, in place.

    LAPACK takes blocks one by one, and several threads on a small block wait for one another, three
    times as long as one works. So one thread takes them all.
    """
    factors = state[side]
    bases = state[f"{side}_basis"]
    # V (blocks, m, n) is in the bases, so its rows are sorted as Q_L's columns are; for Q_R columns
    squares = state["exp_avg_sq"] if side == "left" else state["exp_avg_sq"].mT
    is_small = factors.is_cpu and factors.shape[-1] <= SMALL_SIDE
    with limit_threads(1, is_small and not torch.compiler.is_compiling()):
        _iterate(factors, bases, squares)


def _iterate(factors: Tensor, bases: Tensor, squares: Tensor) -> None:
    """A step of orthogonal iteration, the columns of the largest values first, in place."""
    # Q <- the Q of a QR of (L Q) P, where P sorts the diagonal of Q^T L Q: of L (blocks, m, m) the
    # estimates of its eigenvalues.
    product = factors @ bases
    eigenvalues = (bases * product).sum(-2)  # (blocks, m)
    order = eigenvalues.argsort(-1, descending=True)
    block_numbers = torch.arange(len(order), device=order.device)[:, None]
    sorted_columns = product.mT[block_numbers, order].mT
    bases.copy_(_orthonormalize(sorted_columns))
    squares.copy_(squares[block_numbers, order])
