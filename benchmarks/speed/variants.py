"""What `benchmarks.speed.layer` times: the structures, and each layer as a function of its input.

Implementations: nn.Linear; auto, what `StructuredLinear` does by itself; merged, the product by the
matrix of the cores; loop, one batched product for each core; compiled, torch.compile of that;
strided, two products that write into a strided view of the output, with one copy of the activations
each way, as the published BTT and Monarch layers do it (written here from the formula; an output
that interleaves its blocks, Monarch's, is one copy more). Options: auto with a bias, with weight
normalisation, and nn.Linear with a bias.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import timing
from benchmarks.harness.race import Oracle, Run, Variant
from structlin import (
    BTT,
    TT,
    Dense,
    Family,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
)

SMOKE = 64  # the width of a smoke run
# of the relative Frobenius error; bfloat16 rounds to 2^-9 each time, float16 to 2^-12
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}
# of d_in * d_out; beyond, a CPU needs too long to form the matrix
MERGED_TO = 1024**2
COMPILED_AT = (1024,)  # the square widths at which the loop is compiled, seconds a structure
OPTIONS_AT = (SMOKE, 1024, 2048)
OPTIONS_OF = ("BTT r=1", "Monarch 16")
OPTIONS = {"bias": "bias", "weight norm": "weight_norm"}  # name, argument of StructuredLinear


def families(width: int) -> dict[str, Family]:
    """The structures of a row each; `width` is the smaller side of the layer."""
    return {
        "BTT r=1": BTT(rank=1),
        "BTT r=2": BTT(rank=2),
        "BTT r=4": BTT(rank=4),
        "Monarch 4": Monarch(blocks=4),
        "Monarch 16": Monarch(blocks=16),
        "Monarch 64": Monarch(blocks=64),
        "low-rank d/4": LowRank(rank=width // 4),
        "low-rank d/8": LowRank(rank=width // 8),
        "Kronecker": Kronecker(),
        "TT r=4": TT(rank=4),
    }


@dataclass(frozen=True)
class Job:
    """One setting; all its variants are timed in turns. A brief one has only nn.Linear and auto."""

    d_in: int
    d_out: int
    tokens: int
    dtype: str
    backward: bool
    brief: bool = False

    @property
    def title(self) -> str:
        work = "forward + backward" if self.backward else "forward"
        return f"{self.d_in} -> {self.d_out}, {self.tokens} tokens, {self.dtype}, {work}"

    @property
    def flops(self) -> int:
        """FLOPs of the dense layer; the backward pass has two more products of as many."""
        return (3 if self.backward else 1) * 2 * self.tokens * self.d_in * self.d_out

    @property
    def merges(self) -> bool:
        """Whether merged is timed on a CPU too."""
        return self.d_in * self.d_out <= MERGED_TO

    def square_at(self, widths: Sequence[int]) -> bool:
        return self.d_in == self.d_out and self.d_in in widths


def variants(job: Job, device: str, deadline: float = inf) -> list[Variant]:
    """nn.Linear first; then all structures, and nn.Linear at their FLOPs unless the job is brief.

    After `deadline`, of `time.perf_counter`, nothing is compiled.
    """
    dtype = getattr(torch, job.dtype)

    def data(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def dense(d_in: int, d_out: int) -> Variant:
        x = data(job.tokens, d_in).requires_grad_(job.backward)
        dy = data(job.tokens, d_out)
        weight = nn.Parameter(data(d_out, d_in) / sqrt(d_in))
        run = partial(F.linear, weight=weight)
        structure = Dense().structure(d_in, d_out)
        return Variant("dense", "nn.Linear", structure, run, [weight], x, dy)

    reference = dense(job.d_in, job.d_out)
    timed = [reference]
    with_options = job.square_at(OPTIONS_AT) and not job.brief
    if with_options:
        (weight,) = reference.parameters
        bias = nn.Parameter(data(job.d_out))
        run = partial(F.linear, weight=weight, bias=bias)
        biased = {"parameters": [weight, bias], "option": "bias", "oracle": biased_oracle}
        timed.append(replace(reference, run=run, **biased))
    equal_flops: set[tuple[int, int]] = set()  # widths of nn.Linear
    to_compile: list[Variant] = []
    for name, family in families(min(job.d_in, job.d_out)).items():
        make = partial(StructuredLinear, job.d_in, job.d_out, family, device=device, dtype=dtype)
        try:
            layer = make(bias=False)
        except ValueError as misfit:
            print(f"# left out: {name} in {job.title}: {misfit}")
            continue
        auto = Variant(
            name, "auto", layer.structure, layer, list(layer.cores), reference.x, reference.dy
        )
        timed.append(auto)
        if job.brief:
            continue
        ways = implementations(layer, job, device)
        timed += [replace(auto, implementation=way, run=run) for way, run in ways.items()]
        if job.square_at(COMPILED_AT):
            to_compile.append(replace(auto, implementation="compiled", run=ways["loop"]))
        if with_options and name in OPTIONS_OF:
            for option, argument in OPTIONS.items():
                layer = make(**{"bias": False, argument: True})
                timed.append(_with_option(name, option, layer, reference.x, reference.dy))
        equal_flops.add(equal_flops_widths(auto.structure))
    timed += compile_all(to_compile, deadline)
    for widths in sorted(equal_flops - {(job.d_in, job.d_out)}):
        timed.append(dense(*widths))
    return timed


def implementations(layer: StructuredLinear, job: Job, device: str) -> dict[str, Run]:
    """Name -> the layer's function, in other ways than its own."""
    structure = layer.structure
    cores = list(layer.cores)
    runs: dict[str, Run] = {"loop": partial(loop, structure, cores)}
    if device == "cuda" or job.merges:
        runs["merged"] = lambda x: F.linear(x, layer.to_dense(), layer.bias)
    if all(core.repeat == 1 and core.batch > 1 for core in structure.cores):
        runs["strided"] = partial(StridedProducts.apply, structure, *cores)
    return runs


