"""One operator for a whole structured layer: `y = x W^T + bias`, with its gradient as a second operator.

    multiply(x, cores, bias)        y = W(cores) x + bias                     linear in x and in each core
    gradients(dy, x, cores)         dx, dcores, dbias of <dy, y>              linear in dy, x and each core

Because everything is linear in each argument, the gradient of `gradients` needs nothing new. With u the cotangent of
dx and u_i that of dcore_i, `<u, dx> + sum_i <u_i, dcore_i>` is `<dy, D>` with

    D = W(cores) u + sum_i W(cores with u_i in place of core i) x

so its gradient in dy is D, and its other gradients are `gradients` again. The layer is differentiable any number of
times.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..structure import Structure
from . import cost, stages
from .layout import Stages, decode


@torch.library.custom_op("structlin::multiply", mutates_args=())
def multiply(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, structure: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """`x W^T + bias` and, if `keep`, the middle that the gradient reads.

    Args:
        x: `(tokens, in_features)`.
        structure: `layout.encode` of a `Structure`.
    """
    whole, at = decode(structure)
    x, cores = x.contiguous(), [_aligned(core) for core in cores]
    if _on_triton(whole, x):
        from . import triton_stages

        y, middle = triton_stages.forward(whole, cores, x, bias)
        return y, middle if keep else middle.new_empty(0)
    return stages.forward(at, cores, x, bias, keep=keep, **_choice(at, x))


@torch.library.custom_op("structlin::gradients", mutates_args=())
def gradients(
    dy: Tensor, x: Tensor, cores: Sequence[Tensor], middle: Tensor, structure: str, wants: Sequence[bool]
) -> list[Tensor]:
    """dx, one dcore for each core, dbias; each empty if `wants`, (x, cores, bias), says that nobody asks for it."""
    whole, at = decode(structure)
    x, dy, cores = x.contiguous(), dy.contiguous(), [_aligned(core) for core in cores]
    if _on_triton(whole, x):
        from . import triton_stages

        dx, dcores = triton_stages.backward(whole, cores, x, middle, dy, (wants[0], wants[1]))
        dbias = dy.sum(0) if wants[2] else dy.new_empty(0)
    else:
        dx, dcores, dbias = stages.backward(at, cores, x, middle, dy, wants=wants, **_choice(at, x))
    return [dx, *dcores, dbias]


def _aligned(core: Tensor) -> Tensor:
    """Contiguous, at a multiple of 64 bytes: elsewhere, as in a file mapped into memory, MKL rounds differently."""
    core = core.contiguous()
    return core if core.data_ptr() % 64 == 0 else core.clone()


def _on_triton(structure: Structure, x: Tensor) -> bool:
    """On a GPU whose products have passed their test; the same answer forward and backward."""
    if not x.is_cuda:
        return False
    from . import triton_check, triton_stages

    return triton_check.available(x) and triton_stages.supported(structure)


def _choice(at: Stages, x: Tensor) -> dict[str, Any]:
    device = x.device.type
    return {"columns": cost.in_columns(at, x.dtype, device), "chunk": cost.chunk(at, device, x.dtype.itemsize)}


@multiply.register_fake
def _(x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, structure: str, keep: bool) -> tuple[Tensor, Tensor]:
    at = decode(structure)[1]
    return x.new_empty(len(x), at.out_features), x.new_empty(len(x) * at.middle if keep else 0)


@gradients.register_fake
def _(
    dy: Tensor, x: Tensor, cores: Sequence[Tensor], middle: Tensor, structure: str, wants: Sequence[bool]
) -> list[Tensor]:
    of_x, of_cores, of_bias = wants
    dx = x.new_empty(x.shape if of_x else 0)
    dcores = [core.new_empty(core.shape if of_cores else 0) for core in cores]
    return [dx, *dcores, x.new_empty(dy.shape[1] if of_bias else 0)]


@register_flop_formula(torch.ops.structlin.multiply)
def _(x: Any, cores: Any, bias: Any, structure: str, keep: bool, **_: Any) -> int:
    return int(x[0]) * decode(structure)[0].flops


@register_flop_formula(torch.ops.structlin.gradients)
def _(dy: Any, x: Any, cores: Any, middle: Any, structure: str, wants: Sequence[bool], **_: Any) -> int:
    whole = decode(structure)[0]
    again = sum(core.flops for core in whole.cores[:-1]) if wants[1] and not middle[0] else 0
    return int(x[0]) * (whole.flops * (wants[0] + wants[1]) + again)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, cores, bias, ctx.structure, _ = inputs
    ctx.set_materialize_grads(False)  # nobody differentiates the middle
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, output[1], *cores)


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Any, ...]:
    x, middle, *cores = ctx.saved_tensors
    if dy is None:
        return None, [None] * len(cores), None, None, None
    needs = ctx.needs_input_grad
    wants = [needs[0], any(needs[1]), ctx.has_bias and needs[2]]
    dx, *dcores, dbias = gradients(dy, x, cores, middle, ctx.structure, wants)
    return (
        dx if wants[0] else None,
        dcores if wants[1] else [None] * len(cores),
        dbias if wants[2] else None,
        None,
        None,
    )


multiply.register_autograd(_backward, setup_context=_save)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    dy, x, cores, _, ctx.structure, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, *cores)


def _backward_of_gradients(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    dy, x, *cores = ctx.saved_tensors
    u, *each, u_bias = (None if c is None or c.numel() == 0 else c for c in cotangents)
    d_dy, d_x, d_cores = torch.zeros_like(dy), torch.zeros_like(x), [torch.zeros_like(core) for core in cores]
    if u_bias is not None:
        d_dy = d_dy + u_bias
    terms: list[tuple[int | None, Tensor, list[Tensor]]] = [] if u is None else [(None, u, cores)]
    terms += [(i, x, [*cores[:i], c, *cores[i + 1 :]]) for i, c in enumerate(each) if c is not None]
    for i, at, factors in terms:  # the term of D with u in place of x, or of core i
        d_dy = d_dy + multiply(at, factors, None, ctx.structure, False)[0]
        dx, *dcores, _ = gradients(dy, at, factors, x.new_empty(0), ctx.structure, [True, True, False])
        d_x = d_x if i is None else d_x + dx
        d_cores = [total if j == i else total + d for j, (total, d) in enumerate(zip(d_cores, dcores, strict=True))]
    return d_dy, d_x, d_cores, None, None, None


gradients.register_autograd(_backward_of_gradients, setup_context=_save_gradients)
