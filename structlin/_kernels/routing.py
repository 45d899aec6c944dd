"""The compiled routing of a mixture (`router.h`), as an operator that autograd and torch.compile
know."""

from typing import Any

import torch
from torch import Tensor

from .._experts import Routing, define_routing
from .op import available

torch.library.define(
    "structlin_cpu::route",
    "(Tensor logits, int top_k, float z, bool balanced) -> "
    "(Tensor weights, Tensor chosen, Tensor balance, Tensor slope)",
)
_route = torch.ops.structlin_cpu.route.default


def route(logits: Tensor, top_k: int, z: float, balanced: bool) -> Routing:
    """`define_routing`, by the engine where there is one."""
    if not available(logits):
        return define_routing(logits, top_k, z, balanced)
    weights, chosen, balance, _ = _route(logits, top_k, z, balanced)
    return weights, chosen, balance


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, *ctx.options = inputs
    weights, chosen, _, slope = output
    ctx.save_for_backward(logits, weights, chosen, slope)
    ctx.mark_non_differentiable(chosen, slope)


def _backward(ctx: Any, dweights: Tensor, _: Any, dbalance: Tensor, __: Any) -> tuple[Any, ...]:
    logits, weights, chosen, slope = ctx.saved_tensors
    if torch.is_grad_enabled():  # derivatives of derivatives
        top_k, z, balanced = ctx.options
        made, _, balance = define_routing(logits, top_k, z, balanced, chosen)
        count = 1 + balanced  # the balance is a constant where nobody asked for it
        given = (made, balance)[:count], logits, (dweights, dbalance)[:count]
        return *torch.autograd.grad(*given, create_graph=True), None, None, None
    own = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
    like = slope * dbalance if ctx.options[-1] else torch.zeros_like(logits)
    return like.scatter_add(1, chosen, own), None, None, None


def _fake_route(logits: Tensor, top_k: int, z: float, balanced: bool) -> tuple[Tensor, ...]:
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, top_k)
    chosen = weights.new_empty(weights.shape, dtype=torch.int64)
    slope = logits.new_empty(tokens if balanced else 0, experts)
    return weights, chosen, logits.new_empty(()), slope


torch.library.register_fake("structlin_cpu::route", _fake_route)
torch.library.register_autograd("structlin_cpu::route", _backward, setup_context=_save)
