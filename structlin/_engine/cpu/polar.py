"""The compiled iteration for polar factors of small matrices (`polar.h`), as an operator that
torch.compile and FLOP counters know."""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..._torch import call_while_tracing
from ..operators import is_plain
from . import library

torch.library.define("structlin::polar", "(Tensor[] stacks, float[] coefficients) -> Tensor[]")
_polar = torch.ops.structlin.polar.default


@cache
def _has_engine() -> bool:
    """Whether the engine computes polar factors: it runs, or was built before. Nothing is compiled.

    The first answer holds for the whole process: no result changes because a layer builds the
    engine later.
    """
    return library.load_if_built()


@call_while_tracing
def has_engine() -> bool:
    """`_has_engine`, as a constant of what is compiled: torch.compile traces no cache."""
    return _has_engine()


def takes(x: Tensor) -> bool:
    """Whether the operator takes x `(batch, m, n)` in float32, of which no derivative is taken."""
    derived = torch.is_grad_enabled() and x.requires_grad
    return not derived and x.is_cpu and has_engine() and is_plain(x)


def polar(stacks: Sequence[Tensor], schedule: Sequence[tuple[float, float, float]]) -> list[Tensor]:
    """Every matrix of every stack `(batch, m, n)`, over its Frobenius norm, through all steps
    (a, b, c): X <- a X + b (X X^T) X + c (X X^T)^2 X."""
    coefficients = [*chain.from_iterable(schedule)]
    factors: list[Tensor] = _polar(stacks, coefficients)
    return factors


@torch.library.register_fake("structlin::polar")  # type: ignore[untyped-decorator]
def _(stacks: Sequence[Tensor], coefficients: Sequence[float]) -> list[Tensor]:
    return [stack.new_empty(stack.shape) for stack in stacks]


@register_flop_formula(torch.ops.structlin.polar)
def _(stacks: Sequence[Sequence[int]], coefficients: Sequence[float], **_: Any) -> int:
    multiply_adds = 0  # of one step: X X^T, its square, and its product with X
    for batch, m, n in stacks:
        short, long = sorted((m, n))
        multiply_adds += batch * (2 * short**2 * long + short**3)
    steps = len(coefficients) // 3
    return 2 * multiply_adds * steps
