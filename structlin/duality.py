"""The polar factor of batched matrices, and the duality maps made of it. Names no family.

A gradient is a dual vector; the duality map of a norm turns it into the step that decreases the
loss fastest per unit of that norm. For a matrix under the RMS->RMS operator norm that is
sqrt(fan_out / fan_in) U V^T, with G = U S V^T; the norm of a batched core is the largest of its
blocks', so its map acts on each block by itself.

Source: Bernstein & Newhouse 2024, "Modular Duality in Deep Learning" (arXiv:2410.21265).
Iterations: Newton-Schulz (Higham 2008, "Functions of Matrices", ch. 8); quintics of Jordan et al.
2024, "Muon"; Amsel et al. 2025, "The Polar Express" (arXiv:2505.16932), for the Remez construction
behind "ns" and "fast".
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, log2, nan, sqrt
from typing import Annotated, Any

import torch
from torch import Tensor

from ._engine.cpu import polar
from ._engine.cpu.library import has_matrix_unit
from ._engine.operators import is_plain
from ._structure.arguments import CheckedBy
from ._tensors import check_dtype, require_real
from ._torch import call_while_tracing, has_bfloat16_instructions

__all__ = ["dual_norm", "dualize", "polar_factor"]
Schedule = Sequence[tuple[float, float, float]]

# One (a, b, c) per step: X <- a X + b (X X^T) X + c (X X^T)^2 X, on singular values in [0, 1].
SCHEDULES: dict[str, Schedule] = {
    # The best odd quintics (Remez), one after the other, for singular values in [1e-4, 1]. Each
    # step's interval is made 1 % longer at its upper end, where the polynomials are steep, so that
    # rounding can not leave it.
    "ns": (
        (8.425672, -24.521452, 17.843507),
        (4.207665, -3.062329, 0.557472),
        (4.184346, -3.046599, 0.555741),
        (4.089445, -2.982276, 0.548645),
        (3.743217, -2.744050, 0.522410),
        (2.877234, -2.114045, 0.453744),
        (2.030134, -1.398245, 0.379895),
        (1.867063, -1.232676, 0.365629),
    ),
    # The same for [3e-3, 1].
    "fast": (
        (8.301929, -24.042428, 17.469942),
        (4.007801, -2.926616, 0.542507),
        (3.489622, -2.565410, 0.502803),
        (2.497354, -1.812583, 0.421705),
        (1.913728, -1.281434, 0.369223),
        (1.865747, -1.231468, 0.365722),
    ),
}
METHODS = (*SCHEDULES, "svd")
DEFAULT = SCHEDULES["fast"][:5]  # where no method is given

# The thresholds of `choose_polar`, in numbers of a matrix or a stack.
LARGE_MATRIX = 2**14  # from which on BLAS is faster than the engine, and than itself in a batch
SMALLEST_BFLOAT16 = 64  # short side, from which on 16 bits are faster, but for the engine
LARGEST_ON_CPU = 2**16  # where a stack stays in the cache, and copying a large matrix is a waste
LARGEST_STACK = 2**24  # bounds the memory of a step
SMALLEST_STACK = 2**17  # of which fewer do not keep a device busy, where there are more


def polar_factor(
    matrix: Tensor,
    *,
    method: str | Schedule = "ns",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the polar factor U V^T of the last two dimensions, G = U S V^T: every singular value
    becomes 1. Pure.

    Args:
        matrix: `(..., m, n)`, real floating point. Leading dimensions are independent matrices.
        method: how. In float32, for singular values relative to the Frobenius norm of the matrix:

            - "ns": 8 Newton-Schulz steps made for [1e-4, 1]: values there land within 1e-4 of 1.
            - "fast": 6 steps made for [3e-3, 1]; the same band.
            - "svd": exact; singular values below the numerical rank become 0.
            - a schedule of your own, (a, b, c) per step: X <- a X + b (X X^T) X + c (X X^T)^2 X, in
              the order of torch.optim.Muon, whose own is 5 times (3.4445, -4.7750, 2.0315).
        dtype: of the iteration; float32 by default, float64 for float64 input. bfloat16 is faster
            and fills the null space of rank-deficient matrices with noise of up to 1.

    Returns:
        A new tensor, of the dtype of `matrix`. Independent of the scale of each matrix, and odd.
        Singular values that are exactly zero stay (nearly, for the iterations) zero. A matrix that
        is not finite has a factor of NaN; the others of a batch do not notice.

    Raises:
        ValueError: `method` is unknown, or no schedule; `matrix` has fewer than two dimensions.
        TypeError: `matrix` is not real floating point; `method` is neither text nor list.

    >>> g = torch.randn(4, 8, 16)
    >>> torch.linalg.svdvals(polar_factor(g)).sub(1).abs().max() < 1e-3
    tensor(True)
    """
    check_method("method", method)
    require_real("matrix", matrix, 2)
    check_dtype("dtype", dtype)
    shape = (matrix.shape[-2], matrix.shape[-1])
    return choose_polar(shape, matrix.dtype, matrix.device, method, dtype)(matrix)


