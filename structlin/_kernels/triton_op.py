"""The Triton products as one operator for a whole structured layer, with its gradient as a second
operator.

    multiply(x, cores, bias)        y = W(cores) x + bias              linear in x and in each core
    gradients(dy, x, cores)         dx, dcores, dbias of <dy, y>       linear in dy, x and each core

Because everything is linear in each argument, the gradient of `gradients` needs nothing new. With u
the cotangent of dx and u_i that of dcore_i, `<u, dx> + sum_i <u_i, dcore_i>` is `<dy, D>` with

    D = W(cores) u + sum_i W(cores with u_i in place of core i) x

so its gradient in dy is D, and its other gradients are `gradients` again. The layer is
differentiable any number of times.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._structure import Structure
from .op import count_flops, steps_of


def available(x: Tensor, structure: Structure) -> bool:
    """On a GPU whose products have passed their test; not while exporting, nor where derivatives
    are not taken by autograd's backward pass."""
    if not x.is_cuda or torch.compiler.is_exporting():
        return False
    if not torch.compiler.is_compiling() and (
        torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    ):
        return False
    from . import triton_check, triton_stages

    return triton_check.available(x) and triton_stages.supported(structure.program.numbers)


def apply(structure: Structure, x: Tensor, cores: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """`x W^T + bias` for x `(..., in_features)`."""
    rows = x if x.ndim == 2 else x.reshape(-1, structure.in_features)  # (tokens, in_features)
    leaves = [x, *cores] if bias is None else [x, *cores, bias]
    keep = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    y: Tensor = multiply(rows, list(cores), bias, structure.program.numbers, keep)[0]
    return y if x.ndim == 2 else y.view(*x.shape[:-1], structure.out_features)


def _multiply(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, program: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor]:
    """`x W^T + bias` and, if `keep`, the middle that the gradient reads.

    Args:
        x: `(tokens, in_features)`.
        program: `Program.numbers`.
    """
    from . import triton_stages

    cores = [core.contiguous() for core in cores]
    y, middle = triton_stages.forward(program, cores, x.contiguous(), bias)
    return y, middle if keep else middle.new_empty(0)


multiply = torch.library.custom_op("structlin::multiply", _multiply, mutates_args=())


def _gradients(
    dy: Tensor,
    x: Tensor,
    cores: Sequence[Tensor],
    middle: Tensor,
    program: Sequence[int],
    wants: Sequence[bool],
) -> list[Tensor]:
    """dx, one dcore for each core, dbias; each empty if `wants`, (x, cores, bias), says that nobody
    asks for it."""
    from . import triton_stages

    x, dy, cores = x.contiguous(), dy.contiguous(), [core.contiguous() for core in cores]
    dx, dcores = triton_stages.backward(program, cores, x, middle, dy, (wants[0], wants[1]))
    return [dx, *dcores, dy.sum(0) if wants[2] else dy.new_empty(0)]


gradients = torch.library.custom_op("structlin::gradients", _gradients, mutates_args=())


@multiply.register_fake
def _(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, program: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0]  # len(x) would make it a constant
    widths = [prod(step[:3]) for step in steps_of(program)[1:]]  # that each core reads
    middle = tokens * sum(widths) if keep else 0
    return x.new_empty(tokens, program[1]), x.new_empty(middle)


@gradients.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    cores: Sequence[Tensor],
    middle: Tensor,
    program: Sequence[int],
    wants: Sequence[bool],
) -> list[Tensor]:
    of_x, of_cores, of_bias = wants
    dx = x.new_empty(x.shape if of_x else 0)
    dcores = [core.new_empty(core.shape if of_cores else 0) for core in cores]
    return [dx, *dcores, x.new_empty(dy.shape[1] if of_bias else 0)]


@register_flop_formula(torch.ops.structlin.multiply)
def _(x: Any, cores: Any, bias: Any, program: Sequence[int], keep: bool, **_: Any) -> int:
    return sum(count_flops(x, program))


@register_flop_formula(torch.ops.structlin.gradients)
def _(
    dy: Any,
    x: Any,
    cores: Any,
    middle: Any,
    program: Sequence[int],
    wants: Sequence[bool],
    **_: Any,
) -> int:
    flops = count_flops(x, program)
    again = sum(flops[:-1]) if wants[1] and not middle[0] else 0
    return sum(flops) * (wants[0] + wants[1]) + again


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, cores, bias, ctx.program, _ = inputs
    ctx.set_materialize_grads(False)  # nobody differentiates the middle
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, output[1], *cores)


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    dx, dcores, dbias = _wanted(ctx, dy, needs[0], any(needs[1]), ctx.has_bias and needs[2])
    return dx, dcores, dbias, None, None


def _wanted(
    ctx: Any, dy: Tensor | None, *wants: bool
) -> tuple[Tensor | None, Sequence[Tensor | None], Tensor | None]:
    """The gradients of x, the cores and the bias, each None if nobody asks for it."""
    x, middle, *cores = ctx.saved_tensors
    if dy is None:
        return None, [None] * len(cores), None
    dx, *dcores, dbias = gradients(dy, x, cores, middle, ctx.program, list(wants))
    return (
        dx if wants[0] else None,
        dcores if wants[1] else [None] * len(cores),
        dbias if wants[2] else None,
    )


multiply.register_autograd(_backward, setup_context=_save)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    dy, x, cores, _, ctx.program, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, *cores)


def _backward_of_gradients(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    dy, x, *cores = ctx.saved_tensors
    u, *each, u_bias = (None if c is None or c.numel() == 0 else c for c in cotangents)
    d_dy, d_x, d_cores = (
        torch.zeros_like(dy),
        torch.zeros_like(x),
        [torch.zeros_like(core) for core in cores],
    )
    if u_bias is not None:
        d_dy = d_dy + u_bias
    terms: list[tuple[int | None, Tensor, list[Tensor]]] = [] if u is None else [(None, u, cores)]
    terms += [(i, x, [*cores[:i], c, *cores[i + 1 :]]) for i, c in enumerate(each) if c is not None]
    for i, at, factors in terms:  # the term of D with u in place of x, or of core i
        d_dy = d_dy + multiply(at, factors, None, ctx.program, False)[0]
        dx, *dcores, _ = gradients(
            dy, at, factors, x.new_empty(0), ctx.program, [True, True, False]
        )
        d_x = d_x if i is None else d_x + dx
        d_cores = [
            total if j == i else total + d
            for j, (total, d) in enumerate(zip(d_cores, dcores, strict=True))
        ]
    return d_dy, d_x, d_cores, None, None, None


gradients.register_autograd(_backward_of_gradients, setup_context=_save_gradients)
