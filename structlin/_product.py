"""Structure and cores -> numbers: the only place where activations are permuted and multiplied."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

from ._kernels import cost, op
from ._structure import Move, Program, Structure

if TYPE_CHECKING:
    from cola.ops import LinearOperator

MODES = ("auto", "structured", "dense")


def apply(
    structure: Structure,
    cores: Sequence[Tensor],
    x: Tensor,
    bias: Tensor | None = None,
    *,
    mode: str = "auto",
    recompute: bool = False,
) -> Tensor:
    """`y = W x + bias` for every token, the fastest way.

    "structured" goes core by core and never forms W; "dense" multiplies the cores into W first. "auto" takes what the
    cost model (`kernels.cost`) says is faster for the structure, dtype, device and number of tokens, with gradients or
    without; under torch.compile, what is faster for many tokens. All are differentiable any number of times.
    "structured" is one operator (`kernels.op`); where that gains nothing it is plain products: low-rank, and few tokens
    on a CPU.

    Args:
        cores: one tensor `(batch, fan_out, fan_in)` per core of the structure.
        x: `(..., structure.in_features)`, any leading shape and strides, also no tokens at all.
        bias: `(structure.out_features,)`.
        mode: "auto", "structured" or "dense".
        recompute: save nothing but x for the backward pass, which computes the middle again.

    Returns:
        `(..., structure.out_features)`. Under autocast of its dtype, as nn.Linear.

    Raises:
        ValueError: wrong last dimension of `x`, wrong number or shape of cores or bias, mixed devices or dtypes of the
            cores, an unknown mode.
        TypeError: `x` is not floating point, or its dtype is not the cores' (outside autocast).

    >>> from structlin import Kronecker
    >>> structure = Kronecker().structure(6, 6)
    >>> right, left = torch.randn(1, 3, 3), torch.randn(1, 2, 2)
    >>> x = torch.randn(5, 6)
    >>> torch.allclose(apply(structure, [right, left], x), x @ torch.kron(left[0], right[0]).T, atol=1e-5)
    True
    """
    _check(structure, cores, x, bias)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, cores = x.to(dtype), [core.to(dtype) for core in cores]
    bias = None if bias is None else bias.to(x.dtype)
    tokens = x.numel() // structure.in_features
    leaves = [x, *cores] if bias is None else [x, *cores, bias]
    backward = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    if choose(mode, structure, tokens, x.dtype, x.device.type, backward=backward) == "dense":
        return F.linear(x, to_dense(structure, cores), bias)
    if structure.plain and not recompute:
        for core in cores[:-1]:
            x = F.linear(x, core[0])
        return F.linear(x, cores[-1][0], bias)
    if not _takes_operators() or (cost.few(x) and not recompute):
        y = multiply(structure.program, cores, x)
        return y if bias is None else y + bias
    rows = x if x.ndim == 2 else x.reshape(-1, structure.in_features)
    y = op.apply(rows, list(cores), bias, structure.text, backward=backward, keep=backward and not recompute)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], structure.out_features)


def reference(structure: Structure, cores: Sequence[Tensor], x: Tensor) -> Tensor:
    """`W x` by permutations and plain batched products: what is exported, and the fastest way for few tokens."""
    _check(structure, cores, x)
    return multiply(structure.program, cores, x)


def multiply(program: Program, cores: Sequence[Tensor], x: Tensor) -> Tensor:
    """The definition: one batched product for each core, between fixed permutations.

    Args:
        cores: `(batch, fan_out, fan_in)` each.
        x: `(..., in_features)`.

    Returns:
        `(..., out_features)`.
    """
    h = x
    for step, core in zip(program.steps, cores, strict=True):
        h = _permute(h, step.move).reshape(step.batch, -1, step.fan_in)  # (batch, tokens * repeat, fan_in)
        if 1 not in h.stride()[1:]:
            h = h.contiguous()  # or torch.bmm goes through it block by block
        h = torch.bmm(h, core.mT)  # (batch, tokens * repeat, fan_in) -> (batch, tokens * repeat, fan_out)
    return _permute(h, program.last).reshape(*x.shape[:-1], program.out_features)


def _permute(h: Tensor, move: Move) -> Tensor:
    return h.reshape(move.sizes).permute(move.order) if move.order else h


def to_dense(structure: Structure, cores: Sequence[Tensor]) -> Tensor:
    """The matrix W that `apply` multiplies by: `(out_features, in_features)`, differentiable in the cores.

    One core is multiplied onto the product of those before it, axis by axis, which costs what a few tokens cost.

    >>> from structlin import LowRank
    >>> v, u = torch.randn(1, 2, 6), torch.randn(1, 4, 2)
    >>> torch.allclose(to_dense(LowRank(rank=2).structure(6, 4), [v, u]), u[0] @ v[0])
    True
    """
    _check_cores(structure, cores)
    factors = [
        core.reshape([structure.sizes[axis] for axis in one.axes])
        for one, core in zip(structure.cores, cores, strict=True)
    ]
    eye = partial(torch.eye, dtype=cores[0].dtype, device=cores[0].device)
    factors += [eye(structure.sizes[axis]) for axis in structure.kept]
    w: Tensor = einsum(*factors, structure.einsum)  # type: ignore[call-overload]
    return w.reshape(structure.out_features, structure.in_features)


def to_cola(structure: Structure, cores: Sequence[Tensor]) -> "LinearOperator":
    """W as a CoLA `LinearOperator`: a product of block-diagonal, Kronecker and permutation operators.

    It stays matrix-free, so CoLA's spectral algorithms run on a trained layer. Needs `cola-ml`.

    Source: Potapczynski et al. 2023, "CoLA" (arXiv:2309.03060).

    >>> from structlin import LowRank
    >>> v, u = torch.randn(1, 2, 6), torch.randn(1, 4, 2)
    >>> operator = to_cola(LowRank(rank=2).structure(6, 4), [v, u])
    >>> operator.shape, torch.allclose(operator.to_dense(), u[0] @ v[0])
    ((4, 6), True)
    """
    from cola.ops import BlockDiag, Dense, Identity, Kronecker, Permutation, Product

    _check_cores(structure, cores)
    dtype, device = cores[0].dtype, cores[0].device
    factors: list[LinearOperator] = []

    def permute(move: Move, width: int) -> None:
        if move.order:
            order = _permute(torch.arange(width, device=device), move).flatten()
            factors.append(Permutation(order, dtype=dtype))

    width = structure.in_features
    for step, weight in zip(structure.program.steps, cores, strict=True):
        permute(step.move, width)
        blocks = [Dense(block) for block in weight]
        if step.repeat > 1:
            shared = Identity((step.repeat, step.repeat), dtype=dtype)
            blocks = [Kronecker(shared, block) for block in blocks]
        factors.append(blocks[0] if step.batch == 1 else BlockDiag(*blocks))
        width = step.batch * step.repeat * step.fan_out
    permute(structure.program.last, width)
    return factors[0] if len(factors) == 1 else Product(*reversed(factors))


def choose(mode: str, structure: Structure, tokens: int, dtype: torch.dtype, device: str, *, backward: bool) -> str:
    """ "structured" or "dense": `mode` itself, or for "auto" what is faster."""
    check_mode(mode)
    if mode != "auto":
        return mode
    least, most = cost.tokens_for(structure.text, dtype, device, backward)
    # A compiled program makes one choice for all numbers of tokens, that for many, or each would be compiled anew
    return "structured" if least <= (cost.FOREVER if torch.compiler.is_compiling() else tokens) <= most else "dense"


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; there are {', '.join(MODES)}")


def _takes_operators() -> bool:
    """Not while exporting, so that what is exported needs no structlin, nor where derivatives are not taken by
    autograd's backward pass: in `torch.func`'s transforms but vmap, and in forward mode."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    if torch.autograd.forward_ad._current_level >= 0:
        return False
    transforms = torch._C._functorch.get_interpreter_stack() if torch._C._are_functorch_transforms_active() else []
    return all(transform.key() == torch._C._functorch.TransformType.Vmap for transform in transforms)