def equal_flops_widths(structure: Structure) -> tuple[int, int]:
    """The dense layer of the same aspect ratio and FLOPs: multiples of 64, so that dense is at its
    best.

    >>> equal_flops_widths(BTT().structure(1024, 4096))
    (192, 896)
    """
    scale = sqrt(structure.flops / (2 * structure.in_features * structure.out_features))
    d_in = max(64, 64 * round(scale * structure.in_features / 64))
    d_out = max(64, 64 * round(scale * structure.out_features / 64))
    return d_in, d_out


# ---- options -------------------------------------------------------------------------------------


@torch.no_grad()
def _with_option(name: str, option: str, layer: StructuredLinear, x: Tensor, dy: Tensor) -> Variant:
    """`layer`, its bias and gains random, its cores so large that normalisation scales them."""
    parameters: list[Tensor] = list(layer.cores)
    oracle: Oracle = timing.oracle
    if layer.bias is not None:
        parameters.append(layer.bias.normal_())
        oracle = biased_oracle
    if layer.gains is not None:
        parameters.append(layer.gains.uniform_(0.5, 1.5))
        for core in layer.cores:
            core.mul_(1.5)
        oracle = partial(normalised_oracle, layer.stds)
    return Variant(name, "auto", layer.structure, layer, parameters, x, dy, option, oracle)


