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
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import register_flop_formula

from .._structure import Structure
from . import stages
from .layout import Stages, decode

FEW = 1 << 15  # numbers in x, on a CPU, up to which calls cost more than what they compute
CACHE = 1 << 21  # bytes of the widest activation of a chunk, on a CPU


def takes(x: Tensor) -> bool:
    """Not few tokens on a CPU; not while exporting, so that what is exported needs no structlin; nor where derivatives
    are not taken by autograd's backward pass: in `torch.func`'s transforms but vmap, and in forward mode."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    if torch.autograd.forward_ad._current_level >= 0 or (x.device.type == "cpu" and x.numel() <= FEW):
        return False
    transforms = torch._C._functorch.get_interpreter_stack() if torch._C._are_functorch_transforms_active() else []
    return all(transform.key() == torch._C._functorch.TransformType.Vmap for transform in transforms)


def apply(structure: Structure, x: Tensor, cores: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """`x W^T + bias`: by `multiply` in a program that is compiled, traced or watched; else by its body, without the
    dispatcher, which takes longer than the product of a few tokens."""
    rows = x if x.ndim == 2 else x.reshape(-1, structure.in_features)  # (tokens, in_features)
    leaves = [x, *cores] if bias is None else [x, *cores, bias]
    keep = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    if _watched(leaves):
        y: Tensor = multiply(rows, list(cores), bias, structure.text, keep)[0]
    elif keep:
        y = Product.apply(rows, bias, structure.text, keep, *cores)  # type: ignore[no-untyped-call]
    else:
        y = _multiply(rows, cores, bias, structure.text, keep)[0]
    return y if x.ndim == 2 else y.view(*x.shape[:-1], structure.out_features)


def _watched(tensors: Sequence[Tensor]) -> bool:
    """Is the program compiled, exported, traced, transformed, counted or faked, and not just run?"""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or torch._C._are_functorch_transforms_active():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or any(type(t) not in (Tensor, Parameter) for t in tensors)


def _multiply(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, structure: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """`x W^T + bias` and, if `keep`, the middle that the gradient reads.

    Args:
        x: `(tokens, in_features)`.
        structure: `Structure.text`.
    """
    whole, at = decode(structure)
    x, cores = x.contiguous(), [_aligned(core) for core in cores]
    if _on_triton(whole, x):
        from . import triton_stages

        y, middle = triton_stages.forward(whole, cores, x, bias)
        return y, middle if keep else middle.new_empty(0)
    return stages.forward(at, cores, x, bias, keep=keep, **_choice(at, x))


multiply = torch.library.custom_op("structlin::multiply", _multiply, mutates_args=())


def _gradients(
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


gradients = torch.library.custom_op("structlin::gradients", _gradients, mutates_args=())


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
    columns = at.in_columns and x.dtype in (torch.float32, torch.float64)
    whole = x.device.type != "cpu" or all(core.batch * core.repeat == 1 for core in at.cores)
    chunk = 1 << 62 if whole else max(32, CACHE // (x.dtype.itemsize * at.width) // 32 * 32)
    return {"columns": columns, "chunk": chunk}


@multiply.register_fake
def _(x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, structure: str, keep: bool) -> tuple[Tensor, Tensor]:
    at = decode(structure)[1]
    tokens = x.shape[0]  # len(x) would make it a constant
    return x.new_empty(tokens, at.out_features), x.new_empty(tokens * at.middle if keep else 0)


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
    needs = ctx.needs_input_grad
    dx, dcores, dbias = _wanted(ctx, dy, needs[0], any(needs[1]), ctx.has_bias and needs[2])
    return dx, dcores, dbias, None, None


def _wanted(ctx: Any, dy: Tensor | None, *wants: bool) -> tuple[Tensor | None, Sequence[Tensor | None], Tensor | None]:
    """The gradients of x, the cores and the bias, each None if nobody asks for it."""
    x, middle, *cores = ctx.saved_tensors
    if dy is None:
        return None, [None] * len(cores), None
    operator = gradients if torch.is_grad_enabled() or _watched([dy, x, *cores]) else _gradients
    dx, *dcores, dbias = operator(dy, x, cores, middle, ctx.structure, list(wants))
    return dx if wants[0] else None, dcores if wants[1] else [None] * len(cores), dbias if wants[2] else None


multiply.register_autograd(_backward, setup_context=_save)


class Product(torch.autograd.Function):
    """`multiply` without its operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, structure: str, keep: bool, *cores: Tensor) -> Tensor:
        found = _multiply(x, cores, bias, structure, keep)
        _save(ctx, (x, cores, bias, structure, keep), found)
        return found[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        x, bias, _, _, *cores = ctx.needs_input_grad
        dx, dcores, dbias = _wanted(ctx, dy, x, any(cores), bias)
        return dx, dbias, None, None, *dcores


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


@multiply.register_vmap
def _(info: Any, dims: Sequence[Any], x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, *rest: Any) -> Any:
    of_x, *others = dims
    if any(dim is not None for dim in tree_leaves(others)):
        return _one_by_one(multiply, info, dims, x, cores, bias, *rest)
    x = x.movedim(of_x, 0)  # more tokens
    y, middle = multiply(x.flatten(0, 1), cores, bias, *rest)
    return (y.unflatten(0, x.shape[:2]), middle), (0, None)


@gradients.register_vmap
def _(info: Any, dims: Sequence[Any], *args: Any) -> Any:
    return _one_by_one(gradients, info, dims, *args)


def _one_by_one(operator: Any, info: Any, dims: Sequence[Any], *args: Any) -> Any:
    """The operator for every member of a batch of arguments, and where the batch lies in what it returns."""
    flat, spec = tree_flatten(args)
    flat_dims = tree_leaves(dims)

    def member(n: int) -> Any:
        return tree_unflatten([a if d is None else a.select(d, n) for a, d in zip(flat, flat_dims, strict=True)], spec)

    results = [operator(*member(n)) for n in range(info.batch_size)]
    stacked = type(results[0])(torch.stack(part) for part in zip(*results, strict=True))
    return stacked, type(stacked)(0 for _ in stacked)