@dataclass(frozen=True)
class Polar:
    """A way to compute the polar factors of matrices `(..., m, n)`, as `choose_polar` makes it."""

    schedule: Schedule | None  #: None: by singular values
    dtype: torch.dtype  #: of the iteration
    compiled: bool  #: by the engine, where no derivative is taken
    one_by_one: bool  #: no batched products
    largest_stack: int  #: numbers that are worth one call

    def __call__(self, matrix: Tensor) -> Tensor:
        if matrix.numel() == 0:
            return matrix.clone()
        x = matrix
        if torch.finfo(self.dtype).tiny > torch.finfo(x.dtype).tiny:  # fewer exponents
            x = _of_unit_size(x)
        x = x.to(self.dtype)
        factors = self._factors(x.reshape(-1, *x.shape[-2:]))  # (batch, m, n)
        return factors.reshape(x.shape).to(matrix.dtype)

    def _factors(self, x: Tensor) -> Tensor:
        if self.schedule is None:
            return _svd(_of_unit_size(x))
        if self.compiled and polar.takes(x):
            return polar.polar([x], self.schedule)[0]
        if not _is_of_safe_size(x):
            x = _of_unit_size(x)
        if len(x) > 1 and not self.one_by_one:
            return _iterate(x, self.schedule)
        return torch.stack([_iterate(matrix, self.schedule) for matrix in x])


def choose_polar(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    method: str | Schedule | None = None,
    iterate_in: torch.dtype | None = None,
) -> Polar:
    """Decide how the polar factors of matrices `(m, n)`, of this dtype and device, are computed: by
    `method` and `dtype` of `polar_factor`. This is the only place that decides it.

    Without a method it is 5 steps of "fast". Without a dtype too they are in bfloat16, if the short
    side has 64 or more and the device has products of bfloat16. Float64 stays in its dtype, as does
    what the compiled engine takes: fewer than 2^14 numbers in float32 on a CPU. The engine is not
    compiled for it: whether there is one is asked once in a process.

    >>> choose_polar((8, 16), torch.float64, torch.device("cpu")).dtype
    torch.float64
    """
    is_small = shape[0] * shape[1] < LARGE_MATRIX
    on_cpu = device.type == "cpu"
    if iterate_in is None:
        iterate_in = torch.promote_types(dtype, torch.float32)
        if method is None and _gains_by_16_bits(shape, dtype, device):
            iterate_in = torch.bfloat16
    compiled = is_small and on_cpu and iterate_in == torch.float32 and method != "svd"
    # a schedule of one's own gives torch.optim.Muon's bits, which multiplies one by one
    is_named = method is None or isinstance(method, str)
    batched = is_named and iterate_in == torch.bfloat16 and has_matrix_unit()
    return Polar(
        schedule=_find_schedule(method),
        dtype=iterate_in,
        compiled=compiled,
        one_by_one=on_cpu and not is_small and not batched,
        largest_stack=LARGEST_STACK if compiled or batched or not on_cpu else LARGEST_ON_CPU,
    )