def biased_oracle(structure: Structure, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """`W x + bias` in float64; the bias is the last of `parameters`."""
    *cores, bias = parameters
    return timing.oracle(structure, cores, x) + bias.double()


def normalised_oracle(
    stds: Sequence[float], structure: Structure, parameters: Sequence[Tensor], x: Tensor
) -> Tensor:
    """`W x` of the cores `gain * min(1, std / RMS(core)) * core` in float64; the gains are the last
    of `parameters`."""
    *cores, gains = (parameter.double() for parameter in parameters)
    scaled = []
    for gain, std, core in zip(gains, stds, cores, strict=True):
        clip = (std / core.pow(2).mean().sqrt()).clamp(max=1)
        scaled.append(gain * clip * core)
    return timing.oracle(structure, scaled, x)


# ---- others ------------------------------------------------------------------------------------


def compile_all(plain: Sequence[Variant], deadline: float) -> list[Variant]:
    """Each of `plain` compiled by a first call; what fails, or would begin after `deadline`, is
    left out and said."""
    if not plain:
        return []
    torch.compiler.reset()  # they all are one code object, and the last job's would be tried too
    compiled_variants = []
    for variant in plain:
        if time.perf_counter() > deadline:
            print(f"# left out: {variant.name}, compiled: no time")
            continue
        compiled = replace(variant, run=torch.compile(variant.run, fullgraph=True, dynamic=False))
        try:
            with torch._dynamo.config.patch(recompile_limit=len(plain)):
                compiled.work()
        except Exception as failure:  # no C++ compiler, for one
            reason = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
            print(f"# left out: {variant.name}, compiled: {reason}")
        else:
            compiled_variants.append(compiled)
    return compiled_variants


def loop(
    structure: Structure, cores: Sequence[Tensor], x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`W x + bias` by one batched product for each core, between fixed permutations."""
    program = structure.program
    h = x
    for step, core in zip(program.steps, cores, strict=True):
        h = _seen(h, step.move, step.batch, step.fan_in)  # (batch, tokens * repeat, fan_in)
        if not torch.compiler.is_compiling() and 1 not in h.stride()[1:]:
            h = h.contiguous()  # or torch.bmm goes through it block by block
        h = torch.bmm(h, core.mT)  # (batch, tokens * repeat, fan_out)
    y = _moved(h, program.final_move).reshape(len(x), structure.out_features)
    return y if bias is None else y + bias


class StridedProducts(torch.autograd.Function):
    """`y = W x` for two cores without repetition: see the head of this file."""

    # The cores are W1 (batch1, fan_out1, fan_in1) and W2 (batch2, fan_out2, fan_in2). x is seen as
    # blocks (batch1, tokens, fan_in1); h = W1 x, copied into the order (batch2, tokens, fan_in2) in
    # which W2 reads it; W2 h is written into y seen as (batch2, tokens, fan_out2). Backward:
    # dh = W2^T dy, copied likewise, dx = W1^T dh, dW1 = dh x^T and dW2 = dy h^T.

    @staticmethod
    def forward(ctx: Any, structure: Structure, w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
        program = structure.program
        step1, step2 = program.steps
        blocks = _seen(x, step1.move, step1.batch, step1.fan_in)  # a view
        h = _seen(_tokens_first(blocks, w1.mT), step2.move, step2.batch, step2.fan_in)
        h = h.contiguous()  # the copy
        y = x.new_empty(len(x), structure.out_features)
        _product(h, w2.mT, _seen(y, _inverse(program.final_move), step2.batch, step2.fan_out))
        ctx.structure = structure
        ctx.save_for_backward(blocks, h, w1, w2)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        program = ctx.structure.program
        step1, step2 = program.steps
        blocks, h, w1, w2 = ctx.saved_tensors
        dy_blocks = _seen(dy, _inverse(program.final_move), step2.batch, step2.fan_out)
        if 1 not in dy_blocks.stride()[1:]:
            dy_blocks = dy_blocks.transpose(0, 1).contiguous().transpose(0, 1)
        dh = _tokens_first(dy_blocks, w2)
        dh = _seen(dh, _inverse(step2.move), step1.batch, step1.fan_out)
        dh = dh.contiguous()  # the copy
        dx = dy.new_empty(len(dy), ctx.structure.in_features)
        _product(dh, w1, _seen(dx, step1.move, step1.batch, step1.fan_in))
        dw1 = torch.bmm(dh.mT, blocks)
        dw2 = torch.bmm(dy_blocks.mT, h)
        return None, dw1, dw2, dx


def _tokens_first(a: Tensor, b: Tensor) -> Tensor:
    """`a b` in a view of rows `(tokens, batch * features)`: the copy that follows reads a token's
    features together."""
    out = a.new_empty(a.shape[1], len(a), b.shape[2]).transpose(0, 1)
    return torch.bmm(a, b, out=out)


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Into a view; a BLAS writes only rows or columns of adjacent elements, and in bfloat16
    PyTorch's own loop for others takes a hundred times as long."""
    if 1 in out.stride()[1:]:
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))


def _seen(h: Tensor, move: Any, batch: int, width: int) -> Tensor:
    """An activation after a move, as `(batch, tokens * repeat, width)`."""
    return _moved(h, move).reshape(batch, -1, width)


def _moved(h: Tensor, move: Any) -> Tensor:
    return h.reshape(move.sizes).permute(move.order) if move.order else h


def _inverse(move: Any) -> Any:
    """The move back."""
    order = tuple(move.order.index(axis) for axis in range(len(move.order)))
    sizes = tuple(move.sizes[axis] for axis in move.order)
    return move._replace(sizes=sizes, order=order)