def _check(structure: Structure, cores: Sequence[Tensor], x: Tensor, bias: Tensor | None = None) -> None:
    _check_cores(structure, cores)
    if x.ndim == 0 or x.shape[-1] != structure.in_features:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: its last dimension must be in_features={structure.in_features}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x has dtype {x.dtype}; a structured product needs a floating-point input")
    if x.device != cores[0].device:
        raise ValueError(f"x is on {x.device}, the cores are on {cores[0].device}")
    if x.dtype != cores[0].dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"x has dtype {x.dtype}, the cores have {cores[0].dtype}; cast one of them or use autocast")

    if bias is not None and (bias.shape != (structure.out_features,) or bias.device != x.device):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)} on {bias.device}; it must be (out_features,) = "
            f"({structure.out_features},) on {x.device}"
        )


def _check_cores(structure: Structure, cores: Sequence[Tensor]) -> None:
    if len(cores) != len(structure.cores):
        raise ValueError(f"{len(cores)} cores given; the structure has {len(structure.cores)}: {structure!r}")
    for n, (core, tensor) in enumerate(zip(structure.cores, cores, strict=True)):
        if tuple(tensor.shape) != core.shape:
            raise ValueError(f"cores[{n}] has shape {tuple(tensor.shape)}; the structure needs {core.shape}")
        if tensor.dtype != cores[0].dtype or tensor.device != cores[0].device:
            raise ValueError(
                f"cores[{n}] is {tensor.dtype} on {tensor.device}, cores[0] is {cores[0].dtype} on {cores[0].device}"
            )