def _gains_by_16_bits(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether bfloat16 is the fastest dtype of an iteration on matrices of this shape and dtype."""
    if dtype == torch.float64 or min(shape) < SMALLEST_BFLOAT16:
        return False
    if not has_bfloat16_products(device):
        return False
    is_small = shape[0] * shape[1] < LARGE_MATRIX
    by_engine = is_small and device.type == "cpu" and dtype == torch.float32 and polar.has_engine()
    return not by_engine


def _find_schedule(method: str | Schedule | None) -> Schedule | None:
    """The steps of a method; None for "svd"."""
    if method is None:
        return DEFAULT
    if isinstance(method, str):
        return SCHEDULES.get(method)
    return tuple(method)


@call_while_tracing
def has_bfloat16_products(device: torch.device) -> bool:
    """Whether `device` has instructions for products of bfloat16; others widen every number first,
    which takes more than ten times as long as float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return True
    return has_bfloat16_instructions(platform.machine())


def check_method(name: str, method: Any) -> str | Schedule:
    """`method`, which is one of `polar_factor` or a schedule; else ValueError or TypeError."""
    example = "5 * [(3.4445, -4.7750, 2.0315)]"
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(
                f"{name}={method!r} is unknown; there are {', '.join(METHODS)}, or a schedule such "
                f"as {example}"
            )
        return method
    is_list = isinstance(method, Sequence)
    if not is_list or not method or not all(map(_is_step, method)):
        kind = ValueError if is_list else TypeError
        raise kind(
            f"{name}={method!r} is no schedule: it needs three finite numbers (a, b, c) per step, "
            f"such as {example}"
        )
    schedule: Schedule = method
    return schedule


def check_optional_method(name: str, method: Any) -> str | Schedule | None:
    """As `check_method`; None is another way of choosing."""
    return None if method is None else check_method(name, method)


Method = Annotated[str | Schedule | None, CheckedBy(check_optional_method)]  # as an argument's hint


def _is_step(step: object) -> bool:
    if not isinstance(step, Sequence) or len(step) != 3:
        return False
    return all(isinstance(number, int | float) and isfinite(number) for number in step)


def promote(x: Tensor) -> Tensor:
    """Return `x` in the dtype of norms: float32, or float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dualize(gradient: Tensor, *, method: str = "ns") -> Tensor:
    """Duality map of a core or a linear layer: sqrt(fan_out / fan_in) U V^T for each block of
    `(..., fan_out, fan_in)`.

    >>> dual = dualize(torch.randn(3, 8, 2))
    >>> torch.linalg.matrix_norm(dual, 2).round(decimals=2)  # sqrt(8 / 2) in each block
    tensor([2., 2., 2.])
    """
    require_real("gradient", gradient, 2)
    polar = polar_factor(gradient, method=method)
    m, n = gradient.shape[-2:]
    return sqrt(m / max(n, 1)) * polar


def dual_norm(gradient: Tensor) -> Tensor:
    """Dual norm of the gradient of a core or a linear layer, 0-D: `<G, T>`, the change of the loss
    to first order, is at most this for a step T of norm 1, and `dualize(G)` has it.

    sqrt(fan_out / fan_in) times the nuclear norm, the sum of the singular values, added over all
    blocks of `(..., fan_out, fan_in)`. Where the loss is below `<G, T> + sharpness |T|^2 / 2`, the
    step that decreases this most is -(dual_norm(G) / sharpness) dualize(G). Source: MD,
    definition 1 and proposition 1.

    >>> g = torch.randn(3, 8, 2)
    >>> bool((dual_norm(g) - (g * dualize(g)).sum()).abs() < 1e-2)
    True
    """
    require_real("gradient", gradient, 2)
    m, n = gradient.shape[-2:]
    nuclear: Tensor = torch.linalg.matrix_norm(promote(gradient), "nuc")
    return sqrt(m / max(n, 1)) * nuclear.sum()


def dualize_embedding(gradient: Tensor) -> Tensor:
    """Duality map of an embedding `(tokens, width)` under the l1->RMS norm: each vector to unit
    RMS, zero to zero.

    >>> dualize_embedding(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.8485, 1.1314],
            [0.0000, 0.0000]])
    """
    require_real("gradient", gradient, 1)
    if gradient.numel() == 0:
        return gradient.clone()
    x = promote(gradient)
    x = x / _one_for_zero(x.abs().amax(dim=-1, keepdim=True))  # or its squares overflow
    mean_square = x.square().mean(dim=-1, keepdim=True)  # (tokens, 1)
    return (x * _one_for_zero(mean_square).rsqrt()).to(gradient.dtype)


def dualize_convolution(gradient: Tensor, *, method: str = "ns") -> Tensor:
    """Duality map of a convolution `(c_out, c_in, *kernel)`: (1 / k) sqrt(c_out / c_in) U V^T for
    each of the k slices, one for each kernel position (k^2 in the paper's Conv2D).

    >>> slices = dualize_convolution(torch.randn(8, 2, 3, 3)).flatten(2).permute(2, 0, 1)
    >>> torch.linalg.matrix_norm(slices, 2)[:2].mul(9).round(decimals=2)
    tensor([2., 2.])
    """
    require_real("gradient", gradient, 3)
    slices = gradient.flatten(2).permute(2, 0, 1)  # (k, c_out, c_in)
    duals = dualize(slices, method=method) / slices.shape[0]  # the norms of k slices add up
    return duals.permute(1, 2, 0).reshape(gradient.shape)


def spectral_bound(matrix: Tensor) -> Tensor:
    """The Schatten-32 norm |(G G^T)^8|_F^(1/16) of the last two dimensions, `(...)`: the spectral
    norm, from above.

    Never below it (but for rounding), at most min(m, n)^(1/32) times it, where all singular values
    are equal; 0.3 % above on average for the updates of Adam. Four products of the short side.

    >>> g = torch.randn(3, 64, 256)
    >>> ratio = spectral_bound(g) / torch.linalg.matrix_norm(g, 2)
    >>> bool((ratio > 0.99999).all() and (ratio < 1.05).all())
    True
    """
    require_real("matrix", matrix, 2)
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    x = promote(matrix)
    largest = _one_for_zero(x.abs().amax(dim=(-2, -1), keepdim=True))  # (..., 1, 1)
    x = x / largest
    # P = G G^T or G^T G, (..., short, short), is squared three times. Each time it is divided by
    # its trace first, so that no power is far from 1; the scale is the product of those traces:
    # |G| = scale |P^8|_F^(1/16), with trace(P)^(1/2) trace(P^2)^(1/4) trace(P^4)^(1/8) in scale.
    power = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    scale = largest
    for n in (2, 4, 8):
        trace = _one_for_zero(power.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None])
        scale = scale * trace ** (1 / n)
        power = power / trace
        power = power @ power
    bound: Tensor = scale[..., 0, 0] * torch.linalg.matrix_norm(power) ** (1 / 16)
    return bound


def _one_for_zero(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def _of_unit_size(x: Tensor) -> Tensor:
    """Each matrix times a power of two, exactly, so that its largest entry is near 1."""
    largest = x.abs().amax(dim=(-2, -1), keepdim=True).double()  # (..., 1, 1)
    _, exponent = torch.frexp(largest)
    limit = -round(log2(torch.finfo(x.dtype).tiny))  # both 2^limit and 2^-limit are normal numbers
    scale = torch.pow(2.0, -exponent.clamp(-limit, limit).double())
    return x * scale.to(x.dtype)


def _is_of_safe_size(x: Tensor) -> bool:
    """Whether no norm of a schedule underflows or overflows as it is: then a power of two changes
    no bit. A plain tensor on a CPU can be asked for less than `_of_unit_size` takes."""
    if x.dtype == torch.float16 or torch.compiler.is_compiling():
        return False
    if not (x.is_cpu and is_plain(x)):
        return False
    norms = torch.linalg.vector_norm(x, dim=(-2, -1))
    return bool(((norms > 1e-10) & (norms < 1e10)).all())


def _iterate(x: Tensor, schedule: Schedule) -> Tensor:
    """X <- a X + (b G + c G^2) X, G = X X^T of the short side, from X / |X|_F on.

    In the order of torch.optim.Muon, to equal it bit for bit. Other orders of the same products are
    not safe where numbers have 8 bits: (a I + b G + c G^2) X rounds a X twice, and several steps on
    one Gram matrix (G <- P G P) blow its rounding up, to singular values of any size.
    """
    is_stack = x.ndim == 3
    product = torch.bmm if is_stack else torch.mm
    add = torch.baddbmm if is_stack else torch.addmm
    x = x / _one_for_zero(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True))
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    for a, b, c in schedule:
        gram = product(x, x.mT)  # (..., short, short)
        polynomial = add(gram, gram, gram, beta=b, alpha=c) if c else b * gram  # b G + c G^2
        x = add(x, polynomial, x, beta=a)  # (..., short, long)
    return x if wide else x.mT


def _svd(x: Tensor) -> Tensor:
    """By singular values. As of an iteration, what is not finite gives NaN in its matrix alone."""
    is_infinite = ~x.isfinite().all(dim=(-2, -1), keepdim=True)  # (..., 1, 1), NaN too
    x = x.masked_fill(is_infinite, 0.0)
    wide = x.shape[-2] <= x.shape[-1]
    # (..., short, short), (..., short), (..., short, long)
    u, s, vh = torch.linalg.svd(x if wide else x.mT, full_matrices=False)
    tolerance = s[..., :1] * max(x.shape[-2:]) * torch.finfo(x.dtype).eps
    in_rank = (s > tolerance).to(x.dtype)  # the singular values that are not rounding
    factors = torch.matmul(u * in_rank.unsqueeze(-2), vh)
    return (factors if wide else factors.mT).masked_fill(is_infinite, nan)
