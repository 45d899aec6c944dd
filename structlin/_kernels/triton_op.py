"""A whole structured layer on the Triton products as one operator, its gradient as a second one.

    multiply(x, cores, bias)        y = W(cores) x + bias              linear in x and in each core
    gradients(dy, x, cores)         dx, dcores, dbias of <dy, y>       linear in dy, x and each core

The gradient of `gradients` needs nothing new. With u the cotangent of dx, u_i that of dcore_i and v
that of dbias, `<u, dx> + sum_i <u_i, dcore_i> + <v, dbias>` is `<dy, D>` with

    D = W(cores) u + sum_i W(cores with u_i in place of core i) x + v

so its gradient in dy is D, and its others are those of D, any number of times.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._structure import Structure
from . import triton_check
from .op import count_flops, steps_of


def available(x: Tensor, structure: Structure) -> bool:
    """On a GPU whose products have passed their test; not while exporting, nor where derivatives
    are not taken by autograd's backward pass."""
    if not x.is_cuda or x.dtype not in triton_check.TOLERANCE or torch.compiler.is_exporting():
        return False
    if not torch.compiler.is_compiling() and (
        torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    ):
        return False
    from . import triton_stages

    numbers = structure.program.numbers
    return triton_check.usable(x.device, x.dtype) and triton_stages.supported(numbers)


def apply(structure: Structure, x: Tensor, cores: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """`x W^T + bias` for x `(..., in_features)`."""
    rows = x if x.ndim == 2 else x.reshape(-1, structure.in_features)  # (tokens, in_features)
    leaves = [x, *cores] if bias is None else [x, *cores, bias]
    keep = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    y: Tensor = multiply(rows, list(cores), bias, structure.program.numbers, keep)[0]
    return y if x.ndim == 2 else y.view(*x.shape[:-1], structure.out_features)


@torch.library.custom_op("structlin::multiply", mutates_args=())
def multiply(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, program: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor]:
    """`x W^T + bias` of x `(tokens, in_features)` and, if `keep`, the middle that the gradient
    reads; `program` is `Program.numbers`."""
    from . import triton_stages

    y, middle = triton_stages.forward(program, cores, x, bias)
    return y, middle if keep else middle.new_empty(0)


@torch.library.custom_op("structlin::gradients", mutates_args=())
def gradients(
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

    dx, dcores = triton_stages.backward(program, cores, x, middle, dy, (wants[0], wants[1]))
    return [dx, *dcores, dy.sum(0) if wants[2] else dy.new_empty(0)]


# ---- what autograd, torch.compile and counters know of them --------------------------------------


def _fake_multiply(
    x: Tensor, cores: Any, bias: Any, program: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0]  # len(x) would make it a constant
    middle = sum(prod(step[:3]) for step in steps_of(program)[1:])  # that the later cores read
    return x.new_empty(tokens, program[1]), x.new_empty(tokens * middle if keep else 0)


def _fake_gradients(
    dy: Tensor, x: Tensor, cores: Any, middle: Any, program: Any, wants: Sequence[bool]
) -> list[Tensor]:
    of_x, of_cores, of_bias = wants
    found = [x.new_empty(core.shape if of_cores else 0) for core in cores]
    ends = x.new_empty(x.shape if of_x else 0), x.new_empty(dy.shape[1] if of_bias else 0)
    return [ends[0], *found, ends[1]]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, cores, bias, ctx.program, _ = inputs
    ctx.set_materialize_grads(False)  # nobody differentiates the middle
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, output[1], *cores)


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Any, ...]:
    x, middle, *cores = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wants = [needs[0], any(needs[1]), ctx.has_bias and needs[2]]
    if dy is None:
        return None, [None] * len(cores), None, None, None
    dx, *dcores, dbias = gradients(dy, x, cores, middle, ctx.program, wants)
    each = dcores if wants[1] else [None] * len(cores)
    return dx if wants[0] else None, each, dbias if wants[2] else None, None, None


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    dy, x, cores, _, ctx.program, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, *cores)


def _backward_of_gradients(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    dy, *leaves = ctx.saved_tensors
    _, of_x, of_cores, *_ = ctx.needs_input_grad
    u, *each, v = (None if c is None or c.numel() == 0 else c for c in cotangents)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # cotangents may depend on x and the cores; D is differentiated in these alone
        x, *cores = (leaf.view_as(leaf) for leaf in leaves)
        terms = [] if u is None else [(u, cores)]
        terms += [
            (x, [*cores[:i], c, *cores[i + 1 :]]) for i, c in enumerate(each) if c is not None
        ]
        D = torch.zeros_like(dy) if v is None else v.expand_as(dy)
        for at, factors in terms:
            D = D + multiply(at, factors, None, ctx.program, True)[0]
        wanted = [at for at, of in zip((x, *cores), (of_x, *of_cores), strict=True) if of]
        options = {"create_graph": again, "allow_unused": True}
        found = iter(
            torch.autograd.grad(D, wanted, dy, **options) if wanted and D.requires_grad else ()
        )
    d_x, *d_cores = (next(found, None) if of else None for of in (of_x, *of_cores))
    return D if again else D.detach(), d_x, d_cores, None, None, None


@register_flop_formula(torch.ops.structlin.multiply)
def _(x: Any, cores: Any, bias: Any, program: Sequence[int], keep: bool, **_: Any) -> int:
    return sum(count_flops(x, program))


@register_flop_formula(torch.ops.structlin.gradients)
def _(
    dy: Any, x: Any, cores: Any, middle: Any, program: Any, wants: Sequence[bool], **_: Any
) -> int:
    flops = count_flops(x, program)
    again = sum(flops[:-1]) if wants[1] and not middle[0] else 0
    return sum(flops) * (wants[0] + wants[1]) + again


multiply.register_fake(_fake_multiply)
gradients.register_fake(_fake_gradients)
multiply.register_autograd(_backward, setup_context=_save)
gradients.register_autograd(_backward_of_gradients, setup_context=_save_gradients)
