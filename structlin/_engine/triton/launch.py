"""A whole structured layer on the Triton products as one operator, its gradient as a second one.

    multiply(x, cores, bias)        y = W(cores) x + bias, and what the later cores read
    gradients(dy, x, cores)         dx, dcores, dbias of <dy, y>

A layer whose kernels cannot be launched has PyTorch's products in their place. Derivatives of
derivatives are taken through the loop that is the definition.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from ..._structure.structure import Program, Structure
from ..cpu.operators import count_flops, differentiate, is_batch, is_transformed
from . import check
from .stages import backward, forward, nothing, plain

Loop = Callable[[Program, Sequence[Tensor], Tensor], Tensor]

# What derivatives of derivatives are taken through: every layer that ran, by its numbers
_loops: dict[tuple[int, ...], Callable[[Sequence[Tensor], Tensor], Tensor]] = {}


def available(x: Tensor, structure: Structure) -> bool:
    """On a GPU whose products have passed their test; not with an activation between the cores."""
    taken = x.is_cuda and x.dtype in check.TOLERANCE and structure.between is None
    numbers = structure.program.numbers
    return taken and not is_transformed() and check.usable(x.device, x.dtype, numbers)


def apply(
    loop: Loop, structure: Structure, x: Tensor, cores: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """`x W^T + bias` for x `(..., in_features)`; `loop` is the definition."""
    program = structure.program
    if not torch.compiler.is_compiling():
        _loops[program.numbers] = partial(loop, program)
    rows = x if x.ndim == 2 else x.reshape(-1, program.in_features)  # (tokens, in_features)
    leaves = [x, *cores] if bias is None else [x, *cores, bias]
    keep = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    y: Tensor = multiply(rows, list(cores), bias, program.numbers, keep)[0]
    return y if x.ndim == 2 else y.view(*x.shape[:-1], program.out_features)


def _multiply(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, program: Sequence[int], keep: bool
) -> list[Tensor]:
    """`x W^T + bias` of x `(tokens, in_features)` and, if `keep`, what each core but the first
    reads, for the gradient; `program` is `Program.numbers`."""
    found = _serve(x, program, partial(forward, program, cores, x, bias))
    return found if keep else found[:1]


def _gradients(
    dy: Tensor,
    x: Tensor,
    cores: Sequence[Tensor],
    middle: Sequence[Tensor],
    program: Sequence[int],
    wants: Sequence[bool],
) -> list[Tensor]:
    """dx, one dcore for each core, dbias; each empty if `wants`, (x, cores, bias), says that nobody
    asks for it."""
    found = _serve(x, program, partial(backward, program, cores, x, middle, dy, wants))
    return [*found, dy.sum(0) if wants[2] else dy.new_empty(0)]


def _serve(x: Tensor, program: Sequence[int], work: Callable[..., list[Tensor]]) -> list[Tensor]:
    """`work` on the kernels, or on PyTorch's products where one of this layer was refused, or on
    none where only shapes are asked for."""
    if isinstance(x, FakeTensor) or x.is_meta:
        return work(by=nothing)
    from .gemm import LaunchError, block_gemm

    layer = x.device, x.dtype, tuple(program)
    if layer not in check.refused:
        try:
            return work(by=block_gemm)
        except LaunchError as error:
            check.refuse(layer, error)
    return work(by=plain)


multiply = torch.library.custom_op("structlin::multiply", _multiply, mutates_args=())
gradients = torch.library.custom_op("structlin::gradients", _gradients, mutates_args=())


# ---- what autograd, torch.compile and counters know of them --------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, cores, _, ctx.program, _ = inputs
    ctx.set_materialize_grads(False)  # nobody differentiates the middle
    ctx.cores = len(cores)
    ctx.save_for_backward(x, *cores, *output[1:])


def _backward(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    (of_x, of_cores, of_bias, *_), dy = ctx.needs_input_grad, cotangents[0]
    cores, middle = rest[: ctx.cores], rest[ctx.cores :]
    if dy is None:
        return None, [None] * ctx.cores, None, None, None
    if torch.is_grad_enabled() or is_batch(dy):
        loop = _loops[tuple(ctx.program)]
        run = lambda x, *cores: loop(cores, x)  # noqa: E731
        dx, *dcores = differentiate(run, [x, *cores], [of_x, *of_cores], dy)
        return dx, dcores, dy.sum(0) if of_bias else None, None, None
    wants = [of_x, any(of_cores), of_bias]
    dx, *dcores, dbias = gradients(dy, x, cores, middle, ctx.program, wants)
    return dx, dcores, dbias if of_bias else None, None, None


@register_flop_formula(torch.ops.structlin.multiply)
def _(x: Sequence[int], *rest: Any, **_: Any) -> int:
    return sum(count_flops(x, rest[-2]))  # the program


@register_flop_formula(torch.ops.structlin.gradients)
def _(
    dy: Any, x: Any, cores: Any, middle: Any, program: Any, wants: Sequence[bool], **_: Any
) -> int:
    return sum(count_flops(x, program)) * (wants[0] + wants[1])


multiply.register_fake(_multiply)
gradients.register_fake(_gradients)
multiply.register_autograd(_backward, setup_context=_save)
