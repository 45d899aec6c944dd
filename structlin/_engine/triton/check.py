"""Does the kernel of two cores pay for a layer, and is it right there? It is untested on GPU.

A layer is tested once for a device and dtype, before its first use: all kernels that it may launch,
on few tokens, against float64, twice for the same bits, with NaN around x, y and dy that must
neither be read nor overwritten. If one is wrong, cannot be compiled or launched, or Triton is
missing, one warning says so, and PyTorch's products serve from then on.
"""

import warnings
from collections.abc import Sequence
from math import nan, prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..._structure.structure import SILU_RMS, steps_of
from .. import OF_BIAS, OF_CORES, OF_GAINS, OF_X
from . import pair as pairs
from .pair import Pair

# relative, in norm; float32 is tf32 here
TOLERANCE = {torch.float32: 4e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FEW_TOKENS = 267  # of a test: some tiles, the last of them in part
BORDER = 2**14  # elements of NaN before and after a tensor under test

Layer = tuple[tuple[int, ...], torch.dtype, torch.device]  # the first is its program

_answers: dict[Layer, bool] = {}


def pays(program: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels serve this layer. float32 where PyTorch multiplies it in tf32 alone:
    tensor cores take no more.

    While a CUDA graph is captured nothing can be tested, and the answer is no: run a layer once
    before.
    """
    if not is_taken(dtype):
        return False
    layer = program, dtype, device
    if layer not in _answers:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        _answers[layer] = _find_answer(layer)
    return _answers[layer]


def tokens_for_matrix(program: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    """From how many tokens on W is formed and multiplied by; never in full float32."""
    if not is_taken(dtype):
        return pairs.NEVER
    return pairs.tokens_for_matrix(program, dtype, device, pays(program, dtype, device))


# torch.compile calls them while it traces, and sees their answers
pays._dynamo_marked_constant = True  # type: ignore[attr-defined]
tokens_for_matrix._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_taken(dtype: torch.dtype) -> bool:
    return dtype in TOLERANCE and (dtype != torch.float32 or has_tf32())


def has_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    new = hasattr(matmul, "fp32_precision")  # PyTorch 2.9 and later; one may not read both
    return bool(matmul.fp32_precision == "tf32" if new else matmul.allow_tf32)


def _find_answer(layer: Layer) -> bool:
    # what is on around the first use (inference, checkpoints, counters) does not see the test
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    autocast = torch.autocast(layer[2].type, enabled=False)
    try:
        with torch.inference_mode(False), _disable_current_modes(), hooks, autocast:
            if not pairs.pays(*layer):
                return False
            faults = self_test(*layer)
    except Exception as error:  # whatever Triton, its compiler or the driver may raise
        faults = [f"{type(error).__name__}: {error}"]
    if faults:
        (d_in, d_out, *_), dtype, device = layer
        name = f"a layer from {d_in} to {d_out} features in {dtype} on {device}"
        text = f"the Triton kernels are not used for {name}, PyTorch's products are: "
        warnings.warn(text + "; ".join(faults), RuntimeWarning, stacklevel=6)
    return not faults


@torch.no_grad()
def self_test(program: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[str]:
    """What is wrong with a layer's kernels on this device, in words; nothing if all is well."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401

    random = torch.Generator("cpu").manual_seed(0)
    shapes = [(b, o, j) for b, _, j, o in steps_of(program)]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cpu").to(device, dtype)

    cores = [draw(*shape) / shape[2] ** 0.5 for shape in shapes]
    x, dy = (_surround(draw(FEW_TOKENS, width)) for width in program[:2])
    sigmas = [share / shape[2] ** 0.5 for share, shape in zip((0.5, 2.0), shapes, strict=True)]
    bias, gains = draw(program[1]), torch.tensor([0.75, 1.5], dtype=torch.float64, device=device)
    faults = _compare(program, x, dy, cores, bias, [], ())
    return faults + _compare(program, x, dy, cores, bias, [gains], sigmas)


def _compare(
    program: tuple[int, ...], x: Tensor, dy: Tensor, cores: Sequence[Tensor], bias: Tensor,
    gains: Sequence[Tensor], sigmas: Sequence[float],
) -> list[str]:  # fmt: skip
    """`self_test` of these tensors; the cores are normalised where there are gains."""
    pair, faults, results = pairs.pair_of(program), list[str](), list[list[Tensor]]()
    assert pair
    exact = [each.double().requires_grad_() for each in (x, *cores, *gains, bias)]
    with torch.enable_grad():
        each = zip(exact[1:3], exact[3], sigmas, strict=True)
        normed = (m * g * (s * m.numel() ** 0.5 / m.norm()).clamp(max=1) for m, g, s in each)
        used = [*normed] if gains else exact[1:3]
        y = define(pair, exact[0], used[0], used[1], bool(program[-1])) + exact[-1]
        expected = [y.detach(), *torch.autograd.grad(y, exact, dy.double())]
    given, wants = (gains[0] if gains else None, sigmas, program), OF_X | OF_CORES | OF_BIAS
    for _ in range(2):
        y = _surround(torch.full_like(dy, nan))
        pairs.multiply(x, cores, bias, *given, out=y)
        dx, *others = pairs.gradients(dy, x, cores, *given, wants | OF_GAINS * bool(gains))
        results.append([y, dx, *(each for each in others if each.numel())])
        around = y.untyped_storage().nbytes() // y.element_size() - y.numel()
        whole = torch.as_strided(y, (around + y.numel(),), (1,), 0)
        if int(whole.isnan().sum()) != around:
            faults.append("a product wrote past its output")
    names = "y", "dx", "dnear", "dfar", *["dgains"] * len(gains), "dbias"
    for name, one, other, right in zip(names, *results, expected, strict=True):
        error = float((one.double() - right).norm() / right.norm())
        if not error <= TOLERANCE[x.dtype]:
            faults.append(f"{name} has a relative error of {error:.2g}")
        if not torch.equal(one, other):
            faults.append(f"{name} has other bits at the second run")
    return faults


def define(pair: Pair, x: Tensor, first: Tensor, last: Tensor, activated: bool) -> Tensor:
    """What the kernels compute, of x `(tokens, in_features)`, by einsum."""
    p, q, r, j, o = pair[:5]
    features = torch.nn.functional.pad(x, (0, p * j - pair.columns))
    near = torch.as_strided(first, (p, q, r, j), pair.near)
    h = torch.einsum("tpj,pqrj->tpqr", features.as_strided((len(x), p, j), (p * j, *pair.x)), near)
    h = torch.nn.functional.silu(h) / SILU_RMS if activated else h
    y = torch.einsum("tpqr,pqro->tqo", h, torch.as_strided(last, (p, q, r, o), pair.far))
    order = (0, 1, 2) if pair.y[0] > pair.y[1] else (0, 2, 1)
    return y.permute(order).flatten(1)[:, : pair.rows]


def _surround(x: Tensor) -> Tensor:
    """A copy of x with NaN before and after it."""
    buffer = x.new_full((2 * BORDER + prod(x.shape),), nan)
    inner = buffer[BORDER : BORDER + x.numel()].view(x.shape)
    return inner.copy_(x)
