"""The products as operators that autograd, torch.compile and FLOP counters know: those of the
compiled engine (`cpu.cpp`), and the overloads `.views` (`views.py`) of every device.

    multiply(x, cores, bias, gains)          y = W(normalised cores) x + bias
    multiply_int8(x, cores, scales, bias)    y = W(cores * scales) x + bias
    gradients(dy, x, cores, gains)           dx, dcores, dgains, dbias
    multiply.views(x, cores, bias)           y = W(cores) x + bias, and what lies between cores
    gradients.views(dy, x, between, cores)   dx, dcores, dbias

The engine saves the inputs alone. Derivatives of derivatives are taken through the loop that is the
definition.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from .._structure.structure import Program, steps_of
from .._torch import call_while_tracing
from . import OF_BIAS, OF_CORES, OF_GAINS, OF_X, views
from .cpu import library

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_BATCHED = torch._C._dispatch_key_parse("Batched")


class Affine(NamedTuple):
    """x -> W x + bias: a program, and the numbers that it multiplies by.

    cores: `(batch, fan_out, fan_in)` each.
    bias: `(out_features,)`.
    gains: `(number of cores,)`, where the cores are normalised.
    sigmas: of each core then.
    """

    program: Program
    cores: Sequence[Tensor]
    bias: Tensor | None = None
    gains: Tensor | None = None
    sigmas: Sequence[float] = ()


Loop = Callable[[Affine, Tensor], Tensor]

_NUMBERS = "Tensor? gains, float[] sigmas, int[] program"
_ARGUMENTS = f"Tensor x, Tensor[] cores, Tensor? bias, {_NUMBERS}"
torch.library.define("structlin::multiply", f"({_ARGUMENTS}) -> Tensor")
# the same with a derivative, for torch.compile: tracing an autograd.Function makes torch warn
torch.library.define("structlin::layer", f"({_ARGUMENTS}) -> Tensor")
torch.library.define(
    "structlin::gradients",
    f"(Tensor dy, Tensor x, Tensor[] cores, {_NUMBERS}, int wants) -> Tensor[]",
)
_VIEWS = "Tensor x, Tensor[] cores, Tensor? bias, bool trains, int[] program"
torch.library.define("structlin::multiply.views", f"({_VIEWS}) -> (Tensor, Tensor)")
torch.library.define("structlin::layer.views", f"({_VIEWS}) -> (Tensor, Tensor)")
torch.library.define(
    "structlin::gradients.views",
    "(Tensor dy, Tensor x, Tensor between, Tensor[] cores, int[] program, int wants) -> Tensor[]",
)
torch.library.define(
    "structlin::multiply_int8",
    "(Tensor x, Tensor[] cores, Tensor[] scales, Tensor? bias, int[] program) -> Tensor",
)
_multiply = torch.ops.structlin.multiply.default
_layer = torch.ops.structlin.layer.default
_multiply_int8 = torch.ops.structlin.multiply_int8.default
_gradients = torch.ops.structlin.gradients.default
_multiply_views = torch.ops.structlin.multiply.views
_layer_views = torch.ops.structlin.layer.views
_gradients_views = torch.ops.structlin.gradients.views
torch.library.define(
    "structlin::choose", "(Tensor like, int[] program, int tokens, bool trains) -> int"
)
_choose_path = torch.ops.structlin.choose.default


class Path(IntEnum):
    """The ways of a call, `Path` in dispatch.h: torch's own products, or one of the engine's."""

    BLAS = 0
    GEMV = 1
    TILES = 2


def pays(program: Program, x: Tensor, trains: bool | None = None) -> bool:
    """Whether the compiled engine takes x and is the faster way.

    Args:
        trains: whether a backward pass may follow; None: it is not known.
    """
    if not available(x):
        return False
    if torch.compiler.is_compiling():
        return _pays_compiled(program.numbers, x.dtype, trains is not False)
    trains = torch.is_grad_enabled() if trains is None else trains
    return bool(choose(program.numbers, x.dtype, x.numel() // x.shape[-1], trains))


def views_pay(program: Program, x: Tensor) -> bool:
    """Whether batched products of views take x and are faster than the loop. A compiled program
    makes one choice for all numbers of tokens, that for many."""
    if x.dtype not in DTYPES or x.layout != torch.strided or x.is_meta:
        return False
    widest = max(program.in_features, program.out_features)
    if not torch.compiler.is_compiling() and x.numel() < widest * program.in_features:
        return False
    return is_plain(x) and views.pays(program.numbers)


@lru_cache(maxsize=4096)
def choose(
    numbers: tuple[int, ...], dtype: torch.dtype, tokens: int = 0, trains: bool = True
) -> Path:
    """Return the way of a call of so many tokens, as the engine's `choose` in dispatch.h says.

    Between GEMV and TILES the number of threads at the first such call decides; BLAS does not
    depend on it.

    Args:
        numbers: the program's.
        tokens: 0 where they are not known, as while torch.compile traces.
        trains: whether a backward pass may follow.
    """
    like = torch.empty(0, dtype=dtype, device="cpu")
    return Path(_choose_path(like, numbers, tokens, trains))


# torch 2.12 cannot compare members of an enumeration while it traces, and stops
@call_while_tracing
def _pays_compiled(numbers: tuple[int, ...], dtype: torch.dtype, trains: bool) -> bool:
    return choose(numbers, dtype, trains=trains) != Path.BLAS


# while torch 2.10 traces, it takes the first for true and the third for a tensor
@call_while_tracing
def is_transformed() -> bool:
    """Whether the call is exported or traced, so that the result needs no structlin, or derivatives
    are taken by anything else than autograd's backward pass."""
    return bool(
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def available(x: Tensor) -> bool:
    """Whether the CPU engine takes x: a plain tensor on a CPU."""
    return x.is_cpu and x.dtype in DTYPES and library.load() and is_plain(x)


def is_plain(x: Tensor) -> bool:
    """Whether x is torch's own tensor, and only autograd's backward pass goes through the call."""
    is_own = torch.compiler.is_compiling() or type(x) is Tensor or type(x) is Parameter
    return is_own and x.layout == torch.strided and not is_transformed()


def multiply(loop: Loop, affine: Affine, x: Tensor) -> Tensor:
    """`W x + bias` of x `(..., in_features)`; `loop` is the definition of the same."""
    program, cores, bias, gains, sigmas = affine
    y: Tensor
    if gains is not None:
        gains = gains.double()  # the engine's dtype
    if torch.compiler.is_compiling():
        y = _layer(x, cores, bias, gains, sigmas, program.numbers)
    elif torch.is_grad_enabled() and any(
        leaf is not None and leaf.requires_grad for leaf in (x, *cores, bias, gains)
    ):
        y = _Product.apply(loop, program, sigmas, False, x, bias, gains, *cores)  # type: ignore[no-untyped-call]
    else:
        y = _multiply(x, cores, bias, gains, sigmas, program.numbers)
    return y


def multiply_views(
    loop: Loop, program: Program, cores: Sequence[Tensor], bias: Tensor | None, x: Tensor
) -> Tensor:
    """`multiply` by cores that are normalised already, as batched products of views."""
    y: Tensor
    if torch.compiler.is_compiling():
        y, _ = _layer_views(x, cores, bias, torch.is_grad_enabled(), program.numbers)
    elif torch.is_grad_enabled() and any(
        leaf is not None and leaf.requires_grad for leaf in (x, *cores, bias)
    ):
        y = _Product.apply(loop, program, (), True, x, bias, None, *cores)  # type: ignore[no-untyped-call]
    else:
        trains = False
        y, _ = _multiply_views(x, cores, bias, trains, program.numbers)
    return y


def multiply_int8(
    program: Program,
    cores: Sequence[Tensor],
    scales: Sequence[Tensor],
    x: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`multiply` by int8 cores, each row times its scale; autograd does not know it.

    Args:
        scales: `(batch, fan_out, 1)` each; they are read in float32, or in float64 as x is.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scales = [scale.to(wide) for scale in scales]
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    y: Tensor = _multiply_int8(x, cores, scales, bias, program.numbers)
    return y


_NO_TENSORS = (None,) * 4  # the gradients of loop, program, sigmas and by_views


class _Product(torch.autograd.Function):
    """`multiply` or `multiply_views`, with a derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        loop: Loop,
        program: Program,
        sigmas: Sequence[float],
        by_views: bool,
        x: Tensor,
        bias: Tensor | None,
        gains: Tensor | None,
        *cores: Tensor,
    ) -> Tensor:
        ctx.loop = loop
        ctx.program = program
        ctx.sigmas = sigmas
        between: Tensor | None = None
        y: Tensor
        if by_views:
            trains = True  # so that `between`, what the cores hand on, is kept for backward
            y, between = _multiply_views(x, cores, bias, trains, program.numbers)
        else:
            y = _multiply(x, cores, bias, gains, sigmas, program.numbers)
        ctx.save_for_backward(between, x, bias, gains, *cores)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[len(_NO_TENSORS) :]
        between, *inputs = ctx.saved_tensors
        # the engine has the first derivative of plain tensors; autograd derives all others from
        # the definition
        is_served = available(dy) if between is None else is_plain(dy)
        if torch.is_grad_enabled() or is_batch(dy) or is_transformed() or not is_served:

            def run(x: Tensor, bias: Any, gains: Any, *cores: Tensor) -> Tensor:
                y: Tensor = ctx.loop(Affine(ctx.program, cores, bias, gains, ctx.sigmas), x)
                return y

            return *_NO_TENSORS, *differentiate(run, inputs, needs, dy)
        x, _, gains, *cores = inputs
        needs_x, needs_bias, needs_gains, *needs_cores = needs
        wants = _join_wants(needs_x, needs_cores, needs_bias, needs_gains)
        numbers = ctx.program.numbers
        dgains: Tensor | None = None
        if between is None:
            dx, *dcores, dgains, dbias = _gradients(dy, x, cores, gains, ctx.sigmas, numbers, wants)
        else:
            dx, *dcores, dbias = _gradients_views(dy, x, between, cores, numbers, wants)
        dbias = dbias if needs_bias else None
        dgains = dgains if needs_gains else None
        return *_NO_TENSORS, dx, dbias, dgains, *dcores


def _join_wants(x: bool, cores: Sequence[bool], bias: bool, gains: bool = False) -> int:
    """The gradients that autograd needs, as the operators take them. They give those of all cores
    or of none; autograd leaves what nobody needs."""
    return OF_X * x | OF_CORES * any(cores) | OF_BIAS * bias | OF_GAINS * gains


def is_batch(dy: Tensor) -> bool:
    """Whether it stands for many, in `autograd.grad(is_grads_batched=True)`, an older vmap."""
    return bool(torch._C._dispatch_keys(dy).has(_BATCHED))


def differentiate(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    dy: Tensor,
) -> list[Tensor | None]:
    """The gradients of `run(*inputs)` that are needed, by PyTorch's own products: differentiable,
    and a batch of dy may be given by vmap."""
    is_differentiated = torch.is_grad_enabled()
    with torch.enable_grad():
        # x may depend on the cores; the gradients are those of this layer alone
        inputs = [None if value is None else value.view_as(value) for value in inputs]
        wanted = [value for value, needed in zip(inputs, needs, strict=True) if needed]
        y = run(*inputs)
        gradients = torch.autograd.grad(y, wanted, dy, create_graph=is_differentiated)  # type: ignore[arg-type]
    in_order = iter(gradients)
    return [next(in_order) if needed else None for needed in needs]


# ---- for programs that are compiled, and counters ------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cores, _, gains, ctx.sigmas, ctx.numbers = inputs
    ctx.save_for_backward(gains, x, *cores)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gains, x, *cores = ctx.saved_tensors
    needs_x, needs_cores, needs_bias, needs_gains, _, _ = ctx.needs_input_grad
    wants = _join_wants(needs_x, needs_cores, needs_bias, needs_gains)
    dx, *dcores, dgains, dbias = _gradients(dy, x, cores, gains, ctx.sigmas, ctx.numbers, wants)
    dbias = dbias if needs_bias else None
    dgains = dgains if needs_gains else None
    # torch takes an empty list for one of tensors, and wants its gradient as one
    dsigmas: list[Tensor] | None = None if ctx.sigmas else []
    return dx, dcores, dbias, dgains, dsigmas, None


def _fake_multiply(x: Tensor, *arguments: Any) -> Tensor:
    program = arguments[-1]
    return x.new_empty(*x.shape[:-1], program[1])


@torch.library.register_fake("structlin::gradients")  # type: ignore[untyped-decorator]
def _(
    dy: Tensor, x: Tensor, cores: Any, gains: Any, sigmas: Any, program: Sequence[int], wants: int
) -> list[Tensor]:
    dx = x.new_empty(x.shape if wants & OF_X else 0)
    dcores = [core.new_empty(core.shape if wants & OF_CORES else 0) for core in cores]
    dgains = (x if gains is None else gains).new_empty(len(cores) if wants & OF_GAINS else 0)
    dbias = x.new_empty(program[1] if wants & OF_BIAS else 0)
    return [dx, *dcores, dgains, dbias]


torch.library.register_fake("structlin::multiply", _fake_multiply)
torch.library.register_fake("structlin::layer", _fake_multiply)
torch.library.register_fake("structlin::multiply_int8", _fake_multiply)
torch.library.register_autograd("structlin::layer", _backward, setup_context=_save)


# ---- the overloads `.views`, of every device -----------------------------------------------------


def _save_views(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, cores, _, _, ctx.numbers = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], *cores)


def _backward_views(ctx: Any, dy: Tensor, _: None) -> tuple[Any, ...]:
    x, between, *cores = ctx.saved_tensors
    needs_x, needs_cores, needs_bias, _, _ = ctx.needs_input_grad
    wants = _join_wants(needs_x, needs_cores, needs_bias)
    dx, *dcores, dbias = _gradients_views(dy, x, between, cores, ctx.numbers, wants)
    return dx, dcores, dbias if needs_bias else None, None, None


def _fake_multiply_views(
    x: Tensor, cores: Any, bias: Any, trains: bool, program: Sequence[int]
) -> tuple[Tensor, Tensor]:
    widths = [stage.write.width for stage in views.stages_of(tuple(program))]
    tokens = x.numel() // x.shape[-1]
    y = x.new_empty(*x.shape[:-1], widths[-1])[..., : program[1]]
    between = x.new_empty(sum(widths[:-1]), tokens) if trains else x.new_empty(0)
    return y, between


@torch.library.register_fake("structlin::gradients.views")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor, between: Tensor, cores: Any, program: Any, wants: int) -> list[Tensor]:
    dx = x.new_empty(0)
    if wants & OF_X:
        width = views.stages_of(tuple(program))[0].read.width  # of x with its padding
        dx = x.new_empty(*x.shape[:-1], width)[..., : program[0]]
    dcores = [core.new_empty(core.shape if wants & OF_CORES else 0) for core in cores]
    dbias = x.new_empty(program[1] if wants & OF_BIAS else 0)
    return [dx, *dcores, dbias]


torch.library.impl("structlin::multiply.views", "default", views.multiply)
torch.library.impl("structlin::layer.views", "default", views.multiply)
torch.library.impl("structlin::gradients.views", "default", views.gradients)
torch.library.register_fake("structlin::multiply.views", _fake_multiply_views)
torch.library.register_fake("structlin::layer.views", _fake_multiply_views)
torch.library.register_autograd(
    "structlin::layer.views", _backward_views, setup_context=_save_views
)


def count_flops(x: Sequence[int], program: Sequence[int]) -> list[int]:
    """The FLOPs of each core; `x` is a shape."""
    return [2 * prod(x[:-1]) * prod(step) for step in steps_of(program)]


_ops = torch.ops.structlin


@register_flop_formula([_ops.multiply, _ops.layer, _ops.multiply_int8])
def _(x: Sequence[int], *arguments: Any, **_: Any) -> int:
    program = arguments[-1]
    return sum(count_flops(x, program))


@register_flop_formula(torch.ops.structlin.gradients)
def _(dy: Sequence[int], x: Sequence[int], *arguments: Any, **_: Any) -> int:
    program, wants = arguments[-2:]
    flops = count_flops(x, program)
    of_x = bool(wants & OF_X)
    of_cores = bool(wants & (OF_CORES | OF_GAINS))
    needs_activations = of_cores or (of_x and bool(program[-1]))  # slopes of an activation
    # the overload `.views` has four more arguments, one of them what lies between cores
    has_activations = len(arguments) == 4
    recomputes = needs_activations and not has_activations
    return sum(flops) * (of_x + of_cores) + sum(flops[:-1]) * recomputes
