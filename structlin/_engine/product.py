"""Structure and cores -> numbers: the definition first, then what chooses, checks and forms W."""

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._structure.structure import SILU_RMS, Move, Program, Structure
from . import operators
from .operands import check_bias, check_cores, check_input
from .operators import Affine

NEAR = 0.7  # of dense's FLOPs, from which on W is formed where there are many tokens


def multiply(program: Program, cores: Sequence[Tensor], x: Tensor) -> Tensor:
    """`W x` by one batched product for each core, between fixed permutations and activations.

    Args:
        cores: `(batch, fan_out, fan_in)` each.
        x: `(..., in_features)`.

    Returns:
        `(..., out_features)`.
    """
    columns, rows = program.padding
    h = F.pad(x, (0, columns)) if columns else x
    for n, (step, core) in enumerate(zip(program.steps, cores, strict=True)):
        if n and program.between:
            h = activate(h)
        # (batch, tokens, repeat, fan_out) of the core before -> (batch, tokens * repeat, fan_in)
        h = _permute(h, step.move).reshape(step.batch, -1, step.fan_in)
        if not torch.compiler.is_compiling() and 1 not in h.stride()[1:]:
            h = h.contiguous()  # or torch.bmm goes through it block by block
        h = torch.bmm(h, core.transpose(-1, -2))  # -> (batch, tokens * repeat, fan_out)
    y = _permute(h, program.final_move).reshape(*x.shape[:-1], program.out_features + rows)
    return y[..., : program.out_features] if rows else y


def activate(h: Tensor) -> Tensor:
    """The activation that may stand between cores; it keeps unit RMS."""
    return F.silu(h) * (1 / SILU_RMS)


def _permute(h: Tensor, move: Move) -> Tensor:
    return h.reshape(move.sizes).permute(move.order) if move.order else h


def define(affine: Affine, x: Tensor) -> Tensor:
    """`W x + bias` by the loop: what every engine computes."""
    y = multiply(affine.program, effective_cores(affine), x)
    return y if affine.bias is None else y + affine.bias


def effective_cores(affine: Affine) -> Sequence[Tensor]:
    """The cores that x is multiplied by: normalised, where there are gains."""
    _, cores, _, gains, sigmas = affine
    return cores if gains is None else normalise(cores, gains, sigmas)


def normalise(cores: Sequence[Tensor], gains: Tensor, sigmas: Sequence[float]) -> list[Tensor]:
    """`gain * min(1, sigma / RMS(core)) * core` for each core, with a gradient also at zero."""
    return [
        scale_core(core, find_norm(core), gain, sigma * sqrt(core.numel()))
        for core, gain, sigma in zip(cores, gains, sigmas, strict=True)
    ]


def find_norm(core: Tensor) -> Tensor:
    """The Frobenius norm, summed in float64, where the square of no float32 overflows."""
    dtype = torch.float32 if core.device.type == "mps" else torch.float64
    norm: Tensor = torch.linalg.vector_norm(_widen(core), dtype=dtype)
    return norm


def scale_core(core: Tensor, norm: Tensor, gain: Tensor, largest: float) -> Tensor:
    """`gain * core`, at a norm of at most `largest`; `norm` is the core's own."""
    wide = _widen(core)
    scale: Tensor = largest / norm.clamp(min=largest) * gain  # none of it in 16 bits
    return (wide * scale.to(wide)).to(core.dtype)


def _widen(core: Tensor) -> Tensor:
    return core if core.dtype == torch.float64 else core.float()


def apply(
    structure: Structure, cores: Sequence[Tensor], x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`y = W x + bias` for every token, the fastest way; differentiable any number of times.

    Args:
        cores: one tensor `(batch, fan_out, fan_in)` per core of the structure.
        x: `(..., structure.in_features)`, any leading shape and strides, also no tokens at all.
        bias: `(structure.out_features,)`.

    Returns:
        `(..., structure.out_features)`. Under autocast of its dtype, as nn.Linear.

    Raises:
        ValueError: wrong last dimension of `x`, wrong number or shape of cores or bias, mixed
            devices or dtypes of the cores.
        TypeError: `x` is no tensor, or not floating point, or of another dtype than the cores
            (outside autocast).

    >>> from structlin import Kronecker
    >>> structure = Kronecker().structure(6, 6)
    >>> right, left = torch.randn(1, 3, 3), torch.randn(1, 2, 2)
    >>> x = torch.randn(5, 6)
    >>> y = apply(structure, [right, left], x)
    >>> torch.allclose(y, x @ torch.kron(left[0], right[0]).T, atol=1e-5)
    True
    """
    check_cores(structure, cores)
    check_input(x, structure.in_features, cores[0])
    check_bias(bias, structure.out_features, x.device)
    return compute(structure, Affine(structure.program, cores, bias), x)


def compute(structure: Structure, affine: Affine, x: Tensor) -> Tensor:
    """`apply`, its arguments taken to be right.

    Args:
        affine: its program is the structure's, or a narrower one, whose widths x, bias and the
            result have.
    """
    if torch._C._is_any_autocast_enabled():
        dtype = _find_autocast_dtype(x)
        if dtype is not None:
            affine = _cast(affine, dtype)
            x = x.to(dtype)
    program = affine.program
    bias = affine.bias
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
        affine = affine._replace(bias=bias)

    # the density is asked here too, since it spares most layers a call
    forms = structure.density >= NEAR and forms_matrix(structure, x.numel() // program.in_features)
    if not forms:
        if operators.pays(program, x):
            return operators.multiply(define, affine, x)
        if operators.views_pay(program, x):
            cores = effective_cores(affine)
            return operators.multiply_views(define, program, cores, bias, x)
    if x.is_nested:
        return map_jagged(partial(compute, structure, affine), x)
    cores = effective_cores(affine)
    if forms:
        matrix = to_dense(structure, cores)[: program.out_features, : program.in_features]
        return F.linear(x, matrix, bias)
    if structure.plain and not any(program.padding):
        for core in cores[:-1]:
            x = F.linear(x, core.squeeze(0))  # (..., fan_in) -> (..., fan_out)
        return F.linear(x, cores[-1].squeeze(0), bias)
    y = multiply(program, cores, x)
    return y if bias is None else y + bias


def _find_autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast, where it is on for the device of x.

    Autocast leaves float64 alone, and knows no meta device.
    """
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(affine: Affine, dtype: torch.dtype) -> Affine:
    """Cores and bias in a dtype; gains stay, as no product has them."""
    cores = [core.to(dtype) for core in affine.cores]
    bias = None if affine.bias is None else affine.bias.to(dtype)
    return affine._replace(cores=cores, bias=bias)


def map_jagged(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`product` of all tokens of a jagged nested tensor, nested as it is."""
    jagged: Any = x
    return torch.nested.nested_tensor_from_jagged(
        product(x.values()),
        jagged.offsets(),
        jagged.lengths(),
        jagged._ragged_idx,
        jagged._maybe_min_seqlen,
        jagged._maybe_max_seqlen,
    )


def forms_matrix(structure: Structure, tokens: int) -> bool:
    """Whether W is formed and multiplied by on any device: where the structure has nearly dense's
    FLOPs, and forming W pays.

    That is at `NEAR` of dense's FLOPs or more, and for at least as many tokens as the larger width.
    A compiled program makes one choice for all numbers of tokens, that for many.

    >>> from structlin import BTT, TT
    >>> btt, tt = BTT(rank=4).structure(1024, 1024), TT(rank=16).structure(1024, 1024)
    >>> forms_matrix(btt, 4096), forms_matrix(tt, 4096)
    (False, True)
    """
    if structure.density < NEAR or len(structure.cores) == 1 or structure.between is not None:
        return False
    widest = max(structure.in_features, structure.out_features)
    return torch.compiler.is_compiling() or tokens >= widest


def to_dense(structure: Structure, cores: Sequence[Tensor]) -> Tensor:
    """W, `(out_features, in_features)`, which `apply` multiplies by; differentiable in the cores.

    >>> from structlin import LowRank
    >>> v, u = torch.randn(1, 2, 6), torch.randn(1, 4, 2)
    >>> torch.allclose(to_dense(LowRank(rank=2).structure(6, 4), [v, u]), u[0] @ v[0])
    True
    """
    check_cores(structure, cores)
    structure.require_matrix("to_dense")
    form = structure.matrix
    # W is one einsum over the cores with all their axes apart, and over an identity for each axis
    # that x and y share, such as the blocks of a block-diagonal matrix
    factors = [core.reshape(shape) for core, shape in zip(cores, form.shapes, strict=True)]
    for size in form.identities:
        factors.append(torch.eye(size, dtype=cores[0].dtype, device=cores[0].device))
    operands: list[Any] = []  # factor, its axes, factor, its axes, ...: as torch.einsum takes them
    for factor, axes in zip(factors, form.axes, strict=True):
        operands += [factor, list(axes)]
    w = torch.einsum(*operands, list(form.result))  # (*axes of y, *axes of x)
    return w.reshape(structure.out_features, structure.in_features)
